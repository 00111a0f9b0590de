"""Floor 3. MAX's op names over jnp: plain arrays in, plain arrays out.

So far the element-wise activations; the rest of ``max.graph.ops`` is not there yet.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def relu(x: Any) -> jax.Array:
    """max(x, 0), element-wise."""
    return jax.nn.relu(jnp.asarray(x))


def silu(x: Any) -> jax.Array:
    """x · sigmoid(x), element-wise.

    Example:
        >>> from maxjax.graph import ops
        >>> float(ops.silu(0.0))
        0.0
    """
    return jax.nn.silu(jnp.asarray(x))


def sigmoid(x: Any) -> jax.Array:
    """1 / (1 + exp(-x)), element-wise."""
    return jax.nn.sigmoid(jnp.asarray(x))


def tanh(x: Any) -> jax.Array:
    """The hyperbolic tangent, element-wise."""
    return jnp.tanh(jnp.asarray(x))


def gelu(x: Any, approximate: str = "none") -> jax.Array:
    """x · Φ(x), element-wise (D. Hendrycks, K. Gimpel, arXiv:1606.08415).

    Args:
        approximate: "none" (by erf), "tanh", or "quick": x · sigmoid(1.702 x).

    Raises:
        ValueError: Another approximation.
    """
    x = jnp.asarray(x)
    if approximate == "quick":
        return x * jax.nn.sigmoid(1.702 * x)
    if approximate not in ("none", "tanh"):
        raise ValueError(
            f"gelu has the approximations 'none', 'tanh' and 'quick', not {approximate!r}"
        )
    return jax.nn.gelu(x, approximate=approximate == "tanh")
