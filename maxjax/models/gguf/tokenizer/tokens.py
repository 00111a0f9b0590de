"""Tokens as GGUF has them: their types, and how a ``tokenizer.json`` lists them.

Source: ``enum llama_token_type`` of llama.cpp.
"""

from __future__ import annotations

from typing import Any

from ....errors import CheckpointFormatError

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
WORD = "▁"


def vocabulary(tokens: list[str], path: Any) -> dict[str, int]:
    """Token → id; CheckpointFormatError if a token occurs twice."""
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if vocab.setdefault(token, i) != i:
            raise CheckpointFormatError(
                f"'tokenizer.ggml.tokens' has the token {token[:80]!r} twice",
                path=path,
                found=f"numbers {vocab[token]} and {i}",
            )
    return vocab


def added(index: int, token: str, special: bool) -> dict[str, Any]:
    """The entry of an added token, which is found in the text before any other step."""
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
