"""Floor 5. The tokenizer in a GGUF file → the content of a ``tokenizer.json``.

So far for BERT's WordPiece, which the ``tokenizers`` package then runs; and the chat templates,
which are there for all models. Below: metadata. Above: whoever opens a GGUF file as a model.

Sources: ``BertModel.set_vocab`` of llama.cpp's converter, ``Keys.Tokenizer`` in gguf-py's
``constants.py``; for defaults, the WPM vocabulary in llama.cpp's reader.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointFormatError, UserInputError, some
from .metadata import Settings

_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # tokenizer.ggml.token_type
_WORD = "▁"
_PIECE = "##"
# Where the special tokens of BERT lie, if the file does not say.
_DEFAULT_IDS = {"unknown": 100, "bos": 101, "seperator": 102, "padding": 0, "mask": 103}
_MAX_WORD = 100  # BERT's own: a longer word is unknown


def tokenizer_json(
    metadata: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` for the tokenizer in a GGUF file.

    Whether text becomes lower case, and so loses its accents, only newer files say. In others it
    does unless the vocabulary has upper-case words.

    Args:
        metadata: The file's key-value pairs, of which those in ``tokenizer.ggml`` are read.
        path: The file, for messages.

    Raises:
        NotImplementedError: The tokenizer is none of BERT's (``tokenizer.ggml.model``).
        CheckpointFormatError: A key is missing or wrong, or two tokens are the same.

    Example:
        >>> tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁embed", "ding"]
        >>> made = tokenizer_json({
        ...     "tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens,
        ...     "tokenizer.ggml.token_type": [3, 3, 3, 3, 1, 1],
        ...     "tokenizer.ggml.unknown_token_id": 1, "tokenizer.ggml.bos_token_id": 2,
        ...     "tokenizer.ggml.seperator_token_id": 3})
        >>> list(made["model"]["vocab"])[4:]
        ['embed', '##ding']
    """
    given = Settings(metadata, "tokenizer.ggml.", path)
    kind = given.text("model")
    if kind != "bert":
        raise given.unsupported(
            f"the tokenizer {kind[:80]!r} (tokenizer.ggml.model; so far there is 'bert')"
        )
    stored = given.items("tokens", str)
    types = _types(given, stored)
    tokens = _spelled(stored, types)
    vocab = _vocabulary(tokens, path)
    unknown = _special(given, tokens, "unknown")
    if unknown is None:
        raise CheckpointFormatError(
            "no token for what is unknown: 'tokenizer.ggml.unknown_token_id' is missing", path=path
        )
    special = [i for i, type_ in enumerate(types) if type_ in (_CONTROL, _UNKNOWN, _USER)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens[i], types[i] != _USER) for i in special],
        "normalizer": _normalizer(given, tokens, types),
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _template(given, tokens),
        "decoder": {"type": "WordPiece", "prefix": _PIECE, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": tokens[unknown],
            "continuing_subword_prefix": _PIECE,
            "max_input_chars_per_word": _MAX_WORD,
            "vocab": vocab,
        },
    }


def chat_template(
    metadata: Mapping[str, Any],
    name: str | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
) -> str | None:
    """The Jinja template of a chat, None where the file has none.

    Args:
        metadata: The file's key-value pairs.
        name: One of several, e.g. "tool_use"; by default the one that has no name.
        path: The file, for messages.

    Raises:
        UserInputError: There is none of that name; lists those that there are.
        CheckpointFormatError: It is no string.

    Example:
        >>> templates = {"tokenizer.chat_template": "a", "tokenizer.chat_template.rag": "b"}
        >>> chat_template(templates), chat_template(templates, "rag"), chat_template({})
        ('a', 'b', None)
    """
    given = Settings(metadata, "tokenizer.", path)
    if name is None or (name == "default" and not given.has("chat_template.default")):
        return given.text("chat_template", None)
    if not given.has(f"chat_template.{name}"):
        start = "tokenizer.chat_template."
        known = [key[len(start) :] for key in metadata if key.startswith(start)]
        there = f"there are {some(known)}" if known else "there are none with a name"
        raise UserInputError(f"no chat template is called {name!r}: {there}")
    return given.text(f"chat_template.{name}")


