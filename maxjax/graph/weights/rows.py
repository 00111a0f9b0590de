"""Rows of a checkpoint for displays: the tree of its tensors' names, from the headers alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...rendering.row import Row, bytes_text, counted, fold
from ...storage.entry import TensorEntry

# For more tensors than this, only totals are shown.
_MOST_TENSORS = 20_000
_MOST_DTYPES = 3


def table_row(entries: Sequence[TensorEntry], place: str = "") -> Row:
    """The row of the tensors at or below a position, with a row for each component of their names.

    Args:
        entries: entries of the tensors.
        place: name of the position, with which all their names begin.
    """
    sizes: Counter[str] = Counter()
    tree: dict[str, Any] = {}
    for entry in entries:
        sizes[_type(entry)] += entry.nbytes
        below = entry.name.removeprefix(place).removeprefix("." if place else "")
        if below and len(entries) <= _MOST_TENSORS:
            _insert(tree, below, entry)
    row = _row("", tree)
    row.nbytes, row.parameters = sum(sizes.values()), sum(map(_elements, entries))
    row.dtype = " and ".join(name for name, _ in sizes.most_common(_MOST_DTYPES))
    row.dtype += "…" if len(sizes) > _MOST_DTYPES else ""
    if len(entries) == 1 and not tree:
        row.shape = entries[0].shape
    size = [bytes_text(row.nbytes)] if row.nbytes else []
    row.notes = (counted(len(entries), "tensor"), *size)
    return row


def _insert(tree: dict[str, Any], name: str, entry: TensorEntry) -> None:
    """Adds a tensor. If another tensor's name and a dot are the beginning of its name, it is put beside that one."""
    *parts, last = name.split(".")
    at = tree
    for i, part in enumerate(parts):
        below = at.setdefault(part, {})
        if not isinstance(below, dict):
            last = ".".join([*parts[i:], last])
            break
        at = below
    if isinstance(at.get(last), dict):
        last += "."
    at[last] = entry


def _row(name: str, tree: Any) -> Row:
    if isinstance(tree, TensorEntry):
        return tensor_row(name, tree)
    only = next(iter(tree.items())) if len(tree) == 1 and name and not name.isdecimal() else None
    if only is not None and isinstance(only[1], TensorEntry):
        return tensor_row(f"{name}.{only[0]}", only[1])
    below = [_row(part, one) for part, one in tree.items()]
    numbered = sorted((one for one in below if one.name.isdecimal()), key=lambda one: int(one.name))
    rows = [*fold(numbered), *(one for one in below if not one.name.isdecimal())]
    count = sum(map(_counts, rows))
    row = Row(name, counted(count, "tensor"), children=tuple(rows))
    row.parameters, row.nbytes = (
        sum(one.parameters for one in rows),
        sum(one.nbytes for one in rows),
    )
    return row


def _counts(row: Row) -> int:
    """The number of tensors in a row and the rows below it."""
    return row.count if row.is_array else row.count * sum(map(_counts, row.children))


def tensor_row(name: str, entry: TensorEntry) -> Row:
    """The row of one tensor."""
    return Row(name, "", _type(entry), entry.shape, _elements(entry), entry.nbytes, is_array=True)


def _type(entry: TensorEntry) -> str:
    return entry.encoding or str(getattr(entry.dtype, "name", entry.dtype))


def _elements(entry: TensorEntry) -> int:
    return math.prod(entry.shape)
