"""CRC-32 checksums of bytes that are read in blocks, in any order and by any thread.

The checksum of each block is computed right after it is read, so that nothing is read twice;
checksums of adjacent blocks are then combined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import numpy as np

from ..dtype import DType
from ..errors import CheckpointCorruptError, CheckpointFormatError
from ..lazy import without_collector
from .boxes import (
    Box,
    Wanted,
    copy_shared,
    count,
    extents,
    is_covered,
    overlap,
    split,
    whole,
    within,
)
from .crc32 import combine, crc32, crc32_of, is_fast
from .entry import Checksum, TensorEntry, check_bool, fill
from .files import CORRUPT, OpenFile, aligned_empty, run_jobs

# Bytes read or gathered at a time only for a checksum: they stay in the cache of a core.
STEP_BYTES = 1 << 20
# Maximum bytes read only to complete a checksum: a header, or the gap between two tensors.
GAP_BYTES = 64 << 10


class Sum:
    """Computes the checksum of ``entry`` from the blocks that are read.

    Attributes:
        parts: for a checksum of values, the parts that were read, with their arrays.
        invalid: error for an invalid boolean; raised only if the checksum matches, because a mismatch
            explains it better.
    """

    __slots__ = ("_blocks", "checksum", "entry", "file", "invalid", "parts")

    def __init__(self, file: OpenFile, entry: TensorEntry):
        assert entry.checksum is not None
        self.file = file
        self.entry = entry
        self.checksum: Checksum = entry.checksum
        self.parts: list[Wanted] = []
        self.invalid: CheckpointFormatError | None = None
        # Offset in the file → length and CRC-32.
        self._blocks: dict[int, tuple[int, int]] = {}

    def add(self, offset: int, view: Any) -> None:
        """Adds a block that was read from ``offset`` of the file."""
        self._record(offset, memoryview(view).nbytes, crc32(view))

    def read(self, offset: int, nbytes: int) -> None:
        """Reads a block only for its checksum."""
        scratch = memoryview(aligned_empty(min(STEP_BYTES, nbytes)))
        crc = 0
        for start in range(0, nbytes, STEP_BYTES):
            view = scratch[: min(STEP_BYTES, nbytes - start)]
            fill(self.file, self.entry, offset + start - self.entry.offset, view)
            crc = crc32(view, crc)
        self._record(offset, nbytes, crc)

    def _record(self, offset: int, nbytes: int, crc: int) -> None:
        if self._blocks.get(offset, (0, 0))[0] < nbytes:
            self._blocks[offset] = nbytes, crc

    def blocks(self, size: int) -> Iterator[tuple[int, int]]:
        """All bytes that the checksum covers, as the offset and length of blocks of at most ``size`` bytes."""
        start, nbytes = self.checksum.offset, self.checksum.nbytes
        for done in range(0, nbytes, size):
            yield start + done, min(size, nbytes - done)

    def compare(self, crc: int | None = None) -> bool:
        """Compares it with the recorded checksum; returns False if too many bytes were not read.

        Up to 64 KiB of missing bytes are read here. ``crc`` is the computed checksum, if known.

        Raises:
            CheckpointCorruptError: the checksums differ.
            CheckpointChangedError: the checksums differ, and the file was modified since opening.
        """
        recorded = self.checksum
        if crc is None:
            crc = self._of_values() if recorded.of_values else self._of_blocks()
        if crc is None:
            return False
        if crc != recorded.crc and crc not in recorded.also:
            self.file.check_unchanged()
            raise mismatch(self.file.path, self.entry, crc)
        return True

    def _of_values(self) -> int | None:
        shape = self.entry.shape
        return crc32_of_boxes(shape, self.parts) if covers(shape, self.parts) else None

    def _of_blocks(self) -> int | None:
        start, stop = self.checksum.offset, self.checksum.offset + self.checksum.nbytes
        nbytes, crc = self._blocks.get(start, (0, 0))
        if nbytes == stop - start:
            return crc
        chain, place, gaps = [], start, 0
        for offset in sorted(self._blocks):
            nbytes, crc = self._blocks[offset]
            if place <= offset and offset + nbytes <= stop:
                chain.append((offset, nbytes, crc))
                gaps += offset - place
                place = offset + nbytes
        if not chain or gaps + stop - place > GAP_BYTES:
            return None
        place, total = start, 0
        for offset, nbytes, crc in [*chain, (stop, 0, 0)]:
            if offset > place:
                gap = self.file.pread(place, offset - place, tensor=self.entry.name)
                total = crc32(gap, total)
            total = combine(total, crc, nbytes)
            place = offset + nbytes
        return total


def tapped(file: OpenFile, sum: Sum | None) -> OpenFile:
    """The file, wrapped so that everything read from it is added to ``sum``, if there is one."""
    return file if sum is None or sum.checksum.of_values else cast(OpenFile, _Tapped(file, sum))


class _Tapped:
    def __init__(self, file: OpenFile, sum: Sum):
        self._file = file
        self._sum = sum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def pread(self, offset: int, nbytes: int, *, tensor: str | None = None) -> bytes:
        data = self._file.pread(offset, nbytes, tensor=tensor)
        self._sum.add(offset, data)
        return data

    def pread_into(self, view: memoryview, offset: int, *, tensor: str | None = None) -> None:
        # Not in cache-sized steps: the additional calls cost twice what the cache saves.
        self._file.pread_into(view, offset, tensor=tensor)
        self._sum.add(offset, view)


def check_values(
    file: OpenFile, entry: TensorEntry, start: int, view: np.ndarray, sum: Sum | None
) -> None:
    """Refuses booleans other than 0 and 1; with a checksum, only after that was compared."""
    if entry.dtype is not DType.bool:
        return
    try:
        check_bool(file, entry, start, view)
    except CheckpointFormatError as error:
        if sum is None:
            raise
        sum.invalid = sum.invalid or error


def mismatch(path: str, entry: TensorEntry, found: int) -> CheckpointCorruptError:
    """The error for a tensor whose bytes do not match its checksum."""
    recorded = entry.checksum
    assert recorded is not None
    hint = CORRUPT if recorded.source is None else stale_hint(recorded.source)
    sums = " or ".join(f"{crc:08x}" for crc in (recorded.crc, *recorded.also))
    return CheckpointCorruptError(
        f"the bytes of {recorded.name} do not match their checksum",
        path=path,
        tensor=entry.name,
        offset=None if recorded.of_values else recorded.offset,
        expected=f"CRC-32 {sums}",
        found=f"{found:08x}",
        hint=hint,
    )


def stale_hint(path: str) -> str:
    """The hint for a file that does not match the digests at ``path``."""
    return (
        "The file is corrupt: use another copy. If another program wrote it "
        f"since maxjax did, {path} is stale and may be deleted; verify=False reads it as it is."
    )


# --- checksums of arrays in memory --------------------------------------------------------------


def covers(shape: Sequence[int], parts: Sequence[Wanted]) -> bool:
    """Whether parts of an array, which may overlap, together cover it.

    Example:
        >>> a = np.zeros((2, 2))
        >>> covers((2, 4), [(((0, 2), (0, 2)), a), (((0, 2), (2, 4)), a)])
        True
    """
    return is_covered(whole(shape), [box for box, _ in parts])


def crc32_of_boxes(shape: Sequence[int], parts: Sequence[Wanted]) -> int:
    """The CRC-32 of an array in C order, given as parts that together cover it.

    The parts may overlap, and their arrays may have any strides. Needs 1 MiB of memory besides them.

    Example:
        >>> a = np.arange(8.0).reshape(2, 4)
        >>> parts = [(((0, 2), (0, 3)), a[:, :3]), (((0, 2), (3, 4)), a[:, 3:])]
        >>> crc32_of_boxes((2, 4), parts) == crc32(a)
        True
    """
    pieces = (_swapped(piece) for box in _boxes(shape, parts) for piece in _gathered(box, parts))
    return crc32_of(pieces)


def _boxes(shape: Sequence[int], parts: Sequence[Wanted]) -> Iterator[Box]:
    itemsize = parts[0][1].dtype.itemsize if parts else 1
    box = whole(shape)
    return split(box, max(1, STEP_BYTES // itemsize)) if count(box) else iter(())


def _gathered(box: Box, parts: Sequence[Wanted]) -> Iterator[np.ndarray]:
    """The array of a box: a view of one part, or gathered from several."""
    for outer, array in parts:
        if overlap(box, outer) == box:
            yield np.ascontiguousarray(array[(*within(box, outer), ...)])
            return
    memory = np.empty(extents(box), parts[0][1].dtype)
    for part in parts:
        copy_shared((box, memory), part)
    yield memory


def _swapped(array: np.ndarray) -> np.ndarray:
    """The array in little-endian byte order."""
    return array if array.dtype.newbyteorder("<") == array.dtype else array.byteswap()


# Bytes of one read only for a checksum.
BLOCK_BYTES = 16 << 20
# Memory for reading an array only for the checksum of its values.
VALUES_BYTES = 64 << 20

Verify = Literal["auto"] | bool
# Identifies a checksum by file, name, offset and length: all tensors of one storage of a PyTorch
# file share one checksum.
Key = tuple[int, str, int, int]


class Checks:
    """The state of checksum comparison of an open checkpoint.

    Attributes:
        matched: checksums that matched; none of them is compared again.
    """

    def __init__(self, files: list[OpenFile]):
        self.files = files
        self.matched: set[Key] = set()

    def sums(self, entries: Iterable[TensorEntry], verify: Verify) -> dict[Key, Sum]:
        """The checksums to compute while tensors are read, for ``compare`` afterwards.

        Args:
            verify: when reading compares checksums: "auto" if the read covers all bytes of a
                checksum anyway and computing it takes almost no time; True always, reading more
                bytes if necessary; False never.
        """
        if verify is False:
            return {}
        found = self.unchecked(entries)
        if verify is True or is_fast():
            return found
        # The checksums of archives are compared by the archive readers.
        return {key: one for key, one in found.items() if one.checksum.source is None}

    def compare(self, sums: dict[Key, Sum], verify: Verify, *, threads: int | None = None) -> None:
        """Compares checksums after reading; incompletely read ones only if ``verify`` is True.

        Raises:
            CheckpointCorruptError: a checksum differs.
            CheckpointChangedError: a checksum differs, and the file was modified since opening.
            CheckpointFormatError: a boolean that was read is neither 0 nor 1.
        """
        rest = []
        for key, one in sums.items():
            if one.compare():
                self.matched.add(key)
            else:
                rest.append(one.entry)
        if verify is True:
            self.check(rest, threads=threads)
        for one in sums.values():
            if one.invalid:
                raise one.invalid

    def check(self, entries: Iterable[TensorEntry], *, threads: int | None = None) -> None:
        """Reads all bytes that the tensors' checksums cover, and compares; errors as ``compare``."""
        sums = self.unchecked(entries)
        plain = [one for one in sums.values() if not one.checksum.of_values]
        jobs = [(one, *block) for one in plain for block in one.blocks(BLOCK_BYTES)]
        total = sum(nbytes for _, _, nbytes in jobs)
        run_jobs(lambda job: job[0].read(*job[1:]), jobs, total, threads)
        for key, one in sums.items():
            one.compare(_of_values(one) if one.checksum.of_values else None)
            self.matched.add(key)

    def unchecked(self, entries: Iterable[TensorEntry]) -> dict[Key, Sum]:
        """The checksums of tensors that were not compared yet."""
        found: dict[Key, Sum] = {}
        with without_collector():
            for entry in entries:
                if entry.checksum is not None and entry.nbytes:
                    key = _key(entry, entry.checksum)
                    if key not in self.matched and key not in found:
                        found[key] = Sum(self.files[entry.file], entry)
        return found


def sum_of(entry: TensorEntry, sums: dict[Key, Sum]) -> Sum | None:
    """The checksum to compute while a tensor is read, if any."""
    return None if entry.checksum is None else sums.get(_key(entry, entry.checksum))


def _key(entry: TensorEntry, checksum: Checksum) -> Key:
    return entry.file, checksum.name, checksum.offset, checksum.nbytes


def sum_of_parts(entry: TensorEntry, regions: Sequence[Box], sums: dict[Key, Sum]) -> Sum | None:
    """The checksum to compute while parts of a tensor are read; None if they cannot cover it."""
    if not sums or entry.checksum is None:
        return None
    read = entry.dtype.np.itemsize * sum(map(count, regions))
    if entry.nbytes - read > GAP_BYTES:
        return None
    # A coding reads each part of a row separately, however short: each would need its checksum.
    rows = whole(entry.shape)[1:]
    if entry.coding is None or entry.checksum.of_values or all(r[1:] == rows for r in regions):
        return sum_of(entry, sums)
    return None


def _of_values(one: Sum) -> int:
    """Reads an array part by part and returns the checksum of its values."""
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
