"""Captures record values inside a model while it runs, and patches replace them.

A call of an observed model runs on a marked copy of it, in a frame that records the values at the marked places.
Read in this order:

* ``places.py``: places in a model, and patterns of their names.
* ``plans.py``: what an observer asks for, and the keys of recorded values.
* ``patches.py``: what a patch may be, and the new value at a place.
* ``frames.py``: the frames of this thread, through which values pass; ``tap``.
* ``loops.py``: the same in the compiled loop of a LayerStack.
* ``functions.py``: the pure functions ``captured`` and ``patched``; one observed call.
* ``contexts.py``: the context managers ``capture`` and ``patch``.
* ``captures.py``: the mapping of captured values.
* ``programs.py``: observation of maxjax's own programs; ``recording.py``: their values, joined along tokens.
"""
