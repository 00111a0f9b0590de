"""Makes a GGUF file's metadata from a ``tokenizer.json``: BERT's, GPT-2's and Llama's kinds, and Unigram.

llama.cpp implements a way of splitting text for each name in "tokenizer.ggml.pre"; the names of the
patterns are in ``splits``.

Sources: ``get_vocab_base``, ``_set_vocab_llama_hf`` and ``BertModel.set_vocab`` of llama.cpp's
converter, ``SpecialVocab`` in gguf-py's ``vocab.py``; its llama-vocab.cpp for the patterns.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ....errors import CheckpointFormatError, CheckpointMismatchError, shown
from ..metadata import unsupported
from .bpe import ENDS
from .read import HF_JSON, PIECE
from .splits import bert_flags, pre_name, sequence, space_prefix
from .tokens import BYTE, CONTROL, NORMAL, SPECIAL, UNKNOWN, UNUSED, USER, WORD

_LOG = logging.getLogger("maxjax")
# As tokens.SPECIAL, for BERT, where [CLS] begins a text.
BERT_SPECIAL = {"cls": "bos", "sep": "seperator", "unk": "unknown", "pad": "padding",
                 "mask": "mask"}  # fmt: skip


def special_ids(
    ids: Mapping[str, int],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    names: Mapping[str, str],
) -> dict[str, int]:
    """The ids of special tokens, from the tokenizer's settings or else from the configuration."""
    found = {}
    for name, key in names.items():
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        index = ids.get(token) if isinstance(token, str) else None
        if index is None:
            given = config.get(f"{name}_token_id")
            given = given[0] if isinstance(given, list) and given else given
            is_there = type(given) is int and given >= 0
            index = given if is_there and (not ids or given in ids.values()) else None
        if index is None and names is BERT_SPECIAL:
            index = ids.get(f"[{name.upper()}]")
        if index is not None:
            found[f"{key}_token_id"] = index
    return found


def tokens_around(processor: Any) -> tuple[list[str], list[str]]:
    """Return the special tokens that a post-processor puts before a single text, and those after it.

    Example:
        >>> tokens_around({"type": "RobertaProcessing", "cls": ["<s>", 0], "sep": ["</s>", 2]})
        (['<s>'], ['</s>'])
    """
    kind = processor.get("type") if isinstance(processor, dict) else None
    before: list[str] = []
    after: list[str] = []
    if kind == "Sequence" and isinstance(processor.get("processors"), list):
        for one in processor["processors"]:
            first, last = tokens_around(one)
            before, after = first + before, after + last
    elif kind in ("RobertaProcessing", "BertProcessing"):
        for name, found in (("cls", before), ("sep", after)):
            pair = processor.get(name)
            if isinstance(pair, list) and pair and isinstance(pair[0], str):
                found.append(pair[0])
    elif kind == "TemplateProcessing" and isinstance(processor.get("single"), list):
        found = before
        for item in processor["single"]:
            token = item.get("SpecialToken") if isinstance(item, dict) else None
            if token is None:
                found = after
            elif isinstance(token, dict) and isinstance(token.get("id"), str):
                found.append(token["id"])
    return before, after


def _with_marks(
    found: dict[str, Any],
    tokenizer: Mapping[str, Any],
    ids: Mapping[str, int],
    ends: Sequence[int],
    path: Any,
) -> dict[str, Any]:
    """Return the ids of special tokens so that a text begins and ends as the post-processor has it.

    As in gguf-py, eos is the token after a text. The tokens that end an answer otherwise are eot and eom.
    """
    where = "" if path is None else f"{path}: "
    before, after = (
        [ids[text] for text in texts if text in ids]
        for texts in tokens_around(tokenizer.get("post_processor"))
    )
    if len(before) > 1 or len(after) > 1:
        _LOG.warning(
            "%stexts begin with %s special tokens and end with %s, and a GGUF file can say one of each",
            where, len(before), len(after),
        )  # fmt: skip
    if found.get("model") == "bert":  # llama.cpp adds both
        keys = ("bos", "seperator")
        marks = zip(keys, (before[:1], after[-1:]), strict=True)
        return found | {f"{key}_token_id": mark[0] for key, mark in marks if mark}
    named = found.get("eos_token_id", ends[0] if ends else None)
    found = {**found, "add_bos_token": bool(before), "add_eos_token": bool(after)}
    found |= {"bos_token_id": before[0]} if before else {}
    eos = after[-1] if after else named
    found |= {"eos_token_id": eos} if eos is not None else {}
    # llama.cpp, and reading here, know the other ones by their texts.
    known = {i for text, i in ids.items() if text in ENDS and i != named}
    others = [i for i in dict.fromkeys((named, *ends)) if i not in (None, eos) and i not in known]
    if len(others) > 2:
        _LOG.warning(
            "%sa GGUF file cannot say that these tokens end an answer: %s", where, others[2:]
        )
    return found | dict(zip(("eot_token_id", "eom_token_id"), others, strict=False))


