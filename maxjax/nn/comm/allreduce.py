"""Allreduce and Signals, with which layers written for MAX sum over devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...driver import Buffer
from ...graph import ops
from ...graph.device import DeviceRef
from ...graph.tensor_type import BufferType
from ...graph.value import TensorValue
from ..layer import Module


class Allreduce(Module):
    """A layer that sums tensors over devices: ``ops.allreduce.sum``.

    Args:
        num_accelerators: number of devices.

    Raises:
        ValueError: ``num_accelerators`` is not positive.
    """

    def __init__(self, num_accelerators: int):
        super().__init__()
        if num_accelerators < 1:
            raise ValueError(f"Allreduce needs at least one device, not {num_accelerators}")
        self.num_accelerators = num_accelerators

    def __call__(
        self, inputs: Iterable[Any], signal_buffers: Iterable[Any] | None = None
    ) -> list[TensorValue]:
        """The sum of all inputs, for each device."""
        return ops.allreduce.sum(inputs, signal_buffers)


class Signals:
    """The buffers through which MAX's devices synchronise. XLA needs none, so these have size 0.

    Args:
        devices: devices, one for each buffer.

    Example:
        >>> signals = Signals([DeviceRef.CPU()])
        >>> signals.input_types()
        [BufferType(dtype=uint8, shape=[Dim(0)], device=cpu:0)]
    """

    NUM_BYTES = 0

    def __init__(self, devices: Iterable[DeviceRef]):
        self.devices = list(devices)

    @staticmethod
    def allocate(devices: Sequence[Any]) -> list[Buffer]:
        """A new buffer for each device."""
        return [Buffer.from_numpy(np.zeros(0, np.uint8)) for _ in devices]

    def buffers(self) -> list[Buffer]:
        """A new buffer for each of this object's devices."""
        return self.allocate(self.devices)

    def input_types(self) -> list[BufferType]:
        """The type of each buffer, for the inputs of a Graph."""
        return [BufferType("uint8", (self.NUM_BYTES,), device) for device in self.devices]
