"""StackedWeight: the weights of one name in n equal layers, as one array.

Users still see n Weights, each a view of its slice. ``nn.LayerStack`` creates StackedWeights;
each is one pytree leaf for all n. Where the layers hold stacks themselves (the experts of a layer),
the array has an axis for each: ``[layers, experts, ...]``, and the stack of one layer is a part of
it, a view like the Weights.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...dtype import DType
from ...kernels import StackSlice
from ...kernels.stack_slice import slice_of
from ..placement.arrays import as_used, is_usable_in_place, put, relaid
from ..placement.device_major import DeviceMajor
from ..placement.stacking import stack, unstack, with_leading
from ..shape import Shape
from .epoch import structure_changed, values_changed
from .rows import OfStack
from .span import Span
from .stored import around, copied, is_value, operand_of, outside_traces, standing_for
from .weight import Weight


class StackedWeight(OfStack):
    """One array ``[n, ...]`` for the Weights of n layers, or single values while some layers lack one.

    Weights are counted in the order of the array: with spans of 2 layers and 3 experts, number 4 is
    expert 1 of layer 1.

    Attributes:
        template: Weight without a value, of the same declaration as each of them.
        spans: for each leading axis, what its indices stand for, outermost first.
        split: mesh axes over which the last of the leading axes is split; () if it is not.
        home: (StackedWeight, number of its first Weight there) if it is a part of another one.
    """

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
    activations = property(
        attrgetter("template.activations"), lambda s, a: s._set_all(_activations=a)
    )

    def __init__(self, template: Weight, *spans: Span):
        self._template, self.spans = around(template, None, None), spans
        self._split: tuple[str, ...] = ()
        self._home: tuple[StackedWeight, int] | None = None
        self._full_name: str | None = None
        # Weak: the Modules hold the Weights, and a cycle would keep arrays alive until it is collected.
        self._views: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
        self._inner: weakref.WeakValueDictionary[int, StackedWeight]
        self._inner = weakref.WeakValueDictionary()
        self._apart: list[Any] = []
        self._parts: dict[int, Any] = {}
        self._own: Any = self.blank()

    @classmethod
    def of(cls, holders: Sequence[Any], span: Span) -> StackedWeight:
        """A stack of the layers' Weights, or of their stacks, which differ only in value and are not changed."""
        first = holders[0]
        if isinstance(first, Weight):
            new = cls(first, span)
        else:
            new = cls(first.template, span, *first.spans)
            new._split = first.split
            new._own = new.blank()
        new._take(holders)
        return new

    def _take(self, holders: Sequence[Any]) -> None:
        """Takes the values of Weights, or of stacks, which are not changed."""
        if isinstance(holders[0], Weight):
            self._parts = {i: w._leaf for i, w in enumerate(holders) if not w.stored.is_lazy}
            self._join()
            return
        if all(holder.is_whole for holder in holders):
            self._own = stack([jnp.asarray(holder.leaf) for holder in holders], self.leaf_sharding)
            return
        inner = holders[0].count
        for i, holder in enumerate(holders):
            leaves = ((j, holder.leaf_of(j)) for j in range(inner))
            found = {i * inner + j: jnp.asarray(leaf) for j, leaf in leaves if is_value(leaf)}
            self._parts.update(found)

    def adopt(self, holders: Sequence[Any]) -> None:
        """Turns the original Weights, or stacks, into views of this stack."""
        inner = self.count // self.spans[0].count
        for i, holder in enumerate(holders):
            if isinstance(holder, Weight):
                holder._own, holder._home = None, (self, i)
                self._views[i] = holder
                continue
            for j, view in list(holder._views.items()):
                view._home = (self, i * inner + j)
                self._views[i * inner + j] = view
            holder._own, holder._parts, holder._home = None, {}, (self, i * inner)
            holder._views.clear()
            self._inner[i * inner] = holder
        values_changed()

    def view(self, index: int) -> Weight:
        """One of the Weights."""
        if self._home is not None:
            return self._home[0].view(self._home[1] + index)
        view = self._views.get(index)
        if view is None:
            name = None if self._full_name is None else self.name(self._full_name, index)
            view = around(self.template, None, name)
            view._home = (self, index)
            view = self._views.setdefault(index, view)
        return view

    def part(self, start: int) -> StackedWeight:
        """The stack of one layer; ``start`` is the number of its first Weight."""
        part = self._inner.get(start)
        if part is None:
            part = object.__new__(StackedWeight)
            part.__dict__.update(
                vars(self), spans=self.spans[1:], _home=(self, start), _own=None, _parts={}, _apart=[],
                _full_name=None, _template=None,
                _views=weakref.WeakValueDictionary(), _inner=weakref.WeakValueDictionary(),
            )  # fmt: skip
            part = self._inner.setdefault(start, part)
        return part

    def dissolve(self) -> None:
        """Gives each Weight, or each layer's stack, its own value back."""
        inner = self.count // self.spans[0].count
        starts = range(0, self.count, inner)
        alone = len(self.spans) == 1
        views: list[Any] = self.weights if alone else [self.part(start) for start in starts]
        for view, start, leaf in zip(views, starts, self._leaves(), strict=True):
            if isinstance(view, StackedWeight):
                self._release(view, start)
            view._own, view._home = leaf, None
        self._own, self._parts, self._apart = None, {}, views
        values_changed()

    def restore(self) -> None:
        """Stacks the values of the Weights again, after :meth:`dissolve`."""
        holders, self._apart = self._apart, []
        self._own = self.blank()
        self._take(holders)
        self.adopt(holders)

    def _leaves(self) -> list[Any]:
        """The leaf of each Weight, or of each layer's stack, as an array of its own if there is a value."""
        own, count, alone = self._own, self.spans[0].count, len(self.spans) == 1
        if self.is_whole and hasattr(own, "shape"):
            where = self.template.stored.leaf_sharding
            return unstack(own, where if alone else self.part(0).leaf_sharding)
        inner = self.count // count
        return [self.leaf_of(i) if alone else self.part(i * inner).leaf for i in range(count)]

    def _release(self, part: StackedWeight, start: int) -> None:
        """Makes the Weights of a part views of that part."""
        part._template, part._split = self.template, self.split
        part._parts = {
            i - start: leaf for i, leaf in self._parts.items() if 0 <= i - start < part.count
        }
        if len(part._parts) == part.count:
            part._parts = {}  # the leaf has them
        for index, view in list(self._views.items()):
            if 0 <= index - start < part.count:
                view._home = (part, index - start)
                part._views[index - start] = view

    # -- what it holds

    @property
    def template(self) -> Weight:
        return self._template if self._home is None else self._home[0].template

    @property
    def split(self) -> tuple[str, ...]:
        return self._split if self._home is None else self._home[0].split

    @property
    def home(self) -> tuple[StackedWeight, int] | None:
        return self._home

    @property
    def lead(self) -> tuple[int, ...]:
        """The sizes of the leading axes."""
        return tuple(span.count for span in self.spans)

    @property
    def count(self) -> int:
        """The number of Weights."""
        return math.prod(self.lead)

    @property
    def shares(self) -> int:
        """The number of parts that the Weights are distributed in: each device holds 1/shares of them."""
        return math.prod(self.sharding.mesh.shape[name] for name in self.split)

    @property
    def leaf_sharding(self) -> Any:
        """The sharding of the array."""
        return with_leading(self.template.stored.leaf_sharding, len(self.spans), self.split)

    def index(self, number: int) -> tuple[int, ...]:
        """The place of a Weight along the leading axes."""
        return tuple(map(int, np.unravel_index(number, self.lead)))

    def name(self, full: str, number: int) -> str:
        """The name of one of the Weights, from the name of the leaf."""
        for span, index in zip(self.spans, self.index(number), strict=True):
            full = span.name(full, index)
        return full

    def refuse_in_stack(self, what: str) -> None:
        """Checks that it is not a part of another stack; raises ValueError as for a Weight."""
        if self._home is not None:
            self.weights[0].stored.refuse_in_stack(what)

    # -- the value

    def blank(self) -> Any:
        """The leaf while there is no value: a placeholder, or None if sizes are unknown."""
        leaf = self.template.stored.blank()
        if leaf is None:
            return None
        shape = (*self.lead, *leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self.leaf_sharding)

    @property
    def stored(self) -> StackedWeight:
        """Itself: every holder of a leaf has this property, as a Weight does."""
        return self

    @property
    def leaf(self) -> Any:
        """The leaf in a pytree: an array, a placeholder, or a slice of the stack that is its home."""
        if self._home is None:
            return self._own
        home, start = self._home
        if home.is_whole:
            return home.cut(home.leaf, start, len(self.spans))
        leaves = [home._parts.get(start + i) for i in range(self.count)]
        return (
            self.blank()
            if any(leaf is None for leaf in leaves)
            else stack(leaves, self.leaf_sharding, self.lead)
        )

    _leaf = leaf

    @property
    def weights(self) -> list[Weight]:
        """All its Weights, also after they were unstacked."""
        if self._apart:
            return [weight for holder in self._apart for weight in holder.stored.weights]
        return [self.view(i) for i in range(self.count)]

    def names(self, full: str) -> list[str]:
        """The names of all its Weights, from the name of the leaf."""
        return [self.name(full, i) for i in range(self.count)]

    def arranged(self, array: Any) -> Any:
        """The value of one layer's Weight, converted to the stored order."""
        return self.template.stored.arranged(array)

    @property
    def is_whole(self) -> bool:
        """Whether every Weight has a value."""
        return is_value(self.leaf)

    def leaf_of(self, index: int) -> Any:
        """The leaf of one of the Weights."""
        if self._home is not None:
            return self._home[0].leaf_of(self._home[1] + index)
        if index in self._parts:
            return self._parts[index]
        if type(self._own) is jax.ShapeDtypeStruct:
            return self.template.stored.blank()
        # A pytree may be rebuilt around any object, including None.
        if not hasattr(self._own, "shape"):
            return self._own
        return self.cut(self._own, index)

    def cut(self, array: Any, number: int, levels: int = 0) -> Any:
        """The slice of the stacked ``array`` for a Weight, or for a part with ``levels`` leading axes."""
        for index in self.index(number)[: len(self.spans) - levels]:
            array = slice_of(array, index)
        return array

    def put_many(self, leaves: Mapping[int, Any]) -> None:
        """Sets the leaves of some of the Weights; on failure none is changed."""
        if self._home is not None:
            home, start = self._home
            home.put_many({start + i: leaf for i, leaf in leaves.items()})
            return
        with _LOCK, outside_traces(self._own, *self._parts.values(), *leaves.values()):
            empty = any(not is_value(v) for v in leaves.values())
            if self.is_whole and not empty:
                places = np.unravel_index(np.array(list(leaves), np.int32), self.lead)
                new = jnp.stack([jnp.asarray(leaf) for leaf in leaves.values()])
                own = jnp.asarray(self._own).at[tuple(map(np.int32, places))].set(new)
                self._own = put(own, self.leaf_sharding) if self.split else own
                values_changed()
                return
            own, parts = self._own, self._parts
            try:
                self._unjoin()
                for index, leaf in leaves.items():
                    if is_value(leaf):
                        self._parts[index] = leaf
                    else:
                        self._parts.pop(index, None)
                self._join()
            except BaseException:
                self._own, self._parts = own, parts
                raise
            values_changed()

    def put(self, leaf: Any) -> None:
        """Sets the values of all Weights: the leaf itself."""
        if self._home is not None:
            self.put_many({i: leaf[self.index(i)] for i in range(self.count)})
            return
        with _LOCK:
            self._own, self._parts = leaf, {}
        values_changed()

    def _unjoin(self) -> None:
        """Makes ``_parts`` a new dict, splitting the array if there is one."""
        if self.is_whole:
            where = self.template.stored.leaf_sharding
            self._parts = dict(enumerate(unstack(self._own, where, len(self.spans))))
            self._own = self.blank()
        else:
            self._parts = dict(self._parts)

    def _join(self) -> None:
        if self._parts and len(self._parts) == self.count:
            parts = [self._parts[i] for i in range(self.count)]
            self._own = stack(parts, self.leaf_sharding, self.lead)
            self._parts = {}

    def array(self) -> jax.Array:
        """The stacked array; inside a Graph, its tracer."""
        standing = standing_for(self)
        if standing is not None:
            return standing
        if self._apart:  # it was unstacked; a compiled program still needs the stack
            return jnp.stack([holder.stored.array() for holder in self._apart])
        if not self.is_whole:
            # Reads Weights that were allocated from a checkpoint; the first without a value raises.
            for weight in self.weights:
                weight.stored.array()
        leaf = self.leaf
        return leaf.__jax_array__() if type(leaf) is StackSlice else leaf

    __jax_array__ = array

    def used(self) -> Any:
        """The stacked array in a form that operations can use; see ``placement/arrays.py``."""
        array, dims = self.array(), self.template.stored.leaf_dims
        if self.sharding is None:
            return array
        return as_used(array, None if dims is None else (*self.lead, *dims), self.leaf_sharding)

    def operand(self) -> Any:
        """The operand for mixtures of experts: quantised weights and slices of stacks stay as they are."""
        leaf, dims = self.leaf, self.template.stored.leaf_dims
        in_place = type(leaf) is StackSlice and self.layout is None and standing_for(self) is None
        if in_place and self.sharding is not None and dims is not None:
            in_place = is_usable_in_place(leaf, (*self.lead, *dims), self.leaf_sharding)
        return operand_of(self, leaf if in_place else self.used())

    def moved(
        self, sharding: Any, layout: DeviceMajor | None, name: str, split: tuple[str, ...] = ()
    ) -> Any:
        """The values converted to another Sharding: one array, or a dict while some Weights have no value."""
        before = self.layout
        if not self.is_whole:
            return {i: relaid(a, sharding, before, layout, name) for i, a in self._parts.items()}
        where = sharding if layout is None else layout.sharding(sharding)
        own = self._own
        if before != layout:
            layers = np.asarray(own) if own.is_fully_addressable else own
            layers = layers.reshape(-1, *layers.shape[len(self.spans) :])
            layers = [layer if before is None else before.restore(layer) for layer in layers]
            layers = [layer if layout is None else layout.arrange(layer) for layer in layers]
            own = (np if own.is_fully_addressable else jnp).stack(layers)
            own = own.reshape(*self.lead, *own.shape[1:])
        return put(own, with_leading(where, len(self.spans), split), name)

    def settle(
        self, sharding: Any, why: str, layout: DeviceMajor | None, moved: Any, split: tuple[str, ...] = ()
    ) -> None:  # fmt: skip
        """Adopts a new sharding of one layer's weight, with the result of :meth:`moved` for it."""
        self.declare(self.template, sharding, layout)
        self.template._why, self._split = why, split
        if isinstance(moved, dict):
            self._parts, self._own = moved, self.blank()
        else:
            self._own = moved
        values_changed()

    def declare(self, like: Weight, sharding: Any, layout: DeviceMajor | None) -> None:
        """Adopts the declaration of one of the Weights for all."""
        # A new template: definitions, and models rebuilt from them, share the old one.
        self._template = around(like, None, None)
        self._template._sharding, self._template._layout = sharding, layout
        for view in list(self._views.values()):
            view._sharding, view._layout = sharding, layout

    def redeclare(self, dtype: DType, dims: Sequence[int], encoding: Any) -> None:
        """Sets dtype, shape and encoding of all Weights, and drops their values."""
        self.refuse_in_stack("another shape or dtype")
        self._set_all(_dtype=dtype, _dims=tuple(Shape(dims)), _quantization_encoding=encoding)
        self._parts, self._own = {}, self.blank()

    def _set_all(self, **what: Any) -> None:
        self._template = around(self.template, None, None)
        for weight in (self._template, *self._views.values()):
            vars(weight).update(what)
        for part in list(self._inner.values()):
            part._set_all(**what)
        structure_changed()

    # -- as the holder of a Module's leaf

    def static(self) -> tuple[Any, ...]:
        """Everything except its value and full name; hashable."""
        return (StackedWeight, self.spans, self.split, self.template.stored.static())

    def _around(self, leaf: Any, name: str | None) -> StackedWeight:
        new = object.__new__(StackedWeight)
        new.__dict__.update(
            self.__dict__, _own=leaf, _full_name=name, _parts={}, _apart=[], _home=None,
            _template=self.template, _split=self.split,
            _views=weakref.WeakValueDictionary[int, Weight](),
            _inner=weakref.WeakValueDictionary[int, StackedWeight](),
        )  # fmt: skip
        return new

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in vars(self).items() if k not in ("_views", "_inner")}
        if self._home is not None or self.sharding is None:
            return state
        layout = self.layout
        free = around(self.template, None, None)
        free._sharding, free._layout, free._why = None, None, ""
        own, parts = self._own, self._parts
        if layout is not None:
            restore = layout.restore
            for _ in self.spans:
                restore = jax.vmap(restore)
            own = restore(own) if self.is_whole else own
            parts = {i: layout.restore(part) for i, part in parts.items()}
        state.update(_template=free, _split=(), _parts=parts, _own=own)
        if not self.is_whole and own is not None:
            state["_own"] = jax.ShapeDtypeStruct((*self.lead, *free.stored.leaf_dims), own.dtype)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> StackedWeight:
        new = memo[id(self)] = object.__new__(type(self))
        state = {k: v for k, v in vars(self).items() if k not in ("_views", "_inner")}
        parts = self._parts.values()
        new.__setstate__(copied(state, ("_template", "spans", "_split"), memo, self.leaf, *parts))
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The views register themselves when they are restored.
        vars(self).update(state)
        vars(self).setdefault("_views", weakref.WeakValueDictionary())
        vars(self).setdefault("_inner", weakref.WeakValueDictionary())
        if self._home is not None:
            vars(self._home[0]).setdefault("_inner", weakref.WeakValueDictionary())
            self._home[0]._inner.setdefault(self._home[1], self)


# One lock for all stacks: the guarded sections are short.
_LOCK = threading.RLock()