def templates(settings: Mapping[str, Any], given: str | None, path: Any) -> dict[str, Any]:
    """The chat templates: one, or several with names."""
    listed = given if given is not None else settings.get("chat_template")
    if listed is None:
        return {}
    listed = [{"name": "default", "template": listed}] if isinstance(listed, str) else listed
    found: dict[str, Any] = {}
    names = []
    for item in listed if isinstance(listed, list) else [listed]:
        if not isinstance(item, dict):
            raise wrong("chat_template", "a string, or a list of objects", item, path)
        name, text = typed(item, "name", str, path), typed(item, "template", str, path)
        if name == "default":
            found["tokenizer.chat_template"] = text
        else:
            names.append(name)
            found[f"tokenizer.chat_template.{name}"] = text
    return {"tokenizer.chat_templates": names, **found} if names else found


def typed(of: Mapping[str, Any], key: str, kind: type, path: Any, default: Any = ...) -> Any:
    value = of.get(key)
    if value is None and default is not ...:
        return default
    if not isinstance(value, kind):
        raise wrong(key, f"a {kind.__name__}", value, path)
    return value


def wrong(key: str, expected: str, found: Any, path: Any) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"'{key}' of the tokenizer is wrong", path=path, expected=expected, found=shown(found)
    )


_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
# The score of a token that no merge makes: lower than all other scores.
_LAST_SCORE = -1e6


def gguf_tokenizer_metadata(
    tokenizer: Mapping[str, Any] | None,
    settings: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    vocab_size: int | None = None,
    chat_template: str | None = None,
    ends: Sequence[int] = (),
    keep_json: bool = True,
    path: Any = None,
) -> dict[str, Any]:
    """Makes the metadata of a GGUF file for a tokenizer.

    For a text without special tokens, llama.cpp returns the same tokens as the ``tokenizers``
    package. For Llama's kind, scores have the order of the merges, which for a SentencePiece
    vocabulary is the order of its own scores.

    Args:
        tokenizer: content of ``tokenizer.json``. None: the model has no tokenizer, which the metadata
            records, and the ids of special tokens are those of ``config``.
        settings: content of ``tokenizer_config.json``.
        config: content of ``config.json``.
        vocab_size: number of rows of the embedding table; rows without a token get placeholders.
        chat_template: content of ``chat_template.jinja``, which takes precedence over ``settings``.
        ends: the ids of the tokens that end an answer, by ``generation_config.json``.
        keep_json: whether to store the complete ``tokenizer.json`` too, under the key
            "tokenizer.huggingface.json", so that nothing in it is lost.
        path: path of the file, for messages.

    Raises:
        UnsupportedModelError: llama.cpp cannot run such a tokenizer; the message names the
            unsupported part.
        CheckpointMismatchError: there are more tokens than rows of the embedding table.
        CheckpointFormatError: the file is not a tokenizer.

    Example:
        >>> found = gguf_tokenizer_metadata(None, config={"eos_token_id": [7, 8]})
        >>> found
        {'tokenizer.ggml.model': 'none', 'tokenizer.ggml.eos_token_id': 7}
    """
    settings, config = settings or {}, config or {}
    if tokenizer is None:
        ids = special_ids({}, {}, config, SPECIAL)
        # Defaults of transformers may be beyond a small vocabulary.
        kept = {key: i for key, i in ids.items() if vocab_size is None or i < vocab_size}
        found: dict[str, Any] = {"model": "none"} | kept
    else:
        model = typed(tokenizer, "model", dict, path)
        kind = model.get("type") or ("BPE" if "merges" in model else None)
        tokens = _Vocabulary(tokenizer, model, vocab_size, path)
        known_ends = [i for i in ends if 0 <= i < len(tokens.texts)]
        if kind == "WordPiece":
            found = _wordpiece(tokenizer, tokens)
            found |= special_ids(tokens.ids, settings, config, BERT_SPECIAL)
            found = _with_marks(found, tokenizer, tokens.ids, (), path)
        elif kind == "BPE":
            is_llama = model.get("byte_fallback") is True
            found = (_sentencepiece if is_llama else _byte_level)(tokenizer, tokens)
            found |= special_ids(tokens.ids, settings, config, SPECIAL)
            found = _with_marks(found, tokenizer, tokens.ids, known_ends, path)
        elif kind == "Unigram":
            found = _unigram(tokenizer, tokens)
            found |= special_ids(tokens.ids, settings, config, SPECIAL)
            if "unknown_token_id" not in found and type(model.get("unk_id")) is int:
                found["unknown_token_id"] = model["unk_id"]
            found = _with_marks(found, tokenizer, tokens.ids, known_ends, path)
        else:
            raise unsupported(f"a tokenizer of type {shown(kind)} in a GGUF file", path)
    found = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    found |= templates(settings, chat_template, path)
    if tokenizer is not None and keep_json:
        found[HF_JSON] = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    return found


