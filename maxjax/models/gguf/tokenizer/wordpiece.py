"""Makes the content of a ``tokenizer.json`` from GGUF metadata of BERT's WordPiece tokenizer.

Sources: ``BertModel.set_vocab`` of llama.cpp's converter; for defaults, the WPM vocabulary in
llama.cpp's reader.
"""

from __future__ import annotations

import re
from typing import Any

from ....errors import CheckpointFormatError
from ..metadata import Settings
from .tokens import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER,
    WORD,
    added,
    document,
    special_id,
    template,
    token_types,
    vocabulary,
)

PIECE = "##"
# BERT's ids of special tokens, used if the file does not give them.
_DEFAULT_IDS = {"unknown": 100, "bos": 101, "seperator": 102, "padding": 0, "mask": 103}
_MAXWORD = 100  # BERT's limit: a longer word becomes the unknown token


def wordpiece(given: Settings) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` for a BERT tokenizer.

    Raises:
        CheckpointFormatError: a key is missing or wrong, or two tokens are the same.
    """
    pieces = given.items("tokens", str)
    types = _types(given, pieces)
    tokens = _spelled(pieces, types)
    vocab = vocabulary(tokens, given.path)
    unknown = _special(given, tokens, "unknown")
    if unknown is None:
        raise CheckpointFormatError(
            "there is no unknown token: 'tokenizer.ggml.unknown_token_id' is missing",
            path=given.path,
        )
    special = [i for i, type_ in enumerate(types) if type_ in (CONTROL, UNKNOWN, USER)]
    return document(
        [added(i, tokens[i], types[i] != USER) for i in special],
        normalizer=_normalizer(given, tokens, types),
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=_template(given, tokens),
        decoder={"type": "WordPiece", "prefix": PIECE, "cleanup": True},
        model={
            "type": "WordPiece",
            "unk_token": tokens[unknown],
            "continuing_subword_prefix": PIECE,
            "max_input_chars_per_word": _MAXWORD,
            "vocab": vocab,
        },
    )


def _types(given: Settings, tokens: list[str]) -> list[int]:
    """The type of each token; in a file without types, the special tokens are control, the others normal."""
    types = token_types(given, len(tokens))
    if types is None:
        named = {_special(given, tokens, key) for key in _DEFAULT_IDS}
        return [CONTROL if i in named else NORMAL for i in range(len(tokens))]
    return types


def _spelled(tokens: list[str], types: list[int]) -> list[str]:
    """Tokens as BERT spells them: GGUF marks the tokens that begin a word, BERT those that continue one."""
    if not any(token.startswith(WORD) for token in tokens):
        return tokens  # some writers keep BERT's spelling

    def spelled(token: str) -> str:
        return token[1:] if token.startswith(WORD) else PIECE + token

    return [
        token if type_ == CONTROL else spelled(token)
        for token, type_ in zip(tokens, types, strict=True)
    ]


def _normalizer(given: Settings, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """The normalizer. A null ``strip_accents`` follows ``lowercase``."""
    lowercase = given.flag("normalizer.lowercase", None)
    if lowercase is None:
        words = (
            token
            for token, type_ in zip(tokens, types, strict=True)
            if type_ not in (CONTROL, UNKNOWN) and not _is_reserved(token)
        )
        lowercase = not any(re.search("[A-Z]", word) for word in words)
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": given.flag("normalizer.strip_accents", None),
        "lowercase": lowercase,
    }


def _is_reserved(token: str) -> bool:
    """Whether a token is a placeholder, such as [unused1] or [PAD7], and not a word."""
    return re.fullmatch(r"\[[^\]]*\]", token) is not None


def _special(given: Settings, tokens: list[str], key: str) -> int | None:
    """The id of a special token, from the file or else BERT's usual one; None if there is none."""
    found = special_id(given, tokens, key)
    if found is None:
        usual = _DEFAULT_IDS[key]
        is_there = usual < len(tokens) and re.fullmatch(r"\[[A-Z]+\]", tokens[usual])
        return usual if is_there else None
    return found


def _template(given: Settings, tokens: list[str]) -> dict[str, Any]:
    """The post-processor that adds special tokens to a text or a pair: [CLS] a [SEP] b [SEP]."""
    # llama.cpp adds both, whatever add_bos_token and add_eos_token say.
    first = _special(given, tokens, "bos")
    if given.has("cls_token_id"):  # files of 2024 and before
        first = given.count("cls_token_id", minimum=0, maximum=len(tokens) - 1)
    key = (
        "eos" if given.has("eos_token_id") and not given.has("seperator_token_id") else "seperator"
    )
    return template(tokens, first, _special(given, tokens, key), second=None)
