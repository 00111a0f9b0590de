"""Tensors of a file that are read in another shape, with their elements in the same order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...storage.boxes import Box, copy_shared, extents, overlap, split, whole
from ...storage.files import aligned_empty
from ...storage.parts import Part
from .weight_data import DataSource, PartSource, WeightData

# The most bytes that are read at once of rows that several parts share.
_READ_BYTES = 64 << 20


def reshaped(data: WeightData, shape: Sequence[int]) -> WeightData:
    """Return an unread WeightData in another shape with as many elements; it stays unread.

    Example:
        >>> import os, tempfile
        >>> from maxjax.graph.weights import SafetensorWeights
        >>> header = b'{"w":{"dtype":"U8","shape":[6,1],"data_offsets":[0,6]}}'
        >>> path = os.path.join(tempfile.mkdtemp(), "m.safetensors")
        >>> with open(path, "wb") as f:
        ...     _ = f.write(len(header).to_bytes(8, "little") + header + bytes(range(6)))
        >>> data = reshaped(SafetensorWeights([path]).w.data(), (2, 3))
        >>> data.is_loaded, data.data.tolist()
        (False, [[0, 1, 2], [3, 4, 5]])
    """
    assert data.source is not None
    source = ReshapedSource(data.source, data.name, shape)
    new = WeightData.lazy(source, data.name, data.dtype, shape)
    new.casts = data.casts
    return new


class ReshapedSource(PartSource):
    """The DataSource of one tensor of another source, in another shape.

    Args:
        source: the other source.
        name: name of the tensor.
        shape: shape with as many elements, at least one axis.
    """

    def __init__(self, source: DataSource, name: str, shape: Sequence[int]):
        self._source, self._shape = source, tuple(shape)
        self._dtype, self._own = source.dtype_and_shape(name)
        self.shape = self._shape
        if (rows := getattr(source, "rows", None)) is not None:
            self.rows = rows

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype, and the shape that the tensor is read in."""
        return self._dtype, self._shape

    def in_file(self, part: Part) -> Part | None:
        """The part of the other source with the same bytes, if there is one: complete rows in both shapes."""
        if part.region[1:] != whole(self._shape[1:]):
            return None
        start, stop = (row * math.prod(self._shape[1:]) for row in part.region[0])
        size = math.prod(self._own[1:])
        if not size or start % size or stop % size:
            return None
        return Part(part.name, _rows(start // size, stop // size, self._own), part.memory)

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Reads rectangular parts, each into its memory; rows that several parts share are read once."""
        found = [(part, self.in_file(part)) for part in parts]
        total = self._source.read_parts([own for _, own in found if own is not None])
        rest = [part for part, own in found if own is None and part.memory.size]
        if not rest:
            return total
        name, itemsize = rest[0].name, self._dtype.itemsize
        arrays = [
            (part.region, part.memory.view(self._dtype).reshape(extents(part.region)))
            for part in rest
        ]
        first = min(box[0][0] for box, _ in arrays)
        last = max(box[0][1] for box, _ in arrays)
        rows = _rows(first, last, self._shape)
        most = max(_READ_BYTES // itemsize, math.prod(self._shape[1:]))
        divisible = getattr(self._source, "is_divisible", None)
        if divisible is not None and not divisible(name):
            most = math.prod(self._shape)  # each read would decompress all of it
        for box in split(rows, most):
            shared = [one for one in arrays if overlap(box, one[0]) is not None]
            if shared:
                values, read = self._values(name, box)
                total += read
                for one in shared:
                    copy_shared(one, (box, values))
        return total

    def _values(self, name: str, box: Box) -> tuple[np.ndarray, int]:
        """The values of complete rows, and the number of bytes read for them."""
        size = math.prod(self._own[1:])
        start, stop = (row * math.prod(self._shape[1:]) for row in box[0])
        own = _rows(start // size, -(-stop // size), self._own)
        memory = aligned_empty((own[0][1] - own[0][0]) * size * self._dtype.itemsize)
        read = self._source.read_parts([Part(name, own, memory)])
        offset = own[0][0] * size
        return memory.view(self._dtype)[start - offset : stop - offset].reshape(extents(box)), read


def _rows(first: int, last: int, shape: Sequence[int]) -> Box:
    return ((first, last), *whole(shape[1:]))


def in_file(source: Any, part: Part) -> tuple[Any, Part]:
    """The source and part that a part of a :class:`ReshapedSource` has the bytes of, otherwise what was given."""
    if isinstance(source, ReshapedSource) and (own := source.in_file(part)) is not None:
        return source._source, own
    return source, part
