"""Streams of tensors to be written to a file: a checkpoint's data, or a model's weights.

A tensor on the disk is read row by row while it is written, and one on several devices is gathered row by
row, so that no additional tensor is ever complete in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ...dtype import DType
from ...storage.blocks import layout_of
from ...storage.boxes import Box, copy_shared, count, extents, overlap, whole, within
from ...storage.files import aligned_empty
from ...storage.parts import Part
from ...storage.save.outgoing import Outgoing, nibbles, pieces
from ..placement.device_major import DeviceMajor
from ..weight.spec import FileForm
from ..weight.weight import Weight
from .device_reads import box_of, is_host
from .gathering import Gathering, can_gather
from .host_reads import data_rows, row_boxes
from .reshaped import ReshapedSource
from .weight_data import PartSource, WeightData

# (encoding, float32 rows [..., rows, in], number of the first row in the tensor) → blocks.
Encoder = Callable[[str, np.ndarray, int], np.ndarray]


def outgoing_data(
    data: WeightData, name: str | None = None, encode: tuple[str, Encoder] | None = None
) -> Outgoing:
    """The Outgoing of a tensor of a checkpoint or of :func:`weight_data`.

    Args:
        encode: encoding to quantise the values to, and the function that encodes float32.
    """
    encoding = data.quantization_encoding
    packed = encoding.value if encoding is not None and data.is_packed else None
    shape, dtype = tuple(int(size) for size in data.shape), data.dtype
    if encode is not None:
        packed = encode[0]
        data = data.astype(DType.float32)
        layout, shape = layout_of(packed), tuple(int(size) for size in data.shape)
        shape = (*shape[:-1], shape[-1] // layout.elements * layout.nbytes)
        dtype = DType.uint8

    def stream() -> Iterator[memoryview]:
        if dtype is DType.float4_e2m1fn:  # a row can end within a byte
            yield from nibbles(data_rows(data))
            return
        if encode is None:
            for rows in data_rows(data):
                yield from pieces(rows)
            return
        for blocks in ahead(_encoded(data, *encode)):
            yield from pieces(blocks)

    return Outgoing(name or data.name, dtype, shape, stream, packed)


def _encoded(data: WeightData, encoding: str, encode: Encoder) -> Iterator[np.ndarray]:
    first = 0
    for rows in data_rows(data):
        yield encode(encoding, rows, first)
        first += math.prod(rows.shape[:-1])


def ahead(values: Iterator[Any]) -> Iterator[Any]:
    """The values of an iterator, the next of which is computed in a thread while one is used.

    Example:
        >>> list(ahead(iter("abc")))
        ['a', 'b', 'c']
    """
    end = object()
    with ThreadPoolExecutor(1, "maxjax-ahead") as pool:
        coming = pool.submit(next, values, end)
        while (value := coming.result()) is not end:
            coming = pool.submit(next, values, end)
            yield value


def weight_data(name: str, weight: Weight, gathering: Gathering | None = None) -> WeightData:
    """A weight of a model as WeightData, in logical order.

    Args:
        name: name of the weight.
        weight: the weight.
        gathering: reader of weights on the devices of several processes, if any.

    Raises:
        ValueError: the weight has no value.
        NotImplementedError: a part of it is on devices of another process, and there is no way to
            gather it.
    """
    source = weight.source
    if weight.is_lazy and isinstance(source, WeightData):
        return source
    if weight.is_lazy:
        advice = "has no value: load a checkpoint, or call maxjax.init()"
        raise ValueError(weight.no_value(name, advice))
    values = _source_of(weight, gathering)
    if values is None:
        raise NotImplementedError(
            f"weight '{name}' is on devices of several processes: save it with "
            "maxjax.save_pretrained or maxjax.checkpoint.save"
        )
    encoding, form = weight.quantization_encoding, weight.spec.form
    if form is not None and form.elementwise:
        values = _FiledSource(values, form)
        if form.shape is not None:
            values = ReshapedSource(values, name, form.shape)
    dtype, declared = DType.of(values.dtype_and_shape(name)[0]), weight.spec.dtype
    data = WeightData.lazy(values, name, dtype, values.shape, encoding)
    # JAX holds integers of 64 bits in 32; a file has them as they were declared.
    narrowed = declared.is_integral() and jax.dtypes.canonicalize_dtype(declared.np) == dtype.np
    return data.astype(declared) if narrowed else data


def _source_of(
    weight: Weight, gathering: Gathering | None
) -> _WeightSource | _GatheredSource | None:
    if weight.spec.form is not None and not weight.spec.form.elementwise:
        array = weight.to_file(weight.stored_value())
        return _WeightSource(array, (), array.shape)
    shape = tuple(int(size) for size in weight.shape)
    if weight.spec.form is None:
        shape = weight.loaded_shape or shape
    home, array, index = weight.home, weight.leaf, ()
    if home is not None and not home[0].is_lazy:
        array, index = home[0].leaf, home[0].spec.index(home[1])
    if not getattr(array, "is_fully_addressable", True) and not _is_complete(array, index):
        if gathering is None or not can_gather(array):
            return None
        return _GatheredSource(gathering, array, index, weight.spec.layout, shape)
    if weight.spec.layout is not None:
        array, index = weight.stored_value(), ()
    return _WeightSource(array, index, shape)


def _is_complete(array: Any, index: tuple[int, ...]) -> bool:
    """Whether the devices of this process hold all of ``array[index]``."""
    held = sum(count(box) for box, _ in _parts(array, index))
    return held == math.prod(array.shape[len(index) :])


class _GatheredSource(PartSource):
    """The DataSource of a weight on devices of several processes, in the first of them."""

    def __init__(
        self,
        gathering: Gathering,
        array: jax.Array,
        index: tuple[int, ...],
        layout: DeviceMajor | None,
        shape: Sequence[int],
    ):
        self._gathering, self._number = gathering, gathering.add(array, index, layout)
        self._dtype, self.shape = np.dtype(array.dtype), tuple(shape)
        sizes = array.shape[len(index) :]
        if layout is not None:
            sizes = jax.eval_shape(layout.restore, jax.ShapeDtypeStruct(sizes, array.dtype)).shape
        self._sizes = sizes

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape."""
        return self._dtype, self.shape

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """The values in order, as arrays of rows."""
        for box in row_boxes(self._sizes, self._dtype.itemsize):
            yield self._gathering.read(self._number, box)

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Reads rectangular parts, each into its memory."""
        for part in parts:
            into = part.memory.view(self._dtype).reshape(extents(part.region))
            into[...] = self._gathering.read(self._number, part.region)
        return sum(part.memory.nbytes for part in parts)


class _WeightSource(PartSource):
    """The DataSource of a weight's value: an array, or a slice of one along its leading axes."""

    def __init__(self, array: Any, index: tuple[int, ...], shape: Sequence[int]):
        self.array, self.index, self.shape = array, index, tuple(shape)

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape."""
        return np.dtype(self.array.dtype), self.shape

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """The values in order, as arrays of rows."""
        return array_rows(self.array, self.index)

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Reads rectangular parts, each into its memory."""
        dtype = np.dtype(self.array.dtype)
        sources = _parts(self.array, self.index)
        for part in parts:
            into = part.memory.view(dtype).reshape(extents(part.region))
            _gather(into, part.region, sources)
        return sum(part.memory.nbytes for part in parts)


