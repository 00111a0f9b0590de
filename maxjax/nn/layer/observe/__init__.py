"""Captures record values inside a model while it runs, and patches replace them.

``frames.py`` has the observations that are active in this thread, and ``tap``; ``places.py`` finds the places that
patterns match; ``captures.py`` has the mapping of captured values; ``functions.py`` has the pure functions
``captured`` and ``patched``, and ``contexts.py`` the context managers ``capture`` and ``patch``.
"""
