"""WeightTranspose: the result of ``w.T``, which makes ``x @ w.T`` call ``kernels.matmul``.

Where Weights give TensorValues, the result is a TransposedValue (``graph/value.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import kernels
from ...dtype import DType
from ..kind import to_value
from ..operands import wraps
from ..shape import Shape


class TransposedFacts:
    """The properties of ``w.T`` that need no array, for both classes."""

    __slots__ = ()
    _weight: Any

    @property
    def T(self) -> Any:
        """The Weight itself."""
        return self._weight

    @property
    def shape(self) -> Shape:
        """The reversed shape."""
        return Shape(list(self._weight.shape)[::-1])

    @property
    def dtype(self) -> DType:
        """The weight's element type."""
        return self._weight.dtype


class WeightTranspose(TransposedFacts):
    """The result of ``w.T``, with operators but without ``__jax_array__``.

    JAX defers ``x @ w.T`` to ``__rmatmul__``, in eager code and in every transformation, only if
    it does not know the operand. For the same reason ``jnp.dot(x, w.T)``
    raises TypeError: use :meth:`array`, the transposed array, there.
    """

    __array_ufunc__ = None
    __slots__ = ("_weight",)

    def __init__(self, weight: Any):
        self._weight = weight

    def array(self) -> jax.Array:
        """The transposed array (all axes reversed)."""
        return self._weight._as_array().T

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._weight.ndim

    def __rmatmul__(self, x: Any) -> Any:
        array = jnp.asarray(x)
        if self._weight.ndim != 2 or array.ndim < 1:
            y = array @ self.array()
        else:
            y = kernels.matmul(array, self._weight)
        return to_value(y) if wraps(x, self._weight) else y

    def __repr__(self) -> str:
        return f"{self._weight!r}.T"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array(), dtype=dtype)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: WeightTranspose, *args: Any) -> Any:
        args = tuple(a.array() if isinstance(a, WeightTranspose) else a for a in args)
        array = self.array()
        return getattr(to_value(array) if wraps(self._weight, *args) else array, name)(*args)

    method.__name__ = name
    return method


# All operators except ``x @ w.T`` work on the transposed array.
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
              "mod", "rmod", "pow", "rpow", "matmul", "lt", "le", "gt", "ge", "neg", "pos", "abs",
              "getitem"):  # fmt: skip
    setattr(WeightTranspose, f"__{_name}__", _forward(f"__{_name}__"))
for _name in ("astype", "reshape", "sum", "mean"):
    setattr(WeightTranspose, _name, _forward(_name))
