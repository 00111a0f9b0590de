"""``allreduce.sum``, under MAX's path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..placement.arrays import beside
from ..value import TensorValue
from .collectives import groups_of, inputs_of, same_shapes, together


def sum(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None = None,
    group_size: int | None = None,
) -> list[TensorValue]:
    """The elementwise sum of the devices' tensors, once for each device.

    Args:
        inputs: a tensor for each device, of one dtype and shape.
        signal_buffers: a buffer for each device, with which MAX synchronises; only their number is checked.
        group_size: number of consecutive tensors that are summed together; all by default.

    Raises:
        ValueError: there is no tensor, the tensors of a group differ in dtype or shape, ``group_size`` does not
            divide their number, or the number of buffers is another.

    Example:
        >>> import jax.numpy as jnp
        >>> [print(x.value) for x in sum([jnp.ones(2), jnp.full(2, 3.0)])] and None
        [4. 4.]
        [4. 4.]
    """
    values = inputs_of("allreduce.sum", inputs, signal_buffers)
    found: list[TensorValue] = []
    for group in groups_of("allreduce.sum", values, group_size):
        same_shapes("allreduce.sum", group)
        total, *others = together(group)
        for one in others:
            total = total + one
        found += [TensorValue(beside(total, x.value)) for x in group]
    return found
