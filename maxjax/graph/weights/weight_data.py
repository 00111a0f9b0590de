"""WeightData: one tensor of a checkpoint with its metadata, read when looked at.

Casts are done by NumPy and ml_dtypes and rounded once, to nearest even, whatever the
pair of types (:func:`cast_array`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ...driver import Buffer
from ...dtype import DType
from ...storage.blocks import decode
from ...storage.boxes import whole
from ...storage.entry import UnknownType
from ...storage.files import aligned_empty
from ...storage.parts import Part
from ..quantization import QuantizationEncoding
from ..shape import Shape


class Source(Protocol):
    """Where the bytes of a WeightData that was not read yet come from."""

    def read(self, name: str) -> np.ndarray:
        """The tensor, in memory nobody else holds."""
        ...

    def read_many(self, names: list[str]) -> dict[str, np.ndarray]:
        """Several at once."""
        ...

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Rectangles of some, into the memory for each."""
        ...

    def stored(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor on the disk."""
        ...


class PartSource:
    """A Source that has all else from :meth:`stored` and :meth:`read_parts`."""

    def stored(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor as it is read."""
        raise NotImplementedError

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Rectangles of some, into the memory for each."""
        raise NotImplementedError

    def read(self, name: str) -> np.ndarray:
        """The tensor, in memory nobody else holds."""
        dtype, shape = self.stored(name)
        memory = aligned_empty(math.prod(shape) * dtype.itemsize)
        self.read_parts([Part(name, whole(shape), memory)])
        return memory.view(dtype).reshape(shape)

    def read_many(self, names: list[str]) -> dict[str, np.ndarray]:
        """Several at once."""
        return {name: self.read(name) for name in names}


class WeightData:
    """A tensor and what is known about it.

    Args:
        data: the array: NumPy, JAX, a Buffer, or anything that speaks DLPack.
            A ``jax.ShapeDtypeStruct`` stands for data that is not there.
        name: its full name.
        dtype: its element type. Trusted: where the array has another type of the same
            width (bfloat16 bits held as uint16), the bytes are taken to be of this one.
        shape: its shape. Trusted.
        quantization_encoding: the block format of packed bytes.

    Attributes:
        source: source to read the data from, until it is read.

    Example:
        >>> import numpy as np
        >>> from maxjax.graph.weights import WeightData
        >>> data = WeightData.from_numpy(np.array([1.5, 2.7], np.float32), "w")
        >>> data, data.astype("int32").data
        (WeightData(DType.float32, [Dim(2)]), array([1, 2], dtype=int32))
    """

    __hash__ = None  # type: ignore[assignment]  # it can be changed, like MAX's

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
        self.dtype = DType.of(dtype)
        self.shape = Shape(shape)
        self.quantization_encoding = quantization_encoding
        self.source: Source | None = None
        # What is done to what is read: blocks of this encoding decoded, then casts.
        self._decodes: QuantizationEncoding | None = None
        self._casts: tuple[DType, ...] = ()

    @classmethod
    def _lazy(
        cls,
        source: Source,
        name: str,
        dtype: DType,
        shape: Iterable[int],
        encoding: QuantizationEncoding | None = None,
    ) -> WeightData:
        unknown = isinstance(dtype, UnknownType)
        self = cls(None, name, DType.uint8 if unknown else dtype, tuple(shape), encoding)
        self.dtype = dtype  # an UnknownType stays what it is, for who asks more of it
        self.source = source
        return self

    @classmethod
    def from_numpy(cls, arr: np.ndarray, name: str) -> WeightData:
        """A NumPy array with its own dtype and shape; the array is kept, not copied.

        Raises:
            ValueError: the dtype is none of maxjax's, as text; or it is complex, as in MAX.
        """
        dtype = DType.of(arr.dtype)
        if dtype.is_complex():
            raise ValueError(
                f"'{name}' is {dtype.name}, which MAX's WeightData is not made of: "
                f"WeightData(array, name, DType.{dtype.name}, array.shape) is"
            )
        return cls(arr, name, dtype, arr.shape)

    @property
    def data(self) -> Any:
        """The array; read from its file the first time."""
        if self._data is None and self.source is not None:
            self._data = self._cast(self.source.read(self.name))
        return self._data

    @data.setter
    def data(self, data: Any) -> None:
        self._data = data
        self.source, self._decodes, self._casts = None, None, ()

    @property
    def is_loaded(self) -> bool:
        """Whether the array is in memory."""
        return self._data is not None or self.source is None

    def _cast(self, array: np.ndarray) -> np.ndarray:
        if self._decodes is not None:
            array = decode(self._decodes.value, array)
        for dtype in self._casts:
            array = cast_array(array, dtype)
        return array

    @property
    def _stored_dtype(self) -> np.dtype:
        """What it is on the disk, before its casts."""
        return self.dtype.np if self.source is None else self.source.stored(self.name)[0]

    @property
    def _is_as_stored(self) -> bool:
        """Whether it is on the disk, and there in the shape that its metadata has."""
        if self.source is None or self.is_loaded:
            return False
        return self.source.stored(self.name)[1] == tuple(self.shape)

    def astype(self, dtype: Any) -> WeightData:
        """The data in another element type; itself when it has that type already.

        Rounds to nearest even; floats become integers by cutting off the fraction. Data
        not read yet is converted when it is read; of data that is not there only the
        dtype changes. The encoding is dropped. Packed blocks become floats by decoding, and
        the shape then counts weights; integers are those of the bytes.

        Raises:
            ValueError: complex values as a real type, which would lose a part of them.
        """
        dtype = DType.of(dtype)
        if dtype is self.dtype:
            return self
        if self.dtype.is_complex() and not dtype.is_complex():
            raise ValueError(
                f"'{self.name}' is {self.dtype.name}: {dtype.name} would lose the imaginary part"
            )
        if self._is_packed and dtype.is_float():
            return self._decoded()._as(dtype)
        return self._as(dtype)

    @property
    def _is_packed(self) -> bool:
        encoding = self.quantization_encoding
        if encoding is None or not encoding.is_gguf or self.dtype is not DType.uint8:
            return False
        # Metadata is trusted, as MAX does: it may speak of bytes that are no blocks.
        return len(self.shape) > 0 and int(self.shape[-1]) % encoding.block_size == 0

    @property
    def logical_shape(self) -> Shape:
        """The shape counted in weights; of data that is not packed it is the shape."""
        encoding = self.quantization_encoding
        if encoding is None or not self._is_packed:
            return self.shape
        return Shape(encoding.logical_shape(tuple(map(int, self.shape))))

    def _decoded(self) -> WeightData:
        """The weights that packed blocks hold, in float32."""
        assert self.quantization_encoding is not None
        new = WeightData(None, self.name, DType.float32, self.logical_shape)
        if not self.is_loaded:
            new.source, new._decodes = self.source, self.quantization_encoding
        elif isinstance(self._data, jax.ShapeDtypeStruct):
            shape = tuple(map(int, new.shape))
            new._data = jax.ShapeDtypeStruct(shape, np.float32, sharding=self._data.sharding)
        else:
            new._data = decode(self.quantization_encoding.value, np.asarray(self._typed()))
        return new

    def _as(self, dtype: DType) -> WeightData:
        if dtype is self.dtype:
            return self
        new = WeightData(None, self.name, dtype, self.shape)
        if not self.is_loaded:
            new.source, new._decodes = self.source, self._decodes
            new._casts = (*self._casts, dtype)
        elif isinstance(self._data, jax.ShapeDtypeStruct):
            new._data = jax.ShapeDtypeStruct(
                self._data.shape, dtype.np, sharding=self._data.sharding
            )
        else:
            new._data = cast_array(np.asarray(self._typed()), dtype)
        return new

    def _typed(self) -> Any:
        """The array in the dtype the metadata gives it."""
        data = self.data
        if isinstance(data, jax.Array) and data.dtype == self.dtype.np:
            return data
        array = _host(data)
        if array.dtype != self.dtype.np and array.dtype.itemsize == self.dtype.np.itemsize:
            array = np.ascontiguousarray(array).view(self.dtype.np)
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
        array = self._typed()
        # A copy: JAX on a CPU would share the memory of an array that ``data`` hands out too.
        return array if isinstance(array, jax.Array) else jnp.array(array, copy=True)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._typed(), dtype=dtype, copy=copy)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._exporter().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._exporter().__dlpack_device__()

    def _exporter(self) -> Any:
        array = self._typed()
        if isinstance(array, np.ndarray) and not is_native(array.dtype):
            return jax.device_put(
                array, jax.local_devices(backend="cpu")[0]
            )  # NumPy cannot export bf16 and fp8
        return array

    def __repr__(self) -> str:
        return f"WeightData({self.dtype}, {self.shape!r})"


def as_leaf(cls: type) -> None:
    """Lets what JAX compiles take objects of a class as the arrays they stand for.

    ``jnp.dot`` and others are jitted, and jit asks nothing but registered classes for arrays.
    """
    jax.tree_util.register_pytree_node(
        cls, lambda one: ((_leaf(one),), None), lambda _, leaves: leaves[0]
    )


def _leaf(one: Any) -> Any:
    """What JAX's functions see of data, or of the name of some: the array, read now, or its type."""
    data = one if isinstance(one, WeightData) else one.data()
    there = isinstance(data._data, jax.ShapeDtypeStruct)
    return data._data if there else data.__jax_array__()


as_leaf(WeightData)


def _host(data: Any) -> np.ndarray:
    if isinstance(data, np.ndarray):
        return data
    if hasattr(data, "__array__"):
        return np.asarray(data)
    return np.asarray(np.from_dlpack(data))


def read_all(items: list[WeightData]) -> dict[int, np.ndarray]:
    """Reads WeightData that were not read yet, all of one file in parallel.

    Returns:
        Arrays by ``id`` of the item, before its casts, in memory nobody else holds:
        the items stay unread, so that whoever places the arrays may keep the memory.
    """
    by_source: dict[int, tuple[Source, list[WeightData]]] = {}
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

    ml_dtypes converts what is wider than float32 by way of float32, which would round
    twice. Rounding to odd on that way keeps what the second rounding needs to know
    (S. Boldo, G. Melquiond, "When double rounding is odd", 2005).
    """
    target = dtype.np
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
    """float32 with the last bit set wherever something was cut off."""
    exact = array.astype(np.longdouble)  # holds float64 and int64 exactly
    near = np.asarray(exact.astype(np.float32))
    back = near.astype(np.longdouble)
    inexact = np.isfinite(exact) & (back != exact)
    outward = inexact & (np.abs(back) > np.abs(exact))
    cut = np.where(outward, np.nextafter(near, np.float32(0)), near)
    bits = cut.astype(np.float32).view(np.uint32) | inexact.astype(np.uint32)
    return bits.view(np.float32)
