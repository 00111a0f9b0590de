"""Interchange with models of other libraries: ``maxjax.interop.nnx`` is for flax nnx."""
