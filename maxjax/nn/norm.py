"""Floor 4. LayerNorm and RMSNorm.

Below: Module, Weight. Above: the model families. The sums are taken in float32 and the
result has the dtype of the input, whatever the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.weight import Weight
from .layer import Module


class LayerNorm(Module):
    """``(x - mean) / √(variance + eps) · weight + bias`` over the last axis.

    Args (in MAX's order):
        dims: Length of the last axis.
        devices: Where the weights are declared to live: the first of them.
        dtype: Of the weights.
        eps: Added to the variance.
        use_bias: Whether there is one.
        compute_dtype: What it is computed in; float32 but for experiments.

    Attributes:
        weight: Weight ``[dims]``.
        bias: Weight ``[dims]``, or None.

    Example:
        >>> norm = LayerNorm(2, [DeviceRef.CPU()], "float32", eps=0.0)
        >>> _ = norm.load_state_dict({"weight": jnp.ones(2), "bias": jnp.zeros(2)})
        >>> print(norm(jnp.array([[1.0, 5.0]])))
        [[-1.  1.]]
    """

    def __init__(
        self,
        dims: int,
        devices: Sequence[DeviceRef],
        dtype: Any,
        eps: float = 1e-5,
        use_bias: bool = True,
        *,
        compute_dtype: Any = DType.float32,
    ):
        super().__init__()
        self.dim = dims
        self.devices = list(devices)
        self.dtype = DType.of(dtype)
        self.eps = eps
        self.compute_dtype = DType.of(compute_dtype)
        device = self.devices[0] if self.devices else DeviceRef.CPU()
        self.weight = Weight("weight", dtype, (dims,), device)
        self.bias = Weight("bias", dtype, (dims,), device) if use_bias else None

    def __call__(self, x: Any) -> jax.Array:
        """``[..., dims]`` → the same shape and dtype.

        Raises:
            ValueError: The last axis is not ``dims`` long.
        """
        x = jnp.asarray(x)
        _check_last_axis(self, x, self.dim)
        dtype = self.compute_dtype.np
        wide = x.astype(dtype)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps) * _row(self.weight, x.ndim, dtype)
        if self.bias is not None:
            y = y + _row(self.bias, x.ndim, dtype)
        return y.astype(x.dtype)

    def initializer(self, name: str) -> Any:
        """The identity after normalising: weight one, bias zero."""
        return jax.nn.initializers.zeros if name == "bias" else jax.nn.initializers.ones


class RMSNorm(Module):
    """``x / √(mean(x²) + eps) · (weight + weight_offset)`` over the last axis.

    Args (in MAX's order):
        dim: Length of the last axis.
        dtype: Of the weight.
        eps: Added to the mean square.
        weight_offset: Added to the weight (1 in Gemma, whose files hold ``weight - 1``).
        multiply_before_cast: Multiply by the weight in float32, then round to the dtype
            of the input. Otherwise round first and multiply in the narrow dtype (Llama).

    Attributes:
        weight: Weight ``[dim]``, declared on the CPU as in MAX.

    Example:
        >>> norm = RMSNorm(2, "float32", eps=0.0)
        >>> _ = norm.load_state_dict({"weight": jnp.ones(2)})
        >>> print(norm(jnp.array([[1.0, 7.0]])))
        [[0.2 1.4]]
    """

    def __init__(
        self,
        dim: int,
        dtype: Any,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        multiply_before_cast: bool = True,
    ):
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight_offset = weight_offset
        self.multiply_before_cast = multiply_before_cast
        self.weight = Weight("weight", dtype, (dim,), DeviceRef.CPU())

    def __call__(self, x: Any) -> jax.Array:
        """``[..., dim]`` → the same shape and dtype.

        Raises:
            ValueError: The last axis is not ``dim`` long.
        """
        x = jnp.asarray(x)
        _check_last_axis(self, x, self.dim)
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        y = wide * jax.lax.rsqrt(mean_square + self.eps)
        if self.multiply_before_cast:
            y = y * (_row(self.weight, x.ndim, jnp.float32) + self.weight_offset)
            return y.astype(x.dtype)
        return y.astype(x.dtype) * (_row(self.weight, x.ndim, x.dtype) + self.weight_offset)

    def initializer(self, name: str) -> Any:
        """A factor of one in all: the weight is one less its offset."""
        return jax.nn.initializers.constant(1.0 - self.weight_offset)


def _check_last_axis(layer: Module, x: jax.Array, length: int) -> None:
    if x.ndim < 1 or x.shape[-1] != length:
        raise ValueError(
            f"{type(layer).__name__} over {length} values was given an array of shape {x.shape}, "
            f"whose last axis is not {length} long"
        )


def _row(weight: Any, ndim: int, dtype: Any) -> jax.Array:
    """The weight with leading axes of length 1, so that nothing is broadcast unasked."""
    array = jnp.asarray(weight).astype(dtype)
    return array.reshape((1,) * (ndim - 1) + array.shape)
