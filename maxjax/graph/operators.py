"""Operators: what a TensorValue and a Weight have in common, as values that represent arrays.

Operators are written out, not generated, so that editors and type checkers know them; ``value.py`` and
``weight/weight.py`` define what an operator does.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from types import GenericAlias
from typing import Any

import jax
import numpy as np

from ..dtype import DType
from . import shaping

_METADATA = {np.ndim, np.shape, np.size, np.result_type, np.iscomplexobj, np.isrealobj}


class Value:
    """A value of a graph: a TensorValue or a BufferValue. As in MAX, annotations may say ``Value[TensorType]``."""

    __class_getitem__ = classmethod(GenericAlias)

    @property
    def tensor(self) -> Any:
        """This value, if it is a TensorValue; the property narrows the type of graph inputs and call results.

        Raises:
            TypeError: it is none.
        """
        raise TypeError(f"Value is not a TensorValue, was '{type(self).__name__}'")

    @property
    def buffer(self) -> Any:
        """This value, if it is a BufferValue; the property narrows the type of graph inputs.

        Raises:
            TypeError: it is none.
        """
        raise TypeError(f"Value is not a BufferValue, was '{type(self).__name__}'")


def _of_array(name: str) -> Any:
    """The method of jax.Array with this name, as a method that passes its arguments to the array."""

    def method(self: Operators, *args: Any, **options: Any) -> Any:
        return getattr(self._as_array(), name)(*args, **options)

    if (theirs := getattr(jax.Array, name, None)) is not None:  # tolist is of concrete arrays alone
        functools.update_wrapper(method, theirs)
    method.__name__, method.__doc__ = name, f"``jax.Array.{name}``."
    return method


class Operators(Value):
    """The operators and common methods, in terms of methods that a subclass defines."""

    # Makes NumPy arrays on the left of an operator defer to this class.
    __array_priority__ = 1000
    # A value with __getitem__ would be iterated by index; MAX's is not iterable.
    __iter__ = None

    shape: Any
    dtype: Any
    rank: Any
    _as_array: Callable[[], Any]
    _result: Callable[..., Any]
    _binary: Callable[[Callable[[Any, Any], Any], Any, Any], Any]
    _matmul: Callable[[Any, Any], Any]
    _unary: Callable[[Callable[[Any], Any]], Any]

    def __add__(self, other: Any) -> Any:
        return self._binary(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._binary(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return self._binary(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._binary(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return self._binary(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._binary(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._binary(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._binary(operator.truediv, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self._binary(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._binary(operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        return self._binary(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return self._binary(operator.mod, other, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __pow__(self, other: Any) -> Any:
        return self._binary(operator.pow, self, other)

    def __rpow__(self, other: Any) -> Any:
        return self._binary(operator.pow, other, self)

    def __and__(self, other: Any) -> Any:
        return self._binary(operator.and_, self, other)

    def __rand__(self, other: Any) -> Any:
        return self._binary(operator.and_, other, self)

    def __or__(self, other: Any) -> Any:
        return self._binary(operator.or_, self, other)

    def __ror__(self, other: Any) -> Any:
        return self._binary(operator.or_, other, self)

    def __xor__(self, other: Any) -> Any:
        return self._binary(operator.xor, self, other)

    def __rxor__(self, other: Any) -> Any:
        return self._binary(operator.xor, other, self)

    def __lshift__(self, other: Any) -> Any:
        return self._binary(operator.lshift, self, other)

    def __rlshift__(self, other: Any) -> Any:
        return self._binary(operator.lshift, other, self)

    def __rshift__(self, other: Any) -> Any:
        return self._binary(operator.rshift, self, other)

    def __rrshift__(self, other: Any) -> Any:
        return self._binary(operator.rshift, other, self)

    def __lt__(self, other: Any) -> Any:
        return self._binary(operator.lt, self, other)

    def __le__(self, other: Any) -> Any:
        return self._binary(operator.le, self, other)

    def __gt__(self, other: Any) -> Any:
        return self._binary(operator.gt, self, other)

    def __ge__(self, other: Any) -> Any:
        return self._binary(operator.ge, self, other)

    def __eq__(self, other: Any) -> Any:
        return self._binary(operator.eq, self, other)

    def __ne__(self, other: Any) -> Any:
        return self._binary(operator.ne, self, other)

    def __matmul__(self, other: Any) -> Any:
        return self._matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return self._matmul(other, self)

    def __neg__(self) -> Any:
        return self._unary(operator.neg)

    def __pos__(self) -> Any:
        return self._result(+self._as_array())

    def __invert__(self) -> Any:
        return self._unary(operator.invert)

    def __abs__(self) -> Any:
        return self._result(abs(self._as_array()))

    def __round__(self, digits: int | None = None) -> Any:
        return self._result(self._as_array().round(digits or 0))

    def __int__(self) -> int:
        return int(self._as_array())

    def __float__(self) -> float:
        return float(self._as_array())

    # -- JAX and NumPy

    def __jax_array__(self) -> jax.Array:
        return self._as_array()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self._as_array())
        return array if dtype is None else array.astype(dtype, copy=False)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """NumPy functions, which get the value as a NumPy array.

        jnp functions ask NumPy for shapes and dtypes, also of traced values, which have no such array;
        for these an array without memory is used.
        """
        convert = _stand_in if func in _METADATA else np.asarray
        args, kwargs = jax.tree.map(
            lambda v: convert(v) if isinstance(v, Operators) else v,
            (args, kwargs),
            is_leaf=lambda v: isinstance(v, Operators),
        )
        return func(*args, **kwargs)

    # -- sizes and shapes

    @property
    def ndim(self) -> int:
        """The number of axes, as NumPy calls it."""
        return self.rank

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(map(int, self.shape))

    def astype(self, dtype: Any) -> Any:
        """The tensor in another element type."""
        return self._result(self._as_array().astype(DType.of(dtype).np))

    def reshape(self, shape: Iterable[Any], *more: Any, **options: Any) -> Any:
        """The tensor in another shape with as many elements; one size may be -1.

        Raises:
            ValueError: the number of elements differs.
        """
        given = isinstance(shape, Iterable) and not isinstance(shape, str)
        sizes = shape if given else (shape, *more)
        return self._result(shaping.reshape(self._as_array(), sizes, **options))

    def transpose(self, first: int, second: int) -> Any:
        """The tensor with two axes swapped.

        Raises:
            IndexError: there is no such axis.
        """
        return self._result(shaping.transpose(self._as_array(), first, second))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """The tensor with the axes from ``start_dim`` to ``end_dim`` merged.

        Raises:
            IndexError: there is no such axis.
            ValueError: the first comes after the last.
        """
        return self._result(shaping.flatten(self._as_array(), start_dim, end_dim))

    @property
    def at(self) -> Any:
        """``x.at[index].set(y)`` and similar, as on a jax.Array; the result is a plain array."""
        return self._as_array().at

    def item(self) -> Any:
        """The only element as a Python number."""
        return self._as_array().item()

    # What jax.Array has and MAX's values do not, for plain JAX code. Functions return plain arrays; everything else
    # of an array (``addressable_shards``, ``view``) is that of ``value``.

    all, any, argmin, argsort = map(_of_array, ("all", "any", "argmin", "argsort"))
    clip, conj, cumprod, cumsum = map(_of_array, ("clip", "conj", "cumprod", "cumsum"))
    devices, diagonal, dot, nonzero = map(_of_array, ("devices", "diagonal", "dot", "nonzero"))
    prod, ptp, ravel, repeat, round = map(_of_array, ("prod", "ptp", "ravel", "repeat", "round"))
    sort, std, sum, swapaxes = map(_of_array, ("sort", "std", "sum", "swapaxes"))
    take, tolist, trace = map(_of_array, ("take", "tolist", "trace"))

    @property
    def mT(self) -> Any:
        """``jax.Array.mT``: the last two axes swapped."""
        return self._as_array().mT

    @property
    def real(self) -> Any:
        """``jax.Array.real``."""
        return self._as_array().real

    @property
    def imag(self) -> Any:
        """``jax.Array.imag``."""
        return self._as_array().imag


def _stand_in(x: Operators) -> np.ndarray:
    return np.broadcast_to(np.zeros((), x.dtype.np), x._as_array().shape)
