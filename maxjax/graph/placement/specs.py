"""Placement: turns what is requested for a weight, and a mesh, into a PartitionSpec.

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
from ...kernels.explicit import parts_over
from ...kernels.explicit import spec_of as spec_of
from .mesh import TENSOR, axes_of, axis_of, sizes_text
from .split import NO_SPLIT, Placed, Split, split_of_function

# Kinds of axes that split a batch; along ``expert``, everything except the experts is data-parallel.
BATCH = ("data", "fsdp", "expert")


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
        NotImplementedError: the strategy is a function whose parts are not equal consecutive blocks of one axis.

    Example:
        >>> import jax, maxjax
        >>> from maxjax.graph.placement.split import ROWS
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("fsdp", "model"))
        >>> tuple(place("w", (8, 6), ROWS, mesh).spec)
        ('model', 'fsdp')
        >>> place("w", (9, 6), ROWS, mesh).why
        'the 9 values of axis 0 do not divide by model=4; axis 1 over fsdp=2'
    """
    if isinstance(wanted, PartOf):
        return _place_part(name, shape, wanted, mesh, count)
    if isinstance(wanted, PartitionSpec) or type(wanted) is tuple:
        return Placed(_explicit(name, shape, wanted, mesh, block), "as given")
    rule = NO_SPLIT if wanted is None else getattr(wanted, "shard", wanted)
    if not isinstance(rule, Split):
        rule = _split_of(name, tuple(shape), wanted, mesh)
    try:
        return rule.place(mesh, shape, block, count)
    except IndexError as error:
        raise UserInputError(f"weight '{name}' of {error}") from None
    except (ValueError, NotImplementedError) as error:
        raise UserInputError(f"weight '{name}': {error}") from None


def _split_of(name: str, shape: tuple[int, ...], strategy: Any, mesh: Any) -> Split:
    """The Split of a strategy that is made of a function."""
    if not callable(rule := getattr(strategy, "shard", None)):
        raise UserInputError(
            f"weight '{name}': a rule must be a PartitionSpec, a ShardingStrategy or None, not {strategy!r}"
        )
    over = axes_of(mesh, TENSOR)
    if not over:
        return NO_SPLIT
    try:
        found = split_of_function(rule, shape, parts_over(mesh, over))
        problem = ""
    except Exception as error:
        found, problem = None, f" ({type(error).__name__}: {error})"
    if found is None:
        raise NotImplementedError(
            f"weight '{name}' has a strategy made of a function, and for {sizes_text(mesh, over)} its parts are not "
            f"equal consecutive blocks of one axis{problem}, as a mesh needs (Weight.shard does not): use rowwise, "
            "columnwise, axiswise, … or rules= with a PartitionSpec"
        )
    return found


def _place_part(name: str, shape: Sequence[int], part: PartOf, mesh: Any, count: int) -> Placed:
    """The placement of one of several tensors of a weight: where the whole weight would be split.

    An axis is replicated if its parts would not be those of the weight's axis.
    """
    placed = place(name, part.shape, part.rule, mesh, count=count)
    entries: list[tuple[str, ...]] = [()] * len(shape)
    whole = []
    split = [names_in(entry) for entry in placed.spec]
    for along, over in enumerate(split):
        n = parts_over(mesh, over)
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
        n = parts_over(mesh, entries[axis])
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
    return parts_over(weight.sharding.mesh, names) if names else 1


def split_over(weight: Any, axis: int) -> tuple[str, ...]:
    """The mesh axes that an axis of a Weight is split over."""
    where = getattr(weight, "sharding", None)
    if not isinstance(where, NamedSharding) or axis >= len(where.spec):
        return ()
    return names_in(where.spec[axis])


def used_split(weight: Any, axis: int) -> tuple[str, ...]:
    """The mesh axes that an axis of a Weight is split over where it is used: it is gathered over ``fsdp``."""
    names = split_over(weight, axis)
    fsdp = axis_of(weight.sharding.mesh, "fsdp") if names else None
    return tuple(name for name in names if name != fsdp)


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
        n = parts_over(mesh, found)
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