class _FiledSource(PartSource):
    """The DataSource of a weight that a file holds in another form, element by element."""

    def __init__(self, source: _WeightSource | _GatheredSource, form: FileForm):
        self._source, self._form, self.shape = source, form, source.shape

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape."""
        dtype, shape = self._source.dtype_and_shape(name)
        return self._form.to_file(np.zeros(0, dtype)).dtype, shape

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """The values in order, as arrays of rows."""
        return map(self._form.to_file, map(np.asarray, self._source.rows(name)))

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Reads rectangular parts, each into its memory."""
        dtype, _ = (
            self._source.dtype_and_shape(parts[0].name) if parts else (np.dtype(np.uint8), ())
        )
        for part in parts:
            values = np.empty(extents(part.region), dtype)
            self._source.read_parts(
                [Part(part.name, part.region, values.reshape(-1).view(np.uint8))]
            )
            part.memory[:] = self._form.to_file(values).reshape(-1).view(np.uint8)
        return sum(part.memory.nbytes for part in parts)


def array_rows(array: Any, index: tuple[int, ...] = ()) -> Iterator[np.ndarray]:
    """The values of ``array[index]`` in order, on the host; not copied where one host array holds them."""
    parts = _parts(array, index)
    for box in row_boxes(array.shape[len(index) :], array.dtype.itemsize):
        containing = (part for part in parts if overlap(box, part[0]) == box)
        outer, values = next(containing, (None, None))
        if outer is not None and values is not None:
            yield values.array[within(box, outer)]
            continue
        dtype = np.dtype(array.dtype)
        rows = aligned_empty(count(box) * dtype.itemsize).view(dtype).reshape(extents(box))
        _gather(rows, box, parts)
        yield rows


def _parts(array: Any, index: tuple[int, ...]) -> list[tuple[Box, _DevicePart]]:
    """The parts of ``array[index]`` on the devices, without replicas."""
    if not isinstance(array, jax.Array):
        return [(whole(array.shape[len(index) :]), _DevicePart(array, index))]
    found: dict[Box, _DevicePart] = {}
    for shard in array.addressable_shards:
        spans = box_of(shard.index, array.shape)
        first, rest = spans[: len(index)], spans[len(index) :]
        if rest not in found and all(a <= i < b for i, (a, b) in zip(index, first, strict=True)):
            at = tuple(i - a for i, (a, _) in zip(index, first, strict=True))
            found[rest] = _DevicePart(shard.data, at)
    return list(found.items())


class _DevicePart:
    """The part of an array on one device, copied to the host at the first access."""

    def __init__(self, data: Any, at: tuple[int, ...]):
        self._data, self._at = data, at

    @cached_property
    def array(self) -> np.ndarray:
        data = self._data
        if not isinstance(data, jax.Array) or is_host(data.sharding):
            return np.asarray(data)[self._at]
        return np.asarray(data[self._at])  # only this part is copied from the device


def _gather(into: np.ndarray, box: Box, parts: list[tuple[Box, _DevicePart]]) -> None:
    """Fills the array of a box from the parts that overlap it."""
    for outer, piece in parts:
        if overlap(box, outer) is not None:  # others are not copied
            copy_shared((box, into), (outer, piece.array))
