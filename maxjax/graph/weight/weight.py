"""Weight: a named, possibly lazy tensor that a Module owns.

The Weight holds the value. Everything else that JAX compares is its :class:`WeightSpec`. Where the value is:

=====================  =========================================================================================
a Weight               its *leaf*, the entry in a pytree: an array, or a ``jax.ShapeDtypeStruct`` while it is lazy
a layer of a stack     the leaf of its :class:`StackedWeight`, ``[n, ...]``; the Weight is a view ``(stack, number)``
a part (``shard``)     it is computed from the leaf of the *host*, the whole Weight, at each use
data not read yet      ``source``, which :meth:`Weight.read` makes the leaf
quantised              the leaf has the file's bytes, ``[out, bytes]``
=====================  =========================================================================================

An operation reads in this order: :attr:`~Weight.leaf`, :meth:`~Weight.array` (read if necessary; in a Graph, a
tracer), :meth:`~Weight.gathered_array` (with the sharding that operations need), and the array in logical order.
:meth:`~Weight.operand` is what ``kernels.matmul`` takes.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from ...dtype import DType
from ...kernels import QuantArray, StackSlice, explicit
from ...kernels.stack_slice import stack_of
from ..device import DeviceRef, on_device
from ..kind import KIND, to_value, value_class
from ..operands import check_indices, fitting
from ..operators import Operators
from ..placement.arrays import as_used, is_usable_in_place, put
from ..placement.specs import used_split
from ..placement.split import Split
from ..placement.strategy import ShardingStrategy as ShardingStrategy
from ..placement.strategy import shard_shape
from ..quantization import QuantizationEncoding
from ..shape import Shape, StaticDim
from ..tensor_type import TensorType
from .epoch import structure_changed, values_changed
from .rows import OfWeight
from .running import RUNNING
from .spec import WeightSpec, checked_strategy, is_value
from .transpose import WeightTranspose

# The leaf of a Weight; flattening a Module reads each.
leaf_of = attrgetter("leaf")


class Weight(OfWeight, Operators):
    """A named tensor of a model, lazy until a value is loaded.

    Args:
        name: name within the layer that owns it, such as ``"weight"`` or ``"q.weight"``.
        dtype: element type: a DType, or anything that converts to one.
        shape: sizes; a string is a symbolic dimension.
        device: device that MAX would use. It is only recorded; see ``Module.to``.
        quantization_encoding: block format of quantised weights, or None. Matmuls and look-ups
            dequantise; as an array the Weight is its bytes (MAX's view), while ``logical_shape``
            is the shape of the values.
        align: alignment in bytes required of loaded values; None means the dtype's own.
        sharding_strategy: how the Weight is split over devices.

    Attributes:
        name: full name from the latest state dict; before that, the local name.
        value: array, or None while lazy. Assign an array to fill it.

    Raises:
        TypeError: an argument is missing, or the shape is not a sequence.
        ValueError: a size is negative, or the Weight is used as an array while it has no value.

    A Weight is a pytree with one leaf and works in jnp functions, operators and
    indexing; ``jax.lax`` functions need ``w.value``. ``x @ w.T`` is the fast matmul
    of a linear layer. ``==`` between Weights compares identity.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import DeviceRef, Weight
        >>> w = Weight("weight", "float32", (2, 3), DeviceRef.CPU())
        >>> w, w.value is None
        (Weight(weight, DType.float32, [Dim(2), Dim(3)], cpu:0), True)
        >>> w.value = jnp.ones((2, 3))
        >>> (jnp.ones((4, 3)) @ w.T).shape
        (4, 2)
    """

    _spec: WeightSpec
    _leaf: Any
    # For a view of a stack: the StackedWeight, and the number in it.
    home: tuple[Any, int] | None = None
    _full_name: str | None = None
    _renamed = False
    _original: tuple[DType, Shape] | None = None
    # Data of a checkpoint that has not been read yet (Weights.allocate).
    source: Any = None
    # Shape of the tensor that it was loaded from, if different.
    loaded_shape: tuple[int, ...] | None = None

    def __init__(
        self,
        name: str,
        dtype: Any,
        shape: Iterable[Any],
        device: DeviceRef,
        quantization_encoding: QuantizationEncoding | None = None,
        align: int | None = None,
        sharding_strategy: Any = None,
        _placeholder: bool = False,
        _has_alias: bool = False,
    ):
        self._spec = WeightSpec(
            type(self),
            name,
            DType.of(dtype),
            tuple(Shape(shape)),
            device,
            quantization_encoding,
            align,
            checked_strategy(sharding_strategy),
        )
        self._leaf = self._spec.blank()

    # -- what it was declared as

    @property
    def spec(self) -> WeightSpec:
        """Everything except the value and the full name."""
        home = self.home
        return self._spec if home is None else home[0].spec.layer

    def declare(self, what: str, **changes: Any) -> None:
        """Change some attributes of the spec; ``what`` names them in an error.

        Raises:
            ValueError: the Weight belongs to a layer of a stack, where layers cannot differ.
        """
        self.refuse_in_stack(what)
        self.change(**changes)

    def change(self, **changes: Any) -> None:
        """Change attributes of the spec, for a layer of a stack those of all layers."""
        holder = self if self.home is None else self.home[0]
        spec = replace(holder._spec, **changes)
        if spec != holder._spec or spec.why != holder._spec.why:
            holder._spec = spec
            structure_changed()

    def refuse_in_stack(self, what: str) -> None:
        """Check that the Weight is not in a stack, where layers cannot differ.

        Raises:
            ValueError: the Weight belongs to a layer of a stack.
        """
        if self.home is not None:
            raise ValueError(
                f"weight '{self.name}' belongs to a LayerStack and cannot have {what} of its own: "
                "layers.unstack() first"
            )

    @property
    def name(self) -> str:
        """The full name from the latest state dict; before that, the local name."""
        return self._full_name or self.spec.local_name

    @name.setter
    def name(self, name: str) -> None:
        self.declare("a name", local_name=name)
        self._full_name, self._renamed = None, True

    def finalise(self, name: str) -> None:
        """Record the full name. The state dict of a child does not shorten a name from that of its parent."""
        known = self._full_name
        if known is None or not known.endswith(f".{name}"):
            self._full_name, self._renamed = name, False

    @property
    def is_renamed(self) -> bool:
        """Whether ``name`` was set after the latest state dict, if there was one."""
        return self._renamed and self.home is None

    @property
    def dtype(self) -> DType:
        """The element type: the value's, or the declared one while there is none."""
        leaf = self.leaf
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or type(leaf) is jax.ShapeDtypeStruct:
            return self.spec.dtype
        return DType.of(dtype)

    @property
    def shape(self) -> Shape:
        """The logical shape, a new Shape at each access."""
        spec, sizes = self.spec, getattr(self.leaf, "shape", None)
        if sizes is None or not spec.is_static or spec.spans:
            return Shape(spec.dims)
        if spec.layout is not None or isinstance(spec.sharding, jax.sharding.NamedSharding):
            return Shape(spec.dims)  # the leaf may be a part, or have another order
        return Shape(sizes)

    @property
    def logical_shape(self) -> Shape:
        """The shape of the values: for quantised bytes, the shape of the values they encode.

        Example:
            >>> from maxjax.graph import DeviceRef
            >>> from maxjax.graph.quantization import QuantizationEncoding
            >>> w = Weight("w", "uint8", (4, 144), DeviceRef.CPU(), QuantizationEncoding.Q4_K)
            >>> w.shape, w.logical_shape
            ([Dim(4), Dim(144)], [Dim(4), Dim(256)])
        """
        return self.shape if self.spec.packing is None else self.spec.logical_shape

    @property
    def rank(self) -> int:
        """The number of axes."""
        spec = self.spec
        return len(spec.dims) if spec.layout else getattr(self.leaf, "ndim", len(spec.dims))

    @property
    def device(self) -> DeviceRef:
        """The device it was declared on."""
        return self.spec.device

    @property
    def type(self) -> TensorType:
        """The dtype, shape and device."""
        return TensorType(self.dtype, self.shape, self.device)

    @property
    def original_dtype_and_shape(self) -> tuple[DType, Shape]:
        """Dtype and shape before an encoding changed them to bytes; by default the present ones."""
        return self._original or (self.dtype, self.shape)

    @original_dtype_and_shape.setter
    def original_dtype_and_shape(self, value: tuple[DType, Shape]) -> None:
        self._original = value

    @property
    def quantization_encoding(self) -> QuantizationEncoding | None:
        """The block format of quantised bytes, or None."""
        return self.spec.encoding

    @quantization_encoding.setter
    def quantization_encoding(self, encoding: QuantizationEncoding | None) -> None:
        self.declare("an encoding", encoding=encoding)

    @property
    def activations(self) -> str:
        """The form in which CPU kernels use the activations beside a quantised weight: "int8" or "float"."""
        return self.spec.activations

    @property
    def align(self) -> int | None:
        """Alignment in bytes required of loaded values; None means the dtype's own."""
        return self.spec.align

    @align.setter
    def align(self, align: int | None) -> None:
        self.declare("an alignment", align=align)

    # -- sharding

    @property
    def sharding_strategy(self) -> Any:
        """How the Weight is split over devices, or None. Setting it declares the CPU as device, as in MAX."""
        return self.spec.strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: Any) -> None:
        self.refuse_in_stack("a strategy")
        self.change(strategy=checked_strategy(strategy), device=DeviceRef.CPU())

    def shard(self, devices: Iterable[DeviceRef]) -> list[Weight]:
        """One Weight for each device: views of the parts that the sharding strategy defines.

        This Weight needs no value yet. A part has no value of its own: it is computed from the value of
        this Weight at each use, and moved to its device if this process has devices of that kind.

        Raises:
            ValueError: there is no strategy, it is for fewer devices, or this Weight is itself a
                shard.
            IndexError, ValueError, TypeError: the strategy does not fit the shape.

        Example:
            >>> from maxjax.graph import DeviceRef, ShardingStrategy, Weight
            >>> w = Weight("w", "float32", (5, 2), DeviceRef.CPU(), sharding_strategy=ShardingStrategy.rowwise(2))
            >>> w.shard([DeviceRef.GPU(0), DeviceRef.GPU(1)])
            [Weight(w[0], DType.float32, [Dim(3), Dim(2)], gpu:0), Weight(w[1], DType.float32, [Dim(2), Dim(2)], gpu:1)]
        """
        if self.sharding_strategy is None:
            raise ValueError(
                f"Weight {self.name} cannot be sharded because no sharding strategy was specified."
            )
        devices = list(devices)
        if isinstance(self.sharding_strategy, ShardingStrategy):
            self.sharding_strategy.check_devices(len(devices), f"weight '{self.name}'")
        return [Shard(self, i, device) for i, device in enumerate(devices)]

    @property
    def shard_idx(self) -> int | None:
        """The number of the part, if this Weight is a part of another one."""
        return self.spec.shard_idx

    @property
    def sharding(self) -> Any:
        """The jax Sharding that ``Module.to`` set; None if the array lies where JAX or ``device_put`` put it."""
        return self.spec.sharding

    def moved(self, spec: WeightSpec, name: str) -> Any:
        """Return the leaf for a spec with another sharding and layout; the Weight is not changed."""
        return spec.blank() if self.is_lazy else spec.relaid(self._leaf, self.spec, name)

    # -- the leaf

    @property
    def leaf(self) -> Any:
        """The leaf in a pytree: an array, a placeholder, or a slice of a stack."""
        home = self.home
        return self._leaf if home is None else home[0].leaf_of(home[1])

    def put(self, leaf: Any) -> None:
        """Set the leaf itself."""
        if self.home is None:
            self._leaf = leaf
            values_changed()  # Modules cache the lists of their leaves
        else:
            self.home[0].put_many({self.home[1]: leaf})

    @property
    def weights(self) -> list[Weight]:
        """The Weights whose values the leaf holds: of a stack, those of its layers."""
        return [self]

    @property
    def is_lazy(self) -> bool:
        """Whether there is no value yet; there may be data to read it from."""
        return not is_value(self.leaf)

    @property
    def is_missing(self) -> bool:
        """Whether there is neither a value nor checkpoint data to read."""
        return self.source is None and self.is_lazy

    def redeclare(self, dtype: DType, dims: Iterable[Any], encoding: Any) -> None:
        """Set dtype, shape and encoding, of all Weights if it is a stack, and drop the value."""
        self.declare(
            "another shape or dtype", dtype=dtype, dims=tuple(Shape(dims)), encoding=encoding
        )
        self.put(self.spec.blank())

    @property
    def file_shape(self) -> tuple[int, ...] | None:
        """The shape of the file's tensor, where it is another than that of the value; otherwise None."""
        form = self.spec.form
        return self.loaded_shape if form is None or form.shape is None else form.shape

    def to_file(self, value: Any) -> Any:
        """Return a value in the form and shape of the file's tensor that it was loaded from."""
        form, shape = self.spec.form, self.file_shape
        if form is not None and form.elementwise:
            value = form.to_file(value)
        elif form is not None and not isinstance(value, Tracer):
            # It is never split: each device has all of it.
            parts = getattr(value, "addressable_shards", ())
            return form.to_file(np.asarray(parts[0].data if parts else value))
        if shape is None:
            return value
        if isinstance(value, jax.Array) and (mesh := explicit.mesh_of(value)) is not None:
            rows = [*explicit.entries(value), ()][0]  # elements in order can be split by rows only
            wanted = [rows, *[()] * len(shape)][: len(shape)]
            return explicit.automatic(lambda a: a.reshape(shape), mesh, wanted)(value)
        return value.reshape(shape)

    # -- the value

    @property
    def value(self) -> Any:
        """The array, or None while the weight is lazy; inside a Graph, its tracer."""
        tracer = standing_for(self)
        return self.stored_value() if tracer is None else self.spec.logical(tracer)

    def stored_value(self) -> Any:
        """Return the array in logical order, None while it is lazy; also inside a Graph."""
        leaf = self.leaf
        if type(leaf) is StackSlice:
            leaf = leaf.__jax_array__()
        return None if type(leaf) is jax.ShapeDtypeStruct else self.spec.logical(leaf)

    @value.setter
    def value(self, value: Any) -> None:
        if value is None:
            self.put(self.spec.blank())
        elif type(value) is jax.ShapeDtypeStruct:
            self.declare(
                "another shape or dtype", dtype=DType.of(value.dtype), dims=tuple(Shape(value.shape)),
                sharding=value.sharding, layout=None,
            )  # fmt: skip
            self.put(self.spec.blank())
        elif isinstance(value, jax.Array):
            RUNNING.warn_of_lost(self, value)
            self._set(value)
        elif isinstance(value, (np.ndarray, np.generic)):
            value = np.asanyarray(value)
            native = value.astype(DType.of(value.dtype).np, copy=False)  # of either byte order
            with outside_traces():
                self._set(jnp.array(fitting(native)))
        elif hasattr(value, "__jax_array__"):
            self._set(jnp.array(value))
        else:
            raise TypeError(
                f"the value of weight '{self.name}' must be an array of JAX or NumPy, not "
                f"{type(value).__name__}; load_state_dict() takes those of other libraries"
            )

    def _set(self, value: Any) -> None:
        spec, shape = self.spec, tuple(value.shape)
        known = [n if type(d) is str else d for d, n in zip(spec.sizes, shape, strict=False)]
        if len(shape) != len(spec.sizes) or list(shape) != known:
            raise ValueError(
                f"the value of weight '{self.name}' must have shape {spec.sizes}, not {shape}"
            )
        dtype = DType.of(value.dtype)
        other = jax.dtypes.canonicalize_dtype(spec.dtype.np) != dtype.np
        if other:
            self.refuse_in_stack("another dtype")
        if spec.sharding is not None:
            with outside_traces(value):
                value = self.to_leaf(value)
        self.put(value)
        self.loaded_shape = self.source = None
        if other:
            self.change(dtype=dtype)

    def to_leaf(self, value: Any) -> Any:
        """Return a value in logical order, converted to the stored order and put on its sharding."""
        if self.spec.layout is not None and getattr(value, "is_fully_addressable", False):
            value = np.asarray(value)
        return put(self.spec.arranged(value), self.spec.leaf_sharding, self.name)

    def read(self) -> jax.Array:
        """Read the data that this weight was allocated from, which becomes its value."""
        with _READING:
            if is_value(leaf := self.leaf):  # another thread has read it, or set a value
                return leaf
            if self.source is None:
                raise ValueError(self._no_value())
            # A copy: JAX on a CPU would share memory the user can write to.
            host = fitting(np.array(self.source))
            with jax.ensure_compile_time_eval():
                value = self.to_leaf(host)
                self.put(value)
            self.source = None
            return value

    def array(self) -> Any:
        """Return the stored array, read now if necessary; inside a Graph, its tracer."""
        tracer = standing_for(self)
        if tracer is not None:
            return tracer
        leaf = self.leaf
        if not is_value(leaf):
            leaf = self.read()
        return leaf.__jax_array__() if type(leaf) is StackSlice else leaf

    def gathered_array(self, gathered: bool = True) -> Any:
        """Return the stored array in a form that operations can use; see ``placement/arrays.py``.

        Args:
            gathered: whether a weight that is split over ``fsdp`` is gathered.
        """
        spec, array = self.spec, self.array()
        if spec.sharding is None:
            return array
        return as_used(array, spec.leaf_shape, spec.leaf_sharding, gathered)

    def operand(self, gathered: bool = True) -> Any:
        """Return the operand for ``kernels.matmul``: quantised weights and slices of stacks stay as they are.

        Args:
            gathered: whether a weight that is split over ``fsdp`` is gathered.
        """
        leaf, spec = self.leaf, self.spec
        if isinstance(leaf, jax.Array) and spec.is_plain and not RUNNING.graphs:
            return leaf
        operand = leaf if gathered and self._is_in_place(leaf) else self._as_array(gathered)
        if spec.packing is None:
            return operand
        return QuantArray(operand, spec.packing.value, spec.activations, self._division())

    def _division(self) -> explicit.Division | None:
        """How a mesh divides the weight ``[out, in]``, but for ``fsdp``, over which it is gathered."""
        where = self.sharding
        if not isinstance(where, NamedSharding) or where.mesh.size == 1 or len(self.shape) != 2:
            return None
        return explicit.Division.of(where.mesh, [used_split(self, axis) for axis in (0, 1)])

    def __kernel_operand__(self) -> Any:
        return self.operand()

    def _is_in_place(self, leaf: Any) -> bool:
        """Whether a kernel can read the leaf where it lies in a stack."""
        spec = self.spec
        if (
            type(leaf) is not StackSlice
            or spec.layout is not None
            or standing_for(self) is not None
        ):
            return False
        return spec.sharding is None or is_usable_in_place(
            leaf, spec.leaf_shape, spec.leaf_sharding
        )

    def no_value(self, name: str, advice: str) -> str:
        """Return the message of an error for a weight without a value.

        A weight that has not even a placeholder, of a shape that is known, is one that ``maxjax.partition`` left out.

        Args:
            name: name of the weight.
            advice: the message for a weight that ``maxjax.partition`` has not left out, after the name.
        """
        if self.leaf is None and self.spec.is_static:
            advice = (
                "has no value here: it is in the other half that maxjax.partition returned. "
                "maxjax.merge(first, second) returns a model with both"
            )
        return f"weight '{name}' {advice}"

    def _no_value(self) -> str:
        return self.no_value(
            RUNNING.name_of(self),
            "has no value: load one with load_state_dict(), make one with maxjax.init(), "
            "or pass the model as an argument of jax.eval_shape",
        )

    # -- as an array: the operators and methods of jax.Array, or of MAX's values where they are wanted (kind.py)

    def _as_array(self, gathered: bool = True) -> jax.Array:
        return self.spec.logical(self.gathered_array(gathered))

    @property
    def _wraps(self) -> bool:
        """Whether results are TensorValues if no other operand decides."""
        return KIND.values

    def _result(self, array: Any) -> Any:
        return to_value(array) if KIND.values else array

    @staticmethod
    def _binary(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        if KIND.values:
            return function(*(to_value(x) if isinstance(x, Weight) else x for x in (a, b)))
        if not (isinstance(a, _OPERANDS) and isinstance(b, _OPERANDS)):
            return NotImplemented
        return function(*(x._as_array() if isinstance(x, Weight) else x for x in (a, b)))

    @staticmethod
    def _matmul(a: Any, b: Any) -> Any:
        return Weight._binary(operator.matmul, a, b)

    def _unary(self, function: Callable[[Any], Any]) -> Any:
        return self._result(function(self._as_array()))

    @property
    def tensor(self) -> Weight:
        """This Weight itself: in MAX it is a TensorValue."""
        return self

    @property
    def T(self) -> Any:
        """The transpose as a view: ``x @ w.T`` calls ``kernels.matmul`` without transposing.

        Where Weights give TensorValues it is a TensorValue, with the last two axes swapped.
        """
        self.array()  # raises if there is no value
        if not KIND.values:
            return WeightTranspose(self)
        return value_class().transposed(self) if self.rank == 2 else to_value(self).T

    def transpose(self, *axes: Any) -> Any:
        """With two axes, both swapped, as in MAX; otherwise ``jax.Array.transpose``.

        Raises:
            IndexError: there is no such axis.
        """
        if KIND.values or (len(axes) == 2 and self.rank >= 2):
            return super().transpose(*axes)
        return self._as_array().transpose(*axes)

    def __getattr__(self, name: str) -> Any:
        """A method of jax.Array, or of MAX's TensorValue where it is wanted or jax.Array has none."""
        if name in _METHODS and not KIND.values:
            return getattr(self._as_array(), name)
        if name in _METHODS or name in _MAX_METHODS:
            return getattr(to_value(self), name)
        raise AttributeError(f"'Weight' object has no attribute '{name}'", name=name, obj=self)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, also while there is no value."""
        return self.size * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.size_in_bytes

    def __len__(self) -> int:
        """The size of the first axis, also while there is no value.

        Raises:
            TypeError: there is no axis, or its size is not known.
        """
        if not self.rank:
            raise TypeError("len() of a weight without axes")
        return int(self.shape[0])

    def __getitem__(self, key: Any) -> Any:
        if KIND.values:
            return to_value(self)[key]
        array = self._as_array()
        check_indices(key if isinstance(key, tuple) else (key,), array.shape)
        try:
            return array[key]
        except Exception as error:
            if type(error).__name__ != "ShardingTypeError":
                raise
        # JAX cannot slice a sharded axis of an array with Explicit axes, so it is replicated first.
        return explicit.automatic(lambda a: a[key], explicit.mesh_of(array), [])(array)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Raises TypeError: JAX's arrays cannot be changed in place."""
        raise TypeError(
            f"weight '{self.name}' cannot be changed in place: assign a new array, "
            "weight.value = weight.value.at[0].set(1)"
        )

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, Weight):
            return self is other
        if isinstance(other, (jax.Array, np.ndarray, np.generic, int, float, complex)):
            if KIND.values:
                return to_value(self) == other
            return self._as_array() == jnp.asarray(other)
        return NotImplemented

    def __ne__(self, other: Any) -> Any:
        equal = self.__eq__(other)
        if equal is NotImplemented:
            return NotImplemented
        return not equal if isinstance(equal, bool) else ~equal

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return True

    # -- copies

    def like(self, leaf: Any, name: str | None = None) -> Weight:
        """Return a Weight of the same declaration around ``leaf``, which is not inspected."""
        spec = self.spec
        new = object.__new__(spec.cls)
        vars(new).update(
            vars(self), _spec=spec, _leaf=leaf, home=None, _full_name=name, _renamed=False,
            _original=None, loaded_shape=None, source=None,
        )  # fmt: skip
        return new

    def __getstate__(self) -> dict[str, Any]:
        """The state without the sharding, which belongs to the devices of this process."""
        if self.home is not None or self._spec.sharding is None:
            return dict(vars(self))
        free = self._spec.unplaced()
        leaf = free.blank() if self.is_lazy else self._spec.logical(self._leaf)
        return {**vars(self), "_spec": free, "_leaf": leaf}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.home is not None:
            stack, number = self.home
            views = vars(stack).setdefault("_views", weakref.WeakValueDictionary())
            views.setdefault((number, bool(self.spec.spans)), self)

    def __copy__(self) -> Weight:
        new = object.__new__(type(self))
        new.__setstate__(dict(vars(self)))
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        new = memo[id(self)] = object.__new__(type(self))
        state = {k: v for k, v in vars(self).items() if k != "_views"}
        with outside_traces(self.leaf, self._leaf):
            state = {
                k: v if k in _SHARED or type(v) is jax.ShapeDtypeStruct else copy.deepcopy(v, memo)
                for k, v in state.items()
            }
        new.__setstate__(state)
        return new

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _register(cls)


