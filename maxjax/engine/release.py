"""``free``: the values of Modules and Weights are let go, which become placeholders again."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from ..errors import UserInputError, some
from ..graph.weight.stacked import StackedWeight
from ..graph.weight.weight import Weight
from ..nn.layer import Module
from .holders import arrays_in, buffers, live, owner
from .usage import size


@dataclass(frozen=True)
class Freed:
    """What :func:`free` has let go.

    Attributes:
        nbytes: bytes on the devices of this process that are free now.
        kept: bytes that others still hold: another Module that has the same arrays, a variable,
            an optimizer, a notebook's ``Out``.
        holders: names of Weights of other Modules that hold some of these.
    """

    nbytes: int
    kept: int = 0
    holders: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if not self.kept:
            return f"freed {size(self.nbytes)}"
        who = f"weights of other Modules: {some(self.holders, 3)}" if self.holders else "others"
        return f"freed {size(self.nbytes)}; {size(self.kept)} stay, which {who} still hold"


def free(*what: Module | Weight, delete: bool = False) -> Freed:
    """Frees the values of Modules and Weights: they become placeholders, and can be loaded again.

    Only references are dropped. An array that something else still holds stays in memory: another
    Module (``maxjax.quantize`` and ``jax.tree.map`` share the arrays that they do not change), a
    variable, or an optimizer. The result says how many bytes stay. Arrays that ties, stacks or
    parts share are freed once, and freeing again does nothing.

    Args:
        what: Modules and Weights. A layer of a LayerStack cannot be freed alone, because the weights
            of all layers are one array, and neither can a part of a weight (``shard``).
        delete: whether arrays are deleted that only variables, and no Module, still hold: their
            next use raises an error. Those of other Modules are never deleted.

    Returns:
        The bytes that were freed, and those that others hold.

    Raises:
        TypeError: something is neither a Module nor a Weight. Other arrays are freed with ``del``, or
            their own ``delete()``.
        UserInputError: a Weight is one layer of a stack, or a part of another.

    Warns:
        UserWarning: a Weight is tied to a Module that is not freed, which has lost it too.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> layer = maxjax.init(nn.Linear(64, 32, "float32", DeviceRef.CPU()), jax.random.key(0))
        >>> maxjax.free(layer), maxjax.free(layer)
        (freed 8.2 kB, freed 0 B)
        >>> layer.weight.value is None
        True
    """
    holders = _holders(what)
    _warn_of_ties(what, holders)
    arrays = [array for one in holders for array in arrays_in(one)]
    references = [(weakref.ref(array), list(buffers(array))) for array in arrays]
    del arrays
    for one in holders:
        one.stored.put(one.stored.blank())
    if any(reference() is not None for reference, _ in references):
        gc.collect()  # what only cycles of garbage hold
    alive = [found for reference, _ in references if (found := reference()) is not None]
    names = _others(alive) if alive else {}
    if delete:
        for array in alive:
            if id(array) not in names:
                array.delete()
    kept = {key for array in alive if not array.is_deleted() for key in _keys(buffers(array))}
    total, stay = 0, 0
    for key, nbytes in {k: k[2] for _, found in references for k in _keys(found)}.items():
        total, stay = (total, stay + nbytes) if key in kept else (total + nbytes, stay)
    return Freed(total, stay, tuple(dict.fromkeys(names.values())))


def _keys(found: Iterable[tuple[Any, int, int]]) -> list[tuple[Any, int, int]]:
    return [(device, address, nbytes) for device, address, nbytes in found]


def _holders(what: Iterable[Any]) -> list[Any]:
    """What holds the arrays, each once; a Weight, or the stack it is in."""
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
                    f"weight '{weight.name}' is a part of another one and has no array of its own: free that"
                )
            home = weight.stored.home
            holder = owner(weight)
            seen = numbers.setdefault(id(holder), (holder, set()))[1]
            seen.add(0 if home is None else home[1])
    for holder, seen in numbers.values():
        if isinstance(holder, StackedWeight) and len(seen) < holder.count:
            name = holder.view(min(seen)).name
            raise UserInputError(
                f"weight '{name}' is one of the {holder.count} layers of a LayerStack, whose weights are one array: "
                "free the whole stack, or unstack() it first"
            )
    return [holder for holder, _ in numbers.values()]


def _warn_of_ties(what: Iterable[Any], holders: Iterable[Any]) -> None:
    """Warns if other Modules than those that are freed have one of the Weights as well."""
    freed = {
        id(module) for one in what if isinstance(one, Module) for _, module in one.named_modules()
    }
    plain = {id(one): one for one in holders if isinstance(one, Weight) and not one.stored.is_lazy}
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
    for holder in live(Weight, StackedWeight):
        for array in arrays_in(holder):
            if id(array) in wanted:
                stacked = isinstance(holder, StackedWeight)
                found[id(array)] = holder.view(0).name if stacked else holder.name
    return found
