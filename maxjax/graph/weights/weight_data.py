"""WeightData: one tensor of a checkpoint with its metadata, which is read when it is accessed.

Casts use NumPy and ml_dtypes, and round once, to nearest even, for every pair of types
(:func:`cast_array`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ...driver import Buffer
from ...dtype import DType, native
from ...rendering.rendered import Rendered, card, guarded
from ...rendering.row import bytes_text
from ...storage.blocks import decode
from ...storage.boxes import whole
from ...storage.entry import UnknownType
from ...storage.files import aligned_empty
from ...storage.parts import Part
from ..operands import fitting
from ..quantization import QuantizationEncoding
from ..shape import Shape


class DataSource(Protocol):
    """The source from which an unread WeightData is read."""

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor into new memory."""
        ...

    def read_many(self, names: list[str]) -> dict[str, np.ndarray]:
        """Reads several tensors."""
        ...

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Reads rectangular parts of tensors, each into its memory."""
        ...

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor on the disk."""
        ...

    def nbytes(self, name: str) -> int:
        """The bytes of a tensor on the disk."""
        ...


class PartSource:
    """A DataSource that is defined by :meth:`stored` and :meth:`read_parts` alone."""

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor as it is read."""
        raise NotImplementedError

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Reads rectangular parts of tensors, each into its memory."""
        raise NotImplementedError

    def nbytes(self, name: str) -> int:
        """The bytes of a tensor as it is read."""
        dtype, shape = self.dtype_and_shape(name)
        return math.prod(shape) * dtype.itemsize

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor into new memory."""
        dtype, shape = self.dtype_and_shape(name)
        memory = aligned_empty(math.prod(shape) * dtype.itemsize)
        self.read_parts([Part(name, whole(shape), memory)])
        return memory.view(dtype).reshape(shape)

    def read_many(self, names: list[str]) -> dict[str, np.ndarray]:
        """Reads several tensors."""
        return {name: self.read(name) for name in names}


@dataclasses.dataclass(init=False, repr=False, eq=False)
class WeightData(Rendered):
    """A tensor of a checkpoint and its metadata.

    Args:
        data: array: NumPy, JAX, a Buffer, or any DLPack array. A ``jax.ShapeDtypeStruct`` is a
            placeholder for missing data.
        name: full name.
        dtype: element type, which is trusted: bytes of another type (bfloat16 stored as uint16, or as twice
            as many uint8) are interpreted as this one.
        shape: shape, which is trusted too: an array of another shape is reshaped if it has as many bytes.
        quantization_encoding: block format of quantised bytes.

    Attributes:
        source: source to read the data from, until it is read.

    Example:
        >>> import numpy as np
        >>> from maxjax.graph.weights import WeightData
        >>> data = WeightData.from_numpy(np.array([1.5, 2.7], np.float32), "w")
        >>> data, data.astype("int32").data
        (WeightData(DType.float32, [Dim(2)]), array([1, 2], dtype=int32))
    """

    __hash__ = None  # type: ignore[assignment]  # mutable, like MAX's

    # Fields, because MAX's adapters of weights call dataclasses.replace; it reads the data.
    data: Any  # pyright: ignore[reportRedeclaration]
    name: str
    dtype: DType  # pyright: ignore[reportRedeclaration]
    shape: Shape  # pyright: ignore[reportRedeclaration]
    quantization_encoding: QuantizationEncoding | None

    def __init__(
        self,
        data: Any,
        name: str,
        dtype: Any,
        shape: Any,
        quantization_encoding: QuantizationEncoding | None = None,
    ):
        self._data = data
        self.name = name
        self._dtype = DType.of(dtype)
        self._shape = Shape(shape)
        self.quantization_encoding = quantization_encoding
        self.source: DataSource | None = None
        # After reading, blocks of this encoding are decoded, then casts are applied.
        self.decodes: QuantizationEncoding | None = None
        self.casts: tuple[DType, ...] = ()

    @classmethod
    def lazy(
        cls,
        source: DataSource,
        name: str,
        dtype: DType,
        shape: Iterable[int],
        encoding: QuantizationEncoding | None = None,
    ) -> WeightData:
        unknown = isinstance(dtype, UnknownType)
        self = cls(None, name, DType.uint8 if unknown else dtype, tuple(shape), encoding)
        self._dtype = dtype  # an UnknownType is kept; using it raises its error
        self.source = source
        return self

    @classmethod
    def from_numpy(cls, arr: np.ndarray, name: str) -> WeightData:
        """A NumPy array with its own dtype and shape; the array is kept, not copied.

        Raises:
            ValueError: maxjax does not support the dtype (such as text); or it is complex, which MAX
                does not support either.
        """
        dtype = DType.of(arr.dtype)
        if dtype.is_complex():
            raise ValueError(
                f"'{name}' is {dtype.name}, which from_numpy does not accept, as in MAX: "
                f"use WeightData(array, name, DType.{dtype.name}, array.shape)"
            )
        return cls(arr, name, dtype, arr.shape)

    @property
    def data(self) -> Any:
        """The array, which is read at the first access."""
        if self._data is None and self.source is not None:
            self._data = self.cast(self.source.read(self.name))
        return self._data

    @data.setter
    def data(self, data: Any) -> None:
        self._data = data
        self.source, self.decodes, self.casts = None, None, ()

    @property
    def dtype(self) -> DType:
        """The element type. Setting it interprets the bytes as another type; unread data is read first."""
        return self._dtype

    @dtype.setter
    def dtype(self, dtype: DType) -> None:
        _ = self.data
        self._dtype = dtype

    @property
    def shape(self) -> Shape:
        """The shape. Setting it reshapes the array; unread data is read first."""
        return self._shape

    @shape.setter
    def shape(self, shape: Iterable[Any]) -> None:
        _ = self.data
        self._shape = Shape(shape)

    @property
    def is_loaded(self) -> bool:
        """Whether the array is in memory."""
        return self._data is not None or self.source is None

    @property
    def unread_bytes(self) -> int:
        """The bytes on the disk that are still to be read; 0 once the array is in memory."""
        return 0 if self.is_loaded or self.source is None else self.source.nbytes(self.name)

    def cast(self, array: np.ndarray) -> np.ndarray:
        if self.decodes is not None:
            array = decode(self.decodes.value, array)
        for dtype in self.casts:
            array = cast_array(array, dtype)
        return array

    @property
    def stored_dtype(self) -> np.dtype:
        """The dtype on the disk, before casts."""
        return self.dtype.np if self.source is None else self.source.dtype_and_shape(self.name)[0]

    @property
    def is_as_stored(self) -> bool:
        """Whether the data is on the disk, in the shape of its metadata."""
        if self.source is None or self.is_loaded:
            return False
        return self.source.dtype_and_shape(self.name)[1] == tuple(self.shape)

    def astype(self, dtype: Any) -> WeightData:
        """The data cast to another element type; this WeightData itself if it has that type.

        Values are rounded to nearest even; floats become integers by truncation. Unread data is cast when
        it is read; a placeholder only changes its dtype. The result has no encoding. Quantised blocks are
        dequantised if the new type is a float, and the shape is then that of the values; otherwise their
        bytes are cast.

        Raises:
            ValueError: a complex type would become a real one.
        """
        dtype = DType.of(dtype)
        if dtype is self.dtype:
            return self
        if self.dtype.is_complex() and not dtype.is_complex():
            raise ValueError(
                f"'{self.name}' is {self.dtype.name}: {dtype.name} would lose the imaginary part"
            )
        if self.is_packed and dtype.is_float():
            return self._decoded()._as(dtype)
        return self._as(dtype)

    @property
    def is_packed(self) -> bool:
        encoding = self.quantization_encoding
        if encoding is None or not encoding.is_gguf or self.dtype is not DType.uint8:
            return False
        # Metadata is trusted, as in MAX, so the bytes may not be blocks at all.
        return len(self.shape) > 0 and int(self.shape[-1]) % encoding.block_size == 0

    @property
    def logical_shape(self) -> Shape:
        """The shape of the values: for quantised blocks that of the dequantised values, else ``shape``."""
        encoding = self.quantization_encoding
        if encoding is None or not self.is_packed:
            return self.shape
        return Shape(encoding.logical_shape(tuple(map(int, self.shape))))

    def _decoded(self) -> WeightData:
        """The dequantised weights, in float32."""
        assert self.quantization_encoding is not None
        new = WeightData(None, self.name, DType.float32, self.logical_shape)
        if not self.is_loaded:
            new.source, new.decodes = self.source, self.quantization_encoding
        elif isinstance(self._data, jax.ShapeDtypeStruct):
            shape = tuple(map(int, new.shape))
            new._data = jax.ShapeDtypeStruct(shape, np.float32, sharding=self._data.sharding)
        else:
            new._data = decode(self.quantization_encoding.value, np.asarray(self.typed()))
        return new

    def _as(self, dtype: DType) -> WeightData:
        if dtype is self.dtype:
            return self
        new = WeightData(None, self.name, dtype, self.shape)
        if not self.is_loaded:
            new.source, new.decodes = self.source, self.decodes
            new.casts = (*self.casts, dtype)
        elif isinstance(self._data, jax.ShapeDtypeStruct):
            new._data = jax.ShapeDtypeStruct(
                self._data.shape, dtype.np, sharding=self._data.sharding
            )
        else:
            new._data = cast_array(np.asarray(self.typed()), dtype)
        return new

    def typed(self) -> Any:
        """The array in the dtype and the shape of the metadata, if it has the bytes for them."""
        data, dtype = self.data, self.dtype.np
        is_typed = isinstance(data, jax.Array) and data.dtype == dtype
        array = data if is_typed else native(_host(data))
        if Shape.is_static(self.shape) and array.shape != (shape := tuple(map(int, self.shape))):
            if array.size * array.dtype.itemsize == math.prod(shape) * dtype.itemsize:
                if array.dtype != dtype:
                    array = np.ascontiguousarray(array).reshape(-1).view(dtype)
                return array.reshape(shape)
        if array.dtype != dtype and array.dtype.itemsize == dtype.itemsize:
            array = np.ascontiguousarray(array).view(dtype)
        return array

    def to_buffer(self) -> Buffer:
        """The data as a Buffer, which replaces ``data``.

        Raises:
            ValueError: the array is not contiguous.
        """
        data = self.data
        if isinstance(data, Buffer):
            return data
        array = _host(data)
        if not array.flags.c_contiguous:
            raise ValueError(
                f"weight '{self.name}' is not contiguous; make a contiguous copy first"
            )
        self._data = buffer = Buffer.from_numpy(array)
        return buffer

    def __jax_array__(self) -> jax.Array:
        array = self.typed()
        # A copy, because JAX on a CPU would share the memory of the array that ``data`` returns.
        return array if isinstance(array, jax.Array) else jnp.array(fitting(array), copy=True)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.typed(), dtype=dtype, copy=copy)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._exporter().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._exporter().__dlpack_device__()

    def _exporter(self) -> Any:
        array = self.typed()
        if isinstance(array, np.ndarray) and not is_native(array.dtype):
            return jax.device_put(
                array, jax.local_devices(backend="cpu")[0]
            )  # NumPy cannot export bf16 and fp8
        return array

    def __repr__(self) -> str:
        return guarded(self, lambda: f"WeightData({self.dtype}, {self.shape!r})")

    def _mx_html(self) -> str:
        sizes = ", ".join(map(str, self.logical_shape))
        encoding = self.quantization_encoding
        kind = encoding.value if encoding is not None and self.is_packed else self.dtype.name
        facts = {"type": f"{kind}[{sizes}]"}
        if all(str(size).isdigit() for size in self.shape):
            count = math.prod(map(int, self.shape))
            facts["size"] = bytes_text(count * self.dtype.np.itemsize)
        if isinstance(self._data, jax.ShapeDtypeStruct):
            facts["value"] = "none, a placeholder"
        else:
            facts["value"] = "in memory" if self.is_loaded else "not read yet"
        if not self.is_loaded and self.casts:
            facts["is cast"] = f"from {self.stored_dtype} when it is read"
        return card(f"WeightData {self.name}", facts)


def as_leaf(cls: type) -> None:
    """Registers a class as a pytree whose leaf is its array, so that jitted functions accept it.

    ``jnp.dot`` and others are jitted, and jit only accepts arrays and registered classes.
    """
    jax.tree_util.register_pytree_node(
        cls, lambda one: ((_leaf(one),), None), lambda _, leaves: leaves[0]
    )


def _leaf(one: Any) -> Any:
    """The array of a WeightData or of a Weights cursor, read now, or its placeholder."""
    data = one if isinstance(one, WeightData) else one.data()
    is_placeholder = isinstance(data._data, jax.ShapeDtypeStruct)
    return data._data if is_placeholder else data.__jax_array__()


as_leaf(WeightData)


def _host(data: Any) -> np.ndarray:
    if isinstance(data, np.ndarray):
        return data
    if hasattr(data, "__array__") and not is_torch(data):
        return np.asarray(data)
    return np.asarray(from_library(data))


def is_torch(data: Any) -> bool:
    """Whether it is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.Tensor)


