"""Arrays of sharded weights: putting them on devices, and preparing them for operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ...driver import memory_stats
from ...errors import OutOfMemoryError
from ...kernels import QuantArray, QuantTensors, StackSlice, explicit
from ...kernels.tpu.mosaic import LANES, is_turned
from ..device import DeviceRef
from .specs import axis_of, held_bytes, names_in, spec_of, split_over

# The platform where XLA chooses the order in memory of an array's axes.
_CHOOSES_LAYOUTS = "tpu"


def put(array: Any, where: Any, name: str = "") -> Any:
    """``jax.device_put`` of a NumPy or JAX array to a Sharding or Format; None lets JAX choose. Tracers are unchanged.

    Raises:
        OutOfMemoryError: a device cannot hold its part; the message names weight and bytes.
    """
    if isinstance(array, Tracer):
        return array
    sharding: Any = where.sharding if isinstance(where, Format) else where
    try:
        if getattr(sharding, "is_fully_addressable", True):
            old_sharding = getattr(array, "sharding", None)
            # Without a sharding, the result of device_put is uncommitted if the array is.
            kind = "device" if sharding is None else getattr(sharding, "memory_kind", None)
            if old_sharding is not None and old_sharding.memory_kind != kind:
                # Between kinds of memory, JAX moves arrays only on the same devices.
                array = jax.device_put(array, old_sharding.with_memory_kind("device"))
            return jax.device_put(array, where)
        # Each of several processes provides the parts of its own devices: nothing is compared or sent.
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])
    except jax.errors.JaxRuntimeError as error:
        raise out_of_memory(error, name, array.shape, array.dtype, sharding) from error


def experts_first(sharding: Any, shape: Sequence[int], itemsize: int) -> Any:
    """The sharding of matrices of experts, or on TPUs a Format that keeps each matrix together in memory.

    If their number is a multiple of 128, and registers hold a matrix with padding, XLA would make the experts
    the columns of registers, and each program would copy all of them.

    Args:
        shape: shape of the array, whose last two axes are those of the matrices.
    """
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    *lead, rows, columns = range(len(shape))
    *_, count, height, width = sharding.shard_shape(tuple(shape))
    if sharding.mesh.devices.flat[0].platform != _CHOOSES_LAYOUTS or count % LANES:
        return sharding
    last = (columns, rows) if is_turned((height, width), itemsize) else (rows, columns)
    return Format(Layout((*lead, *last)), sharding)


def beside(x: Any, like: Any) -> Any:
    """The array ``x``, moved to the device of ``like``; unchanged if one is traced or ``like`` is uncommitted."""
    if isinstance(x, Tracer) or isinstance(like, Tracer) or not getattr(like, "committed", False):
        return x
    same = x.sharding.device_set == like.sharding.device_set
    return x if same else jax.device_put(x, like.sharding)


def default_device() -> Any:
    """The device on which JAX puts uncommitted arrays."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def sharding_of(leaf: Any) -> Any:
    """The sharding of a leaf; None if JAX chose the device."""
    if isinstance(leaf, jax.Array) and not getattr(leaf, "committed", True):
        return None
    return getattr(leaf, "sharding", None)


def platform_of(place: Any) -> str:
    """The platform of the devices that ``Module.to(place)`` puts weights on: "cpu", "gpu" or "tpu".

    Args:
        place: a mesh, a Sharding, a device, or None for the default device.

    Raises:
        TypeError: it is something else.

    Example:
        >>> from maxjax import make_mesh
        >>> platform_of(make_mesh(model=1)) == platform_of(None) == jax.devices()[0].platform
        True
    """
    if place is None:
        return default_device().platform
    if isinstance(place, Mesh):
        return place.devices.flat[0].platform
    if isinstance(place, Sharding):
        return next(iter(place.device_set)).platform
    return device_of(place).platform


def device_of(place: Any) -> Any:
    """The jax.Device of a device that weights are to be put on.

    Raises:
        TypeError: it is neither a jax.Device nor a DeviceRef.

    Example:
        >>> device_of(DeviceRef.CPU()) == device_of(jax.devices("cpu")[0])
        True
    """
    device = place.to_jax() if isinstance(place, DeviceRef) else place
    if isinstance(device, jax.Device):
        return device
    raise TypeError(
        "weights are put on a mesh (as maxjax.make_mesh(model=2) makes it), a jax Sharding, a jax.Device "
        f"or a DeviceRef, not {type(place).__name__}"
    )


def out_of_memory(
    error: Exception, name: str, shape: Sequence[int], dtype: Any, sharding: Any
) -> Exception:
    """The exception to raise for an error of XLA: OutOfMemoryError if it is one, else the error itself."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    itemsize = jax.numpy.dtype(dtype).itemsize
    part = held_bytes(sharding, shape, itemsize)
    device = (
        min(sharding.device_set, key=lambda d: d.id) if sharding is not None else jax.devices()[0]
    )
    stats = memory_stats(device)
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    return OutOfMemoryError(
        f"weight '{name}': each device needs {part:,} bytes for its part of {list(shape)} {dtype}"
        + (f", and {device.platform}:{device.id} has {free:,} free" if free > 0 else "")
        + ". maxjax.plan(model, mesh) shows what another mesh or dtype would need."
    )


def as_used(array: Any, dims: Sequence[int] | None, sharding: Any, gathered: bool = True) -> Any:
    """A weight's array in the form that operations need: gathered, and in device memory.

    Inside ``shard_map`` an array is only the part of one device, so it is gathered. A weight that
    is split over ``fsdp``, as the batch is, is gathered at its use. A weight in host memory is
    copied to the devices.

    Args:
        dims: sizes of the whole array, if they are known.
        gathered: whether a weight that is split over ``fsdp`` is gathered.
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
    return _gathered(array, sharding, traced, "fsdp" if gathered else "")


