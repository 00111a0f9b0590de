"""Activation functions, looked up by the names that model configurations use.

A layer stores only the *name*, which is static data of its treedef, and looks the function up when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import closest, one_of
from ..graph.kind import as_array, on_arrays, to_value

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
    """The exact GELU, ``x · Φ(x)``, where Φ is the cumulative distribution function of the normal distribution."""
    # With erf, as in torch: jax.nn.gelu uses erfc, which is three times slower on a CPU.
    return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


@_in_float32
def gelu_tanh(x: Any) -> jax.Array:
    """The tanh approximation of GELU (GPT-2's ``gelu_new``)."""
    return jax.nn.gelu(x, approximate=True)


@_in_float32
def quick_gelu(x: Any) -> jax.Array:
    """The sigmoid approximation of GELU, ``x · σ(1.702 x)`` (CLIP)."""
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

    This is :func:`activation` under MAX's name.

    Raises:
        ValueError: there is no function of that name.

    Example:
        >>> from maxjax.graph import TensorValue
        >>> activation_function_from_name("relu")(TensorValue(jnp.array([-1.0, 2.0]))).shape
        [Dim(2)]
    """
    return on_arrays(activation(name))


# The numeric settings that each gated activation accepts.
_GATED = {"silu": {"limit"}, "swigluoai": {"alpha", "limit"}, "gelu_tanh": set()}


def clipped(gate: Any, up: Any, limit: float) -> tuple[jax.Array, jax.Array]:
    """Clips gates to at most ``limit`` and up projections to ``±limit``; a limit of 0 leaves both unchanged.

    Example:
        >>> [x.tolist() for x in clipped(jnp.array([-5.0, 5.0]), jnp.array([-5.0, 1.0]), 2.0)]
        [[-5.0, 2.0], [-2.0, 1.0]]
    """
    return (jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)) if limit > 0 else (gate, up)


@dataclass(frozen=True)
class GatedActivation:
    """The gated activation of an expert, between its gate and up projections and its down projection.

    Attributes:
        fused_activation: "silu" for ``silu(gate) · up``, "gelu_tanh" for ``gelu_tanh(gate) · up``, or "swigluoai"
            for ``gate · σ(alpha · gate) · (up + 1)``.
        alpha: factor in "swigluoai", which requires it; no other activation accepts it.
        limit: bound to which gates (from above) and up projections (``±limit``) are clipped before the activation;
            required by "swigluoai", accepted by "silu". 0 means no bound.
        gated_activation_fn: function of ``[…, 2 F]`` (gates before up) and F, used instead of the settings above.

    Raises:
        ValueError: there is no activation of that name, or it does not accept ``alpha`` or ``limit``.

    Example:
        >>> GatedActivation("silu", limit=2.0)(jnp.array([[0.0, 9.0, 3.0, -3.0]]), 2).round(2).tolist()
        [[0.0, -3.5199999809265137]]
    """

    fused_activation: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0
    gated_activation_fn: Callable[[Any, int], Any] | None = None

    def __post_init__(self) -> None:
        name = one_of("fused_activation", self.fused_activation, _GATED)
        given = {one for one in ("alpha", "limit") if getattr(self, one)}
        if extra := given - _GATED[name]:
            raise ValueError(f"the activation {name!r} does not take {' and '.join(sorted(extra))}")
        if self.limit < 0:
            raise ValueError(f"limit must not be negative, not {self.limit}")
        if name == "swigluoai" and len(given) < 2:
            raise ValueError(f"swigluoai needs alpha and limit, not {self.alpha} and {self.limit}")
        if self.gated_activation_fn is not None and (name != "silu" or given):
            raise ValueError("gated_activation_fn takes the place of all other settings")

    def kernel_parameters(self) -> dict[str, float | str]:
        """The settings as keyword arguments of MAX's kernels.

        Raises:
            ValueError: there is a ``gated_activation_fn``.
        """
        if self.gated_activation_fn is not None:
            raise ValueError("a gated_activation_fn is no setting of a kernel")
        return {"activation": self.fused_activation, "swiglu_alpha": float(self.alpha),
                "swiglu_limit": float(self.limit)}  # fmt: skip

    def __call__(self, gate_up: Any, moe_dim: int) -> Any:
        """``[…, 2 moe_dim]``, gates before up → ``[…, moe_dim]``; a TensorValue for a TensorValue."""
        if self.gated_activation_fn is not None:
            return self.gated_activation_fn(gate_up, moe_dim)
        return on_arrays(self._of_pair)(gate_up[..., :moe_dim], gate_up[..., moe_dim:])

    def of_pair(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The same as a call, for gates and up projections ``[…, F]`` in separate arrays."""
        if self.gated_activation_fn is not None:
            both = to_value(jnp.concatenate([gate, up], axis=-1))
            return as_array(self.gated_activation_fn(both, gate.shape[-1]))
        return self._of_pair(gate, up)

    def _of_pair(self, gate: Any, up: Any) -> Any:
        gate, up = clipped(gate, up, self.limit)
        if self.fused_activation == "swigluoai":
            return gate * sigmoid(self.alpha * gate) * (up + 1)
        return activation(self.fused_activation)(gate) * up
