"""Checkpoints written by orbax, read without orbax.

``paths`` finds the step and the item, ``metadata`` reads the tree, ``maxjax_metadata`` reads what
maxjax adds to it, ``zarr`` reads the description of an array, ``store`` reads the key-value store
(TensorStore's OCDBT or plain files). ``reader`` reads the values, and combines all into a table of
tensors.
"""
