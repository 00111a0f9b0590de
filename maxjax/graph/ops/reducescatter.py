"""``reducescatter.sum``, under MAX's path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from ..placement.arrays import beside
from ..placement.split import even_range
from ..value import TensorValue
from . import allreduce
from .collectives import groups_of, inputs_of
from .lift import axis_of


def sum(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None = None,
    axis: int = 0,
    group_size: int | None = None,
) -> list[TensorValue]:
    """The elementwise sum of the devices' tensors, split along an axis: each device gets its part.

    If the axis does not divide evenly, the first parts are one element longer.

    Args:
        inputs, signal_buffers, group_size: as for ``allreduce.sum``.
        axis: axis that is split.

    Raises:
        ValueError: there is no such axis, or as for ``allreduce.sum``.
    """
    values = inputs_of("reducescatter.sum", inputs, signal_buffers)
    groups = groups_of("reducescatter.sum", values, group_size)
    axis = axis_of(axis, values[0].rank, "reducescatter.sum")
    found: list[TensorValue] = []
    for group in groups:
        total = allreduce.sum(group)[0].value
        for i, one in enumerate(group):
            start, stop = even_range(total.shape[axis], i, len(group))
            part = jax.lax.slice_in_dim(total, start, stop, axis=axis)
            found.append(TensorValue(beside(part, one.value)))
    return found
