"""Reading the chunks of orbax arrays through tensorstore, into the parts that need them.

Each chunk is compressed separately and always decoded completely, so a chunk that several parts need
is read once. The bytes in flight are bounded for the process: tensorstore would read all at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ...dtype import DType
from ...errors import CheckpointChangedError, CheckpointFormatError
from ..boxes import Box, Wanted, copy_shared, count, enclosing, extents, overlap, within
from ..entry import Coding, TensorEntry
from ..files import OpenFile
from .store import Store

# Bytes of one request to tensorstore, or one chunk if that is larger.
BLOCK_BYTES = 8 << 20
# Maximum bytes in flight in this process, or two chunks; decoding takes the same amount once more.
FLIGHT_BYTES = 64 << 20
_FLIGHT_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Chunks(Coding):
    """Coding of a chunked array, whose chunks tensorstore reads and decompresses completely.

    All requested parts are read in one call, so that a chunk that several need is read once.

    Attributes:
        store: store with the arrays of the tree.
        driver: tensorstore's name of the format.
        stored: dtype of the stored values; the entry's may be another of the same width.
        chunk: shape that is decompressed at a time.
        is_dense: whether a missing chunk is an error.
    """

    store: Store
    driver: str
    stored: DType
    chunk: tuple[int, ...]
    is_dense: bool

    is_divisible = False

    def read(self, file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> int:
        """See :class:`Coding`; returns the number of bytes of the values that were read."""
        array = self.store.array(self.driver, entry.name, self.is_dense)
        if (tuple(array.shape), array.dtype.numpy_dtype) != (entry.shape, self.stored.np):
            raise CheckpointChangedError(
                "the array has changed since the checkpoint was opened",
                path=self.store.directory,
                tensor=entry.name,
                expected=f"{self.stored.name} {list(entry.shape)}",
                found=f"{array.dtype.name} {list(array.shape)}",
            )
        parts = [(box, values.view(self.stored.np)) for box, values in parts]
        pending: list[_Read] = []
        total = 0
        try:
            for box, users in self._blocks(entry, parts):
                nbytes = math.prod(self._covered(entry, box)) * self.stored.np.itemsize
                while not _FLIGHT.try_take(nbytes, wait=not pending):
                    pending.pop(0).finish()
                pending.append(_Read(nbytes, box, users))
                pending[-1].start(self.store, array, entry.name)
                total += count(box) * self.stored.np.itemsize
            while pending:
                pending.pop(0).finish()
        finally:
            for one in pending:
                one.drop()
        self.store.check_unchanged(entry.name)
        self._check_values(entry, parts)
        return total

    def _check_values(self, entry: TensorEntry, parts: Sequence[Wanted]) -> None:
        """Refuses booleans other than 0 and 1, which would silently give wrong results."""
        for _, values in parts if entry.dtype is DType.bool else ():
            if values.size and (largest := int(values.view(np.uint8).max())) > 1:
                raise CheckpointFormatError(
                    "data: a boolean must be 0 or 1",
                    path=self.store.directory,
                    tensor=entry.name,
                    expected="0 or 1",
                    found=largest,
                )

    def _blocks(
        self, entry: TensorEntry, parts: Sequence[Wanted]
    ) -> Iterator[tuple[Box, list[Wanted]]]:
        """The boxes to read, each inside a block of whole chunks, with the parts that need them."""
        block = _block(entry.shape, self.chunk, max(1, BLOCK_BYTES // self.stored.np.itemsize))
        found: dict[tuple[int, ...], list[Wanted]] = {}
        for part in parts:
            ranges = [
                range(start // step, -(-stop // step))
                for (start, stop), step in zip(part[0], block, strict=True)
            ]
            for index in product(*ranges):
                found.setdefault(index, []).append(part)
        for index, users in sorted(found.items(), key=lambda pair: pair[0]):
            part = tuple((i * step, (i + 1) * step) for i, step in zip(index, block, strict=True))
            shared = (overlap(part, box) for box, _ in users)
            yield enclosing([box for box in shared if box is not None]), users

    def _covered(self, entry: TensorEntry, box: Box) -> list[int]:
        """The shape of all chunks that overlap a box."""
        return [
            min(-(-stop // step) * step, size) - start // step * step
            for (start, stop), step, size in zip(box, self.chunk, entry.shape, strict=True)
        ]


@dataclass(slots=True)
class _Read:
    """One box being read for the parts that need it; for a single part straight into its array."""

    nbytes: int
    box: Box
    users: list[Wanted]
    memory: np.ndarray | None = None
    wait: Callable[[], None] | None = None

    def start(self, store: Store, array: Any, name: str) -> None:
        box, into = self.users[0]
        if len(self.users) == 1:
            into = into[(*within(self.box, box), ...)]
        else:
            with store.wrapped(name):
                into = self.memory = np.empty(extents(self.box), into.dtype)
        self.wait = store.start(array, self.box, into, name)

    def finish(self) -> None:
        assert self.wait is not None
        try:
            self.wait()
        finally:
            self.drop()
        if self.memory is None:
            return
        for user in self.users:
            copy_shared(user, (self.box, self.memory))

    def drop(self) -> None:
        """Releases its share of the bytes in flight."""
        _FLIGHT.give_back(self.nbytes)
        self.nbytes = 0


class _Flight:
    """Counts the bytes in flight (being read and decompressed) in this process, by all threads."""

    def __init__(self, limit: int, blocks: int):
        self.limit, self.blocks = limit, blocks
        self.nbytes = self.count = 0
        self._changed = threading.Condition()

    def try_take(self, nbytes: int, *, wait: bool) -> bool:
        """Whether a block may start now; with ``wait``, blocks until it may."""
        with self._changed:
            while self.count >= self.blocks and self.nbytes + nbytes > self.limit:
                if not wait:
                    return False
                self._changed.wait()
            self.nbytes += nbytes
            self.count += 1
            return True

    def give_back(self, nbytes: int) -> None:
        with self._changed:
            self.nbytes -= nbytes
            self.count -= 1
            self._changed.notify_all()


_FLIGHT = _Flight(FLIGHT_BYTES, _FLIGHT_BLOCKS)


def _block(shape: Sequence[int], chunk: Sequence[int], limit: int) -> list[int]:
    """The shape of blocks of whole chunks of about ``limit`` elements: long on the last axes.

    Example:
        >>> _block((100, 100), (10, 10), 3000), _block((100, 100), (50, 100), 10)
        ([30, 100], [50, 100])
    """
    block = list(chunk)
    for axis in reversed(range(len(shape))):
        others = math.prod(block) // max(block[axis], 1)
        fitting = max(1, limit // max(others * chunk[axis], 1))
        block[axis] = min(
            fitting * chunk[axis], max(-(-shape[axis] // chunk[axis]), 1) * chunk[axis]
        )
        if block[axis] < shape[axis]:
            break
    return block
