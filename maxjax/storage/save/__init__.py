"""Saving as one transaction: either the old files remain or the new ones are complete.

``outgoing`` describes tensors to write, ``durable`` writes and synchronises files, ``staging``
renames a finished set into place, ``beside`` keeps configuration and tokenizer with the weights
that they were saved with.
"""
