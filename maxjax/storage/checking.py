"""Floor 1. Which checksums of an open checkpoint are compared, and when.

Below: checksums, parallel. Above: table, regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from . import checksums
from .checksums import Sum
from .crc32 import crc32, is_fast
from .entry import Box, Checksum, TensorEntry, count, extents, split, whole
from .files import OpenFile, aligned_empty
from .jsontext import collector_paused
from .parallel import run, run_jobs

# One read for a checksum alone.
BLOCK_BYTES = 16 << 20
# What is read for the checksum of an array's values alone takes so much memory.
VALUES_BYTES = 64 << 20

Verify = Literal["auto"] | bool
# Which checksum of which file, its name, place and length: a storage of a PyTorch file has one
# for all its tensors.
Key = tuple[int, str, int, int]


class Checks:
    """What was compared of the checksums of files, and what is still to be.

    Attributes:
        verify: When reading compares checksums: "auto" where what is read anyway is all that a
            checksum is of, and computing it takes next to no time; True always, reading more
            where need be; False never.
        sound: Those that agreed. None is compared twice.
    """

    def __init__(self, files: list[OpenFile]):
        self.files = files
        self.verify: Verify = "auto"
        self.sound: set[Key] = set()

    def sums(self, entries: Iterable[TensorEntry]) -> dict[Key, Sum]:
        """What is to be computed of what will be read of tensors, for ``compare``."""
        if self.verify is False:
            return {}
        found = self.unchecked(entries)
        if self.verify is True or is_fast():
            return found
        # Those that archives have are compared by whoever reads archives.
        return {key: one for key, one in found.items() if one.checksum.source is None}

    def compare(self, sums: dict[Key, Sum], *, threads: int | None = None) -> None:
        """Compares after the reading; what was not read whole, only if ``verify`` is True.

        Raises:
            CheckpointCorruptError: They differ.
            CheckpointChangedError: They differ, and the file was written to since it was opened.
            CheckpointFormatError: A boolean that was read is neither 0 nor 1.
        """
        rest = []
        for key, one in sums.items():
            if one.compare():
                self.sound.add(key)
            else:
                rest.append(one.entry)
        if self.verify is True:
            self.check(rest, threads=threads)
        for one in sums.values():
            if one.wrong:
                raise one.wrong

    def check(self, entries: Iterable[TensorEntry], *, threads: int | None = None) -> None:
        """Reads all that the checksums of tensors are of, and compares; errors as ``compare``."""
        sums = self.unchecked(entries)
        plain = [one for one in sums.values() if not one.checksum.of_values]
        jobs = [block for one in plain for block in one.blocks(BLOCK_BYTES)]
        run_jobs(run, jobs, sum(job.nbytes for job in jobs), threads)
        for key, one in sums.items():
            one.compare(_of_values(one) if one.checksum.of_values else None)
            self.sound.add(key)

    def unchecked(self, entries: Iterable[TensorEntry]) -> dict[Key, Sum]:
        """Each checksum of tensors that was not compared yet."""
        found: dict[Key, Sum] = {}
        with collector_paused():
            for entry in entries:
                if entry.checksum is not None and entry.nbytes:
                    key = _key(entry, entry.checksum)
                    if key not in self.sound and key not in found:
                        found[key] = Sum(self.files[entry.file], entry)
        return found


def sum_of(entry: TensorEntry, sums: dict[Key, Sum]) -> Sum | None:
    """What is computed of a tensor when it is read, if anything."""
    return None if entry.checksum is None else sums.get(_key(entry, entry.checksum))


def _key(entry: TensorEntry, checksum: Checksum) -> Key:
    return entry.file, checksum.name, checksum.offset, checksum.nbytes


def sum_of_parts(entry: TensorEntry, regions: Sequence[Box], sums: dict[Key, Sum]) -> Sum | None:
    """What is computed of a tensor of which parts are read: nothing if they cannot be all of it."""
    if not sums or entry.checksum is None:
        return None
    read = entry.dtype.np.itemsize * sum(map(count, regions))
    if entry.nbytes - read > checksums.GAP_BYTES:
        return None
    # A coding reads a part of a row by itself, however short: each would have a sum.
    rows = whole(entry.shape)[1:]
    if entry.coding is None or entry.checksum.of_values or all(r[1:] == rows for r in regions):
        return sum_of(entry, sums)
    return None


def _of_values(one: Sum) -> int:
    """Reads all of an array for the sum of its values, a part at a time."""
    entry, crc = one.entry, 0
    assert entry.coding is not None
    limit = max(1, VALUES_BYTES // entry.dtype.np.itemsize)
    box = whole(entry.shape)
    for part in split(box, limit) if entry.coding.is_divisible else [box]:
        array = aligned_empty(count(part) * entry.dtype.np.itemsize)
        array = array.view(entry.dtype.np).reshape(extents(part))
        entry.coding.read(one.file, entry, [(part, array)])
        crc = crc32(array, crc)
    return crc
