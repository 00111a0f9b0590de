"""What is seen of a model while it runs, and what is put in its place: captures and patches.

``frames.py`` holds what is being observed in this thread, and ``tap``; ``places.py`` finds the places
that patterns name; ``captures.py`` is the mapping of what was captured; ``functions.py`` has the pure
functions ``captured`` and ``patched``, ``contexts.py`` the context managers ``capture`` and ``patch``.
"""
