"""Ops of two operands, element by element: arithmetic, comparison, logic, ``where``.

Two float widths meet in the wider one; integers and floats do not meet. Shapes
broadcast, also of different ranks.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..operands import check_broadcast, number, same_rank
from .lift import array, boolean, lift, meet


@lift
def add(lhs: Any, rhs: Any) -> Any:
    """``lhs + rhs``.

    Raises:
        ValueError: an integer tensor meets a float, a number does not fit in the other's
            dtype, or the shapes do not broadcast (here and in all that follow).

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.add(jnp.ones(2, jnp.float16), jnp.ones((3, 1))).dtype)
        float32
        >>> ops.add(jnp.ones(2), jnp.ones(3))
        Traceback (most recent call last):
        ValueError: shapes (2,) and (3,) do not broadcast: sizes must be equal, or one of them 1
    """
    return jnp.add(*meet(lhs, rhs))


@lift
def sub(lhs: Any, rhs: Any) -> Any:
    """``lhs - rhs``."""
    return jnp.subtract(*meet(lhs, rhs))


@lift
def mul(lhs: Any, rhs: Any) -> Any:
    """``lhs · rhs``."""
    return jnp.multiply(*meet(lhs, rhs))


@lift
def div(lhs: Any, rhs: Any) -> Any:
    """``lhs / rhs``; of integers it is a float, the widest JAX has (float64 with x64)."""
    return jnp.true_divide(*meet(lhs, rhs))


@lift
def floor_div(lhs: Any, rhs: Any) -> Any:
    """``⌊lhs / rhs⌋`` in the operands' dtype."""
    return jnp.floor_divide(*meet(lhs, rhs))


@lift
def mod(lhs: Any, rhs: Any) -> Any:
    """``lhs - rhs · ⌊lhs / rhs⌋``: with the sign of ``rhs``, as in Python."""
    return jnp.mod(*meet(lhs, rhs))


@lift
def pow(lhs: Any, rhs: Any) -> Any:
    """``lhs`` to the power ``rhs``."""
    if isinstance(rhs, int) and getattr(lhs, "dtype", jnp.bool_) != jnp.bool_:
        # A known whole number: multiplications, exact gradients.
        return jnp.power(lhs, number(rhs, lhs.dtype))
    return jnp.power(*meet(lhs, rhs))


@lift
def equal(lhs: Any, rhs: Any) -> Any:
    """``lhs = rhs``, as booleans."""
    return jnp.equal(*meet(lhs, rhs))


@lift
def not_equal(lhs: Any, rhs: Any) -> Any:
    """``lhs ≠ rhs``, as booleans."""
    return jnp.not_equal(*meet(lhs, rhs))


@lift
def greater(lhs: Any, rhs: Any) -> Any:
    """``lhs > rhs``, as booleans."""
    return jnp.greater(*meet(lhs, rhs))


@lift
def greater_equal(lhs: Any, rhs: Any) -> Any:
    """``lhs ≥ rhs``, as booleans."""
    return jnp.greater_equal(*meet(lhs, rhs))


@lift
def logical_and(lhs: Any, rhs: Any) -> Any:
    """Logical and; of booleans only.

    Raises:
        ValueError: an operand is not of booleans (here and in the next two).
    """
    return jnp.logical_and(*meet(boolean(lhs, "logical_and"), boolean(rhs, "logical_and")))


@lift
def logical_or(lhs: Any, rhs: Any) -> Any:
    """Logical or; of booleans only."""
    return jnp.logical_or(*meet(boolean(lhs, "logical_or"), boolean(rhs, "logical_or")))


@lift
def logical_xor(lhs: Any, rhs: Any) -> Any:
    """Logical exclusive or; of booleans only."""
    return jnp.logical_xor(*meet(boolean(lhs, "logical_xor"), boolean(rhs, "logical_xor")))


@lift
def where(condition: Any, x: Any, y: Any) -> Any:
    """``x`` where the condition holds and ``y`` elsewhere; the three broadcast.

    Raises:
        ValueError: the condition is not of booleans, ``x`` and ``y`` have no common dtype,
            or the shapes do not broadcast.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.where(jnp.array([True, False]), jnp.array([1.0, 2.0]), 0.0))
        [1. 0.]
    """
    condition = boolean(condition, "where, as its condition,")
    shapes = [condition.shape, *(v.shape for v in (x, y) if hasattr(v, "shape"))]
    x, y = meet(x, y)
    check_broadcast(*shapes)
    condition, x, y = same_rank(condition, array(x), array(y))
    return jnp.where(condition, x, y)
