"""The tokenizer of a GGUF file as a ``tokenizer.json``, and back.

``read`` chooses the kind; ``bpe`` and ``wordpiece`` build it; ``splits`` holds the regular
expressions that split text before merging, ``tokens`` the special tokens; ``write`` is the way back.
"""
