"""GGUF files of single families: for each architecture of llama.cpp, or kin of them, the tables of a file.

A table says how files name tensors and settings; the family names it, ``DecoderFamily(gguf=…)``. The functions
of a table take a family's configuration as it is, so that nothing here imports a family. Llama, Qwen 2 and
3, Gemma 1 to 3, GPT-2 and BERT have no table: ``names.py`` and ``config/read.py`` know them.
"""
