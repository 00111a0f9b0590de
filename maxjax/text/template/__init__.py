"""Chat templates: Jinja programs from a file that nobody has checked, run within bounds.

``files`` finds the template of a checkpoint, ``sandbox`` limits what it may call, ``caps`` the size of
each call, ``budget`` the total, ``thread`` the time; ``render`` is the function.
"""
