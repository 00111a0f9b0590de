"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

``types`` lists the tensor types, ``values`` reads metadata values, and ``header`` reads the whole
header; ``reader`` opens files and split sets; ``writer`` writes files.
"""
