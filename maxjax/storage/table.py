"""TensorTable: an opened checkpoint that reads its tensors.

Every format's parser returns a TensorTable: validated entries and open files, no data yet.
Tensors are read in parallel into newly allocated aligned memory. Files are never memory-mapped,
because a mapping crashes the process if the file is truncated.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from ..errors import CheckpointError, OutOfMemoryError, UserInputError
from ..lazy import without_collector
from .boxes import whole
from .checksums import Checks, Key, Sum, check_values, sum_of, tapped
from .checksums import Verify as Verify
from .entry import CodedJob, TensorEntry, coded_jobs, fill
from .files import ALIGNMENT, OpenFile, aligned_empty, closed_on_error, open_regular, run_reads
from .limits import Limits, in_force
from .save.beside import Beside, replaced

# Bytes of one read of a large tensor. From 2 to 64 MiB the speed is the same; a smaller block
# spreads better over the threads and bounds the scratch memory of a quantised type.
BLOCK_BYTES = 16 << 20
# Tensors up to SMALL_BYTES share one allocation (a slab), because separate allocations and reads
# would cost more than copying the bytes. A slab lives as long as any tensor in it.
SMALL_BYTES = 128 << 10
SLAB_BYTES = 4 << 20
# Number of samples over all files of a checkpoint, and bytes of each, for ``sampled``.
SAMPLES, SAMPLE_BYTES = 64, 64
# Maximum buffers of one scattered read (preadv); the system's own bound (IOV_MAX) is 1024.
SCATTER = 512


class TensorTable:
    """One opened checkpoint: names, dtypes, shapes and file offsets of its tensors; no data.

    Any number of threads may read at once. Close the table, use it in a ``with`` block, or drop
    it: the files close with the last reference.

    Attributes: ``format`` ("safetensors"), ``files`` (open), ``entries`` (name → TensorEntry
    in file order), ``metadata`` (str → str; in GGUF files any metadata type), ``verify``
    ("auto", True or False: when reading compares checksums; see :class:`Checks`), ``indexes``
    (open index files), ``directory`` (of the files that describe the weights, if known).

    Example:
        >>> import os, tempfile
        >>> from maxjax.storage import open_checkpoint
        >>> header = b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
        >>> path = os.path.join(tempfile.mkdtemp(), "m.safetensors")
        >>> with open(path, "wb") as f:
        ...     _ = f.write(len(header).to_bytes(8, "little") + header + b"\\x05\\x07")
        >>> with open_checkpoint(path) as table:
        ...     print(table.entries["w"].shape, table.read("w"))
        (2,) [5 7]
    """

    def __init__(
        self,
        format: str,
        files: list[OpenFile],
        entries: dict[str, TensorEntry],
        metadata: dict[str, Any] | None = None,
    ):
        self.format = format
        self.files = files
        self.entries = entries
        self.metadata = metadata or {}
        self.verify: Verify = "auto"
        self.indexes: list[OpenFile] = []
        self.directory: str | None = None

    # Cached: most checkpoints have no checksums, and not every caller needs the files beside the weights.

    @cached_property
    def checks(self) -> Checks:
        """The checksums already compared."""
        return Checks(self.files)

    @cached_property
    def beside(self) -> Beside | None:
        """The files that describe the weights; None if it is not known where they are."""
        if self.directory is None:
            return None
        return Beside(self.directory, self.root or self.files[0])

    @property
    def root(self) -> OpenFile | None:
        """The file whose rename commits a save: the index or the only file; None if there is neither."""
        known = self.indexes or self.files
        return known[0] if len(known) == 1 else None

    def sampled(self) -> str:
        """A digest of the tensors' names and types and of a few bytes of each file.

        It tells most checkpoints apart without reading them.
        """
        found = hashlib.sha256()
        for name, entry in sorted(self.entries.items()):
            found.update(f"{name} {entry.dtype.name} {entry.shape}".encode())
        count = max(SAMPLES // max(len(self.files), 1), 4)
        for file in self.files:
            found.update(f"{file.size}".encode())
            for i in range(1, count + 1):
                nbytes = min(SAMPLE_BYTES, file.size)
                found.update(file.pread((file.size - nbytes) * i // count, nbytes))
        return found.hexdigest()

    def read(self, name: str) -> np.ndarray:
        """Reads the tensor ``name`` into its own C-contiguous array, aligned to 64 bytes.

        Types that NumPy lacks are those of ``ml_dtypes``; float4 takes one byte per value.
        Raises KeyError for an unknown name; other errors as for ``read_many``.
        """
        return self.read_many([name])[name]

    def read_many(
        self,
        names: Iterable[str] | None = None,
        *,
        threads: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Reads the tensors ``names`` (default: all) in parallel; the dict keeps their order.

        Needs at most ``threads`` × 16 MiB of memory besides the arrays. ``threads`` defaults to
        the number of cores, at most 8.

        Raises:
            CheckpointTruncatedError: the file is shorter than when it was opened.
            CheckpointChangedError: the file was modified since it was opened.
            CheckpointFormatError: a boolean is neither 0 nor 1.
            CheckpointCorruptError: a checksum does not match the bytes.
            OutOfMemoryError: a tensor does not fit the host's memory.
            CheckpointError: the operating system reports an error, or the file is closed.
        """
        wanted = self.entries if names is None else names
        entries = [self.entries[name] for name in dict.fromkeys(wanted)]
        sums = self.checks.sums(entries, self.verify)
        arrays, jobs = _plan(entries, self.files, sums)
        nbytes = sum(array.nbytes for array in arrays.values())
        with self.reading(entries, sums, threads):
            run_reads(jobs, nbytes, threads)
        return arrays

    def check(self, entries: Iterable[TensorEntry], *, threads: int | None = None) -> None:
        """Compares the checksums of tensors with their bytes, each once while the table is open.

        Raises:
            CheckpointCorruptError: a checksum does not match.
            CheckpointChangedError: a checksum does not match, and the file was modified since opening.
        """
        self.checks.check(entries, threads=threads)

    @contextlib.contextmanager
    def reading(
        self, entries: Iterable[TensorEntry], sums: dict[Key, Sum], threads: int | None
    ) -> Iterator[None]:
        """Context in which entries are read; at its end it compares ``sums`` and checks the files.

        Errors caused by a replaced checkpoint are raised as such. This matters for orbax, whose files
        are opened by name only when they are read.
        """
        try:
            yield
            self.checks.compare(sums, self.verify, threads=threads)
            # This must come last, after every read.
            for number in {entry.file for entry in entries}:
                self.files[number].check_unchanged()
        except CheckpointError as error:
            # An orbax step is a directory, and not all of its files are open.
            if self.format == "orbax" and not self.files[0].is_in_place():
                raise replaced(self.files[0].path) from error
            raise

    def close(self) -> None:
        """Closes the files. Arrays that were already read stay valid."""
        for file in [*self.files, *self.indexes]:
            file.close()

    def __enter__(self) -> TensorTable:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        paths = self.files[0].path if len(self.files) == 1 else f"{len(self.files)} files"
        return f"TensorTable({self.format}, {len(self.entries)} tensors, {paths})"


