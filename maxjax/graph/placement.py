"""Floor 3. Placement: from what is wished for a weight, and a mesh, to a PartitionSpec.

Axes of the mesh alone decide which kinds of parallelism there are. Strategies of tensors
split over ``model``, those of experts over ``expert`` and ``model``, ``fsdp`` splits the
largest axis left, and ``data`` and ``seq`` split no weight. What does not divide is whole
on every device, and the reason is kept. Below: sharding, mesh. Above: ``Module.to``, plan.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..errors import OutOfMemoryError, UserInputError
from ..kernels import explicit
from .layout import DeviceMajor
from .mesh import AXES, axis_name
from .sharding import ByModule, Segmented, ShardingStrategy, _Ranges

TENSOR, EXPERTS = ("model",), ("expert", "model")


class Split(NamedTuple):
    """A strategy and the kinds of mesh axes that it splits over.

    Attributes:
        strategy: How the weight is split; ``num_devices`` is not looked at.
        over: Kinds of axes, of which those the mesh has are taken together.
        instead: What to try where the sizes do not divide.
        by_device: Whether the layer works with rows in the order of the devices
            (:class:`DeviceMajor`); the strategy is then ``segmented`` on axis 0.
    """

    strategy: ShardingStrategy
    over: tuple[str, ...] = TENSOR
    instead: ShardingStrategy | None = None
    by_device: bool = False


class Placed(NamedTuple):
    """Where a weight goes, and why.

    Attributes:
        spec: For each axis of the weight, the axes of the mesh that it is split over.
        why: One phrase for people.
        layout: How the rows are stored, where not in their own order.
    """

    spec: PartitionSpec
    why: str
    layout: DeviceMajor | None = None


def axis_of(mesh: Any, kind: str) -> str | None:
    """The mesh's own name for a kind of axis, if it has one: ``model`` may be called ``tp``.

    Example:
        >>> import maxjax
        >>> axis_of(maxjax.make_mesh(tp=1), "model"), axis_of(maxjax.make_mesh(tp=1), "data")
        ('model', None)
    """
    if kind in mesh.axis_names:
        return kind
    return next((name for name in mesh.axis_names if axis_name(name) == axis_name(kind)), None)


def check_mesh(mesh: Any) -> None:
    """Refuses a mesh of which nothing is known.

    Raises:
        UserInputError: None of its axes is one that a strategy splits over, or data or seq.
    """
    if not any(axis_of(mesh, kind) for kind in AXES):
        raise UserInputError(
            f"the mesh has the axes {', '.join(map(str, mesh.axis_names)) or '()'}, and strategies know "
            f"{', '.join(AXES)} (or dp, tp, ep, sp): name its axes so, or say with rules= what is split over them"
        )


def place(name: str, shape: Sequence[int], wish: Any, mesh: Any) -> Placed:
    """Where a weight goes on a mesh.

    Args:
        name: Of the weight, for messages.
        shape: Its sizes.
        wish: A ShardingStrategy, a :class:`Split`, a PartitionSpec to be taken as it is, or
            None: nothing is known of it.
        mesh: A ``jax.sharding.Mesh``, or an AbstractMesh.

    Raises:
        UserInputError: The strategy or the spec does not fit the weight's rank; a spec names
            an axis the mesh lacks, or one that does not divide the size.
        NotImplementedError: The strategy is a function, of which only it knows the ranges.

    Example:
        >>> import jax, maxjax
        >>> from maxjax.graph import ShardingStrategy
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("fsdp", "model"))
        >>> tuple(place("w", (8, 6), ShardingStrategy.rowwise(1), mesh).spec)
        ('model', 'fsdp')
        >>> place("w", (9, 6), ShardingStrategy.rowwise(1), mesh).why
        'the 9 values of axis 0 do not divide by model=4; axis 1 over fsdp=2'
    """
    if not isinstance(wish, (ShardingStrategy, Split, PartitionSpec, tuple, type(None))):
        raise UserInputError(
            f"weight '{name}': a rule is a PartitionSpec, a ShardingStrategy or None, not {wish!r}"
        )
    if isinstance(wish, PartitionSpec) or (type(wish) is tuple and not isinstance(wish, Split)):
        return Placed(_given(name, shape, wish, mesh), "as given")
    entries: list[tuple[str, ...]] = [()] * len(shape)
    reasons = []
    split = Split(wish) if isinstance(wish, ShardingStrategy) else wish
    if isinstance(split, Split):
        reasons.append(_tensor(name, shape, split, mesh, entries))
    fsdp = axis_of(mesh, "fsdp")
    if fsdp is not None and mesh.shape[fsdp] > 1:
        reasons.append(_fully(shape, fsdp, mesh.shape[fsdp], entries))
    if split is None and not any(reasons):
        reasons.append("no strategy")
    why = "; ".join(reason for reason in reasons if reason)
    return Placed(_spec(entries), why, _layout(split, entries, mesh))


def _tensor(
    name: str, shape: Sequence[int], split: Split, mesh: Any, entries: list[tuple[str, ...]]
) -> str:
    """Enters what a strategy splits; why, or why not."""
    axes = [axis_of(mesh, kind) for kind in split.over]
    over = tuple(axis for axis in axes if axis is not None and mesh.shape[axis] > 1)
    if not over:
        return f"the mesh has no {' or '.join(split.over)} axis"
    n = math.prod(mesh.shape[axis] for axis in over)
    sizes = " and ".join(f"{axis}={mesh.shape[axis]}" for axis in over)
    problems = []
    for strategy in filter(None, (split.strategy, split.instead)):
        found = _divided(name, shape, strategy, n)
        if found is None:
            return "replicated by its strategy"
        axis, units, unit = found
        if units % n == 0 and shape[axis] % n == 0:
            entries[axis] = over
            return "; ".join([*problems, f"axis {axis} over {sizes}"])
        count = f"the {units} {unit}" if unit == "heads" else f"the {units} {unit} of axis {axis}"
        problems.append(f"{count} do not divide by {sizes}")
    return problems[0] if len(problems) == 1 else "; ".join(problems)


def _layout(split: Any, entries: list[tuple[str, ...]], mesh: Any) -> DeviceMajor | None:
    """How the rows of a weight are stored that is split inside of them."""
    if split is None or not split.by_device or not entries[0]:
        return None
    rule = split.strategy.shard
    tensor = {axis_of(mesh, kind) for kind in split.over}
    if not set(entries[0]) <= tensor or not isinstance(rule, Segmented) or len(rule.segments) < 2:
        return None
    n = math.prod(mesh.shape[name] for name in entries[0])
    return DeviceMajor(n, tuple(segment.size for segment in rule.segments))


def _divided(
    name: str, shape: Sequence[int], strategy: ShardingStrategy, n: int
) -> tuple[int, int, str] | None:
    """The axis that is split, how many parts it falls into and what they are; None for no axis."""
    rule = strategy.shard
    if isinstance(rule, ByModule):
        raise UserInputError(
            f"weight '{name}': {rule.kind} is for whole layers: a single weight needs rowwise, columnwise, …"
        )
    if not isinstance(rule, _Ranges):
        raise NotImplementedError(
            f"weight '{name}' has a strategy made of a function, which Weight.shard can use and a mesh cannot: "
            "use rowwise, columnwise, axiswise, … or rules= with a PartitionSpec"
        )
    if rule.axis is None:
        return None
    rank = len(shape)
    if not -rank <= rule.axis < rank:
        raise UserInputError(
            f"weight '{name}' of shape {tuple(shape)} has no axis {rule.axis} to be split"
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


def _fully(shape: Sequence[int], fsdp: str, n: int, entries: list[tuple[str, ...]]) -> str:
    """Enters the largest axis left; vectors stay whole, a gather would cost more than they do."""
    if len(shape) < 2:
        return ""
    free = [axis for axis in range(len(shape)) if not entries[axis] and shape[axis] % n == 0]
    if not free:
        return f"no axis left that divides by {fsdp}={n}"
    axis = max(free, key=lambda axis: shape[axis])
    entries[axis] = (fsdp,)
    return f"axis {axis} over {fsdp}={n}"


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(None if not e else e[0] if len(e) == 1 else e for e in entries))


def _given(name: str, shape: Sequence[int], wish: Any, mesh: Any) -> PartitionSpec:
    """A spec somebody wrote, in the mesh's own names."""
    if len(wish) > len(shape):
        raise UserInputError(
            f"weight '{name}' of shape {tuple(shape)} has fewer axes than its spec {tuple(wish)}"
        )
    entries: list[tuple[str, ...]] = [()] * len(shape)
    for axis, entry in enumerate(wish):
        if not all(
            isinstance(kind, str) for kind in (entry if type(entry) is tuple else [entry or ""])
        ):
            raise UserInputError(f"weight '{name}': {entry!r} in its spec is no axis of a mesh")
        for kind in _names(entry):
            found = axis_of(mesh, kind)
            if found is None:
                raise UserInputError(
                    f"weight '{name}' is to be split over '{kind}', and the mesh has the axes "
                    f"{', '.join(map(str, mesh.axis_names))}"
                )
            entries[axis] = (*entries[axis], found)
        n = math.prod(mesh.shape[axis_name] for axis_name in entries[axis])
        if shape[axis] % n:
            raise UserInputError(
                f"weight '{name}': axis {axis} of {shape[axis]} does not divide by {n} "
                f"({', '.join(entries[axis])})"
            )
    used = [axis for entry in entries for axis in entry]
    if len(set(used)) < len(used):
        raise UserInputError(
            f"weight '{name}': the spec {tuple(wish)} uses an axis of the mesh twice"
        )
    return _spec(entries)


