"""Which layers can be stacked: those of equal structure, or a pattern of such that repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....graph.weight.weight import Weight
from ..definition import Definition
from ..module import Module
from ..walk import Walk
from .per_layer import StackPattern


def definition_of(i: int, layer: Any) -> Definition:
    """The definition of layer ``i``.

    Raises:
        TypeError: it is not a Module.
        NotImplementedError: it holds a LayerStack that does not nest.
        ValueError: it is in a LayerStack already.
    """
    if not isinstance(layer, Module):
        raise TypeError(f"a LayerStack holds Modules, and layer {i} is a {type(layer).__name__}")
    definition, holders = layer._mx_definition()
    inner: list[Module] = []
    if definition.stacked:
        inner = [m for m in Walk(layer, stacked=True).modules if m._mx_is_stack]
    if not all(m._mx_nests for m in inner) or any(len(w.stored.spans) > 1 for w in holders):
        raise NotImplementedError(
            f"layer {i} holds a LayerStack: stacks within stacks are not supported"
        )
    if any(weight.stored.home is not None for weight in holders):
        raise ValueError(f"layer {i} belongs to another LayerStack: unstack() that first")
    return definition


def pattern_of(
    layers: Sequence[Module], definitions: Sequence[Definition], period: int | None, first: int
) -> StackPattern:
    """Which layers are equal.

    Args:
        period, first: as of a LayerStack.

    Raises:
        ValueError: no pattern repeats; the message names the difference.
    """
    count = len(layers) - first
    if first < 0 or count < 1:
        raise ValueError(f"{len(layers)} layers cannot be stacked with first={first}: none is left")
    kinds = definitions[first:]
    tried = range(1, count // 2 + 1) if period is None else [period]
    if period is None and count == 1:
        tried = [1]
    for p in tried:
        if 1 <= p <= count and all(a is b for a, b in zip(kinds, kinds[p:], strict=False)):
            return StackPattern(len(layers), first, p, count // p)
    p = 1 if period is None else period
    if not 1 <= p <= count:
        raise ValueError(f"period={p} does not fit {count} layers")
    i = next(i for i in range(count - p) if kinds[i] is not kinds[i + p])
    more = "" if period is not None or count < 4 else ", and no pattern of them repeats"
    raise ValueError(
        f"layers {first + i} and {first + i + p} differ{more}: "
        f"{_difference(layers[first + i], layers[first + i + p])}"
    )


def _difference(one: Module, other: Module) -> str:
    """A description of the difference between two layers."""
    a, b = one._mx_definition()[0], other._mx_definition()[0]
    paths = [path.rstrip(".") for path in Walk(one, stacked=True).paths]
    for x, y, path in zip(a.nodes, b.nodes, paths, strict=False):
        where = f"'{path}'" if path else "the layer itself"
        if x.kind is not y.kind:
            return f"{where} is a {x.kind.__name__} in one and a {y.kind.__name__} in the other"
        ours, theirs = dict(x.statics), dict(y.statics)
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                full = f"{path}.{name}" if path else name
                u, v = (vars(_at(layer, path)).get(name) for layer in (one, other))
                return (f"the attribute '{full}' is {u!r} in one and {v!r} in the other (what differs from layer to "
                        "layer is an argument of scan, not an attribute)")  # fmt: skip
    for name in [*a.names, *b.names]:
        if (name in a.names) != (name in b.names):
            return f"only one of them has the weight '{name}'"
        u, v = (d.weights[d.names.index(name)] for d in (a, b))
        if u.stored.static() != v.stored.static():
            return f"the weight '{name}' is {_described(u)} in one and {_described(v)} in the other"
    return "their weights are tied in different ways"


def _at(layer: Module, path: str) -> Any:
    for part in path.split(".") if path else ():
        layer = vars(layer)[part]
    return layer


def _described(weight: Weight) -> str:
    stored = weight.stored
    parts = [stored.dtype, list(map(str, stored.dims)), weight.device, weight.quantization_encoding,
             weight.sharding_strategy, stored.sharding]  # fmt: skip
    return " ".join(str(part).replace("'", "") for part in parts if part is not None)
