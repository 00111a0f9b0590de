"""Reader of orbax checkpoints, which opens a directory of arrays as a table of tensors.

Opening compares the tree (``_METADATA``), the description of every array and the list of its chunks
with one another; tensorstore reads and decompresses the chunks. Each chunk is compressed separately and
always decoded completely, so a chunk that several parts need is read once. The bytes being read at a time are
bounded for the process, because tensorstore would read all chunks at once. Neither orbax nor jax is needed.
Format: orbax-checkpoint 0.4 to 0.12, with zarr 2 or zarr 3, with or without OCDBT.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np

from ...dtype import DType
from ...errors import (
    CheckpointChangedError,
    CheckpointFormatError,
    CheckpointIncompleteError,
    CheckpointMissingError,
    CheckpointUnsafeError,
)
from ..boxes import Box, Wanted, copy_shared, count, enclosing, extents, overlap, within
from ..digests import DIRECTORY, NAME, read_digests
from ..entry import Checksum, Coding, TensorEntry
from ..files import OpenFile, closed_on_error, open_regular
from ..limits import Limits, in_force
from ..table import TensorTable, Verify, check_verify
from .maxjax_metadata import read_maxjax_metadata
from .metadata import CHECKPOINT, TREE, Leaf, Tree, read_checkpoint_metadata, read_tree
from .paths import TreeLocation, locate, other_step
from .paths import is_orbax as is_orbax
from .paths import orbax_items as orbax_items
from .paths import steps as steps
from .store import MANIFEST, Store, missing, prefix
from .zarr import DRIVERS, ArrayDescription, check_chunks, check_write_shape, read_description

# The maximum bytes that zstd can expand one byte to.
_MAX_RATIO = 40_000
_FREE_BYTES = 1 << 20


def open_orbax(
    path: str | os.PathLike[str],
    *,
    item: str | None = None,
    limits: Limits | None = None,
    verify: Verify = "auto",
) -> TensorTable:
    """Opens one tree of an orbax checkpoint: names, dtypes and shapes of its arrays, no data.

    ``path`` is a checkpoint (from ``ocp.save``, a Checkpointer, or one step of a CheckpointManager),
    a directory of steps, whose newest complete step is opened, or the directory of one tree. ``item``
    names one of several trees; the default is the only one, or the one named "model", "default",
    "pytree", "state" or "params". A tensor's name is its keys joined by dots. Python numbers are tensors
    without axes; leaves without data appear only in :func:`orbax_tree`. The table's ``metadata`` is
    orbax's custom metadata, as text. ``verify`` is that of :func:`maxjax.storage.open_checkpoint`.

    Raises:
        CheckpointMissingError: the checkpoint, the tree, a file or a chunk is missing.
        CheckpointIncompleteError: the save was never finished; names the last finished step.
        CheckpointFormatError: the format is another, the tree ambiguous, or files are inconsistent.
        CheckpointCorruptError: tensorstore's checksums do not match.
        CheckpointUnsafeError: a name leads out of the directory.
        CheckpointLimitError: the checkpoint exceeds ``limits``.
        CheckpointAccessError: a file may not be read.
        UserInputError: ``verify`` is not "auto", True or False.

    Example:
        >>> open_orbax("no/such/checkpoint")
        Traceback (most recent call last):
        maxjax.errors.CheckpointMissingError: no/such/checkpoint: no such file. Check the path.
    """
    check_verify(verify)
    limits = in_force(limits)
    location, tree, metadata = _open_tree(os.fsdecode(path), item, limits)
    extra = read_maxjax_metadata(metadata, location.checkpoint, location.item, limits)
    store = Store(location.directory, limits)
    file = open_regular(os.path.join(location.directory, TREE))
    with closed_on_error([file]):
        arrays = _describe(store, tree, limits)
        extra.check_names({leaf.name for leaf, _ in arrays})
        digests = None if verify is False else read_digests(location.checkpoint, limits=limits)
        sums = digests.of(DIRECTORY, 0) if digests else {}
        entries: dict[str, TensorEntry] = {}
        offset = 0
        for leaf, found in arrays:
            coding = Chunks(store, found.driver, found.dtype, found.read_chunk, tree.is_dense)
            entry = TensorEntry(
                leaf.name, found.dtype, found.shape, 0, offset, found.nbytes, coding
            )
            entry = extra.applied(entry)
            entries[leaf.name] = entry._replace(checksum=_checksum(location, entry, sums))
            offset += entry.nbytes
        entries.update((entry.name, entry) for entry in extra.empty)
        _check_total(store, offset)
    table = TensorTable("orbax", [file], entries, metadata)
    table.verify = verify
    table.directory = location.checkpoint
    return table


def check_written(directory: str, items: Iterable[str]) -> None:
    """Checks that the files of a step that this process has just written are all there, without reading it all.

    Every array has its description and all its chunks, and the end of each is read.

    Args:
        directory: directory of the step, which may still have a temporary name.
        items: names of its trees.

    Raises:
        CheckpointError: a file is missing or cut off.
    """
    limits = Limits(**{field.name: 2**63 - 1 for field in fields(Limits)})  # the files are ours
    open_regular(os.path.join(directory, CHECKPOINT)).close()
    read_checkpoint_metadata(directory, limits)
    for item in items:
        folder = os.path.join(directory, item)
        tree = read_tree(folder, limits)
        _describe(Store(folder, limits, is_own=True), tree, limits)


def orbax_tree(
    path: str | os.PathLike[str],
    *,
    item: str | None = None,
    limits: Limits | None = None,
) -> Tree:
    """The leaves of a tree with their key paths, including empty and text leaves, to rebuild a pytree.

    ``path``, ``item`` and the errors are those of :func:`open_orbax`.
    """
    limits = in_force(limits)
    return _open_tree(os.fsdecode(path), item, limits)[1]


def _open_tree(
    path: str, item: str | None, limits: Limits
) -> tuple[TreeLocation, Tree, dict[str, str]]:
    location = locate(path, item)
    try:
        metadata = read_checkpoint_metadata(location.checkpoint, limits)
    except CheckpointIncompleteError as error:
        raise CheckpointIncompleteError(
            error.problem,
            path=error.path,
            expected=error.expected,
            found=error.found,
            hint=other_step(location.checkpoint),
        ) from None
    tree = read_tree(location.directory, limits)
    return location, tree, {**metadata, **tree.metadata}


def _describe(store: Store, tree: Tree, limits: Limits) -> list[tuple[Leaf, ArrayDescription]]:
    """The arrays of a tree with their descriptions, each checked against its chunks."""
    leaves = [leaf for leaf in tree.leaves if leaf.has_tensor]
    if not store.is_ocdbt:
        for leaf in leaves:
            _check_inside(store, leaf)
    chunks = _by_array(store.sizes(), {leaf.name for leaf in leaves})
    requests, drivers = [], []
    for leaf in leaves:
        present = [kind for kind, end in DRIVERS.items() if end in chunks[leaf.name]]
        if not present and tree.is_ocdbt and not store.is_ocdbt:
            manifest = os.path.join(store.directory, MANIFEST)
            raise missing(path=manifest, tensor=leaf.name)
        if len(present) != 1:
            raise CheckpointMissingError(
                "the description of the array is missing",
                path=store.directory,
                tensor=leaf.name,
                expected=f"one of {', '.join(DRIVERS.values())}",
                found=" and ".join(present) or "neither",
                hint="Download the checkpoint again, or open an earlier step.",
            )
        drivers.append(present[0])
        end = DRIVERS[present[0]]
        nbytes, problem = chunks[leaf.name][end], "the description of the array is too long"
        limits.check("config_bytes", nbytes, problem, path=store.directory, tensor=leaf.name)
        requests.append((leaf.name, prefix(leaf.name) + end))
    found = []
    known: dict[tuple[str, bytes | str], ArrayDescription] = {}  # many arrays have the same
    described = store.descriptions(requests)
    for leaf, driver, (path, source) in zip(leaves, drivers, described, strict=True):
        array = known.get((driver, source))
        if array is None:
            array = read_description(driver, path, leaf.name, source, limits)
            known[driver, source] = array
        if leaf.write_shape is not None:
            check_write_shape(array, leaf.write_shape, path, leaf.name)
        check_chunks(array, chunks[leaf.name], path, leaf.name, tree.is_dense)
        found.append((leaf, array))
    return found


def _by_array(sizes: Mapping[str, int], names: set[str]) -> dict[str, dict[str, int]]:
    """Name of an array → its keys, without the prefix of the name, and the bytes of their values."""
    found: dict[str, dict[str, int]] = {name: {} for name in names}
    for key, nbytes in sizes.items():
        for name in names & {"", "/"}:
            found[name][key] = nbytes
        # The name itself may contain slashes, and end with one.
        at = key.find("/")
        while at >= 0:
            for name in (key[:at], key[: at + 1]):
                if name in names:
                    found[name][key[at + 1 :]] = nbytes
            at = key.find("/", at + 1)
    return found


def _check_inside(store: Store, leaf: Leaf) -> None:
    """Refuses a name that leads out of the directory, since each array is a directory of its name."""
    parts = leaf.name.split("/")
    if leaf.name and any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise CheckpointUnsafeError(
            "the tensor's name leads out of the checkpoint's directory",
            path=os.path.join(store.directory, TREE),
            tensor=leaf.name,
            expected="the name of a directory",
            found=repr(leaf.name),
        )


def _check_total(store: Store, nbytes: int) -> None:
    limit = _MAX_RATIO * store.nbytes + _FREE_BYTES
    if nbytes > limit:
        raise CheckpointFormatError(
            "the arrays are larger than anything their files could hold",
            path=store.directory,
            expected=f"at most {limit} bytes of {store.nbytes} compressed ones",
            found=f"{nbytes} bytes",
        )


def _checksum(
    location: TreeLocation, entry: TensorEntry, sums: dict[str, tuple[int, ...]]
) -> Checksum | None:
    name = f"{location.item}/{entry.name}" if location.item else entry.name
    crcs = sums.get(name)
    if not crcs:
        return None
    source = os.path.join(location.checkpoint, NAME)
    return Checksum(name, 0, entry.nbytes, crcs[0], crcs[1:], source, of_values=True)


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
