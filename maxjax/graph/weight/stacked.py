"""StackedWeight: the weights of one name in n equal layers, as one array.

The n Weights stay what a user sees: views, each of its slice. ``nn.LayerStack`` makes
them, and has one pytree leaf for all n.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...kernels import StackSlice
from ..placement.arrays import put, relaid
from ..placement.device_major import DeviceMajor
from .epoch import values_changed
from .stored import around, standing_for
from .weight import Weight


class Span(NamedTuple):
    """Which layers a stack holds: ``start``, ``start + step``, … as one name for all.

    Attributes:
        pattern: What stands for the layer's number in the name of the leaf.
        start, step, count: The numbers themselves.
    """

    pattern: str
    start: int
    step: int
    count: int

    def name(self, full: str, index: int) -> str:
        """The name of the one layer's weight, from that of the leaf."""
        parts = full.split(".")
        if self.pattern in parts:
            parts[parts.index(self.pattern)] = str(self.start + index * self.step)
        return ".".join(parts)


class StackedWeight:
    """One array ``[n, ...]`` for the Weights of n layers; while some lack a value, those that have one.

    Attributes:
        template: A Weight without a value, like each of them.
        span: Which layers they belong to.
    """

    home = None  # it is a part of nothing

    def __init__(self, template: Weight, span: Span, parts: Mapping[int, Any] | None = None):
        self.template, self.span = around(template, None, None), span
        self._full_name: str | None = None
        self.leaf_sharding: Any = _with_layers(template.stored.leaf_sharding)
        # Weak: the Modules hold the Weights, and a cycle would keep arrays until it is collected.
        self._views: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
        self._apart: list[Weight] = []
        self._parts: dict[int, Any] = dict(parts or {})
        self._leaf: Any = self.blank()
        self._join()

    @classmethod
    def of(cls, weights: Sequence[Weight], span: Span) -> StackedWeight:
        """Of the layers' own Weights, equal but in value; they are left as they are."""
        return cls(
            weights[0], span, {i: w._leaf for i, w in enumerate(weights) if not w.stored.is_lazy}
        )

    def adopt(self, weights: Sequence[Weight]) -> None:
        """Makes the Weights it was made of views of it."""
        for i, weight in enumerate(weights):
            weight._own, weight._home = None, (self, i)
            self._views[i] = weight
        values_changed()

    def view(self, index: int) -> Weight:
        """The Weight of one of the layers."""
        view = self._views.get(index)
        if view is None:
            name = None if self._full_name is None else self.span.name(self._full_name, index)
            view = around(self.template, None, name)
            view._home = (self, index)
            view = self._views.setdefault(index, view)
        return view

    def dissolve(self) -> None:
        """Gives each Weight its own value back."""
        views = [self.view(i) for i in range(self.span.count)]
        leaves = [self.leaf_of(i) for i in range(self.span.count)]
        for view, leaf in zip(views, leaves, strict=True):
            view._own = leaf.__jax_array__() if isinstance(leaf, StackSlice) else leaf
            view._home = None
        self._leaf, self._parts, self._apart = None, {}, views
        values_changed()

    # -- the value

    def blank(self) -> Any:
        """What stands for the array while there is none: a placeholder, or None without sizes."""
        leaf = self.template.stored.blank()
        if leaf is None:
            return None
        shape = (self.span.count, *leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self.leaf_sharding)

    @property
    def stored(self) -> StackedWeight:
        """Itself: what holds a leaf has this, as a Weight does."""
        return self

    @property
    def leaf(self) -> Any:
        """The array or placeholder that is its leaf in a pytree."""
        return self._leaf

    @property
    def sharding(self) -> Any:
        """The jax Sharding of one layer's weight; None where JAX is free to choose."""
        return self.template._sharding

    @property
    def is_whole(self) -> bool:
        """Whether it has a value for every layer."""
        return self._leaf is not None and type(self._leaf) is not jax.ShapeDtypeStruct

    def leaf_of(self, index: int) -> Any:
        """What one of the Weights has as its leaf."""
        if index in self._parts:
            return self._parts[index]
        if type(self._leaf) is jax.ShapeDtypeStruct:
            return self.template.stored.blank()
        # A pytree may be rebuilt around anything, None and plain objects too.
        return StackSlice(self._leaf, index) if hasattr(self._leaf, "shape") else self._leaf

    def put_many(self, leaves: Mapping[int, Any]) -> None:
        """Sets the leaves of some of the Weights; all of them or, if that fails, none."""
        with _LOCK:
            empty = any(v is None or type(v) is jax.ShapeDtypeStruct for v in leaves.values())
            if self.is_whole and not empty:
                places = np.array(list(leaves), np.int32)
                new = jnp.stack([jnp.asarray(leaf) for leaf in leaves.values()])
                self._leaf = jnp.asarray(self._leaf).at[places].set(new)
                values_changed()
                return
            own, parts = self._leaf, self._parts
            try:
                self._split()
                for index, leaf in leaves.items():
                    if leaf is None or type(leaf) is jax.ShapeDtypeStruct:
                        self._parts.pop(index, None)
                    else:
                        self._parts[index] = leaf
                self._join()
            except BaseException:
                self._leaf, self._parts = own, parts
                raise
            values_changed()

    def put(self, leaf: Any) -> None:
        """Sets all at once: the leaf, as it is."""
        with _LOCK:
            self._leaf, self._parts = leaf, {}
        values_changed()

    def _split(self) -> None:
        """From here on ``_parts`` is a dict of this call's own."""
        if self.is_whole:
            self._parts = {i: self._leaf[i] for i in range(self.span.count)}
            self._leaf = self.blank()
        else:
            self._parts = dict(self._parts)

    def _join(self) -> None:
        if self._parts and len(self._parts) == self.span.count:
            stack = jnp.stack([self._parts[i] for i in range(self.span.count)])
            self._leaf = stack if self.leaf_sharding is None else put(stack, self.leaf_sharding)
            self._parts = {}

    def array(self) -> jax.Array:
        """The stacked array: inside a Graph, what stands for it there."""
        standing = standing_for(self)
        if standing is not None:
            return standing
        if self._apart:  # unstacked since then; a compiled program still asks for the stack
            return jnp.stack([weight.stored.array() for weight in self._apart])
        if not self.is_whole:
            # Reads those that were allocated from a checkpoint; the first without any value raises.
            for i in range(self.span.count):
                self.view(i).stored.array()
        return self._leaf

    __jax_array__ = array

    def moved(self, sharding: Any, layout: DeviceMajor | None, name: str) -> Any:
        """The values as they would be stored on another Sharding: all at once, or by layer."""
        before = self.template._layout
        if not self.is_whole:
            return {i: relaid(a, sharding, before, layout, name) for i, a in self._parts.items()}
        where = _with_layers(sharding if layout is None else layout.sharding(sharding))
        own = self._leaf
        if before != layout:
            layers = np.asarray(own) if own.is_fully_addressable else own
            layers = [layer if before is None else before.restore(layer) for layer in layers]
            layers = [layer if layout is None else layout.arrange(layer) for layer in layers]
            own = (np if own.is_fully_addressable else jnp).stack(layers)
        return put(own, where, name)

    def settle(self, sharding: Any, why: str, layout: DeviceMajor | None, moved: Any) -> None:
        """Takes a placement of one layer's weight over, with what :meth:`moved` gave for it."""
        self.declare(self.template, sharding, layout)
        self.template._why = why
        self.leaf_sharding = _with_layers(self.template.stored.leaf_sharding)
        if isinstance(moved, dict):
            self._parts, self._leaf = moved, self.blank()
        else:
            self._leaf = moved
        values_changed()

    def declare(self, like: Weight, sharding: Any, layout: DeviceMajor | None) -> None:
        """Takes what the Weights are declared as from one of them."""
        # A new template: definitions and models rebuilt from them have the old one.
        self.template = around(like, None, None)
        self.template._sharding, self.template._layout = sharding, layout
        for view in list(self._views.values()):
            view._sharding, view._layout = sharding, layout

    # -- as the holder of a Module's leaf

    def static(self) -> tuple[Any, ...]:
        """Everything about it that is not its value or full name; hashable."""
        return (StackedWeight, self.span, self.template.stored.static())

    def _around(self, leaf: Any, name: str | None) -> StackedWeight:
        new = object.__new__(StackedWeight)
        views = weakref.WeakValueDictionary[int, Weight]()
        new.__dict__.update(
            self.__dict__, _leaf=leaf, _full_name=name, _views=views, _parts={}, _apart=[]
        )
        return new

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in vars(self).items() if k != "_views"}
        if self.leaf_sharding is None:
            return state
        layout = self.template._layout
        free = around(self.template, None, None)
        free._sharding, free._layout, free._why = None, None, ""
        own, parts = self._leaf, self._parts
        if layout is not None:
            own = jax.vmap(layout.restore)(own) if self.is_whole else own
            parts = {i: layout.restore(part) for i, part in parts.items()}
        state.update(template=free, leaf_sharding=None, _parts=parts, _leaf=own)
        if not self.is_whole and own is not None:
            state["_leaf"] = jax.ShapeDtypeStruct(
                (self.span.count, *free.stored.leaf_dims), own.dtype
            )
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> StackedWeight:
        new = memo[id(self)] = object.__new__(type(self))
        kept = ("leaf_sharding", "template", "span")
        state = {k: v if k in kept else copy.deepcopy(v, memo)
                 for k, v in vars(self).items() if k != "_views"}  # fmt: skip
        new.__setstate__(state)
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The views register themselves, as they are restored.
        vars(self).update(state, _views=weakref.WeakValueDictionary())

    def __repr__(self) -> str:
        return f"StackedWeight({self.span.count} x {self.template!r})"


def _with_layers(sharding: Any) -> Any:
    """The sharding of a stack of weights that are each placed by ``sharding``."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(None, *sharding.spec)
        return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding


# One for all: what it guards is short.
_LOCK = threading.RLock()
