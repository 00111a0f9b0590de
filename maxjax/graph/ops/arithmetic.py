"""Elementwise ops with two operands: arithmetic, comparison, logic, ``where``.

Floats of different widths are promoted to the wider one; an integer tensor with a float tensor is an
error, and so is float16 with bfloat16. Shapes broadcast, also if their ranks differ.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..operands import check_broadcast, dividends, number, same_rank
from .lift import array, binary_operands, boolean, numeric, pairwise


@pairwise
def add(lhs: Any, rhs: Any) -> Any:
    """``lhs + rhs``.

    Raises:
        ValueError: one operand is an integer tensor and the other a float, a number does not fit in
            the other's dtype, or the shapes do not broadcast (as in all ops below).

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.add(jnp.ones(2, jnp.float16), jnp.ones((3, 1))).dtype)
        float32
        >>> ops.add(jnp.ones(2), jnp.ones(3))
        Traceback (most recent call last):
        ValueError: shapes (2,) and (3,) do not broadcast: sizes must be equal, or one of them 1
    """
    return jnp.add(*binary_operands(lhs, rhs))


@pairwise
def sub(lhs: Any, rhs: Any) -> Any:
    """``lhs - rhs``.

    Raises:
        ValueError: as for ``add``, or the operands are boolean.
    """
    a, b = binary_operands(lhs, rhs)
    for x in (a, b):
        if hasattr(x, "dtype"):
            numeric(x, "sub")
    return jnp.subtract(a, b)


@pairwise
def mul(lhs: Any, rhs: Any) -> Any:
    """``lhs · rhs``."""
    return jnp.multiply(*binary_operands(lhs, rhs))


@pairwise
def div(lhs: Any, rhs: Any) -> Any:
    """``lhs / rhs``; for two integers of any width, a float32, or with ``jax_enable_x64`` a float64."""
    return jnp.true_divide(*binary_operands(*dividends(lhs, rhs)))


@pairwise
def floor_div(lhs: Any, rhs: Any) -> Any:
    """``⌊lhs / rhs⌋`` in the dtype of the operands."""
    return jnp.floor_divide(*binary_operands(lhs, rhs))


@pairwise
def mod(lhs: Any, rhs: Any) -> Any:
    """``lhs - rhs · ⌊lhs / rhs⌋``, which has the sign of ``rhs``, as in Python."""
    return jnp.mod(*binary_operands(lhs, rhs))


@pairwise
def pow(lhs: Any, rhs: Any) -> Any:
    """``lhs`` to the power ``rhs``.

    Raises:
        ValueError: as for ``add``, or ``rhs`` is a negative number and ``lhs`` a tensor of integers.
    """
    if isinstance(rhs, int) and getattr(lhs, "dtype", jnp.bool_) != jnp.bool_:
        if rhs < 0 and jnp.issubdtype(lhs.dtype, jnp.integer):
            raise ValueError(
                f"pow: a tensor of integers has no power of {rhs}; cast it to floats first"
            )
        # JAX computes a known integer power by multiplication, with exact gradients.
        return jnp.power(lhs, number(rhs, lhs.dtype))
    return jnp.power(*binary_operands(lhs, rhs))


@pairwise
def equal(lhs: Any, rhs: Any) -> Any:
    """``lhs == rhs``, as booleans."""
    return jnp.equal(*binary_operands(lhs, rhs))


@pairwise
def not_equal(lhs: Any, rhs: Any) -> Any:
    """``lhs ≠ rhs``, as booleans."""
    return jnp.not_equal(*binary_operands(lhs, rhs))


@pairwise
def greater(lhs: Any, rhs: Any) -> Any:
    """``lhs > rhs``, as booleans."""
    return jnp.greater(*binary_operands(lhs, rhs))


@pairwise
def greater_equal(lhs: Any, rhs: Any) -> Any:
    """``lhs ≥ rhs``, as booleans."""
    return jnp.greater_equal(*binary_operands(lhs, rhs))


@pairwise
def logical_and(lhs: Any, rhs: Any) -> Any:
    """Logical and of boolean tensors.

    Raises:
        ValueError: an operand is not boolean (as in the next two ops).
    """
    return jnp.logical_and(*_booleans(lhs, rhs, "logical_and"))


@pairwise
def logical_or(lhs: Any, rhs: Any) -> Any:
    """Logical or of boolean tensors."""
    return jnp.logical_or(*_booleans(lhs, rhs, "logical_or"))


@pairwise
def logical_xor(lhs: Any, rhs: Any) -> Any:
    """Logical exclusive or of boolean tensors."""
    return jnp.logical_xor(*_booleans(lhs, rhs, "logical_xor"))


def _booleans(lhs: Any, rhs: Any, op: str) -> tuple[Any, Any]:
    return binary_operands(boolean(lhs, op), boolean(rhs, op))


@pairwise
def where(condition: Any, x: Any, y: Any) -> Any:
    """``x`` where the condition holds and ``y`` elsewhere; the three broadcast.

    Raises:
        ValueError: the condition is not boolean, ``x`` and ``y`` have no common dtype,
            or the shapes do not broadcast.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.where(jnp.array([True, False]), jnp.array([1.0, 2.0]), 0.0))
        [1. 0.]
    """
    condition = boolean(condition, "where, as its condition,")
    shapes = [condition.shape, *(v.shape for v in (x, y) if hasattr(v, "shape"))]
    x, y = binary_operands(x, y)
    check_broadcast(*shapes)
    condition, x, y = same_rank(condition, array(x), array(y))
    return jnp.where(condition, x, y)
