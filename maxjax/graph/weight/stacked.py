"""StackedWeight: the weights of one name in n equal layers, as one array ``[n, ...]``.

Users still see n Weights, each a view ``(stack, number)``. ``nn.LayerStack`` creates StackedWeights; each is one
pytree leaf for all n. Where the layers hold stacks themselves (the experts of a layer), the array has an axis
for each, ``[layers, experts, ...]``, and the stack of one layer is a view of the whole one, too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...kernels import StackSlice
from ...kernels.stack_slice import slice_of
from ..placement.arrays import put, relaid
from ..placement.device_major import DeviceMajor
from ..placement.stacking import stack, unstack, with_leading
from .epoch import values_changed
from .rows import OfStack
from .spec import Span, WeightSpec, is_value
from .weight import Weight, outside_traces, standing_for

# One lock for all stacks: the guarded sections are short.
_LOCK = threading.RLock()


class StackedWeight(OfStack, Weight):
    """One array ``[n, ...]`` for the Weights of n layers, or single values while some layers lack one.

    Weights are counted in the order of the array: with spans of 2 layers and 3 experts, number 4 is
    expert 1 of layer 1. Everything that it declares is declared of each Weight.

    Args:
        like: a Weight, or a stack of each layer, with the declaration of each layer. It is not changed.
        span: the layers.
    """

    def __init__(self, like: Weight, span: Span):
        spec = like.spec
        self._spec = replace(spec, spans=(span, *spec.spans))
        self._clear()
        self._leaf = self._spec.blank()

    def _clear(self) -> None:
        """Forget all values and views."""
        self._leaf: Any = None
        # Values by number, while not all Weights have one.
        self._parts: dict[int, Any] = {}
        # Weights, and stacks of one layer, by number and whether it is a stack. Weak: Modules hold them, and a
        # cycle would keep arrays alive until garbage is collected.
        self._views: weakref.WeakValueDictionary[tuple[int, bool], Weight]
        self._views = weakref.WeakValueDictionary()
        # What holds the values after dissolve().
        self._apart: list[Weight] = []

    @classmethod
    def of(cls, holders: Sequence[Weight], span: Span) -> StackedWeight:
        """Return a stack of the layers' Weights, or of their stacks, which differ only in value and are not changed."""
        new = cls(holders[0], span)
        new._take(holders)
        return new

    def _take(self, holders: Sequence[Weight]) -> None:
        """Take the values of Weights, or of stacks, which are not changed."""
        if isinstance(holders[0], StackedWeight):
            if all(holder.is_whole for holder in holders):  # type: ignore[attr-defined]
                leaves = [jnp.asarray(holder.leaf) for holder in holders]
                self._leaf = stack(leaves, self._spec.leaf_sharding)
                return
            leaves = [
                holder.leaf_of(j)  # type: ignore[attr-defined]
                for holder in holders
                for j in range(holders[0].spec.count)
            ]
        else:
            leaves = [holder.leaf for holder in holders]
        self._parts = {
            i: leaf.__jax_array__() if type(leaf) is StackSlice else leaf
            for i, leaf in enumerate(leaves)
            if is_value(leaf)
        }
        self._join()

    def adopt(self, holders: Sequence[Weight]) -> None:
        """Make views of the Weights, or stacks, whose values this stack has taken."""
        inner = self._spec.count // self._spec.spans[0].count
        for i, holder in enumerate(holders):
            if isinstance(holder, StackedWeight):
                self._move(holder, i * inner)
            self._make_view(holder, i * inner)
        values_changed()

    def _move(self, part: StackedWeight, start: int) -> None:
        """Make views of this stack of the views of one of its parts."""
        for (number, _), view in list(part._views.items()):
            self._make_view(view, start + number)
        part._clear()

    def _make_view(self, weight: Weight, number: int) -> None:
        vars(weight).update(_spec=None, _leaf=None, _home=(self, number))
        self._views[number, isinstance(weight, StackedWeight)] = weight

    def view(self, number: int) -> Weight:
        """Return one of the Weights."""
        if self._home is not None:
            stack, start = self._home
            return stack.view(start + number)
        view = self._views.get((number, False))
        if view is None:
            view = object.__new__(self._spec.kind)
            name = None if self._full_name is None else self._spec.name(self._full_name, number)
            vars(view).update(_spec=None, _leaf=None, _home=(self, number), _full_name=name)
            view = self._views.setdefault((number, False), view)
        return view

    def part(self, start: int) -> StackedWeight:
        """Return the stack of one layer; ``start`` is the number of its first Weight."""
        part = self._views.get((start, True))
        if part is None:
            part = object.__new__(StackedWeight)
            part._clear()
            vars(part).update(_spec=None, _home=(self, start))
            part = self._views.setdefault((start, True), part)
        return part  # type: ignore[return-value]

    def dissolve(self) -> None:
        """Give each Weight, or each layer's stack, its own value back."""
        spec = self._spec
        single = len(spec.spans) == 1
        inner = spec.part if not single else spec.layer
        starts = range(0, spec.count, inner.count)
        if self.is_whole and hasattr(self._leaf, "shape"):
            leaves = unstack(self._leaf, inner.leaf_sharding)
        else:
            leaves = [(self.view(i) if single else self.part(i)).leaf for i in starts]
        views = [self.view(i) if single else self.part(i) for i in starts]
        for view, start, leaf in zip(views, starts, leaves, strict=True):
            if isinstance(view, StackedWeight):
                held = {
                    i - start: v for i, v in self._parts.items() if start <= i < start + inner.count
                }
                view._parts = held if len(held) < inner.count else {}  # the leaf has them all
                for (number, is_stack), one in list(self._views.items()):
                    if not is_stack and start <= number < start + inner.count:
                        view._make_view(one, number - start)
            vars(view).update(_spec=inner, _leaf=leaf, _home=None)
        self._clear()
        self._apart = views
        values_changed()

    def restore(self) -> None:
        """Stack the values of the Weights again, after :meth:`dissolve`."""
        holders, self._apart = self._apart, []
        self._leaf = self._spec.blank()
        self._take(holders)
        self.adopt(holders)

    # -- what it holds

    @property
    def spec(self) -> WeightSpec:
        """The declaration of each Weight, and the leading axes."""
        return self._spec if self._home is None else self._home[0].spec.part

    @property
    def weights(self) -> list[Weight]:
        """All its Weights, also after they were unstacked."""
        if self._apart:
            return [weight for holder in self._apart for weight in holder.weights]
        return [self.view(i) for i in range(self.spec.count)]

    @property
    def leaf(self) -> Any:
        """The leaf in a pytree: an array, a placeholder, or a slice of the stack of which it is a view."""
        if self._home is None:
            return self._leaf
        stack_, start = self._home
        spec = self.spec
        if stack_.is_whole:
            return stack_.cut(stack_._leaf, start, len(spec.spans))
        leaves = [stack_._parts.get(start + i) for i in range(spec.count)]
        if any(leaf is None for leaf in leaves):
            return spec.blank()
        return stack(leaves, spec.leaf_sharding, spec.lead)

    @property
    def is_whole(self) -> bool:
        """Whether every Weight has a value."""
        return is_value(self.leaf)

    @property
    def loaded(self) -> int:
        """The number of Weights that have a value."""
        return sum(is_value(self.leaf_of(i)) for i in range(self.spec.count))

    def leaf_of(self, number: int) -> Any:
        """Return the leaf of one of the Weights."""
        if self._home is not None:
            stack_, start = self._home
            return stack_.leaf_of(start + number)
        if number in self._parts:
            return self._parts[number]
        if type(self._leaf) is jax.ShapeDtypeStruct:
            return self._spec.layer.blank()
        # A pytree may be rebuilt around any object, including None.
        return self.cut(self._leaf, number) if hasattr(self._leaf, "shape") else self._leaf

    def cut(self, array: Any, number: int, levels: int = 0) -> Any:
        """Return the slice of a stacked array for a Weight, or for a part with ``levels`` leading axes."""
        indices = self._spec.index(number)
        for index in indices[: len(indices) - levels]:
            array = slice_of(array, index)
        return array

    # -- changing it

    def put(self, leaf: Any) -> None:
        """Set the values of all Weights: the leaf itself."""
        if self._home is not None:
            spec = self.spec
            self.put_many({i: leaf[spec.index(i)] for i in range(spec.count)})
            return
        with _LOCK:
            self._leaf, self._parts = leaf, {}
        values_changed()

    def _set(self, value: Any) -> None:
        raise ValueError(
            f"weight '{self.name}' is a stack of {self.spec.count}: set the values of its layers"
        )

    def put_many(self, leaves: Mapping[int, Any]) -> None:
        """Set the leaves of some of the Weights; on failure none is changed."""
        if self._home is not None:
            stack_, start = self._home
            stack_.put_many({start + i: leaf for i, leaf in leaves.items()})
            return
        with _LOCK, outside_traces(self._leaf, *self._parts.values(), *leaves.values()):
            if self.is_whole and all(map(is_value, leaves.values())):
                self._leaf = self._updated(leaves)
                values_changed()
                return
            before = self._leaf, self._parts
            try:
                self._unjoin()
                for number, leaf in leaves.items():
                    if is_value(leaf):
                        self._parts[number] = leaf
                    else:
                        self._parts.pop(number, None)
                self._join()
            except BaseException:
                self._leaf, self._parts = before
                raise
            values_changed()

    def _updated(self, leaves: Mapping[int, Any]) -> Any:
        places = np.unravel_index(np.array(list(leaves), np.int32), self._spec.lead)
        new = jnp.stack([jnp.asarray(leaf) for leaf in leaves.values()])
        array = jnp.asarray(self._leaf).at[tuple(map(np.int32, places))].set(new)
        return put(array, self._spec.leaf_sharding) if self._spec.split else array

    def _unjoin(self) -> None:
        """Split the stacked array, if there is one, into ``_parts``, which is a new dict afterwards."""
        if self.is_whole:
            where = self._spec.layer.leaf_sharding
            self._parts = dict(enumerate(unstack(self._leaf, where, len(self._spec.spans))))
            self._leaf = self._spec.blank()
        else:
            self._parts = dict(self._parts)

    def _join(self) -> None:
        """Make one array of ``_parts``, if they are all there."""
        if self._parts and len(self._parts) == self._spec.count:
            parts = [self._parts[i] for i in range(self._spec.count)]
            self._leaf = stack(parts, self._spec.leaf_sharding, self._spec.lead)
            self._parts = {}

    def array(self) -> jax.Array:
        """Return the stacked array; inside a Graph, its tracer."""
        standing = standing_for(self)
        if standing is not None:
            return standing
        if self._apart:  # it was unstacked; a compiled program still needs the stack
            return jnp.stack([holder.array() for holder in self._apart])
        if not self.is_whole:
            # Reads Weights that were allocated from a checkpoint; the first without a value raises.
            for weight in self.weights:
                weight.array()
        leaf = self.leaf
        return leaf.__jax_array__() if type(leaf) is StackSlice else leaf

    def _as_array(self, gathered: bool = True) -> jax.Array:
        return self.gathered_array(gathered)

    def prepare_move(
        self, sharding: Any, layout: DeviceMajor | None, name: str, split: tuple[str, ...] = ()
    ) -> Any:
        """Return the values converted to another Sharding: one array, or a dict while some Weights have none."""
        before, leaf, depth = self.spec.layout, self._leaf, len(self.spec.spans)
        if not self.is_whole:
            return {i: relaid(a, sharding, before, layout, name) for i, a in self._parts.items()}
        if before != layout:
            layers = np.asarray(leaf) if leaf.is_fully_addressable else leaf
            layers = layers.reshape(-1, *layers.shape[depth:])
            layers = [layer if before is None else before.restore(layer) for layer in layers]
            layers = [layer if layout is None else layout.arrange(layer) for layer in layers]
            leaf = (np if leaf.is_fully_addressable else jnp).stack(layers)
            leaf = leaf.reshape(*self.spec.lead, *leaf.shape[1:])
        where = sharding if layout is None else layout.sharding(sharding)
        return put(leaf, with_leading(where, depth, split), name)

    def _store_moved(self, moved: Any) -> None:
        if isinstance(moved, dict):
            self._parts, self._leaf = moved, self._spec.blank()
        else:
            self._leaf = moved
        values_changed()

    # -- copies

    def __copy__(self) -> StackedWeight:
        return self.like(self.leaf, self._full_name)

    def like(self, leaf: Any, name: str | None = None) -> StackedWeight:
        """Return a stack of the same declaration around ``leaf``, which is not inspected."""
        new = object.__new__(StackedWeight)
        new._clear()
        vars(new).update(_spec=self.spec, _leaf=leaf, _full_name=name)
        return new

    def __getstate__(self) -> dict[str, Any]:
        # Views register themselves when they are restored.
        state = {k: v for k, v in vars(self).items() if k != "_views"}
        if self._home is not None or self._spec.sharding is None:
            return state
        spec, leaf, parts = self._spec, self._leaf, self._parts
        free = spec.unplaced()
        if spec.layout is not None:
            restore = spec.layout.restore
            for _ in spec.spans:
                restore = jax.vmap(restore)
            leaf = restore(leaf) if self.is_whole else leaf
            parts = {i: spec.logical(part) for i, part in parts.items()}
        if not self.is_whole and leaf is not None:
            leaf = free.blank()
        return {**state, "_spec": free, "_leaf": leaf, "_parts": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).setdefault("_views", weakref.WeakValueDictionary())
        super().__setstate__(state)
