"""Weight: a named, possibly lazy tensor that a Module owns.

The Weight holds the value: a ``jax.ShapeDtypeStruct`` until it is loaded, then an array.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ...dtype import DType
from ...kernels import explicit
from ..device import DeviceRef, on_device
from ..kind import KIND
from ..operands import fitting
from ..placement.device_major import DeviceMajor
from ..placement.strategy import ShardingStrategy as ShardingStrategy
from ..placement.strategy import shard_shape
from ..quantization import QuantizationEncoding
from ..shape import Shape, StaticDim
from ..value import TensorValue, unwrap
from .epoch import structure_changed, values_changed
from .methods import Methods, checked, with_values
from .rows import OfWeight
from .running import RUNNING
from .stored import StoredWeight, copied, outside_traces, register, standing_for
from .transpose import TransposedValue, WeightTranspose

# Attributes that a copy shares with the Weight.
_SHARED = ("_sharding", "_layout", "_sharding_strategy", "_source")


class Weight(OfWeight, Methods):
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

    _dtype: DType
    _dims: tuple[Any, ...]
    _own: Any
    _activations: str = "float"
    _form: Any = None  # how a file holds the value, if differently

    @property
    def _wraps(self) -> bool:  # type: ignore[override]
        """Whether results are TensorValues if no other operand decides."""
        return KIND.values

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
        self._local_name, self._renamed = name, False
        self._full_name: str | None = None
        self._device = device
        self._quantization_encoding = quantization_encoding
        self._align = align
        self._sharding_strategy = checked(sharding_strategy)
        self._sharding: Any = None
        self._why = ""  # reason for its sharding
        # Order of the stored rows if it is not the logical one; the leaf then has another shape.
        self._layout: DeviceMajor | None = None
        self._flags = (_placeholder, _has_alias)
        self._original: tuple[DType, Shape] | None = None
        self._loaded_shape: tuple[int, ...] | None = None
        # Data of a checkpoint that has not been read yet (Weights.allocate).
        self._source: Any = None
        # For a layer of a LayerStack: the StackedWeight that holds the value, and the number in it.
        self._home: tuple[Any, int] | None = None
        self.shard_idx: int | None = None
        self.stored.declare(DType.of(dtype), tuple(Shape(shape)))

    @property
    def stored(self) -> StoredWeight:
        """The stored data with its sharding and layout, for code that loads, places and saves weights."""
        return StoredWeight(self)

    # -- what it was declared as

    @property
    def _leaf(self) -> Any:
        """The leaf in a pytree: an array, a placeholder, or a slice of a stack."""
        home = self._home
        return self._own if home is None else home[0].leaf_of(home[1])

    def _put(self, leaf: Any) -> None:
        """Every change of the leaf goes through here: Modules cache the lists of their leaves."""
        if self._home is None:
            self._own = leaf
            values_changed()
        else:
            self._home[0].put_many({self._home[1]: leaf})

    @property
    def _plain(self) -> tuple[type[Weight], dict[str, Any]]:
        """The class and state for a copy of this Weight."""
        return type(self), vars(self)

    def _around(self, leaf: Any, name: str | None) -> Weight:
        kind, state = self._plain
        new = object.__new__(kind)
        new.__dict__.update(
            state,
            _own=leaf,
            _home=None,
            _full_name=name,
            _loaded_shape=None,
            _source=None,
        )
        return new

    @property
    def name(self) -> str:
        """The full name from the latest state dict; before that, the local name."""
        return self._full_name or self._local_name

    @name.setter
    def name(self, name: str) -> None:
        self.stored.refuse_in_stack("a name")
        self._local_name, self._full_name, self._renamed = name, None, True
        structure_changed()

    @property
    def dtype(self) -> DType:
        """The element type: the value's, or the declared one while there is none."""
        dtype = getattr(self._leaf, "dtype", None)
        if dtype is None or type(self._leaf) is jax.ShapeDtypeStruct:
            return self._dtype
        return DType.of(dtype)

    @property
    def shape(self) -> Shape:
        """The logical shape, a new Shape at each access."""
        leaf = self._leaf
        sizes = getattr(leaf, "shape", None)
        if sizes is None or any(not isinstance(d, StaticDim) for d in self._dims):
            return Shape(self._dims)
        if self._layout is not None or isinstance(self._sharding, jax.sharding.NamedSharding):
            return Shape(self._dims)  # the leaf may be a part, or have another order
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
        shape, encoding = Shape(self._dims), self.stored.packing
        if encoding is None:
            return self.shape
        return Shape(encoding.logical_shape([*shape[:-1], int(shape[-1])]))  # type: ignore[list-item]

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self._dims) if self._layout else getattr(self._leaf, "ndim", len(self._dims))

    @property
    def device(self) -> DeviceRef:
        """The device it was declared on."""
        return self._device

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
        return self._quantization_encoding

    @quantization_encoding.setter
    def quantization_encoding(self, encoding: QuantizationEncoding | None) -> None:
        self.stored.refuse_in_stack("an encoding")
        self._quantization_encoding = encoding
        structure_changed()

    @property
    def activations(self) -> str:
        """The form in which CPU kernels use the activations beside a quantised weight: "int8" or "float"."""
        return self._activations

    @property
    def align(self) -> int | None:
        """Alignment in bytes required of loaded values; None means the dtype's own."""
        return self._align

    @align.setter
    def align(self, align: int | None) -> None:
        self.stored.refuse_in_stack("an alignment")
        self._align = align
        structure_changed()

    @property
    def sharding_strategy(self) -> Any:
        """How the Weight is split over devices, or None. Setting it declares the CPU as device, as in MAX."""
        return self._sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: Any) -> None:
        self.stored.refuse_in_stack("a strategy")
        self._sharding_strategy = checked(strategy)
        self._device = DeviceRef.CPU()
        structure_changed()

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
    def sharding(self) -> Any:
        """The jax Sharding that ``Module.to`` set; None if the array lies where JAX or ``device_put`` put it."""
        return self._sharding if self._home is None else self._home[0].template._sharding

    # -- the value

    @property
    def value(self) -> Any:
        """The array, or None while the weight is lazy; inside a Graph, its tracer."""
        tracer = standing_for(self)
        return self.stored.value if tracer is None else self.stored.logical(tracer)

    @value.setter
    def value(self, value: Any) -> None:
        if value is None:
            self._put(self.stored.blank())
        elif type(value) is jax.ShapeDtypeStruct:
            self.stored.refuse_in_stack("another shape or dtype")
            self._sharding, self._layout = value.sharding, None
            self.stored.declare(DType.of(value.dtype), tuple(Shape(value.shape)))
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
        shape = tuple(value.shape)
        declared = tuple(int(d) if isinstance(d, StaticDim) else str(d) for d in self._dims)
        known = [d if isinstance(d, int) else n for d, n in zip(declared, shape, strict=False)]
        if len(shape) != len(declared) or list(shape) != known:
            raise ValueError(
                f"the value of weight '{self.name}' must have shape {declared}, not {shape}"
            )
        dtype = DType.of(value.dtype)
        other = jax.dtypes.canonicalize_dtype(self._dtype.np) != dtype.np
        if other:
            self.stored.refuse_in_stack("another dtype")
        if self._sharding is not None:
            with outside_traces(value):
                value = self.stored.to_leaf(value)
        self._put(value)
        self._loaded_shape = None
        if other:
            self._dtype = dtype
            structure_changed()

    def _as_array(self) -> jax.Array:
        stored = self.stored
        return stored.logical(stored.used())

    def __kernel_operand__(self) -> Any:
        return self.stored.operand()

    @property
    def T(self) -> Any:
        """The transpose as a view: ``x @ w.T`` calls ``kernels.matmul`` without transposing.

        Where Weights give TensorValues it is a TensorValue, with the last two axes swapped.
        """
        array = self._as_array()
        if not KIND.values:
            return WeightTranspose(self)
        return TransposedValue(self) if array.ndim == 2 else TensorValue(array).T

    def __setitem__(self, key: Any, value: Any) -> None:
        """Raises TypeError: JAX's arrays cannot be changed in place."""
        raise TypeError(
            f"weight '{self.name}' cannot be changed in place: assign a new array, "
            "weight.value = weight.value.at[0].set(1)"
        )

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)
        except Exception as error:
            if type(error).__name__ != "ShardingTypeError":
                raise
        # JAX cannot slice a sharded axis of an array with Explicit axes, so it is replicated first.
        array = self._as_array()
        cut = explicit.automatic(lambda a: unwrap(TensorValue(a)[key]), explicit.mesh_of(array), [])
        return self._result(cut(array))

    # -- Python's protocols

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, Weight):
            return self is other
        if isinstance(other, (jax.Array, np.ndarray, np.generic, int, float, complex)):
            if KIND.values:
                return super().__eq__(other)
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

    def __getstate__(self) -> dict[str, Any]:
        """The state without the sharding, which belongs to the devices of this process."""
        if self._sharding is None:
            return dict(vars(self))
        free = object.__new__(type(self))
        free.__dict__.update(vars(self), _sharding=None, _layout=None, _why="")
        if self._home is None:
            free.__dict__["_own"] = (
                free.stored.blank() if self.stored.is_lazy else self.stored.logical(self._own)
            )
        return vars(free)

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        new = memo[id(self)] = object.__new__(type(self))
        new.__setstate__(copied(vars(self), _SHARED, memo, self._leaf))
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._home is not None:
            self._home[0]._views.setdefault(self._home[1], self)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        register(cls)


