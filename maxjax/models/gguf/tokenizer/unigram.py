"""Unigram tokenizers of SentencePiece, from the metadata of a GGUF file ("t5") or of a ``tokenizer.model``.

Each token has a score, and a text is cut into the tokens with the largest sum of scores. The text is first
normalised by a table in the file (NFKC for most models).

Sources: ``llm_tokenizer_ugm`` of llama.cpp, ``SpmConverter`` of transformers 5.23, and sentencepiece's
``normalizer.cc`` and ``unigram_model.cc``.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ..metadata import MAX_CHARSMAP, Settings
from .tokens import (
    NORMAL,
    UNKNOWN,
    WORD,
    added_tokens,
    document,
    spaces_decoder,
    special_id,
    template,
    token_scores,
    token_types,
)

_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": WORD}
# Not Strip, which would remove newlines too. At the end, sentencepiece also removes ▁, which stands for spaces.
_END, _ENDS = (
    {"type": "Replace", "pattern": {"Regex": start + r"[ ▁]+\z"}, "content": ""}
    for start in ("", r"\A +|")
)
_SEVERAL = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}


def unigram(given: Settings) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` for a Unigram tokenizer.

    Raises:
        CheckpointFormatError: a key is missing or wrong.
    """
    tokens = given.items("tokens", str)
    scores = token_scores(given, len(tokens))
    if not tokens:
        raise given.wrong("tokens", "a token", "none", "is empty", is_text=True)
    types = token_types(given, len(tokens)) or [NORMAL] * len(tokens)
    named = {key: special_id(given, tokens, key) for key in ("bos", "eos", "unknown", "seperator")}
    unknown = named["unknown"]
    if unknown is None:
        unknown = types.index(UNKNOWN) if UNKNOWN in types else None
    prefix = given.flag("add_space_prefix", True)
    has_bytes = "<0x00>" in tokens
    before = named["bos"] if given.flag("add_bos_token", True) else None
    after = named["eos"] if given.flag("add_eos_token", True) else None
    pair = [i for i in (named["seperator"], before) if i is not None]
    around = None if before is None and after is None else template(
        tokens, before, after, second=pair[0] if pair else None, segments=False
    )  # fmt: skip
    return document(
        added_tokens(tokens, types),
        normalizer=normalizer(given, prefix),
        pre_tokenizer={
            "type": "Metaspace", "replacement": WORD, "split": True, "prepend_scheme": "never"
        },
        post_processor=around,
        decoder=_decoder(prefix, has_bytes),
        model={
            "type": "Unigram", "unk_id": unknown, "byte_fallback": has_bytes,
            "vocab": [list(pair) for pair in zip(tokens, map(float, scores), strict=True)],
        },
    )  # fmt: skip


def normalizer(given: Settings, prefix: bool, *, keeps_first: bool = False) -> dict[str, Any]:
    """SentencePiece's normalizer: the table in the file, the removal of spaces, then their replacement.

    With ``keeps_first`` one of the spaces at the beginning is kept, as the prefix that a later step adds.
    """
    steps: list[dict[str, Any]] = []
    if given.has("precompiled_charsmap") and (table := charsmap(given)):
        text = base64.b64encode(table).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": text})
    if given.flag("remove_extra_whitespaces", True):
        steps += [_END if keeps_first else _ENDS, _SEVERAL]
    if prefix:
        steps.append({"type": "Prepend", "prepend": WORD})
    return {"type": "Sequence", "normalizers": [*steps, _SPACE]}


def charsmap(given: Settings) -> bytes:
    """The table that normalises text, as the bytes that sentencepiece writes."""
    key = "precompiled_charsmap"
    given.check_length(key, given.length(key), MAX_CHARSMAP)
    found = given.metadata[given.prefix + key]
    if isinstance(found, bytes):  # of a tokenizer.model
        return found
    numbers = np.asarray(found)
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        if numbers.size:  # a list without items has no kind
            raise given.wrong(key, "a list of bytes", found)
        return b""
    if numbers.size and not (numbers.min() >= -128 and numbers.max() < 256):
        raise given.wrong(key, "bytes", "another number", is_text=True)
    return (numbers & 255).astype(np.uint8).tobytes()


def _decoder(prefix: bool, has_bytes: bool) -> dict[str, Any]:
    if has_bytes:
        return spaces_decoder(prefix)
    scheme = "always" if prefix else "never"
    return {"type": "Metaspace", "replacement": WORD, "prepend_scheme": scheme, "split": True}
