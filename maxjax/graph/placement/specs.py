"""Placement: turns the requested split of a weight and a mesh into a PartitionSpec.

Only the axes of the mesh decide which kinds of parallelism are used. Strategies of tensors
split over ``model``, those of experts over ``expert`` and ``model``; ``fsdp`` splits the
largest remaining axis; ``data`` and ``seq`` split no weight. Axes that do not divide evenly are
replicated, and the reason is recorded.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from ...errors import UserInputError
from ...kernels.explicit import names_in as names_in
from ...kernels.explicit import spec_of as spec_of
from .device_major import DeviceMajor
from .mesh import AXES, axis_name
from .strategy import ByModule, Segmented, ShardingStrategy, _Ranges

TENSOR, EXPERTS = ("model",), ("expert", "model")
# Kinds of axes that split a batch; along ``expert``, everything except the experts is data-parallel.
BATCH = ("data", "fsdp", "expert")


class Split(NamedTuple):
    """A strategy and the kinds of mesh axes that it splits over.

    Attributes:
        strategy: how the weight is split; ``num_devices`` is ignored.
        over: kinds of axes; those that the mesh has are combined.
        fallback: alternative to try if the sizes do not divide evenly.
        by_device: whether the layer supports rows or columns in device-major order
            (:class:`DeviceMajor`); the strategy is then ``segmented``.
        whole: kinds of axes over which whole weights of a stack are distributed instead, if their
            number divides evenly; ``strategy`` then splits each over the other axes of ``over``.
        fsdp: axis of the weight to split over ``fsdp``; the largest possible one if it cannot be.
    """

    strategy: ShardingStrategy
    over: tuple[str, ...] = TENSOR
    fallback: ShardingStrategy | None = None
    by_device: bool = False
    whole: tuple[str, ...] = ()
    fsdp: int | None = None


class PartOf(NamedTuple):
    """The rule of a tensor that is a part of a weight, such as the scales of a quantised linear layer.

    Each axis of the tensor is split as the axis of the weight that it runs along.

    Attributes:
        weight: attribute of the layer whose rule is that of the whole weight.
        shape: shape of the whole weight.
        axes: for each axis of the tensor, the axis of the weight that it runs along; None for an
            axis that is replicated.
        rule: rule of the whole weight.
    """

    weight: str
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    rule: Any = None


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


def axis_of(mesh: Any, kind: str) -> str | None:
    """The mesh's name for a kind of axis, or None: ``model`` may be called ``tp``, or be the only axis of any name.

    Example:
        >>> import maxjax
        >>> axis_of(maxjax.make_mesh(tp=1), "model"), axis_of(maxjax.make_mesh(tp=1), "data")
        ('model', None)
    """
    if kind in mesh.axis_names:
        return kind
    if kind == "model" and _is_unnamed(mesh):
        return mesh.axis_names[0]
    return next((name for name in mesh.axis_names if axis_name(name) == axis_name(kind)), None)


def _is_unnamed(mesh: Any) -> bool:
    """Whether the mesh has one axis with a name of its own, which then splits tensors."""
    names = mesh.axis_names
    return len(names) == 1 and axis_name(names[0]) not in AXES


def check_mesh(mesh: Any) -> None:
    """Checks that a mesh has a known axis.

    Raises:
        UserInputError: it has several axes, and none is data, fsdp, expert, seq or model, or an alias of these.
    """
    if not any(axis_of(mesh, kind) for kind in AXES):
        raise UserInputError(
            f"the mesh has the axes {', '.join(map(str, mesh.axis_names)) or '()'}, and strategies know "
            f"{', '.join(AXES)} (or dp, tp, ep, sp): use these names, "
            "or pass rules, which maxjax.load, model.to(mesh, rules=…) and maxjax.plan take"
        )


def place(
    name: str, shape: Sequence[int], wanted: Any, mesh: Any, block: int = 1, count: int = 1
) -> Placed:
    """The placement of a weight on a mesh.

    Args:
        name: name of the weight, for messages.
        shape: sizes of the weight; for quantised weights in values, not bytes.
        block: number of values of the last axis that stay together: the quantisation block.
        wanted: requested split: a ShardingStrategy, a :class:`Split`, a PartitionSpec to be used
            unchanged, a :class:`PartOf`, or None for no request.
        mesh: a ``jax.sharding.Mesh``, or an AbstractMesh.
        count: number of weights along the last leading axis of a stack, such as a layer's experts.

    Raises:
        UserInputError: the strategy or the spec does not fit the weight's rank; a spec names
            an axis that the mesh lacks, or one that does not divide the size.
        NotImplementedError: the strategy is a function, whose ranges are unknown.

    Example:
        >>> import jax, maxjax
        >>> from maxjax.graph import ShardingStrategy
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("fsdp", "model"))
        >>> tuple(place("w", (8, 6), ShardingStrategy.rowwise(1), mesh).spec)
        ('model', 'fsdp')
        >>> place("w", (9, 6), ShardingStrategy.rowwise(1), mesh).why
        'the 9 values of axis 0 do not divide by model=4; axis 1 over fsdp=2'
    """
    if isinstance(wanted, PartOf):
        return _place_part(name, shape, wanted, mesh, count)
    if not isinstance(wanted, (ShardingStrategy, Split, PartitionSpec, tuple, type(None))):
        raise UserInputError(
            f"weight '{name}': a rule must be a PartitionSpec, a ShardingStrategy or None, not {wanted!r}"
        )
    if isinstance(wanted, PartitionSpec) or type(wanted) is tuple:
        return Placed(_explicit(name, shape, wanted, mesh, block), "as given")
    # For each axis, the largest number of parts that it can be split into.
    counts = [*shape[:-1], shape[-1] // block] if shape else []
    entries: list[tuple[str, ...]] = [()] * len(shape)
    reasons = []
    split = Split(wanted) if isinstance(wanted, ShardingStrategy) else wanted
    dealt, undivided = (), ()
    if isinstance(split, Split):
        dealt, reason = _dealt(split, mesh, count)
        reasons.append(reason)
        if dealt:
            split = split._replace(over=tuple(k for k in split.over if k not in split.whole))
        reason, undivided = _split_tensor(name, shape, counts, split, mesh, entries)
        reasons.append(reason)
    fsdp = axis_of(mesh, "fsdp")
    if fsdp is not None and mesh.shape[fsdp] > 1:
        first = split.fsdp if isinstance(split, Split) else None
        reasons.append(_split_fsdp(shape, counts, fsdp, mesh.shape[fsdp], entries, first))
        if reasons[-1] and not any(entries) and not dealt:
            undivided = (*undivided, fsdp)
    if split is None and not any(reasons):
        reasons.append("no strategy")
    why = "; ".join(reason for reason in reasons if reason)
    return Placed(spec_of(entries), why, _layout(split, entries, mesh), dealt, undivided)


def _place_part(name: str, shape: Sequence[int], part: PartOf, mesh: Any, count: int) -> Placed:
    """The placement of one of several tensors of a weight: where the whole weight would be split.

    An axis is replicated if its parts would not be those of the weight's axis.
    """
    placed = place(name, part.shape, part.rule, mesh, count=count)
    entries: list[tuple[str, ...]] = [()] * len(shape)
    whole = []
    split = [names_in(entry) for entry in placed.spec]
    for along, over in enumerate(split):
        n = math.prod(mesh.shape[axis] for axis in over)
        size = part.shape[along]
        fits = [
            axis
            for axis, own in enumerate(part.axes)
            if own == along and not shape[axis] % n and _are_multiples(shape[axis], size)
        ]
        for axis in fits[:1]:
            entries[axis] = over
        if over and not fits:
            whole.append(f"its values along axis {along} are not split")
    return Placed(
        spec_of(entries),
        "; ".join(filter(None, [placed.why, *whole])),
        None,
        placed.split,
        placed.undivided,
    )


def _are_multiples(a: int, b: int) -> bool:
    return bool(a and b) and (a % b == 0 or b % a == 0)


def _axes_of(mesh: Any, kinds: Sequence[str]) -> tuple[str, ...]:
    """The mesh's axes of these kinds, without those of one device."""
    axes = (axis_of(mesh, kind) for kind in kinds)
    return tuple(axis for axis in axes if axis is not None and mesh.shape[axis] > 1)