register(Weight)


class Shard(Weight):
    """A view of a part of another Weight, which holds the value. ``Weight.shard`` creates it.

    Attributes:
        shard_idx: index of the part.
        host: Weight that it is a part of.
    """

    def __init__(self, host: Weight, i: int, device: DeviceRef):
        strategy, self.host = host.sharding_strategy, host
        sizes = tuple(int(d) if isinstance(d, StaticDim) else d for d in host.shape)
        shape = shard_shape(with_values(strategy), sizes, i, host.dtype.np)
        super().__init__(f"{host.name}[{i}]", host.dtype, shape, device,
                         host.quantization_encoding, host.align, strategy)  # fmt: skip
        self.shard_idx = i

    def of(self, host: Weight | None) -> Shard:
        """The same part of another Weight."""
        new = object.__new__(Shard)
        vars(new).update(vars(self), host=host)
        return new

    @property
    def _leaf(self) -> Any:
        return self._own if self.host.stored.is_missing else self._as_array()

    @property
    def shape(self) -> Any:
        """The shape of the part."""
        return Shape(self._dims)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self._dims)

    @property
    def dtype(self) -> Any:
        """The element type, that of the host."""
        return self.host.dtype

    def _as_array(self) -> jax.Array:
        part = with_values(self._sharding_strategy)(self.host._as_array(), self.shard_idx)
        return on_device(part, self.device)

    def _put(self, leaf: Any) -> None:
        if self.shard_idx is None:  # the placeholder from its construction
            self._own = leaf
        else:
            self._refuse()

    def _set(self, value: Any) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(f"weight '{self.name}' is a shard: set the value of '{self.host.name}'")

    def shard(self, devices: Iterable[DeviceRef]) -> list[Weight]:
        """Raises an error: a shard cannot be split again.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"Weight '{self.name}' was already sharded. Use __getitem__ instead.")

    @property
    def _plain(self) -> tuple[type[Weight], dict[str, Any]]:
        # Alone, as a leaf of a pytree, a shard becomes a plain Weight of the part.
        return Weight, {name: value for name, value in vars(self).items() if name != "host"}