# Held while data of a checkpoint become a Weight's value, so that they do not replace one that was set meanwhile.
_READING = threading.RLock()
# Attributes that a copy shares with the Weight. (The shardings of placeholders cannot be copied.)
_SHARED = ("_spec", "_host_spec", "source")
_OPERANDS = (Weight, jax.Array, np.ndarray, np.generic, StaticDim, int, float, complex)
# Methods of jax.Array that MAX's values also have, and compute differently.
_METHODS = frozenset({"max", "min", "mean", "var", "argmax", "squeeze"})
_MAX_METHODS = frozenset(
    "cast permute broadcast_to unsqueeze rebind to print to_numpy stdev".split()
)


# --- as a pytree of one leaf ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Definition:
    """The treedef data of a Weight alone: equal if everything except value and full name is.

    It includes whether operators return arrays or TensorValues, so that these never share a trace.
    """

    kind: int
    spec: WeightSpec
    # A copy without its value: a treedef must not keep arrays alive.
    template: Weight = field(compare=False)

    @classmethod
    def of(cls, weight: Weight) -> _Definition:
        return cls(KIND.now, weight.spec, weight.like(None, weight._full_name))

    def __repr__(self) -> str:
        return f"Weight({self.spec.local_name})"


def _register(cls: type) -> None:
    def flatten_with_keys(w: Any):
        return ((jax.tree_util.GetAttrKey("value"), leaf_for_jax(w)),), _Definition.of(w)

    def flatten(w: Any):
        return (leaf_for_jax(w),), _Definition.of(w)

    def unflatten(definition: _Definition, leaves: Any) -> Any:
        return definition.template.like(leaves[0], definition.template._full_name)

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