def check_verify(verify: Any) -> None:
    """Checks the argument ``verify`` of a public function.

    Raises:
        UserInputError: it is not "auto", True or False.
    """
    if verify is not True and verify is not False and verify != "auto":
        raise UserInputError(f'verify must be "auto", True or False, not {verify!r}')


def open_single(
    format: str,
    path: str | os.PathLike[str],
    limits: Limits | None,
    read: Callable[[OpenFile, int, Limits], tuple[dict[str, TensorEntry], dict[str, Any]]],
) -> TensorTable:
    """Opens a checkpoint of one file.

    Args:
        read: function that reads (entries, metadata) of an open file, its index in a set, and limits.
    """
    limits = in_force(limits)
    file = open_regular(path)
    with closed_on_error([file]):
        entries, metadata = read(file, 0, limits)
    return TensorTable(format, [file], entries, metadata)


# --- planning: where each tensor goes, and which reads fill it --------------------------------


@dataclass(slots=True)
class _BlockJob:
    """One positioned read of consecutive file bytes, from ``offset`` on, into ``views``.

    With several entries, each has one view. With one entry, the view is a block of it that begins
    ``start`` bytes into the tensor. ``sums`` holds for each entry the checksum to compute, if any.
    """

    file: OpenFile
    offset: int
    entries: list[TensorEntry]
    views: list[np.ndarray]
    sums: list[Sum | None]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the block."""
        return sum(map(len, self.views))

    def run(self) -> None:
        """Reads the block."""
        views = [memoryview(view) for view in self.views]
        if len(views) == 1:
            fill(tapped(self.file, self.sums[0]), self.entries[0], self.start, views[0])
        else:
            self._scatter(views)
            for entry, view, sum in zip(self.entries, views, self.sums, strict=True):
                if sum is not None:
                    sum.add(entry.offset + self.start, view)
        for entry, view, sum in zip(self.entries, self.views, self.sums, strict=True):
            check_values(self.file, entry, self.start, view, sum)

    def _scatter(self, views: list[memoryview]) -> None:
        wanted = sum(map(len, views))
        got = self.file.pread_some(views, self.offset, tensor=self.entries[0].name)
        if got < wanted:
            # Rare: the file ended, or the read was partial. Reading one by one shows which.
            for entry, view in zip(self.entries, views, strict=True):
                fill(self.file, entry, self.start, view)


@without_collector()
def _plan(
    entries: list[TensorEntry], files: list[OpenFile], sums: dict[Key, Sum]
) -> tuple[dict[str, np.ndarray], list[_BlockJob | CodedJob]]:
    """The arrays, not yet filled, in the order of the entries; and the reads that fill them, in file order."""
    arrays: dict[str, Any] = dict.fromkeys(entry.name for entry in entries)
    jobs: list[_BlockJob | CodedJob] = []
    slab, used = aligned_empty(0), 0
    for entry in sorted(entries, key=attrgetter("file", "offset")):
        file, sum = files[entry.file], sum_of(entry, sums)
        if entry.coding is not None:
            nbytes = math.prod(entry.shape) * entry.dtype.np.itemsize
            memory = _allocate(nbytes, entry, files)
            arrays[entry.name] = array = memory.view(entry.dtype.np).reshape(entry.shape)
            parts = [(whole(entry.shape), array)]
            if sum:
                sum.parts.extend(parts)
            jobs.extend(coded_jobs(tapped(file, sum), entry, parts))
            continue
        length = -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
        if length > SMALL_BYTES:
            memory = _allocate(entry.nbytes, entry, files)
            jobs.extend(_blocks(entry, file, memory, sum))
        else:
            if used + length > len(slab):
                nbytes = SLAB_BYTES if len(entries) > 1 else length
                slab, used = _allocate(nbytes, entry, files), 0
            memory = slab[used : used + entry.nbytes]
            used += length
            _append_small(jobs, entry, file, memory, sum)
        arrays[entry.name] = np.ndarray(entry.shape, entry.dtype.np, memory)
    return arrays, jobs


def _allocate(nbytes: int, entry: TensorEntry, files: list[OpenFile]) -> np.ndarray:
    try:
        return aligned_empty(nbytes)
    except MemoryError as error:
        path = files[entry.file].path
        raise OutOfMemoryError(
            f"{path}: tensor '{entry.name}': the host cannot allocate {nbytes} bytes. "
            "Load fewer tensors at a time, or shard the model over more devices."
        ) from error


def _blocks(
    entry: TensorEntry, file: OpenFile, memory: np.ndarray, sum: Sum | None
) -> Iterable[_BlockJob]:
    for start in range(0, entry.nbytes, BLOCK_BYTES):
        view = memory[start : start + BLOCK_BYTES]
        yield _BlockJob(file, entry.offset + start, [entry], [view], [sum], start)


def _append_small(
    jobs: list[Any], entry: TensorEntry, file: OpenFile, memory: np.ndarray, sum: Sum | None
) -> None:
    """Adds a small tensor to the last read if it directly follows it, else starts a new read."""
    if not entry.nbytes:
        return
    last = jobs[-1] if jobs else None
    if type(last) is _BlockJob and last.file is file and last.entries[-1].nbytes <= SMALL_BYTES:
        end = last.entries[-1].offset + last.entries[-1].nbytes
        if end == entry.offset and len(last.views) < SCATTER:
            last.entries.append(entry)
            last.views.append(memory)
            last.sums.append(sum)
            return
    jobs.append(_BlockJob(file, entry.offset, [entry], [memory], [sum]))
