"""Saving as one transaction: either the old files remain or the new ones are complete.

``outgoing`` describes the tensors to write, ``durable`` writes files and flushes them to the disk,
``staging`` renames a finished set of files into place, and ``beside`` keeps configuration and
tokenizer together with the weights they were saved with.
"""
