"""TensorEntry: where a tensor lies, and how its bytes become its array.

An entry without a coding is read straight into its array. One with a coding is read by it,
box by box, through a little memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtype import DType
from ..errors import CheckpointFormatError, CheckpointTruncatedError
from .boxes import Box, Wanted, extents, runs, split, within
from .files import OpenFile, aligned_empty

# Of an array: NumPy's own bound.
MAX_DIMS = 64
# What a coding decodes at a time: it fits the cache of a core with what it is decoded from.
DECODED_BYTES = 1 << 20


class Coding:
    """How the bytes of a tensor's entry become the values of its array.

    Equal codings read equal bytes to equal values. ``is_divisible`` says whether a part of a tensor
    can be read without the rest; if not, all parts that are wanted are read in one call.
    """

    is_divisible = True

    def read(self, file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> int:
        """Fills the arrays of ``parts``; gives the number of bytes that were read of the file."""
        raise NotImplementedError

    def split(self, entry: TensorEntry, box: Box) -> Iterator[Box]:
        """Cuts a box into some that are read one by one, in any order and by any thread."""
        return split(box, max(1, DECODED_BYTES // entry.dtype.np.itemsize))


class UnknownType:
    """Stands for the dtype of a tensor that maxjax has no arrays of: ``name`` is the file's word.

    Its file opens, and names and shapes are there; whatever else is asked of the type raises the
    error of its tensor, so nobody reads it as something else. For MAX that is a ValueError too.

    Example:
        >>> UnknownType("I3", CheckpointFormatError("dtype: unknown", tensor="w", found="I3")).np
        Traceback (most recent call last):
        maxjax.errors.CheckpointFormatError: tensor 'w': dtype: unknown (found I3)
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


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: ``nbytes`` bytes at ``offset`` of ``TensorTable.files[file]``.

    ``dtype`` and ``shape`` are of the array that reading gives; of a type that there is no array of
    the dtype is an :class:`UnknownType`. Of blocks that stay packed
    these are uint8 and MAX's byte view, the last axis in bytes, and ``encoding`` names
    the blocks ("Q4_K"). ``coding`` makes the array of the bytes where they are not its own, and
    ``checksum`` is compared when all of it is read for the first time.
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


@dataclass(frozen=True, slots=True)
class Checksum:
    """CRC-32 (as of zip and zlib) of ``nbytes`` bytes of a file from ``offset`` on; ``name`` says of what.

    Attributes:
        also: Other sums that are right as well: of a file that was just being replaced.
        source: The file that has the sum, where it is not the one with the bytes.
        of_values: It is of the array's own bytes, in C order and the low byte first, whatever lies
            in the file; ``offset`` is then 0.
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
    """Parts of one tensor that are read together."""

    file: OpenFile
    entry: TensorEntry
    parts: list[Wanted]

    def run(self) -> int:
        """Reads them; gives the number of bytes that were read of the file."""
        assert self.entry.coding is not None
        return self.entry.coding.read(self.file, self.entry, self.parts)


def coded_jobs(file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> Iterator[CodedJob]:
    """The jobs that fill the arrays of parts of a tensor that has a coding."""
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
    """Fills ``view`` with the tensor's bytes from its byte ``start`` on."""
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
    """Of ``view``, read at byte ``start``: another value would compute wrong results in silence."""
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
