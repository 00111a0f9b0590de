"""A zip reader that checks every length.

``directory`` validates the list of members, ``deflate`` decompresses, ``archive`` combines both.
"""
