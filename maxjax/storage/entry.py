"""TensorEntry: where a tensor lies in a file, and how its bytes become an array.

The bytes of an entry without a coding are read straight into the array. A coding (quantised blocks,
strides, float4 pairs) decodes them box by box through a small scratch buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..dtype import DType
from ..errors import CheckpointFormatError, CheckpointTruncatedError
from .boxes import Box, Wanted, count, extents, runs, split, within
from .files import OpenFile, aligned_empty

# Maximum number of dimensions of an array: NumPy's own bound.
MAX_DIMS = 64
# Bytes that a coding decodes at a time: with their encoded form they fit the cache of one core.
DECODED_BYTES = 1 << 20


class Coding:
    """How the bytes of an entry become the values of its array.

    Equal codings decode equal bytes to equal values. ``is_divisible`` says whether part of a tensor
    can be read without the rest; if not, all requested parts are read in one call.
    """

    is_divisible = True

    def read(self, file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> int:
        """Fills the arrays of ``parts``; returns the number of bytes read from the file."""
        raise NotImplementedError

    def split(self, entry: TensorEntry, box: Box) -> Iterator[Box]:
        """Cuts a box into boxes that are read separately, in any order and by any thread."""
        return split(box, max(1, DECODED_BYTES // entry.dtype.np.itemsize))


class UnknownType:
    """Placeholder dtype of a tensor whose type maxjax does not support; ``name`` is the file's word.

    The file still opens, with the tensor's name and shape. Every other use of the dtype raises the
    tensor's error, so it is never read as another type. As in MAX, the error is also a ValueError.

    Example:
        >>> UnknownType("I3", CheckpointFormatError("dtype: unknown", tensor="w", found="I3")).np
        Traceback (most recent call last):
        maxjax.errors.CheckpointFormatError: tensor 'w': dtype: unknown (found I3). ...
    """

    def __init__(self, name: str, error: CheckpointFormatError):
        self.name = name
        self._error = error

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise copy(self._error)

    def __repr__(self) -> str:
        return self.name


# These two are not frozen dataclasses, which take four times as long to create: a checkpoint may have
# 200,000 of each.
class TensorEntry(NamedTuple):
    """Where one tensor lies: ``nbytes`` bytes at ``offset`` of ``TensorTable.files[file]``.

    ``dtype`` and ``shape`` are those of the array that reading returns; an unsupported dtype is an
    :class:`UnknownType`. Blocks that stay quantised have dtype uint8 and, as in MAX, a shape whose
    last axis counts bytes; ``encoding`` then names the blocks ("Q4_K"). ``coding`` decodes the bytes
    if they are not the array's own. ``checksum`` is compared when the whole tensor is first read.
    """

    name: str
    dtype: DType | Any
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int
    coding: Coding | None = None
    encoding: str | None = None
    checksum: Checksum | None = None


class Checksum(NamedTuple):
    """CRC-32 (that of zip and zlib) of ``nbytes`` bytes of a file from ``offset`` on.

    ``name`` says in messages what the checksum covers.

    Attributes:
        also: other accepted checksums, of a file that was being replaced.
        source: path of the file that records the checksum, if it is not the file with the bytes.
        of_values: whether the checksum covers the decoded array (C order, little-endian) instead of
            the bytes in the file; ``offset`` is then 0.
    """

    name: str
    offset: int
    nbytes: int
    crc: int
    also: tuple[int, ...] = ()
    source: str | None = None
    of_values: bool = False


@dataclass(slots=True)
class CodedJob:
    """One job: parts of one tensor that are read together."""

    file: OpenFile
    entry: TensorEntry
    parts: list[Wanted]

    @property
    def nbytes(self) -> int:
        """The share of the tensor's bytes in the file that belongs to the parts."""
        values = sum(count(box) for box, _ in self.parts)
        return self.entry.nbytes * values // max(math.prod(self.entry.shape), 1)

    def run(self) -> int:
        """Reads the parts; returns the number of bytes read from the file."""
        assert self.entry.coding is not None
        return self.entry.coding.read(self.file, self.entry, self.parts)


