"""The metadata that maxjax adds to its orbax checkpoints, for what orbax cannot store.

Orbax stores only arrays, and no empty ones. Quantised blocks are saved as their bytes; their kind is
recorded in the checkpoint's custom metadata, with a checksum, together with empty arrays, the
implementations of random keys, and leaves that are not arrays.

    {"maxjax": {"version": 1, "encodings": {"model": {"w": "Q4_K"}}, …, "crc32": "0011aabb"}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...dtype import DType
from ...errors import CheckpointCorruptError, CheckpointFormatError
from ..blocks import KEPT, layout_of
from ..crc32 import crc32
from ..entry import TensorEntry
from ..limits import Limits
from ..strict_json import invalid, load_json
from .metadata import CHECKPOINT

_KEY = "maxjax"
_VERSION = 1
_MAX_DIMS = 32


# --- writing ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Extras:
    """The content of one tree in addition to its arrays.

    Attributes:
        plain: name → leaf that is not an array.
        encodings: name → kind of the quantised blocks.
        empty: name → dtype and shape of an empty array, which orbax does not accept.
        keys: name → implementation of a random key.
    """

    plain: dict[str, Any] = field(default_factory=dict)
    encodings: dict[str, str] = field(default_factory=dict)
    empty: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def custom_metadata(trees: Mapping[str, Extras]) -> dict[str, Any]:
    """The custom metadata passed to orbax for a checkpoint of these trees."""
    content: dict[str, Any] = {
        "version": _VERSION,
        "items": sorted(trees),
        "encodings": {name: tree.encodings for name, tree in trees.items() if tree.encodings},
        "empty": {name: tree.empty for name, tree in trees.items() if tree.empty},
        "keys": {name: tree.keys for name, tree in trees.items() if tree.keys},
        "plain": {
            name: {leaf: [type(value).__name__, _text(value)] for leaf, value in tree.plain.items()}
            for name, tree in trees.items()
            if tree.plain
        },
    }
    return {_KEY: {**content, "crc32": f"{_sum(content):08x}"}}


def _sum(content: Mapping[str, Any]) -> int:
    """The checksum of the content, excluding its own checksum field."""
    rest = {key: value for key, value in content.items() if key != "crc32"}
    return crc32(json.dumps(rest, sort_keys=True).encode())


def _text(value: Any) -> str:
    """A leaf that is not an array, as text from which it can be restored exactly."""
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str) else repr(value)


# --- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MaxjaxMetadata:
    """maxjax's metadata of one tree of a checkpoint; empty if another program wrote the checkpoint.

    Attributes:
        path: file that contains the metadata.
        is_ours: whether maxjax wrote the checkpoint.
        has_tree: whether the tree was saved; orbax itself does not store a completely empty one.
        encodings: name of a tensor → kind of its quantised blocks.
        keys: name of a tensor → implementation of the random key whose data it holds.
        empty: entries of the empty tensors.
    """

    path: str
    is_ours: bool = False
    has_tree: bool = False
    encodings: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    empty: tuple[TensorEntry, ...] = ()
    _plain: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Name → leaf that is not an array.

        Raises:
            CheckpointFormatError: a text is not the text of a value of its type.
        """
        return {name: self._value(name, found) for name, found in self._plain.items()}

    def _value(self, name: str, found: Any) -> Any:
        kind, text = found if isinstance(found, list) and len(found) == 2 else (None, found)
        if isinstance(text, str) and kind in _VALUES:
            try:
                return _VALUES[kind](text)
            except (KeyError, ValueError):
                pass
        raise CheckpointFormatError(
            "not a value of its type", path=self.path, tensor=name, expected=kind, found=text
        )

    def check_names(self, names: set[str]) -> None:
        """Raises CheckpointFormatError if a tensor that the metadata names does not exist."""
        for name in self.encodings:
            if name not in names:
                raise invalid(self.path, _KEY, "tensors of the tree", name, name)
        for entry in self.empty:
            if entry.name in names:
                raise invalid(self.path, "empty", "no tensor of the tree", entry.name, entry.name)

    def applied(self, entry: TensorEntry) -> TensorEntry:
        """The entry with its encoding.

        Raises:
            CheckpointFormatError: the tensor is not stored as bytes of such blocks.
        """
        encoding = self.encodings.get(entry.name)
        if encoding is None:
            return entry
        block = layout_of(encoding).nbytes
        if entry.dtype is not DType.uint8 or not entry.shape or entry.shape[-1] % block:
            raise CheckpointFormatError(
                "the tensor is not stored as the checkpoint's metadata says",
                path=self.path,
                tensor=entry.name,
                expected=f"uint8 rows of blocks of {block} bytes ({encoding})",
                found=f"{entry.dtype.name} {list(entry.shape)}",
            )
        return entry._replace(encoding=encoding)


