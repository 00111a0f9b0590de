"""The weights of a model as arrays in logical order, and the parts of an array that a process holds.

Values are not copied where JAX can use their memory as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...dtype import DType
from ...errors import UserInputError
from ...graph.placement.specs import names_in
from ...graph.weight.stacked import StackedWeight
from ...graph.weight.weight import Weight
from ...graph.weights.device_reads import box_of
from ...nn.layer import Module
from ...storage.orbax.store import prefix

# Types of JAX that the storage of orbax does not have.
_UNKNOWN = ("uint2", "uint4", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn")


def module_arrays(
    title: str, module: Module, *, holes: bool = True
) -> Iterator[tuple[str, Any, Weight]]:
    """Yield name, array (in logical order) and Weight of each weight of a Module.

    Args:
        title: name of the tree, for errors.
        module: the Module.
        holes: whether a weight may hold random keys or another tree, as in an optimiser's state: these are
            yielded as they are, or skipped if they are empty.
    """
    layers: dict[int, list[Any]] = {}
    whole: dict[int, str] | None = None
    for name, weight in module.raw_state_dict().items():
        home, apart = weight.home, False
        leaf = weight.leaf
        if home is not None and not is_per_layer(home[0], home[0].leaf):
            # one tree for all layers, under the name of the leaf
            if whole is None:
                definition, holders = module._mx_definition()
                whole = {id(h): n for n, h in zip(definition.names, holders, strict=True)}
            if id(home[0]) not in whole:
                continue
            name, leaf, apart = whole.pop(id(home[0])), home[0].leaf, True
        if type(leaf) is jax.ShapeDtypeStruct and weight.source is not None:
            leaf = weight.read()
        is_array = hasattr(leaf, "dtype") and not is_key(leaf)
        if not is_array and holes:
            if jax.tree.leaves(leaf):
                yield name, leaf, weight
            continue
        if not is_array or type(leaf) is jax.ShapeDtypeStruct:
            raise UserInputError(
                f"{title}: weight '{name}' has no value: load a checkpoint, or call maxjax.init()"
            )
        value = leaf if apart else _value(weight, layers)
        yield name, own_value(storable(title, name, value)), weight


def is_per_layer(holder: Any, leaf: Any) -> bool:
    """Whether the leaf of a Weight has its shape, or that of a stack the axes of the layers.

    Leaves of an optimiser's state may have others: those of L-BFGS have an axis of updates, those of Adafactor
    one element, and those of SM3 are lists; random keys are stored as they are. In device-major order only the
    weight's own shape can be brought into logical order.
    """
    if not hasattr(leaf, "shape") or is_key(leaf):
        return False
    shape, lead = tuple(leaf.shape), tuple(holder.spec.lead)
    if holder.spec.layout is not None:
        return shape == tuple(holder.spec.blank().shape)
    return shape[: len(lead)] == lead and len(shape) - len(lead) <= len(tuple(holder.spec.dims))


def _value(weight: Weight, layers: dict[int, list[Any]]) -> Any:
    """The value in logical order, in the dtype and shape of the checkpoint it was loaded from."""
    home = weight.home
    if home is not None and weight.spec.layout is None and not home[0].is_lazy:
        if id(home[0]) not in layers:
            layers[id(home[0])] = unstacked(home[0])
        value = layers[id(home[0])][home[1]]
    else:
        value = weight.stored_value() if is_per_layer(weight, weight.leaf) else weight.leaf
    declared = weight.spec.dtype.np
    narrowed = value.dtype != declared and jax.dtypes.canonicalize_dtype(declared) == value.dtype
    if narrowed and getattr(value, "is_fully_addressable", True):
        value = np.asarray(value).astype(declared)  # 64 bits, for which JAX has no arrays
    return weight.to_file(value)


def unstacked(stack: StackedWeight) -> list[Any]:
    """The arrays of the Weights of a stack. On CPUs they share the memory of the stack."""
    own, indices = stack.leaf, [stack.spec.index(i) for i in range(stack.spec.count)]
    if not isinstance(own, jax.Array) or isinstance(own, Tracer) or not _is_plain(own.sharding):
        return [own[index] for index in indices]
    on_host = all(device.platform == "cpu" for device in own.sharding.device_set)
    if not on_host and not stack.spec.split:
        return [own[index] for index in indices]
    levels = len(stack.spec.spans)
    shards = [
        (box_of(s.index, own.shape)[:levels], next(iter(s.data.devices())),
         np.asarray(s.data) if on_host else s.data)
        for s in own.addressable_shards
    ]  # fmt: skip
    found = []
    for index in indices:
        parts = []
        for box, device, array in shards:
            if all(start <= i < stop for i, (start, stop) in zip(index, box, strict=True)):
                place = tuple(i - start for i, (start, _) in zip(index, box, strict=True))
                # On a CPU without a copy if the memory is aligned to 64 bytes.
                one = jax.sharding.SingleDeviceSharding(device)
                parts.append(jax.device_put(array[place], one))
        where = _sharding_of_one(stack, own, index)
        shape = own.shape[levels:]
        found.append(jax.make_array_from_single_device_arrays(shape, where, parts, dtype=own.dtype))
    return found


def _is_plain(sharding: Any) -> bool:
    """Whether parts of an array can be taken from its devices' memory."""
    if sharding.memory_kind not in (None, "device", "unpinned_host"):
        return False
    return isinstance(sharding, (jax.sharding.SingleDeviceSharding, jax.sharding.NamedSharding))


