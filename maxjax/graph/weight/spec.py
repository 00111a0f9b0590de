"""WeightSpec: everything about a Weight except its value and its full name.

It is the part of a Weight that JAX compares: two Weights with equal specs are interchangeable in a compiled
program. It also says how the value is stored. The array that a Weight holds, its *leaf*, has the weight's
shape and order, with two exceptions: a *layout* stores the rows in another order
(``placement/device_major.py``), and a stack has leading axes, one entry for each layer.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np

from ...dtype import DType
from ..device import DeviceRef
from ..dim import Dim
from ..placement.arrays import experts_first, put
from ..placement.device_major import DeviceMajor
from ..placement.stacking import with_leading
from ..quantization import QuantizationEncoding
from ..shape import Shape, StaticDim


class Span(NamedTuple):
    """The layers along one leading axis of a stack: ``start``, ``start + step``, …, with a common name.

    Attributes:
        pattern: text in place of the layer's number in the name of the leaf.
        start, step, count: number of the first layer, distance between numbers, and number of layers.
    """

    pattern: str
    start: int
    step: int
    count: int

    def name(self, full: str, index: int) -> str:
        """Return the name of one layer's weight, from the name of the leaf."""
        parts = full.split(".")
        if self.pattern in parts:
            parts[parts.index(self.pattern)] = str(self.start + index * self.step)
        return ".".join(parts)


