"""Interchange with models of other libraries: ``nnx`` for flax nnx, ``trees`` for equinox and
other pytrees, and ``maxjax.from_torch``."""
