"""TensorValue: a view of an array with MAX's methods. A Weight counts as one.

All methods are plain jnp on the underlying array. An operation with a TensorValue returns a TensorValue.
One with only plain arrays and Weights returns a plain array, except for MAX's own methods (``cast``,
``permute``, …), which jax.Array does not have.
"""

from __future__ import annotations

import operator
from abc import ABCMeta
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import kernels
from ..dtype import DType
from . import shaping
from .device import DeviceRef
from .operands import (
    alike,
    check_indices,
    check_product,
    common,
    dividends,
    divides_integers,
    from_numpy,
    mean,
    product,
    promoted,
    widely,
    wraps,
)
from .operators import Operators
from .operators import Value as Value
from .rebinding import has_declared_sizes, has_traced_bounds, rebound, sliced, sliced_sizes
from .shape import Dim, Shape
from .symbolic import to_dim, to_size
from .tensor_type import TensorType
from .weight.transpose import TransposedFacts
from .weight.weight import Weight


def unwrap(x: Any) -> Any:
    """The underlying array of a TensorValue; a Dim as a number; anything else unchanged."""
    if isinstance(x, TensorValue):
        return x._as_array()
    if isinstance(x, Dim):
        size = to_size(x)
        return size if isinstance(size, int) else jnp.asarray(size)
    return from_numpy(x) if isinstance(x, np.ndarray) else x


def unify(a: Any, b: Any) -> tuple[Any, Any]:
    """Two operands prepared as in MAX: with one dtype and with equal ranks.

    Raises:
        ValueError: one is an integer tensor and the other a float, there is no common dtype, or a
            Python number does not fit in the other's dtype.
    """
    return promoted(*(x.item() if isinstance(x, np.generic) else unwrap(x) for x in (a, b)))


