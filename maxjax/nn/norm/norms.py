"""The normalisation layers LayerNorm, ConstantLayerNorm, RMSNorm and GroupNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...elsewhere import either
from ...graph.device import DeviceRef
from ...graph.kind import as_array, on_arrays
from ...graph.operands import normalised
from ...graph.weight.weight import Weight
from ..layer import Module
from ..layer.sharded import ReplicatedLayer


class LayerNorm(ReplicatedLayer, Module):
    """``(x - mean) / √(variance + eps) · (weight + weight_offset) + bias`` over the last axis.

    Args (in MAX's order):
        dims: length of the last axis.
        devices: devices; the weights are declared on the first.
        dtype: dtype of the weights.
        eps: number added to the variance.
        use_bias, bias: two names of one argument: whether there is a bias. By default there is one.
        compute_dtype: dtype of the computation; other values than float32 are for experiments.
        weight_offset: number added to the weight (1 in Nemotron, whose files hold ``weight - 1``).

    Attributes:
        weight: Weight ``[dims]``.
        bias: Weight ``[dims]``, or None.

    Example:
        >>> norm = LayerNorm(2, eps=0.0)
        >>> _ = norm.load_state_dict({"weight": jnp.ones(2), "bias": jnp.zeros(2)})
        >>> print(norm(jnp.array([[1.0, 5.0]])))
        [[-1.  1.]]
    """

    def __init__(
        self,
        dims: int,
        devices: Sequence[DeviceRef] = (),
        dtype: Any = DType.float32,
        eps: float = 1e-5,
        use_bias: bool | None = None,
        *,
        bias: bool | None = None,
        compute_dtype: Any = DType.float32,
        weight_offset: float = 0.0,
    ):
        super().__init__()
        self.dim = dims
        self.devices = list(devices)
        self.dtype = DType.of(dtype)
        self.eps = eps
        self.compute_dtype = DType.of(compute_dtype)
        self.weight_offset = weight_offset
        device = self.devices[0] if self.devices else DeviceRef.CPU()
        self.weight = Weight("weight", dtype, (dims,), device)
        with_bias = either(True, use_bias=use_bias, bias=bias)
        self.bias = Weight("bias", dtype, (dims,), device) if with_bias else None

    @on_arrays
    def __call__(self, x: Any) -> Any:
        """``[..., dims]`` → the same shape and dtype.

        Raises:
            ValueError: the last axis is not ``dims`` long.
        """
        array = jnp.asarray(x)
        _check_last_axis(self, array, self.dim)
        dtype = self.compute_dtype.np
        weight = _row(self.weight, array.ndim, dtype)
        weight = weight + self.weight_offset if self.weight_offset else weight
        y = normalised(array.astype(dtype), -1, self.eps) * weight
        if self.bias is not None:
            y = y + _row(self.bias, array.ndim, dtype)
        return y.astype(array.dtype)

    def initializer(self, name: str) -> Any:
        """No change after normalising: an effective factor of one, and a bias of zero."""
        one = jax.nn.initializers.constant(1.0 - self.weight_offset)
        return jax.nn.initializers.zeros if name == "bias" else one


class RMSNorm(ReplicatedLayer, Module):
    """``x / √(mean(x²) + eps) · (weight + weight_offset)`` over the last axis.

    Args (in MAX's order):
        dim: length of the last axis.
        dtype: dtype of the weight.
        eps: number added to the mean square.
        weight_offset: number added to the weight (1 in Gemma, whose files hold ``weight - 1``).
        multiply_before_cast: whether to multiply by the weight in float32, and then round to the
            dtype of the input. Otherwise the layer rounds first and multiplies in that dtype (Llama).

    Attributes:
        weight: Weight ``[dim]``, declared on the CPU as in MAX.

    Example:
        >>> norm = RMSNorm(2, eps=0.0)
        >>> _ = norm.load_state_dict({"weight": jnp.ones(2)})
        >>> print(norm(jnp.array([[1.0, 7.0]])))
        [[0.2 1.4]]
    """

    def __init__(
        self,
        dim: int,
        dtype: Any = DType.float32,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        multiply_before_cast: bool = True,
    ):
        super().__init__()
        self.dim = dim
        self.dtype = DType.of(dtype)
        self.eps = eps
        self.weight_offset = weight_offset
        self.multiply_before_cast = multiply_before_cast
        self.weight = Weight("weight", dtype, (dim,), DeviceRef.CPU())

    @on_arrays
    def __call__(self, x: Any) -> Any:
        """``[..., dim]`` → the same shape and dtype.

        Raises:
            ValueError: the last axis is not ``dim`` long.
        """
        array = jnp.asarray(x)
        _check_last_axis(self, array, self.dim)
        wide = array.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        y = wide * jax.lax.rsqrt(mean_square + self.eps)
        # The dtype of the multiplication by the weight, which is before the rounding or after it.
        dtype = jnp.float32 if self.multiply_before_cast else array.dtype
        y = y.astype(dtype) * (_row(self.weight, array.ndim, dtype) + self.weight_offset)
        return y.astype(array.dtype)

    def initializer(self, name: str) -> Any:
        """An effective factor of one: the weight is one minus its offset."""
        return jax.nn.initializers.constant(1.0 - self.weight_offset)


class ConstantLayerNorm(Module):
    """LayerNorm without weights: ``(x - mean) / √(variance + eps)`` over the last axes.

    Args (in MAX's order):
        dims: length of the last axis, or lengths of the last axes, to normalise over.
        device: recorded only; there are no weights.
        dtype: recorded only; the result has the dtype of the input.
        eps: number added to the variance.

    Example:
        >>> print(ConstantLayerNorm(2, DeviceRef.CPU(), "float32", eps=0.0)(jnp.array([[1.0, 5.0]])))
        [[-1.  1.]]
    """

    def __init__(
        self,
        dims: int | tuple[int, ...],
        device: DeviceRef | None = None,
        dtype: Any = DType.float32,
        eps: float = 1e-5,
    ):
        super().__init__()
        self.dims = (dims,) if isinstance(dims, int) else tuple(dims)
        self.device = device
        self.dtype = DType.of(dtype)
        self.eps = eps

    @on_arrays
    def __call__(self, x: Any) -> Any:
        """``[..., *dims]`` → the same shape and dtype.

        Raises:
            ValueError: the last axes are not ``dims``.
        """
        array = jnp.asarray(x)
        check_floats(self, array)
        if array.shape[-len(self.dims) :] != self.dims:
            raise ValueError(
                f"ConstantLayerNorm over {self.dims} was given an array of shape {array.shape}"
            )
        axes = tuple(range(-len(self.dims), 0))
        y = normalised(array.astype(jnp.float32), axes, self.eps)
        return y.astype(array.dtype)


class GroupNorm(ReplicatedLayer, Module):
    """Normalises groups of channels over all spatial axes (Y. Wu, K. He, arXiv:1803.08494).

    Args (in MAX's order):
        num_groups: number of groups of neighbouring channels; each has its own mean and variance.
        num_channels: length of axis 1; a multiple of ``num_groups``.
        eps: number added to the variance.
        affine: whether the result is multiplied by ``weight`` and ``bias`` is added.
        device: device that the weights are declared on; None means the GPU, as in MAX.

    Attributes:
        weight, bias: Weights ``[num_channels]`` in float32, or None.

    Raises:
        ValueError: ``num_channels`` is not a multiple of ``num_groups``.

    Example:
        >>> norm = GroupNorm(1, 2, eps=0.0, affine=False)
        >>> print(norm(jnp.array([[[1.0], [5.0]]])).ravel())
        [-1.  1.]
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: DeviceRef | None = None,
    ):
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(
                f"num_channels {num_channels} is not a multiple of num_groups {num_groups}"
            )
        self.num_groups, self.num_channels = num_groups, num_channels
        self.eps, self.affine = eps, affine
        device = device or DeviceRef.GPU()
        self.weight = Weight("weight", "float32", (num_channels,), device) if affine else None
        self.bias = Weight("bias", "float32", (num_channels,), device) if affine else None

    @on_arrays
    def __call__(self, x: Any) -> Any:
        """``[N, num_channels, *places]`` → the same shape and dtype.

        Raises:
            ValueError: axis 1 is not ``num_channels`` long.
        """
        array = jnp.asarray(x)
        check_floats(self, array)
        shape = array.shape
        if array.ndim < 2 or shape[1] != self.num_channels:
            raise ValueError(
                f"GroupNorm of {self.num_channels} channels was given an array of shape {shape}"
            )
        # One axis becomes two, and no more: with Explicit axes JAX refuses other reshapes of what is split.
        divided = (shape[0], self.num_groups, self.num_channels // self.num_groups, *shape[2:])
        groups = array.astype(jnp.float32).reshape(divided)
        y = normalised(groups, tuple(range(2, groups.ndim)), self.eps).reshape(shape)
        if self.weight is not None and self.bias is not None:
            column = (1, self.num_channels, *(1,) * (array.ndim - 2))
            y = y * jnp.asarray(self.weight).astype(jnp.float32).reshape(column)
            y = y + jnp.asarray(self.bias).astype(jnp.float32).reshape(column)
        return y.astype(array.dtype)

    def initializer(self, name: str) -> Any:
        """No change after normalising: a weight of one, and a bias of zero."""
        return jax.nn.initializers.zeros if name == "bias" else jax.nn.initializers.ones


def check_floats(what: Any, x: jax.Array) -> None:
    """Checks that an input holds floats: a result of integers would be rounded to the type of the input.

    Args:
        what: the layer, or the name of the operation.
        x: the input.

    Raises:
        ValueError: it holds integers or bools.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        name = what if isinstance(what, str) else type(what).__name__
        raise ValueError(f"{name} takes floats, not {x.dtype}: cast the input to a float first")


def _check_last_axis(layer: Module, x: jax.Array, length: int) -> None:
    check_floats(layer, x)
    if x.ndim < 1 or x.shape[-1] != length:
        raise ValueError(
            f"{type(layer).__name__} over {length} values was given an array of shape {x.shape}, "
            f"whose last axis is not {length} long"
        )


def _row(weight: Any, ndim: int, dtype: Any) -> jax.Array:
    """The weight with leading axes of length 1, which make the broadcast explicit."""
    array = jnp.asarray(as_array(weight)).astype(dtype)
    return array.reshape((1,) * (ndim - 1) + array.shape)
