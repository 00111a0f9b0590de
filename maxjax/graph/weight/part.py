"""The part of a weight that a rule of the user defines, in a ShardingStrategy."""

from __future__ import annotations

from typing import Any

from ..placement.strategy import ShardingStrategy, _Ranges
from ..value import TensorValue, unwrap


def with_values(strategy: ShardingStrategy) -> Any:
    """The strategy; if its rule is a user's function, one that passes it a TensorValue, as MAX does.

    Example:
        >>> import jax.numpy as jnp
        >>> strategy = ShardingStrategy(2, lambda weight, i, n: weight.permute([1, 0])[i])
        >>> with_values(strategy)(jnp.ones((3, 2)), 0).shape
        (3,)
    """
    rule = strategy.shard
    if isinstance(rule, _Ranges):
        return strategy

    def with_value(array: Any, i: int, n: int) -> Any:
        return unwrap(rule(TensorValue(array), i, n))

    return ShardingStrategy(strategy.num_devices, with_value)
