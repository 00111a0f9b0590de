"""``distributed_broadcast``, under MAX's path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..value import TensorValue
from .collectives import placed


def distributed_broadcast(input: Any, signal_buffers: Iterable[Any]) -> list[TensorValue]:
    """The tensor on each device.

    Args:
        input: the tensor.
        signal_buffers: a buffer on each device.

    Raises:
        ValueError: there is no signal buffer.
    """
    value, buffers = TensorValue(input), list(signal_buffers)
    if not buffers:
        raise ValueError("distributed_broadcast needs at least one signal buffer")
    return [TensorValue(placed(value.value, getattr(one, "value", one))) for one in buffers]