def put(array: Any, sharding: Any, name: str = "") -> Any:
    """The array, of the host or of devices, on a Sharding; None leaves the place to JAX.

    Raises:
        OutOfMemoryError: A device cannot hold its part; weight and bytes are named.
    """
    if isinstance(array, Tracer):
        return array
    try:
        if getattr(sharding, "is_fully_addressable", True):
            held = getattr(array, "sharding", None)
            if held is not None and held.memory_kind != getattr(sharding, "memory_kind", None):
                # From one kind of memory to another JAX moves only what stays on its devices.
                array = jax.device_put(array, held.with_memory_kind("device"))
            return jax.device_put(array, sharding)
        # Of several processes each gives what its own devices hold: nothing is compared or sent.
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])
    except jax.errors.JaxRuntimeError as error:
        raise out_of_memory(error, name, array.shape, array.dtype, sharding) from error


def relaid(
    array: Any, sharding: Any, before: DeviceMajor | None, after: DeviceMajor | None, name: str
) -> Any:
    """A stored value, stored in another layout on another Sharding (of the logical value)."""
    if before == after:
        where = sharding if after is None else after.sharding(sharding)
        return put(array, where, name)
    # Between explicitly placed arrays of two meshes only the host can mediate.
    logical = np.asarray(array) if array.is_fully_addressable else array
    logical = logical if before is None else before.restore(logical)
    if after is None:
        return put(logical, sharding, name)
    return put(after.arrange(logical), after.sharding(sharding), name)


