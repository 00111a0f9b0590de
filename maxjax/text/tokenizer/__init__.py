"""Tokenizers: ``maxjax.load_tokenizer`` and the class ``Tokenizer``.

``tokenizer`` has the class. ``files`` reads the tokenizer of a checkpoint directory, ``vocab`` builds
one from ``vocab.json`` and ``merges.txt``, and ``added`` handles the added tokens. ``limits`` and
``patterns`` refuse files that would take unbounded time or memory.
"""
