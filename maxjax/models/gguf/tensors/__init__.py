"""The tensors of a GGUF file under Hugging Face's names and layouts, and back.

``read`` names them, ``write`` prepares the values for llama.cpp, ``types`` chooses block types.
"""
