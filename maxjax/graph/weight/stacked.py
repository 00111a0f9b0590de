"""StackedWeight: the weights of one name in n equal layers, as one array.

Users still see n Weights, each a view of its slice. ``nn.LayerStack`` creates StackedWeights;
each is one pytree leaf for all n.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...kernels import StackSlice
from ..placement.arrays import put, relaid
from ..placement.device_major import DeviceMajor
from ..placement.stacking import stack, unstack
from .epoch import values_changed
from .stored import around, standing_for
from .weight import Weight


class Span(NamedTuple):
    """The layers that a stack holds: ``start``, ``start + step``, …, with a common name.

    Attributes:
        pattern: text in place of the layer's number in the name of the leaf.
        start, step, count: numbers of the layers, as of a range.
    """

    pattern: str
    start: int
    step: int
    count: int

    def name(self, full: str, index: int) -> str:
        """The name of one layer's weight, from the name of the leaf."""
        parts = full.split(".")
        if self.pattern in parts:
            parts[parts.index(self.pattern)] = str(self.start + index * self.step)
        return ".".join(parts)


class StackedWeight:
    """One array ``[n, ...]`` for the Weights of n layers, or single values while some layers lack one.

    Attributes:
        template: Weight without a value, of the same declaration as each of them.
        span: layers that the Weights belong to.
    """

    home = None  # a StackedWeight is not a part of another holder

    # What each of its Weights is declared as.
    dtype = property(attrgetter("template.stored.dtype"))
    dims = property(attrgetter("template.stored.dims"))
    logical_shape = property(attrgetter("template.stored.logical_shape"))
    encoding = property(attrgetter("template.stored.encoding"))
    packing = property(attrgetter("template.stored.packing"))
    block = property(attrgetter("template.stored.block"))
    sharding = property(attrgetter("template.stored.sharding"))
    layout = property(attrgetter("template.stored.layout"))
    why = property(attrgetter("template.stored.why"))

    def __init__(self, template: Weight, span: Span, parts: Mapping[int, Any] | None = None):
        self.template, self.span = around(template, None, None), span
        self._full_name: str | None = None
        self.leaf_sharding: Any = _with_layers(template.stored.leaf_sharding)
        # Weak: the Modules hold the Weights, and a cycle would keep arrays alive until it is collected.
        self._views: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
        self._apart: list[Weight] = []
        self._parts: dict[int, Any] = dict(parts or {})
        self._leaf: Any = self.blank()
        self._join()

    @classmethod
    def of(cls, weights: Sequence[Weight], span: Span) -> StackedWeight:
        """A StackedWeight of the layers' own Weights, equal except in value, which are not changed."""
        return cls(
            weights[0], span, {i: w._leaf for i, w in enumerate(weights) if not w.stored.is_lazy}
        )

    def adopt(self, weights: Sequence[Weight]) -> None:
        """Turns the original Weights into views of this stack."""
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
        views = self.weights
        for view, leaf in zip(views, self._leaves(), strict=True):
            view._own, view._home = leaf, None
        self._leaf, self._parts, self._apart = None, {}, views
        values_changed()

    def restore(self) -> None:
        """Stacks the values of the Weights again, after :meth:`dissolve`."""
        weights, self._apart = self._apart, []
        self._leaf = self.blank()
        self._parts = {i: w._own for i, w in enumerate(weights) if not w.stored.is_lazy}
        self._join()
        self.adopt(weights)

    def _leaves(self) -> list[Any]:
        """The leaf of each Weight, as an array of its own if there is a value."""
        leaf, count = self._leaf, self.span.count
        if self.is_whole and hasattr(leaf, "shape"):
            return unstack(leaf, self.template.stored.leaf_sharding)
        return [self.leaf_of(i) for i in range(count)]

    # -- the value

    def blank(self) -> Any:
        """The leaf while there is no value: a placeholder, or None if sizes are unknown."""
        leaf = self.template.stored.blank()
        if leaf is None:
            return None
        shape = (self.span.count, *leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self.leaf_sharding)

    @property
    def stored(self) -> StackedWeight:
        """Itself: every holder of a leaf has this property, as a Weight does."""
        return self

    @property
    def leaf(self) -> Any:
        """The leaf in a pytree: an array or a placeholder."""
        return self._leaf

    @property
    def weights(self) -> list[Weight]:
        """The Weights of all layers."""
        return [self.view(i) for i in range(self.span.count)]

    def names(self, full: str) -> list[str]:
        """Their names, from the name of the leaf."""
        return [self.span.name(full, i) for i in range(self.span.count)]

    def arranged(self, array: Any) -> Any:
        """The value of one layer's Weight, converted to the stored order."""
        return self.template.stored.arranged(array)

    @property
    def is_whole(self) -> bool:
        """Whether every layer has a value."""
        return self._leaf is not None and type(self._leaf) is not jax.ShapeDtypeStruct

    def leaf_of(self, index: int) -> Any:
        """The leaf of one of the Weights."""
        if index in self._parts:
            return self._parts[index]
        if type(self._leaf) is jax.ShapeDtypeStruct:
            return self.template.stored.blank()
        # A pytree may be rebuilt around any object, including None.
        return StackSlice(self._leaf, index) if hasattr(self._leaf, "shape") else self._leaf

    def put_many(self, leaves: Mapping[int, Any]) -> None:
        """Sets the leaves of some of the Weights; on failure none is changed."""
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
        """Sets the values of all layers: the leaf itself."""
        with _LOCK:
            self._leaf, self._parts = leaf, {}
        values_changed()

    def _split(self) -> None:
        """Makes ``_parts`` a new dict, splitting the array if there is one."""
        if self.is_whole:
            self._parts = dict(enumerate(self._leaves()))
            self._leaf = self.blank()
        else:
            self._parts = dict(self._parts)

    def _join(self) -> None:
        if self._parts and len(self._parts) == self.span.count:
            parts = [self._parts[i] for i in range(self.span.count)]
            self._leaf = stack(parts, self.leaf_sharding)
            self._parts = {}

    def array(self) -> jax.Array:
        """The stacked array; inside a Graph, its tracer."""
        standing = standing_for(self)
        if standing is not None:
            return standing
        if self._apart:  # it was unstacked; a compiled program still needs the stack
            return jnp.stack([weight.stored.array() for weight in self._apart])
        if not self.is_whole:
            # Reads Weights that were allocated from a checkpoint; the first without a value raises.
            for weight in self.weights:
                weight.stored.array()
        return self._leaf

    __jax_array__ = array

    def moved(self, sharding: Any, layout: DeviceMajor | None, name: str) -> Any:
        """The values as stored with another Sharding: all in one array, or by layer."""
        before = self.layout
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
        """Adopts a new sharding of one layer's weight, with the result of :meth:`moved` for it."""
        self.declare(self.template, sharding, layout)
        self.template._why = why
        self.leaf_sharding = _with_layers(self.template.stored.leaf_sharding)
        if isinstance(moved, dict):
            self._parts, self._leaf = moved, self.blank()
        else:
            self._leaf = moved
        values_changed()

    def declare(self, like: Weight, sharding: Any, layout: DeviceMajor | None) -> None:
        """Adopts the declaration of one of the Weights for all."""
        # A new template: definitions, and models rebuilt from them, share the old one.
        self.template = around(like, None, None)
        self.template._sharding, self.template._layout = sharding, layout
        for view in list(self._views.values()):
            view._sharding, view._layout = sharding, layout

    # -- as the holder of a Module's leaf

    def static(self) -> tuple[Any, ...]:
        """Everything except its value and full name; hashable."""
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
        layout = self.layout
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
        # The views register themselves when they are restored.
        vars(self).update(state, _views=weakref.WeakValueDictionary())

    def __repr__(self) -> str:
        return f"StackedWeight({self.span.count} x {self.template!r})"


def _with_layers(sharding: Any) -> Any:
    """The sharding of a stack of weights that each have ``sharding``."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(None, *sharding.spec)
        return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding


# One lock for all stacks: the guarded sections are short.
_LOCK = threading.RLock()
