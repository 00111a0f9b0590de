"""Interchange with models of other libraries: ``nnx`` for flax nnx, ``trees`` for equinox and
other pytrees, and ``torch_modules`` with ``maxjax.from_torch``."""
