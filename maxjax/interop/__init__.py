"""Floor 6. Other libraries' models: ``maxjax.interop.nnx`` is flax nnx."""