class _Vocabulary:
    """The vocabulary: ``texts`` and ``types`` by id, ``ids`` by text, and ``merges`` as pairs."""

    def __init__(
        self, tokenizer: Mapping[str, Any], model: Mapping[str, Any], size: int | None, path: Any
    ):
        self.model, self.path = model, path
        vocab = _numbered(model, path)
        added = typed(tokenizer, "added_tokens", list, path, [])
        self.ids: dict[str, int] = {}
        special: dict[str, bool] = {}
        for text, index in vocab.items():
            self._add(text, index)
        for item in added:
            if not isinstance(item, dict):
                raise wrong("added_tokens", "a list of objects", item, path)
            text = typed(item, "content", str, path)
            self._add(text, item.get("id"))
            special[text] = item.get("special") is True
        self.special = special
        count = max(self.ids.values(), default=-1) + 1
        if size is None:
            size = max(count, len(self.ids))
        if count > size:
            raise CheckpointMismatchError(
                "the tokenizer has more tokens than the embedding table has rows",
                path=path, expected=f"at most {size}", found=count,
            )  # fmt: skip
        self._number(size)

    def _add(self, text: str, index: Any) -> None:
        if type(index) is not int or not 0 <= index < 1 << 31:
            raise wrong("vocab", "a number for each token", index, self.path)
        if self.ids.setdefault(text, index) != index:
            raise wrong(
                "added_tokens", f"number {self.ids[text]} for {shown(text)}", index, self.path
            )

    def _number(self, size: int) -> None:
        """Fills ``texts`` and ``types``; ids without a token get placeholders."""
        if size > 4 * len(self.ids) + 100_000:  # no embedding table is so much larger
            raise wrong("vocab", f"numbers that fit {len(self.ids)} tokens", size, self.path)
        texts: list[str | None] = [None] * size
        for text, index in self.ids.items():
            if texts[index] is not None:
                raise wrong("vocab", "one token for each number", f"two for {index}", self.path)
            texts[index] = text
        unknown = self.model.get("unk_token")
        self.types = np.full(size, NORMAL, np.int32)
        self.texts: list[str] = []
        for index, text in enumerate(texts):
            if text is None:
                self.types[index], text = UNUSED, f"[PAD{index}]"
            elif text in self.special:
                self.types[index] = CONTROL if self.special[text] else USER
            self.texts.append(text)
        if isinstance(unknown, str) and unknown in self.ids and not self.special.get(unknown):
            self.types[self.ids[unknown]] = UNKNOWN

    @property
    def merges(self) -> list[tuple[str, str]]:
        """The merges as pairs; in files, a merge is a list of two tokens, or one text with a space."""
        found = []
        for item in typed(self.model, "merges", list, self.path):
            pair = item.split(" ") if isinstance(item, str) else item
            is_pair = isinstance(pair, list) and len(pair) == 2
            if not is_pair or not all(isinstance(part, str) for part in pair):
                raise wrong("merges", "pairs of tokens", item, self.path)
            found.append((pair[0], pair[1]))
        return found


def _numbered(model: Mapping[str, Any], path: Any) -> Mapping[str, int]:
    """The vocabulary as token → id; in files of Unigram it is a list of (token, score)."""
    if model.get("type") != "Unigram":
        return typed(model, "vocab", dict, path)
    found: dict[str, int] = {}
    for index, item in enumerate(typed(model, "vocab", list, path)):
        is_pair = isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)
        if not is_pair or type(item[1]) not in (int, float):
            raise wrong("vocab", "tokens with their scores", item, path)
        if found.setdefault(item[0], index) != index:
            raise wrong("vocab", "different tokens", item[0], path)
    return found


# --- the kinds ----------------------------------------------------------------------------------


