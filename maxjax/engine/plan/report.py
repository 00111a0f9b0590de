"""``maxjax.plan``: says whether a model fits on a mesh of devices, and if not, on which it does."""

from __future__ import annotations

import dataclasses
import heapq
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ...columns import columns, visible
from ...driver import memory_stats
from ...dtype import DType
from ...errors import UserInputError, some
from ...graph.placement.mesh import AXES, axis_name
from ...graph.placement.specs import axis_of
from ...graph.weights import load_weights
from ...models import name_rules as names
from ...models.weights import named_dtype
from ...nn.layer import Module
from ...nn.layer.place import UNKNOWN_SIZES
from ...storage.limits import Limits, allowing
from .footprint import Footprint, TensorGroup, cache_bytes, of_checkpoint, of_module


@dataclass(frozen=True)
class WeightKind:
    """Tensors that differ only in the numbers in their names.

    Attributes:
        name: their name, with ``*`` for the numbers.
        count: the number of tensors.
        dtype, shape: the dtype and the shape of each tensor.
        spec: the PartitionSpec of each tensor, as text.
        bytes, bytes_per_device: the size of all of them together.
        why: the reason for the sharding.
    """

    name: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    spec: str
    bytes: int
    bytes_per_device: int
    why: str


@dataclass(frozen=True)
class Suggestion:
    """A mesh on which the model fits, and the dtype of floats if another one is needed.

    Attributes:
        mesh: the size of each axis.
        devices: the number of devices.
        dtype: the name of the dtype, or None for the planned one.
        bytes_per_device, cache_bytes_per_device: bytes of weights and of KV cache on each device.
    """

    mesh: dict[str, int]
    devices: int
    dtype: str | None
    bytes_per_device: int
    cache_bytes_per_device: int

    def __str__(self) -> str:
        dtype = f" with dtype={self.dtype}" if self.dtype else ""
        total = self.bytes_per_device + self.cache_bytes_per_device
        return f"{_mesh_text(self.mesh, self.devices)}{dtype}: {_bytes(total)} on each device"


@dataclass(frozen=True)
class Plan:
    """The memory that a model takes on each device. ``print`` shows it as a table.

    All devices hold the same number of bytes: a dimension that the mesh axis does not divide
    evenly is replicated. Weights and KV cache are counted; activations and the temporary buffers of
    compiled programs are not.

    Attributes:
        devices: the number of devices.
        mesh: the size of each axis; empty for one device.
        bytes_per_device: bytes of weights on each device.
        total_bytes: bytes of one copy of all weights.
        kinds: one :class:`WeightKind` for all tensors that differ only in the numbers in their
            names.
        largest: name and bytes of the ten largest tensors.
        replicated: the kinds that are replicated on several devices, the largest first.
        cache_bytes_per_device: bytes of the KV cache for ``batch`` sequences of ``length`` tokens.
        basis: the origin of the sharding rules.
        hbm: bytes of memory of a device, or None if it is not known.
        fits: whether weights and KV cache fit; None if the memory or a size is not known.
        suggestion: a mesh with the fewest devices on which the model fits, if this one is too
            small.
        notes: further remarks.
    """

    devices: int
    mesh: dict[str, int]
    bytes_per_device: int
    total_bytes: int
    kinds: tuple[WeightKind, ...]
    largest: tuple[tuple[str, int], ...]
    replicated: tuple[WeightKind, ...]
    cache_bytes_per_device: int
    basis: str
    hbm: int | None = None
    fits: bool | None = None
    suggestion: Suggestion | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists, strings and numbers, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


# --- as a table -------------------------------------------------------------------------------


