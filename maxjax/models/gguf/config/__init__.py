"""The configuration of a GGUF file: its metadata as a Hugging Face ``config.json``, and back.

``read`` makes the configuration, ``defaults`` writes the metadata with the defaults of each
architecture, ``rope`` handles rope scaling, ``llama_cpp`` lists the keys that llama.cpp reads.
"""