class TensorValue(Operators, metaclass=ABCMeta):
    """A view of an array, concrete or traced, with the methods of MAX's values.

    Args:
        value: a JAX or NumPy array, or another TensorValue. Use ``ops.constant`` for numbers.

    It is a pytree with one leaf, and works in jnp functions and operators.

    Raises:
        TypeError: the value is none of these.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import TensorValue
        >>> x = TensorValue(jnp.arange(6.0).reshape(2, 3))
        >>> x.transpose(0, 1).shape, x.max(axis=0).shape, x.cast("bfloat16").dtype
        ([Dim(3), Dim(2)], [Dim(1), Dim(3)], bfloat16)
    """

    # == compares elements, so there is no hash, as in MAX.
    __hash__ = None  # type: ignore[assignment]
    _wraps = True
    _array: Any

    def __init__(self, value: Any):
        if isinstance(value, (Dim, Shape)):
            value = jnp.asarray(
                [to_size(d) for d in value] if isinstance(value, Shape) else to_size(value)
            )
        array = unwrap(value)
        if not isinstance(array, jax.Array):
            raise TypeError(f"TensorValue() takes an array, not {type(value).__name__}; "
                            "use ops.constant for numbers and lists")  # fmt: skip
        self._array = array

    def _as_array(self) -> jax.Array:
        return self._array

    # -- properties

    @property
    def tensor(self) -> TensorValue:
        """This TensorValue itself."""
        return self

    @property
    def value(self) -> Any:
        """The underlying array."""
        return self._as_array()

    @property
    def dtype(self) -> DType:
        """The element type."""
        return DType.of(self._as_array().dtype)

    @property
    def shape(self) -> Shape:
        """The sizes of the axes, a new Shape at each access."""
        return Shape([to_dim(size) for size in self._as_array().shape])

    @property
    def device(self) -> DeviceRef:
        """The first device of the array in this process; for a traced array, the first local device."""
        array = self._as_array()
        there = [] if isinstance(array, Tracer) else list(array.sharding.addressable_devices)
        return DeviceRef.from_jax(there[0] if there else jax.local_devices()[0])

    @property
    def type(self) -> TensorType:
        """The dtype, shape and device."""
        return TensorType(self.dtype, self.shape, self.device)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return self._as_array().ndim

    @property
    def T(self) -> Any:
        """The last two axes swapped."""
        return self.transpose(-1, -2)

    @staticmethod
    def transposed(weight: Weight) -> TensorValue:
        """The transpose of a Weight with two axes, which ``x @ w.T`` does not compute."""
        return TransposedValue(weight)

    # -- MAX's methods

    def cast(self, dtype: Any) -> TensorValue:
        """The tensor in another element type; floats become integers by truncation."""
        dtype = jax.dtypes.canonicalize_dtype(DType.of(dtype).np)
        return TensorValue(self._as_array().astype(dtype))

    def permute(self, dims: Sequence[int]) -> TensorValue:
        """The tensor with its axes in another order.

        Raises:
            IndexError: there is no such axis.
            ValueError: an axis is missing or occurs twice.
        """
        return TensorValue(shaping.permute(self._as_array(), dims))

    def broadcast_to(self, shape: Iterable[Any]) -> TensorValue:
        """The tensor broadcast to a shape: repeated along axes of length 1 and new leading axes."""
        return TensorValue(shaping.broadcast_to(self._as_array(), shape))

    def unsqueeze(self, axis: int) -> TensorValue:
        """The tensor with a new axis of length 1; see ``ops.unsqueeze``."""
        return TensorValue(shaping.unsqueeze(self._as_array(), axis))

    def squeeze(self, axis: int) -> TensorValue:
        """The tensor without an axis of length 1.

        Raises:
            IndexError: there is no such axis.
            ValueError: the axis is longer.
        """
        return TensorValue(shaping.squeeze(self._as_array(), axis))

    def rebind(self, shape: Iterable[Any], message: str = "") -> TensorValue:
        """The tensor with the given sizes declared; see ``ops.rebind``.

        Raises:
            ValueError: the tensor has another rank or size.
        """
        return TensorValue(rebound(self._as_array(), shape, message))

    def to(self, device: Any) -> TensorValue:
        """The tensor on another device. Does nothing while tracing, where the compiler places arrays."""
        array = self._as_array()
        if isinstance(array, Tracer):
            return TensorValue(array)
        target = DeviceRef.from_device(device).to_jax()  # a DeviceRef stays as it is
        return TensorValue(array if array.devices() == {target} else jax.device_put(array, target))

    def print(self, label: str = "debug_tensor") -> None:
        """Prints the value, under ``jax.jit`` each time the program runs."""
        array = self._as_array()
        shape = list(map(str, self.shape))
        text = f"{label} = tensor({{x}}, dtype={self.dtype.name}, shape={shape})"
        if isinstance(array, Tracer):
            jax.debug.print(text, x=array)
        else:
            print(text.format(x=array))

    def to_numpy(self) -> np.ndarray:
        """The value as a NumPy array."""
        return np.asarray(self)

    def max(self, axis: int = -1) -> TensorValue:
        """The largest along an axis, which is kept with length 1."""
        return self._reduced(jnp.max, axis)

    def min(self, axis: int = -1) -> TensorValue:
        """The smallest along an axis, which is kept with length 1."""
        return self._reduced(jnp.min, axis)

    def mean(self, axis: int = -1) -> TensorValue:
        """The mean along an axis, which is kept with length 1; see ``ops.mean``."""
        return self._reduced(mean, axis)

    def var(self, axis: int = -1) -> TensorValue:
        """The population variance along an axis, which is kept with length 1."""
        return self._reduced(widely(jnp.var), axis)

    def stdev(self, axis: int = -1) -> TensorValue:
        """The standard deviation along an axis, which is kept with length 1."""
        return self._reduced(widely(jnp.std), axis)

    def argmax(self, axis: int = -1) -> TensorValue:
        """The index of the largest element along an axis, which is kept with length 1."""
        return self._reduced(jnp.argmax, axis)

    def _reduced(self, function: Callable[..., Any], axis: int) -> TensorValue:
        array = self._as_array()
        axis = shaping.axis_of(axis, array.ndim, function.__name__)
        return TensorValue(function(array, axis, keepdims=True))

    def _result(self, array: Any, *others: Any) -> Any:
        return TensorValue(array) if wraps(self, *others) else array

    def __getitem__(self, index: Any) -> Any:
        array = self._as_array()
        parts = index if isinstance(index, tuple) else (index,)
        key = [part if isinstance(part, np.ndarray) else _index(part) for part in parts]
        check_indices(key, array.shape)
        if any(map(has_traced_bounds, key)):
            array, key = sliced(array, parts, key)
        found = array[tuple(map(unwrap, key))]
        if has_declared_sizes(parts, array.shape):
            found = rebound(found, sliced_sizes(parts, key, array.shape, found.shape), "a slice")
        return self._result(found)

    def __bool__(self) -> bool:
        return bool(self._as_array())

    def __repr__(self) -> str:
        array = self._as_array()
        facts = [f"dtype={self.dtype!r}", f"shape={self.shape!r}", f"device={self.device}"]
        if not isinstance(array, Tracer):
            facts.insert(0, np.array2string(np.asarray(array), separator=", "))
        return f"TensorValue({', '.join(facts)})"

    # The methods that Operators needs.

    @staticmethod
    def _binary(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        x = a._array if type(a) is TensorValue else a
        y = b._array if type(b) is TensorValue else b
        try:
            if _promotes_alike(x, y) and not divides_integers(function, x, y):
                return wrap(function(x, y))  # the usual case, which must be fast in eager code
            if not (_is_operand(a) and _is_operand(b)):
                return NotImplemented
            if wraps(a, b):
                x, y = alike(a, b)
                if function is operator.truediv:
                    x, y = dividends(unwrap(x), unwrap(y))
                return TensorValue(function(*unify(x, y)))
        except TypeError as error:
            raise ValueError(
                f"{function.__name__} of {_operand_text(x)} and {_operand_text(y)}: {error}"
            ) from error
        return function(unwrap(a), unwrap(b))  # Weights and arrays follow JAX's own rules

    @staticmethod
    def _matmul(a: Any, b: Any) -> Any:
        if not (_is_operand(a) and _is_operand(b)):
            return NotImplemented  # x @ w.T: WeightTranspose calls the fast kernel
        if not wraps(a, b):
            return unwrap(a) @ unwrap(b)
        if (of_weight := getattr(b, "_product", None)) is not None:  # x @ w.T
            return of_weight(a)
        a, b = map(unwrap, alike(a, b))
        if not (hasattr(a, "ndim") and hasattr(b, "ndim")):
            raise ValueError(
                f"matmul of {_operand_text(a)} and {_operand_text(b)}: use * to multiply by a number"
            )
        return TensorValue(product(a, b))

    def _unary(self, function: Callable[[Any], Any]) -> Any:
        array = self._as_array()
        try:
            return self._result(function(array))
        except TypeError as error:
            raise ValueError(f"{function.__name__} of {_operand_text(array)}: {error}") from error


def _promotes_alike(x: Any, y: Any) -> bool:
    """Whether JAX alone treats the two as MAX would: arrays of one dtype and rank, or a float array and a float."""
    if not isinstance(x, jax.Array):
        return isinstance(y, jax.Array) and y.dtype.kind == "f" and _is_exact(x)
    if not isinstance(y, jax.Array):
        return x.dtype.kind == "f" and _is_exact(y)
    return x.dtype == y.dtype and x.ndim == y.ndim


def _is_exact(x: Any) -> bool:
    """Whether it is a number that fits every float dtype: a float, or a small integer."""
    return type(x) is float or (type(x) is int and -256 <= x <= 256)


def _operand_text(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if hasattr(x, "shape") else repr(x)


def _is_operand(x: Any) -> bool:
    return isinstance(x, (TensorValue, jax.Array, np.ndarray, np.generic, Dim, int, float, complex))


def _index(part: Any) -> Any:
    """A part of an index; MAX also writes (slice, size) for a slice of known size."""
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], slice):
        part = part[0]
    if isinstance(part, slice):
        bounds = (part.start, part.stop, part.step)
        return slice(*(to_size(v) if isinstance(v, Dim) else unwrap(v) for v in bounds))
    return part.item() if isinstance(part, np.integer) else unwrap(part)


