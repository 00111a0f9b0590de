"""Conversion of a checkpoint from one format into another: ``maxjax.checkpoint.convert``.

``source`` opens the checkpoint, ``to_gguf`` makes the tensors and metadata of a GGUF file,
``written`` counts bytes while they are written, and ``run`` is the function itself, which also
refuses a destination that would overwrite or lose something. Values are streamed: no tensor is held twice.
"""
