"""The GGUF tables of single families; a file holds those of one or more related architectures of llama.cpp.

A table describes how GGUF files name tensors and settings. A family refers to its table by ``gguf=``. The
functions of a table take any configuration object, so that no file here imports a family. Llama, Qwen 2 and
3, Gemma 1 to 3, GPT-2 and BERT have no table; ``names.py`` and ``config/read.py`` describe them.
"""