jax.tree_util.register_pytree_with_keys(
    TensorValue,
    lambda t: (((jax.tree_util.GetAttrKey("value"), t._array),), None),
    lambda _, leaves: wrap(next(iter(leaves))),  # type: ignore[arg-type]
    lambda t: ((t._array,), None),
)


def wrap(leaf: Any) -> TensorValue:
    """A TensorValue around a leaf, unchecked: transformations may put any object into a pytree."""
    new = object.__new__(TensorValue)
    new._array = leaf
    return new


# The types that ops accept.
TensorValueLike = TensorValue | jax.Array | np.ndarray | np.generic | Dim | int | float
"""Type of an argument that an op uses as a TensorValue: a TensorValue, an array, a number or a Dim."""


# In MAX a Weight is a TensorValue. Here it is one only for isinstance: the core does not import this file.
TensorValue.register(Weight)


class TransposedValue(TransposedFacts, TensorValue):
    """The result of ``w.T`` where Weights give TensorValues: the matrix with swapped axes.

    The array is computed on demand; ``x @ w.T`` does not need it.
    """

    def __init__(self, weight: Weight):
        self._weight = weight

    @property
    def _array(self) -> Any:
        return self._weight._as_array().T

    @property
    def rank(self) -> int:
        """The number of axes, 2."""
        return 2

    def __rmatmul__(self, x: Any) -> Any:
        # Python calls the right operand first if its class derives from the left one's.
        return self._matmul(x, self)

    def _product(self, x: Any) -> Any:
        """``x @ w.T``, called by :class:`TensorValue`."""
        array, weight = unwrap(x), self._weight
        if not isinstance(array, jax.Array):
            array = jnp.asarray(array)
        spec = weight.spec
        if spec.packing is not None:
            check_product(array.shape, list(weight.logical_shape)[::-1])
        else:
            # This matters in eager code: check the usual case first.
            if not array.ndim or array.shape[-1] != spec.dims[-1]:
                check_product(array.shape, self.shape)
            if array.dtype != spec.dtype.np:
                common(array.dtype, self.dtype)  # raises for an integer and a float
        return wrap(kernels.matmul(array, weight))


jax.tree_util.register_pytree_with_keys(
    TransposedValue,
    lambda t: (((jax.tree_util.GetAttrKey("value"), t._array),), None),
    lambda _, leaves: wrap(next(iter(leaves))),  # type: ignore[arg-type]
    lambda t: ((t._array,), None),
)
