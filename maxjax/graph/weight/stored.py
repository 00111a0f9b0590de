"""StoredWeight: the stored data of a Weight, its sharding and its layout, as ``weight.stored``.

It is the interface for loaders, stacks, savers, plans and exports, while users see the value.
The *leaf* is a Weight's entry in a pytree: an array, a placeholder, or a slice of the stack that
is its *home*. Shapes, values and files are in *logical* order; a leaf is *arranged*,
which differs only if there is a layout (``placement/device_major.py``). A StackedWeight, which holds
the leaf of many Weights, has the same names: what is declared is then that of one layer's Weight.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Protocol

import jax
import numpy as np
from jax.core import Tracer

from ...dtype import DType
from ...kernels import QuantArray, StackSlice
from ...kernels.stack_slice import stack_of
from ..kind import KIND
from ..operands import fitting
from ..placement.arrays import as_used, is_usable_in_place, put, relaid
from ..placement.device_major import DeviceMajor
from ..quantization import QuantizationEncoding
from ..shape import Shape, StaticDim
from .epoch import structure_changed
from .running import RUNNING

# The leaf of a Weight or StackedWeight; flattening a Module reads each.
leaf_of = attrgetter("_leaf")


def outside_traces(*leaves: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which arrays that are computed from leaves belong to no running trace, unless a leaf is traced."""
    is_traced = any(isinstance(stack_of(leaf), Tracer) for leaf in leaves)
    return contextlib.nullcontext() if is_traced else jax.ensure_compile_time_eval()


def copied(
    attributes: Mapping[str, Any], shared: Collection[str], memo: dict[int, Any], *leaves: Any
) -> dict[str, Any]:
    """Deep copies of the attributes of a Weight or StackedWeight that holds these leaves.

    Not copied are shared attributes, and placeholders, which are immutable; their shardings cannot be copied.
    """
    with outside_traces(*leaves):
        return {
            k: v if k in shared or type(v) is jax.ShapeDtypeStruct else copy.deepcopy(v, memo)
            for k, v in attributes.items()
        }


def around(holder: Any, leaf: Any, name: str | None) -> Any:
    """A Weight or StackedWeight like ``holder`` around ``leaf``, which is not inspected."""
    return holder._around(leaf, name)


def standing_for(weight: Any) -> Any:
    """The tracer of a Weight or StackedWeight in the Graph being built; None outside of a Graph."""
    graphs = RUNNING.graphs
    if not graphs:
        return None
    home = weight.stored.home
    if home is not None and RUNNING.is_below(home[0]):
        stack = standing_for(home[0])
        levels = len(weight.stored.spans)
        return None if stack is None else home[0].cut(stack, home[1], levels).__jax_array__()
    return None if isinstance(stack_of(weight._leaf), Tracer) else graphs[-1].argument(weight)


def leaf_for_jax(weight: Any) -> Any:
    """The leaf of a Weight or StackedWeight as a pytree; in a Graph being built, what stands for it there.

    So ``jnp.exp(weight)`` in a Graph reads the value that the program is called with.
    """
    if not RUNNING.graphs:
        return weight._leaf
    with RUNNING.graphs[-1].taking_leaves():
        standing = standing_for(weight)
    return weight._leaf if standing is None else standing


def operand_of(stored: Any, found: Any) -> Any:
    """The operand for ``kernels.matmul`` from the array of a Weight or StackedWeight."""
    packing = stored.packing
    return found if packing is None else QuantArray(found, packing.value, stored.activations)


def is_value(leaf: Any) -> bool:
    """Whether a leaf is a value, not a placeholder or None."""
    return leaf is not None and type(leaf) is not jax.ShapeDtypeStruct