def out_of_memory(
    error: Exception, name: str, shape: Sequence[int], dtype: Any, sharding: Any
) -> Exception:
    """What to raise for an error of XLA: OutOfMemoryError if it is one, else the error itself."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    itemsize = jax.numpy.dtype(dtype).itemsize
    part = held_bytes(sharding, shape, itemsize)
    device = (
        min(sharding.device_set, key=lambda d: d.id) if sharding is not None else jax.devices()[0]
    )
    stats = (device.memory_stats() or {}) if hasattr(device, "memory_stats") else {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    return OutOfMemoryError(
        f"weight '{name}': each device needs {part:,} bytes for its part of {list(shape)} {dtype}"
        + (f", and {device.platform}:{device.id} has {free:,} free" if free > 0 else "")
        + ". maxjax.plan(model, mesh) shows what another mesh or dtype would need."
    )


def as_used(array: Any, dims: Sequence[int] | None, sharding: Any) -> Any:
    """A weight's array as operations are to see it: whole, and in the devices' own memory.

    Inside ``shard_map`` a weight is only its part: it is gathered. One that is split over
    ``fsdp``, which the batch is split over too, is gathered where it is used. One that lies
    in the host's memory comes to the devices.

    Args:
        dims: The whole's sizes, if they are known.
    """
    if sharding.memory_kind not in (None, "device"):
        array = _on_device(array, sharding)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return array
    traced = isinstance(array, Tracer)
    if traced and dims is not None and array.shape != tuple(dims):
        for axis, names in enumerate(sharding.spec):
            if names is not None and array.shape[axis] != dims[axis]:
                array = jax.lax.all_gather(array, names, axis=axis, tiled=True, to="invarying")
        return array
    return _gathered(array, sharding, traced)


def _on_device(array: Any, sharding: Any) -> Any:
    if isinstance(array, Tracer):
        return jax.device_put(array, jax.memory.Space.Device)
    return jax.device_put(array, sharding.with_memory_kind("device"))


def _gathered(array: Any, sharding: NamedSharding, traced: bool) -> Any:
    """The array split as its sharding says, but not over ``fsdp``.

    The first constraint is for what comes back: XLA is free to split gradients in any way.
    """
    mesh = sharding.mesh
    context = jax.sharding.get_abstract_mesh()
    if context.axis_names == mesh.axis_names:
        mesh = context  # whose axes may be of another type here
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    fsdp = axis_of(mesh, "fsdp")
    if AxisType.Manual in types.values():
        return array
    if AxisType.Explicit in types.values() and explicit.mesh_of(array) is not None:
        found = explicit.entries(array)
        if not any(fsdp in entry for entry in found):
            return array
        kept = [tuple(name for name in entry if name != fsdp) for entry in found]
        return jax.sharding.reshard(array, explicit.sharding(explicit.mesh_of(array), kept))
    if not traced or array.ndim != len(sharding.spec):
        return array
    spec = [tuple(n for n in _names(entry) if types[n] is AxisType.Auto) for entry in sharding.spec]
    array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, _spec(spec)))
    if not any(fsdp in entry for entry in spec):
        return array
    whole = [tuple(name for name in entry if name != fsdp) for entry in spec]
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, _spec(whole)))


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def is_manual(axis: str) -> bool:
    """Whether the code being traced runs inside a ``shard_map`` over the axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return axis in getattr(mesh, "manual_axes", ())