# --- WordPiece --------------------------------------------------------------------------------


def _types(given: Settings, tokens: list[str]) -> list[int]:
    """The type of each token; a file without types has those that its keys name as control."""
    types = given.items("token_type", int, None)
    if types is None:
        named = {_special(given, tokens, key) for key in _DEFAULT_IDS}
        return [_CONTROL if i in named else 1 for i in range(len(tokens))]
    if len(types) != len(tokens):
        raise given.wrong(
            "token_type", f"{len(tokens)} values", len(types), "is of another length", shown=True
        )
    return types


def _spelled(tokens: list[str], types: list[int]) -> list[str]:
    """Tokens as BERT spells them: GGUF marks the beginnings of words, BERT what goes on."""
    if not any(token.startswith(_WORD) for token in tokens):
        return tokens  # some writers leave BERT's spelling

    def spelled(token: str) -> str:
        return token[1:] if token.startswith(_WORD) else _PIECE + token

    return [
        token if type_ == _CONTROL else spelled(token)
        for token, type_ in zip(tokens, types, strict=True)
    ]


def _vocabulary(tokens: list[str], path: Any) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if vocab.setdefault(token, i) != i:
            raise CheckpointFormatError(
                f"'tokenizer.ggml.tokens' has the token {token[:80]!r} twice",
                path=path,
                found=f"numbers {vocab[token]} and {i}",
            )
    return vocab


def _normalizer(given: Settings, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """What is done to a text first. A null for accents means: as for the case."""
    lowercase = given.flag("normalizer.lowercase", None)
    if lowercase is None:
        words = (
            token
            for token, type_ in zip(tokens, types, strict=True)
            if type_ not in (_CONTROL, _UNKNOWN) and not _is_reserved(token)
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
    """A place that is kept free, such as [unused1] or [PAD7], and no word."""
    return re.fullmatch(r"\[[^\]]*\]", token) is not None


def _special(given: Settings, tokens: list[str], key: str) -> int | None:
    """The id of a special token: as the file says, else where BERT has it; None if not there."""
    found = given.count(f"{key}_token_id", None, minimum=0, maximum=len(tokens) - 1)
    if found is None:
        usual = _DEFAULT_IDS[key]
        is_there = usual < len(tokens) and re.fullmatch(r"\[[A-Z]+\]", tokens[usual])
        return usual if is_there else None
    return found


def _added(index: int, token: str, special: bool) -> dict[str, Any]:
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _template(given: Settings, tokens: list[str]) -> dict[str, Any]:
    """What stands around a text and between a pair: [CLS] a [SEP] b [SEP]."""
    # llama.cpp puts both there whatever add_bos_token and its like say.
    first = _special(given, tokens, "bos")
    if given.has("cls_token_id"):  # files of 2024 and before
        first = given.count("cls_token_id", minimum=0, maximum=len(tokens) - 1)
    key = (
        "eos" if given.has("eos_token_id") and not given.has("seperator_token_id") else "seperator"
    )
    last = _special(given, tokens, key)

    def mark(index: int | None, segment: int) -> list[dict[str, Any]]:
        if index is None:
            return []
        return [{"SpecialToken": {"id": tokens[index], "type_id": segment}}]

    def text(which: str, segment: int) -> list[dict[str, Any]]:
        return [{"Sequence": {"id": which, "type_id": segment}}]

    single = [*mark(first, 0), *text("A", 0), *mark(last, 0)]
    used = {index for index in (first, last) if index is not None}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *text("B", 1), *mark(last, 1)],
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in sorted(used)
        },
    }
