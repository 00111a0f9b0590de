"""``reducescatter.sum``, under MAX's path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..value import TensorValue
from .collectives import scattered_sums


def sum(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None = None,
    axis: int = 0,
    group_size: int | None = None,
) -> list[TensorValue]:
    """The elementwise sum of the devices' tensors, split along an axis: each device gets its part.

    Args:
        inputs, signal_buffers, group_size: as for ``allreduce.sum``.
        axis: axis that is split.

    Raises:
        ValueError: there is no such axis, or as for ``allreduce.sum``.
    """
    return scattered_sums(inputs, signal_buffers, axis, group_size)
