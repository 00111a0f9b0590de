"""Compressed members of an archive (deflate, RFC 1951), and tensors read through them.

A member is always inflated completely, piece by piece; an error is raised unless the result has the
length and the CRC-32 that the archive records.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ...dtype import DType
from ...errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError
from ..boxes import Wanted, copy_shared, count, extents, in_order
from ..crc32 import crc32
from ..entry import DECODED_BYTES, Coding, TensorEntry, swapped
from ..files import CORRUPT, OpenFile, aligned_empty

# Bytes read from the file at a time.
COMPRESSED_BYTES = 256 << 10


def corrupt(name: str, expected: str, found: str, **where: Any) -> CheckpointError:
    """The error for a member whose bytes are not those that its checksum was made of."""
    return CheckpointCorruptError(
        f"the bytes of {name} do not match their checksum",
        expected=expected,
        found=found,
        hint=CORRUPT,
        **where,
    )


@dataclass(frozen=True, slots=True)
class Deflated(Coding):
    """Coding of a tensor in a compressed member, which is always inflated completely.

    Attributes:
        name: name of the member, for messages.
        size: number of inflated bytes.
        crc: CRC-32 of the inflated bytes, or None if none was computed.
        skip: number of inflated bytes before the tensor's; those after it are ignored.
        order: axes from slowest to fastest in the file; None for C order. The values are
            contiguous.
        swap: whether the bytes of each value must be swapped for this machine.
    """

    name: str
    size: int
    crc: int | None
    skip: int = 0
    order: tuple[int, ...] | None = None
    swap: bool = False

    is_divisible = False

    def read(self, file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> int:
        """See :class:`Coding`. Needs 2 MiB of memory besides the arrays.

        Raises:
            CheckpointCorruptError: the bytes do not match the checksum.
            CheckpointFormatError: a boolean is neither 0 nor 1.
        """
        order = range(len(entry.shape)) if self.order is None else self.order
        shape = [entry.shape[axis] for axis in order]
        wanted = [(tuple(box[axis] for axis in order), a.transpose(order)) for box, a in parts]
        first = 0
        for block in self._blocks(file, entry):
            values, done = self._values(file, entry, first, block), 0
            for box in in_order(shape, first, first + values.size):
                piece = values[done : done + count(box)].reshape(extents(box))
                for part in wanted:
                    copy_shared(part, (box, piece))
                done += count(box)
            first += values.size
        return entry.nbytes

    def pieces(
        self, file: OpenFile, offset: int, nbytes: int, *, tensor: str | None = None
    ) -> Iterator[bytes]:
        """Inflates ``nbytes`` bytes of the file at ``offset``, into pieces of at most 1 MiB.

        Nothing is checked if the caller stops before the end.

        Raises:
            CheckpointCorruptError: the data is not deflated, or its length or CRC-32 is wrong.
        """
        where = {"path": file.path, "tensor": tensor, "offset": offset}
        inflater, total, crc = zlib.decompressobj(-zlib.MAX_WBITS), 0, 0
        place, end, data = offset, offset + nbytes, b""
        while not inflater.eof:
            if not data and place < end:
                data = file.pread(place, min(COMPRESSED_BYTES, end - place), tensor=tensor)
                place += len(data)
            try:
                # One byte more than expected, so that excess bytes are detected.
                most = min(DECODED_BYTES, self.size - total + 1)
                piece = inflater.decompress(data, most)
            except zlib.error as error:
                found = str(error).removeprefix("Error ")
                raise corrupt(self.name, "deflated data", found, **where) from error
            if not piece and not inflater.eof and place == end and not inflater.unconsumed_tail:
                break
            data = inflater.unconsumed_tail
            total, crc = total + len(piece), crc32(piece, crc)
            if total > self.size:
                raise corrupt(self.name, f"{self.size} bytes", "more", **where)
            if piece:
                yield piece
        rest = len(inflater.unused_data) + end - place
        mismatch = None
        if not inflater.eof or total < self.size:
            mismatch = f"{self.size} bytes", f"{total} bytes"
        elif rest:
            mismatch = f"{nbytes} bytes of deflated data", f"an end {rest} bytes before"
        elif self.crc is not None and crc != self.crc:
            mismatch = f"CRC-32 {self.crc:08x}", f"{crc:08x}"
        if mismatch:
            raise corrupt(self.name, *mismatch, **where)

    def _blocks(self, file: OpenFile, entry: TensorEntry) -> Iterator[np.ndarray]:
        """The tensor's bytes, whole values at a time, in a reused buffer."""
        missing = prod(entry.shape) * entry.dtype.np.itemsize
        block, used, skip = aligned_empty(min(DECODED_BYTES, missing)), 0, self.skip
        for piece in self.pieces(file, entry.offset, entry.nbytes, tensor=entry.name):
            rest = np.frombuffer(piece, np.uint8)[skip:]
            skip = max(0, skip - len(piece))
            # When nothing is missing any more, the loop continues only for the checksum.
            while missing and rest.size:
                size = min(rest.size, missing, block.size - used)
                block[used : used + size] = rest[:size]
                rest, used, missing = rest[size:], used + size, missing - size
                if used == block.size or not missing:
                    yield block[:used]
                    used = 0
        if missing:  # the entry asks for more than the member has
            where = {"path": file.path, "tensor": entry.name, "offset": entry.offset}
            raise corrupt(self.name, f"{missing} bytes more", f"{self.size} bytes", **where)

    def _values(
        self, file: OpenFile, entry: TensorEntry, first: int, block: np.ndarray
    ) -> np.ndarray:
        if entry.dtype is DType.bool and block.max() > 1:
            index = int((block > 1).argmax())
            raise CheckpointFormatError(
                f"data: a boolean must be 0 or 1, and value {first + index} in the file is not",
                path=file.path,
                tensor=entry.name,
                offset=entry.offset,
                expected="0 or 1",
                found=int(block[index]),
            )
        dtype = entry.dtype.np
        return (swapped(block, dtype) if self.swap else block).view(dtype)
