"""``maxjax.plan``: shows whether a model fits on a mesh of devices, and if not, on which mesh it fits."""

from __future__ import annotations

import dataclasses
import heapq
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from ...columns import Table
from ...driver import memory_stats
from ...errors import UserInputError, checked_integer, some
from ...graph.placement.mesh import abstract_mesh
from ...graph.weights import FileWeights, load_weights
from ...models import name_rules as names
from ...nn.layer import Module
from ...nn.layer.place import UNKNOWN_SIZES
from ...rendering.rendered import Rendered, guarded, memory_bar, tree
from ...rendering.row import Row, bytes_text
from ...storage.hub import checkpoint_path
from ...storage.limits import Limits, allowing
from ...storage.safetensors.writer import size_in_bytes
from .compiled import ProgramMemory, Programs
from .footprint import Footprint, TensorGroup, of_checkpoint, of_module
from .meshes import (
    MeshChoice,
    Suggestion,
    cache_of,
    exact_bytes,
    largest,
    mesh_text,
    problem,
    ranked,
    suggest,
)
from .options import PlanRequest, read_dtype, read_mesh
from .topology import Topology, memory_of_kind

_LARGEST, _SHOWN_MESHES = 10, 5
# The tokens of a sequence that are planned for if device= is given without length=.
_LENGTH = 8192


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