class FileForm(Protocol):
    """The conversion between a Weight's value and another form of it in files, such as text. It is hashable.

    Attributes:
        elementwise: whether both forms have the same shape, and each element is converted by itself.
    """

    elementwise: ClassVar[bool]

    def fits(self, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Whether a file's tensor of this dtype and shape can be in this form."""
        ...

    def to_stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """The file's tensor in the form of the Weight; an invalid tensor raises ValueError."""
        ...

    def to_file(self, array: Any) -> Any:
        """The stored value in the form of the file; if ``elementwise``, also for a jax.Array."""
        ...


# What ``static`` of a Weight returns, in words.
STATIC_NAMES = (
    "class", "local name", "dtype", "shape", "device", "quantization", "alignment", "sharding strategy", "sharding",
    "layout", "flags", "shard", "activations", "form",
)  # fmt: skip


class StoredWeight:
    """The stored data of a Weight: a view of the Weight, created on demand.

    Attributes:
        weight: Weight itself.
        local_name: name within the layer that owns the Weight.
        dtype: declared element type.
        dims: declared sizes, in logical order.
        encoding: declared quantization encoding, or None.
        leaf: entry in a pytree: an array, a placeholder, None, or a slice of a stack.
        home: (StackedWeight, number in it) if a stack holds the value, otherwise None.
        spans, lead: what the leading axes of the leaf stand for, and their sizes; both are (), as
            only a stack has such axes.
        source: data of a checkpoint that has not been read yet.
        sharding: jax Sharding of the array in logical order; None lets JAX choose.
        layout: order of the leaf if it is not the logical one; its shape then differs too.
        why: reason for the sharding.
        loaded_shape: shape of the tensor it was loaded from, if different.
        form: FileForm if a file holds the value in another form, otherwise None.
    """

    __slots__ = ("weight",)

    def __init__(self, weight: Any):
        self.weight = weight

    local_name = property(attrgetter("weight._local_name"))
    dtype = property(attrgetter("weight._dtype"))
    dims = property(attrgetter("weight._dims"))
    leaf = property(attrgetter("weight._leaf"))
    home = property(attrgetter("weight._home"))
    spans, lead = (), ()
    sharding = property(attrgetter("weight._sharding"))
    layout = property(attrgetter("weight._layout"))
    encoding = property(attrgetter("weight._quantization_encoding"))
    why = property(attrgetter("weight._why"))
    loaded_shape = property(attrgetter("weight._loaded_shape"))
    logical_shape = property(attrgetter("weight.logical_shape"))

    @property
    def source(self) -> Any:
        return self.weight._source

    @source.setter
    def source(self, data: Any) -> None:
        self.weight._source = data

    @property
    def form(self) -> FileForm | None:
        return self.weight._form

    @form.setter
    def form(self, form: FileForm) -> None:
        self.refuse_in_stack("a form in files")
        self.weight._form = form
        structure_changed()

    def filed(self, value: Any) -> Any:
        """A value in the form and shape of the file's tensor that it was loaded from."""
        form, shape = self.form, self.loaded_shape
        if form is not None and form.elementwise:
            return form.to_file(value)
        if form is not None and not isinstance(value, Tracer):
            # It is never split: each device has all of it.
            parts = getattr(value, "addressable_shards", ())
            return form.to_file(np.asarray(parts[0].data if parts else value))
        return value if shape is None else value.reshape(shape)

    @property
    def weights(self) -> list[Any]:
        """The Weights whose values the leaf holds: of a stack, those of its layers."""
        return [self.weight]

    def names(self, full: str) -> list[str]:
        """The names of these Weights, from the name of the leaf."""
        return [full]

    # -- what it was declared as

    def static(self) -> tuple[Any, ...]:
        """Everything except its value and full name, in the order of STATIC_NAMES; hashable."""
        w = self.weight
        dims = tuple(int(d) if isinstance(d, StaticDim) else str(d) for d in w._dims)
        return (
            w._plain[0], w._local_name, w._dtype, dims, w._device, w._quantization_encoding, w._align,
            w._sharding_strategy, w._sharding, w._layout, w._flags, w.shard_idx, w._activations, w._form,
        )  # fmt: skip

    def declare(self, dtype: DType, dims: tuple[Any, ...]) -> None:
        """Sets dtype and shape, and drops the value.

        Raises:
            ValueError: a size is negative.
        """
        self.refuse_in_stack("another shape or dtype")
        if any(isinstance(d, StaticDim) and d.dim < 0 for d in dims):
            shape = ", ".join(map(str, dims))
            raise ValueError(
                f"weight '{self.weight.name}' has a negative size: its shape is [{shape}]"
            )
        self.weight._dtype, self.weight._dims = dtype, dims
        self.weight._put(self.blank())
        structure_changed()

    def take(
        self,
        dtype: DType,
        dims: tuple[Any, ...],
        encoding: QuantizationEncoding | None,
        align: int | None,
        original: tuple[DType, Shape] | None,
        loaded_shape: tuple[int, ...] | None,
    ) -> None:
        """Adopts the declaration of a loaded value; :meth:`put` stores the value itself."""
        w, before = self.weight, self.static()
        w._dtype, w._dims, w._quantization_encoding, w._align = dtype, dims, encoding, align
        w._original = original or w._original
        w._loaded_shape, w._source = loaded_shape, None
        if self.static() != before:
            structure_changed()

    def refuse_in_stack(self, what: str) -> None:
        """Checks that the Weight is not in a stack, where layers cannot differ.

        Raises:
            ValueError: the Weight belongs to a layer of a stack.
        """
        if self.weight._home is not None:
            raise ValueError(
                f"weight '{self.weight.name}' belongs to a LayerStack and cannot have {what} of its own: "
                "layers.unstack() first"
            )

    def finalise(self, name: str) -> None:
        """Records the full name. The state dict of a child does not shorten a name from that of its parent."""
        known = self.weight._full_name
        if known is None or not known.endswith(f".{name}"):
            self.weight._full_name, self.weight._renamed = name, False

    @property
    def is_renamed(self) -> bool:
        """Whether ``name`` was set after the latest state dict, if there was one."""
        return self.weight._renamed and self.weight._home is None

    @property
    def packing(self) -> QuantizationEncoding | None:
        """The quantization encoding if the stored bytes are its blocks, otherwise None."""
        encoding = self.encoding
        packed = encoding is not None and encoding.is_gguf and self.weight._dtype is DType.uint8
        return encoding if packed and self.weight._dims else None

    @property
    def block(self) -> int:
        """The number of values along the last axis that must not be separated."""
        return 1 if self.packing is None else self.packing.elements_per_block

    @property
    def activations(self) -> str:
        """The form in which CPU kernels use the activations beside a quantised weight: "int8" or "float"."""
        return self.weight._activations

    @activations.setter
    def activations(self, kind: str) -> None:
        self.refuse_in_stack("activations")
        self.weight._activations = kind
        structure_changed()

    # -- the leaf

    @property
    def is_lazy(self) -> bool:
        """Whether there is no value yet; there may be data to read it from."""
        return not is_value(self.leaf)

    @property
    def is_missing(self) -> bool:
        """Whether there is neither a value nor checkpoint data to read."""
        return self.weight._source is None and self.is_lazy

    def no_value(self, name: str, advice: str) -> str:
        """The message of an error for a weight without a value.

        A weight that has not even a placeholder, of a shape that is known, is one that ``maxjax.partition`` left out.

        Args:
            name: name of the weight.
            advice: the message for a weight that ``maxjax.partition`` has not left out, after the name.
        """
        if self.leaf is None and self.leaf_dims is not None:
            advice = (
                "has no value here: it is in the other half that maxjax.partition returned. "
                "maxjax.merge(first, second) returns a model with both"
            )
        return f"weight '{name}' {advice}"

    @property
    def leaf_dims(self) -> Any:
        """The sizes of the leaf; None while they are symbolic."""
        dims, layout = self.weight._dims, self.weight._layout
        if not all(isinstance(d, StaticDim) for d in dims):
            return None
        sizes = tuple(int(d) for d in dims)
        return sizes if layout is None else layout.shape(sizes)

    @property
    def leaf_sharding(self) -> Any:
        """The sharding of the leaf."""
        sharding, layout = self.weight._sharding, self.weight._layout
        return sharding if layout is None else layout.sharding(sharding)

    def blank(self) -> Any:
        """The leaf while there is no value: a placeholder, or None if sizes are unknown."""
        if (sizes := self.leaf_dims) is None:
            return None
        # JAX without x64 has no 64-bit arrays: the placeholder has the type the value will have.
        dtype = jax.dtypes.canonicalize_dtype(self.weight._dtype.np)
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=self.leaf_sharding)

    def put(self, leaf: Any) -> None:
        """Sets the leaf itself."""
        self.weight._put(leaf)

    # -- the value

    def logical(self, leaf: Any) -> Any:
        """A stored value in logical order."""
        layout = self.weight._layout
        return leaf if layout is None or leaf is None else layout.restore(leaf)

    def arranged(self, array: Any) -> Any:
        """A value in logical order, converted to the stored order."""
        layout = self.weight._layout
        return array if layout is None else layout.arrange(array)

    @property
    def value(self) -> Any:
        """The array in logical order, None while it is lazy; also inside a Graph."""
        leaf = self.leaf
        if type(leaf) is StackSlice:
            leaf = leaf.__jax_array__()
        return None if type(leaf) is jax.ShapeDtypeStruct else self.logical(leaf)

    def array(self) -> Any:
        """The stored array, read now if necessary; inside a Graph, its tracer."""
        tracer = standing_for(self.weight)
        if tracer is not None:
            return tracer
        leaf = self.leaf
        if not is_value(leaf):
            if self.weight._source is None:
                raise ValueError(self._no_value())
            leaf = self.read()
        return leaf.__jax_array__() if type(leaf) is StackSlice else leaf

    def used(self, gathered: bool = True) -> Any:
        """The stored array in a form that operations can use; see ``placement/arrays.py``."""
        array = self.array()
        if self.weight._sharding is None:
            return array
        return as_used(array, self.leaf_dims, self.leaf_sharding, gathered)

    def operand(self, gathered: bool = True) -> Any:
        """The operand for ``kernels.matmul``: quantised weights and slices of stacks stay as they are.

        Args:
            gathered: whether a weight that is split over ``fsdp`` is gathered.
        """
        return operand_of(
            self, self._unprepared_operand() if gathered else self.logical(self.used(False))
        )

    def _unprepared_operand(self) -> Any:
        """The array; a layer of a stack stays a slice if it needs no preparation."""
        w, leaf = self.weight, self.leaf
        if type(leaf) is not StackSlice or w._layout is not None or standing_for(w) is not None:
            return w._as_array()
        if w._sharding is None or is_usable_in_place(leaf, self.leaf_dims, w._sharding):
            return leaf
        return w._as_array()

    def to_leaf(self, value: Any) -> Any:
        """A value in logical order, converted to the stored order and put on its sharding."""
        if self.weight._layout is not None and getattr(value, "is_fully_addressable", False):
            value = np.asarray(value)
        return put(self.arranged(value), self.leaf_sharding, self.weight.name)

    def read(self) -> jax.Array:
        """Reads the data that this weight was allocated from, which becomes its value."""
        # A copy: JAX on a CPU would share memory the user can write to.
        host = fitting(np.array(self.weight._source))
        with jax.ensure_compile_time_eval():
            value = self.to_leaf(host)
            self.weight._put(value)
        self.weight._source = None
        return value

    def _no_value(self) -> str:
        return self.no_value(
            RUNNING.name_of(self.weight),
            "has no value: load one with load_state_dict(), make one with maxjax.init(), "
            "or pass the model as an argument of jax.eval_shape or jax.jit (no parent graph)",
        )

    # -- sharding

    def moved(
        self, sharding: Any, layout: DeviceMajor | None, name: str, split: tuple[str, ...] = ()
    ) -> Any:
        """The value converted to another Sharding; None if there is no value or a stack holds it.

        Args:
            split: mesh axes that the Weights of a stack are distributed over; () for a single Weight.
        """
        if self.weight._home is not None or self.is_lazy:
            return None
        return relaid(self.weight._own, sharding, self.weight._layout, layout, name)

    def settle(
        self, sharding: Any, why: str, layout: DeviceMajor | None, moved: Any, split: tuple[str, ...] = ()
    ) -> None:  # fmt: skip
        """Adopts a new sharding, with the result of :meth:`moved` for it."""
        w = self.weight
        w._sharding, w._why, w._layout = sharding, why, layout
        if moved is not None:
            w._put(moved)
        elif w._home is None:
            w._put(self.blank())
        structure_changed()


# --- as a pytree of one leaf -----------------------------------------------------------------


def register(cls: type) -> None:
    """Registers a class of Weights as pytrees."""

    def flatten_with_keys(w: Any):
        return ((jax.tree_util.GetAttrKey("value"), leaf_for_jax(w)),), _Definition(w)

    def flatten(w: Any):
        return (leaf_for_jax(w),), _Definition(w)

    def unflatten(definition: _Definition, leaves: Any) -> Any:
        weight = definition.weight
        return around(weight, leaves[0], weight._full_name)

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


class _Definition:
    """The treedef data of a Weight alone: equal if everything except value and full name is.

    It includes whether operators return arrays or TensorValues, so that these never share a trace.
    """

    __slots__ = ("key", "weight")

    def __init__(self, weight: Any):
        self.key = (KIND.values, weight.stored.static())
        # A copy without its value: a treedef must not keep arrays alive.
        self.weight = around(weight, None, weight._full_name)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Definition) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Weight({self.weight._local_name})"
