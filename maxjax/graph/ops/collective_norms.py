"""MAX's collectives that normalise what they give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from ..value import TensorValue
from .collectives import allgather, groups_of, inputs_of, scattered_sums
from .normalization import rms_norm


def allgather_rms_norm(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None,
    gammas: Iterable[Any],
    epsilon: float,
    weight_offset: float = 0.0,
    group_size: int | None = None,
) -> tuple[list[TensorValue], list[TensorValue]]:
    """The rows of all devices joined, normalised and as they are, for each of them.

    Args:
        inputs: a tensor ``[rows, E]`` for each device.
        signal_buffers, group_size: as for ``allreduce.sum``.
        gammas: weights ``[E]`` of an RMSNorm, for each device.
        epsilon, weight_offset: as for ``rms_norm``, which multiplies before it rounds.

    Raises:
        ValueError: the tensors, their groups, the weights or the buffers do not fit each other.

    Example:
        >>> one, rows = jnp.ones(2), [jnp.array([[3.0, 3.0]]), jnp.array([[-2.0, 2.0]])]
        >>> normed, joined = allgather_rms_norm(rows, None, [one, one], 0.0)
        >>> normed[1].to_numpy().tolist(), joined[0].to_numpy().tolist()
        ([[1.0, 1.0], [-1.0, 1.0]], [[3.0, 3.0], [-2.0, 2.0]])
    """
    joined = allgather(_several("allgather_rms_norm", inputs), signal_buffers, 0, group_size)
    return _normalised("allgather_rms_norm", joined, gammas, epsilon, weight_offset), joined


def reduce_scatter_rms_norm(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None,
    gammas: Iterable[Any],
    epsilon: float,
    residuals: Iterable[Any] | None = None,
    weight_offset: float = 0.0,
    group_size: int | None = None,
) -> tuple[list[TensorValue], list[TensorValue]]:
    """The sum of the rows of all devices, of which each gets its part, normalised and as it is.

    Args:
        inputs: a tensor ``[rows, E]`` for each device; the sum is computed in float32.
        signal_buffers, group_size: as for ``allreduce.sum``.
        gammas: weights ``[E]`` of an RMSNorm, for each device.
        epsilon, weight_offset: as for ``rms_norm``, which multiplies before it rounds.
        residuals: a tensor ``[rows, E]`` for each device, the same in a group, that is added to the sum once.

    Raises:
        ValueError: the tensors, their groups, the weights or the buffers do not fit each other.

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
    sums = scattered_sums(wide, signal_buffers, 0, group_size)
    normed = _normalised(op, sums, gammas, epsilon, weight_offset)
    narrow = lambda found: [x.cast(y.dtype) for x, y in zip(found, values, strict=True)]
    return narrow(normed), narrow(sums)


def _several(op: str, inputs: Iterable[Any]) -> list[TensorValue]:
    values = inputs_of(op, inputs, None)
    if len(values) < 2:
        raise ValueError(f"{op} needs the tensors of at least two devices")
    return values


def _wide(x: TensorValue) -> TensorValue:
    return TensorValue(x.value.astype(jnp.float32))


def _normalised(
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