def from_library(data: Any) -> Any:
    """A tensor of torch, or any other DLPack array, as a NumPy array, or as a jax.Array if NumPy has no such dtype."""
    if is_torch(data):
        data = data.detach().cpu().contiguous()
        # As bytes: NumPy does not know torch's bf16 and fp8.
        flat = data.reshape(-1).view(sys.modules["torch"].uint8).numpy()
        return flat.view(DType.of(data.dtype).np).reshape(tuple(data.shape))
    try:
        return np.from_dlpack(data)
    except (TypeError, RuntimeError, BufferError, AttributeError):
        return jax.dlpack.from_dlpack(data)


def read_all(items: list[WeightData]) -> dict[int, np.ndarray]:
    """Reads unread WeightData, those of one source in parallel.

    Returns:
        Arrays by ``id`` of the item, before its casts, in new memory. The items stay unread, so the
        caller may use the memory.
    """
    by_source: dict[int, tuple[DataSource, list[WeightData]]] = {}
    for item in items:
        assert item.source is not None
        by_source.setdefault(id(item.source), (item.source, []))[1].append(item)
    arrays: dict[int, np.ndarray] = {}
    for source, wanted in by_source.values():
        read = source.read_many(list({item.name for item in wanted}))
        seen = set()
        for item in wanted:
            array = read[item.name]
            arrays[id(item)] = array.copy() if item.name in seen else array
            seen.add(item.name)
    return arrays


