"""Outgoing: a tensor on its way into a file, as bytes in pieces.

A writer asks for the pieces when it has come to them, so no tensor is in memory whole that
was not before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ...dtype import DType
from ..files import PIECE_BYTES
from ..files import file_range as file_range


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor as a file will have it.

    Attributes:
        name: Its name there.
        dtype: Its element type; of packed blocks uint8.
        shape: Its shape; of packed blocks with the last axis in bytes, as in TensorEntry.
        pieces: Gives its bytes in order: row-major, little-endian, two float4 values a byte. A
            piece is valid until the next is asked for. May be called more than once.
        encoding: What the blocks are ("Q4_K"), if it is packed.

    Example:
        >>> one = outgoing("w", np.arange(3, dtype=np.int16))
        >>> one.nbytes, [bytes(piece) for piece in one.pieces()]
        (6, [b'\\x00\\x00\\x01\\x00\\x02\\x00'])
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[memoryview]]
    encoding: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return (math.prod(self.shape) * self.dtype.size_in_bits + 7) // 8


def outgoing(name: str, array: np.ndarray, encoding: str | None = None) -> Outgoing:
    """A tensor of an array of the host, which is not copied where it lies in C order."""
    return Outgoing(name, DType.of(array.dtype), array.shape, lambda: pieces(array), encoding)


def pieces(array: np.ndarray) -> Iterator[memoryview]:
    """The bytes of an array as files hold them, in pieces of about 16 MiB.

    Example:
        >>> [len(piece) for piece in pieces(np.zeros((3, 9 << 20), np.uint8).T)]
        [16777215, 11534337]
    """
    if DType.of(array.dtype) is DType.float4_e2m1fn:
        yield from nibbles([array])
        return
    if array.flags.c_contiguous and not _is_swapped(array):
        flat = _bytes(array)
        for start in range(0, len(flat), PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES]
        return
    for part in _rows(array):
        yield _bytes(np.ascontiguousarray(part, part.dtype.newbyteorder("<")))


def _rows(array: np.ndarray) -> Iterator[np.ndarray]:
    """Cuts an array across its first axes into parts that are copied one by one."""
    if array.nbytes <= PIECE_BYTES or not array.ndim:
        yield array
        return
    step = PIECE_BYTES * len(array) // array.nbytes
    if not step:
        for row in array:
            yield from _rows(row)
        return
    for start in range(0, len(array), step):
        yield array[start : start + step]


def _is_swapped(array: np.ndarray) -> bool:
    return array.dtype.newbyteorder("<") != array.dtype


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def nibbles(arrays: Iterable[np.ndarray]) -> Iterator[memoryview]:
    """The bytes of float4 arrays behind one another: two values each, the first in the low bits.

    Example:
        >>> import ml_dtypes
        >>> rows = np.array([[1], [2], [3]], np.uint8).view(ml_dtypes.float4_e2m1fn)
        >>> b"".join(nibbles(rows))
        b'!\\x03'
    """
    rest = np.empty(0, np.uint8)  # a value whose other half is yet to come
    for array in arrays:
        for part in _rows(array):
            values = np.ascontiguousarray(part).reshape(-1).view(np.uint8) & 15
            values = np.concatenate([rest, values]) if len(rest) else values
            whole = len(values) & ~1
            rest = values[whole:]
            if whole:
                yield memoryview(values[0:whole:2] | values[1:whole:2] << 4)
    if len(rest):
        yield memoryview(rest)