def _dealt(split: Split, mesh: Any, count: int) -> tuple[tuple[str, ...], str]:
    """The mesh axes over which whole weights of a stack are distributed, and the reason in words."""
    over = _axes_of(mesh, split.whole)
    n = math.prod(mesh.shape[axis] for axis in over)
    if n == 1 or count == 1:
        return (), ""
    shown = "·".join(f"{axis}={mesh.shape[axis]}" for axis in over)
    if count % n:
        return (), f"the {count} experts do not divide by {shown}"
    return over, f"{count // n} of {count} whole experts each over {shown}"


def _split_tensor(
    name: str,
    shape: Sequence[int],
    counts: Sequence[int],
    split: Split,
    mesh: Any,
    entries: list[tuple[str, ...]],
) -> tuple[str, tuple[str, ...]]:
    """Enters the axis that a strategy splits into ``entries``.

    Returns:
        Why it does or does not split; and the mesh axes over which it would, if the sizes divided.
    """
    over = _axes_of(mesh, split.over)
    if not over:
        return f"the mesh has no {' or '.join(split.over)} axis", ()
    n = math.prod(mesh.shape[axis] for axis in over)
    sizes = " and ".join(f"{axis}={mesh.shape[axis]}" for axis in over)
    problems = []
    for strategy in filter(None, (split.strategy, split.fallback)):
        found = _divided(name, shape, strategy, n)
        if found is None:
            return "replicated by its strategy", ()
        axis, units, unit = found
        if units % n == 0 and counts[axis] % n == 0:
            entries[axis] = over
            return "; ".join([*problems, f"axis {axis} over {sizes}"]), ()
        if counts[axis] != shape[axis]:
            units, unit = counts[axis], "blocks"
        count = f"the {units} {unit}" if unit == "heads" else f"the {units} {unit} of axis {axis}"
        problems.append(f"{count} do not divide by {sizes}")
    return "; ".join(problems), over


