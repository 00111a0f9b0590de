"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

``types`` are the tensor types, ``values`` the metadata values, ``header`` the header with both;
``reader`` opens files and split sets; ``writer`` writes them.
"""
