"""StackPattern, which describes the layers of a stack that are equal, and PerLayer, which has a tree for each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ....graph.weight.spec import Span
from ....graph.weight.weight import Weight
from ..definition import Definition
from ..module import Module
from ..walk import Walk


class StackPattern(NamedTuple):
    """The equal layers of a LayerStack: ``first`` individual layers, a repeated pattern, and individual layers again.

    Attributes:
        count: number of layers.
        first: number of layers at the front that do not belong to the pattern.
        period: number of layers in the pattern.
        repeats: number of repetitions of the pattern.
    """

    count: int
    first: int
    period: int
    repeats: int

    @property
    def slots(self) -> int:
        """The number of stacks: one for each layer of the pattern."""
        return self.period if self.repeats else 0

    @property
    def end(self) -> int:
        """The index of the first layer after the repeated pattern."""
        return self.first + self.period * self.repeats

    @property
    def is_plain(self) -> bool:
        """Whether all layers are equal."""
        return self.slots == 1 and self.repeats == self.count

    def slot_of(self, i: int) -> int | None:
        """The position (slot) of layer ``i`` in the pattern; None if the layer runs individually."""
        return (i - self.first) % self.period if self.first <= i < self.end else None

    @property
    def unstacked(self) -> list[int]:
        """The indices of the layers that run individually."""
        return [i for i in range(self.count) if self.slot_of(i) is None]

    def members(self, slot: int) -> range:
        """The indices of the layers at one position (slot) of the pattern."""
        return range(self.first + slot, self.end, self.period)

    def span(self, slot: int | None) -> Span:
        """The members as a Span, for names: ``*`` for all layers, otherwise a slice."""
        assert slot is not None
        start = self.first + slot
        pattern = "*" if self.is_plain else f"{start}:{self.end}"
        if self.period > 1:
            pattern += f":{self.period}"
        return Span(pattern, start, self.period, self.repeats)

    def order(self) -> Iterator[int]:
        """The indices of the layers that are stored: the individual layers, and the first at each position."""
        for i in range(self.count):
            if self.slot_of(i) is None or i < self.first + self.period:
                yield i

    def __str__(self) -> str:
        text = f"{self.count} layers"
        if self.slots and not self.is_plain:
            text += f": {self.repeats} times {self.period}"
            rest = self.count - self.end
            text += f" after {self.first}" * bool(self.first) + f" and {rest} more" * bool(rest)
        return text


@jax.tree_util.register_pytree_with_keys_class
class PerLayer:
    """A tree of arrays for each layer of a LayerStack, such as a cache.

    The trees of layers at one position of the pattern are stacked; ``values[3]`` is the tree of layer 3.
    ``LayerStack.per_layer`` creates a PerLayer, and ``LayerStack.scan`` may return one.
    """

    def __init__(self, slots: Sequence[Any], rest: Sequence[Any], layout: StackPattern):
        self.slots, self.rest, self.layout = tuple(slots), tuple(rest), layout

    @classmethod
    def of(cls, values: Sequence[Any], layout: StackPattern) -> PerLayer:
        """A PerLayer from one tree for each layer.

        Raises:
            ValueError: the number of trees is not that of layers, or trees of equal layers differ in type.
        """
        if len(values) != layout.count:
            raise ValueError(f"{len(values)} values for {layout.count} layers")
        slots = []
        for slot in range(layout.slots):
            trees = [values[i] for i in layout.members(slot)]
            kinds = {str(jax.tree.map(jax.typeof, tree)) for tree in trees}
            if len(kinds) > 1:
                more = ", …" if layout.repeats > 3 else ""
                numbers = ", ".join(map(str, layout.members(slot)[:3]))
                raise ValueError(f"layers {numbers}{more} are equal, but their values are not: "
                                 f"{' and '.join(sorted(kinds)[:2])}")  # fmt: skip
            slots.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees))
        return cls(slots, [values[i] for i in layout.unstacked], layout)

    @classmethod
    def split(cls, tree: Any, layout: StackPattern) -> PerLayer:
        """A PerLayer from one tree of arrays ``[n, ...]``."""
        slots = [
            jax.tree.map(lambda a, s=slot: a[layout.first + s : layout.end : layout.period], tree)
            for slot in range(layout.slots)
        ]
        rest = [jax.tree.map(lambda a, i=i: a[i], tree) for i in layout.unstacked]
        return cls(slots, rest, layout)

    def merged(self) -> Any:
        """One tree of arrays ``[n, ...]``; the PerLayer itself if layers have trees of different shapes."""
        layout = self.layout
        if layout.is_plain:
            return self.slots[0]
        kinds = [_kind(tree, 1) for tree in self.slots] + [_kind(tree, 0) for tree in self.rest]
        if any(kind != kinds[0] for kind in kinds):
            return self

        def join(*leaves: Any) -> Any:
            slots, rest = leaves[: layout.slots], leaves[layout.slots :]
            ends = [jnp.expand_dims(a, 0) for a in rest]
            if not slots:
                return jnp.concatenate(ends)
            woven = jnp.stack(slots, 1)
            woven = woven.reshape((layout.slots * layout.repeats, *slots[0].shape[1:]))
            return jnp.concatenate([*ends[: layout.first], woven, *ends[layout.first :]])

        return jax.tree.map(join, *self.slots, *self.rest)

    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(self.layout.count)[i]]
        i = range(self.layout.count)[i]
        slot = self.layout.slot_of(i)
        if slot is None:
            return self.rest[self.layout.unstacked.index(i)]
        number = (i - self.layout.first) // self.layout.period
        return jax.tree.map(lambda a: a[number], self.slots[slot])

    def __len__(self) -> int:
        return self.layout.count

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"PerLayer({self.layout})"

    def tree_flatten_with_keys(self) -> Any:
        keys = (jax.tree_util.GetAttrKey("slots"), jax.tree_util.GetAttrKey("rest"))
        return tuple(zip(keys, (self.slots, self.rest), strict=True)), self.layout

    @classmethod
    def tree_unflatten(cls, layout: StackPattern, children: Any) -> PerLayer:
        self = object.__new__(cls)
        (self.slots, self.rest), self.layout = children, layout
        return self


def _kind(tree: Any, axes: int) -> Any:
    """The structure of a tree, and the types of its leaves without their first ``axes``."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(a.shape[axes:], a.dtype) for a in leaves]


