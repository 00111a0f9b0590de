"""Outgoing: a tensor to be written to a file, as an iterator over pieces of its bytes.

A writer asks for the pieces only when it writes them, so a tensor that streams is never complete
in memory.
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
    """A tensor as it will be stored in a file.

    Attributes:
        name: name in the file.
        dtype: element type; uint8 for quantised blocks.
        shape: shape; for quantised blocks the last axis counts bytes, as in TensorEntry.
        pieces: function that iterates over its bytes in order: row-major, little-endian, two float4
            values per byte. A piece is valid until the next one. It may be called more than once.
        encoding: name of the quantised blocks ("Q4_K"), if any.

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
        """Number of bytes in the file."""
        return (math.prod(self.shape) * self.dtype.size_in_bits + 7) // 8


def outgoing(name: str, array: np.ndarray, encoding: str | None = None) -> Outgoing:
    """The Outgoing of a host array, which is not copied if it is C-contiguous."""
    return Outgoing(name, DType.of(array.dtype), array.shape, lambda: pieces(array), encoding)


def pieces(array: np.ndarray) -> Iterator[memoryview]:
    """The bytes of an array as stored in files, in pieces of about 16 MiB.

    Example:
        >>> [len(piece) for piece in pieces(np.zeros((3, 9 << 20), np.uint8).T)]
        [16777215, 11534337]
    """
    if DType.of(array.dtype) is DType.float4_e2m1fn:
        yield from nibbles([array])
        return
    if array.flags.c_contiguous and array.dtype.newbyteorder("<") == array.dtype:
        flat = _bytes(array)
        for start in range(0, len(flat), PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES]
        return
    for part in _rows(array):
        yield _bytes(np.ascontiguousarray(part, part.dtype.newbyteorder("<")))


def _rows(array: np.ndarray) -> Iterator[np.ndarray]:
    """Cuts an array along its first axes into parts that are copied one by one."""
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


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def nibbles(arrays: Iterable[np.ndarray]) -> Iterator[memoryview]:
    """The bytes of concatenated float4 arrays: two values per byte, the first in the low bits.

    Example:
        >>> import ml_dtypes
        >>> rows = np.array([[1], [2], [3]], np.uint8).view(ml_dtypes.float4_e2m1fn)
        >>> b"".join(nibbles(rows))
        b'!\\x03'
    """
    rest = np.empty(0, np.uint8)  # a value whose partner in the byte is yet to come
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
