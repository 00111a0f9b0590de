"""Makes the content of a ``tokenizer.json`` from the tokenizer in a GGUF file.

The ``tokenizers`` package then runs it. ``wordpiece`` builds BERT's kind, ``bpe`` GPT-2's and Llama's,
and ``unigram`` T5's. Chat templates and special tokens, which all kinds have, are read here.

Sources: ``Keys.Tokenizer`` in gguf-py's ``constants.py``, docs/gguf.md of ggml.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ....errors import CheckpointFormatError, UserInputError, shown, some
from ....storage.strict_json import load_json
from ..metadata import MAX_ADDED, MAX_TOKENS, Settings
from .bpe import ENDS, byte_level, merged_pieces, sentencepiece
from .tokens import CONTROL, SPECIAL, UNKNOWN, USER, special_id
from .unigram import unigram
from .wordpiece import PIECE as PIECE
from .wordpiece import wordpiece

HF_JSON = "tokenizer.huggingface.json"
"""The metadata key of a complete ``tokenizer.json``, as in docs/gguf.md of ggml."""

# tokenizer.ggml.model → the function that builds the content.
_KINDS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "bert": wordpiece,
    "gpt2": byte_level,
    "gemma4": merged_pieces,
    "llama": sentencepiece,
    "t5": unigram,
}


def tokenizer_json(
    metadata: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Makes the content of a ``tokenizer.json`` for the tokenizer in a GGUF file.

    A complete ``tokenizer.json`` in the file is returned unchanged. Otherwise tokenizers of the kinds "bert",
    "gpt2", "llama", "gemma4" and "t5" are rebuilt. Only newer files of "bert" say whether text is lowercased and
    its accents removed. For older files it is, unless the vocabulary has upper-case words.

    Args:
        metadata: key-value pairs of the file, of which those below ``tokenizer`` are read.
        path: path of the file, for messages.

    Raises:
        UnsupportedModelError: the tokenizer is of another kind (``tokenizer.ggml.model``), or
            splits text in an unknown way (``tokenizer.ggml.pre``); the message names it.
        CheckpointFormatError: a key is missing or wrong, or two tokens are the same.
        CheckpointLimitError: there are too many tokens, merges or added tokens, or one is too long.

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
    if HF_JSON in metadata:
        return _kept(metadata, path)
    given = Settings(metadata, "tokenizer.ggml.", path)
    kind = given.text("model")
    if kind not in _KINDS:
        raise given.unsupported(
            f"the tokenizer {shown(kind)} (tokenizer.ggml.model; maxjax supports {some(list(_KINDS))})"
        )
    _check_counts(given)
    return _KINDS[kind](given)


def _check_counts(given: Settings) -> None:
    """Compares all lengths with their limits and with one another, before anything is built from the lists."""
    count = given.length("tokens")
    for key in ("tokens", "merges"):
        given.check_length(key, given.length(key), MAX_TOKENS)
    for key in ("scores", "token_type"):
        value = given.metadata.get(given.prefix + key)
        if count and isinstance(value, np.ndarray) and len(value) != count:
            problem = "is of another length"
            raise given.wrong(key, f"{count} values", len(value), problem, is_text=True)
    types = np.asarray(given.metadata.get(f"{given.prefix}token_type", ()))
    if types.dtype.kind in "iu":
        added = int(np.isin(types, (UNKNOWN, CONTROL, USER)).sum())
        given.check_length("token_type", added, MAX_ADDED)


def chat_template(
    metadata: Mapping[str, Any],
    name: str | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
) -> str | None:
    """The Jinja chat template; None if the file has none.

    Args:
        metadata: key-value pairs of the file.
        name: name of one of several templates, such as "tool_use"; by default the template without a name.
        path: path of the file, for messages.

    Raises:
        UserInputError: there is no template of that name; the message lists the names.
        CheckpointFormatError: the template is not a string.

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
        others = some(known) if known else "no template with a name"
        raise UserInputError(f"there is no chat template {name!r}: the file has {others}")
    return given.text(f"chat_template.{name}")


def special_tokens(
    metadata: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
) -> dict[str, str]:
    """The special tokens by their names in a ``tokenizer_config.json``: "bos_token" → "<s>".

    Raises:
        CheckpointFormatError: an id is not that of a token.

    Example:
        >>> special_tokens({"tokenizer.ggml.tokens": ["<s>", "a"], "tokenizer.ggml.bos_token_id": 0})
        {'bos_token': '<s>'}
    """
    given = Settings(metadata, "tokenizer.ggml.", path)
    tokens = given.items("tokens", str, [])
    found = {}
    for name, key in SPECIAL.items():
        index = special_id(given, tokens, key)
        if index is not None:
            found[f"{name}_token"] = tokens[index]
    return found


def end_ids(
    metadata: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
) -> tuple[int, ...]:
    """The ids of tokens that end generation: eos, eot, eom, and those that llama.cpp treats as such.

    Raises:
        CheckpointFormatError: an id is not that of a token.

    Example:
        >>> end_ids({"tokenizer.ggml.tokens": ["</s>", "<|im_end|>"], "tokenizer.ggml.eos_token_id": 0})
        (0, 1)
    """
    given = Settings(metadata, "tokenizer.ggml.", path)
    tokens = given.items("tokens", str, [])
    if not tokens:  # the tokenizer is beside the file
        return ()
    found = [special_id(given, tokens, key) for key in ("eos", "eot", "eom")]
    ends = ENDS
    if {"<|return|>", "<|call|>"} <= set(tokens):  # gpt-oss: <|end|> ends a part
        ends = ENDS - {"<|end|>"}
    found += [index for index, token in enumerate(tokens) if token in ends]
    return tuple(dict.fromkeys(index for index in found if index is not None))


def padding_id(metadata: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None) -> int:
    """The id of the padding token; 0 if the file names none."""
    given = Settings(metadata, "tokenizer.ggml.", path)
    tokens = given.items("tokens", str, [])
    return special_id(given, tokens, "padding") or 0 if tokens else 0


def _kept(metadata: Mapping[str, Any], path: Any) -> dict[str, Any]:
    """The complete ``tokenizer.json`` in a file's metadata."""
    text = Settings(metadata, path=path).text(HF_JSON)
    where = HF_JSON if path is None else f"{os.fspath(path)}: {HF_JSON}"
    found = load_json(text.encode("utf-8", "surrogateescape"), name=where)
    if not isinstance(found, dict):
        raise CheckpointFormatError(
            f"metadata key '{HF_JSON}' is not an object", path=path, found=type(found).__name__
        )
    return found
