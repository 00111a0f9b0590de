"""Conversion between the tensors of a GGUF file and tensors with Hugging Face's names and layouts.

``read`` makes Hugging Face's tensors, ``write`` those of a GGUF file, and ``types`` chooses encodings.
"""
