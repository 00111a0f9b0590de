"""What is written to a file: a checkpoint's data, or a model's weights, in pieces.

A tensor that is on the disk is read row by row as it is written, one that several devices
hold is put together row by row: no tensor is in memory whole that was not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ...dtype import DType
from ...storage.boxes import Box, copy_shared, count, extents, overlap, split, whole, within
from ...storage.files import aligned_empty
from ...storage.parts import Part
from ...storage.save.outgoing import PIECE_BYTES, Outgoing, nibbles, pieces
from ..quantization import QuantizationEncoding
from ..weight.weight import Weight
from .device_reads import box_of, is_host
from .weight_data import PartSource, WeightData

# Makes blocks of a kind of float32 rows.
Encoder = Callable[[str, np.ndarray], np.ndarray]


def outgoing_data(
    data: WeightData, name: str | None = None, encode: tuple[str, Encoder] | None = None
) -> Outgoing:
    """A tensor on its way into a file: one of a checkpoint, or of :func:`weight_data`.

    Args:
        encode: the blocks that its values become, and what makes them of float32.
    """
    encoding = data.quantization_encoding
    packed = encoding.value if encoding is not None and data._is_packed else None
    shape, dtype = tuple(int(size) for size in data.shape), data.dtype
    if encode is not None:
        packed = encode[0]
        data = data.astype(DType.float32)
        sizes = [int(size) for size in data.shape]
        shape, dtype = QuantizationEncoding(packed).packed_shape(sizes), DType.uint8

    def stream() -> Iterator[memoryview]:
        if dtype is DType.float4_e2m1fn:  # a row can end within a byte
            yield from nibbles(data_rows(data))
            return
        for rows in data_rows(data):
            yield from pieces(rows if encode is None else encode[1](encode[0], rows))

    return Outgoing(name or data.name, dtype, shape, stream, packed)


def data_rows(data: WeightData) -> Iterator[np.ndarray]:
    """The values of a tensor in turn, about 16 MiB of its file at a time, with all its casts.

    Each array has the tensor's rank and whole last axes. One that is in memory comes as it is.
    """
    source = data.source
    if source is None or data.is_loaded:
        yield np.asarray(data._typed())
        return
    dtype, shape = source.stored(data.name)
    rows = getattr(source, "rows", None)
    if rows is not None:
        yield from map(data._cast, rows(data.name))
        return
    divisible = getattr(source, "is_divisible", None)
    if divisible is not None and not divisible(data.name):
        yield data._cast(source.read(data.name))
        return
    for box in row_boxes(shape, dtype.itemsize):
        memory = aligned_empty(count(box) * dtype.itemsize)
        source.read_parts([Part(data.name, box, memory)])
        yield data._cast(memory.view(dtype).reshape(extents(box)))


def row_boxes(shape: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Boxes in the order of the bytes of a tensor, of about 16 MiB, each with whole last axes.

    Example:
        >>> list(row_boxes((2, 3, 1 << 20), 4))
        [((0, 1), (0, 3), (0, 1048576)), ((1, 2), (0, 3), (0, 1048576))]
    """
    if not shape:
        yield ()
        return
    row = max(shape[-1] * itemsize, 1)
    for box in split(whole(shape[:-1]), max(1, PIECE_BYTES // row)):
        yield (*box, (0, shape[-1]))


def weight_data(name: str, weight: Weight) -> WeightData:
    """A weight of a model as a tensor of a checkpoint: in logical order, whatever holds its value.

    Raises:
        ValueError: it has no value.
        NotImplementedError: devices of another process hold a part of it.
    """
    source = weight.stored.source
    if weight.stored.is_lazy and isinstance(source, WeightData):
        return source
    if weight.stored.is_lazy:
        raise ValueError(f"weight '{name}' has no value: load a checkpoint, or call maxjax.init()")
    held = _Held.of(weight)
    if not getattr(held.array, "is_fully_addressable", True):
        raise NotImplementedError(
            f"weight '{name}' lies on devices of several processes: save it with "
            "maxjax.checkpoint.save, where each process writes what it holds"
        )
    encoding = weight.quantization_encoding
    return WeightData._lazy(held, name, DType.of(held.array.dtype), held.shape, encoding)


class _Held(PartSource):
    """The Source of a weight's value: an array, or a part of one along its leading axes."""

    def __init__(self, array: Any, index: tuple[int, ...], shape: Sequence[int]):
        self.array, self.index, self.shape = array, index, tuple(shape)

    @classmethod
    def of(cls, weight: Weight) -> _Held:
        stored = weight.stored
        shape = stored.loaded_shape or tuple(int(size) for size in weight.shape)
        home = stored.home
        if stored.layout is None and home is not None and home[0].is_whole:
            return cls(home[0].leaf, (home[1],), shape)
        return cls(stored.value, (), shape)

    def stored(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Dtype and shape."""
        return np.dtype(self.array.dtype), self.shape

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """The values in turn."""
        return array_rows(self.array, self.index)

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Rectangles of it, into the memory for each."""
        dtype = np.dtype(self.array.dtype)
        held = _parts(self.array, self.index)
        for part in parts:
            into = part.memory.view(dtype).reshape(extents(part.region))
            _gather(into, part.region, held)
        return sum(part.memory.nbytes for part in parts)


def array_rows(array: Any, index: tuple[int, ...] = ()) -> Iterator[np.ndarray]:
    """The values of ``array[index]`` in turn, on the host; what one device there has is not copied."""
    parts = _parts(array, index)
    for box in row_boxes(array.shape[len(index) :], array.dtype.itemsize):
        whole_of = (part for part in parts if overlap(box, part[0]) == box)
        outer, values = next(whole_of, (None, None))
        if outer is not None and values is not None:
            yield values.array[within(box, outer)]
            continue
        dtype = np.dtype(array.dtype)
        rows = aligned_empty(count(box) * dtype.itemsize).view(dtype).reshape(extents(box))
        _gather(rows, box, parts)
        yield rows


def _parts(array: Any, index: tuple[int, ...]) -> list[tuple[Box, _Piece]]:
    """What the devices hold of ``array[index]``, each part once."""
    if not isinstance(array, jax.Array):
        return [(whole(array.shape[len(index) :]), _Piece(array, index))]
    found: dict[Box, _Piece] = {}
    for shard in array.addressable_shards:
        spans = box_of(shard.index, array.shape)
        first, rest = spans[: len(index)], spans[len(index) :]
        if rest not in found and all(a <= i < b for i, (a, b) in zip(index, first, strict=True)):
            at = tuple(i - a for i, (a, _) in zip(index, first, strict=True))
            found[rest] = _Piece(shard.data, at)
    return list(found.items())


class _Piece:
    """What one device holds, as an array of the host, fetched when it is first looked at."""

    def __init__(self, data: Any, at: tuple[int, ...]):
        self._data, self._at = data, at

    @cached_property
    def array(self) -> np.ndarray:
        data = self._data
        if not isinstance(data, jax.Array) or is_host(data.sharding):
            return np.asarray(data)[self._at]
        return np.asarray(data[self._at])  # nothing else comes from the device


def _gather(into: np.ndarray, box: Box, parts: list[tuple[Box, _Piece]]) -> None:
    """Fills the values of a box from the parts that have them."""
    for outer, piece in parts:
        if overlap(box, outer) is not None:  # others are not fetched
            copy_shared((box, into), (outer, piece.array))