def _lines(plan: Plan) -> Iterator[str]:
    yield f"{_mesh_text(plan.mesh, plan.devices)}; {plan.basis}"
    yield ""
    rows = [
        ["weights", _bytes(plan.total_bytes)],
        ["on each device", _bytes(plan.bytes_per_device)],
    ]
    if plan.cache_bytes_per_device:
        rows.append(["and its cache", _bytes(plan.cache_bytes_per_device)])
    if plan.hbm is not None:
        rows.append(["a device has", _bytes(plan.hbm)])
        rows.append(["fits", {True: "yes", False: "no", None: "not known"}[plan.fits]])
    if plan.fits is False:
        rows.append(["what fits", str(plan.suggestion or "no mesh or dtype that was tried")])
    yield from columns(rows, right=())
    yield ""
    head = ["name", "count", "dtype", "shape", "spec", "bytes", "per device", "why"]
    table = [
        [visible(k.name), f"{k.count:,}", k.dtype, "x".join(map(str, k.shape)) or "scalar",
         k.spec, f"{k.bytes:,}", f"{k.bytes_per_device:,}", k.why]
        for k in plan.kinds
    ]  # fmt: skip
    yield from columns([head, *table], right=(1, 5, 6))
    if plan.replicated:
        yield from ("", "replicated on every device")
        rows = [[f"  {visible(k.name)}", f"{k.bytes:,}", k.why] for k in plan.replicated]
        yield from columns(rows, right=(1,))
    if plan.largest:
        yield from ("", "largest")
        rows = [[f"  {visible(name)}", f"{nbytes:,}"] for name, nbytes in plan.largest]
        yield from columns(rows, right=(1,))
    yield from (f"\nnote: {note}" for note in plan.notes)


def _mesh_text(mesh: dict[str, int], devices: int) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    count = f"{devices:,} device" + "s" * (devices != 1)
    return f"mesh {axes} ({count})" if mesh else count


def _bytes(n: int) -> str:
    unit, size = ("GiB", 1 << 30) if n >= 1 << 30 else ("MiB", 1 << 20)
    return f"{n:,} bytes ({n / size:,.2f} {unit})"