def cast_array(array: np.ndarray, dtype: DType) -> np.ndarray:
    """``array`` in ``dtype``, rounded once.

    ml_dtypes converts types wider than float32 through float32, which would round twice. Rounding to
    odd in that step makes the second rounding correct (S. Boldo, G. Melquiond, "When double rounding is
    odd", 2005).
    """
    target = dtype.np
    if array.dtype.itemsize <= 2 and array.size > _MANY and array.dtype != target:
        return _looked_up(array, target)
    return _cast(array, target)


# More values than this are cast faster by a look-up in a table of all values of their type.
_MANY = 1 << 16


def _looked_up(array: np.ndarray, target: np.dtype) -> np.ndarray:
    """``array``, of at most 16 bits per value, cast by a table: without the GIL, which ml_dtypes holds."""
    bits = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    if (array.dtype, target) == (DType.bfloat16.np, np.float32):
        found = np.left_shift(bits, np.uint32(16), dtype=np.uint32)
        return found.view(np.float32).reshape(array.shape)
    table = _table(array.dtype, target)
    found = np.empty(bits.shape, target)
    for i in range(0, bits.size, _MANY):  # NumPy makes wide indices of these
        np.take(table, bits[i : i + _MANY], out=found[i : i + _MANY], mode="clip")
    return found.reshape(array.shape)


