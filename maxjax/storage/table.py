"""Floor 1. TensorTable: an opened checkpoint, and the reading of its tensors.

Every format's parser gives one of these: validated entries and open files, no data yet.
Reading is positioned reads, in parallel, into aligned memory of our own; never a mapping,
which would die with the file. Below: files. Above: regions, the formats, graph.weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtype import DType
from ..errors import CheckpointFormatError, CheckpointTruncatedError, OutOfMemoryError
from .files import ALIGNMENT, OpenFile, aligned_empty

# One read of a large tensor. From 2 to 64 MiB the speed is the same; a smaller block spreads
# better over the threads, and bounds the scratch memory of a packed type.
BLOCK_BYTES = 16 << 20
# Tensors up to SMALL_BYTES lie together in slabs: so many allocations and reads would cost
# more than their bytes. A slab lives as long as any tensor in it.
SMALL_BYTES = 128 << 10
SLAB_BYTES = 4 << 20
# Parts of one scattered read; the system's own bound (IOV_MAX) is 1024.
SCATTER = 512
# Below this a pool of threads costs more than it saves.
PARALLEL_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: ``nbytes`` bytes at ``offset`` of ``TensorTable.files[file]``.

    ``shape`` is logical. float4 values lie two in a byte, so ``nbytes`` is half of theirs.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


class TensorTable:
    """One opened checkpoint: names, types, shapes and places of its tensors; no data.

    Attributes: ``format`` ("safetensors"), ``files`` (open), ``entries`` (name → TensorEntry
    in file order), ``metadata`` (text → text). Any number of threads may read at once. Close
    it, or use it in a ``with`` block, or drop it: the files close with the last reference.

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
        metadata: dict[str, str] | None = None,
    ):
        self.format = format
        self.files = files
        self.entries = entries
        self.metadata = metadata or {}

    def read(self, name: str) -> np.ndarray:
        """The tensor ``name``: owned, C-contiguous, at a multiple of 64 bytes.

        ``ml_dtypes`` gives the types NumPy lacks; float4 comes one value per byte. KeyError
        for an unknown name; other errors as for ``read_many``.
        """
        return self.read_many([name])[name]

    def read_many(
        self,
        names: Iterable[str] | None = None,
        *,
        threads: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Reads ``names`` (default: all) with parallel reads; the dict is in their order.

        Takes the memory of the arrays and at most ``threads`` × 16 MiB beside it. ``threads``
        is by default the number of cores, at most 8.

        Raises:
            CheckpointTruncatedError: The file is shorter than it was.
            CheckpointChangedError: It was written to since it was opened.
            CheckpointFormatError: A boolean that is neither 0 nor 1.
            OutOfMemoryError: The host's memory does not hold a tensor.
            CheckpointError: The system reports an error, or the file is closed.
        """
        wanted = self.entries if names is None else names
        entries = [self.entries[name] for name in wanted]
        arrays, jobs = _plan(entries, self.files)
        nbytes = sum(view.nbytes for job in jobs for view in job.views)
        run_jobs(_read, jobs, nbytes, threads)
        for number in {entry.file for entry in entries}:
            self.files[number].check_unchanged()
        return {entry.name: arrays[entry.name] for entry in entries}

    def close(self) -> None:
        """Closes the files. Arrays that were read stay valid."""
        for file in self.files:
            file.close()

    def __enter__(self) -> TensorTable:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        paths = self.files[0].path if len(self.files) == 1 else f"{len(self.files)} files"
        return f"TensorTable({self.format}, {len(self.entries)} tensors, {paths})"


# --- planning: where each tensor goes, and which reads fill it --------------------------------


@dataclass(slots=True)
class _Job:
    """One positioned read: ``views`` take the file's bytes from ``offset`` on, in turn.

    Several entries: one view each. One entry: one block of it, ``start`` bytes in.
    """

    file: OpenFile
    offset: int
    entries: list[TensorEntry]
    views: list[np.ndarray]
    start: int = 0


def _plan(
    entries: list[TensorEntry], files: list[OpenFile]
) -> tuple[dict[str, np.ndarray], list[_Job]]:
    """The arrays, still empty, and the reads that fill them, in the order of the files."""
    arrays: dict[str, np.ndarray] = {}
    jobs: list[_Job] = []
    slab, used = aligned_empty(0), 0
    for entry in sorted(entries, key=lambda entry: (entry.file, entry.offset)):
        if entry.name in arrays:
            continue
        length = -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
        if length > SMALL_BYTES or entry.dtype is DType.float4_e2m1fn:
            scale = 2 if entry.dtype is DType.float4_e2m1fn else 1
            memory = _allocate(scale * entry.nbytes, entry, files)
            jobs.extend(_blocks(entry, files[entry.file], memory))
        else:
            if used + length > len(slab):
                nbytes = SLAB_BYTES if len(entries) > 1 else length
                slab, used = _allocate(nbytes, entry, files), 0
            memory = slab[used : used + entry.nbytes]
            used += length
            _append_small(jobs, entry, files[entry.file], memory)
        arrays[entry.name] = memory.view(entry.dtype.np).reshape(entry.shape)
    return arrays, jobs


def _allocate(nbytes: int, entry: TensorEntry, files: list[OpenFile]) -> np.ndarray:
    try:
        return aligned_empty(nbytes)
    except MemoryError as error:
        path = files[entry.file].path
        raise OutOfMemoryError(
            f"{path}: tensor '{entry.name}': the host has no {nbytes} bytes for it. "
            "Load fewer tensors at a time, or place the model on more devices."
        ) from error


def _blocks(entry: TensorEntry, file: OpenFile, memory: np.ndarray) -> Iterable[_Job]:
    scale = 2 if entry.dtype is DType.float4_e2m1fn else 1
    for start in range(0, entry.nbytes, BLOCK_BYTES):
        view = memory[scale * start : scale * (start + BLOCK_BYTES)]
        yield _Job(file, entry.offset + start, [entry], [view], start)


def _append_small(jobs: list[_Job], entry: TensorEntry, file: OpenFile, memory: np.ndarray) -> None:
    """Puts a small tensor into the last read if it lies right behind it, else into its own."""
    if not entry.nbytes:
        return
    last = jobs[-1] if jobs else None
    if last and last.file is file and last.entries[-1].nbytes <= SMALL_BYTES:
        end = last.entries[-1].offset + last.entries[-1].nbytes
        packed = last.entries[-1].dtype is DType.float4_e2m1fn
        if end == entry.offset and len(last.views) < SCATTER and not packed:
            last.entries.append(entry)
            last.views.append(memory)
            return
    jobs.append(_Job(file, entry.offset, [entry], [memory]))


# --- reading ----------------------------------------------------------------------------------


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def run_jobs(
    read: Callable[[Any], Any], jobs: Sequence[Any], nbytes: int, threads: int | None = None
) -> list[Any]:
    """What ``read`` gives for each job, in order; in threads (``read_many``'s) for many bytes."""
    threads = threads or min(8, _cores())
    if threads <= 1 or nbytes < PARALLEL_BYTES or len(jobs) < 2:
        return [read(job) for job in jobs]
    with ThreadPoolExecutor(min(threads, len(jobs)), "maxjax-read") as pool:
        try:
            return list(pool.map(read, jobs))
        except BaseException:  # an interrupt too: what has not begun shall not
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _read(job: _Job) -> None:
    if job.entries[0].dtype is DType.float4_e2m1fn:
        _read_float4(job)
        return
    views = [memoryview(view) for view in job.views]
    wanted = sum(map(len, views))
    got = job.file.pread_some(views, job.offset, tensor=job.entries[0].name)
    if got < wanted:
        # Rare: the file ended, or the system gave part. Again one by one, to know which.
        for entry, view in zip(job.entries, views, strict=True):
            fill(job.file, entry, job.start, view)
    for entry, view in zip(job.entries, job.views, strict=True):
        if entry.dtype is DType.bool:
            check_bool(job.file, entry, job.start, view)


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


def _read_float4(job: _Job) -> None:
    (values,) = job.views
    packed = aligned_empty(len(values) // 2)
    fill(job.file, job.entries[0], job.start, memoryview(packed))
    unpack_float4(packed, values)


def unpack_float4(packed: np.ndarray, values: np.ndarray) -> None:
    """Two values a byte, the first in the low four bits; one value a byte in ``values``.

    That is the order of PyTorch's float4_e2m1fn_x2 and of the OCP microscaling formats.
    """
    np.bitwise_and(packed, 15, out=values[0::2])
    np.right_shift(packed, 4, out=values[1::2])


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