_UNITS = {"B": 1} | {
    f"{prefix}{end}": base**power
    for end, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTP", 1)
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_LARGEST, _MAX_GROWTH = 10, 4096
# Memory in bytes by a part of JAX's ``device_kind``; the first match counts. The devices of a
# topology do not report their memory, and a program can use a little less than this.
_MEMORY = {
    "v5 lite": 16 << 30, "v5e": 16 << 30, "v6 lite": 32 << 30, "v6e": 32 << 30, "v5": 95 << 30, "v4": 32 << 30,
    "h200": 141 * 10**9, "h100": 80 * 10**9, "a100-sxm4-80gb": 80 * 10**9, "a100-sxm4-40gb": 40 * 10**9,
}  # fmt: skip


def plan(
    model_or_path: Any,
    mesh: Any = None,
    *,
    dtype: Any = None,
    batch: int | None = None,
    length: int | None = None,
    cache_dtype: Any = None,
    rules: Mapping[str, Any] | None = None,
    hbm: int | str | None = None,
    limits: Limits | None = None,
) -> Plan:
    """Computes the memory that a model takes on each device of a mesh, without loading it.

    Args:
        model_or_path: a Module, or the path of a checkpoint, whose headers are read. Without a
            mesh, a Module is counted with its present sharding.
        mesh: a jax Mesh or AbstractMesh, or the sizes of its axes: ``{"model": 8}`` or
            ``"model=8,data=2"``.
        dtype: dtype in which floats would be stored; None for the present dtypes.
        batch, length: number of sequences, and of tokens of each, of a KV cache to be counted.
        cache_dtype: dtype of the KV cache; by default that of most weights.
        rules: sharding rules that precede the model's own, as for ``Module.to``.
        hbm: memory of a device in bytes, or as ``"80GB"`` or ``"16GiB"``; by default what the
            devices of a real mesh report, or the known memory of their kind.
        limits: the limits of ``maxjax.load``.

    Raises:
        UserInputError: an option is invalid, or the size of the KV cache is not known.
        CheckpointError: the checkpoint is missing or corrupt.

    Example:
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> mlp = nn.MLP("float32", None, 64, 256, [DeviceRef.CPU()])
        >>> found = plan(mlp, {"model": 4}, hbm="32KB")
        >>> found.bytes_per_device, found.total_bytes, found.fits
        (49152, 196608, False)
        >>> print(found.suggestion)
        mesh model=4 (4 devices) with dtype=bfloat16: 24,576 bytes (0.02 MiB) on each device
    """
    grid = read_mesh(mesh, rules)
    if (batch is None) != (length is None):
        raise UserInputError("batch= and length= belong together: pass both, or neither")
    for option, value in (("batch", batch), ("length", length)):
        if value is not None and (type(value) is not int or value < 1):
            raise UserInputError(f"{option}={value!r} is not a positive integer")
    request = _Request(
        _dtype("dtype", dtype), batch, length, _dtype("cache_dtype", cache_dtype), parse_bytes(hbm)
    )
    if isinstance(model_or_path, Module):
        return _plan(of_module(model_or_path, rules), grid, request)
    if not isinstance(model_or_path, (str, bytes, os.PathLike)):
        raise TypeError(
            f"plan() takes a Module or the path of a checkpoint, not {type(model_or_path).__name__}"
        )
    with load_weights(model_or_path, limits=limits) as weights, allowing(limits):
        return _plan(of_checkpoint(weights, rules), grid, request)


@dataclass(frozen=True)
class _Request:
    """The checked options of ``plan``."""

    dtype: DType | None
    batch: int | None
    length: int | None
    cache_dtype: DType | None
    hbm: int | None


def _plan(source: Footprint, mesh: Any, request: _Request) -> Plan:
    groups = source.tensors_of(mesh, request.dtype)
    cached, notes = _cache(source, groups, mesh or source.mesh, request)
    kinds = _kinds(groups)
    placed_on = source.mesh if mesh is None else mesh
    devices = source.devices if mesh is None else mesh.size
    taken = sum(kind.bytes_per_device for kind in kinds)
    hbm = _memory_of(placed_on) if request.hbm is None else request.hbm
    unknown = [name for one in groups if one.why == UNKNOWN_SIZES for name in one.names]
    if unknown:
        notes.append(f"these sizes are not known yet and count as 0 bytes: {some(unknown, 3)}")
    fits = None if hbm is None or unknown else taken + cached <= hbm
    replicated = [k for k in kinds if devices > 1 and k.bytes and k.bytes_per_device == k.bytes]
    largest = heapq.nlargest(
        _LARGEST, ((n, one.nbytes) for one in groups for n in one.names), key=lambda row: row[1]
    )
    return Plan(
        devices=devices, mesh={} if placed_on is None else dict(placed_on.shape),
        bytes_per_device=taken, total_bytes=sum(kind.bytes for kind in kinds), kinds=tuple(kinds),
        largest=tuple(largest), replicated=tuple(sorted(replicated, key=lambda k: -k.bytes)),
        cache_bytes_per_device=cached, basis=source.basis, hbm=hbm, fits=fits,
        suggestion=_suggest(source, placed_on, request, hbm) if hbm and fits is False else None,
        notes=(*source.notes, *notes),
    )  # fmt: skip


def _kinds(groups: list[TensorGroup]) -> list[WeightKind]:
    rows: dict[tuple[Any, ...], list[int]] = {}
    for one in groups:
        spec = str(tuple(one.spec))
        key = (names.generic(one.names[0]), one.kind, one.logical_shape, spec, one.why)
        sums = rows.setdefault(key, [0, 0, 0])
        count = len(one.names)
        for i, value in enumerate((1, one.nbytes, one.nbytes_per_device)):
            sums[i] += count * value
    return [
        WeightKind(name, count, dtype, shape, spec, total, per_device, why)
        for (name, dtype, shape, spec, why), (count, total, per_device) in rows.items()
    ]


def _cache(
    source: Footprint, groups: list[TensorGroup], mesh: Any, request: _Request
) -> tuple[int, list[str]]:
    """Bytes of the KV cache on a device, and notes."""
    if request.batch is None or request.length is None:
        return 0, []
    if source.encoder:
        return 0, ["an encoder has no KV cache"]
    dtype = request.cache_dtype
    if dtype is None:
        sizes: dict[DType, int] = {DType.bfloat16: 0}
        for one in groups:
            if one.dtype.is_float() and one.dtype.size_in_bits >= 16:
                sizes[one.dtype] = sizes.get(one.dtype, 0) + len(one.names) * one.nbytes
        dtype = max(sizes, key=lambda dtype: sizes[dtype])
    return cache_bytes(source.attention(), request.batch, request.length, dtype, mesh)


def _suggest(source: Footprint, mesh: Any, request: _Request, hbm: int) -> Suggestion | None:
    """The smallest mesh on which the model fits; the planned dtype is preferred on equal sizes."""
    base = {} if mesh is None else dict(mesh.shape)
    named = {kind: (mesh and axis_of(mesh, kind)) or kind for kind in ("model", "fsdp")}
    narrow = dataclasses.replace(request, dtype=DType.bfloat16)
    totals = [
        (choice, sum(len(one.names) * one.nbytes for one in source.tensors_of(None, choice.dtype)))
        for choice in (request, narrow)
    ]
    for doublings in range(_MAX_GROWTH.bit_length()):
        for choice, nbytes in totals:
            for over_fsdp in range(doublings + 1):
                sizes = dict(base)
                for kind, power in (("model", doublings - over_fsdp), ("fsdp", over_fsdp)):
                    if power:
                        sizes[named[kind]] = sizes.get(named[kind], 1) << power
                devices = math.prod(sizes.values())
                if nbytes > hbm * devices:
                    continue  # it would not fit even if everything were sharded
                taken = _attempt(source, sizes, choice)
                if taken is not None and sum(taken) <= hbm:
                    dtype = None if choice.dtype is request.dtype else "bfloat16"
                    return Suggestion(sizes, devices, dtype, *taken)
    return None


def _attempt(source: Footprint, sizes: dict[str, int], request: _Request) -> tuple[int, int] | None:
    """Bytes of weights and of KV cache on a device of such a mesh; None if the mesh is invalid."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes)) if sizes else None
    try:
        groups = source.tensors_of(mesh, request.dtype)
    except UserInputError:  # a rule of the caller does not divide evenly
        return None
    taken = sum(len(one.names) * one.nbytes_per_device for one in groups)
    return taken, _cache(source, groups, mesh, request)[0]


# --- options ----------------------------------------------------------------------------------


def read_mesh(mesh: Any, rules: Any = None) -> Any:
    """Makes a mesh of an option; from sizes alone, one without devices.

    Example:
        >>> dict(read_mesh("model=8,data=2").shape)
        {'model': 8, 'data': 2}
    """
    if mesh is None:
        if rules is not None:
            raise UserInputError("rules= need a mesh: plan(model, mesh, rules=...)")
        return None
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return mesh
    sizes = list(_axes(mesh) if isinstance(mesh, str) else _items(mesh))
    text = ",".join(f"{name}={size}" for name, size in sizes)
    found = {axis_name(name): size for name, size in sizes}
    if not found or any(type(n) is not int or not 0 < n <= 2**31 for n in found.values()):
        raise UserInputError(
            f"mesh: '{text}': sizes must be positive integers, as in model=8,data=2"
        )
    if len(found) < len(sizes):
        raise UserInputError(f"mesh: '{text}' names one axis twice")
    unknown = [name for name in found if name not in AXES]
    if unknown and rules is None:
        raise UserInputError(f"mesh: there is no axis '{unknown[0]}': axes are {', '.join(AXES)}")
    return AbstractMesh(tuple(found.values()), tuple(found))


def _items(mesh: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(mesh, Mapping):
        raise TypeError(
            f"mesh must be a jax Mesh or a dict of axis sizes, not {type(mesh).__name__}"
        )
    return iter(mesh.items())


def _axes(text: str) -> Iterator[tuple[str, int]]:
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d{1,10})\s*", part, re.ASCII)
        if match is None:
            raise UserInputError(f"mesh: '{text}' is not of the form model=8,data=2")
        yield match[1], int(match[2])


def _dtype(option: str, dtype: Any) -> DType | None:
    if dtype is None:
        return None
    # PyTorch's tools call float16 "fp16".
    name = re.sub(r"^fp(?=\d)", "f", dtype) if isinstance(dtype, str) else dtype
    found = named_dtype(option, name)
    if not found.is_float() and option == "dtype":
        raise UserInputError(f"dtype must be a float type, not {found.name}")
    return found


def parse_bytes(size: int | str | None) -> int | None:
    """Parses a number of bytes with or without a unit.

    Raises:
        UserInputError: ``size`` is not a size, or not positive.

    Example:
        >>> parse_bytes("80GB"), parse_bytes("1.5 GiB"), parse_bytes(1024)
        (80000000000, 1610612736, 1024)
    """
    if size is None:
        return None
    if type(size) is int and size > 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].lower() or "b") if match else None
    if match and factor and (found := int(float(match[1]) * factor)) > 0:
        return found
    raise UserInputError(f"hbm={size!r} is not a size of memory: write it as 80GB or 16GiB")


def _memory_of(mesh: Any) -> int | None:
    """Bytes of memory of the smallest device of a real mesh; None if no device's is known."""
    if not isinstance(mesh, Mesh):
        return None
    local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    found = [memory_stats(device).get("bytes_limit") or _known_memory(device) for device in local]
    return min((n for n in found if n), default=None)


def _known_memory(device: Any) -> int | None:
    """Bytes of memory of a device that does not report it, by the name of its kind."""
    kind = str(getattr(device, "device_kind", "")).lower()
    return next((size for part, size in _MEMORY.items() if part in kind), None)
