"""``Buffer``, ``DLPackArray`` and devices: MAX's names for arrays shared between libraries.

A Buffer is a NumPy array in host memory with a DType; it supports DLPack, also for bfloat16 and
float8.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from .absent import absent as _absent
from .dtype import DType, fitting, misfit

if TYPE_CHECKING:
    import jax
    from jaxlib._jax import Device as JaxDevice  # jax.Device, which type checkers take for a value

Index = int | slice


@runtime_checkable
class DLPackArray(Protocol):
    """Any array that another library can read without a copy: NumPy, JAX and torch arrays, Buffers.

    Example:
        >>> isinstance(np.zeros(2), DLPackArray), isinstance([1, 2], DLPackArray)
        (True, False)
    """

    def __dlpack__(self, *, stream: None = None) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


def local_devices(label: str) -> list[JaxDevice]:
    """This process's JAX devices: CPU devices for "cpu", accelerators for "gpu"."""
    import jax

    if label == "cpu":
        return jax.local_devices(backend="cpu")
    # The default backend is the accelerator's, unless the user put the CPU first.
    found = [device for device in jax.local_devices() if device.platform != "cpu"]
    if not found:
        with contextlib.suppress(RuntimeError):
            found = jax.local_devices(backend="gpu")
    return found


def memory_stats(device: Any) -> Mapping[str, int]:
    """The memory statistics of a jax.Device; empty if it has none.

    Devices of another process, and those of a topology that programs are only compiled for, raise
    an error, which gives an empty result too.
    """
    try:
        return device.memory_stats() or {}
    except (RuntimeError, NotImplementedError, AttributeError):
        return {}


def free_bytes(device: Any) -> int | None:
    """The number of free bytes of a device, or of the host for a CPU; None if it is unknown."""
    if device.platform != "cpu":
        stats = memory_stats(device)
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    limits = [_available_on_host(), _free_addresses()]
    return min((limit for limit in limits if limit is not None), default=None)


def _available_on_host() -> int | None:
    """The number of bytes that Linux can provide without swapping, at most those of the control group."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    found = kilobytes.get("MemAvailable", 0) * 1024
    return min(found, _available_in_group()) or None


def _available_in_group() -> int:
    """The number of bytes that the control group of this process may still use; 2**63 without a limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        cache = next(
            int(line.split()[1])
            for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        )
        return 2**63 if limit == "max" else int(limit) - used + cache
    except (OSError, ValueError, StopIteration):
        return 2**63


def _free_addresses() -> int | None:
    """The number of bytes that this process may still allocate by its limit of address space (ulimit -v)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not on Linux
        return None
    return limit - pages * resource.getpagesize()


def accelerator_count() -> int:
    """The number of accelerators of this process."""
    return len(local_devices("gpu"))


def accelerator_api() -> str:
    """What the accelerators of this process run: "cuda", "hip" (AMD) or "tpu"; "cpu" without one."""
    found = local_devices("gpu")
    if not found:
        return "cpu"
    version = str(getattr(found[0].client, "platform_version", "")).lower()
    known = [name for key, name in (("cuda", "cuda"), ("rocm", "hip")) if key in version]
    return known[0] if known else found[0].platform


def accelerator_architecture_name() -> str:
    """What kind the accelerators of this process are, as JAX says it; "" without one."""
    found = local_devices("gpu")
    return found[0].device_kind if found else ""


def is_virtual_device_mode() -> bool:
    """Always False; in MAX, whether programs are compiled for absent devices (JAX: ``jax.experimental.topologies``)."""
    return False


class Usage(enum.Flag):
    """MAX's purposes of a Buffer's memory. Here all of it is host memory, so they make no difference."""

    DEFAULT = 0
    STAGING = 1
    UNTRACKED = 2


@dataclass(frozen=True, repr=False)
class Device:
    """A device of this process: ``label`` "cpu" or "gpu" (any accelerator), and index ``id``.

    Example:
        >>> CPU(), CPU() == CPU(0), CPU().is_host
        (Device(type=cpu,id=0), True, True)
    """

    label: str
    id: int = 0

    @property
    def is_host(self) -> bool:
        return self.label == "cpu"

    @property
    def api(self) -> str:
        """The backend: "cpu", or the accelerator's JAX platform."""
        return "cpu" if self.is_host else self.to_jax().platform

    def to_jax(self) -> JaxDevice:
        """The JAX device; ValueError if this process has no such device."""
        devices = local_devices(self.label)
        if not 0 <= self.id < len(devices):
            kind = "CPU" if self.is_host else "accelerator"
            raise ValueError(
                f"there is no device {self.label}:{self.id}: this process has {len(devices)} {kind}"
                f" device(s). jax.devices() lists them."
            )
        return devices[self.id]

    def __repr__(self) -> str:
        return f"Device(type={self.label},id={self.id})"


