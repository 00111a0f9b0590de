"""Rows of Weights for displays (``rendering.row``), made without reading a value."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ...kernels.stack_slice import stack_of
from ...rendering.rendered import Rendered, guarded
from ...rendering.row import Row
from ..placement.division import device_count, spec_text
from ..placement.rows import (
    LAZY,
    LeafState,
    PlacedRow,
    array_html,
    array_row,
    dtype_text,
    placed,
    state_of,
    width,
)
from ..shape import StaticDim
from .spec import is_value

UNREAD = "not read yet"


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
    nbytes = int(count) * width(held)
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
            f"{spec.cls.__name__}({self.name}, {self.dtype}, {self.shape!r}, {self.device}{extra})"
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
