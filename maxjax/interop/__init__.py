"""Other libraries' models: ``maxjax.interop.nnx`` is flax nnx."""
