"""What maxjax adds to the orbax checkpoints it writes: what stored bytes mean.

Orbax knows arrays alone, and none without elements. Quantised blocks are saved as their bytes,
and so is a type that tensorstore lacks; which they are stands in the checkpoint's custom metadata,
and so do empty arrays.

    {"maxjax": {"version": 1, "encodings": {"model": {"w": "Q4_K"}}, "dtypes": {"model": {...}}}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...dtype import DType
from ...errors import CheckpointCorruptError, CheckpointFormatError
from ..blocks import KEPT, layout_of
from ..crc32 import crc32
from ..entry import TensorEntry
from ..limits import Limits
from ..strict_json import load_json
from .metadata import CHECKPOINT, wrong
from .paths import Place

KEY = "maxjax"
_VERSION = 1
_MAX_DIMS = 32


@dataclass(frozen=True, slots=True)
class Own:
    """Name of a tensor → kind of blocks, and → type, of those that are stored as their bytes.

    ``empty`` has the tensors without elements, which orbax does not store.
    """

    path: str
    encodings: dict[str, str]
    dtypes: dict[str, DType]
    empty: tuple[TensorEntry, ...] = ()

    def check_names(self, names: set[str]) -> None:
        """Raises CheckpointFormatError if a tensor it speaks of is not there."""
        for name in [*self.encodings, *self.dtypes]:
            if name not in names:
                raise wrong(self.path, KEY, "tensors of the tree", name, name)
        for entry in self.empty:
            if entry.name in names:
                raise wrong(self.path, "empty", "no tensor of the tree", entry.name, entry.name)

    def applied(self, entry: TensorEntry) -> TensorEntry:
        """The entry with its encoding or its own type.

        Raises:
            CheckpointFormatError: It is not stored as such bytes.
        """
        encoding, dtype = self.encodings.get(entry.name), self.dtypes.get(entry.name)
        if encoding is not None:
            block = layout_of(encoding).nbytes
            if not entry.shape or entry.shape[-1] % block:
                raise self._other(entry, f"rows of blocks of {block} bytes ({encoding})")
        if encoding is not None or dtype is not None:
            if entry.dtype is not DType.uint8:
                raise self._other(entry, "uint8")
        return replace(entry, encoding=encoding, dtype=dtype or entry.dtype)

    def _other(self, entry: TensorEntry, expected: str) -> CheckpointFormatError:
        return CheckpointFormatError(
            "the tensor is not stored as the checkpoint's metadata says",
            path=self.path,
            tensor=entry.name,
            expected=expected,
            found=f"{entry.dtype.name} {list(entry.shape)}",
        )


def read_own(metadata: dict[str, str], place: Place, limits: Limits) -> Own:
    """What the custom metadata of a checkpoint says of the tensors of one of its trees.

    Raises:
        CheckpointFormatError: It is not what maxjax writes.
        CheckpointCorruptError: It has another checksum than it says.
    """
    path = os.path.join(place.checkpoint, CHECKPOINT)
    if KEY not in metadata:
        return Own(path, {}, {})
    document = load_json(metadata[KEY].encode(errors="replace"), limits=limits, name=path)
    if not isinstance(document, dict):
        raise wrong(path, KEY, "an object", document)
    _check_sum(document, path)
    if document.get("version") != _VERSION:
        raise wrong(path, f"{KEY}: version", str(_VERSION), document.get("version"))
    encodings, dtypes = _encodings(document, place, path), _dtypes(document, place, path)
    return Own(path, encodings, dtypes, tuple(_empty(document, place, path)))


def _check_sum(document: dict[str, Any], path: str) -> None:
    """Compares the checksum in it with that of the rest."""
    if "crc32" not in document:
        return
    found = f"{metadata_sum(document):08x}"
    if document["crc32"] != found:
        raise CheckpointCorruptError(
            f"{KEY}: what maxjax wrote into the metadata is not what is there",
            path=path,
            expected=f"CRC-32 {document['crc32']}",
            found=found,
            hint="Open an earlier step.",
        )


def metadata_sum(content: Mapping[str, Any]) -> int:
    """The checksum of our metadata, without the one that is in it."""
    rest = {key: value for key, value in content.items() if key != "crc32"}
    return crc32(json.dumps(rest, sort_keys=True).encode())


def _encodings(document: dict[str, Any], place: Place, path: str) -> dict[str, str]:
    found = _texts(document, "encodings", place, path)
    for name, encoding in found.items():
        if encoding not in KEPT or layout_of(encoding).nbytes is None:
            raise wrong(path, "encodings", f"one of {', '.join(KEPT)}", encoding, name)
    return found


def _dtypes(document: dict[str, Any], place: Place, path: str) -> dict[str, DType]:
    found = {}
    for name, title in _texts(document, "dtypes", place, path).items():
        dtype = DType.__members__.get(title)
        if dtype is None or dtype.np.itemsize != 1:
            raise wrong(path, "dtypes", "a type of one byte", title, name)
        found[name] = dtype
    return found


def _empty(document: dict[str, Any], place: Place, path: str) -> Iterator[TensorEntry]:
    for name, found in _part(document, "empty", place, path).items():
        title, shape = found if isinstance(found, list) and len(found) == 2 else ("", [])
        dtype = DType.__members__.get(title) if isinstance(title, str) else None
        if dtype is None or not _is_empty(shape):
            raise wrong(path, "empty", "a type, and a shape with a 0 in it", found, name)
        yield TensorEntry(name, dtype, tuple(shape), 0, 0, 0)


def _is_empty(shape: Any) -> bool:
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS:
        return False
    return 0 in shape and all(type(size) is int and 0 <= size < 1 << 31 for size in shape)


def _texts(document: dict[str, Any], key: str, place: Place, path: str) -> dict[str, str]:
    found = _part(document, key, place, path)
    for name, text in found.items():
        if not isinstance(text, str):
            raise wrong(path, key, "text", text, name)
    return found


def _part(document: dict[str, Any], key: str, place: Place, path: str) -> dict[str, Any]:
    """Of one of its tables the part that is of a tree."""
    table = document.get(key, {})
    if not isinstance(table, dict):
        raise wrong(path, key, "an object", table)
    found = table.get(place.item, {})
    if not isinstance(found, dict):
        raise wrong(path, key, "an object", found)
    return found
