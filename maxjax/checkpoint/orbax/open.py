"""One tree of a checkpoint, open, with what maxjax keeps beside its arrays."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from ...dtype import DType
from ...errors import CheckpointCorruptError, CheckpointFormatError
from ...graph.weights import Weights
from ...storage.entry import TensorEntry
from ...storage.files import open_regular
from ...storage.orbax.maxjax_metadata import metadata_sum
from ...storage.orbax.reader import open_orbax, orbax_items
from ...storage.table import TensorTable
from .record import METADATA, VERSION
from .save import MODEL
from .steps import COMMITTED


@dataclass(slots=True)
class Saved:
    """One tree of a checkpoint, open: its arrays, and what maxjax keeps beside them."""

    title: str
    path: str
    weights: Weights
    table: TensorTable
    plain: dict[str, Any]
    encodings: dict[str, str]
    keys: dict[str, str]
    is_ours: bool

    @property
    def names(self) -> set[str]:
        """Of all leaves."""
        return {*self.plain, *self.table.entries}

    def close(self) -> None:
        """Closes its files."""
        self.weights.close()


def open_saved(directory: str, title: str, verify: Any) -> Saved | None:
    """The tree of this name of a checkpoint; None if it has none.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """
    found = orbax_items(directory)
    item = title if title in found else None
    if item is None and title == MODEL:
        item = next(iter(found)) if len(found) == 1 else None
    # Any of its trees has what maxjax wrote.
    table = open_orbax(directory, item=next(iter(found)) if item is None else item)
    try:
        saved = _saved(directory, title, item, table)
    except BaseException:
        table.close()
        raise
    if saved is None or saved.table is not table:
        table.close()
    if saved is not None:
        saved.table.verify = verify
    return saved


def _saved(directory: str, title: str, item: str | None, table: TensorTable) -> Saved | None:
    """The tree ``title``, which orbax calls ``item``; None for that if all its arrays are empty."""
    content = _content(directory, table)
    kinds = ("plain", "empty", "encodings", "keys")
    part = {kind: content.get(kind, {}).get(item or title, {}) for kind in kinds}
    if item is None and title not in content.get("items", ()):
        return None
    plain = {name: _value(directory, name, *pair) for name, pair in part["plain"].items()}
    if item is None:  # orbax has no directory for it
        entries = {
            name: TensorEntry(name, DType.of(dtype), tuple(shape), 0, 0, 0)
            for name, (dtype, shape) in part["empty"].items()
        }
        table = TensorTable("orbax", [open_regular(os.path.join(directory, COMMITTED))], entries)
    weights = Weights._of(table, directory)
    return Saved(
        title, directory, weights, table, plain, part["encodings"], part["keys"], bool(content)
    )


def _content(directory: str, table: TensorTable) -> dict[str, Any]:
    """What maxjax wrote into orbax's own metadata; nothing, if another program wrote it."""
    text = table.metadata.get(METADATA)
    if text is None:
        return {}
    try:
        content = json.loads(text)
        right = f"{metadata_sum(content):08x}"
    except (ValueError, AttributeError, RecursionError) as error:
        raise _damaged(directory, "not what maxjax writes", "an object") from error
    if content.get("crc32") != right:
        raise CheckpointCorruptError(
            "maxjax's own part of the metadata is not what was written",
            path=directory,
            expected=f"CRC-32 {content.get('crc32')}",
            found=right,
            hint="Restore an earlier step.",
        )
    if content.get("version") != VERSION:
        raise _damaged(directory, "a version that is not known", str(VERSION))
    return content


def _damaged(directory: str, what: str, expected: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"its metadata is {what}", path=directory, expected=expected)


def _value(directory: str, name: str, kind: str, text: str) -> Any:
    """A leaf that is no array, of its text."""
    try:
        if kind == "str":
            return text
        if kind == "bytes":
            return bytes.fromhex(text)
        if kind == "bool":
            return {"True": True, "False": False}[text]
        return {"int": int, "float": float, "complex": complex}[kind](text)
    except (KeyError, ValueError) as error:
        raise CheckpointFormatError(
            "not a value of its type", path=directory, tensor=name, expected=kind, found=text
        ) from error