def definition_of(i: int, layer: Any) -> Definition:
    """The definition of layer ``i``.

    Raises:
        TypeError: the layer is not a Module.
        NotImplementedError: the layer holds a LayerStack other than an ExpertStack.
        ValueError: the layer is in a LayerStack already.
    """
    if not isinstance(layer, Module):
        raise TypeError(f"a LayerStack holds Modules, and layer {i} is a {type(layer).__name__}")
    definition, holders = layer._mx_definition()
    inner: list[Module] = []
    if definition.stacked:
        inner = [m for m in Walk(layer, stacked=True).modules if m._mx_is_stack]
    if not all(m._mx_nests for m in inner) or any(len(w.spec.spans) > 1 for w in holders):
        raise NotImplementedError(
            f"layer {i} holds a LayerStack: stacks within stacks are not supported"
        )
    if any(weight.home is not None for weight in holders):
        raise ValueError(f"layer {i} belongs to another LayerStack: unstack() that first")
    return definition


def pattern_of(
    layers: Sequence[Module], definitions: Sequence[Definition], period: int | None, first: int
) -> StackPattern:
    """The StackPattern of the layers.

    Args:
        period, first: arguments of LayerStack.

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
        if x.cls is not y.cls:
            return f"{where} is a {x.cls.__name__} in one and a {y.cls.__name__} in the other"
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
        if u.spec != v.spec:
            return f"the weight '{name}' is {_described(u)} in one and {_described(v)} in the other"
    return "their weights are tied in different ways"


def _at(layer: Module, path: str) -> Any:
    for part in path.split(".") if path else ():
        layer = vars(layer)[part]
    return layer


def _described(weight: Weight) -> str:
    parts = [weight.spec.dtype, list(map(str, weight.spec.dims)), weight.device, weight.quantization_encoding,
             weight.sharding_strategy, weight.spec.sharding]  # fmt: skip
    return " ".join(str(part).replace("'", "") for part in parts if part is not None)
