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
    """The sum of the tensors of all devices, of which each gets its part along an axis.

    Args:
        inputs, signal_buffers, group_size: as for ``allreduce.sum``.
        axis: axis that is split.

    Raises:
        ValueError: the tensors, their groups or the buffers do not fit each other.
    """
    return scattered_sums(inputs, signal_buffers, axis, group_size)
