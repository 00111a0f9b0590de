"""Opens one tree of a checkpoint: its arrays, and the metadata that maxjax stores with them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ...graph.weights import FileWeights
from ...rendering.rendered import Rendered
from ...rendering.row import Row
from ...storage.files import closed_on_error, open_regular
from ...storage.orbax.maxjax_metadata import read_maxjax_metadata
from ...storage.orbax.paths import chosen
from ...storage.orbax.reader import open_orbax, orbax_items, orbax_tree
from ...storage.table import TensorTable
from .save import MODEL
from .steps import COMMITTED


@dataclass(slots=True, repr=False)
class Saved(Rendered):
    """An open tree of a checkpoint.

    Attributes:
        title: name of the tree.
        path: directory of the checkpoint.
        weights, table: its arrays, as a cursor and as a table.
        plain: leaves that are numbers or text, by name.
        encodings: encodings of quantised leaves, by name.
        keys: implementations of random keys, by name.
        is_ours: whether maxjax wrote the checkpoint.
    """

    title: str
    path: str
    weights: FileWeights
    table: TensorTable
    plain: dict[str, Any]
    encodings: dict[str, str]
    keys: dict[str, str]
    is_ours: bool

    def _mx_row(self) -> Row:
        return self.weights._mx_row()

    def _mx_title(self, row: Row) -> str:
        facts = ", ".join(filter(None, [*row.notes, row.dtype]))
        return f"Saved({self.title!r} of {self.path!r}, {facts})"

    @property
    def names(self) -> set[str]:
        """The names of all leaves."""
        return {*self.plain, *self.table.entries}

    def close(self) -> None:
        """Close the files."""
        self.weights.close()


def open_saved(directory: str, title: str, verify: Any) -> Saved | None:
    """Open the tree called ``title`` of a checkpoint; None if there is no such tree.

    The model may have another name: that of the tree which the checkpoint opens as.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    found = orbax_items(directory)
    item = title if title in found else chosen(found) if title == MODEL else None
    # The metadata that maxjax wrote is the same in every tree.
    table = open_orbax(directory, item=next(iter(found)) if item is None else item, verify=verify)
    with closed_on_error([table]):
        saved = _saved(directory, title, item, table)
    if saved is None or saved.table is not table:
        table.close()
    return saved


def _saved(directory: str, title: str, item: str | None, table: TensorTable) -> Saved | None:
    """The tree ``title``, which orbax calls ``item``: None if orbax has no such tree.

    That is so for a tree whose arrays are all empty, which only maxjax's metadata lists.
    """
    own = read_maxjax_metadata(table.metadata, directory, item or title, require_checksum=True)
    if item is None and not own.has_tree:
        return None
    plain, keys = own.plain(), own.keys
    if item is None:
        file = open_regular(os.path.join(directory, COMMITTED))
        table = TensorTable("orbax", [file], {entry.name: entry for entry in own.empty})
    elif not own.is_ours:  # what orbax itself records of leaves that are no plain arrays
        tree = orbax_tree(directory, item=item)
        plain = tree.strings
        keys = {leaf.name: leaf.random_key for leaf in tree.leaves if leaf.random_key}
    weights = FileWeights._of(table, directory)
    return Saved(title, directory, weights, table, plain, own.encodings, keys, own.is_ours)
