"""The types of tokens in GGUF files, and the entries of tokens in a ``tokenizer.json``.

Source: ``enum llama_token_type`` of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from ....errors import CheckpointFormatError, shown
from ..metadata import Settings, token_id

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
WORD = "▁"
# Special tokens: tokenizer_config.json's names without "_token" → GGUF's without "_token_id".
SPECIAL = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding",
    "mask": "mask",
}  # fmt: skip


def token_types(given: Settings, count: int) -> list[int] | None:
    """The type of each token; None if the file has no types."""
    return given.items("token_type", int, None, count)


def special_id(given: Settings, tokens: list[str], key: str) -> int | None:
    """The id of a special token; None if the file does not give it."""
    return token_id(given, key, len(tokens))


def token_scores(given: Settings, count: int) -> list[float]:
    """The score of each token."""
    scores = given.items("scores", float, count=count)
    if not all(map(math.isfinite, scores)):
        raise given.wrong("scores", "finite numbers", "one that is not", is_text=True)
    return scores


def vocabulary(tokens: list[str], path: Any) -> dict[str, int]:
    """Token → id, without empty tokens, which no text has.

    Raises:
        CheckpointFormatError: a token occurs twice.
    """
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if token and vocab.setdefault(token, i) != i:
            raise CheckpointFormatError(
                f"'tokenizer.ggml.tokens' has the token {shown(token)} twice",
                path=path,
                found=f"numbers {vocab[token]} and {i}",
            )
    return vocab


def added(index: int, token: str, special: bool, rstrip: bool = False) -> dict[str, Any]:
    """The entry of an added token, which the tokenizer looks for in the text before all other steps.

    Args:
        index: its id.
        token: its text.
        special: whether it is left out of decoded texts.
        rstrip: whether it takes the spaces behind it along.
    """
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": rstrip,
        "normalized": False,
        "special": special,
    }


def added_tokens(
    tokens: Sequence[str], types: Sequence[int], stripping: Collection[str] = ()
) -> list[dict[str, Any]]:
    """The entries of control tokens, of the unknown token, and of added tokens that are not runs of spaces.

    Args:
        tokens, types: tokens and their types, by id.
        stripping: tokens that take the spaces behind them along.
    """
    return [
        added(i, token, kind != USER, token in stripping)
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token and (kind in (CONTROL, UNKNOWN) or (kind == USER and token.strip(WORD)))
    ]


def document(added_tokens: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` that neither truncates nor pads."""
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens}
    order = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
    return head | {key: parts[key] for key in order}


def spaces_decoder(prefix: bool) -> dict[str, Any]:
    """The decoder of tokens with ▁ for spaces and tokens for bytes; ``prefix``: a text begins with a space."""
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": WORD}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def template(
    tokens: list[str],
    before: int | None,
    after: int | None,
    second: int | None,
    *,
    segments: bool = True,
) -> dict[str, Any]:
    """The post-processor that puts special tokens around a text, and around both texts of a pair.

    Args:
        tokens: tokens by id.
        before, after: ids of the tokens before and after a text, or None.
        second: id of the token before the second text of a pair, or None.
        segments: whether the second text of a pair is segment 1; otherwise both texts are segment 0.
    """

    def mark(index: int | None, segment: int) -> list[dict[str, Any]]:
        if index is None:
            return []
        return [{"SpecialToken": {"id": tokens[index], "type_id": segment}}]

    def sequence(name: str, segment: int, first: int | None) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": segment}}
        return [*mark(first, segment), text, *mark(after, segment)]

    single = sequence("A", 0, before)
    used = {index for index in (before, after, second) if index is not None}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *sequence("B", int(segments), second)],
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in sorted(used)
        },
    }
