"""Checkpoints written by orbax, read without orbax.

``paths`` finds the step and item, ``metadata`` reads the tree, ``maxjax_metadata`` what maxjax
added to it, ``zarr`` the description of an array, ``store`` the key-value store (TensorStore's
OCDBT or files), ``chunks`` the values; ``reader`` makes a table of tensors of them.
"""
