"""``DeviceRef``: the name of a device, as MAX declares it for weights.

A DeviceRef is a name, not a device: recording one moves no data. ``to_jax`` returns the
``jax.Device`` it names.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..driver import CPU, Accelerator, Device, local_devices

if TYPE_CHECKING:
    from ..driver import JaxDevice


# A StrEnum would print the same; MAX's members are (str, Enum), and so are ours.
class DeviceKind(str, Enum):  # noqa: UP042
    """The host, or an accelerator.

    Example:
        >>> DeviceKind("cpu") is DeviceKind.CPU, str(DeviceKind.GPU)
        (True, 'gpu')
    """

    CPU = "cpu"
    GPU = "gpu"

    def __str__(self) -> str:
        return self.value

    @staticmethod
    def from_string(txt: str) -> DeviceKind:
        """The kind named ``txt``; ValueError if there is none."""
        try:
            return DeviceKind(txt)
        except ValueError:
            raise ValueError(f"Unknown device kind {txt}") from None


@dataclass(frozen=True, repr=False)
class DeviceRef:
    """A device by kind and number; equal and hashed by both.

    "gpu" is MAX's word for any accelerator: on a TPU machine ``DeviceRef.GPU(1)`` names
    the second TPU. Numbers count this process's devices; a negative one means 0. An unknown
    kind raises ValueError.

    Example:
        >>> DeviceRef.GPU(1), DeviceRef("cpu") == DeviceRef.CPU(), DeviceRef.CPU() == "cpu:0"
        (gpu:1, True, False)
    """

    device_type: DeviceKind
    id: int = 0

    def __init__(self, device_type: DeviceKind | str, id: int = 0):
        object.__setattr__(self, "device_type", DeviceKind(device_type))
        object.__setattr__(self, "id", max(operator.index(id), 0))

    @staticmethod
    def CPU(id: int = 0) -> DeviceRef:
        return DeviceRef(DeviceKind.CPU, id)

    @staticmethod
    def GPU(id: int = 0) -> DeviceRef:
        return DeviceRef(DeviceKind.GPU, id)

    def __str__(self) -> str:
        return f"{self.device_type}:{self.id}"

    __repr__ = __str__

    def is_cpu(self) -> bool:
        return self.device_type is DeviceKind.CPU

    def is_gpu(self) -> bool:
        """Whether it names an accelerator of any kind."""
        return self.device_type is DeviceKind.GPU

    def to_device(self) -> Device:
        """The driver's Device; ValueError for an accelerator that does not exist."""
        return CPU(self.id) if self.is_cpu() else Accelerator(self.id)

    @staticmethod
    def from_device(device: Device | DeviceRef) -> DeviceRef:
        """The DeviceRef of a driver Device; a DeviceRef is returned unchanged."""
        if isinstance(device, DeviceRef):
            return device
        if not isinstance(device, Device):
            raise TypeError(
                f"expected a DeviceRef or a maxjax.driver.Device, got {type(device).__name__}"
            )
        return DeviceRef(device.label, device.id)

    def to_jax(self) -> JaxDevice:
        """The JAX device; ValueError if this process does not have it.

        Example:
            >>> DeviceRef.CPU().to_jax().platform
            'cpu'
        """
        return Device(self.device_type.value, self.id).to_jax()

    @staticmethod
    def from_jax(device: JaxDevice) -> DeviceRef:
        """The DeviceRef of a JAX device of this process; ValueError for a device of another process.

        Example:
            >>> DeviceRef.from_jax(DeviceRef.CPU().to_jax())
            cpu:0
        """
        kind = DeviceKind.CPU if device.platform == "cpu" else DeviceKind.GPU
        devices = local_devices(kind.value)
        if device not in devices:
            raise ValueError(f"{device} belongs to process {device.process_index}, not to this one")
        return DeviceRef(kind, devices.index(device))


def on_device(array: Any, ref: DeviceRef) -> Any:
    """The array, moved to the device that a shard is declared on.

    The array is returned unchanged if it is a tracer or is on several devices, if it is on an accelerator and ``ref``
    is a CPU (the usual declaration where no device is meant), or if this process has no device of the kind of ``ref``.

    Raises:
        ValueError: the process has devices of this kind, but none with this number.
    """
    import jax
    from jax.core import Tracer

    if isinstance(array, Tracer) or len(array.devices()) > 1:
        return array
    (source,) = array.devices()
    elsewhere = ref.is_cpu() and source.platform != "cpu"
    if elsewhere or not local_devices(ref.device_type.value):
        return array
    target = ref.to_jax()
    return array if source == target else jax.device_put(array, target)
