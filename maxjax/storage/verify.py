"""Verification that all of a checkpoint can be read and matches its checksums."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..dtype import DType
from ..errors import CheckpointCorruptError
from .boxes import count, split, whole
from .entry import Strided, TensorEntry
from .files import OpenFile, aligned_empty
from .parts import Part, read_parts
from .table import TensorTable
from .zip.deflate import Deflated

# Bytes of a tensor read at a time.
_BYTES = 16 << 20
# The name of a large file in the Hugging Face cache: its SHA-256.
_BLOB = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Verified:
    """Counts of what was verified.

    Attributes:
        tensors: number of tensors.
        nbytes: bytes of the tensors in the files.
        files: number of files.
        checksums: number of checksums compared, of bytes or tensors.
        digests: number of tensors whose checksum comes from a ``maxjax_digests.json``.
        blobs: number of files compared with the SHA-256 that is their name in a cache.
    """

    tensors: int
    nbytes: int
    files: int
    checksums: int
    digests: int = 0
    blobs: int = 0


def verify(table: TensorTable) -> Verified:
    """Reads every tensor of an open checkpoint once, and compares all available checksums.

    These are the checksums of archives, those of ``maxjax_digests.json``, and the SHA-256 names of
    files in a Hugging Face cache, for which those files are read a second time. The structure was
    already checked on opening. Needs 16 MiB of memory, or the size of the largest tensor in a
    compressed archive.

    Raises:
        CheckpointCorruptError: a checksum does not match the bytes.
        CheckpointError: a file cannot be read, or a value is invalid for its dtype.

    Example:
        >>> import os, tempfile
        >>> import numpy as np
        >>> from maxjax.storage import open_checkpoint
        >>> path = os.path.join(tempfile.mkdtemp(), "w.npz")
        >>> np.savez(path, a=np.ones(3), b=np.zeros((2, 2)))
        >>> with open_checkpoint(path) as table:
        ...     verify(table)
        Verified(tensors=2, nbytes=56, files=1, checksums=2, digests=0, blobs=0)
    """
    entries = list(table.entries.values())
    table.check(entries)
    for entry in entries:
        # Tensors with a checksum were read already, and for most dtypes any value is valid.
        is_any = isinstance(entry.coding, Strided | None) and entry.dtype is not DType.bool
        if entry.checksum is None or not (entry.checksum.of_values or is_any):
            _read(table, entry)
    sums = {(entry.file, entry.checksum) for entry in entries if entry.checksum is not None}
    packed = sum(1 for entry in entries if isinstance(entry.coding, Deflated))
    nbytes = sum(entry.nbytes for entry in entries)
    digests = sum(1 for entry in entries if entry.checksum and entry.checksum.source)
    blobs = _compare_blobs(table.files)
    for file in table.files:
        file.check_unchanged()
    return Verified(len(entries), nbytes, len(table.files), len(sums) + packed, digests, blobs)


def second_reading(table: TensorTable) -> list[str]:
    """Compares the headers of safetensors files with what the library ``safetensors`` reads.

    The readers here are independent implementations of the format; most other programs use that
    library.

    Returns:
        One line for each file that the library refuses, or in which it lacks a tensor or finds another shape.

    Example:
        >>> import os, tempfile
        >>> from maxjax.storage import open_checkpoint
        >>> from safetensors.numpy import save_file
        >>> import numpy as np
        >>> path = os.path.join(tempfile.mkdtemp(), "w.safetensors")
        >>> save_file({"a": np.ones(3)}, path)
        >>> with open_checkpoint(path) as table:
        ...     second_reading(table)
        []
    """
    from safetensors import SafetensorError, safe_open

    found = []
    for number, file in enumerate(table.files):
        if not file.path.endswith(".safetensors"):
            continue
        ours = {e.name: tuple(e.shape) for e in table.entries.values() if e.file == number}
        try:
            with safe_open(file.path, framework="numpy") as theirs:
                listed = {n: tuple(theirs.get_slice(n).get_shape()) for n in theirs.keys()}
        except SafetensorError as error:
            found.append(f"{file.path}: the safetensors library refuses it ({error})")
            continue
        differing = sorted(n for n in ours if n in listed and ours[n] != listed[n])
        missing = sorted(ours.keys() - listed.keys())
        if differing or missing:
            name = (missing + differing)[0]
            found.append(
                f"{file.path}: the safetensors library finds {listed.get(name, 'no tensor')} for '{name}'"
            )
    return found


def _compare_blobs(files: Iterable[OpenFile]) -> int:
    """Compares files of a cache with the SHA-256 in their names; returns the number of such files."""
    found = 0
    for file in files:
        folder, name = os.path.split(os.path.realpath(file.path))
        if os.path.basename(folder) != "blobs" or not _BLOB.fullmatch(name):
            continue
        sha256, memory = hashlib.sha256(), aligned_empty(min(_BYTES, file.size))
        for start in range(0, file.size, max(1, len(memory))):
            view = memoryview(memory)[: file.size - start]
            file.pread_into(view, start)
            sha256.update(view)
        if sha256.hexdigest() != name:
            file.check_unchanged()
            raise CheckpointCorruptError(
                "the bytes of the file are not those that were published",
                path=file.path,
                expected=f"SHA-256 {name}",
                found=sha256.hexdigest(),
                hint="The file is corrupt: delete it and download it again.",
            )
        found += 1
    return found


def _read(table: TensorTable, entry: TensorEntry) -> None:
    box, itemsize = whole(entry.shape), entry.dtype.np.itemsize
    if not count(box):
        return
    if entry.coding is not None and not entry.coding.is_divisible:
        table.read(entry.name)
        return
    limit = max(1, _BYTES // itemsize)
    memory = aligned_empty(itemsize * min(limit, count(box)))
    for piece in split(box, limit):
        read_parts(table, [Part(entry.name, piece, memory[: itemsize * count(piece)])])