class CPU(Device):
    """The host."""

    def __init__(self, id: int = 0):
        super().__init__("cpu", max(operator.index(id), 0))


class Accelerator(Device):
    """A GPU or TPU; ValueError if this process has no such device."""

    def __init__(self, id: int = 0):
        super().__init__("gpu", max(operator.index(id), 0))
        self.to_jax()


@dataclass(frozen=True)
class DeviceSpec:
    """A device by its index and type, ``"cpu"`` or ``"gpu"`` (any accelerator)."""

    id: int = 0
    device_type: str = "cpu"

    @staticmethod
    def cpu(id: int = 0) -> DeviceSpec:
        """The host."""
        return DeviceSpec(id, "cpu")

    @staticmethod
    def accelerator(id: int = 0) -> DeviceSpec:
        """A GPU or TPU."""
        return DeviceSpec(id, "gpu")


def load_devices(device_specs: Sequence[DeviceSpec]) -> list[Device]:
    """The devices of the given specs, in the same order.

    Raises:
        ValueError: this process has no such device, or the device type is unknown.

    Example:
        >>> load_devices([DeviceSpec.cpu()])
        [Device(type=cpu,id=0)]
    """
    kinds = {"cpu": CPU, "gpu": Accelerator}
    for spec in device_specs:
        if spec.device_type not in kinds:
            raise ValueError(f"a device_type is 'cpu' or 'gpu', not {spec.device_type!r}")
    return [kinds[spec.device_type](spec.id) for spec in device_specs]


