"""Parts and forms of decode attention, the operation of ``kernels/decode_attention.py``.

``step.py`` rotates and writes the new token. ``blocks.py`` computes the attention in ``jax.numpy``, up to
the length of the longest sequence; ``triton.py`` computes it on NVIDIA GPUs.
"""
