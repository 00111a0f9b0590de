"""Rows of Weights and of other arrays for displays (``rendering.row``), made without reading a value."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec, Sharding

from ...kernels.stack_slice import stack_of
from ...rendering.rendered import Rendered, card, guarded
from ...rendering.row import Row, bytes_text, counted, short
from ..placement.division import device_count, division_of, place_text, spec_text
from ..shape import StaticDim
from .spec import is_value

LAZY, UNREAD, TRACED, DELETED = "lazy", "not read yet", "traced", "deleted"
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
    row = Row(name, "", dtype_text(array.dtype), shape, size, size * _width(array.dtype))
    row.is_array = True
    return placed(row, state, sharding)


@functools.lru_cache(256)
def dtype_text(dtype: Any) -> str:
    """The name of a dtype, also of random keys and of derivatives of integers."""
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def _width(dtype: Any) -> int:
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


def leaf_in_memory(weight: Any) -> Any:
    """The leaf of a Weight; of a shard whose weight is not read yet, its placeholder."""
    host = getattr(weight, "host", None)
    return weight.spec.blank() if host is not None and host.is_lazy else weight.leaf


def weight_row(weight: Any, name: str, of_all: bool = False) -> PlacedRow:
    """The row of a Weight.

    Args:
        of_all: whether the row stands for the Weights of all layers of the stack that holds this one;
            the state is then that of the stack.
    """
    spec, home = weight.spec, weight.home
    packing, encoding = spec.packing, spec.encoding
    leaf = leaf_in_memory(weight) if home is None or not of_all else home[0].leaf
    state = state_of(leaf)
    if state.foreign and leaf is not None:
        return array_row(name, leaf)
    dims = spec.dims if packing is None else weight.logical_shape
    shape = tuple([int(d) if isinstance(d, StaticDim) else str(d) for d in dims])
    known = str not in map(type, shape)
    if known and _has_other_shape(weight, leaf, shape, of_all):
        return _as_it_is(name, leaf, home[0].spec.count if of_all and home is not None else 1)
    if leaf is None:  # sizes that are not known yet, or an empty place in a tree
        state = LeafState("", "NoneType", "None") if known else LeafState(LAZY)
    if state.note == LAZY:
        if (getattr(weight, "host", None) or weight).source is not None:
            state = LeafState(UNREAD)
        elif home is not None and of_all:
            count = home[0].spec.count
            if loaded := sum(is_value(home[0].leaf_of(i)) for i in range(count)):
                state = LeafState(f"{loaded} of {count} layers loaded")
    array = stack_of(leaf)
    found = getattr(array, "dtype", None)
    held = spec.dtype.np if found is None else found
    count = math.prod(shape) if known else 0  # type: ignore[type-var]
    nbytes = int(count) * _width(held)
    notes: tuple[str, ...] = ()
    if packing is not None:
        nbytes = math.prod(map(int, spec.dims)) if known else 0
        notes = (f"{8 * nbytes / max(int(count), 1):.4g} bits each",)
    elif encoding is not None:
        notes = (encoding.value,)
    elif found is not None and found != jax.dtypes.canonicalize_dtype(spec.dtype.np):
        notes = (f"declared {spec.dtype.name}",)
    text = dtype_text(held) if packing is None else packing.value
    if state.foreign:
        text, nbytes, count, notes = "None", 0, 0, ()
    row = Row(name, "", text, shape, int(count), nbytes, notes=notes, is_array=True)
    sharding = weight.sharding
    if sharding is None:
        sharding = getattr(array, "sharding", None)
        if home is not None and device_count(sharding) > 1:
            sharding = None  # it is that of the stack, which has more axes
    return placed(row, state, sharding if known else None, spec.layout)


def _has_other_shape(weight: Any, leaf: Any, shape: tuple[Any, ...], of_all: bool) -> bool:
    """Whether a leaf is an array of another shape than the Weight's, as per-example gradients are."""
    if not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return False
    if isinstance(leaf, Tracer):  # it may be one device's part
        return False
    spec = weight.spec
    if spec.layout is not None or spec.packing is not None:
        shape = spec.leaf_shape
    if weight.home is not None and of_all:
        shape = (*weight.home[0].spec.lead, *shape)
    return tuple(leaf.shape) != shape


def _as_it_is(name: str, leaf: Any, count: int) -> PlacedRow:
    """The row of a leaf without the shape of its Weight, or of the stacked Weights of ``count`` layers."""
    one = array_row(name, leaf)
    if count == 1:
        return one
    # The caller counts it once for each layer.
    row = replace(one.row, parameters=one.row.parameters // count, nbytes=one.row.nbytes // count)
    row.notes = (*row.notes, f"of {count} layers together")
    return PlacedRow(row, one.state, one.sharding, one.per_device // count)


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


# --- the classes ----------------------------------------------------------------------------


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


class OfWeight(Rendered):
    """The rendering of a Weight. Its repr begins as MAX's does."""

    __slots__ = ()

    def _mx_row(self: Any) -> Row:
        return weight_row(self, "").row

    def _mx_title(self: Any, row: Row) -> str:
        spec = self.spec
        extra = f", {spec.encoding}" if spec.encoding is not None else ""
        leaf = leaf_in_memory(self)
        if leaf is not None and type(leaf) is not jax.ShapeDtypeStruct:
            state = state_of(leaf)
            extra += f", {state.text or state.foreign or state.note or 'loaded'}"
        if device_count(self.sharding) > 1:
            extra += f", {spec_text(self.sharding)}"
        return (
            f"{spec.kind.__name__}({self.name}, {self.dtype}, {self.shape!r}, {self.device}{extra})"
        )

    def __repr__(self) -> str:
        return guarded(self, lambda: self._mx_title(Row()))

    def _mx_html(self: Any) -> str:
        spec, home = self.spec, self.home
        encoding = "" if spec.encoding is None else spec.encoding.value
        more = {"declared on": str(self.device), "encoding": encoding, "reason": spec.why}
        if home is not None:
            more["stack"] = f"number {home[1]} of {home[0].spec.count}"
        if self.source is not None:
            more["source"] = "data of a checkpoint, read when it is used"
        return array_html(self.name, weight_row(self, ""), **more)


class OfStack(Rendered):
    """The rendering of a StackedWeight."""

    __slots__ = ()

    def _mx_row(self: Any) -> Row:
        return array_row("", self.leaf).row

    def _mx_title(self: Any, row: Row) -> str:
        layer = f"Weight({self.name}, {self.spec.dtype}, {self.shape!r}, {self.device})"
        return f"StackedWeight({self.spec.count} x {layer})"

    def __repr__(self) -> str:
        return guarded(self, lambda: self._mx_title(Row()))

    def _mx_html(self: Any) -> str:
        title = f"{self.spec.count} stacked weights"
        return array_html(title, array_row("", self.leaf), reason=self.spec.why)