class Buffer:
    """A mutable array in host memory: ``Buffer(dtype, shape)`` is filled with zeros.

    A Buffer made from a NumPy or DLPack array shares its memory; ``np.asarray`` of a Buffer does
    too, ``jnp.asarray`` copies. Indexing takes one index per axis and gives a Buffer. A Buffer is
    equal only to itself.

    Example:
        >>> b = Buffer.from_numpy(np.arange(4, dtype=np.float32).reshape(2, 2))
        >>> b, b[1, 0].item(), b[:, 1].to_numpy()
        (maxjax.driver.Buffer(DType.float32, (2, 2), cpu[0]), 2.0, array([1., 3.], dtype=float32))
        >>> b.view(DType.uint16).shape
        (2, 4)
    """

    __slots__ = ("__weakref__", "_array")

    def __init__(self, dtype: Any, shape: Sequence[int], device: Device | None = None):
        _require_host(device)
        if isinstance(shape, int | str):
            raise TypeError(f"shape must be a sequence of sizes, got {shape!r}")
        sizes = tuple(operator.index(size) for size in shape)
        self._array = np.zeros(sizes, DType.of(dtype).np)

    @classmethod
    def _of(cls, array: np.ndarray) -> Buffer:
        """A Buffer on this array without a copy; ValueError for a dtype that DType does not have."""
        DType.of(array.dtype)
        self = object.__new__(cls)
        self._array = array
        return self

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: Any, device: Device | None = None) -> Buffer:
        return cls(dtype, shape, device)

    @classmethod
    def scalar(cls, value: Any, dtype: Any, device: Device | None = None) -> Buffer:
        """A Buffer of shape () that holds ``value``."""
        self = cls(dtype, (), device)
        self[()] = value
        return self

    @classmethod
    def from_numpy(cls, arr: np.ndarray) -> Buffer:
        """A Buffer on the memory of ``arr``, which may be strided; a read-only array is copied.

        Raises:
            TypeError: ``arr`` is not a NumPy array, or its numbers are complex, which no Buffer holds, as in MAX.
            ValueError: DType does not have its dtype.
            BufferError: it holds no numbers, or is not in the machine's byte order.
        """
        if not isinstance(arr, np.ndarray):
            raise TypeError(f"expected a numpy.ndarray, got {type(arr).__name__}")
        if arr.dtype.kind == "c":
            raise TypeError(
                f"a Buffer does not hold {arr.dtype}: keep the NumPy array, which loads as it is"
            )
        if arr.dtype.kind in "OSUMm":
            raise BufferError(f"a Buffer holds numbers, not {arr.dtype}")
        if not arr.dtype.isnative:
            raise BufferError(f"byte order of {arr.dtype} is not this machine's")
        return cls._of(arr if arr.flags.writeable else arr.copy())

    @classmethod
    def from_dlpack(cls, array: Any, *, copy: bool | None = None) -> Buffer:
        """A Buffer on the memory of a DLPack array; arrays on accelerators are copied to the host.

        ``copy=True`` always copies; ``copy=None`` copies only read-only memory, such as that of JAX
        arrays; ``copy=False`` raises BufferError for it. A Buffer is returned as it is unless it is
        copied.

        Raises:
            TypeError: ``array`` is not a DLPack array.
            ValueError: it is not contiguous.
            BufferError: it is read-only, and ``copy=False``.
        """
        if isinstance(array, Buffer):
            return array.copy() if copy else array
        if not isinstance(array, DLPackArray) or isinstance(array, np.generic):
            raise TypeError(f"expected an array with __dlpack__, got {type(array).__name__}")
        view = _as_numpy(array)
        if not view.flags.c_contiguous:
            raise ValueError(
                "from_dlpack only accepts contiguous arrays. First call np.ascontiguousarray(array)"
            )
        if copy is False and not view.flags.writeable:
            raise BufferError("the array is read-only; pass copy=True or copy=None")
        return cls.from_numpy(view.copy() if copy else view)

    # --- properties ---

    @property
    def dtype(self) -> DType:
        return DType.of(self._array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance between neighbours along each axis, in elements."""
        return tuple(stride // self._array.itemsize for stride in self._array.strides)

    @property
    def rank(self) -> int:
        return self._array.ndim

    @property
    def num_elements(self) -> int:
        return self._array.size

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return self._array.itemsize

    @property
    def device(self) -> Device:
        return CPU()

    @property
    def is_host(self) -> bool:
        return True

    @property
    def pinned(self) -> bool:
        return False

    @property
    def is_contiguous(self) -> bool:
        return self._array.flags.c_contiguous

    def __repr__(self) -> str:
        return f"maxjax.driver.Buffer({self.dtype}, {self.shape}, cpu[0])"

    def __str__(self) -> str:
        values = np.array2string(self._array, separator=" ", prefix="Buffer(")
        return f"Buffer({values}, dtype={self.dtype}, shape={self.shape}, device={self.device})"

    # --- elements ---

    def _index(self, idx: Any) -> tuple[Any, ...]:
        given = idx if isinstance(idx, tuple | list) else (idx,)
        indices = tuple(i if isinstance(i, slice) else operator.index(i) for i in given)
        if len(indices) != self.rank:
            raise ValueError(
                f"the provided number of indices ({len(indices)}) is not equal to the tensor rank"
                f" ({self.rank})"
            )
        return indices

    def __getitem__(self, idx: Index | Sequence[Index]) -> Buffer:
        # The ellipsis keeps a single element an array on the same memory.
        return Buffer._of(self._array[(*self._index(idx), ...)])

    def __setitem__(self, idx: Index | Sequence[Index], value: Any) -> None:
        value = value.to_numpy() if isinstance(value, Buffer) else value
        if self.dtype.is_integral():
            given = np.asarray(value)
            if given.dtype.kind not in "biu":
                raise TypeError(
                    f"cannot store {value!r} in a Buffer of {self.dtype!r} without loss"
                )
            if found := misfit(given, self._array.dtype):
                raise OverflowError(f"{found} do not fit in a Buffer of {self.dtype!r}")
        self._array[self._index(idx)] = value

    def item(self) -> bool | int | float:
        """The only element, as a Python number; ValueError if there are more or none."""
        if self._array.size != 1:
            count = self._array.size
            raise ValueError(f"calling `item` on a tensor with {count} items but expected only 1")
        return self._array.item()

    # --- conversions ---

    def view(self, dtype: Any, shape: Sequence[int] | None = None) -> Buffer:
        """The same bytes as another dtype, by default with the last axis resized to fit.

        Raises:
            ValueError: the number of bytes does not fit; a strided Buffer would get another shape;
                one of the dtypes has less than 8 bits, which take a byte per element.
        """
        dtype = DType.of(dtype)
        widths = {dtype.size_in_bits, self.dtype.size_in_bits}
        if len(widths) == 2 and min(widths) < 8:
            raise ValueError(f"a Buffer of {self.dtype!r} cannot be viewed as {dtype!r}")
        if shape is None:
            return Buffer._of(self._array.view(dtype.np))
        sizes = tuple(operator.index(size) for size in shape)
        count = int(np.prod(sizes, dtype=object)) if min(sizes, default=0) >= 0 else -1
        if count * dtype.size_in_bytes != self._array.nbytes:
            raise ValueError("byte sizes don't match in view creation")
        if not self.is_contiguous:
            raise ValueError("a strided Buffer cannot be viewed in another shape: copy it first")
        return Buffer._of(self._array.reshape(-1).view(dtype.np).reshape(sizes))

    def to_numpy(self) -> np.ndarray:
        """A NumPy array on this memory; bfloat16 and smaller floats have an ml_dtypes dtype."""
        return self._array.view()

    def copy(self, device: Device | None = None) -> Buffer:
        """A contiguous copy."""
        _require_host(device)
        return Buffer._of(self._array.copy(order="C"))

    def contiguous(self) -> Buffer:
        """A contiguous Buffer, copied only if this one is not contiguous."""
        return Buffer._of(np.ascontiguousarray(self._array).reshape(self.shape))

    def to(self, device: Device | Sequence[Device]) -> Any:
        """This Buffer, or a list of it for a sequence of devices. Accelerators raise ValueError."""
        for one in [device] if isinstance(device, Device) else device:
            _require_host(one)
        return self if isinstance(device, Device) else [self for _ in device]

    def inplace_copy_from(self, src: Buffer) -> None:
        """Overwrite the elements with those of ``src``; ValueError unless dtype and shape match."""
        if src.dtype is not self.dtype:
            raise ValueError("Cannot copy buffers of different dtypes")
        if src.shape != self.shape:
            raise ValueError("Cannot copy buffers of different sizes")
        self._array[...] = src._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype=dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        import jax.numpy as jnp

        # Copied, as JAX on a CPU would share aligned NumPy memory, and a Buffer is mutable.
        return jnp.array(fitting(self._array), copy=True)

    def __dlpack__(self, *, stream: Any = None, **kwargs: Any) -> Any:
        """A DLPack capsule on this memory; for bfloat16 and float8, on a copy made by JAX.

        BufferError for dtypes of less than 8 bits, for which DLPack has no common representation.
        """
        if self._array.dtype.type.__module__ == "numpy":
            return self._array.__dlpack__(stream=stream, **kwargs)
        if self.dtype.size_in_bits < 8:
            raise BufferError(f"DLPack cannot carry {self.dtype!r}")
        import jax

        on_host = jax.device_put(self.__jax_array__(), CPU().to_jax())
        return on_host.__dlpack__(stream=stream, **kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _require_host(device: Device | None) -> None:
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"expected a maxjax.driver.Device, got {type(device).__name__}")
    if device is not None and not device.is_host:
        raise ValueError(
            f"a Buffer is in host memory, not on {device}. Use jax.device_put for arrays there."
        )


def _as_numpy(array: Any) -> np.ndarray:
    """Any DLPack array as NumPy's, on the same memory where both can address it."""
    if isinstance(array, np.ndarray):
        return array
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError):
        # JAX supports what NumPy cannot import (bfloat16, float8, accelerators); neither supports
        # torch tensors that require gradients.
        import jax

        return np.asarray(array if isinstance(array, jax.Array) else jax.dlpack.from_dlpack(array))


__getattr__ = _absent(__name__)
