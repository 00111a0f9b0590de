"""PyTorch files: zip archives and the older single-stream format. No pickle is executed.

``pickle_machine`` runs a pickle's opcodes over a fixed list of types, ``pickles`` is its entry,
``names`` the globals that are known, ``tensors`` the tensors, ``tree`` the names that nested
dicts give them; ``legacy`` reads files from before PyTorch 1.6; ``reader`` opens either.
"""