def _wordpiece(tokenizer: Mapping[str, Any], tokens: _Vocabulary) -> dict[str, Any]:
    """BERT's kind: GGUF marks the tokens that begin a word, BERT those that continue one."""
    prefix = typed(tokens.model, "continuing_subword_prefix", str, tokens.path, PIECE)
    if prefix != PIECE:
        raise unsupported(f"pieces of words marked by {shown(prefix)} in a GGUF file", tokens.path)
    flags = bert_flags(tokenizer, tokens.path)
    texts = []
    for text, kind in zip(tokens.texts, tokens.types, strict=True):
        if kind in (CONTROL, UNUSED):
            texts.append(text)
        else:
            texts.append(text[len(prefix) :] if text.startswith(prefix) else WORD + text)
    # Unused tokens are written as control tokens, so that a reader does not take them for words.
    types = np.where(tokens.types == UNUSED, CONTROL, tokens.types).astype(np.int32)
    return {"model": "bert", "tokens": texts, "token_type": types} | flags


def _byte_level(tokenizer: Mapping[str, Any], tokens: _Vocabulary) -> dict[str, Any]:
    """GPT-2's kind: tokens of bytes, which are written as letters, and merges."""
    merges = tokens.merges
    if any(" " in part for pair in merges for part in pair):
        raise unsupported("a merge of tokens with a space in a GGUF file", tokens.path)
    pre = pre_name(tokenizer, tokens.model, tokens.path)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens.texts,
        "token_type": tokens.types,
        "merges": [f"{left} {right}" for left, right in merges],
    }


def _sentencepiece(tokenizer: Mapping[str, Any], tokens: _Vocabulary) -> dict[str, Any]:
    """Llama's kind: spaces are written as ▁, unknown text as bytes, and scores give the order of merges."""
    prefix = space_prefix(tokenizer, tokens.path)
    texts, types = list(tokens.texts), tokens.types.copy()
    unknown = tokens.model.get("unk_token")
    for index, text in enumerate(texts):
        if text == unknown:
            types[index] = UNKNOWN
        elif _BYTE_TOKEN.fullmatch(text):
            types[index] = BYTE
        elif types[index] == USER:
            texts[index] = text.replace(WORD, " ")  # these are looked for in the original text
    scores = np.full(len(texts), _LAST_SCORE, np.float32)
    for rank, pair in enumerate(tokens.merges):
        index = tokens.ids.get(pair[0] + pair[1])
        if index is not None and scores[index] == _LAST_SCORE:
            scores[index] = -rank
    return {
        "model": "llama",
        "pre": "default",
        "tokens": texts,
        "scores": scores,
        "token_type": types,
        "add_space_prefix": prefix,
    }


def _unigram(tokenizer: Mapping[str, Any], tokens: _Vocabulary) -> dict[str, Any]:
    """SentencePiece's Unigram: scores, and the table that normalises text."""
    steps = sequence(tokenizer.get("normalizer"), "normalizers")
    pre = sequence(tokenizer.get("pre_tokenizer"), "pretokenizers")
    tables = [step for step in steps if step.get("type") == "Precompiled"]
    kinds = {str(step.get("type")) for step in steps} - {
        "Precompiled",
        "Replace",
        "Strip",
        "Prepend",
    }
    kinds |= {str(step.get("type")) for step in pre} - {"WhitespaceSplit", "Metaspace"}
    if kinds or len(tables) > 1:
        raise unsupported(
            f"a Unigram tokenizer with {', '.join(sorted(kinds))[:80]} in a GGUF file", tokens.path
        )
    squeezes = any(
        step.get("type") in ("Strip", "WhitespaceSplit")
        or (step.get("type") == "Replace" and "{2,}" in str(step.get("pattern")))
        for step in (*steps, *pre)
    )
    prefix = any(step.get("type") == "Prepend" for step in steps) or any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in pre
    )
    scores, types = np.zeros(len(tokens.texts), np.float32), tokens.types.copy()
    for index, (text, score) in enumerate(tokens.model["vocab"]):
        scores[index] = score
        if _BYTE_TOKEN.fullmatch(text) and tokens.model.get("byte_fallback") is True:
            types[index] = BYTE
    unknown = tokens.model.get("unk_id")
    if type(unknown) is int and 0 <= unknown < len(types):
        types[unknown] = UNKNOWN
    found: dict[str, Any] = {
        "model": "t5", "pre": "default", "tokens": tokens.texts, "scores": scores, "token_type": types,
        "add_space_prefix": prefix, "remove_extra_whitespaces": squeezes,
    }  # fmt: skip
    if tables:
        try:
            table = base64.b64decode(str(tables[0].get("precompiled_charsmap")), validate=True)
        except (binascii.Error, ValueError):
            raise wrong("precompiled_charsmap", "base64", "other text", tokens.path) from None
        found["precompiled_charsmap"] = np.frombuffer(table, np.uint8)
    return found
