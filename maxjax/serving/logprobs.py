"""Log-probabilities of tokens, in the forms of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..text.stream_decoders import byte_letters


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of a token, which may be a part of a character.

    Example:
        >>> from maxjax.text.tokenizer.tokenizer import load_tokenizer
        >>> tokenizer = load_tokenizer("tiny")
        >>> token_bytes(tokenizer, tokenizer.encode("7")[0])
        b'7'
    """
    text = tokenizer.decode([token], skip_special=False)
    if "\ufffd" not in text:
        return text.encode("utf-8", "surrogatepass")
    piece, letters = tokenizer.pieces([token])[0], byte_letters()
    if piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:-1], 16)])
    if all(one in letters for one in piece):
        return bytes(letters[one] for one in piece)
    return text.encode()


def _number(logprob: float) -> float:
    """The log-probability; JSON has no number for minus infinity."""
    return max(logprob, -9999.0)


def _one(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    data = token_bytes(tokenizer, token)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": _number(logprob),
        "bytes": list(data),
    }


def chat_logprobs(tokenizer: Any, found: Sequence[Any]) -> dict[str, Any]:
    """As ``/v1/chat/completions`` has them."""
    content = [
        {
            **_one(tokenizer, one.token, one.logprob),
            "top_logprobs": [_one(tokenizer, token, value) for token, value in one.top],
        }
        for one in found
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Any, found: Sequence[Any], start: int = 0) -> dict[str, Any]:
    """As ``/v1/completions`` has them; ``start`` is the number of characters before the first token."""
    tokens, values, tops, offsets = [], [], [], []
    for one in found:
        text = token_bytes(tokenizer, one.token).decode("utf-8", "replace")
        tokens.append(text)
        values.append(_number(one.logprob))
        tops.append(
            {
                token_bytes(tokenizer, token).decode("utf-8", "replace"): _number(value)
                for token, value in one.top
            }
        )
        offsets.append(start)
        start += len(text)
    return {
        "tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets,
    }  # fmt: skip
