"""Floor 1. verify: whether all of a checkpoint can be read, and is what was written.

Below: index. Above: the command line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .coding import Strided
from .entry import TensorEntry, count, split, whole
from .files import aligned_empty
from .regions import Part, read_parts
from .table import TensorTable

# So much of a tensor is read at a time.
_BYTES = 16 << 20


@dataclass(frozen=True)
class Verified:
    """What was looked at.

    Attributes:
        tensors: How many tensors there are.
        nbytes: The bytes they take in the files.
        files: How many files there are.
        checksums: How many checksums were compared; of formats that have none it is 0.
    """

    tensors: int
    nbytes: int
    files: int
    checksums: int


def verify(table: TensorTable) -> Verified:
    """Reads every tensor of an open checkpoint once, and compares the checksums there are.

    Opening has checked the structure already. Takes 16 MiB of memory, or that of the largest
    tensor in a compressed archive.

    Raises:
        CheckpointCorruptError: A checksum is another than that of the bytes.
        CheckpointError: Something cannot be read, or is not what its type says.

    Example:
        >>> import os, tempfile
        >>> import numpy as np
        >>> from maxjax.storage import open_checkpoint
        >>> path = os.path.join(tempfile.mkdtemp(), "w.npz")
        >>> np.savez(path, a=np.ones(3), b=np.zeros((2, 2)))
        >>> with open_checkpoint(path) as table:
        ...     verify(table)
        Verified(tensors=2, nbytes=56, files=1, checksums=2)
    """
    entries = list(table.entries.values())
    table.check(entries)
    for entry in entries:
        # What a checksum is of has been read, and its values can be anything.
        if entry.checksum is None or not isinstance(entry.coding, Strided | None):
            _read(table, entry)
    sums = {(entry.file, entry.checksum) for entry in entries if entry.checksum is not None}
    packed = sum(
        1 for entry in entries if entry.coding is not None and not entry.coding.is_divisible
    )
    nbytes = sum(entry.nbytes for entry in entries)
    for file in table.files:
        file.check_unchanged()
    return Verified(len(entries), nbytes, len(table.files), len(sums) + packed)


def _read(table: TensorTable, entry: TensorEntry) -> None:
    box, itemsize = whole(entry.shape), entry.dtype.np.itemsize
    if not math.prod(entry.shape):
        return
    if entry.coding is not None and not entry.coding.is_divisible:
        table.read(entry.name)
        return
    memory = aligned_empty(0)
    for piece in split(box, max(1, _BYTES // itemsize)):
        nbytes = itemsize * count(piece)
        if nbytes > memory.size:
            memory = aligned_empty(nbytes)
        read_parts(table, [Part(entry.name, piece, memory[:nbytes])])
