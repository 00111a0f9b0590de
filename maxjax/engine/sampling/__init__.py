"""Choosing the next token from logits.

``settings`` holds ``Sampling``, the user's options. ``penalties`` changes the logits by the tokens
so far, and ``draw`` removes tokens (top-k, top-p, min-p) and samples one of the rest for each
row. Each row has its own random key, so that a text does not depend on the rest of its batch.
"""