def is_usable_in_place(array: Any, dims: Sequence[int] | None, sharding: Any) -> bool:
    """Whether operations can use a weight without :func:`as_used` moving it."""
    if sharding.memory_kind not in (None, "device"):
        return False
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return True
    if dims is None or tuple(array.shape) != tuple(dims):
        return False
    fsdp = axis_of(sharding.mesh, "fsdp")
    return not any(fsdp in names_in(entry) for entry in sharding.spec)


def _on_device(array: Any, sharding: Any) -> Any:
    if isinstance(array, Tracer):
        return jax.device_put(array, jax.memory.Space.Device)
    return jax.device_put(array, sharding.with_memory_kind("device"))


def _gathered(array: Any, sharding: NamedSharding, traced: bool, over: str) -> Any:
    """The array with its sharding, except that it is gathered over a kind of mesh axis.

    The first constraint is for gradients, which XLA could otherwise split in any way.
    """
    mesh = mesh_in_trace(sharding.mesh)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    fsdp = axis_of(mesh, over)
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
    spec = [
        tuple(n for n in names_in(entry) if types[n] is AxisType.Auto) for entry in sharding.spec
    ]
    array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec_of(spec)))
    if not any(fsdp in entry for entry in spec):
        return array
    gathered = [tuple(name for name in entry if name != fsdp) for entry in spec]
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec_of(gathered)))


def mesh_in_trace(mesh: Any) -> Any:
    """The mesh of the surrounding trace, whose axis types may differ, if it has the axes of ``mesh``; else ``mesh``."""
    context = jax.sharding.get_abstract_mesh()
    return context if context.axis_names == mesh.axis_names else mesh


def specs_within(w: Any, spec: PartitionSpec) -> Any:
    """``w`` with PartitionSpecs in place of its leaves.

    Args:
        w: a weight as an operand of kernels: an array, a StackSlice, a QuantArray or a QuantTensors.
        spec: how the values of the weight are split.
    """
    if isinstance(w, QuantArray):
        return w.around(specs_within(w.blocks, spec))
    if isinstance(w, QuantTensors):
        *lead, rows, columns = [*spec, *[None] * (w.ndim - len(spec))]
        names = {0: rows, 1: columns, None: None}
        specs = {
            one.name: specs_within(
                w.tensors[one.name], PartitionSpec(*lead, *(names[along] for along in one.axes))
            )
            for one in w.layout.tensors
        }
        return QuantTensors(w.layout, specs)
    if isinstance(w, StackSlice):
        where = PartitionSpec(*(None,) * len(w.indices), *spec)
        return StackSlice(where, jax.tree.map(lambda _: PartitionSpec(), w.index))
    return spec


def is_manual(axis: str) -> bool:
    """Whether the code being traced runs inside a ``shard_map`` over the axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return axis in getattr(mesh, "manual_axes", ())


def replicate_last_axis(array: jax.Array, weight: Any, axis: int = -1) -> jax.Array:
    """``array`` with its last axis replicated, if an axis of ``weight`` is split.

    Otherwise XLA might split that axis, and all results that depend on it.
    """
    names = split_over(weight, axis % len(weight.shape))
    if not names or not isinstance(array, Tracer) or any(map(is_manual, names)):
        return array
    mesh = weight.sharding.mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(types[name] is not AxisType.Auto for name in names):
        return array
    free = (PartitionSpec.UNCONSTRAINED,) * (array.ndim - 1)
    where = NamedSharding(mesh_in_trace(mesh), PartitionSpec(*free, None))
    return jax.lax.with_sharding_constraint(array, where)


def with_sharding(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array of a traced function with a sharding, on Auto and Explicit meshes."""
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(array, sharding)
    return jax.lax.with_sharding_constraint(array, sharding)


def on_mesh(
    f: Callable[..., Any], mesh: Any, specs: Sequence[Any], out: Any, *, check_vma: bool = True
) -> Callable[..., Any]:
    """``jax.shard_map`` for arrays of any sharding on the mesh, or uncommitted ones."""
    mesh = mesh_in_trace(mesh)
    explicit = AxisType.Explicit in mesh.axis_types
    mapped = jax.shard_map(f, mesh=mesh, in_specs=tuple(specs), out_specs=out, check_vma=check_vma)
    if not explicit:
        return mapped

    def run(*arrays: Any) -> Any:
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), tuple(specs))
        return mapped(*jax.tree.map(jax.sharding.reshard, arrays, shardings))

    return run
