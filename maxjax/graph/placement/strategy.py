"""ShardingStrategy: how a weight is split over devices, as data.

A strategy splits one axis: for each device it gives ranges of that axis, which are
concatenated. Strategies from the constructors of ShardingStrategy are frozen and compare by content.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from ...rendering.division import Box, Division
from ...rendering.rendered import Rendered, card, guarded
from ...rendering.row import short
from ..shape import Shape, StaticDim
from ..symbolic import sizes_of, to_dim, to_sizes

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


class _Ranges:
    """Base class of rules: ranges of an axis make a callable ``rule(weight, device, devices)``."""

    axis: int | None
    # The constructor of ShardingStrategy that makes the rule.
    name: Any

    def ranges(self, extent: int, i: int, n: int) -> list[Range]:
        raise NotImplementedError

    def units(self, extent: int) -> int:
        """The number of equal parts that can be distributed; a mesh axis must divide it."""
        return extent

    # Name of the units, for messages.
    unit: Any = "values"

    def __call__(self, weight: Any, i: int, n: int) -> Any:
        if self.axis is None:
            return weight
        axis, extent = _axis_of(weight.shape, self.axis)
        before = (slice(None),) * axis
        parts = [weight[(*before, slice(a, b))] for a, b in self.ranges(extent, i, n)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _axis_of(shape: Sequence[Any], axis: int) -> tuple[int, int]:
    rank = len(shape)
    if not -rank <= axis < rank:
        raise IndexError(f"a weight of shape {tuple(shape)} has no axis {axis} to split")
    extent = shape[axis]
    if not isinstance(extent, (int, StaticDim)):
        raise TypeError(
            f"axis {axis} of a weight of shape {list(shape)!r} cannot be split, as its size is unknown"
        )
    return axis % rank, int(extent)


@dataclass(frozen=True)
class Replicated(_Ranges):
    """Replicates the weight on every device."""

    axis = None
    name = "replicate"


@dataclass(frozen=True)
class ByModule(_Ranges):
    """A marker for Modules, which give each of their weights its own strategy."""

    name: str
    axis = None

    def __call__(self, weight: Any, i: int, n: int) -> Any:
        raise NotImplementedError(
            f"{self.name} is a placeholder for whole layers; use rowwise, columnwise, … for a weight"
        )


@dataclass(frozen=True)
class Evenly(_Ranges):
    """Splits one axis as evenly as possible."""

    axis: int
    name: str = "axiswise"

    def ranges(self, extent: int, i: int, n: int) -> list[Range]:
        return [even_range(extent, i, n)]


@dataclass(frozen=True)
class StackedQkv(_Ranges):
    """Splits concatenated queries, keys and values, each between heads."""

    num_heads: int
    head_dim: int
    axis, name = 0, "stacked_qkv"
    unit = "heads"

    def units(self, extent: int) -> int:
        return self.num_heads

    def ranges(self, extent: int, i: int, n: int) -> list[Range]:
        third = self.num_heads * self.head_dim
        if extent != 3 * third:
            raise ValueError(
                f"stacked_qkv: axis 0 must have 3 x {self.num_heads} heads x {self.head_dim} = {3 * third} rows, "
                f"got {extent}"
            )
        start, end = Segment.head_aware(self.num_heads, self.head_dim).shard_range(i, n)
        return [(part * third + start, part * third + end) for part in range(3)]


@dataclass(frozen=True)
class HeadAware(_Ranges):
    """Splits columns between heads; quantised weights (FP4, FP6) have correspondingly fewer columns."""

    num_heads: int
    head_dim: int
    axis, name = 1, "head_aware_columnwise"
    unit = "heads"

    def units(self, extent: int) -> int:
        return self.num_heads

    def ranges(self, extent: int, i: int, n: int) -> list[Range]:
        start, end = Segment.head_aware(self.num_heads, self.head_dim).shard_range(i, n)
        columns = self.num_heads * self.head_dim
        if 2 * extent == columns:
            start, end = start // 2, end // 2
        elif 4 * extent == 3 * columns:
            start, end = start * 3 // 4, end * 3 // 4
        if end > extent:
            raise ValueError(f"head_aware_columnwise: {self.num_heads} heads of {self.head_dim} need {end} columns, "
                             f"but there are {extent}")  # fmt: skip
        return [(start, end)]


@dataclass(frozen=True)
class GateUp(_Ranges):
    """Splits each of two halves of one axis evenly."""

    axis: int
    name = "gate_up"
    unit = "values in each half"

    def units(self, extent: int) -> int:
        return extent // 2

    def ranges(self, extent: int, i: int, n: int) -> list[Range]:
        half, rest = divmod(extent, 2)
        if rest:
            raise ValueError(f"gate_up: axis {self.axis} must have an even size, got {extent}")
        start, end = even_range(half, i, n)
        return [(start, end), (half + start, half + end)]


@dataclass(frozen=True)
class Segmented(_Ranges):
    """Splits consecutive segments of one axis, each by its own rule."""

    axis: int
    segments: tuple[Segment, ...]
    name = "segmented"

    def units(self, extent: int) -> int:
        return math.gcd(*(segment.num_heads or segment.size for segment in self.segments))

    @property
    def unit(self) -> str:
        """The name of the units, which are not split."""
        heads = all(segment.num_heads for segment in self.segments)
        return "heads" if heads else "common parts of the segments"

    def ranges(self, extent: int, i: int, n: int) -> list[Range]:
        total = sum(segment.size for segment in self.segments)
        packed = 2 * extent == total
        if not packed and extent != total:
            raise ValueError(f"segmented: the segments have {total} values, the axis {extent}")
        found, offset = [], 0
        for segment in self.segments:
            start, end = segment.shard_range(i, n)
            start, end = offset + start, offset + end
            found.append((start // 2, end // 2) if packed else (start, end))
            offset += segment.size
        return found


@dataclass(frozen=True, repr=False)
class ShardingStrategy(Rendered):
    """How a weight is split: the number of devices and the rule.

    Args:
        num_devices: number of parts that ``Weight.shard`` makes. On a mesh, the size of the mesh axis counts.
        shard: rule ``f(weight, i, num_devices)`` that returns the part of device ``i``. The
            constructors use rules that are data; ``Weight.shard`` accepts any function, and gives it the weight as a
            TensorValue.

    Example:
        >>> from maxjax.graph import ShardingStrategy
        >>> ShardingStrategy.rowwise(2) == ShardingStrategy.rowwise(2)
        True
        >>> ShardingStrategy.columnwise(4).sharded_axis
        1
        >>> import numpy as np
        >>> ShardingStrategy.rowwise(3)(np.arange(7), 1)
        array([3, 4])
    """

    num_devices: int
    shard: Callable[[Any, int, int], Any]

    def __repr__(self) -> str:
        return guarded(self, lambda: strategy_text(self))

    def _mx_html(self) -> str:
        drawing = strategy_division(self)
        facts = {"devices": str(self.num_devices)}
        if self.sharded_axis is not None:
            facts["axis"] = str(self.sharded_axis)
        return card(repr(self), facts, "" if drawing is None else drawing.svg())

    def __call__(self, weight: Any, i: int) -> Any:
        """The part of device ``i``.

        Raises:
            ValueError: there is no such device.
            IndexError, TypeError: the rule does not fit the weight's shape.
        """
        if not 0 <= i < self.num_devices:
            raise ValueError(
                f"device {i} of a {self!r}: devices are numbered from 0 to {self.num_devices - 1}"
            )
        return self.shard(weight, i, self.num_devices)

    def check_devices(self, count: int, what: str) -> None:
        """Checks that there are at most as many devices as parts; fewer devices get the first parts.

        Raises:
            ValueError: there are more devices; the message has both numbers.
        """
        if count > self.num_devices:
            raise ValueError(
                f"{what} is split over {self.num_devices} devices by its sharding strategy, and shard() got {count}: "
                f"give it {self.num_devices} devices, or a strategy for {count}"
            )

    # -- constructors, in MAX's order of arguments

    @classmethod
    def rowwise(cls, num_devices: int) -> ShardingStrategy:
        """Splits rows: the output features of a Linear's weight."""
        return cls(num_devices, Evenly(0, "rowwise"))

    @classmethod
    def columnwise(cls, num_devices: int) -> ShardingStrategy:
        """Splits columns: the input features of a Linear's weight."""
        return cls(num_devices, Evenly(1, "columnwise"))

    @classmethod
    def axiswise(cls, axis: int, num_devices: int) -> ShardingStrategy:
        """Splits one axis, counted from the end if negative."""
        return cls(num_devices, Evenly(axis))

    @classmethod
    def replicate(cls, num_devices: int) -> ShardingStrategy:
        """Replicates the weight on each device."""
        return cls(num_devices, Replicated())

    @classmethod
    def stacked_qkv(cls, num_devices: int, num_heads: int, head_dim: int) -> ShardingStrategy:
        """Splits the rows of concatenated queries, keys and values between heads."""
        return cls(num_devices, StackedQkv(num_heads, head_dim))

    @classmethod
    def head_aware_columnwise(
        cls, num_devices: int, num_heads: int, head_dim: int
    ) -> ShardingStrategy:
        """Splits columns between heads, for the output projection of attention."""
        return cls(num_devices, HeadAware(num_heads, head_dim))

    @classmethod
    def gate_up(cls, num_devices: int, axis: int = 2) -> ShardingStrategy:
        """Splits gate and up projections that are concatenated on one axis, each half evenly."""
        return cls(num_devices, GateUp(axis))

    @classmethod
    def segmented(
        cls, num_devices: int, axis: int, segments: Iterable[Segment]
    ) -> ShardingStrategy:
        """Splits segments of one axis, each by its own rule."""
        return cls(num_devices, Segmented(axis, tuple(segments)))

    @classmethod
    def tensor_parallel(cls, num_devices: int) -> ShardingStrategy:
        """Splits each weight of a complete layer as tensor parallelism requires."""
        return cls(num_devices, ByModule("tensor_parallel"))

    @classmethod
    def expert_parallel(cls, num_devices: int) -> ShardingStrategy:
        """Gives each device some of the experts of a layer."""
        return cls(num_devices, ByModule("expert_parallel"))

    # -- properties

    @property
    def is_rowwise(self) -> bool:
        """Whether the strategy was made by ``rowwise``."""
        return self.shard == Evenly(0, "rowwise")

    @property
    def is_colwise(self) -> bool:
        """Whether the strategy was made by ``columnwise``."""
        return self.shard == Evenly(1, "columnwise")

    @property
    def is_axiswise(self) -> bool:
        """Whether the strategy was made by ``axiswise``."""
        return isinstance(self.shard, Evenly) and self.shard.name == "axiswise"

    @property
    def is_replicate(self) -> bool:
        """Whether the strategy was made by ``replicate``."""
        return self.shard == Replicated()

    @property
    def is_stacked_qkv(self) -> bool:
        """Whether the strategy was made by ``stacked_qkv``."""
        return isinstance(self.shard, StackedQkv)

    @property
    def is_head_aware_colwise(self) -> bool:
        """Whether the strategy was made by ``head_aware_columnwise``."""
        return isinstance(self.shard, HeadAware)

    @property
    def is_gate_up(self) -> bool:
        """Whether the strategy was made by ``gate_up``."""
        return isinstance(self.shard, GateUp)

    @property
    def is_segmented(self) -> bool:
        """Whether the strategy was made by ``segmented``."""
        return isinstance(self.shard, Segmented)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether the strategy was made by ``tensor_parallel``."""
        return self.shard == ByModule("tensor_parallel")

    @property
    def is_expert_parallel(self) -> bool:
        """Whether the strategy was made by ``expert_parallel``."""
        return self.shard == ByModule("expert_parallel")

    @property
    def sharded_axis(self) -> int | None:
        """The axis that is split; None if none is, or if the rule is a function."""
        return getattr(self.shard, "axis", None)


def strategy_text(strategy: ShardingStrategy) -> str:
    """A strategy as the call that makes it.

    Example:
        >>> ShardingStrategy.rowwise(4), ShardingStrategy.stacked_qkv(2, 8, 64)
        (ShardingStrategy.rowwise(4), ShardingStrategy.stacked_qkv(2, num_heads=8, head_dim=64))
    """
    rule, count = strategy.shard, str(strategy.num_devices)
    if not isinstance(rule, _Ranges):
        return f"ShardingStrategy({count}, {short(rule)})"
    if rule.name == "axiswise":
        return f"ShardingStrategy.axiswise({rule.axis}, {count})"
    given = [f for f in fields(rule) if not isinstance(rule, (Evenly, ByModule))]  # type: ignore[arg-type]
    arguments = [count, *(f"{f.name}={getattr(rule, f.name)!r}" for f in given)]
    return f"ShardingStrategy.{rule.name}({', '.join(arguments)})"


# More devices than that are not drawn one by one.
_MOST_DRAWN = 256


def strategy_division(strategy: ShardingStrategy) -> Division | None:
    """The part of each device of an example weight of suitable size; None if the rule does not say."""
    rule, count = strategy.shard, strategy.num_devices
    if isinstance(rule, Replicated):
        return Division.of((1, 1), "replicated", dict.fromkeys(range(count), ((0, 1), (0, 1))))
    axis = strategy.sharded_axis
    if not isinstance(rule, _Ranges) or axis is None or count > _MOST_DRAWN:
        return None
    if isinstance(rule, (StackedQkv, HeadAware)):
        extent = rule.num_heads * rule.head_dim * (3 if isinstance(rule, StackedQkv) else 1)
    elif isinstance(rule, Segmented):
        extent = sum(segment.size for segment in rule.segments)
    else:
        extent = 2 * count if isinstance(rule, GateUp) else count
    parts: list[tuple[Box, tuple[int, ...]]] = []
    for device in range(count):
        for span in rule.ranges(extent, device, count):
            box = (span, (0, extent)) if axis % 2 == 0 else ((0, extent), span)
            parts.append((box, (device,)))
    return Division((extent, extent), strategy_text(strategy), tuple(sorted(parts)))


@runtime_checkable
class Shardable(Protocol):
    """The protocol of objects that have a strategy and can be split: Weights and layers."""

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How the object is split."""
        ...

    def shard(self, devices: Any) -> Sequence[Any]:
        """One part for each device."""
        ...


