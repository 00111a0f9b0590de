"""``memory`` shows what takes memory on each device and on the host, and what holds it; ``free`` frees weights.

Freed values of Modules and Weights become placeholders again. No list is kept of the objects that hold arrays
(Weights, KV caches, and the Modules that Weights belong to), so they are looked up among all objects of the
process, which takes about 50 ms. Arrays are identified by the address of their buffers, because two arrays may
share one buffer.
"""

from __future__ import annotations

import gc
import resource
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer

from ..columns import columns
from ..driver import free_bytes, memory_stats
from ..errors import UserInputError, some
from ..graph.weight.spec import is_value
from ..graph.weight.stacked import StackedWeight
from ..graph.weight.weight import Weight
from ..kernels.stack_slice import stack_of
from ..nn.kv_cache.cache import KVCache
from ..nn.layer import Module
from ..rendering.rendered import plain_table
from ..rendering.row import bytes_text


def live(*kinds: type) -> list[Any]:
    """The objects of this process that are instances of one of the classes."""
    found = []
    for one in gc.get_objects():
        try:
            if issubclass(type(one), kinds):
                found.append(one)
        except ReferenceError:  # a weak reference to what is gone
            continue
    return found


def arrays_in(holder: Weight) -> list[jax.Array]:
    """The arrays that a Weight or a StackedWeight holds itself.

    A layer of a stack has none, because the stack holds it; nor has a part of a Weight (``shard``).
    """
    if holder.home is not None or holder.shard_idx is not None:
        return []
    if isinstance(holder, StackedWeight) and holder.is_lazy:
        leaves: Iterable[Any] = (holder.leaf_of(i) for i in range(holder.spec.count))
    else:
        leaves = [stack_of(holder.leaf)]
    return [leaf for leaf in leaves if is_value(leaf) and is_array(leaf)]


