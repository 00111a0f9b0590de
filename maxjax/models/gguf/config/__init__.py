"""Conversion between a GGUF file's metadata and a Hugging Face ``config.json``.

``read`` makes a ``config.json`` from metadata, ``families`` reads one for writing metadata, ``rope``
converts RoPE scaling in both directions, and ``llama_cpp`` lists the keys that llama.cpp reads.
"""
