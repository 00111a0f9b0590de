"""Rows of arrays for displays (``rendering.row``), made without reading a value: what they are, and where they lie."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec, Sharding

from ...kernels.stack_slice import stack_of
from ...rendering.rendered import card, guarded
from ...rendering.row import Row, bytes_text, counted, short
from .division import device_count, division_of, place_text, spec_text

LAZY, TRACED, DELETED = "lazy", "traced", "deleted"
# Leaves that are not arrays but say what the tree around them is.
_PLAIN = (bool, int, float, complex, str, type(None), PartitionSpec, Sharding)


class LeafState(NamedTuple):
    """What a leaf is.

    Attributes:
        note: "" for a value; otherwise why there is none: ``LAZY``, ``TRACED``, ``DELETED``.
        foreign: class of a leaf that is no array, such as "bool" in a mask; otherwise "".
        text: a foreign leaf in a few characters, if it is small.
    """

    note: str = ""
    foreign: str = ""
    text: str = ""


def state_of(leaf: Any) -> LeafState:
    """What a leaf is, without reading it.

    Example:
        >>> state_of(jax.ShapeDtypeStruct((2,), "float32")).note, state_of(True).text
        ('lazy', 'True')
    """
    leaf = stack_of(leaf)
    if type(leaf) is jax.ShapeDtypeStruct:
        return LeafState(LAZY)
    if isinstance(leaf, Tracer):
        return LeafState(TRACED)
    if isinstance(leaf, jax.Array):
        return LeafState(DELETED if leaf.is_deleted() else "")
    if isinstance(leaf, (np.ndarray, np.generic)):
        return LeafState()
    text = ""
    if isinstance(leaf, _PLAIN):
        text = guarded(leaf, lambda: short(repr(leaf), 40))
    return LeafState("", type(leaf).__name__, text)


class PlacedRow(NamedTuple):
    """The row of an array, and what totals over a model need.

    Attributes:
        row: row of the array.
        state: what its leaf is.
        sharding: sharding that it has or will have; None if not known.
        per_device: bytes on each device.
    """

    row: Row
    state: LeafState
    sharding: Any
    per_device: int


def array_row(name: str, array: Any, sharding: Any = None) -> PlacedRow:
    """The row of an array, a placeholder or any other leaf."""
    state = state_of(array)
    if state.foreign:
        notes = (state.text,) if state.text else ()
        return PlacedRow(Row(name, "", state.foreign, notes=notes, is_array=True), state, None, 0)
    array = stack_of(array) if not hasattr(array, "shape") else array
    shape = tuple(array.shape)
    sharding = getattr(array, "sharding", None) if sharding is None else sharding
    size = math.prod(shape)
    row = Row(name, "", dtype_text(array.dtype), shape, size, size * width(array.dtype))
    row.is_array = True
    return placed(row, state, sharding)


@functools.lru_cache(256)
def dtype_text(dtype: Any) -> str:
    """The name of a dtype, also of random keys and of derivatives of integers."""
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def width(dtype: Any) -> int:
    """The bytes of an element."""
    return 0 if dtype == jax.dtypes.float0 else int(getattr(dtype, "itemsize", 0))


def placed(row: Row, state: LeafState, sharding: Any, layout: Any = None) -> PlacedRow:
    """The row with its state, and its division if it is on several devices."""
    if not isinstance(sharding, Sharding) or state.note == TRACED:
        sharding = None
    division, per_device = None, row.nbytes
    if sharding is not None and row.shape is not None and device_count(sharding) > 1:
        division = division_of(sharding, tuple(map(int, row.shape)), layout)
        if division is not None and division.parts:
            share = division.size_on(division.parts[0][1][0])
            per_device = row.nbytes * share // max(math.prod(division.shape), 1)
    row.notes = (*row.notes, *filter(None, [state.note]))
    row.division = division
    return PlacedRow(row, state, sharding, per_device)


def total(kind: str, arrays: Mapping[str, Any]) -> Row:
    """The row of an object that holds arrays by name; names with None are left out.

    Example:
        >>> row = total("Pair", {"a": np.zeros((2, 3)), "b": None})
        >>> row.kind, row.nbytes, [child.type_text for child in row.children]
        ('Pair', 48, ['float64[2, 3]'])
    """
    found = [array_row(name, array) for name, array in arrays.items() if array is not None]
    sizes: Counter[str] = Counter()
    for one in found:
        sizes[one.row.dtype] += one.row.nbytes
    row = Row("", kind, next((name for name, _ in sizes.most_common(1)), ""))
    row.children = tuple(one.row for one in found)
    row.nbytes = sum(one.row.nbytes for one in found)
    row.parameters = sum(one.row.parameters for one in found)
    states = dict.fromkeys(one.state.note for one in found if one.state.note)
    places = dict.fromkeys(place_text(one.sharding) for one in found if one.sharding is not None)
    each = sum(one.per_device for one in found)
    row.notes = (
        *states,
        *([f"on {' and '.join(places)}"] if places else []),
        *([f"{bytes_text(each)} on each"] if each < row.nbytes else []),
    )
    return row


def foreign(kind: str, row: Row, array: Any, rank: int) -> str | None:
    """The title of a tree whose leaves are not arrays of the expected rank; None if they are.

    Args:
        array: leaf that should be an array with ``rank`` axes.
    """
    if len(getattr(array, "shape", ())) == rank:
        return None
    types = dict.fromkeys(child.type_text for child in row.children)
    return f"{kind}(of {short(', '.join(types))})"


def array_facts(one: PlacedRow, **more: str) -> dict[str, str]:
    """The facts about an array that its HTML card shows."""
    row = one.row
    facts = {"type": row.type_text}
    if row.nbytes:
        facts["size"] = f"{counted(row.parameters, 'element')}, {bytes_text(row.nbytes)}"
    if notes := [note for note in row.notes if note != one.state.note]:
        facts["notes"] = ", ".join(notes)
    if one.state.note or not one.state.foreign:
        facts["value"] = one.state.note or "loaded"
    if one.sharding is not None:
        facts["placement"] = spec_text(one.sharding)
    if row.division is not None:
        each = "" if one.per_device == row.nbytes else f", {bytes_text(one.per_device)} on a device"
        facts["parts"] = f"{row.division.sentence}{each}"
    return {**facts, **{name: text for name, text in more.items() if text}}


def array_html(title: str, one: PlacedRow, **more: str) -> str:
    """The card of an array, with a drawing of its parts if there are several."""
    drawing = "" if one.row.division is None else one.row.division.svg()
    return card(title, array_facts(one, **more), drawing)
