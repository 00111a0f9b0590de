"""Split: which axis of a weight is split, and over which kinds of mesh axes, as frozen data.

The mesh gives the number of parts: ``Split.spec(mesh, shape)`` is a PartitionSpec. MAX's ``ShardingStrategy`` adds
a number of devices, for ``Weight.shard``. Axes that do not divide evenly are replicated, and the reason is recorded.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ...kernels.explicit import Entry, parts_over, spec_of
from ..kind import to_value
from ..shape import StaticDim
from .device_major import DeviceMajor
from .mesh import TENSOR, axes_of, axis_of, sizes_text

Range = tuple[int, int]


def even_range(size: int, i: int, n: int) -> Range:
    """The part of ``size`` for device ``i`` of ``n``; the first ``size % n`` devices get one more.

    Example:
        >>> [even_range(7, i, 3) for i in range(3)]
        [(0, 3), (3, 5), (5, 7)]
    """
    base, more = divmod(size, n)
    start = i * base + min(i, more)
    return start, start + base + (i < more)


@dataclass(frozen=True)
class Segment:
    """A part of an axis that is split by itself, between heads if ``num_heads`` is given.

    Attributes:
        size: length of the part.
        num_heads: number of equal heads, which are not split; None: split between elements.

    Example:
        >>> Segment.even(5).shard_range(0, 2), Segment.head_aware(3, 4).shard_range(1, 2)
        ((0, 3), (8, 12))
    """

    size: int
    num_heads: int | None = None

    @classmethod
    def even(cls, size: int) -> Segment:
        """A segment that is split as evenly as possible."""
        return cls(size)

    @classmethod
    def head_aware(cls, num_heads: int, head_dim: int) -> Segment:
        """A segment that is split between heads."""
        return cls(num_heads * head_dim, num_heads)

    def shard_range(self, i: int, n: int) -> Range:
        """The range for device ``i`` of ``n``, relative to the segment's start."""
        if self.num_heads is None:
            return even_range(self.size, i, n)
        width = self.size // self.num_heads
        start, end = even_range(self.num_heads, i, n)
        return start * width, end * width


