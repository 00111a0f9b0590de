"""Activation functions by the names that model configurations use.

A layer keeps only the *name* (plain data in its treedef) and looks the function up when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from ..absent import absent as _absent
from ..errors import closest

Activation = Callable[[Any], jax.Array]


def _in_float32(function: Activation) -> Activation:
    """Computes 16-bit floats in float32 and rounds the result once, as torch does."""

    @wraps(function)
    def wide(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
            return function(x)
        return function(x.astype(jnp.float32)).astype(x.dtype)

    return wide


@_in_float32
def gelu(x: Any) -> jax.Array:
    """The exact GELU, ``x · Φ(x)`` with the normal distribution function Φ."""
    # With erf, as in torch: jax.nn.gelu uses erfc, which is three times slower on a CPU.
    return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


@_in_float32
def gelu_tanh(x: Any) -> jax.Array:
    """GELU by its tanh approximation (GPT-2's ``gelu_new``)."""
    return jax.nn.gelu(x, approximate=True)


@_in_float32
def quick_gelu(x: Any) -> jax.Array:
    """GELU by a sigmoid, ``x · σ(1.702 x)`` (CLIP)."""
    return x * jax.nn.sigmoid(1.702 * x)


@_in_float32
def silu(x: Any) -> jax.Array:
    """``x · σ(x)``, also called swish."""
    return jax.nn.silu(x)


@_in_float32
def mish(x: Any) -> jax.Array:
    """``x · tanh(softplus(x))``."""
    return jax.nn.mish(x)


@_in_float32
def tanh(x: Any) -> jax.Array:
    """The hyperbolic tangent."""
    return jnp.tanh(x)


@_in_float32
def sigmoid(x: Any) -> jax.Array:
    """The logistic function σ."""
    return jax.nn.sigmoid(x)


def relu(x: Any) -> jax.Array:
    """``max(x, 0)``."""
    return jax.nn.relu(x)


def relu2(x: Any) -> jax.Array:
    """``max(x, 0)²``."""
    return jnp.square(jax.nn.relu(x))


def relu6(x: Any) -> jax.Array:
    """``min(max(x, 0), 6)``."""
    return jax.nn.relu6(x)


@_in_float32
def leaky_relu(x: Any) -> jax.Array:
    """``x`` where positive, ``0.01 x`` elsewhere."""
    return jax.nn.leaky_relu(x)


def linear(x: Any) -> jax.Array:
    """``x`` itself."""
    return jnp.asarray(x)


# Each line starts with Hugging Face's names; MAX's are among them.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu, "gelu_python": gelu,
    "gelu_new": gelu_tanh, "gelu_tanh": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh,
    "gelu_python_tanh": gelu_tanh, "gelu_accurate": gelu_tanh, "gelu_fast": gelu_tanh,
    "quick_gelu": quick_gelu, "gelu_quick": quick_gelu,
    "silu": silu, "swish": silu, "mish": mish,
    "relu": relu, "relu2": relu2, "relu6": relu6, "leaky_relu": leaky_relu,
    "tanh": tanh, "sigmoid": sigmoid, "linear": linear,
}  # fmt: skip


def activation(name: str) -> Activation:
    """The activation function of that name.

    Raises:
        ValueError: there is no such function; the message lists the known names.

    Example:
        >>> print(activation("relu")(jnp.array([-1.0, 2.0])))
        [0. 2.]
        >>> activation("glu")
        Traceback (most recent call last):
        ...
        ValueError: unknown activation function 'glu' (did you mean 'gelu'?). Known: gelu, ...
    """
    if isinstance(name, str) and name in ACTIVATIONS:
        return ACTIVATIONS[name]
    like = closest(name, ACTIVATIONS) if isinstance(name, str) else None
    hint = f" (did you mean '{like}'?)" if like else ""
    known = ", ".join(ACTIVATIONS)
    raise ValueError(f"unknown activation function {name!r}{hint}. Known: {known}")


def activation_function_from_name(name: str) -> Callable[[Any], Any]:
    """The activation function of that name; given a TensorValue, it returns a TensorValue.

    :func:`activation` under MAX's name.

    Raises:
        ValueError: there is no function of that name.

    Example:
        >>> from maxjax.graph import TensorValue
        >>> activation_function_from_name("relu")(TensorValue(jnp.array([-1.0, 2.0]))).shape
        [Dim(2)]
    """
    from ..graph.ops.lift import lift

    return lift(activation(name))


__getattr__ = _absent(__name__)