def _sharding_of_one(stack: StackedWeight, own: jax.Array, index: tuple[int, ...]) -> Any:
    """The sharding of one of the Weights: over the devices that hold it."""
    sharding: Any = own.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    mesh, levels = sharding.mesh, len(stack.spec.spans)
    lead = (*sharding.spec, *(None,) * own.ndim)[:levels]
    spec = jax.sharding.PartitionSpec(*sharding.spec[levels:])
    for size, place, entry in zip(stack.spec.lead, index, lead, strict=True):
        names = names_in(entry)
        counts = [mesh.shape[name] for name in names]
        share = place // (size // math.prod(counts))
        for name, i in zip(names, np.unravel_index(share, counts) if counts else (), strict=True):
            axis = mesh.axis_names.index(name)
            rest = [
                (n, t) for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if n != name
            ]
            devices = np.take(np.asarray(mesh.devices), int(i), axis)
            mesh = jax.sharding.Mesh(
                devices, tuple(n for n, _ in rest), axis_types=tuple(t for _, t in rest)
            )
    return jax.sharding.NamedSharding(mesh, spec)


def storable(title: str, name: str, value: Any) -> Any:
    """The value, checked to have a dtype that orbax can store."""
    dtype = np.dtype(value.dtype)
    try:
        DType.of(dtype)
        is_storable = dtype.name not in _UNKNOWN
    except (TypeError, ValueError, KeyError):
        is_storable = False
    if not is_storable:
        raise UserInputError(
            f"{title}: '{name}' is {dtype.name}, which cannot be stored: convert it first"
        )
    return value


def check_names(title: str, names: Collection[str]) -> None:
    """Checks that orbax can store arrays of these names: as UTF-8, and "x" and "x/" in different places."""
    places: dict[str, str] = {}
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserInputError(
                f"{title}: {name!r} cannot be stored, since it is not Unicode text: rename it"
            ) from None
        other = places.setdefault(prefix(name), name)
        if other != name:
            raise UserInputError(
                f"{title}: orbax stores {other!r} and {name!r} in the same place: rename one"
            )


def is_key(value: Any) -> bool:
    """Whether a value is an array of random keys, or a ShapeDtypeStruct for one."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def own_value(value: Any) -> Any:
    """The array that orbax gets: with several processes, a jax.Array of this process alone becomes a NumPy array."""
    is_local = isinstance(value, jax.Array) and value.is_fully_addressable
    return np.asarray(value) if is_local and jax.process_count() > 1 else value


def held_parts(array: Any) -> list[tuple[Any, Any]]:
    """The boxes of an array that this process has to write, each once, with their values.

    A NumPy array is written by the first process, each box of a jax.Array by the lowest process
    that holds it.
    """
    if not isinstance(array, jax.Array):
        box = tuple((0, size) for size in array.shape)
        return [(box, array)] if jax.process_index() == 0 else []
    owner = owners(array)
    found: dict[Any, Any] = {}
    for shard in array.addressable_shards:
        box = box_of(shard.index, array.shape)
        if owner[box] == jax.process_index():
            found.setdefault(box, shard.data)
    return list(found.items())


def owners(array: jax.Array) -> dict[Any, int]:
    """Each box of an array → the lowest process that holds it."""
    found: dict[Any, int] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        box, process = box_of(index, array.shape), int(device.process_index or 0)
        found[box] = min(found.get(box, process), process)
    return found


def is_on_host(array: Any) -> bool:
    """Whether an array is in host memory."""
    if not isinstance(array, jax.Array):
        return True
    return all(device.platform == "cpu" for device in array.sharding.device_set)
