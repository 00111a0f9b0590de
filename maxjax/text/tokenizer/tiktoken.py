"""Reads tiktoken's files without ``tokenizer.json``, as Kimi's and Llama 3's: byte-level BPE by the ranks of tokens.

Each line is a token in base64 and its rank, which is its id. Special tokens are in ``tokenizer_config.json``.

Source: ``TikTokenConverter`` and ``_convert_from_tiktoken`` of transformers 5.24.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ...errors import CheckpointFormatError, CheckpointLimitError
from ...models.gguf.tokenizer.splits import KIMI, LLAMA3
from ...storage.files import open_regular, read_whole
from .added import CONFIG
from .limits import MAX_ADDED
from .tekken import ranked_document

FILE = "tiktoken.model"
_MAX_BYTES = 24 << 20
_MAX_TOKENS = 1 << 20
# The longest token of a published file has 128 bytes.
_MAX_LINE = 1024


def read_tiktoken(path: Path, settings: Mapping[str, Any], is_kimi: bool) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` for a file of tiktoken.

    Args:
        path: the file.
        settings: the content of ``tokenizer_config.json``, whose ``added_tokens_decoder`` has the special tokens.
            Ids without one between them and the file's tokens have placeholders, as in transformers.
        is_kimi: whether texts are split as by Kimi's own tokenizer; if not, as by Llama 3's.

    Raises:
        CheckpointFormatError: a line is not a token and its rank.
        CheckpointLimitError: the file or a line is too long, or has too many tokens.
    """
    ranks = _ranks(path)
    listed = settings.get("added_tokens_decoder")
    listed = listed if isinstance(listed, Mapping) else {}
    texts: dict[int, str] = {}
    for number, token in listed.items():
        content = token.get("content") if isinstance(token, Mapping) else token
        if str(number).isascii() and str(number).isdigit() and isinstance(content, str):
            texts[int(number)] = content
    last = max(texts, default=0)
    if last - len(ranks) > MAX_ADDED:
        raise CheckpointLimitError(
            "there are too many added tokens", path=path.parent / CONFIG,
            expected=f"at most {MAX_ADDED}", found=last - len(ranks),
        )  # fmt: skip
    special = {
        texts.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), max(last, -1) + 1)
    }
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True,
    }  # fmt: skip
    return ranked_document(
        ranks, 0, special, KIMI if is_kimi else LLAMA3, post_processor=byte_level, path=path
    )


def is_tiktoken(path: Path) -> bool:
    """Whether a file begins with a token in base64 and its rank, as Llama 3's ``tokenizer.model`` does."""
    with closing(open_regular(path)) as file:
        first = file.pread(0, min(file.size, _MAX_LINE)).split(b"\n")[0].split(b" ")
    return len(first) == 2 and first[1].isdigit()


def _ranks(path: Path) -> dict[bytes, int]:
    """The bytes of each token, and its rank."""
    with closing(open_regular(path)) as file:
        if file.size > _MAX_BYTES:
            raise CheckpointLimitError(
                "the list of tokens is too long", path=path,
                expected=f"at most {_MAX_BYTES} bytes", found=f"{file.size} bytes",
            )  # fmt: skip
        data = read_whole(file)
    if (count := data.count(b"\n")) > _MAX_TOKENS:
        raise CheckpointLimitError(
            "there are too many tokens", path=path, expected=f"at most {_MAX_TOKENS}", found=count
        )
    found: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines()):
        if not line:
            continue
        text, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            token = b""
        if not token or len(line) > _MAX_LINE or not rank.isdigit() or int(rank) != len(found):
            raise CheckpointFormatError(
                f"line {number + 1} is not a token in base64 and its rank", path=path,
                expected=f"a token of the rank {len(found)}", found=repr(bytes(line[:40])),
            )  # fmt: skip
        if token in found:
            raise CheckpointFormatError(f"the token of line {number + 1} is there twice", path=path)
        found[token] = len(found)
    if not found:
        raise CheckpointFormatError("there are no tokens", path=path)
    return found
