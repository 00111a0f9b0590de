"""Parts and forms of decode attention, the operation of ``kernels/decode_attention.py``.

``step.py`` rotates and writes the new token, ``blocks.py`` attends in ``jax.numpy`` up to the longest
sequence, ``triton.py`` on NVIDIA GPUs.
"""