@dataclass(frozen=True, repr=False)
class Plan(Rendered):
    """The memory that a model takes on each device. ``print`` shows it as a table.

    All devices hold the same number of bytes: a dimension that the mesh axis does not divide
    evenly is replicated. Weights and KV cache are counted; activations and other temporary buffers
    only if the programs were compiled.

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
        fits: whether weights and KV cache fit, and the temporaries if ``programs`` is not empty;
            None if the memory or a size is not known.
        suggestion: a mesh on which the model fits, if this one is too small: the best of the named
            device, or one with the fewest devices.
        notes: further remarks.
        device: the name of the topology that was planned for, or None.
        why: which part is too large, if the model does not fit; else "".
        programs: memory of the compiled programs ``decode`` and ``read``, if compiled.
        max_batch, max_length: the largest batch of the planned length, and the longest context of
            the planned batch, that fit; None if that is not known.
        meshes: all meshes of the named device, the best first.
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
    device: str | None = None
    why: str = ""
    programs: tuple[ProgramMemory, ...] = ()
    max_batch: int | None = None
    max_length: int | None = None
    meshes: tuple[MeshChoice, ...] = ()

    @property
    def temporaries_per_device(self) -> int | None:
        """Bytes that the largest compiled program needs besides weights and cache; None if not compiled."""
        found = [one.temporaries + one.results for one in self.programs if not one.refused]
        return max(found, default=None)

    def as_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists, strings and numbers, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return guarded(self, lambda: _summary(self))

    def _mx_html(self) -> str:
        return _page(self)


# --- as a line, and as HTML ------------------------------------------------------------------


def _summary(plan: Plan) -> str:
    on = f" of {plan.device}" if plan.device else ""
    cache = plan.cache_bytes_per_device
    held = f"{bytes_text(plan.bytes_per_device)} of weights{f' and {bytes_text(cache)} of cache' * bool(cache)}"
    parts = [f"{mesh_text(plan.mesh, plan.devices)}{on}", f"{held} on each device"]
    if plan.temporaries_per_device:
        parts.append(f"{bytes_text(plan.temporaries_per_device)} of temporaries")
    if plan.hbm is not None:
        fits = {True: "fits", False: f"does not fit: {plan.why}", None: "not known whether it fits"}
        parts.append(f"of {bytes_text(plan.hbm)}: {fits[plan.fits]}")
    if plan.suggestion is not None:
        parts.append(f"what fits: {plan.suggestion}")
    return f"Plan({'; '.join(parts)})"


def _page(plan: Plan) -> str:
    kinds = [
        Row(
            kind.name, "", kind.dtype, kind.shape, kind.count * math.prod(kind.shape), kind.bytes,
            notes=(*([f"{kind.count:,} tensors"] if kind.count > 1 else []), kind.spec,
                   f"{bytes_text(kind.bytes_per_device)} on each device", *filter(None, [kind.why])),
            is_array=True,
        )
        for kind in plan.kinds
    ]  # fmt: skip
    rows = [Row("weights", "", children=tuple(kinds), nbytes=plan.total_bytes)]
    rows[0].parameters = sum(row.parameters for row in kinds)
    rows += [Row(note, "note") for note in plan.notes]
    bar = ""
    if plan.hbm:
        parts = {
            "weights": plan.bytes_per_device,
            "cache": plan.cache_bytes_per_device,
            "temporaries": plan.temporaries_per_device or 0,
        }
        bar = memory_bar(parts, plan.hbm)
    return tree(_summary(plan), Row("", "Plan", children=tuple(rows))) + bar


# --- as a table -------------------------------------------------------------------------------


def parts(plan: Plan) -> Iterator[str | Table]:
    """The text of a plan: lines and tables."""
    on = f" of {plan.device}" if plan.device else ""
    yield f"{mesh_text(plan.mesh, plan.devices)}{on}; {plan.basis}"
    yield ""
    rows = [
        ["weights", exact_bytes(plan.total_bytes)],
        ["on each device", exact_bytes(plan.bytes_per_device)],
    ]
    if plan.cache_bytes_per_device:
        rows.append(["and its cache", exact_bytes(plan.cache_bytes_per_device)])
    for one in plan.programs:
        text = f"{exact_bytes(one.temporaries + one.results)} of temporaries"
        rows.append([one.program, one.refused or f"{text}, compiled in {one.seconds:.1f} s"])
    if plan.hbm is not None:
        rows.append(["a device has", exact_bytes(plan.hbm)])
        rows.append(["fits", {True: "yes", False: "no", None: "not known"}[plan.fits]])
    if plan.fits is False:
        rows.append(["because", plan.why])
        rows.append(["what fits", str(plan.suggestion or "no mesh or dtype that was tried")])
    if plan.max_batch:
        rows.append(["largest batch", f"{plan.max_batch:,}"])
    if plan.max_length:
        rows.append(["longest context", f"{plan.max_length:,} tokens"])
    yield Table(rows, titles=0)
    yield ""
    head = ["name", "count", "dtype", "shape", "spec", "bytes", "per device", "why"]
    table = [
        [k.name, f"{k.count:,}", k.dtype, "x".join(map(str, k.shape)) or "scalar",
         k.spec, f"{k.bytes:,}", f"{k.bytes_per_device:,}", k.why]
        for k in plan.kinds
    ]  # fmt: skip
    yield Table([head, *table], right=(1, 5, 6))
    if plan.replicated:
        yield from ("", "replicated on every device")
        rows = [[f"  {k.name}", f"{k.bytes:,}", k.why] for k in plan.replicated]
        yield Table(rows, right=(1,), titles=0)
    if plan.largest:
        yield from ("", "largest")
        rows = [[f"  {name}", f"{nbytes:,}"] for name, nbytes in plan.largest]
        yield Table(rows, right=(1,), titles=0)
    if plan.meshes:
        yield from ("", "meshes, the best first")
        yield Table([_MESH_HEAD, *map(_mesh_row, plan.meshes[:_SHOWN_MESHES])], right=(2, 3, 4, 5))
        if len(plan.meshes) > _SHOWN_MESHES:
            yield f"  and {len(plan.meshes) - _SHOWN_MESHES} more"
    yield from (f"\nnote: {note}" for note in plan.notes)


def _lines(plan: Plan) -> Iterator[str]:
    for part in parts(plan):
        yield from part.lines() if isinstance(part, Table) else [part]


_MESH_HEAD = ["  mesh", "fits", "on a device", "read a token", "collectives", "sent a token", "but"]


def _mesh_row(one: MeshChoice) -> list[str]:
    axes = ",".join(f"{axis}={size}" for axis, size in one.mesh.items())
    fits = {True: "yes", False: "no", None: "-"}[one.fits]
    return [f"  {axes}", fits, bytes_text(one.taken), bytes_text(one.bytes_read), f"{one.collectives:,}",
            bytes_text(one.bytes_sent), one.why.partition("; ")[0]]  # fmt: skip


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
    device: str | None = None,
    compile: str | None = None,
) -> Plan:
    """Computes the memory that a model takes on each device of a mesh, without loading it.

    Args:
        model_or_path: a Module; or a checkpoint, whose headers are read: its path, a name as for
            :func:`maxjax.load` (``org/name``, ``"tiny"``), or open ``Weights``.
            Without a mesh, a Module is counted with its present sharding.
        mesh: a jax Mesh or AbstractMesh, or the sizes of its axes: ``{"model": 8}`` or
            ``"model=8,data=2"``.
        dtype: dtype in which floats would be stored; None for the present dtypes.
        batch, length: size of a KV cache to count: the number of sequences, and of tokens in each.
        cache_dtype: dtype of the KV cache; by default that of most weights.
        rules: sharding rules that override the model's own, as for ``Module.to``.
        hbm: memory of a device in bytes, or as ``"80GB"`` or ``"16GiB"``; by default what the
            devices of a real mesh report, or the known memory of their kind.
        limits: the limits of ``maxjax.load``.
        device: a kind and number of devices, which this machine need not have: ``"v5e:2x4"``,
            ``"v5p:2x2x2"``, ``"h200:8"``. Its meshes are compared; without ``mesh``, the plan is
            for the best one, and without ``batch`` and ``length``, for one sequence of 8,192
            tokens.
        compile: devices in the same notation, for which XLA compiles the programs that
            ``maxjax.generate`` runs, to count temporary buffers too. It needs the compiler, but no
            device.

    Raises:
        UserInputError: an option is invalid, or the size of the KV cache is not known.
        CheckpointError: the checkpoint is missing or corrupt.
        MissingCompilerError: the compiler is not installed; the message says what to install.

    Example:
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> mlp = nn.MLP("float32", None, 64, 256, [DeviceRef.CPU()])
        >>> found = plan(mlp, {"model": 4}, hbm="32KB")
        >>> found.bytes_per_device, found.total_bytes, found.fits
        (49152, 196608, False)
        >>> print(found.suggestion)
        mesh model=4 (4 devices) with dtype=bfloat16: 24,576 bytes (24 KiB) on each device
    """
    topology = _topology(device, compile)
    grid = None if mesh is None and topology is not None else read_mesh(mesh, rules)
    if grid is not None and topology is not None and grid.size > topology.count:
        raise UserInputError(
            f"{mesh_text(dict(grid.shape), grid.size)}: {topology.name} has {topology.count} devices"
        )
    if (batch is None) != (length is None):
        raise UserInputError("batch= and length= belong together: pass both, or neither")
    if batch is not None:
        batch, length = checked_integer("batch", batch), checked_integer("length", length)
    hbm = None if hbm is None else size_in_bytes(hbm, "hbm")
    request = PlanRequest(
        read_dtype("dtype", dtype), batch, length, read_dtype("cache_dtype", cache_dtype)
    )
    run = lambda source: _plan(source, grid, request, hbm, topology, compile is not None, rules)
    if isinstance(model_or_path, Module):
        return run(of_module(model_or_path, rules))
    if not isinstance(model_or_path, (str, bytes, os.PathLike, FileWeights)):
        raise TypeError(
            f"plan() takes a Module or the path of a checkpoint, not {type(model_or_path).__name__}"
        )
    path = checkpoint_path(model_or_path)
    with load_weights(path, limits=limits) as weights, allowing(limits):
        return run(of_checkpoint(weights, rules))


def _topology(device: str | None, compile: str | None) -> Topology | None:
    found = [Topology.of(name) for name in (device, compile) if name is not None]
    if len({one.name for one in found}) > 1:
        raise UserInputError(
            f"device={device!r} and compile={compile!r} are not the same: pass one"
        )
    return found[0] if found else None


def _plan(
    source: Footprint, mesh: Any, request: PlanRequest, hbm: int | None, topology: Topology | None,
    is_compiled: bool, rules: Any,
) -> Plan:  # fmt: skip
    notes: list[str] = []
    choices: list[MeshChoice] = []
    if topology is not None:
        hbm = topology.memory if hbm is None else hbm
        request = _with_sizes(source, request, notes)
        choices = ranked(source, topology.count, topology.kind, request, hbm)
        if not choices:
            raise UserInputError(
                f"no mesh of {topology.name} divides the dimensions that rules= shards: pass mesh= as well"
            )
        if mesh is None:
            sizes = choices[0].mesh
            mesh = abstract_mesh(sizes)
    groups = source.tensors_of(mesh, request.dtype)
    placed_on = source.mesh if mesh is None else mesh
    cached, remarks = cache_of(source, groups, placed_on, request)
    kinds = _kinds(groups)
    devices = source.devices if mesh is None else mesh.size
    taken = sum(kind.bytes_per_device for kind in kinds)
    hbm = _memory_of(placed_on) if hbm is None else hbm
    unknown = [name for one in groups if one.why == UNKNOWN_SIZES for name in one.names]
    if unknown:
        remarks.append(f"these sizes are not known yet and count as 0 bytes: {some(unknown, 3)}")
    if is_compiled and hbm is not None and taken + cached > hbm:
        is_compiled = False
        notes.append("no program was compiled: weights and cache alone do not fit")
    measured = Programs(source, mesh, request, rules, topology if is_compiled else None)
    temporaries = measured.most
    total = taken + cached + (temporaries or 0)
    fits = None if hbm is None or unknown else total <= hbm
    why = ""
    if measured.refused:
        fits, why = False, f"the compiler says: {measured.refused}"
    elif fits is False and hbm is not None:
        why = problem(taken, cached, temporaries or 0, hbm)
    elif fits and hbm is not None and topology is not None:
        if topology.kind.platform == "cuda" and total > 0.75 * hbm:
            notes.append(f"this is {total / hbm:.0%} of a device's memory, and JAX takes 75 % of a GPU's "
                         "unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise")  # fmt: skip
    room = None if hbm is None else hbm - (temporaries or 0)
    if measured.refused and room is not None:  # at least something has to become smaller
        room = min(room, taken + cached - 1)
    limits = None, None
    if hbm is not None and not unknown and not measured.refused:
        limits = largest(
            source,
            groups,
            placed_on,
            request,
            hbm - taken,
            measured.temporaries if is_compiled else None,
        )
    replicated = [k for k in kinds if devices > 1 and k.bytes and k.bytes_per_device == k.bytes]
    biggest = heapq.nlargest(
        _LARGEST, ((n, one.nbytes) for one in groups for n in one.names), key=lambda row: row[1]
    )
    return Plan(
        devices=devices, mesh={} if placed_on is None else dict(placed_on.shape),
        bytes_per_device=taken, total_bytes=sum(kind.bytes for kind in kinds), kinds=tuple(kinds),
        largest=tuple(biggest), replicated=tuple(sorted(replicated, key=lambda k: -k.bytes)),
        cache_bytes_per_device=cached, basis=source.basis, hbm=hbm, fits=fits,
        suggestion=_suggestion(source, placed_on, request, room, choices) if fits is False else None,
        notes=(*source.notes, *remarks, *notes), device=None if topology is None else topology.name,
        why=why, programs=measured.found, max_batch=limits[0], max_length=limits[1],
        meshes=tuple(choices),
    )  # fmt: skip


def _with_sizes(source: Footprint, request: PlanRequest, notes: list[str]) -> PlanRequest:
    """The request with the sizes of the KV cache, if there is one: those given, or one sequence."""
    if request.batch is not None or source.encoder:
        return request
    try:
        source.attention()
    except UserInputError:  # the size of the cache is not known
        return request
    length = min(_LENGTH, source.reading.max_length or _LENGTH)
    notes.append(
        f"one sequence of {length:,} tokens is assumed: pass batch= and length= for other sizes"
    )
    return dataclasses.replace(request, batch=1, length=length)


def _suggestion(
    source: Footprint, mesh: Any, request: PlanRequest, room: int | None, choices: list[MeshChoice]
) -> Suggestion | None:
    """A mesh on which weights and cache take no more than ``room``."""
    if room is None or room <= 0:
        return None
    for one in choices:
        if one.taken <= room:
            count = math.prod(one.mesh.values())
            held, cached = one.bytes_per_device, one.cache_bytes_per_device
            return Suggestion(one.mesh, count, None, held, cached)
    return suggest(source, mesh, request, room)


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


def _memory_of(mesh: Any) -> int | None:
    """Bytes of memory of the smallest device of a real mesh; None if no device's is known."""
    if not isinstance(mesh, Mesh):
        return None
    local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    found = [memory_stats(device).get("bytes_limit") or memory_of_kind(device) for device in local]
    return min((n for n in found if n), default=None)
