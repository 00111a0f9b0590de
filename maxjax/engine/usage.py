"""``memory``: what lies on each device and on the host, and what it belongs to."""

from __future__ import annotations

import html
import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from ..columns import columns, visible
from ..driver import memory_stats
from ..nn.layer import Module
from ..nn.layer.load.memory import free_bytes
from .holders import arrays_in, buffers, cache_arrays, live, owner, roots, weights_of

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device.

    Attributes:
        device: device, as "cuda:0".
        weights: of Weights, each buffer once.
        caches: of key-value caches.
        others: of other arrays: optimizer states, results that a variable or a notebook's ``Out`` keeps.
        in_use, peak, limit: what the device's own allocator says; None where it says nothing, as on CPUs.
    """

    device: str
    weights: int
    caches: int
    others: int
    in_use: int | None = None
    peak: int | None = None
    limit: int | None = None


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of one Module that is in no other.

    Attributes:
        model: name of its class.
        nbytes: on all devices of this process.
        shared: how much of that other Modules hold as well.
    """

    model: str
    nbytes: int
    shared: int


@dataclass(frozen=True)
class Memory:
    """What :func:`memory` found; its repr is a table, in notebooks one of HTML.

    Attributes:
        devices: devices of this process that hold something, or can say what is in use.
        models: Modules that hold something, the largest first.
        host_in_use: memory of this process, arrays on CPU devices included.
        host_free: memory that the host could still give it; None if unknown.
    """

    devices: tuple[DeviceMemory, ...]
    models: tuple[ModelMemory, ...]
    host_in_use: int
    host_free: int | None

    def _rows(self) -> list[list[str]]:
        titles = ["", "weights", "caches", "others", "in use", "peak", "free"]
        rows = [titles]
        for one in self.devices:
            free = None if one.limit is None or one.in_use is None else one.limit - one.in_use
            sizes = (one.weights, one.caches, one.others, one.in_use, one.peak, free)
            rows.append([one.device, *map(size, sizes)])
        rows.append(["host", "", "", "", size(self.host_in_use), "", size(self.host_free)])
        return rows

    def _models(self) -> list[list[str]]:
        return [
            [one.model, size(one.nbytes), f"{size(one.shared)} shared" if one.shared else ""]
            for one in self.models
        ]

    def __repr__(self) -> str:
        lines = list(columns(self._rows(), right=range(1, 7)))
        if models := self._models():
            lines += ["", *columns(models, right={1})]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        first, *rows = self._rows()
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in first)
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{_html(rows)}</tbody></table>"
            f"<table><tbody>{_html(self._models())}</tbody></table>"
        )


def _html(rows: Iterable[Iterable[str]]) -> str:
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return "".join(f"<tr>{row}</tr>" for row in cells)


def size(nbytes: int | None) -> str:
    """Bytes as text; "" if unknown.

    Example:
        >>> size(12), size(4_200_000), size(None)
        ('12 B', '4.2 MB', '')
    """
    if nbytes is None:
        return ""
    unit = min(max(len(str(nbytes)) - 1, 0) // 3, len(_UNITS) - 1)
    return f"{nbytes} B" if not unit else f"{nbytes / 1000**unit:.1f} {_UNITS[unit]}"


def memory() -> Memory:
    """Counts the memory in use on this process's devices and host, and which Modules hold it.

    Nothing is copied from a device. The function inspects all objects of the process, which takes
    about 50 ms.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> layer = maxjax.init(nn.Linear(64, 32, "float32", DeviceRef.CPU()), jax.random.key(0))
        >>> one = next(one for one in maxjax.memory().models if one.model == "Linear")
        >>> one.nbytes
        8192
        >>> maxjax.free(layer)
        freed 8.2 kB
    """
    modules = [module for module in live(Module) if "_mx_children" in vars(module)]
    held: list[tuple[Module, dict[Any, int]]] = []
    for module in roots(modules):
        holders = {id(one): one for one in map(owner, weights_of(module).values())}
        arrays = (array for one in holders.values() for array in arrays_in(one))
        held.append((module, _by_buffer(arrays)))
    counts: dict[Any, int] = {}
    for _, own in held:
        for key in own:
            counts[key] = counts.get(key, 0) + 1
    weights = {key: nbytes for _, own in held for key, nbytes in own.items()}
    caches = _by_buffer(cache_arrays())
    every = _by_buffer(array for array in jax.live_arrays() if not array.is_deleted())
    models = [
        ModelMemory(
            visible(type(module).__name__),
            sum(own.values()),
            sum(nbytes for key, nbytes in own.items() if counts[key] > 1),
        )
        for module, own in held
        if own
    ]
    found = [_device(one, weights, caches, every) for one in jax.local_devices()]
    return Memory(
        tuple(one for one in found if one.weights or one.caches or one.others or one.limit),
        tuple(sorted(models, key=lambda one: -one.nbytes)),
        _resident(),
        free_bytes(jax.local_devices(backend="cpu")[0]),
    )


def _by_buffer(arrays: Iterable[jax.Array]) -> dict[Any, int]:
    """(device, address) → bytes, each buffer once."""
    return {
        (device, address): nbytes
        for array in arrays
        for device, address, nbytes in buffers(array)
        if nbytes
    }


def _device(
    device: Any, weights: dict[Any, int], caches: dict[Any, int], every: dict[Any, int]
) -> DeviceMemory:
    total = {"weights": 0, "caches": 0, "others": 0}
    for key, nbytes in (every | weights | caches).items():
        if key[0] == device:
            kind = "weights" if key in weights else "caches" if key in caches else "others"
            total[kind] += nbytes
    stats = memory_stats(device)
    return DeviceMemory(
        f"{device.platform}:{device.id}",
        **total,
        in_use=stats.get("bytes_in_use"),
        peak=stats.get("peak_bytes_in_use"),
        limit=stats.get("bytes_limit"),
    )


def _resident() -> int:
    """The bytes of memory that this process has now, or had at most where that is not known."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
