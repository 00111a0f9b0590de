"""Floor 1. Tensors whose bytes on the disk are not those of the array: how they become them.

Values in another order, another byte order, or two in a byte. The formats have codings of their own
beside these: quantised blocks, members of a compressed archive. Below: files, entry. Above:
the formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .entry import DECODED_BYTES, Box, Coding, TensorEntry, Wanted, check_bool, extents, fill
from .files import OpenFile, aligned_empty


@dataclass(frozen=True, slots=True)
class Strided(Coding):
    """Values in any order, and in another byte order: what views and Fortran arrays are stored as.

    Attributes:
        strides: On each axis how many values of the file lie between neighbours, none negative;
            the first value is at the entry's ``offset``.
        swap: Whether the bytes of each value are in the order that is not this machine's.
    """

    strides: tuple[int, ...]
    swap: bool = False

    def split(self, entry: TensorEntry, box: Box) -> Iterator[Box]:
        """Boxes that each lie close together in the file: across the axis of the longest stride."""
        limit = max(1, DECODED_BYTES // entry.dtype.np.itemsize)
        if self._span(box) <= limit:
            yield box
            return
        # An axis that repeats its values is not cut for its length.
        lengths = [
            (stop - start - 1) * stride
            for (start, stop), stride in zip(box, self.strides, strict=True)
        ]
        axis = max(range(len(box)), key=lambda k: lengths[k])
        start, stop = box[axis]
        step = min(max(1, limit // self.strides[axis]), stop - start - 1)
        for at in range(start, stop, step):
            cut = (*box[:axis], (at, min(at + step, stop)), *box[axis + 1 :])
            yield from self.split(entry, cut)

    def read(self, file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> int:
        """See :class:`Coding`."""
        dtype, total = entry.dtype.np, 0
        for box, array in parts:
            first = sum(
                start * stride for (start, _), stride in zip(box, self.strides, strict=True)
            )
            nbytes = self._span(box) * dtype.itemsize
            memory = aligned_empty(nbytes)
            fill(file, entry, first * dtype.itemsize, memoryview(memory))
            if dtype == np.bool_:
                check_bool(file, entry, first, memory)
            if self.swap:
                memory = swapped(memory, dtype)
            steps = [stride * dtype.itemsize for stride in self.strides]
            array[...] = np.ndarray(extents(box), dtype, memory.data, strides=steps)
            total += nbytes
        return total

    def _span(self, box: Box) -> int:
        """How many values lie from the first of a box to its last."""
        return 1 + sum(
            (stop - start - 1) * stride
            for (start, stop), stride in zip(box, self.strides, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Nibbles(Coding):
    """Two values a byte, the first in the low four bits; in the array they have a byte each.

    That is the order of PyTorch's float4_e2m1fn_x2 and of the OCP microscaling formats.
    """

    def read(self, file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> int:
        """See :class:`Coding`."""
        total = 0
        for box, array in parts:
            for start, run in runs(entry.shape, box, array):
                total += self._read(file, entry, start, run)
        return total

    def _read(self, file: OpenFile, entry: TensorEntry, start: int, values: np.ndarray) -> int:
        """The values from number ``start`` on; the border may run through a byte."""
        first, last = start // 2, (start + values.size + 1) // 2
        packed, unpacked = aligned_empty(last - first), aligned_empty(2 * (last - first))
        fill(file, entry, first, memoryview(packed))
        np.bitwise_and(packed, 15, out=unpacked[0::2])
        np.right_shift(packed, 4, out=unpacked[1::2])
        values[...] = unpacked[start % 2 :][: values.size].view(values.dtype).reshape(values.shape)
        return last - first


def swapped(memory: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Bytes of values with those of each number the other way round: a complex value is two."""
    return memory.view(f"u{dtype.itemsize // (2 if dtype.kind == 'c' else 1)}").byteswap()


def runs(shape: Sequence[int], box: Box, array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The parts of a box that lie together in a tensor in C order: the place of each, and its array.

    Example:
        >>> [(start, a.shape) for start, a in runs((4, 2), ((1, 3), (0, 2)), np.zeros((2, 2)))]
        [(2, (2, 2))]
    """
    axis = len(box)
    while axis and box[axis - 1] == (0, shape[axis - 1]):
        axis -= 1
    # The axis before may be cut: what follows of it lies together all the same.
    axis = max(axis - 1, 0)
    for index in np.ndindex(*extents(box[:axis])):
        start = 0
        for k, size in enumerate(shape):
            begin = box[k][0] + (index[k] if k < axis else 0)
            start = start * size + begin
        yield start, array[(*index, ...)]