_register(Weight)


class Shard(Weight):
    """A view of a part of another Weight, which holds the value. ``Weight.shard`` creates it.

    Attributes:
        shard_idx: index of the part.
        host: Weight that it is a part of.
    """

    # The spec of the host for which this one's was made.
    _host_spec: WeightSpec | None = None

    def __init__(self, host: Weight, i: int, device: DeviceRef):
        super().__init__(
            f"{host.name}[{i}]", host.dtype, (), device, None, None, host.sharding_strategy
        )
        # Alone, as a leaf of a pytree, a shard becomes a plain Weight of the part.
        self._spec = replace(self._spec, cls=Weight, shard_idx=i)
        self.host = host
        _ = self.spec  # raises an error if the strategy does not fit the shape

    @property
    def spec(self) -> WeightSpec:
        """The declaration of the part, which follows that of the host: it may be quantised, for example."""
        host, own = self.host, self._spec
        if host is not None and host.spec is not self._host_spec:
            part = with_values(own.strategy)
            dims = shard_shape(part, host.spec.sizes, own.shard_idx or 0, host.dtype.np)
            self._host_spec = host.spec
            self._spec = replace(
                own, dtype=host.dtype, dims=tuple(Shape(dims)), encoding=host.spec.encoding,
                align=host.spec.align, activations=host.spec.activations,
            )  # fmt: skip
        return self._spec

    def of(self, host: Weight | None) -> Shard:
        """Return the same part of another Weight."""
        new = object.__new__(Shard)
        vars(new).update(vars(self), host=host)
        return new

    @property
    def leaf(self) -> Any:
        """The part of the value; its placeholder while there is none."""
        return self.spec.blank() if self.host.is_missing else self._as_array()

    @property
    def shape(self) -> Any:
        """The shape of the part."""
        return Shape(self.spec.dims)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.spec.dims)

    @property
    def dtype(self) -> Any:
        """The element type, that of the host."""
        return self.host.dtype

    def _as_array(self, gathered: bool = True) -> jax.Array:
        part = with_values(self.sharding_strategy)(self.host._as_array(), self.shard_idx)
        return on_device(part, self.device)

    def put(self, leaf: Any) -> NoReturn:
        """Raises an error: a shard has no value of its own.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"weight '{self.name}' is a shard: set the value of '{self.host.name}'")

    def _set(self, value: Any) -> None:
        self.put(value)

    def shard(self, devices: Iterable[DeviceRef]) -> list[Weight]:
        """Raises an error: a shard cannot be split again.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"Weight '{self.name}' was already sharded. Use __getitem__ instead.")

    def like(self, leaf: Any, name: str | None = None) -> Weight:
        """Return a plain Weight of the part."""
        new = super().like(leaf, name)
        del vars(new)["host"]
        vars(new).pop("_host_spec", None)
        return new


