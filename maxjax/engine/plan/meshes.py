"""Finds the smallest mesh that a model fits on, the best mesh of some devices, and the largest batch and context.

The best mesh is the one that decodes a token in the least time, as far as that can be computed from
sizes: the bytes that a device reads, at the bandwidth of its kind, and the bytes that the devices send
each other. It is an estimate to rank meshes by, not a prediction of speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from ...dtype import DType
from ...errors import UserInputError
from ...graph.placement.mesh import abstract_mesh
from ...graph.placement.specs import BATCH, axis_of, batch_axes, names_in
from ...kernels.explicit import parts_over
from ...models import name_rules as names
from ...rendering.row import bytes_text
from .footprint import Footprint, TensorGroup, cache_bytes
from .options import PlanRequest
from .topology import AcceleratorKind

_MAX_GROWTH = 4096
# Seconds that a collective takes in addition to the transfer of its bytes. An assumption, of the order of
# what libraries report within a host and a slice.
LATENCY = 10e-6


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
        return f"{mesh_text(self.mesh, self.devices)}{dtype}: {exact_bytes(total)} on each device"


@dataclass(frozen=True)
class MeshChoice:
    """A mesh of all devices of a topology, and what a token costs on it.

    Attributes:
        mesh: the size of each axis.
        bytes_per_device, cache_bytes_per_device: bytes of weights and of KV cache on each device.
        fits: whether weights and cache fit; None if the memory of a device is not known.
        bytes_read: bytes that a device reads for one token of every row: weights and the cache.
        collectives, bytes_sent: the number of collectives for that token, and the bytes that a
            device sends in them.
        seconds: an estimate of the time that this takes, to rank meshes by; None if the bandwidth
            is not known.
        why: the disadvantages of the mesh, as text; "" if there are none.
    """

    mesh: dict[str, int]
    bytes_per_device: int
    cache_bytes_per_device: int
    fits: bool | None
    bytes_read: int
    collectives: int
    bytes_sent: int
    seconds: float | None
    why: str

    @property
    def taken(self) -> int:
        """Bytes of weights and cache on each device."""
        return self.bytes_per_device + self.cache_bytes_per_device


# --- the best of a number of devices --------------------------------------------------------------


def ranked(
    source: Footprint, count: int, kind: AcceleratorKind, request: PlanRequest, hbm: int | None
) -> list[MeshChoice]:
    """The meshes of ``count`` devices over data, model, fsdp and expert, the best first.

    Those on which the model fits come first, by the estimated time of a token; then the others, by
    the bytes that a device would need.
    """
    axes = (
        ("data", "fsdp", "expert", "model") if source.reading.experts else ("data", "fsdp", "model")
    )
    found = []
    for sizes in _factors(count, axes):
        mesh = abstract_mesh(sizes)
        try:
            found.append(_choice(source, mesh, kind, request, hbm))
        except UserInputError:  # a rule of the caller does not divide evenly
            continue

    def key(one: MeshChoice) -> Any:
        rank = one.taken if one.fits is False else one.seconds or one.bytes_read
        return (
            one.fits is False,
            rank,
            len(one.mesh),
            [-one.mesh.get(axis, 0) for axis in axes[::-1]],
        )

    return sorted(found, key=key)


def _factors(count: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Sizes of the axes whose product is ``count``; axes of size 1 are left out.

    Example:
        >>> [*_factors(4, ("data", "model"))]
        [{'model': 4}, {'data': 2, 'model': 2}, {'data': 4}]
    """
    first, *rest = axes
    if not rest:
        yield {first: count}
        return
    for size in range(1, count + 1):
        if count % size == 0:
            for others in _factors(count // size, tuple(rest)):
                sizes = {axis: n for axis, n in {first: size, **others}.items() if n > 1}
                yield sizes or {axes[-1]: 1}


def _choice(
    source: Footprint, mesh: Any, kind: AcceleratorKind, request: PlanRequest, hbm: int | None
) -> MeshChoice:
    groups = source.tensors_of(mesh, request.dtype)
    cached, notes = cache_of(source, groups, mesh, request)
    held = sum(len(one.names) * one.nbytes_per_device for one in groups)
    read, collectives, sent = _traffic(source, groups, mesh, request.batch or 1)
    read += cache_of(source, groups, mesh, request, reads=True)[0]
    seconds = None
    if kind.bandwidth:
        seconds = read / kind.bandwidth + sent / kind.link + collectives * LATENCY
    fits = None if hbm is None else held + cached <= hbm
    why = [problem(held, cached, 0, hbm)] if fits is False and hbm is not None else []
    fsdp = axis_of(mesh, "fsdp")
    if fsdp is not None and mesh.shape[fsdp] > 1:
        why.append(f"weights are gathered over fsdp={mesh.shape[fsdp]} for every token")
    whole = [
        one for one in groups
        if one.parts == 1 and mesh.size > 1 and one.nbytes * len(one.names) > held // 100
    ]  # fmt: skip
    why += [f"{names.generic(one.names[0])} is replicated ({one.why})" for one in whole[:1]]
    why += [note.removeprefix("the KV cache: ") for note in notes]
    return MeshChoice(
        dict(mesh.shape), held, cached, fits, read, collectives, sent, seconds,
        "; ".join(dict.fromkeys(why)),
    )  # fmt: skip


def _traffic(
    source: Footprint, groups: list[TensorGroup], mesh: Any, batch: int
) -> tuple[int, int, int]:
    """For one token of every row, on one device: bytes of weights read, collectives, and bytes sent.

    A linear layer whose inputs are sharded ends in an all-reduce; the experts of a layer share one. So does
    a lookup in an embedding table whose rows are sharded. If each device holds complete experts, the rows of
    all devices are gathered before and their sums are scattered after. Weights sharded over fsdp are
    gathered and then read completely, except tables, of which each device uses its shard for all rows.
    """
    reading = source.reading
    rows = batch // parts_over(mesh, batch_axes(mesh, batch))
    tied = not any(names.layer_of(one.names[0]) in names.HEADS for one in groups)
    fsdp = axis_of(mesh, "fsdp")
    shards = mesh.shape[fsdp] if fsdp is not None else 1
    read, sent, collectives = 0, Fraction(0), Fraction(0)
    for one in groups:
        count, name = len(one.names), names.generic(one.names[0])
        axes = [{*names_in(entry)} for entry in (*one.spec, *[None] * len(one.shape))]
        parts = partial(parts_over, mesh)
        layer, nbytes, here = name.rpartition(".")[0], count * one.nbytes_per_device, rows
        is_head = names.layer_of(name) in names.HEADS
        is_table = is_head or names.layer_of(name) in (*names.TABLES, *names.UNTIED_TABLES)
        itemsize = max(2, one.dtype.size_in_bits // 8)
        if shards > 1 and any(fsdp in axis for axis in axes):
            if is_table:
                here = rows * shards
                width = Fraction(4 * one.shape[0], parts(axes[0])) if is_head else 0
                states = itemsize * one.logical_shape[-1]
                collectives += 2 if is_head else 1
                sent += rows * (shards - 1) * (states + width / shards)
            else:
                collectives, sent = collectives + count, sent + nbytes * (shards - 1)
                nbytes *= shards
        times = Fraction(count)
        if ".experts.*." in name and reading.experts:
            times /= reading.experts
            over = max(1, one.parts // parts(set().union(*axes)))
            here = rows * over
        read += int(nbytes * reading.share(name, here, tied))
        if len(one.shape) < 2 or is_head:
            continue
        by_rows = is_table or (reading.transposed and layer.endswith(names.TRANSPOSED_MAPS))
        split = parts(axes[0 if by_rows else len(one.shape) - 1] - {fsdp})
        width = one.logical_shape[-1 if by_rows else -2]
        if split > 1:
            collectives += times
            sent += times * here * width * itemsize * 2 * Fraction(split - 1, split)
        if here > rows and layer.endswith(("down_proj", "w2")):
            collectives += 2 * times
            sent += times * 2 * rows * (here // rows - 1) * width * itemsize
    return read, math.ceil(collectives), int(sent)


def problem(weights: int, cached: int, temporaries: int, hbm: int) -> str:
    """Which part of a model is too large for a device, as text.

    Example:
        >>> problem(20 << 30, 1 << 30, 0, 16 << 30)
        'the weights alone take 20 GiB of the 16 GiB of a device'
        >>> problem(10 << 30, 4 << 30, 3 << 30, 16 << 30)
        'weights of 10 GiB, a cache of 4 GiB and temporaries of 3 GiB take 17 GiB of the 16 GiB of a device'
    """
    parts = {"weights": weights, "cache": cached, "temporaries": temporaries}
    room = f"of the {bytes_text(hbm)} of a device"
    for name, nbytes in parts.items():
        if nbytes > hbm:
            return f"the {name} alone take{'s' * (name == 'cache')} {bytes_text(nbytes)} {room}"
    words = [f"weights of {bytes_text(weights)}"]
    words += [f"a cache of {bytes_text(cached)}"] if cached else []
    words += [f"temporaries of {bytes_text(temporaries)}"] if temporaries else []
    text = f"{', '.join(words[:-1])} and {words[-1]}" if words[1:] else words[0]
    return f"{text} take {bytes_text(sum(parts.values()))} {room}"


# --- the smallest ---------------------------------------------------------------------------------


def cache_of(
    source: Footprint, groups: list[TensorGroup], mesh: Any, request: PlanRequest, *, reads: bool = False
) -> tuple[int, list[str]]:  # fmt: skip
    """Bytes of the KV cache on a device, or those that a decode step reads of it, and notes."""
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
    attention = source.attention()
    return cache_bytes(attention, request.batch, request.length, dtype, mesh, reads=reads)


def suggest(source: Footprint, mesh: Any, request: PlanRequest, hbm: int) -> Suggestion | None:
    """The smallest mesh on which the model fits; the planned dtype is preferred on equal sizes."""
    base = {} if mesh is None else dict(mesh.shape)
    named = {kind: (mesh and axis_of(mesh, kind)) or kind for kind in ("model", "fsdp")}
    narrow = replace(request, dtype=DType.bfloat16)
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


def _attempt(
    source: Footprint, sizes: dict[str, int], request: PlanRequest
) -> tuple[int, int] | None:
    """Bytes of weights and of KV cache on each device of a mesh; None if the mesh is invalid."""
    mesh = abstract_mesh(sizes) if sizes else None
    try:
        groups = source.tensors_of(mesh, request.dtype)
    except UserInputError:  # a rule of the caller does not divide evenly
        return None
    taken = sum(len(one.names) * one.nbytes_per_device for one in groups)
    return taken, cache_of(source, groups, mesh, request)[0]


# --- text -----------------------------------------------------------------------------------------


def mesh_text(mesh: dict[str, int], devices: int) -> str:
    """A mesh, and the number of its devices."""
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    count = f"{devices:,} device" + "s" * (devices != 1)
    return f"mesh {axes} ({count})" if mesh else count


def exact_bytes(n: int) -> str:
    """A number of bytes, and the same in the unit that suits it."""
    return f"{n:,} bytes ({bytes_text(n)})" if n >= 1024 else bytes_text(n)


# The largest batch that is tried.
_MAX_BATCH = 1 << 20

Temporaries = Callable[[int, int], int | None]
"""(batch, length) → bytes of temporaries, or None if the compiler refuses the program as too large."""


# --- the largest batch and the longest context ----------------------------------------------------


def largest(
    source: Footprint,
    groups: list[TensorGroup],
    mesh: Any,
    request: PlanRequest,
    room: int,
    temporaries: Temporaries | None = None,
) -> tuple[int | None, int | None]:
    """The largest batch for the planned length, and the longest context for the planned batch.

    The batch is a multiple of the devices that split it, and the context is no longer than the model
    takes. Temporaries are those of programs compiled for the planned sizes and for one larger size,
    and are assumed to grow linearly between and beyond these.

    Args:
        source: the model.
        groups: its tensors on the mesh.
        mesh: the mesh, or None for one device.
        request: the planned sizes.
        room: bytes of a device's memory that the weights leave free.
        temporaries: function that measures the temporaries; None leaves them out.

    Returns:
        The batch and the length; 0 if not even the smallest fits, and None if it is not known: for
        an encoder, or without planned sizes.
    """
    if request.batch is None or request.length is None or source.encoder:
        return None, None
    batch, length = request.batch, request.length
    cached = lambda b, s: cache_of(source, groups, mesh, replace(request, batch=b, length=s))[0]
    step = 1 if mesh is None else math.prod(
        mesh.shape[axis] for kind in BATCH if (axis := axis_of(mesh, kind))
    )  # fmt: skip
    first = None if temporaries is None else temporaries(batch, length)
    of_rows = _most(lambda n: cached(n * step, length), room, _MAX_BATCH // step)
    of_tokens = _most(lambda n: cached(batch, n), room, source.reading.max_length or _MAX_BATCH)
    if temporaries is not None and first is not None:
        grown = _line(lambda n: temporaries(n, length), batch, first, of_rows * step // 2)
        of_rows = _most(
            lambda n: cached(n * step, length) + grown(n * step), room, _MAX_BATCH // step
        )
        grown_long = _line(lambda n: temporaries(batch, n), length, first, of_tokens // 2)
        of_tokens = _most(lambda n: cached(batch, n) + grown_long(n), room, of_tokens)
    return of_rows * step, of_tokens


def _most(taken: Callable[[int], int], room: int, most: int) -> int:
    """The largest number up to ``most`` for which ``taken``, an increasing function, is at most ``room``.

    Example:
        >>> _most(lambda n: 10 * n, 45, 100), _most(lambda n: 10 * n, 5, 100), _most(lambda n: n, 9, 3)
        (4, 0, 3)
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if taken(middle) <= room else (low, middle - 1)
    return low


def _line(
    measure: Callable[[int], int | None], at: int, first: int, other: int
) -> Callable[[int], int]:
    """A linear function through the measurements at two sizes; proportional to the size if there is only one.

    Example:
        >>> _line(lambda n: 5 + n, 1, 6, 10)(100), _line(lambda n: None, 2, 6, 10)(4)
        (105, 12)
    """
    second = measure(other) if other > at else None
    if second is None:
        return lambda n: -(-first * max(n, at) // at)
    slope = max(0, second - first) / (other - at)
    return lambda n: math.ceil(first + slope * max(0, n - at))
