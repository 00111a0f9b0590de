"""Floor 3. TensorValue: a view of an array with operators.

Weight derives from it. A subclass says what array it stands for (``__jax_array__``);
everything here is plain jnp on that array, so the results are plain arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType


def _operand(x: Any) -> Any:
    """What an operator computes with; a NumPy array would answer it itself, in NumPy."""
    if isinstance(x, TensorValue):
        return x.__jax_array__()
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


_METADATA = {np.ndim, np.shape, np.size, np.result_type, np.iscomplexobj, np.isrealobj}


def _stand_in(x: TensorValue) -> np.ndarray:
    return np.broadcast_to(np.zeros((), x.dtype.np), tuple(int(d) for d in x.shape))


class TensorValue:
    """Something that stands for an array and computes like one.

    Operators and jnp functions accept it and give plain arrays; ``jax.lax`` wants the
    array itself. Subclasses define ``__jax_array__``.
    """

    # NumPy arrays on the left of an operator leave it to us.
    __array_priority__ = 1000

    def __jax_array__(self) -> jax.Array:
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.__jax_array__())
        return array if dtype is None else array.astype(dtype, copy=False)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """NumPy's functions on it: as on the NumPy array it can become.

        jnp functions ask NumPy for shapes and dtypes, also while tracing, when there is
        no such array: an array without memory answers those.
        """
        convert = _stand_in if func in _METADATA else np.asarray
        args, kwargs = jax.tree.map(
            lambda v: convert(v) if isinstance(v, TensorValue) else v, (args, kwargs),
            is_leaf=lambda v: isinstance(v, TensorValue))  # fmt: skip
        return func(*args, **kwargs)

    @property
    def dtype(self) -> DType:
        """The element type."""
        return DType.of(self.__jax_array__().dtype)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """The number of axes, as NumPy calls it."""
        return len(self.shape)

    @property
    def shape(self) -> Any:
        """The sizes of the axes."""
        return self.__jax_array__().shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod([int(d) for d in self.shape], dtype=object)) if self.shape else 1

    @property
    def at(self) -> Any:
        """``x.at[index].set(y)`` and its kin, as on a jax.Array; gives a new array."""
        return self.__jax_array__().at

    def astype(self, dtype: Any) -> jax.Array:
        """The array in another element type."""
        return self.__jax_array__().astype(DType.of(dtype).np)

    def reshape(self, *shape: Any, **options: Any) -> jax.Array:
        """The array in another shape of the same size; one axis may be -1."""
        return self.__jax_array__().reshape(*shape, **options)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.__jax_array__()[index]

    # A TensorValue with __getitem__ would be iterated by index; MAX's is not iterable.
    __iter__ = None

    def __hash__(self) -> int:
        return id(self)

    # Operators: plain jnp on the array behind.

    def __add__(self, other: Any) -> Any:
        return self.__jax_array__() + _operand(other)

    def __radd__(self, other: Any) -> Any:
        return _operand(other) + self.__jax_array__()

    def __sub__(self, other: Any) -> Any:
        return self.__jax_array__() - _operand(other)

    def __rsub__(self, other: Any) -> Any:
        return _operand(other) - self.__jax_array__()

    def __mul__(self, other: Any) -> Any:
        return self.__jax_array__() * _operand(other)

    def __rmul__(self, other: Any) -> Any:
        return _operand(other) * self.__jax_array__()

    def __truediv__(self, other: Any) -> Any:
        return self.__jax_array__() / _operand(other)

    def __rtruediv__(self, other: Any) -> Any:
        return _operand(other) / self.__jax_array__()

    def __floordiv__(self, other: Any) -> Any:
        return self.__jax_array__() // _operand(other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _operand(other) // self.__jax_array__()

    def __mod__(self, other: Any) -> Any:
        return self.__jax_array__() % _operand(other)

    def __rmod__(self, other: Any) -> Any:
        return _operand(other) % self.__jax_array__()

    def __pow__(self, other: Any) -> Any:
        return self.__jax_array__() ** _operand(other)

    def __rpow__(self, other: Any) -> Any:
        return _operand(other) ** self.__jax_array__()

    def __matmul__(self, other: Any) -> Any:
        return self.__jax_array__() @ _operand(other)

    def __rmatmul__(self, other: Any) -> Any:
        return _operand(other) @ self.__jax_array__()

    def __and__(self, other: Any) -> Any:
        return self.__jax_array__() & _operand(other)

    def __rand__(self, other: Any) -> Any:
        return _operand(other) & self.__jax_array__()

    def __or__(self, other: Any) -> Any:
        return self.__jax_array__() | _operand(other)

    def __ror__(self, other: Any) -> Any:
        return _operand(other) | self.__jax_array__()

    def __xor__(self, other: Any) -> Any:
        return self.__jax_array__() ^ _operand(other)

    def __rxor__(self, other: Any) -> Any:
        return _operand(other) ^ self.__jax_array__()

    def __lshift__(self, other: Any) -> Any:
        return self.__jax_array__() << _operand(other)

    def __rlshift__(self, other: Any) -> Any:
        return _operand(other) << self.__jax_array__()

    def __rshift__(self, other: Any) -> Any:
        return self.__jax_array__() >> _operand(other)

    def __rrshift__(self, other: Any) -> Any:
        return _operand(other) >> self.__jax_array__()

    def __lt__(self, other: Any) -> Any:
        return self.__jax_array__() < _operand(other)

    def __le__(self, other: Any) -> Any:
        return self.__jax_array__() <= _operand(other)

    def __gt__(self, other: Any) -> Any:
        return self.__jax_array__() > _operand(other)

    def __ge__(self, other: Any) -> Any:
        return self.__jax_array__() >= _operand(other)

    def __neg__(self) -> Any:
        return -self.__jax_array__()

    def __pos__(self) -> Any:
        return +self.__jax_array__()

    def __invert__(self) -> Any:
        return ~self.__jax_array__()

    def __abs__(self) -> Any:
        return abs(self.__jax_array__())
