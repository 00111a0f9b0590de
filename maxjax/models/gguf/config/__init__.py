"""The configuration of a GGUF file: its metadata as a Hugging Face ``config.json``, and back.

``read`` makes the configuration from metadata, ``families`` reads one for writing metadata, ``rope``
converts RoPE scaling in both directions, and ``llama_cpp`` lists the keys that llama.cpp reads.
"""
