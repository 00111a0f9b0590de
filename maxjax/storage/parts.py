"""Reading rectangular parts of tensors, each into given memory.

This serves sharded weights: each device's part is read into the memory that becomes that device's
array. Bytes that several parts need are read once; bytes that none needs are not read. A tensor is
cut into boxes that do not overlap: a box inside a part is read straight into that part's memory,
any other through a small scratch buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from .boxes import Box, Span, count, extents, overlap, split, within
from .checksums import Sum, check_values, sum_of_parts, tapped
from .entry import CodedJob, TensorEntry, coded_jobs, fill
from .files import OpenFile, aligned_empty, run_reads
from .table import BLOCK_BYTES, TensorTable

# Scratch memory of one thread, in bytes. It fits the cache of one core, so that the second copy
# is cheap; with 64 KiB or 4 MiB the same read took up to 1.5 times as long.
SCRATCH_BYTES = 1 << 20
# A run of at least this many bytes is read straight into its part, without the scratch memory.
DIRECT_BYTES = 64 << 10
# For a shorter run the call costs more than the bytes, so the gap beside it is read as well,
# unless that gap is wider than HOLE_BYTES.
SHORT_BYTES = 512
HOLE_BYTES = 16 << 10


class Part(NamedTuple):
    """A rectangular part of the tensor ``name``, and the memory to read it into.

    ``region`` is (start, stop) on each axis of the logical shape. ``memory`` is a C-contiguous
    uint8 array of exactly the bytes of the region's array; float4 takes one byte per value.
    """

    name: str
    region: Box
    memory: np.ndarray


def read_parts(table: TensorTable, parts: Sequence[Part], *, threads: int | None = None) -> int:
    """Fills the memory of every part; returns the number of bytes read from the files.

    Parts may overlap, repeat, be empty, and belong to any number of tensors. Each thread needs at
    most 1 MiB of scratch memory, a few MiB for a tensor with a coding. ``threads`` defaults to the
    number of cores, at most 8. A run shorter than 512 bytes may be read together with its neighbours.

    Raises:
        KeyError: there is no tensor of that name.
        ValueError: the region is outside the tensor's shape, or the memory does not fit it.
        CheckpointTruncatedError: the file is shorter than when it was opened.
        CheckpointChangedError: the file was modified since it was opened.
        CheckpointFormatError: a boolean among the bytes read is neither 0 nor 1.
        CheckpointCorruptError: a checksum does not match the bytes.
        CheckpointError: the operating system reports an error, or the file is closed.

    Example:
        >>> import os, tempfile
        >>> from maxjax.storage import aligned_empty, open_checkpoint
        >>> header = b'{"w":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]}}'
        >>> path = os.path.join(tempfile.mkdtemp(), "m.safetensors")
        >>> with open(path, "wb") as f:
        ...     _ = f.write(len(header).to_bytes(8, "little") + header + bytes(range(6)))
        >>> left, right = aligned_empty(2), aligned_empty(4)
        >>> with open_checkpoint(path) as table:
        ...     read_parts(table, [Part("w", ((0, 2), (0, 1)), left),
        ...                        Part("w", ((0, 2), (1, 3)), right)])
        6
        >>> left.tolist(), right.tolist()
        ([0, 3], [1, 2, 4, 5])
    """
    targets: dict[str, list[_Target]] = {}
    for part in parts:
        targets.setdefault(part.name, []).append(_target(table.entries[part.name], part))
    entries = [table.entries[name] for name in targets]
    sums = table.checks.sums(entries, table.verify)
    jobs: list[_BoxJob | CodedJob] = []
    nbytes = 0
    for entry, wanted in zip(entries, targets.values(), strict=True):
        needed = [target for target in wanted if target.array.size]
        nbytes += sum(target.array.nbytes for target in needed)
        one = sum_of_parts(entry, [target.region[:-1] for target in needed], sums)
        file = tapped(table.files[entry.file], one)
        if entry.coding is None:
            jobs.extend(_plan(file, entry, needed, one))
        else:
            regions = [(t.region[:-1], t.array.view(entry.dtype.np)[..., 0]) for t in needed]
            if one:
                one.parts.extend(regions)
            jobs.extend(coded_jobs(file, entry, regions))
    jobs.sort(key=_place)
    with table.reading(entries, sums, threads):
        return sum(run_reads(jobs, nbytes, threads))


def _place(job: _BoxJob | CodedJob) -> Any:
    return job.entry.file, job.entry.offset, job.box if type(job) is _BoxJob else ()


# --- what is asked for ------------------------------------------------------------------------


# Compared by identity: two parts of the same region are two targets.
@dataclass(slots=True, eq=False)
class _Target:
    """A validated part whose region and array have one more axis: the bytes of an element."""

    region: Box
    array: np.ndarray

    def covers(self, span: Span, axis: int) -> bool:
        start, stop = self.region[axis]
        return start <= span[0] and span[1] <= stop


def _target(entry: TensorEntry, part: Part) -> _Target:
    (name, region, memory), shape = part, entry.shape
    region = (*region, (0, entry.dtype.np.itemsize))
    problem = None
    if len(part.region) != len(shape) or not all(
        0 <= start <= stop <= size for (start, stop), size in zip(part.region, shape, strict=True)
    ):
        problem = f"the region {part.region} is not inside the shape {list(shape)}"
    elif memory.dtype != np.uint8 or not (memory.flags.c_contiguous and memory.flags.writeable):
        problem = f"the memory must be uint8, in C order and writable, not {memory.dtype}"
    elif memory.size != count(region):
        problem = f"region {part.region} takes {count(region)} bytes of memory, not {memory.size}"
    if problem:
        raise ValueError(f"tensor '{name}': {problem}")
    # An empty array may have axes too long for NumPy; its shape is never used.
    return _Target(region, memory.reshape(extents(region)) if memory.size else memory)


# --- planning: boxes that do not overlap, each with all the parts it touches -------------------


@dataclass(slots=True)
class _BoxJob:
    """Reads up to 16 MiB of a tensor, whose full box is ``whole``.

    With a ``target`` the box lies inside that part; ``others`` are all other parts that overlap it.
    ``sum`` is the checksum that the bytes read are added to.
    """

    file: OpenFile
    entry: TensorEntry
    whole: Box
    box: Box
    target: _Target | None
    others: list[_Target]
    sum: Sum | None

    @property
    def nbytes(self) -> int:
        """The bytes of the box."""
        return count(self.box)

    def run(self) -> int:
        """Reads the box; returns the number of bytes read from the file."""
        total = 0
        limit = SCRATCH_BYTES if self.others or not self.target else BLOCK_BYTES
        scratch = aligned_empty(0 if self.target else min(limit, count(self.box)))
        for box in split(self.box, limit):
            if self.target:
                region, array = self.target.region, self.target.array
            else:
                region, array = box, scratch[: count(box)].reshape(extents(box))
            total += self._fill(box, array.reshape(-1), region)
            for other in self.others:
                if (shared := overlap(box, other.region)) is not None:
                    other.array[within(shared, other.region)] = array[within(shared, region)]
        return total

    def _fill(self, box: Box, memory: np.ndarray, region: Box) -> int:
        """Reads a box into ``memory``, which holds ``region``; returns the number of bytes read."""
        entry, view, total = self.entry, memoryview(memory), 0
        axis, length = _run(self.whole, box)
        places = _starts(box, region, axis)
        for start, place in zip(_starts(box, self.whole, axis), places, strict=True):
            fill(self.file, entry, start, view[place : place + length])
            check_values(self.file, entry, start, memory[place : place + length], self.sum)
            total += length
        return total


def _plan(
    file: OpenFile, entry: TensorEntry, targets: list[_Target], sum: Sum | None
) -> Iterator[_BoxJob]:
    whole = tuple((0, size) for size in (*entry.shape, entry.dtype.np.itemsize))
    for large, target in _boxes(whole, targets, 0, 1) if targets else ():
        others = [other for other in targets if other is not target]
        for box in split(large, BLOCK_BYTES):
            touched = [other for other in others if overlap(box, other.region) is not None]
            yield _BoxJob(file, entry, whole, box, target, touched, sum)


def _boxes(
    whole: Box, targets: list[_Target], axis: int, rows: int
) -> list[tuple[Box, _Target | None]]:
    """Boxes over the axes from ``axis`` on, with the part that contains each (None: use scratch).

    ``rows`` is how often each box is read: the number of indices on the preceding axes.
    """
    rest = whole[axis:]
    if all(one.region[axis:] == rest for one in targets):
        return [(rest, targets[0])]
    if all(one.region[axis + 1 :] == rest[1:] for one in targets):
        stride = count(rest[1:])
        found = [((span, *rest[1:]), one) for span, one in _runs(targets, axis, stride, rows)]
    else:
        found = []
        for span in _cuts(targets, axis):
            inside = [one for one in targets if one.covers(span, axis)]
            below = _boxes(whole, inside, axis + 1, rows * (span[1] - span[0]))
            found.extend(((span, *box), target) for box, target in below)
    if rows > 1 and count(rest) <= HOLE_BYTES:
        if any(_run(rest, box)[1] < SHORT_BYTES for box, _ in found):
            return [(rest, None)]
    return found


def _cuts(targets: list[_Target], axis: int) -> list[Span]:
    """The spans of ``axis`` between neighbouring borders of parts that some part needs."""
    borders = sorted({border for one in targets for border in one.region[axis]})
    return [span for span in pairwise(borders) if any(one.covers(span, axis) for one in targets)]


def _runs(
    targets: list[_Target], axis: int, stride: int, rows: int
) -> list[tuple[Span, _Target | None]]:
    """The spans to read along the last axis of which some part needs only a slice."""
    groups: list[list[Span]] = []
    for start, stop in _cuts(targets, axis):
        if groups:
            hole = stride * (start - groups[-1][-1][1])
            shorter = stride * min(stop - start, groups[-1][-1][1] - groups[-1][0][0])
            if hole < SHORT_BYTES or (shorter < SHORT_BYTES and hole <= HOLE_BYTES):
                groups[-1].append((start, stop))
                continue
        groups.append([(start, stop)])
    found = []
    for group in groups:
        start, stop = group[0][0], group[-1][1]
        # In a single row each piece is one read anyway.
        direct = rows == 1 or stride * (stop - start) >= DIRECT_BYTES * len(group)
        for span in group if direct else [(start, stop)]:
            found.append((span, next((one for one in targets if one.covers(span, axis)), None)))
    return found


def _run(whole: Box, box: Box) -> tuple[int, int]:
    """The first axis after which a box spans the tensor, and its contiguous bytes from there on."""
    axis = len(box) - 1
    while axis and box[axis] == whole[axis]:
        axis -= 1
    return axis, count(box[axis:])


def _starts(box: Box, region: Box, axis: int) -> Iterator[int]:
    """The byte offset in ``region`` of each contiguous run of a box that is full after ``axis``."""
    places = []
    for k, ((start, stop), (base, _)) in enumerate(zip(box, region, strict=True)):
        stride = count(region[k + 1 :])
        stop = stop if k < axis else start + 1
        places.append(range((start - base) * stride, (stop - base) * stride, stride))
    return map(sum, product(*places[: axis + 1]))