def is_array(leaf: Any) -> bool:
    """Whether it is an array with memory of its own."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and not leaf.is_deleted()


def buffers(array: jax.Array) -> Iterator[tuple[Any, int, int]]:
    """The device, the address and the bytes of each shard of an array that this process has."""
    try:
        for shard in array.addressable_shards:
            data = shard.data
            yield shard.device, data.unsafe_buffer_pointer(), data.on_device_size_in_bytes()
    except (AttributeError, RuntimeError, NotImplementedError):  # deleted meanwhile, or random keys
        return


def owner(weight: Weight) -> Any:
    """What holds the array of a Weight: itself, or the outermost stack that it is in."""
    holder: Any = weight
    while holder.home is not None:
        holder = holder.home[0]
    return holder


def roots(modules: list[Module]) -> list[Module]:
    """The Modules that are not inside another one of the list."""
    inner = {
        id(child)
        for module in modules
        for child in (*module._mx_children.values(), *vars(module).get("_mx_made", {}).values())
    }
    return [module for module in modules if id(module) not in inner]


def weights_of(module: Module) -> dict[str, Weight]:
    """The Weights of a Module by name; an empty dict if its names contradict each other."""
    try:
        return module.raw_state_dict()
    except (ValueError, AttributeError):  # also one that is being built
        return {}


def cache_arrays() -> list[jax.Array]:
    """The arrays of all KV caches."""
    leaves = (leaf for cache in live(KVCache) for leaf in jax.tree.leaves(cache))
    return [leaf for leaf in leaves if is_array(leaf)]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device.

    Attributes:
        device: platform and id of the device, such as "cuda:0".
        weights: bytes of Weights, each buffer counted once.
        caches: bytes of KV caches.
        others: bytes of other arrays: optimizer states, results that a variable or a notebook's ``Out`` keeps.
        in_use, peak, limit: bytes as the device's allocator reports them; None without a report, as on CPUs.
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
    """Bytes of one Module that is not part of another.

    Attributes:
        model: name of its class.
        nbytes: bytes of its weights on all devices of this process.
        shared: bytes among them that other Modules hold as well.
    """

    model: str
    nbytes: int
    shared: int


@dataclass(frozen=True)
class Memory:
    """What :func:`memory` found; its repr is a table, in notebooks one of HTML.

    Attributes:
        devices: devices of this process that hold arrays, or whose allocator reports a limit.
        models: Modules that hold arrays, the largest first.
        host_in_use: bytes of host memory of this process, including arrays on CPU devices.
        host_free: bytes that the host could still allocate; None if unknown.
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
            rows.append([one.device, *map(_size, sizes)])
        rows.append(["host", "", "", "", _size(self.host_in_use), "", _size(self.host_free)])
        return rows

    def _models(self) -> list[list[str]]:
        return [
            [
                one.model,
                bytes_text(one.nbytes),
                f"{bytes_text(one.shared)} shared" if one.shared else "",
            ]
            for one in self.models
        ]

    def __repr__(self) -> str:
        lines = list(columns(self._rows(), right=range(1, 7)))
        if models := self._models():
            lines += ["", *columns(models, right={1})]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return plain_table(self._rows()) + plain_table(self._models(), titles=0)


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else bytes_text(nbytes)


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
        freed 8 KiB
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
            type(module).__name__,
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
    """The bytes of memory that this process uses now, or its peak where that is not known."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


@dataclass(frozen=True)
class Freed:
    """The result of :func:`free`.

    Attributes:
        nbytes: bytes on the devices of this process that were freed.
        kept: bytes that are still held elsewhere: by another Module with the same arrays, a
            variable, an optimizer, or a notebook's ``Out``.
        holders: names of Weights of other Modules that hold some of the ``kept`` bytes.
    """

    nbytes: int
    kept: int = 0
    holders: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if not self.kept:
            return f"freed {bytes_text(self.nbytes)}"
        who = f"weights of other Modules: {some(self.holders, 3)}" if self.holders else "others"
        return (
            f"freed {bytes_text(self.nbytes)}; {bytes_text(self.kept)} stay, which {who} still hold"
        )


def free(*what: Module | Weight, delete: bool = False) -> Freed:
    """Frees the values of Modules and Weights, in place: they become placeholders, and can be loaded again.

    Only references are dropped. An array that something else still holds stays in memory: another
    Module (``maxjax.quantize`` and ``jax.tree.map`` share the arrays that they do not change), a
    variable, or an optimizer. The result says how many bytes stay. Arrays that ties, stacks or
    parts share are freed once, and freeing again does nothing.

    Args:
        what: Modules and Weights. A layer of a LayerStack cannot be freed alone, because the weights
            of all layers are one array, and neither can a part of a weight (``shard``).
        delete: whether to delete arrays that are still held, but by no Weight: their next use
            raises an error. Arrays of other Modules are never deleted.

    Returns:
        The bytes that were freed, and those that are still held elsewhere.

    Raises:
        TypeError: something is neither a Module nor a Weight. Other arrays are freed with ``del``, or
            their own ``delete()``.
        UserInputError: a Weight is one layer of a stack, or a part of another.

    Warns:
        UserWarning: a Weight is shared with a Module that is not freed, which loses its value too.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> layer = maxjax.init(nn.Linear(64, 32, "float32", DeviceRef.CPU()), jax.random.key(0))
        >>> maxjax.free(layer), maxjax.free(layer)
        (freed 8 KiB, freed 0 bytes)
        >>> layer.weight.value is None
        True
    """
    holders = _holders(what)
    _warn_of_ties(what, holders)
    arrays = [array for one in holders for array in arrays_in(one)]
    references = [(weakref.ref(array), list(buffers(array))) for array in arrays]
    del arrays
    for one in holders:
        one.put(one.spec.blank())
    if any(reference() is not None for reference, _ in references):
        gc.collect()  # what only cycles of garbage hold
    alive = [found for reference, _ in references if (found := reference()) is not None]
    names = _others(alive) if alive else {}
    if delete:
        for array in alive:
            if id(array) not in names:
                array.delete()
    held = {one for _, found in references for one in found}
    kept = held & {one for array in alive if not array.is_deleted() for one in buffers(array)}
    sizes = lambda found: sum(nbytes for _, _, nbytes in found)
    return Freed(sizes(held - kept), sizes(kept), tuple(dict.fromkeys(names.values())))


def _holders(what: Iterable[Any]) -> list[Any]:
    """The holders of the arrays, each once: a Weight, or the stack that it is in."""
    numbers: dict[int, tuple[Any, set[int]]] = {}
    for one in what:
        if not isinstance(one, Module | Weight):
            inner = "pass its .model" if isinstance(getattr(one, "model", None), Module) else None
            other = "other arrays are freed with del, or by their own delete()"
            raise TypeError(
                f"free() takes Modules and Weights, not {type(one).__name__}: {inner or other}"
            )
        weights = [one] if isinstance(one, Weight) else one.raw_state_dict().values()
        for weight in weights:
            if weight.shard_idx is not None:
                raise UserInputError(
                    f"weight '{weight.name}' is a part of another one and has no array of its own: free "
                    "the weight that it is a part of"
                )
            home = weight.home
            holder = owner(weight)
            seen = numbers.setdefault(id(holder), (holder, set()))[1]
            seen.add(0 if home is None else home[1])
    for holder, seen in numbers.values():
        if isinstance(holder, StackedWeight) and len(seen) < holder.spec.count:
            name = holder.view(min(seen)).name
            raise UserInputError(
                f"weight '{name}' is one of the {holder.spec.count} layers of a LayerStack, whose weights are one "
                "array: free the whole stack, or unstack() it first"
            )
    return [holder for holder, _ in numbers.values()]


def _warn_of_ties(what: Iterable[Any], holders: Iterable[Any]) -> None:
    """Warns if a Module that is not freed has one of the Weights as well."""
    freed = {
        id(module) for one in what if isinstance(one, Module) for _, module in one.named_modules()
    }
    plain = {id(one): one for one in holders if not one.is_lazy}
    singles = {id(one) for one in what if isinstance(one, Weight)}
    for module in live(Module):
        if id(module) in freed:
            continue
        for name, weight in vars(module).get("_mx_weights", {}).items():
            if id(weight) in plain and id(weight) not in singles:
                warnings.warn(
                    f"{type(module).__name__}.{name} is tied to a weight that is freed, and has lost its value "
                    "as well",
                    UserWarning,
                    stacklevel=3,
                )


def _others(alive: Iterable[jax.Array]) -> dict[int, str]:
    """The arrays that Weights hold: id of the array → name of the Weight."""
    wanted = {id(array) for array in alive}
    found: dict[int, str] = {}
    for holder in live(Weight):
        for array in arrays_in(holder):
            if id(array) in wanted:
                stacked = isinstance(holder, StackedWeight)
                found[id(array)] = holder.view(0).name if stacked else holder.name
    return found