@functools.lru_cache(maxsize=16)
def _table(dtype: np.dtype, target: np.dtype) -> np.ndarray:
    """All values of a type of at most 16 bits, in the order of their bits, in another type."""
    bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    return _cast(bits.view(dtype), target)


def _cast(array: np.ndarray, target: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        narrow = not is_native(target) or target == np.float16
        wide = array.dtype == np.float64 or (array.dtype.kind in "iu" and array.dtype.itemsize >= 4)
        if narrow and wide:
            return _round_to_odd(array).astype(target)
        if not is_native(array.dtype) and is_native(target):
            return array.astype(np.float32).astype(target)
        return array.astype(target)


def is_native(dtype: np.dtype) -> bool:
    """Whether the type is NumPy's own, not one of ml_dtypes (whose kind may be "f" too)."""
    return dtype.isbuiltin == 1


def _round_to_odd(array: np.ndarray) -> np.ndarray:
    """float32 rounded to odd: truncated, with the last bit set if the value is inexact."""
    exact = array.astype(np.longdouble)  # holds float64 and int64 exactly
    near = np.asarray(exact.astype(np.float32))
    back = near.astype(np.longdouble)
    inexact = np.isfinite(exact) & (back != exact)
    outward = inexact & (np.abs(back) > np.abs(exact))
    cut = np.where(outward, np.nextafter(near, np.float32(0)), near)
    bits = cut.astype(np.float32).view(np.uint32) | inexact.astype(np.uint32)
    return bits.view(np.float32)
