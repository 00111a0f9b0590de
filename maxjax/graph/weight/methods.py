"""Methods that MAX's values and jax.Array both have, and compute differently; and rules of sharding that call them.

MAX's methods keep a reduced axis with length 1, and reduce the last axis by default. A Weight has MAX's methods where
its operators return TensorValues (``kind.py``), and those of jax.Array elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

from ..kind import KIND
from ..placement.split import Split
from ..placement.strategy import ShardingStrategy
from ..value import TensorValue, unwrap


def _method(name: str) -> Any:
    of_value = getattr(TensorValue, name)

    @functools.wraps(of_value)
    def method(self: Methods, *args: Any, **options: Any) -> Any:
        if KIND.values:
            return of_value(self, *args, **options)
        return getattr(self._as_array(), name)(*args, **options)

    method.__doc__ = (
        f"``jax.Array.{name}``; where Weights give TensorValues, that of ``TensorValue``."
    )
    return method


class Methods(TensorValue):
    """The methods of a Weight that are those of jax.Array in plain JAX code.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import DeviceRef, Weight
        >>> w = Weight("weight", "float32", (2, 3), DeviceRef.CPU())
        >>> w.value = jnp.ones((2, 3))
        >>> w.mean().shape, w.max(axis=0).shape
        ((), (3,))
    """

    max, min, mean = map(_method, ("max", "min", "mean"))
    var, argmax, squeeze = map(_method, ("var", "argmax", "squeeze"))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.size_in_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, also while there is no value."""
        return self.size * self.itemsize

    def __len__(self) -> int:
        """The size of the first axis, also while there is no value.

        Raises:
            TypeError: there is no axis, or its size is not known.
        """
        if not self.rank:
            raise TypeError("len() of a weight without axes")
        return int(self.shape[0])

    def transpose(self, *axes: Any) -> Any:
        """With two axes, both swapped, as in MAX; otherwise ``jax.Array.transpose``.

        Raises:
            IndexError: there is no such axis.
        """
        if KIND.values or (len(axes) == 2 and self.rank >= 2):
            return super().transpose(*axes)
        return self._as_array().transpose(*axes)


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
        strategy.num_devices, lambda array, i, n: unwrap(rule(TensorValue(array), i, n))
    )


def checked(strategy: Any) -> Any:
    """The strategy itself.

    Raises:
        TypeError: it is neither None nor a ShardingStrategy, or an object with its ``num_devices`` and ``shard``.
    """
    if strategy is None or hasattr(strategy, "num_devices") and hasattr(strategy, "shard"):
        return strategy
    raise TypeError(
        f"a sharding strategy is a ShardingStrategy, such as ShardingStrategy.rowwise(2), not {strategy!r}"
    )
