"""One tree of a checkpoint, open, with what maxjax keeps beside its arrays."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ...graph.weights import Weights
from ...storage.files import open_regular
from ...storage.orbax.maxjax_metadata import read_maxjax_metadata
from ...storage.orbax.reader import open_orbax, orbax_items
from ...storage.table import TensorTable
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
    own = read_maxjax_metadata(table.metadata, directory, item or title, require_checksum=True)
    if item is None and not own.has_tree:
        return None
    plain = own.plain()
    if item is None:  # orbax has no directory for it
        file = open_regular(os.path.join(directory, COMMITTED))
        table = TensorTable("orbax", [file], {entry.name: entry for entry in own.empty})
    weights = Weights._of(table, directory)
    return Saved(title, directory, weights, table, plain, own.encodings, own.keys, own.is_ours)