def shard_shape(
    strategy: ShardingStrategy, shape: tuple[Any, ...], i: int, dtype: Any = jnp.float32
) -> tuple[Any, ...]:
    """The shape of the part for device ``i`` of a weight of this shape; no values are needed.

    Sizes may be symbolic, except that of the axis that is split. A rule that is a user's function is traced with them,
    as in a Graph.

    Raises:
        IndexError: the weight has no such axis.
        TypeError: the size of the axis is symbolic.
        ValueError: the axis cannot be split in this way.
        NotImplementedError: the strategy is for whole layers.
    """
    rule, dims = strategy.shard, Shape(shape)
    if isinstance(rule, _Ranges) and rule.axis is not None and dims.parameters:
        axis, extent = _axis_of(shape, rule.axis)
        size = sum(stop - start for start, stop in rule.ranges(extent, i, strategy.num_devices))
        return (*shape[:axis], size, *shape[axis + 1 :])
    sizes = to_sizes(dims, sizes_of(str(name) for name in dims.parameters).values())
    whole = jax.ShapeDtypeStruct(sizes, jax.dtypes.canonicalize_dtype(dtype))
    part = jax.eval_shape(lambda w: strategy(w, i), whole)
    return tuple(size if isinstance(size, int) else to_dim(size) for size in part.shape)
