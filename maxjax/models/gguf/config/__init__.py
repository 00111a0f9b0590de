"""The configuration of a GGUF file: its metadata as a Hugging Face ``config.json``, and back.

``read`` makes the configuration, ``families`` has one read by its model family for those who write
metadata, ``rope`` handles rope scaling both ways, ``llama_cpp`` lists the keys that llama.cpp reads.
"""