def coded_jobs(file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> Iterator[CodedJob]:
    """The jobs that fill the arrays of ``parts`` of a tensor with a coding."""
    coding, parts = entry.coding, [part for part in parts if part[1].size]
    assert coding is not None
    if not coding.is_divisible:
        if parts:
            yield CodedJob(file, entry, list(parts))
        return
    for box, array in parts:
        for piece in coding.split(entry, box):
            yield CodedJob(file, entry, [(piece, array[(*within(piece, box), ...)])])


def fill(file: OpenFile, entry: TensorEntry, start: int, view: memoryview) -> None:
    """Fills ``view`` with the tensor's bytes, beginning at its byte ``start``."""
    try:
        file.pread_into(view, entry.offset + start, tensor=entry.name)
    except CheckpointTruncatedError:
        end = entry.offset + entry.nbytes
        raise CheckpointTruncatedError(
            "the file became shorter while it was being read",
            path=file.path,
            tensor=entry.name,
            offset=entry.offset,
            expected=f"{entry.nbytes} bytes up to byte {end}",
            found="an earlier end of the file",
            hint="Wait until nothing writes to it, then load again.",
        ) from None


def check_bool(file: OpenFile, entry: TensorEntry, start: int, view: np.ndarray) -> None:
    """Refuses booleans other than 0 and 1, which would silently give wrong results.

    ``view`` holds the tensor's bytes from ``start`` on.
    """
    if view.size and view.max() > 1:
        index = int((view > 1).argmax())
        raise CheckpointFormatError(
            "data: a boolean must be 0 or 1",
            path=file.path,
            tensor=entry.name,
            offset=entry.offset + start + index,
            expected="0 or 1",
            found=int(view[index]),
        )


@dataclass(frozen=True, slots=True)
class Strided(Coding):
    """Coding of values stored with strides or byte-swapped: views, Fortran arrays, big-endian files.

    Attributes:
        strides: stride of each axis, counted in values and never negative; the first value is at
            the entry's ``offset``.
        swap: whether the bytes of each value must be swapped for this machine.
    """

    strides: tuple[int, ...]
    swap: bool = False

    def split(self, entry: TensorEntry, box: Box) -> Iterator[Box]:
        """Cuts across the axis of the longest stride, so that each box is compact in the file."""
        limit = max(1, DECODED_BYTES // entry.dtype.np.itemsize)
        if self._span(box) <= limit:
            yield box
            return
        # A broadcast axis (stride 0) is not worth cutting.
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
        """The number of values in the file from the first of a box to its last."""
        return 1 + sum(
            (stop - start - 1) * stride
            for (start, stop), stride in zip(box, self.strides, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Nibbles(Coding):
    """Coding of float4: two values per byte, the first in the low four bits; one byte each when read.

    This is the order of PyTorch's float4_e2m1fn_x2 and of the OCP microscaling formats.
    """

    def read(self, file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> int:
        """See :class:`Coding`."""
        total = 0
        for box, array in parts:
            for start, run in runs(entry.shape, box, array):
                total += self._read(file, entry, start, run)
        return total

    def _read(self, file: OpenFile, entry: TensorEntry, start: int, values: np.ndarray) -> int:
        """Reads values from index ``start`` on, which may be the second of a byte."""
        first, last = start // 2, (start + values.size + 1) // 2
        packed, unpacked = aligned_empty(last - first), aligned_empty(2 * (last - first))
        fill(file, entry, first, memoryview(packed))
        np.bitwise_and(packed, 15, out=unpacked[0::2])
        np.right_shift(packed, 4, out=unpacked[1::2])
        values[...] = unpacked[start % 2 :][: values.size].view(values.dtype).reshape(values.shape)
        return last - first


def swapped(memory: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Reverses the bytes of each number; a complex value is two numbers."""
    return memory.view(f"u{dtype.itemsize // (2 if dtype.kind == 'c' else 1)}").byteswap()