def with_values(strategy: ShardingStrategy) -> Any:
    """The strategy; if its rule is a user's function, one that passes it a TensorValue, as MAX does.

    Example:
        >>> import jax.numpy as jnp
        >>> strategy = ShardingStrategy(2, lambda weight, i, n: weight.permute([1, 0])[i])
        >>> with_values(strategy)(jnp.ones((3, 2)), 0).shape
        (3,)
    """
    rule = strategy.shard
    if isinstance(rule, Split):
        return strategy
    return ShardingStrategy(
        strategy.num_devices, lambda array, i, n: jnp.asarray(rule(to_value(array), i, n))
    )


# --- in traces and in Graphs --------------------------------------------------------------------


def outside_traces(*leaves: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which arrays that are computed from leaves belong to no running trace, unless a leaf is traced.

    Args:
        leaves: leaves, or dicts of leaves.
    """
    each = [leaf.values() if isinstance(leaf, dict) else (leaf,) for leaf in leaves]
    is_traced = any(isinstance(stack_of(leaf), Tracer) for some in each for leaf in some)
    return contextlib.nullcontext() if is_traced else jax.ensure_compile_time_eval()


def standing_for(weight: Weight) -> Any:
    """Return the tracer of a Weight in the Graph being built; None outside of a Graph."""
    graphs = RUNNING.graphs
    if not graphs:
        return None
    home = weight.home
    if home is not None and RUNNING.is_below(home[0]):
        stack = standing_for(home[0])
        levels = len(weight.spec.spans)
        return None if stack is None else home[0].cut(stack, home[1], levels).__jax_array__()
    return None if isinstance(stack_of(weight.leaf), Tracer) else graphs[-1].argument(weight)


def leaf_for_jax(weight: Weight) -> Any:
    """Return the leaf of a Weight as a pytree; in a Graph being built, what stands for it there.

    So ``jnp.exp(weight)`` in a Graph reads the value that the program is called with.
    """
    if not RUNNING.graphs:
        return weight.leaf
    with RUNNING.graphs[-1].taking_leaves():
        standing = standing_for(weight)
    return weight.leaf if standing is None else standing