class Placed(NamedTuple):
    """The placement of a weight, and its reason.

    Attributes:
        spec: for each axis of the weight, the axes of the mesh that it is split over.
        why: reason as one readable phrase.
        layout: order of the stored rows, if it is not the logical one.
        split: mesh axes over which whole weights of a stack are distributed.
        undivided: mesh axes over which the weight would be split, if a size of it could be divided; () if it is.
    """

    spec: PartitionSpec
    why: str
    layout: DeviceMajor | None = None
    split: tuple[str, ...] = ()
    undivided: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """Which axis of a weight is split. Rules of layers are Splits; most are ``ROWS``, ``COLUMNS`` or ``REPLICATED``.

    Attributes:
        axis: axis that is split, counted from the end if negative; None: the weight is replicated.
        segments: consecutive parts of the axis that are each split by themselves; () for one.
            Quantised weights may have half as many values (FP4), or 3/4 as many columns (FP6).
        halves: whether the axis consists of two halves that are each split, of any size.
        name: the constructor of ShardingStrategy that makes the Split; "" for the one that ``made_by`` finds.
        over: kinds of mesh axes; those that the mesh has are combined.
        fallback: axis to split evenly instead, if the sizes of ``axis`` do not divide evenly.
        by_device: whether the layer supports segments in device-major order (:class:`DeviceMajor`).
        whole: kinds of axes over which whole weights of a stack are distributed instead, if their
            number divides evenly; each is then split over the other axes of ``over``. If it cannot be split over
            those, whole weights are distributed over all axes of ``over``.
        unit: number of neighbouring values of the axis that stay together.
        fsdp: axis of the weight to split over ``fsdp``; the largest possible one if it cannot be.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("fsdp", "model"))
        >>> tuple(ROWS.spec(mesh, (8, 6))), tuple(Split(0, (Segment.head_aware(2, 4),)).spec(mesh, (8, 6)))
        (('model', 'fsdp'), ('fsdp', None))
    """

    axis: int | None
    segments: tuple[Segment, ...] = ()
    halves: bool = False
    name: str = ""
    over: tuple[str, ...] = TENSOR
    fallback: int | None = None
    by_device: bool = False
    whole: tuple[str, ...] = ()
    unit: int = 1
    fsdp: int | None = None

    @property
    def made_by(self) -> str:
        """The constructor of ShardingStrategy that makes the Split, with a number of devices.

        Example:
            >>> [split.made_by for split in (ROWS, REPLICATED, Split(2), Split(1, (Segment.head_aware(4, 8),)))]
            ['rowwise', 'replicate', 'axiswise', 'head_aware_columnwise']
        """
        if self.name or self.halves:
            return self.name or "gate_up"
        if self.segments:
            is_of_heads = len(self.segments) == 1 and self.segments[0].num_heads and self.axis == 1
            return "head_aware_columnwise" if is_of_heads else "segmented"
        return {None: "replicate", 0: "rowwise", 1: "columnwise"}.get(self.axis, "axiswise")

    @property
    def is_for_layers(self) -> bool:
        """Whether it is a marker for whole layers, which give each of their weights its own Split."""
        return self.name in ("tensor_parallel", "expert_parallel")

    @property
    def of_bias(self) -> Split:
        """The Split of the bias of a Linear whose weight ``[out, in]`` has this one."""
        if self.axis in (0, -2):
            return replace(self, axis=0)
        return replace(self, axis=None, segments=(), halves=False, name="")

    def of_linear(self, out_axis: int = 0) -> dict[str, Split]:
        """The Splits of the weight and the bias of a linear layer, for one of its weight as ``[out, in]``.

        Args:
            out_axis: axis of the outputs in the weight as the layer stores it.

        Example:
            >>> {name: split.axis for name, split in COLUMNS.of_linear().items()}
            {'weight': 1, 'bias': None}
        """
        axis = self.axis if self.axis is None or out_axis == 0 else (self.axis + out_axis) % 2
        return {"weight": replace(self, axis=axis), "bias": self.of_bias}

    # -- the parts of each of n devices

    def segments_of(self, size: int) -> tuple[Segment, ...]:
        """The segments of an axis of this size.

        Raises:
            ValueError: the axis must have another size.
        """
        if self.halves and size % 2:
            raise ValueError(f"{self.made_by}: axis {self.axis} must have an even size, got {size}")
        even = (Segment(size // 2),) * 2 if self.halves else (Segment(size),)
        found = self.segments or even
        total = sum(segment.size for segment in found)
        quarters = (4, 3, 2) if self.axis in (1, -1) else (4, 2)
        if 4 * size not in [quarter * total for quarter in quarters]:
            sizes = " + ".join(str(segment.size) for segment in found)
            sizes = f"{sizes} = {total}" if len(found) > 1 else sizes
            raise ValueError(
                f"{self.made_by}: axis {self.axis} must have {sizes} values, got {size}"
            )
        return found

    def ranges(self, size: int, i: int, n: int) -> list[Range]:
        """The ranges of an axis of this size for device ``i`` of ``n``, which are concatenated.

        Raises:
            ValueError: the axis must have another size.
        """
        found, offset, segments = [], 0, self.segments_of(size)
        total = sum(segment.size for segment in segments) or 1
        for segment in segments:
            start, end = (offset + one for one in segment.shard_range(i, n))
            found.append((start * size // total, end * size // total))
            offset += segment.size
        return found

    def __call__(self, weight: Any, i: int, n: int) -> Any:
        """The part of a weight for device ``i`` of ``n``.

        Raises:
            IndexError, TypeError, ValueError: the Split does not fit the weight's shape.
            NotImplementedError: it is for whole layers.
        """
        if (found := self.axis_in(weight.shape)) is None:
            return weight
        axis, size = found
        before = (slice(None),) * axis
        parts = [weight[(*before, slice(a, b))] for a, b in self.ranges(size, i, n)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)

    def axis_in(self, shape: Sequence[Any]) -> tuple[int, int] | None:
        """The axis of a weight of this shape that is split, and its size; None if none is.

        Raises:
            IndexError, TypeError: there is no such axis, or its size is unknown.
            NotImplementedError: the Split is for whole layers.
        """
        if self.is_for_layers:
            raise NotImplementedError(
                f"{self.name} is for whole layers; use rowwise, columnwise, … for a weight"
            )
        if self.axis is None:
            return None
        if not -len(shape) <= self.axis < len(shape):
            raise IndexError(f"shape {tuple(shape)} has no axis {self.axis} to split")
        size = shape[self.axis]
        if not isinstance(size, (int, StaticDim)):
            raise TypeError(
                f"axis {self.axis} of a weight of shape {list(shape)!r} cannot be split, as its size is unknown"
            )
        return self.axis % len(shape), int(size)

    # -- on a mesh

    def spec(self, mesh: Any, shape: Sequence[int]) -> PartitionSpec:
        """The PartitionSpec of a weight of this shape."""
        return self.place(mesh, shape).spec

    def place(self, mesh: Any, shape: Sequence[int], block: int = 1, count: int = 1) -> Placed:
        """The placement of a weight of this shape on a mesh.

        Args:
            shape: sizes of the weight; for quantised weights in values, not bytes.
            block: number of values of the last axis that stay together: the quantisation block.
            count: number of weights along the last leading axis of a stack, such as a layer's experts.

        Raises:
            IndexError, ValueError, NotImplementedError: the Split does not fit the shape.
        """
        # For each axis, the largest number of parts that it can be split into.
        counts = [*shape[:-1], shape[-1] // block] if shape else []
        entries: list[Entry] = [()] * len(shape)
        dealt, shared = self._deal(mesh, shape, count)
        kinds = [kind for kind in self.over if axis_of(mesh, kind) not in dealt]
        why, undivided = self._enter(mesh, kinds, shape, counts, entries)
        layout = None
        if self.by_device and any(entries) and self.axis is not None and len(self.segments) > 1:
            n = parts_over(mesh, entries[self.axis])
            sizes = tuple(segment.size for segment in self.segments)
            layout = DeviceMajor(n, sizes, self.axis % len(shape))
        fsdp, gathered = axis_of(mesh, "fsdp"), ""
        if fsdp is not None and mesh.shape[fsdp] > 1:
            gathered = _enter_fsdp(shape, counts, fsdp, mesh.shape[fsdp], entries, self.fsdp)
            if gathered and not any(entries) and not dealt:
                undivided = (*undivided, fsdp)
        why = "; ".join(filter(None, [shared, why, gathered]))
        return Placed(spec_of(entries), why or "no strategy", layout, dealt, undivided)

    def _deal(self, mesh: Any, shape: Sequence[int], count: int) -> tuple[tuple[str, ...], str]:
        """The mesh axes over which whole weights of a stack are distributed, and the reason in words."""
        if not self.whole or count == 1:
            return (), ""
        over, both = axes_of(mesh, self.whole), axes_of(mesh, self.over)
        rest = parts_over(mesh, [axis for axis in both if axis not in over])
        found = self.axis_in(shape)
        if found and self._units(found[1])[0] % rest and count % parts_over(mesh, both) == 0:
            over = both
        if not over:
            return (), ""
        n, sizes = parts_over(mesh, over), sizes_text(mesh, over, "·")
        if count % n:
            return (), f"the {count} experts do not divide by {sizes}"
        return over, f"{count // n} of {count} whole experts each over {sizes}"

    def _enter(
        self,
        mesh: Any,
        kinds: Sequence[str],
        shape: Sequence[int],
        counts: Sequence[int],
        entries: list[Entry],
    ) -> tuple[str, tuple[str, ...]]:
        """Enters the axis that is split into ``entries``.

        Returns:
            Why it is split or not; and the mesh axes over which it would be, if the sizes divided.
        """
        over = axes_of(mesh, kinds)
        if not over:
            return f"the mesh has no {' or '.join(kinds)} axis" if kinds else "", ()
        n, sizes = parts_over(mesh, over), sizes_text(mesh, over, " and ")
        problems = []
        for split in [self] if self.fallback is None else [self, Split(self.fallback)]:
            if (found := split.axis_in(shape)) is None:
                return "replicated by its strategy", ()
            axis, size = found
            units, unit = split._units(size)
            if units % n == 0 and counts[axis] % n == 0:
                entries[axis] = over
                return "; ".join([*problems, f"axis {axis} over {sizes}"]), ()
            if counts[axis] != size:
                units, unit = counts[axis], "blocks"
            where = "" if unit == "heads" else f" of axis {axis}"
            problems.append(f"the {units} {unit}{where} do not divide by {sizes}")
        return "; ".join(problems), over

    def _units(self, size: int) -> tuple[int, str]:
        """The number of equal parts of an axis that can be distributed, and their name."""
        segments = self.segments_of(size)
        units = math.gcd(*(segment.num_heads or segment.size for segment in segments))
        if self.unit > 1:
            return (1 if size % self.unit else math.gcd(units, size // self.unit)), "blocks"
        if all(segment.num_heads for segment in segments):
            return units, "heads"
        name = "common parts of the segments" if self.segments else "values"
        return units, f"{name} in each half" if self.halves else name


ROWS, COLUMNS, REPLICATED = Split(0), Split(1), Split(None)
# Of embedding tables and heads, whose rows are the vocabulary: columns, where the rows do not divide evenly.
TABLE = Split(0, fallback=1)
# Of weights without a rule, which only ``fsdp`` splits.
NO_SPLIT = Split(None, over=())


def _enter_fsdp(
    shape: Sequence[int],
    counts: Sequence[int],
    fsdp: str,
    n: int,
    entries: list[Entry],
    first: int | None,
) -> str:
    """Enters the axis that is split over ``fsdp``: ``first``, or else the largest that is free.

    Vectors are replicated, because a gather would cost more than it saves.
    """
    if len(shape) < 2:
        return ""
    free = [axis for axis in range(len(shape)) if not entries[axis] and counts[axis] % n == 0]
    if not free:
        return f"no axis left that divides by {fsdp}={n}"
    axis = first if first in free else max(free, key=lambda axis: shape[axis])
    entries[axis] = (fsdp,)
    return f"axis {axis} over {fsdp}={n}"


# For functions of strategies, while they live: shape and number of parts → the Split.
_FOUND: weakref.WeakKeyDictionary[Any, dict[Any, Split | None]] = weakref.WeakKeyDictionary()


def split_of_function(rule: Callable[..., Any], shape: tuple[int, ...], n: int) -> Split | None:
    """The Split of a rule that is a function, if its n parts are equal consecutive blocks of one axis; else None.

    The function is called with the index of each value along each axis, and its parts are compared with the blocks.

    Example:
        >>> split_of_function(lambda w, i, n: w[:, i * 3 : i * 3 + 3], (2, 6), 2)
        Split(axis=1, ...
    """
    try:
        found = _FOUND.setdefault(rule, {})
    except TypeError:  # it has no hash, or no weak reference
        found = {}
    if (shape, n) not in found:
        found[shape, n] = _compare(rule, shape, n)
    return found[shape, n]


def _compare(rule: Callable[..., Any], shape: tuple[int, ...], n: int) -> Split | None:
    def parts(index: Any) -> list[Any]:
        return [jnp.asarray(rule(to_value(index), i, n)) for i in range(n)]

    made = jax.eval_shape(parts, jax.ShapeDtypeStruct(shape, jnp.int32))
    shapes = {(part.shape, str(part.dtype)) for part in made}
    block = lambda axis: (*shape[:axis], shape[axis] // n, *shape[axis + 1 :])
    fits = [i for i, size in enumerate(shape) if size % n == 0 and shapes == {(block(i), "int32")}]
    if not fits:
        return None

    def are_blocks(zero: Any) -> Any:
        same = jnp.bool(True)
        for axis in range(len(shape)):
            # Without the sum XLA would compute the constant when it compiles, and need memory for all of it.
            index = jax.lax.broadcasted_iota(jnp.int32, shape, axis) + zero
            for part, block in zip(parts(index), jnp.split(index, n, fits[0]), strict=True):
                same &= (part == block).all()
        return same

    program = jax.jit(are_blocks).lower(np.int32(0)).compile()  # runs also inside a trace
    return Split(fits[0]) if program(np.int32(0)) else None
