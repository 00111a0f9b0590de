"""Tokenizers: ``maxjax.load_tokenizer`` and the class ``Tokenizer``.

``files`` finds the tokenizer of a checkpoint, ``vocab`` builds one from ``vocab.json`` and
``merges.txt``, ``added`` adds the added tokens, ``limits`` and ``patterns`` refuse files that would
take unbounded time or memory, ``tokenizer`` is the class.
"""
