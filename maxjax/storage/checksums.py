"""Floor 1. CRC-32 sums of bytes that are read in blocks, in any order and by any thread.

A sum is computed of each block right after it was read, while the cache holds it, so that
nothing is read twice; the sums of neighbours make up that of both. Below: files, entry. Above: table.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..dtype import DType
from ..errors import CheckpointCorruptError
from .entry import Checksum, TensorEntry, fill
from .files import OpenFile, aligned_empty

# What is summed at a time: it is still in the cache of the core that read it.
STEP_BYTES = 1 << 20
# A checksum may begin so many bytes before its tensor (a header) and be summed with it.
HEAD_BYTES = 64 << 10
# The polynomial of zip and zlib, its highest power in the lowest bit.
_POLYNOMIAL = 0xEDB88320


class Sum:
    """The checksum of ``entry``, of the blocks that are read of the bytes it is of."""

    def __init__(self, file: OpenFile, entry: TensorEntry):
        assert entry.checksum is not None
        self.file = file
        self.entry = entry
        self.checksum: Checksum = entry.checksum
        # Place in the file → length and CRC-32.
        self._blocks: dict[int, tuple[int, int]] = {}

    def read(self, offset: int, nbytes: int, into: memoryview | None = None) -> None:
        """Reads a block, into memory or only for its sum. No two may overlap."""
        scratch = memoryview(aligned_empty(min(STEP_BYTES, nbytes) if into is None else 0))
        crc = 0
        for start in range(0, nbytes, STEP_BYTES):
            stop = min(start + STEP_BYTES, nbytes)
            view = scratch[: stop - start] if into is None else into[start:stop]
            fill(self.file, self.entry, offset + start - self.entry.offset, view)
            crc = zlib.crc32(view, crc)
        self._blocks[offset] = nbytes, crc

    def blocks(self, size: int) -> Iterator[Block]:
        """All that it is of, in blocks of at most ``size`` bytes that are not read yet."""
        start, nbytes = self.checksum.offset, self.checksum.nbytes
        for done in range(0, nbytes, size):
            yield Block(self, start + done, min(size, nbytes - done))

    def compare(self) -> None:
        """Compares it with that of the file, once all blocks were read; a head is read here.

        Raises:
            CheckpointCorruptError: They differ.
            CheckpointChangedError: They differ, and the file was written to since it was opened.
        """
        wanted = self.checksum
        place, crc = wanted.offset, 0
        for offset, (nbytes, of_block) in sorted(self._blocks.items()):
            head = self.file.pread(place, offset - place, tensor=self.entry.name)
            crc = combine(zlib.crc32(head, crc), of_block, nbytes)
            place = offset + nbytes
        assert place == wanted.offset + wanted.nbytes, "a block was not read"
        if crc != wanted.crc:
            self.file.check_unchanged()
            raise CheckpointCorruptError(
                f"the bytes of {wanted.name} are not those that were written",
                path=self.file.path,
                tensor=self.entry.name,
                offset=wanted.offset,
                expected=f"CRC-32 {wanted.crc:08x}",
                found=f"{crc:08x}",
                hint="The file was damaged on its way or on the disk: fetch it again.",
            )


@dataclass(slots=True)
class Block:
    """A block that is read for a checksum alone."""

    sum: Sum
    offset: int
    nbytes: int

    def run(self) -> None:
        """Reads it."""
        self.sum.read(self.offset, self.nbytes)


def is_summed_with_data(entry: TensorEntry) -> bool:
    """Whether the reading of a tensor's array reads all that its checksum is of, but for a head."""
    # A wrong boolean is refused when it is read: its checksum says better what is wrong.
    if entry.checksum is None or entry.coding is not None or entry.dtype is DType.bool:
        return False
    head = entry.offset - entry.checksum.offset
    return 0 <= head <= HEAD_BYTES and head + entry.nbytes == entry.checksum.nbytes


def combine(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two runs of bytes behind one another, of that of each; the second has ``nbytes``.

    Example:
        >>> combine(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
        True
    """
    # Sums are polynomials: the first moves up by as many powers as the second has bits.
    return _product(_power(nbytes), first) ^ second if first else second


@lru_cache(256)
def _power(nbytes: int) -> int:
    """x to the number of bits of ``nbytes`` bytes, modulo the polynomial."""
    power, square = 1 << 31, 1 << 23  # 1 and x ** 8: the highest bit is the lowest power
    while nbytes:
        if nbytes & 1:
            power = _product(power, square)
        square = _product(square, square)
        nbytes >>= 1
    return power


def _product(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32, whose coefficients are bits."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
