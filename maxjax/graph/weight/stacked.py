"""StackedWeight: the weights of one name in n equal layers, as one array ``[n, ...]``.

Users still see n Weights, each a view ``(stack, number)``. ``nn.LayerStack`` creates StackedWeights; each is one
pytree leaf for all n. Where the layers hold stacks themselves (the experts of a layer), the array has an axis
for each, ``[layers, experts, ...]``, and the stack of one layer is a view of the whole one, too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from ...kernels import StackSlice
from ...kernels.stack_slice import slice_of
from ..placement.arrays import put
from ..placement.stacking import stack, unstack
from .epoch import values_changed
from .rows import OfStack
from .spec import Span, WeightSpec, is_value
from .weight import Weight, outside_traces, standing_for

T = TypeVar("T")
# One lock for all stacks: the guarded sections are short.
_LOCK = threading.RLock()


class Incomplete(dict[int, Any]):
    """The values of some Weights of a stack, by number. It is never changed."""


class Dissolved(list[Weight]):
    """What holds the values of a stack that was dissolved: its Weights, or the stack of each layer."""


def _joined(spec: WeightSpec, leaves: Mapping[int, Any]) -> Any:
    """Return one array if each Weight of a stack has a value, otherwise Incomplete."""
    values = {i: leaf for i, leaf in leaves.items() if is_value(leaf)}
    if len(values) < spec.count:
        return Incomplete(values)
    return stack([values[i] for i in range(spec.count)], spec.leaf_sharding, spec.lead)


class StackedWeight(OfStack, Weight):
    """One array ``[n, ...]`` for the Weights of n layers, or single values while some layers lack one.

    Weights are counted in the order of the array: with spans of 2 layers and 3 experts, number 4 is
    expert 1 of layer 1. Everything that it declares is declared of each Weight.

    What it holds, ``_leaf``, has one of three forms: the leaf (an array, or what a pytree was rebuilt around),
    :class:`Incomplete`, or :class:`Dissolved`. The stack of one layer of a stack of stacks holds nothing: it is a view,
    as a Weight of a stack is.

    Args:
        like: a Weight, or a stack of each layer, with the declaration of each layer. It is not changed.
        span: the layers.
    """

    # Weights, and stacks of one layer, by number and whether it is a stack. Weak: Modules hold them, and a
    # cycle would keep arrays alive until garbage is collected.
    _views: weakref.WeakValueDictionary[tuple[int, bool], Weight]

    def __init__(self, like: Weight, span: Span):
        spec = like.spec
        self._spec = replace(spec, spans=(span, *spec.spans))
        self._leaf, self._views = Incomplete(), weakref.WeakValueDictionary()

    @classmethod
    def of(cls, holders: Sequence[Weight], span: Span) -> StackedWeight:
        """Return a stack of the layers' Weights, or of their stacks, which differ only in value and are not changed."""
        new = cls(holders[0], span)
        new._take(holders)
        return new

    def _take(self, holders: Sequence[Weight]) -> None:
        """Take the values of Weights, or of stacks, which are not changed."""
        leaves = [holder.leaf for holder in holders]
        if isinstance(holders[0], StackedWeight):
            if all(map(is_value, leaves)):
                self._leaf = stack(list(map(jnp.asarray, leaves)), self._spec.leaf_sharding)
                return
            inner = range(holders[0].spec.count)
            leaves = [cast("StackedWeight", one).leaf_of(i) for one in holders for i in inner]
        arrays = [one.__jax_array__() if type(one) is StackSlice else one for one in leaves]
        self._leaf = _joined(self._spec, dict(enumerate(arrays)))

    def adopt(self, holders: Sequence[Weight]) -> None:
        """Make views of the Weights, or stacks, whose values this stack has taken."""
        inner = self._spec.count // self._spec.spans[0].count
        for i, holder in enumerate(holders):
            if isinstance(holder, StackedWeight):
                for (number, _), view in list(holder._views.items()):
                    self._make_view(view, i * inner + number)
                holder._views.clear()
            self._make_view(holder, i * inner)
        values_changed()

    def _make_view(self, weight: Weight, number: int) -> None:
        vars(weight).update(_spec=None, _leaf=None, home=(self, number))
        self._views[number, isinstance(weight, StackedWeight)] = weight

    def _view(self, kind: type, number: int, **state: Any) -> Any:
        """Return the view of a class at a number, a new one if there is none."""
        key = number, kind is StackedWeight
        view = self._views.get(key)
        if view is None:
            view = object.__new__(kind)
            vars(view).update(_spec=None, _leaf=None, home=(self, number), **state)
            view = self._views.setdefault(key, view)
        return view

    def view(self, number: int) -> Weight:
        """Return one of the Weights."""
        if self.home is not None:
            stack, start = self.home
            return stack.view(start + number)
        name = None if self._full_name is None else self._spec.name(self._full_name, number)
        return self._view(self._spec.cls, number, _full_name=name)

    def inner(self, start: int) -> StackedWeight:
        """Return the stack of one layer; ``start`` is the number of its first Weight."""
        return self._view(StackedWeight, start, _views=weakref.WeakValueDictionary())

    def dissolve(self) -> None:
        """Give each Weight, or each layer's stack, its own value back."""
        spec, held, nested = self._spec, self._leaf, len(self._spec.spans) > 1
        inner = spec.inner if nested else spec.layer
        starts = range(0, spec.count, inner.count)
        views = [self.inner(i) if nested else self.view(i) for i in starts]
        if is_value(held) and hasattr(held, "shape"):
            leaves = unstack(held, inner.leaf_sharding)
        else:
            leaves = [
                view._held if isinstance(view, StackedWeight) else view.leaf for view in views
            ]
        for view, start, leaf in zip(views, starts, leaves, strict=True):
            if isinstance(view, StackedWeight):
                for (number, is_stack), one in list(self._views.items()):
                    if not is_stack and start <= number < start + inner.count:
                        view._make_view(one, number - start)
            vars(view).update(_spec=inner, _leaf=leaf, home=None)
        self._views.clear()
        self._leaf = Dissolved(views)
        values_changed()

    def restore(self) -> None:
        """Stack the values of the Weights again, after :meth:`dissolve`."""
        holders = self._leaf
        self._take(holders)
        self.adopt(holders)

    # -- what it holds

    @property
    def spec(self) -> WeightSpec:
        """The declaration of each Weight, and the leading axes."""
        return self._spec if self.home is None else self.home[0].spec.inner

    @property
    def weights(self) -> list[Weight]:
        """All its Weights, also after they were unstacked."""
        if type(self._leaf) is Dissolved:
            return [weight for holder in self._leaf for weight in holder.weights]
        return [self.view(i) for i in range(self.spec.count)]

    @property
    def _held(self) -> Any:
        """What it holds; for the stack of one layer, its part of what the whole stack holds."""
        if self.home is None:
            return self._leaf
        whole, start = self.home
        spec, held = self.spec, whole._leaf
        if type(held) is Incomplete:
            return _joined(spec, {i: held.get(start + i) for i in range(spec.count)})
        return whole.cut(held, start, len(spec.spans)) if is_value(held) else spec.blank()

    @property
    def leaf(self) -> Any:
        """The leaf in a pytree: an array, a placeholder, or a slice of the stack of which it is a view."""
        held = self._held
        return self.spec.blank() if type(held) in (Incomplete, Dissolved) else held

    def leaf_of(self, number: int) -> Any:
        """Return the leaf of one of the Weights."""
        if self.home is not None:
            stack, start = self.home
            return stack.leaf_of(start + number)
        held = self._leaf
        if type(held) is Incomplete and number in held:
            return held[number]
        if type(held) in (Incomplete, Dissolved, jax.ShapeDtypeStruct):
            return self._spec.layer.blank()
        # A pytree may be rebuilt around any object, including None.
        return self.cut(held, number) if hasattr(held, "shape") else held

    def cut(self, array: Any, number: int, levels: int = 0) -> Any:
        """Return the slice of a stacked array for a Weight, or for a part with ``levels`` leading axes."""
        indices = self._spec.index(number)
        for index in indices[: len(indices) - levels]:
            array = slice_of(array, index)
        return array

    # -- changing it

    def put(self, leaf: Any) -> None:
        """Set the values of all Weights: the leaf itself."""
        if self.home is not None:
            spec = self.spec
            self.put_many({i: leaf[spec.index(i)] for i in range(spec.count)})
            return
        with _LOCK:
            self._leaf = leaf
        values_changed()

    def _set(self, value: Any) -> None:
        raise ValueError(
            f"weight '{self.name}' is a stack of {self.spec.count}: set the values of its layers"
        )

    def put_many(self, leaves: Mapping[int, Any]) -> None:
        """Set the leaves of some of the Weights; on failure none is changed."""
        if self.home is not None:
            stack, start = self.home
            stack.put_many({start + i: leaf for i, leaf in leaves.items()})
            return
        with _LOCK, outside_traces(self._leaf, *leaves.values()):
            spec, held = self._spec, self._leaf
            if type(held) is Incomplete:
                self._leaf = _joined(spec, {**held, **leaves})
            elif is_value(held) and all(map(is_value, leaves.values())):
                self._leaf = self._updated(leaves)
            else:
                each = (
                    unstack(held, spec.layer.leaf_sharding, len(spec.spans))
                    if is_value(held)
                    else ()
                )
                self._leaf = _joined(spec, {**dict(enumerate(each)), **leaves})
            values_changed()

    def _updated(self, leaves: Mapping[int, Any]) -> Any:
        places = np.unravel_index(np.array(list(leaves), np.int32), self._spec.lead)
        new = jnp.stack([jnp.asarray(leaf) for leaf in leaves.values()])
        array = jnp.asarray(self._leaf).at[tuple(map(np.int32, places))].set(new)
        return put(array, self._spec.leaf_sharding) if self._spec.split else array

    def array(self) -> jax.Array:
        """Return the stacked array; inside a Graph, its tracer."""
        standing = standing_for(self)
        if standing is not None:
            return standing
        if type(self._leaf) is Dissolved:  # a compiled program still needs the stack
            return jnp.stack([holder.array() for holder in self._leaf])
        if self.is_lazy:
            # Reads Weights that were allocated from a checkpoint; the first without a value raises.
            for weight in self.weights:
                weight.array()
        leaf = self.leaf
        return leaf.__jax_array__() if type(leaf) is StackSlice else leaf

    def _as_array(self, gathered: bool = True) -> jax.Array:
        return self.gathered_array(gathered)

    def moved(self, spec: WeightSpec, name: str) -> Any:
        """Return what it holds for a spec with another sharding and layout; the stack is not changed."""
        if type(self._leaf) is not Incomplete:
            return super().moved(spec, name)
        old, new = self.spec.layer, spec.layer
        return Incomplete({i: new.relaid(value, old, name) for i, value in self._leaf.items()})

    # -- copies

    def __copy__(self) -> StackedWeight:
        return self.like(self._held, self._full_name)

    def like(self, leaf: Any, name: str | None = None) -> StackedWeight:
        """Return a stack of the same declaration around ``leaf``, which is not inspected."""
        new = object.__new__(StackedWeight)
        views = weakref.WeakValueDictionary[Any, Any]()
        vars(new).update(_spec=self.spec, _leaf=leaf, _views=views, _full_name=name)
        return new

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_views"]  # views register themselves when they are restored
        if type(self._leaf) is Incomplete:
            logical = self._spec.layer.logical
            state["_leaf"] = Incomplete({i: logical(value) for i, value in self._leaf.items()})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).setdefault("_views", weakref.WeakValueDictionary())
        super().__setstate__(state)


def by_stack(items: Iterable[tuple[Weight, T]]) -> list[tuple[Weight, dict[int, T]]]:
    """Group what belongs to Weights by what holds their leaves: each StackedWeight, or Weight that is in none.

    Args:
        items: pairs of a Weight and what belongs to it.

    Returns:
        Pairs of a holder, and a dict from the numbers of its Weights (0 for a single one) to what belongs to them.
    """
    groups: dict[int, tuple[Weight, dict[int, T]]] = {}
    for weight, item in items:
        holder, number = weight.home or (weight, 0)
        groups.setdefault(id(holder), (holder, {}))[1][number] = item
    return list(groups.values())
