"""Normalisation ops, which take their weights as arguments. The sums are taken in float32.

The result has the dtype of the input, not that of the weights. The last two ops are collectives of MAX followed by
an RMSNorm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ..operands import normalised
from ..value import TensorValue
from . import reducescatter
from .collectives import allgather, groups_of, inputs_of
from .lift import array, floating, lift, rounded, same, wide


@lift
def layer_norm(input: Any, gamma: Any, beta: Any, epsilon: float) -> Any:
    """``(x - mean) / √(variance + epsilon) · gamma + beta`` over the last axis.

    Args:
        gamma, beta: vectors of the length of the last axis.

    Raises:
        ValueError: they have another length; the message has both.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.layer_norm(jnp.array([[1.0, 5.0]]), jnp.ones(2), jnp.zeros(2), 0.0))
        [[-1.  1.]]
    """
    x = floating(input, "layer_norm")
    scale, shift = (_broadcastable(w, x, name) for w, name in ((gamma, "gamma"), (beta, "beta")))
    y = normalised(wide(x), -1, epsilon)
    return rounded(y * rounded(scale, y.dtype) + rounded(shift, y.dtype), x.dtype)


@lift
def rms_norm(
    input: Any,
    weight: Any,
    epsilon: float,
    weight_offset: float = 0.0,
    multiply_before_cast: bool = False,
) -> Any:
    """``x / √(mean(x²) + epsilon) · (weight + weight_offset)`` over the last axis.

    Args:
        weight: vector of the length of the last axis.
        multiply_before_cast: whether to multiply by the weight in float32 and then cast to the dtype of
            the input. Otherwise the cast comes first, as in Llama.

    Raises:
        ValueError: the weight has another length.
    """
    x = floating(input, "rms_norm")
    scale = _broadcastable(weight, x, "the weight")
    y = wide(x)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    if not multiply_before_cast:
        y = rounded(y, x.dtype)
    return rounded(y * (rounded(scale, y.dtype) + weight_offset), x.dtype)


@lift
def group_norm(input: Any, gamma: Any, beta: Any, num_groups: int, epsilon: float) -> Any:
    """Normalises each group of channels to mean 0 and variance 1, then applies ``· gamma + beta``.

    Args:
        input: ``[N, C, ...]``.
        gamma, beta: ``[C]``.
        num_groups: number of groups, which must divide ``C``.

    Raises:
        ValueError: it does not divide ``C``, or the shape of gamma or beta is not ``[C]``.
    """
    x = floating(input, "group_norm")
    channels = x.shape[1] if x.ndim > 1 else 0
    if x.ndim < 2 or num_groups < 1 or not same(channels % num_groups, 0):
        raise ValueError(
            f"group_norm: {num_groups} groups do not divide the channels of [N, C, ...] = {x.shape}"
        )
    shape = (1, channels) + (1,) * (x.ndim - 2)
    weights = []
    for w, name in ((array(gamma), "gamma"), (array(beta), "beta")):
        if w.ndim != 1 or not same(w.shape[0], channels):
            raise ValueError(
                f"group_norm: {name} has shape {w.shape}, but there are {channels} channels"
            )
        weights.append(w.reshape(shape))
    grouped = wide(x).reshape(
        (x.shape[0], num_groups, channels // num_groups * math.prod(x.shape[2:]))
    )
    y = normalised(grouped, -1, epsilon).reshape(x.shape)
    return rounded(y * rounded(weights[0], y.dtype) + rounded(weights[1], y.dtype), x.dtype)


def _broadcastable(weight: Any, x: jax.Array, name: str) -> jax.Array:
    """A weight for the last axis, with leading axes of length 1."""
    w = array(weight)
    if w.ndim != 1 or not x.ndim or not same(w.shape[0], x.shape[-1]):
        raise ValueError(
            f"{name} has shape {w.shape}, which does not fit the last axis of the input {x.shape}"
        )
    return w.reshape((1,) * (x.ndim - 1) + w.shape)


def allgather_rms_norm(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None,
    gammas: Iterable[Any],
    epsilon: float,
    weight_offset: float = 0.0,
    group_size: int | None = None,
) -> tuple[list[TensorValue], list[TensorValue]]:
    """The concatenated rows of all devices, first normalised and then unchanged, once for each device.

    Args:
        inputs: a tensor ``[rows, E]`` for each device.
        signal_buffers, group_size: as for ``allreduce.sum``.
        gammas: weights ``[E]`` of an RMSNorm, for each device.
        epsilon, weight_offset: as for ``rms_norm`` with ``multiply_before_cast``.

    Raises:
        ValueError: there are fewer than two tensors, the number or length of the weights does not fit, or an error
            of ``allgather``.

    Example:
        >>> one, rows = jnp.ones(2), [jnp.array([[3.0, 3.0]]), jnp.array([[-2.0, 2.0]])]
        >>> normed, joined = allgather_rms_norm(rows, None, [one, one], 0.0)
        >>> normed[1].to_numpy().tolist(), joined[0].to_numpy().tolist()
        ([[1.0, 1.0], [-1.0, 1.0]], [[3.0, 3.0], [-2.0, 2.0]])
    """
    joined = allgather(_several("allgather_rms_norm", inputs), signal_buffers, 0, group_size)
    return _weighted_norms("allgather_rms_norm", joined, gammas, epsilon, weight_offset), joined


def reduce_scatter_rms_norm(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None,
    gammas: Iterable[Any],
    epsilon: float,
    residuals: Iterable[Any] | None = None,
    weight_offset: float = 0.0,
    group_size: int | None = None,
) -> tuple[list[TensorValue], list[TensorValue]]:
    """Each device's rows of the sum of all tensors, first normalised and then unchanged.

    Args:
        inputs: a tensor ``[rows, E]`` for each device; the sum is computed in float32.
        signal_buffers, group_size: as for ``allreduce.sum``.
        gammas: weights ``[E]`` of an RMSNorm, for each device.
        epsilon, weight_offset: as for ``rms_norm`` with ``multiply_before_cast``.
        residuals: a tensor ``[rows, E]`` for each device, equal within a group, that is added to its sum once.

    Raises:
        ValueError: there are fewer than two tensors, the number or shape of the residuals or weights does not fit,
            or an error of ``reducescatter.sum``.

    Example:
        >>> rows, one = jnp.array([[1.0, 1.0], [1.0, -1.0]]), jnp.ones(2)
        >>> normed, sums = reduce_scatter_rms_norm([rows, rows], None, [one, one], 0.0)
        >>> normed[1].to_numpy().tolist(), sums[1].to_numpy().tolist()
        ([[1.0, -1.0]], [[2.0, -2.0]])
    """
    op = "reduce_scatter_rms_norm"
    values = _several(op, inputs)
    wide = [_wide(x) for x in values]
    if residuals is not None:
        added = [_wide(TensorValue(x)) for x in residuals]
        if [x.shape for x in added] != [x.shape for x in wide]:
            raise ValueError(f"{op} takes a residual of its shape for each of {len(wide)} tensors")
        size = len(groups_of(op, wide, group_size)[0])
        # Once for each group: with the tensor of its first device.
        wide = [
            x + r if i % size == 0 else x for i, (x, r) in enumerate(zip(wide, added, strict=True))
        ]
    sums = reducescatter.sum(wide, signal_buffers, 0, group_size)
    normed = _weighted_norms(op, sums, gammas, epsilon, weight_offset)
    narrow = lambda found: [x.cast(y.dtype) for x, y in zip(found, values, strict=True)]
    return narrow(normed), narrow(sums)


def _several(op: str, inputs: Iterable[Any]) -> list[TensorValue]:
    values = inputs_of(op, inputs, None)
    if len(values) < 2:
        raise ValueError(f"{op} needs the tensors of at least two devices")
    return values


def _wide(x: TensorValue) -> TensorValue:
    return TensorValue(x.value.astype(jnp.float32))


def _weighted_norms(
    op: str, values: list[TensorValue], gammas: Iterable[Any], epsilon: float, offset: float
) -> list[TensorValue]:
    gammas = [TensorValue(gamma) for gamma in gammas]
    if len(gammas) != len(values):
        raise ValueError(
            f"{op} needs a weight for each of {len(values)} tensors, not {len(gammas)}"
        )
    return [
        rms_norm(x, gamma, epsilon, offset, multiply_before_cast=True)
        for x, gamma in zip(values, gammas, strict=True)
    ]