def _layout(split: Any, entries: list[tuple[str, ...]], mesh: Any) -> DeviceMajor | None:
    """The layout of a weight whose segments of rows or columns are each split."""
    if split is None or not split.by_device:
        return None
    rule = split.strategy.shard
    if not isinstance(rule, Segmented) or len(rule.segments) < 2:
        return None
    over = entries[rule.axis]
    tensor = {axis_of(mesh, kind) for kind in split.over}
    if not over or not set(over) <= tensor:
        return None
    n = math.prod(mesh.shape[name] for name in over)
    segments = tuple(segment.size for segment in rule.segments)
    return DeviceMajor(n, segments, rule.axis % len(entries))


def _divided(
    name: str, shape: Sequence[int], strategy: ShardingStrategy, n: int
) -> tuple[int, int, str] | None:
    """The axis that is split, its number of units and their name; None for no axis."""
    rule = strategy.shard
    if isinstance(rule, ByModule):
        raise UserInputError(
            f"weight '{name}': {rule.name} is for whole layers; use rowwise, columnwise, … for a weight"
        )
    if not isinstance(rule, _Ranges):
        raise NotImplementedError(
            f"weight '{name}' has a strategy made of a function, which a mesh does not support (Weight.shard does): "
            "use rowwise, columnwise, axiswise, … or rules= with a PartitionSpec"
        )
    if rule.axis is None:
        return None
    rank = len(shape)
    if not -rank <= rule.axis < rank:
        raise UserInputError(
            f"weight '{name}' of shape {tuple(shape)} has no axis {rule.axis} to split"
        )
    axis = rule.axis % rank
    try:
        end = max((stop for _, stop in rule.ranges(shape[axis], n - 1, n)), default=shape[axis])
    except ValueError as error:
        raise UserInputError(f"weight '{name}': {error}") from None
    if end != shape[axis]:
        raise UserInputError(
            f"weight '{name}': its strategy covers {end} of the {shape[axis]} values of axis {axis}"
        )
    return axis, rule.units(shape[axis]), rule.unit


