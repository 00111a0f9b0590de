"""Weight: the named, possibly lazy box a Module owns.

The value lives in the Weight: a ``jax.ShapeDtypeStruct`` until it is loaded, then an
array.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...dtype import DType
from ...kernels import QuantArray, StackSlice, explicit
from ...kernels.stack_slice import whole
from ..device import DeviceRef
from ..kind import KIND
from ..placement.arrays import as_used, put, relaid, stays
from ..placement.device_major import DeviceMajor
from ..placement.strategy import ShardingStrategy as ShardingStrategy
from ..quantization import QuantizationEncoding
from ..shape import Shape, StaticDim
from ..value import TensorValue, unwrap
from .epoch import structure_changed, values_changed
from .running import RUNNING
from .transpose import TransposedValue
from .transpose import WeightTranspose as WeightTranspose

# What a copy of a Weight has in common with it.
_SHARED = ("_sharding", "_layout", "_sharding_strategy", "_source")


# Set by the file of shards: (weight, number, device) → the shard.
make_shard: Callable[[Any, int, DeviceRef], Weight] | None = None


def standing_for(weight: Any) -> Any:
    """What stands for a Weight or a StackedWeight in the Graph being written; None outside of one."""
    graphs = RUNNING.graphs
    if not graphs:
        return None
    home = weight._home
    if home is not None and RUNNING.is_below(home[0]):
        stack = standing_for(home[0])
        return None if stack is None else StackSlice(stack, home[1]).__jax_array__()
    return None if isinstance(whole(weight._leaf), Tracer) else graphs[-1].stand_in(weight)


class Weight(TensorValue):
    """A named tensor of a model, lazy until a value is loaded.

    Args:
        name: Its name within the layer that owns it, ``"weight"`` or ``"q.weight"``.
        dtype: Element type: a DType, or anything a dtype can be made of.
        shape: Sizes; a text is a symbolic dimension.
        device: Where MAX would put it. Recorded; it commits nothing (see ``Module.to``).
        quantization_encoding: Block format of packed bytes. Products and lookups decode them;
            as an array the Weight is the bytes (MAX's view), ``logical_shape`` counts weights.
        align: Alignment in bytes demanded of loaded values; None means the dtype's own.
        sharding_strategy: How it is split over devices.

    Attributes:
        name: The last full name it was given by a state dict, at first the local name.
        value: None while lazy, else the array. Assign an array to fill it.

    Raises:
        TypeError: A missing argument, or a shape that is not a sequence.
        ValueError: Used as an array while it has no value.

    A Weight is a pytree with one leaf and works in jnp functions, operators and
    indexing; ``jax.lax`` functions need ``w.value``. ``x @ w.T`` is the fast product
    of a layer. ``==`` between Weights is identity.

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

    @property
    def _wraps(self) -> bool:  # type: ignore[override]
        """Whether what is made of it is a TensorValue where nothing else decides."""
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
        self._local_name = name
        self._full_name: str | None = None
        self._device = device
        self._quantization_encoding = quantization_encoding
        self._align = align
        self._sharding_strategy = sharding_strategy
        self._sharding: Any = None
        self._why = ""  # it is placed so
        # How its rows are stored, where that is not as they are: the leaf then has another shape.
        self._layout: DeviceMajor | None = None
        self._flags = (_placeholder, _has_alias)
        self._original: tuple[DType, Shape] | None = None
        self._loaded_shape: tuple[int, ...] | None = None
        # Data of a checkpoint that has not been read yet (Weights.allocate).
        self._source: Any = None
        # The StackedWeight that holds the value, and the place in it, of a layer of a LayerStack.
        self._home: tuple[Any, int] | None = None
        self.shard_idx: int | None = None
        self._declare(DType.of(dtype), tuple(Shape(shape)))

    # -- what it was declared as

    def _declare(self, dtype: DType, dims: tuple[Any, ...]) -> None:
        """Sets dtype and shape and goes back to having no value."""
        self._refuse_in_stack("another shape or dtype")
        self._dtype, self._dims = dtype, dims
        self._empty()
        structure_changed()

    def _refuse_in_stack(self, what: str) -> None:
        if self._home is not None:
            raise ValueError(
                f"weight '{self.name}' belongs to a LayerStack and cannot have {what} of its own: "
                "layers.unstack() first"
            )

    def _blank(self) -> Any:
        """What stands for a value there is none of: a placeholder, or None without sizes."""
        if any(not isinstance(d, StaticDim) for d in self._dims):
            return None
        # JAX without x64 has no 64-bit arrays: the placeholder has the type the value will have.
        dtype = jax.dtypes.canonicalize_dtype(self._dtype.np)
        return jax.ShapeDtypeStruct(self._leaf_dims, dtype, sharding=self._leaf_sharding)

    @property
    def _leaf_dims(self) -> Any:
        """The sizes of the leaf; None while they are symbolic."""
        if not all(isinstance(d, StaticDim) for d in self._dims):
            return None
        sizes = tuple(int(d) for d in self._dims)
        return sizes if self._layout is None else self._layout.shape(sizes)

    @property
    def _leaf_sharding(self) -> Any:
        """The sharding of the leaf."""
        return self._sharding if self._layout is None else self._layout.sharding(self._sharding)

    def _empty(self) -> None:
        self._put(self._blank())

    @property
    def _leaf(self) -> Any:
        """The leaf it is in a pytree: an array, a placeholder, or a slice of a stack."""
        home = self._home
        return self._own if home is None else home[0].leaf_of(home[1])

    def _put(self, leaf: Any) -> None:
        """Every change of the leaf goes through here: Modules cache the lists of their leaves."""
        if self._home is None:
            self._own = leaf
            values_changed()
        else:
            self._home[0].put(self._home[1], leaf)

    def _static(self) -> tuple[Any, ...]:
        """Everything about it that is not its value or full name; hashable."""
        dims = tuple(int(d) if isinstance(d, StaticDim) else str(d) for d in self._dims)
        return (
            self._plain[0], self._local_name, self._dtype, dims, self._device, self._quantization_encoding,
            self._align, self._sharding_strategy, self._sharding, self._layout, self._flags,
            self.shard_idx,
        )  # fmt: skip

    @property
    def _plain(self) -> tuple[type[Weight], dict[str, Any]]:
        """The class and state that another Weight like it has."""
        return type(self), vars(self)

    @classmethod
    def _from_static(cls, weight: Weight, leaf: Any, name: str | None) -> Weight:
        """A Weight like ``weight`` around ``leaf``, which is not looked at."""
        kind, state = weight._plain
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
        """The last full name a state dict gave it; before that, the local name."""
        return self._full_name or self._local_name

    @name.setter
    def name(self, name: str) -> None:
        self._refuse_in_stack("a name")
        self._local_name, self._full_name = name, None
        structure_changed()

    def _finalise(self, name: str) -> None:
        """Records the full name. A child's state dict does not shorten what the parent's gave."""
        known = self._full_name
        if known is None or not known.endswith(f".{name}"):
            self._full_name = name

    @property
    def dtype(self) -> DType:
        """The element type: the value's, or the declared one while there is none."""
        dtype = getattr(self._leaf, "dtype", None)
        if dtype is None or type(self._leaf) is jax.ShapeDtypeStruct:
            return self._dtype
        return DType.of(dtype)

    @property
    def shape(self) -> Shape:
        """The logical shape, a new Shape at each reading."""
        leaf = self._leaf
        sizes = getattr(leaf, "shape", None)
        if sizes is None or any(not isinstance(d, StaticDim) for d in self._dims):
            return Shape(self._dims)
        if self._layout is not None or isinstance(self._sharding, jax.sharding.NamedSharding):
            return Shape(self._dims)  # the leaf may be a part of it, or arranged otherwise
        return Shape(sizes)

    @property
    def logical_shape(self) -> Shape:
        """The shape of the weights themselves: that of packed bytes counts what they hold.

        Example:
            >>> from maxjax.graph import DeviceRef
            >>> from maxjax.graph.quantization import QuantizationEncoding
            >>> w = Weight("w", "uint8", (4, 144), DeviceRef.CPU(), QuantizationEncoding.Q4_K)
            >>> w.shape, w.logical_shape
            ([Dim(4), Dim(144)], [Dim(4), Dim(256)])
        """
        shape, encoding = Shape(self._dims), self._packing
        if encoding is None:
            return self.shape
        return Shape(encoding.logical_shape([*shape[:-1], int(shape[-1])]))  # type: ignore[list-item]

    @property
    def _packing(self) -> QuantizationEncoding | None:
        """The encoding, where what is stored is bytes of its blocks."""
        encoding = self._quantization_encoding
        packed = encoding is not None and encoding.is_gguf and self._dtype is DType.uint8
        return encoding if packed and self._dims else None

    @property
    def _block(self) -> int:
        """How many values of the last axis stay together."""
        return 1 if self._packing is None else self._packing.elements_per_block

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self._dims) if self._layout else getattr(self._leaf, "ndim", len(self._dims))

    @property
    def ndim(self) -> int:
        """The number of axes, as NumPy calls it."""
        return self.rank

    @property
    def device(self) -> DeviceRef:
        """Where it was declared to live."""
        return self._device

    @property
    def original_dtype_and_shape(self) -> tuple[DType, Shape]:
        """Dtype and shape before an encoding forced it to bytes; as now unless set."""
        return self._original or (self.dtype, self.shape)

    @original_dtype_and_shape.setter
    def original_dtype_and_shape(self, value: tuple[DType, Shape]) -> None:
        self._original = value

    @property
    def quantization_encoding(self) -> QuantizationEncoding | None:
        """The block format of packed bytes, or None."""
        return self._quantization_encoding

    @quantization_encoding.setter
    def quantization_encoding(self, encoding: QuantizationEncoding | None) -> None:
        self._refuse_in_stack("an encoding")
        self._quantization_encoding = encoding
        structure_changed()

    @property
    def align(self) -> int | None:
        """Alignment in bytes demanded of loaded values; None means the dtype's own."""
        return self._align

    @align.setter
    def align(self, align: int | None) -> None:
        self._refuse_in_stack("an alignment")
        self._align = align
        structure_changed()

    @property
    def sharding_strategy(self) -> Any:
        """How it is split over devices, or None. Setting one declares it on the CPU, as in MAX."""
        return self._sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: Any) -> None:
        self._refuse_in_stack("a strategy")
        self._sharding_strategy = strategy
        if strategy is not None:
            self._device = DeviceRef.CPU()
        structure_changed()

    def shard(self, devices: Iterable[DeviceRef]) -> list[Weight]:
        """One Weight for each device: views of its parts, by the sharding strategy.

        Shapes need no value. The parts have no values of their own; the device is recorded.

        Raises:
            ValueError: There is no strategy, it is for fewer devices than these, or this is a
                shard itself.
            IndexError, ValueError, TypeError: The strategy does not fit the shape.

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
        assert make_shard is not None
        devices = list(devices)
        if isinstance(self.sharding_strategy, ShardingStrategy):
            self.sharding_strategy.check_devices(len(devices), f"weight '{self.name}'")
        return [make_shard(self, i, device) for i, device in enumerate(devices)]

    @property
    def sharding(self) -> Any:
        """The jax Sharding it is on, or will be loaded to; None where JAX is free to choose."""
        return self._sharding if self._home is None else self._home[0].template._sharding

    # -- the value

    @property
    def _is_lazy(self) -> bool:
        leaf = self._leaf
        return leaf is None or type(leaf) is jax.ShapeDtypeStruct

    @property
    def _is_missing(self) -> bool:
        """Whether it has neither a value nor data of a checkpoint to read."""
        return self._source is None and self._is_lazy

    @property
    def value(self) -> Any:
        """The array, or None while the weight is lazy; inside a Graph, what stands for it there."""
        standing = standing_for(self)
        return self._stored() if standing is None else self._in_order(standing)

    def _stored(self) -> Any:
        leaf = self._leaf
        if type(leaf) is StackSlice:
            leaf = leaf.__jax_array__()
        return None if type(leaf) is jax.ShapeDtypeStruct else self._in_order(leaf)

    def _in_order(self, leaf: Any) -> Any:
        """What is stored, in logical order."""
        return leaf if self._layout is None or leaf is None else self._layout.restore(leaf)

    def _arranged(self, array: Any) -> Any:
        """A value in logical order, as it is stored."""
        return array if self._layout is None else self._layout.arrange(array)

    @value.setter
    def value(self, value: Any) -> None:
        if value is None:
            self._empty()
        elif type(value) is jax.ShapeDtypeStruct:
            self._refuse_in_stack("another shape or dtype")
            self._sharding, self._layout = value.sharding, None
            self._declare(DType.of(value.dtype), tuple(Shape(value.shape)))
        else:
            self._set(jnp.array(value) if isinstance(value, np.ndarray) else value)

    def _set(self, value: Any) -> None:
        shape = getattr(value, "shape", None)
        if shape is None:
            raise TypeError(
                f"the value of weight '{self.name}' must be an array, not {type(value).__name__}"
            )
        if all(isinstance(d, StaticDim) for d in self._dims) and tuple(shape) != tuple(
            int(d) for d in self._dims
        ):
            raise ValueError(
                f"the value of weight '{self.name}' must have shape "
                f"{tuple(int(d) for d in self._dims)}, not {tuple(shape)}"
            )
        dtype = DType.of(value.dtype)
        other = jax.dtypes.canonicalize_dtype(self._dtype.np) != dtype.np
        if other:
            self._refuse_in_stack("another dtype")
        if self._sharding is not None:
            value = self._to_store(value)
        self._put(value)
        self._loaded_shape = None
        if other:
            self._dtype = dtype
            structure_changed()

    def _as_array(self) -> jax.Array:
        return self._in_order(self._used())

    def _operand(self) -> Any:
        """What ``kernels.matmul`` takes: packed weights as such, a layer of a stack as it is."""
        packing = self._packing
        return self._uncut() if packing is None else QuantArray(self._uncut(), packing.value)

    def _uncut(self) -> Any:
        """The array, or a layer of a stack as it is where nothing is to be done with it first."""
        leaf = self._leaf
        if (
            type(leaf) is not StackSlice
            or self._layout is not None
            or standing_for(self) is not None
        ):
            return self._as_array()
        sharding = self._sharding
        if sharding is None or stays(leaf, self._leaf_dims, sharding):
            return leaf
        return self._as_array()

    def _used(self) -> Any:
        """What is stored, where operations can use it: see ``placed.as_used``."""
        array = self._array()
        if self._sharding is None:
            return array
        return as_used(array, self._leaf_dims, self._leaf_sharding)

    def _array(self) -> Any:
        """What is stored, read by now; inside a Graph, what stands for it there."""
        standing = standing_for(self)
        if standing is not None:
            return standing
        leaf = self._leaf
        if leaf is None or type(leaf) is jax.ShapeDtypeStruct:
            if self._source is None:
                raise ValueError(self._no_value())
            leaf = self._read_source()
        return leaf.__jax_array__() if type(leaf) is StackSlice else leaf

    def _to_store(self, value: Any) -> Any:
        """A value in logical order as it is stored, where it belongs."""
        if self._layout is not None and getattr(value, "is_fully_addressable", False):
            value = np.asarray(value)
        return put(self._arranged(value), self._leaf_sharding, self.name)

    def _read_source(self) -> jax.Array:
        """Reads the data this weight was allocated from; it is its value from then on."""
        host = np.array(
            self._source
        )  # a copy: JAX on a CPU would share memory the user can write to
        with jax.ensure_compile_time_eval():
            value = self._to_store(host)
            self._put(value)
        self._source = None
        return value

    def _no_value(self) -> str:
        name = RUNNING.name_of(self) or self.name
        return (
            f"weight '{name}' has no value: load one with load_state_dict(), make one with maxjax.init(), "
            "or pass the model as an argument of jax.eval_shape or jax.jit (no parent graph)"
        )

    def _moved(self, sharding: Any, layout: DeviceMajor | None, name: str) -> Any:
        """The value as it would be stored on another Sharding; None for none, or if a stack has it."""
        if self._home is not None or self._is_lazy:
            return None
        return relaid(self._own, sharding, self._layout, layout, name)

    def _settle(self, sharding: Any, why: str, layout: DeviceMajor | None, moved: Any) -> None:
        """Takes a placement over, with what :meth:`_moved` gave for it."""
        self._sharding, self._why, self._layout = sharding, why, layout
        if moved is not None:
            self._put(moved)
        elif self._home is None:
            self._empty()
        structure_changed()

    @property
    def T(self) -> Any:
        """The transpose as a view: ``x @ w.T`` reaches ``kernels.matmul`` without one being made.

        Among TensorValues it is one, with the last two axes swapped.
        """
        array = self._as_array()
        if not KIND.values:
            return WeightTranspose(self)
        return TransposedValue(self) if array.ndim == 2 else TensorValue(array).T

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)
        except Exception as error:
            if type(error).__name__ != "ShardingTypeError":
                raise
        # Of an explicitly placed array JAX cuts nothing across its devices: every one gets it.
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

    def __repr__(self) -> str:
        encoding = self._quantization_encoding
        extra = f", {encoding}" if encoding is not None else ""
        return f"{self._plain[0].__name__}({self.name}, {self.dtype}, {self.shape!r}, {self.device}{extra})"

    def __getstate__(self) -> dict[str, Any]:
        """Without a placement: it is of devices of this process."""
        if self._sharding is None:
            return dict(vars(self))
        free = object.__new__(type(self))
        free.__dict__.update(vars(self), _sharding=None, _layout=None, _why="")
        if self._home is None:
            free.__dict__["_own"] = free._blank() if self._is_lazy else self._in_order(self._own)
        return vars(free)

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        new = memo[id(self)] = object.__new__(type(self))
        state = {k: v if k in _SHARED else copy.deepcopy(v, memo) for k, v in vars(self).items()}
        new.__setstate__(state)
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._home is not None:
            self._home[0]._views.setdefault(self._home[1], self)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _register(cls)


def _register(cls: type[Weight]) -> None:
    def flatten_with_keys(w: Weight):
        return ((jax.tree_util.GetAttrKey("value"), w._leaf),), _WeightDef(w)

    def flatten(w: Weight):
        return (w._leaf,), _WeightDef(w)

    def unflatten(definition: _WeightDef, leaves: Any) -> Weight:
        return Weight._from_static(definition.weight, leaves[0], definition.weight._full_name)

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


class _WeightDef:
    """The treedef data of a Weight on its own: equal when all but value and full name is.

    What its operators give is a part of it: what was traced for one kind is not for the other.
    """

    __slots__ = ("key", "weight")

    def __init__(self, weight: Weight):
        self.key = (KIND.values, weight._static())
        # A copy without its value: a treedef must not keep arrays alive.
        self.weight = Weight._from_static(weight, None, weight._full_name)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _WeightDef) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Weight({self.weight._local_name})"


_register(Weight)
