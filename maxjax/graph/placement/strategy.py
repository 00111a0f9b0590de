"""ShardingStrategy: MAX's class of a number of devices and the rule by which a weight is split over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from ...rendering.division import Division
from ...rendering.rendered import Rendered, card, guarded
from ...rendering.row import short
from ...storage.boxes import Box
from ..shape import Shape
from ..symbolic import sizes_of, to_dim, to_sizes
from .split import COLUMNS, REPLICATED, ROWS, Segment, Split


def _made_by(constructor: str) -> Any:
    return property(
        lambda strategy: (
            isinstance(strategy.shard, Split) and strategy.shard.made_by == constructor
        ),
        doc=f"Whether the strategy was made by ``{constructor}``.",
    )


@dataclass(frozen=True, repr=False)
class ShardingStrategy(Rendered):
    """How a weight is split: the number of devices and the rule.

    Args:
        num_devices: number of parts that ``Weight.shard`` makes. On a mesh, the size of the mesh axis counts.
        shard: rule ``f(weight, i, num_devices)`` that returns the part of device ``i``. The
            constructors use a Split, which is data; ``Weight.shard`` accepts any function, and gives it the weight
            as a TensorValue. A mesh accepts a function whose parts are equal consecutive blocks of one axis.

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
        return cls(num_devices, ROWS)

    @classmethod
    def columnwise(cls, num_devices: int) -> ShardingStrategy:
        """Splits columns: the input features of a Linear's weight."""
        return cls(num_devices, COLUMNS)

    @classmethod
    def axiswise(cls, axis: int, num_devices: int) -> ShardingStrategy:
        """Splits one axis, counted from the end if negative."""
        return cls(num_devices, Split(axis, name="axiswise"))

    @classmethod
    def replicate(cls, num_devices: int) -> ShardingStrategy:
        """Replicates the weight on each device."""
        return cls(num_devices, REPLICATED)

    @classmethod
    def stacked_qkv(cls, num_devices: int, num_heads: int, head_dim: int) -> ShardingStrategy:
        """Splits the rows of concatenated queries, keys and values between heads."""
        parts = (Segment.head_aware(num_heads, head_dim),) * 3
        return cls(num_devices, Split(0, parts, name="stacked_qkv"))

    @classmethod
    def head_aware_columnwise(
        cls, num_devices: int, num_heads: int, head_dim: int
    ) -> ShardingStrategy:
        """Splits columns between heads, for the output projection of attention."""
        heads = (Segment.head_aware(num_heads, head_dim),)
        return cls(num_devices, Split(1, heads))

    @classmethod
    def gate_up(cls, num_devices: int, axis: int = 2) -> ShardingStrategy:
        """Splits gate and up projections that are concatenated on one axis, each half evenly."""
        return cls(num_devices, Split(axis, halves=True))

    @classmethod
    def segmented(
        cls, num_devices: int, axis: int, segments: Iterable[Segment]
    ) -> ShardingStrategy:
        """Splits segments of one axis, each by its own rule."""
        return cls(num_devices, Split(axis, tuple(segments), name="segmented"))

    @classmethod
    def tensor_parallel(cls, num_devices: int) -> ShardingStrategy:
        """Splits each weight of a complete layer as tensor parallelism requires."""
        return cls(num_devices, Split(None, name="tensor_parallel"))

    @classmethod
    def expert_parallel(cls, num_devices: int) -> ShardingStrategy:
        """Gives each device some of the experts of a layer."""
        return cls(num_devices, Split(None, name="expert_parallel"))

    # -- properties

    is_rowwise = _made_by("rowwise")
    is_colwise = _made_by("columnwise")
    is_axiswise = _made_by("axiswise")
    is_replicate = _made_by("replicate")
    is_stacked_qkv = _made_by("stacked_qkv")
    is_head_aware_colwise = _made_by("head_aware_columnwise")
    is_gate_up = _made_by("gate_up")
    is_segmented = _made_by("segmented")
    is_tensor_parallel = _made_by("tensor_parallel")
    is_expert_parallel = _made_by("expert_parallel")

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
    if not isinstance(rule, Split):
        return f"ShardingStrategy({count}, {short(rule)})"
    arguments = [count]
    if rule.made_by == "axiswise":
        arguments = [str(rule.axis), count]
    elif rule.made_by in ("stacked_qkv", "head_aware_columnwise"):
        size, heads = rule.segments[0].size, rule.segments[0].num_heads or 1
        arguments += [f"num_heads={heads}", f"head_dim={size // heads}"]
    elif rule.made_by in ("gate_up", "segmented"):
        arguments += [f"axis={rule.axis}"]
        arguments += [] if rule.halves else [f"segments={rule.segments!r}"]
    return f"ShardingStrategy.{rule.made_by}({', '.join(arguments)})"


# More devices than that are not drawn one by one.
_MOST_DRAWN = 256


def strategy_division(strategy: ShardingStrategy) -> Division | None:
    """The part of each device of an example weight of suitable size; None if the rule does not say."""
    rule, count = strategy.shard, strategy.num_devices
    if strategy.is_replicate:
        return Division.of((1, 1), "replicated", dict.fromkeys(range(count), ((0, 1), (0, 1))))
    axis = strategy.sharded_axis
    if not isinstance(rule, Split) or axis is None or count > _MOST_DRAWN:
        return None
    sizes = [segment.size for segment in rule.segments]
    extent = sum(sizes) or (2 * count if rule.halves else count)
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
    if isinstance(rule, Split) and dims.parameters and (found := rule.axis_in(shape)) is not None:
        axis, extent = found
        size = sum(stop - start for start, stop in rule.ranges(extent, i, strategy.num_devices))
        return (*shape[:axis], size, *shape[axis + 1 :])
    sizes = to_sizes(dims, sizes_of(str(name) for name in dims.parameters).values())
    whole = jax.ShapeDtypeStruct(sizes, jax.dtypes.canonicalize_dtype(dtype))
    part = jax.eval_shape(lambda w: strategy(w, i), whole)
    return tuple(size if isinstance(size, int) else to_dim(size) for size in part.shape)