def by_pattern(rules: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Whether a table has a pattern for the name, ``*`` for anything, and what the first says.

    Example:
        >>> by_pattern({"*.q_proj.weight": 1, "*": 2}, "layers.0.q_proj.weight")
        (True, 1)
    """
    for pattern, wish in rules.items():
        if fnmatch.fnmatchcase(name, pattern):
            return True, wish
    return False, None


def sharding(mesh: Any, spec: PartitionSpec, memory_kind: str | None = None) -> NamedSharding:
    """The jax Sharding of a weight."""
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def parts(weight: Any, axis: int) -> int:
    """How many parts an axis of a Weight is split into where it is placed.

    Example:
        >>> from maxjax.graph import DeviceRef, Weight
        >>> parts(Weight("w", "float32", (4, 2), DeviceRef.CPU()), 0)
        1
    """
    names = split_over(weight, axis)
    return math.prod(weight.sharding.mesh.shape[name] for name in names) if names else 1


def split_over(weight: Any, axis: int) -> tuple[str, ...]:
    """The axes of the mesh that an axis of a placed Weight is split over."""
    where = getattr(weight, "sharding", None)
    if not isinstance(where, NamedSharding) or axis >= len(where.spec):
        return ()
    return _names(where.spec[axis])


def batch_axes(mesh: Any, count: int, kinds: Sequence[str] = ("data", "fsdp")) -> tuple[str, ...]:
    """The axes of a mesh that ``count`` rows of a batch are split over: those that divide them.

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


def last_axis_whole(array: jax.Array, weight: Any, axis: int = -1) -> jax.Array:
    """``array`` with its last axis on every device, where an axis of ``weight`` is split.

    Otherwise XLA might split it too, and everything that comes of it.
    """
    names = split_over(weight, axis % len(weight.shape))
    if not names or not isinstance(array, Tracer) or any(map(is_manual, names)):
        return array
    mesh = weight.sharding.mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(types[name] is not AxisType.Auto for name in names):
        return array
    free = (PartitionSpec.UNCONSTRAINED,) * (array.ndim - 1)
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*free, None)))


def on_mesh(
    f: Callable[..., Any], mesh: Any, specs: Sequence[Any], out: PartitionSpec
) -> Callable[..., Any]:
    """``jax.shard_map`` of arrays that lie in any way on the mesh, or nowhere in particular."""
    context = jax.sharding.get_abstract_mesh()
    if context.axis_names == mesh.axis_names:
        mesh = context  # whose axes may be of another type here
    explicit = AxisType.Explicit in mesh.axis_types
    mapped = jax.shard_map(f, mesh=mesh, in_specs=tuple(specs), out_specs=out)
    if not explicit:
        return mapped

    def run(*arrays: Any) -> Any:
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), tuple(specs))
        return mapped(*jax.tree.map(jax.sharding.reshard, arrays, places))

    return run


def held_bytes(sharding: Any, shape: Sequence[int], itemsize: int) -> int:
    """What one device holds of an array."""
    part = shape if sharding is None else sharding.shard_shape(tuple(shape))
    return math.prod(part) * itemsize


def mesh_of(shardings: Sequence[Any]) -> Any:
    """The mesh that weights were placed on, if they were."""
    found = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next(found, None)
