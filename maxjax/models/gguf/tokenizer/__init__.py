"""Conversion between the tokenizer of a GGUF file and a ``tokenizer.json``.

``read`` chooses the kind; ``bpe``, ``wordpiece`` and ``unigram`` build the ``tokenizer.json``; ``splits``
holds the regular expressions that split text, ``tokens`` the token types; ``write`` makes the metadata.
"""
