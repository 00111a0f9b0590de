"""Choosing the next token from logits.

``settings`` holds ``Sampling``, the user's options; ``penalties`` changes the logits by what was
written before, ``filters`` removes tokens (top-k, top-p, min-p), and ``draw`` takes one token
of each row with a key of its own, so that a text does not depend on its neighbours in a batch.
"""