class FileForm(Protocol):
    """The conversion between a Weight's value and another form of it in files, such as text. It is hashable.

    Attributes:
        elementwise: whether each element is converted by itself, and the order of elements is the same.
        shape: shape in files, where an elementwise form changes it; otherwise None.
    """

    elementwise: ClassVar[bool]

    @property
    def shape(self) -> tuple[int, ...] | None: ...

    def fits(self, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Return whether a file's tensor of this dtype and shape can be in this form."""
        ...

    def to_stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """Convert the file's tensor to the form of the Weight; if ``elementwise``, also some of its elements.

        Raises:
            ValueError: the tensor is invalid.
        """
        ...

    def to_file(self, array: Any) -> Any:
        """Convert the stored value to the form of the file; if ``elementwise``, also a jax.Array or some elements."""
        ...


@dataclass(frozen=True)
class WeightSpec:
    """The declaration of a Weight, its sharding, and the form in which its value is stored.

    Attributes:
        cls: class of the Weight.
        local_name: name within the layer that owns the Weight.
        dtype: declared element type.
        dims: declared sizes, of one layer if it is a stack.
        device: device that MAX would use.
        encoding: quantization encoding, or None.
        align: alignment in bytes required of loaded values, or None.
        strategy: sharding strategy, or None.
        sharding: jax Sharding of the weight in logical order; None lets JAX choose.
        layout: order of the stored rows if it is not the logical one.
        shard_idx: number of the part, for a part of another Weight.
        activations: form in which CPU kernels use the activations beside a quantised weight: "int8" or "float".
        form: conversion between the value and its form in files, if they differ.
        spans: for each leading axis of a stack, what its indices stand for, outermost first; otherwise ().
        split: mesh axes over which the last of the leading axes is split.
        why: reason for the sharding. It is not compared.
    """

    cls: type
    local_name: str
    dtype: DType
    dims: tuple[Dim, ...]
    device: DeviceRef
    encoding: QuantizationEncoding | None = None
    align: int | None = None
    strategy: Any = None
    sharding: Any = None
    layout: DeviceMajor | None = None
    shard_idx: int | None = None
    activations: str = "float"
    form: FileForm | None = None
    spans: tuple[Span, ...] = ()
    split: tuple[str, ...] = ()
    why: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if any(isinstance(d, StaticDim) and d.dim < 0 for d in self.dims):
            shape = ", ".join(map(str, self.dims))
            raise ValueError(
                f"weight '{self.local_name}' has a negative size: its shape is [{shape}]"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightSpec:
        return self

    # -- what it declares

    @functools.cached_property
    def is_static(self) -> bool:
        """Whether all sizes are known."""
        return all(isinstance(d, StaticDim) for d in self.dims)

    @property
    def sizes(self) -> tuple[int | str, ...]:
        """The sizes as integers, and as text where they are symbolic."""
        return tuple(int(d) if isinstance(d, StaticDim) else str(d) for d in self.dims)

    @functools.cached_property
    def packing(self) -> QuantizationEncoding | None:
        """The quantization encoding if the stored bytes are its blocks, otherwise None."""
        encoding = self.encoding
        packed = encoding is not None and encoding.is_gguf and self.dtype is DType.uint8
        return encoding if packed and self.dims else None

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether operations use the leaf as it is: it is neither quantised nor placed."""
        return self.packing is None and self.layout is None and self.sharding is None

    @property
    def block(self) -> int:
        """The number of values along the last axis that must not be separated."""
        return 1 if self.packing is None else self.packing.elements_per_block

    @property
    def logical_shape(self) -> Shape:
        """The shape of the values: for quantised bytes, of the values that they encode."""
        if self.packing is None:
            return Shape(self.dims)
        return Shape(self.packing.logical_shape([*self.dims[:-1], int(self.dims[-1])]))  # type: ignore[list-item]

    # -- the layers of a stack

    @property
    def lead(self) -> tuple[int, ...]:
        """The sizes of the leading axes."""
        return tuple(span.count for span in self.spans)

    @property
    def count(self) -> int:
        """The number of Weights in the stack, 1 if it is none."""
        return math.prod(self.lead)

    @property
    def shares(self) -> int:
        """The number of parts in which the layers are distributed: each device holds 1/shares of them."""
        return math.prod(self.sharding.mesh.shape[name] for name in self.split)

    @functools.cached_property
    def layer(self) -> WeightSpec:
        """The spec of one of the stack's Weights."""
        return replace(self, spans=(), split=())

    @functools.cached_property
    def inner(self) -> WeightSpec:
        """The spec of the stack that one layer of a stack of stacks holds."""
        return replace(self, spans=self.spans[1:])

    def index(self, number: int) -> tuple[int, ...]:
        """Return the place of a Weight along the leading axes; Weights are counted in the array's order."""
        return tuple(map(int, np.unravel_index(number, self.lead)))

    def name(self, full: str, number: int) -> str:
        """Return the name of one of the Weights, from the name of the leaf."""
        for span, index in zip(self.spans, self.index(number), strict=True):
            full = span.name(full, index)
        return full

    def names(self, full: str) -> list[str]:
        """Return the names of all Weights whose values the leaf holds, from the name of the leaf."""
        return [self.name(full, i) for i in range(self.count)] if self.spans else [full]

    # -- how the value is stored

    @functools.cached_property
    def layer_shape(self) -> tuple[int, ...] | None:
        """The shape of the stored value, of one layer if it is a stack; None while sizes are symbolic."""
        if not self.is_static:
            return None
        sizes = tuple(map(int, self.dims))
        return sizes if self.layout is None else self.layout.shape(sizes)

    @property
    def leaf_shape(self) -> tuple[int, ...] | None:
        """The shape of the leaf; None while sizes are symbolic."""
        return None if self.layer_shape is None else (*self.lead, *self.layer_shape)

    @functools.cached_property
    def leaf_sharding(self) -> Any:
        """The sharding of the leaf."""
        where = self.sharding if self.layout is None else self.layout.sharding(self.sharding)
        return with_leading(where, len(self.spans), self.split) if self.spans else where

    @functools.cached_property
    def leaf_place(self) -> Any:
        """The sharding of the leaf, with its layout in memory if that is not JAX's choice."""
        lead, shape = len(self.spans), self.leaf_shape
        if not lead or shape is None or len(shape) != lead + 2:
            return self.leaf_sharding
        return experts_first(self.leaf_sharding, shape, self.dtype.np.itemsize)

    def blank(self) -> Any:
        """Return the leaf of a Weight without a value: a placeholder, or None while sizes are symbolic."""
        if self.leaf_shape is None:
            return None
        # JAX without x64 has no 64-bit arrays: the placeholder has the type that the value will have.
        dtype = jax.dtypes.canonicalize_dtype(self.dtype.np)
        return jax.ShapeDtypeStruct(self.leaf_shape, dtype, sharding=self.leaf_place)

    def logical(self, stored: Any) -> Any:
        """Return a stored value in logical order."""
        return (
            stored
            if self._leaf_layout is None or stored is None
            else self._leaf_layout.restore(stored)
        )

    def arranged(self, array: Any) -> Any:
        """Return a value in the order in which it is stored."""
        return array if self._leaf_layout is None else self._leaf_layout.arrange(array)

    @functools.cached_property
    def _leaf_layout(self) -> DeviceMajor | None:
        """The layout of the leaf, which has the leading axes too."""
        layout, lead = self.layout, len(self.spans)
        return layout if layout is None or not lead else replace(layout, axis=layout.axis + lead)

    def relaid(self, leaf: Any, before: WeightSpec, name: str) -> Any:
        """Return a value that was stored as another spec says, which differs in sharding and layout only."""
        if before.layout != self.layout:
            # Arrays with Explicit axes can be moved between two meshes only through the host.
            leaf = np.asarray(leaf) if leaf.is_fully_addressable else leaf
            leaf = self.arranged(before.logical(leaf))
        return put(leaf, self.leaf_place, name)

    def unplaced(self) -> WeightSpec:
        """Return the spec without its sharding, which belongs to the devices of this process."""
        return replace(self, sharding=None, layout=None, split=(), why="")


def is_value(leaf: Any) -> bool:
    """Return whether a leaf is a value, not a placeholder or None."""
    return leaf is not None and type(leaf) is not jax.ShapeDtypeStruct


def checked_strategy(strategy: Any) -> Any:
    """Return the strategy.

    Raises:
        TypeError: it is neither None nor a ShardingStrategy, or an object with its ``num_devices`` and ``shard``.
    """
    if strategy is None or hasattr(strategy, "num_devices") and hasattr(strategy, "shard"):
        return strategy
    raise TypeError(
        f"a sharding strategy is a ShardingStrategy, such as ShardingStrategy.rowwise(2), not {strategy!r}"
    )
