"""Reads Mistral's ``tekken.json`` without ``tokenizer.json``: byte-level BPE by the ranks of tokens.

Source: ``integrations/mistral/tokenizer.py`` of transformers 5.23, and mistral-common's ``Tekkenizer``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointFormatError, CheckpointLimitError
from ...models.config import read_object
from ...models.gguf.tokenizer.bpe import cuts
from ...models.gguf.tokenizer.splits import BYTE_LEVEL_DECODER
from ...models.gguf.tokenizer.tokens import added, template
from ..stream_decoders import byte_letters

FILE = "tekken.json"
# The first special tokens of files that do not list them.
_OLD = """<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]
[TOOL_CALLS]""".split()
_MAX_TOKENS = 1 << 20
_MAX_SPECIAL = 1 << 16


def read_tekken(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` for a ``tekken.json``.

    Args:
        path: the file.
        settings: the content of ``tokenizer_config.json``.

    Raises:
        CheckpointFormatError: the file is broken; the message names the key.
        CheckpointLimitError: there are too many tokens, or too many of them begin with other tokens.
    """
    document = read_object(path, "json_bytes")
    config, listed = document.get("config"), document.get("vocab")
    if not isinstance(config, dict) or not isinstance(listed, list):
        raise _wrong(path, "'config' or 'vocab' is missing")
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise _wrong(path, "'config.pattern' is not a text")
    special = _special(document, config, path)
    size = _count(config, "default_vocab_size", None, _MAX_TOKENS, path)
    ranks = _ranks(listed[: None if size is None else max(0, size - len(special))], path)
    numbers = {text: i for i, text in enumerate(special)}
    before = 1 if settings.get("add_bos_token") is not False and len(special) > 2 else None
    after = 2 if settings.get("add_eos_token") is True and len(special) > 2 else None
    around = None
    if before is not None or after is not None:
        around = template(special, before, after, second=before)
    return ranked_document(ranks, len(special), numbers, pattern, post_processor=around, path=path)


def ranked_document(
    ranks: Mapping[bytes, int],
    first: int,
    special: Mapping[str, int],
    pattern: str,
    *,
    post_processor: Any,
    path: Path,
) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` for byte-level BPE by the ranks of tokens.

    Args:
        ranks: the bytes of each token, and its rank.
        first: the id of the token with the rank 0.
        special: the special tokens and their ids.
        pattern: the regular expression that splits texts.
        post_processor: that of the document.
        path: the path of the file, for messages.

    Raises:
        CheckpointFormatError: a special token is a token of the vocabulary too.
        CheckpointLimitError: too many tokens begin with other tokens.
    """
    letters = {byte: letter for letter, byte in byte_letters().items()}
    spelled = {token: "".join(letters[b] for b in token) for token in ranks}
    vocab = {spelled[token]: rank + first for token, rank in ranks.items()}
    if doubled := [text for text in special if text in vocab]:
        raise _wrong(path, "a special token is a token of the vocabulary too", doubled[0])
    vocab |= special
    merges = [(spelled[a], spelled[b]) for a, b in _merges(ranks, path)]
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added(i, text, True) for text, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": post_processor,
        "decoder": BYTE_LEVEL_DECODER,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": True, "vocab": vocab, "merges": [list(pair) for pair in merges],
        },
    }  # fmt: skip


def _special(document: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> list[str]:
    """The special tokens by id; ids without a token have placeholders."""
    listed = document.get("special_tokens")
    if listed is None:
        found = dict(enumerate(_OLD))
    elif isinstance(listed, list) and all(isinstance(one, dict) for one in listed):
        if len(listed) > _MAX_SPECIAL:
            raise _many(path, "special tokens", _MAX_SPECIAL, len(listed))
        found = {one.get("rank"): one.get("token_str") for one in listed}
        if len(found) < len(listed) or set(found) != set(range(len(found))):
            raise _wrong(path, "the ranks of 'special_tokens' are not 0, 1, 2, …")
        if not all(isinstance(text, str) and text for text in found.values()):
            raise _wrong(path, "a 'token_str' of 'special_tokens' is not a text")
    else:
        raise _wrong(path, "'special_tokens' is not a list of objects")
    count = _count(config, "default_num_special_tokens", len(found), _MAX_SPECIAL, path)
    texts = [found.get(i, f"<SPECIAL_{i}>") for i in range(max(count, len(found)))]
    if len(set(texts)) < len(texts):
        raise _wrong(path, "a special token is there twice")
    return texts


def _ranks(listed: list[Any], path: Path) -> dict[bytes, int]:
    """The bytes of each token, and its rank."""
    if len(listed) > _MAX_TOKENS:
        raise _many(path, "tokens", _MAX_TOKENS, len(listed))
    found: dict[bytes, int] = {}
    for rank, one in enumerate(listed):
        text = one.get("token_bytes") if isinstance(one, dict) else None
        if not isinstance(text, str) or one.get("rank", rank) != rank:
            raise _wrong(path, f"the token {rank} of 'vocab' has no 'token_bytes', or another rank")
        try:
            token = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise _wrong(path, f"'token_bytes' of the token {rank} are not base64") from None
        if not token or found.setdefault(token, rank) != rank:
            raise _wrong(path, f"the token {rank} of 'vocab' is empty, or there twice")
    return found


def _merges(ranks: Mapping[bytes, int], path: Path) -> list[tuple[bytes, bytes]]:
    """The pairs of tokens that make a token, in the order of the token that they make."""
    pairs = list(cuts(ranks, path))
    pairs.sort(key=lambda pair: tuple(map(ranks.__getitem__, pair)))
    return [(left, right) for _, left, right in pairs]


def _count(config: Mapping[str, Any], key: str, default: Any, most: int, path: Path) -> Any:
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value:
        raise _wrong(path, f"'config.{key}' is not a count", str(value)[:60])
    if value > most:
        raise _many(path, f"tokens ('config.{key}')", most, value)
    return value


def _wrong(path: Path, problem: str, found: str | None = None) -> CheckpointFormatError:
    return CheckpointFormatError(problem, path=path, found=found)


def _many(path: Path, what: str, most: int, found: int) -> CheckpointLimitError:
    return CheckpointLimitError(
        f"there are too many {what}", path=path, expected=f"at most {most}", found=found
    )
