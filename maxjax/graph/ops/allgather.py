"""``allgather``, under MAX's path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..value import TensorValue
from .collectives import gathered


def allgather(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None = None,
    axis: int = 0,
    group_size: int | None = None,
) -> list[TensorValue]:
    """The tensors of all devices joined along an axis, for each of them.

    Args:
        inputs: a tensor for each device; they may differ in size along the axis.
        signal_buffers, group_size: as for ``allreduce.sum``.
        axis: axis along which they are joined.

    Raises:
        ValueError: the tensors, their groups or the buffers do not fit each other.
    """
    return gathered(inputs, signal_buffers, axis, group_size)
