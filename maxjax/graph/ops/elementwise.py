"""Elementwise ops with one operand, activations included.

Activations of 16-bit floats are computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import one_of
from ..operands import widely
from .lift import array, boolean, canonical, floating, lift, numeric


@lift
def abs(x: Any) -> Any:
    """The absolute value."""
    return jnp.abs(array(x))


@lift
def negate(x: Any) -> Any:
    """``-x``.

    Raises:
        ValueError: the tensor is boolean.
    """
    return jnp.negative(numeric(x, "negate"))


@lift
def exp(x: Any) -> Any:
    """e to the power x.

    Raises:
        ValueError: the tensor has integers (as in all ops below except ``is_nan``, ``is_inf``,
            ``logical_not``, ``cast`` and ``relu``).
    """
    return jnp.exp(floating(x, "exp"))


@lift
def log(x: Any) -> Any:
    """The natural logarithm."""
    return jnp.log(floating(x, "log"))


@lift
def log1p(x: Any) -> Any:
    """``log(1 + x)``, accurate near zero."""
    return jnp.log1p(floating(x, "log1p"))


@lift
def sqrt(x: Any) -> Any:
    """The square root."""
    return jnp.sqrt(floating(x, "sqrt"))


@lift
def rsqrt(x: Any) -> Any:
    """``1 / √x``."""
    return jax.lax.rsqrt(floating(x, "rsqrt"))


@lift
def sin(x: Any) -> Any:
    """The sine of x in radians."""
    return jnp.sin(floating(x, "sin"))


@lift
def cos(x: Any) -> Any:
    """The cosine of x in radians."""
    return jnp.cos(floating(x, "cos"))


@lift
def acos(x: Any) -> Any:
    """The angle in radians whose cosine is x; NaN outside [-1, 1]."""
    return jnp.arccos(floating(x, "acos"))


@lift
def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return jnp.tanh(floating(x, "tanh"))


@lift
def atanh(x: Any) -> Any:
    """The inverse of ``tanh``."""
    return jnp.arctanh(floating(x, "atanh"))


@lift
def erf(x: Any) -> Any:
    """The error function."""
    return widely(jax.lax.erf)(floating(x, "erf"))


@lift
def floor(x: Any) -> Any:
    """The floor: the largest integer not above x, as a float."""
    return jnp.floor(floating(x, "floor"))


@lift
def ceil(x: Any) -> Any:
    """The ceiling: the smallest integer not below x, as a float."""
    return jnp.ceil(floating(x, "ceil"))


@lift
def round(x: Any) -> Any:
    """The nearest integer, as a float; halves round to even."""
    return jnp.round(floating(x, "round"))


@lift
def trunc(x: Any) -> Any:
    """The value truncated toward zero, as a float."""
    return jnp.trunc(floating(x, "trunc"))


@lift
def is_nan(x: Any) -> Any:
    """Whether each element is NaN, as booleans."""
    return jnp.isnan(array(x))


@lift
def is_inf(x: Any) -> Any:
    """Whether each element is infinite, of either sign, as booleans."""
    return jnp.isinf(array(x))


@lift
def logical_not(x: Any) -> Any:
    """Logical not of a boolean tensor.

    Raises:
        ValueError: the tensor is not boolean.
    """
    return jnp.logical_not(boolean(x, "logical_not"))


@lift
def cast(x: Any, dtype: Any) -> Any:
    """The tensor in another element type; floats become integers by truncation.

    64-bit types are 32-bit ones unless ``jax_enable_x64`` is set.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.cast(jnp.array([-1.7, 1.7]), "int32"))
        [-1  1]
    """
    return array(x).astype(canonical(dtype))


@lift
def relu(x: Any) -> Any:
    """``max(x, 0)``."""
    return jax.nn.relu(array(x))


@lift
def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``."""
    return widely(jax.nn.sigmoid)(floating(x, "sigmoid"))


@lift
def silu(x: Any) -> Any:
    """``x · sigmoid(x)``.

    Example:
        >>> from maxjax.graph import ops
        >>> float(ops.silu(0.0))
        0.0
    """
    return widely(jax.nn.silu)(floating(x, "silu"))


# With erf, as in torch: jax.nn.gelu uses erfc, which is three times slower on a CPU.
_GELU: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda x: 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5))),
    "tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


@lift
def gelu(x: Any, approximate: str = "none") -> Any:
    """``x · Φ(x)`` (D. Hendrycks, K. Gimpel, arXiv:1606.08415).

    Args:
        approximate: "none" (exact, with erf), "tanh", or "quick": ``x · sigmoid(1.702 x)``.

    Raises:
        ValueError: the approximation is unknown.
    """
    one_of("approximate", approximate, _GELU)
    return widely(_GELU[approximate])(floating(x, "gelu"))