# Type of a leaf that is not an array → the function that restores it from text.
_VALUES = {
    "str": str,
    "bytes": bytes.fromhex,
    "bool": {"True": True, "False": False}.__getitem__,
    "int": int,
    "float": float,
    "complex": complex,
}


def read_maxjax_metadata(
    metadata: Mapping[str, str],
    checkpoint: str,
    item: str,
    limits: Limits | None = None,
    *,
    require_checksum: bool = False,
) -> MaxjaxMetadata:
    """Reads maxjax's metadata of one tree from the custom metadata of a checkpoint.

    Args:
        metadata: custom metadata.
        checkpoint: directory of the checkpoint.
        item: name of the tree.
        limits: limits for its JSON.
        require_checksum: whether content without a checksum is refused.

    Raises:
        CheckpointFormatError: the content is not what maxjax writes.
        CheckpointCorruptError: the content does not match its checksum.
    """
    path = os.path.join(checkpoint, CHECKPOINT)
    if _KEY not in metadata:
        return MaxjaxMetadata(path)
    text = metadata[_KEY].encode(errors="replace")
    document = load_json(text, limits=limits, name=path)
    if not isinstance(document, dict):
        raise invalid(path, _KEY, "an object", document)
    if require_checksum or "crc32" in document:
        _check_sum(document, path)
    if document.get("version") != _VERSION:
        raise invalid(path, f"{_KEY}: version", str(_VERSION), document.get("version"))
    items = document.get("items", [])
    if not isinstance(items, list):
        raise invalid(path, "items", "a list", items)
    return MaxjaxMetadata(
        path,
        True,
        item in items,
        _encodings(document, item, path),
        _texts(document, "keys", item, path),
        tuple(_empty(document, item, path)),
        _part(document, "plain", item, path),
    )


def _check_sum(document: dict[str, Any], path: str) -> None:
    """Compares the checksum in the document with that of the rest."""
    found = f"{_sum(document):08x}"
    if document.get("crc32") != found:
        raise CheckpointCorruptError(
            f"{_KEY}: the metadata that maxjax wrote does not match its checksum",
            path=path,
            expected=f"CRC-32 {document.get('crc32')}",
            found=found,
            hint="Open an earlier step.",
        )


def _encodings(document: dict[str, Any], item: str, path: str) -> dict[str, str]:
    found = _texts(document, "encodings", item, path)
    for name, encoding in found.items():
        if encoding not in KEPT:
            raise invalid(path, "encodings", f"one of {', '.join(KEPT)}", encoding, name)
    return found


def _empty(document: dict[str, Any], item: str, path: str) -> Iterator[TensorEntry]:
    for name, found in _part(document, "empty", item, path).items():
        title, shape = found if isinstance(found, list) and len(found) == 2 else ("", [])
        dtype = DType.__members__.get(title) if isinstance(title, str) else None
        if dtype is None or not _is_empty(shape):
            raise invalid(path, "empty", "a dtype, and a shape that contains 0", found, name)
        yield TensorEntry(name, dtype, tuple(shape), 0, 0, 0)


def _is_empty(shape: Any) -> bool:
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS:
        return False
    return 0 in shape and all(type(size) is int and 0 <= size < 1 << 31 for size in shape)


def _texts(document: dict[str, Any], key: str, item: str, path: str) -> dict[str, str]:
    found = _part(document, key, item, path)
    for name, text in found.items():
        if not isinstance(text, str):
            raise invalid(path, key, "text", text, name)
    return found


def _part(document: dict[str, Any], key: str, item: str, path: str) -> dict[str, Any]:
    """The part of the table ``key`` that belongs to the tree ``item``."""
    table = document.get(key, {})
    if not isinstance(table, dict):
        raise invalid(path, key, "an object", table)
    found = table.get(item, {})
    if not isinstance(found, dict):
        raise invalid(path, key, "an object", found)
    return found