def _split_fsdp(
    shape: Sequence[int],
    counts: Sequence[int],
    fsdp: str,
    n: int,
    entries: list[tuple[str, ...]],
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


def _explicit(name: str, shape: Sequence[int], wanted: Any, mesh: Any, block: int) -> PartitionSpec:
    """A spec of the caller with the axis names of the mesh, checked against the shape."""
    if len(wanted) > len(shape):
        raise UserInputError(
            f"weight '{name}' of shape {tuple(shape)} has fewer axes than its spec {tuple(wanted)}"
        )
    entries: list[tuple[str, ...]] = [()] * len(shape)
    for axis, entry in enumerate(wanted):
        if not all(
            isinstance(kind, str) for kind in (entry if type(entry) is tuple else [entry or ""])
        ):
            raise UserInputError(f"weight '{name}': {entry!r} in its spec is not a mesh axis")
        for kind in names_in(entry):
            found = axis_of(mesh, kind)
            if found is None:
                raise UserInputError(
                    f"weight '{name}': its spec names the axis '{kind}', but the mesh has the axes "
                    f"{', '.join(map(str, mesh.axis_names))}"
                )
            entries[axis] = (*entries[axis], found)
        n = math.prod(mesh.shape[axis_name] for axis_name in entries[axis])
        unit = block if axis == len(shape) - 1 else 1
        if shape[axis] % (n * unit):
            in_blocks = f" in blocks of {unit}" if unit > 1 else ""
            raise UserInputError(
                f"weight '{name}': axis {axis} of {shape[axis]}{in_blocks} does not divide by {n} "
                f"({', '.join(entries[axis])})"
            )
    used = [axis for entry in entries for axis in entry]
    if len(set(used)) < len(used):
        raise UserInputError(
            f"weight '{name}': the spec {tuple(wanted)} uses an axis of the mesh twice"
        )
    return spec_of(entries)


def by_pattern(rules: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Whether a pattern matches the name (``*`` matches anything), and the value of the first match.

    Example:
        >>> by_pattern({"*.q_proj.weight": 1, "*": 2}, "layers.0.q_proj.weight")
        (True, 1)
    """
    for pattern, wanted in rules.items():
        if fnmatch.fnmatchcase(name, pattern):
            return True, wanted
    return False, None


def parts(weight: Any, axis: int) -> int:
    """The number of parts that an axis of a Weight is split into.

    Example:
        >>> from maxjax.graph import DeviceRef, Weight
        >>> parts(Weight("w", "float32", (4, 2), DeviceRef.CPU()), 0)
        1
    """
    names = split_over(weight, axis)
    return math.prod(weight.sharding.mesh.shape[name] for name in names) if names else 1


def split_over(weight: Any, axis: int) -> tuple[str, ...]:
    """The mesh axes that an axis of a Weight is split over."""
    where = getattr(weight, "sharding", None)
    if not isinstance(where, NamedSharding) or axis >= len(where.spec):
        return ()
    return names_in(where.spec[axis])


def batch_axes(mesh: Any, count: int, kinds: Sequence[str] = BATCH) -> tuple[str, ...]:
    """The mesh axes that ``count`` rows of a batch are split over: those that divide them evenly.

    Example:
        >>> import jax
        >>> batch_axes(jax.sharding.AbstractMesh((2, 3, 2), ("data", "model", "fsdp")), 6)
        ('data',)
    """
    found: tuple[str, ...] = ()
    for kind in kinds:
        axis = axis_of(mesh, kind)
        n = math.prod(mesh.shape[name] for name in found)
        if axis is not None and count % (n * mesh.shape[axis]) == 0:
            found = (*found, axis)
    return found


def held_bytes(sharding: Any, shape: Sequence[int], itemsize: int) -> int:
    """The number of bytes of an array on one device."""
    part = shape if sharding is None else sharding.shard_shape(tuple(shape))
    return math.prod(part) * itemsize


def mesh_of(shardings: Sequence[Any]) -> Any:
    """The mesh of the weights, or None if they are not on a mesh."""
    found = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next(found, None)
