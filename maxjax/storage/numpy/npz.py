"""Reader of NumPy's .npz format: a zip archive of .npy arrays, stored or deflated.

Opening reads every header and compares it with its member's size, but reads no data. The CRC-32 of a
member is compared before or while its array is read. Format: numpy.savez and numpy.savez_compressed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ...errors import CheckpointError, CheckpointFormatError
from ..entry import TensorEntry, UnknownType
from ..files import OpenFile
from ..limits import Limits, check_name
from ..table import TensorTable, open_single
from ..zip.archive import STORED, Archive, Member, read_directory
from ..zip.directory import check_ratio
from .npy import ArrayHeader, ArrayLocation, check_size, read_header

WHAT = "a NumPy .npz archive"
_END = ".npy"


def open_npz(
    path: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> TensorTable:
    """Opens one .npz file: the list of its members and the header of each, none of the data.

    The tensors are named as their members without ``.npy``, in the order of the archive.

    Raises:
        CheckpointTruncatedError: the archive, or an array in it, is shorter than it declares.
        CheckpointFormatError: another format, an ambiguous archive, or a member that is not an array
            of numbers.
        CheckpointUnsafeError: the file holds Python objects or code, or is a pickle.
        CheckpointLimitError: the archive exceeds ``limits``.
        CheckpointCorruptError: compressed bytes, or the header of an empty array, are corrupt.
        CheckpointMissingError, CheckpointAccessError: as for ``open_regular``.

    Example:
        >>> import os, tempfile, numpy as np
        >>> path = os.path.join(tempfile.mkdtemp(), "m.npz")
        >>> np.savez(path, w=np.arange(3), b=np.ones((2, 2)))
        >>> with open_npz(path) as table:
        ...     print(list(table.entries), table.read("w"))
        ['w', 'b'] [0 1 2]
    """
    return open_single("npz", path, limits, _read)


def _read(file: OpenFile, number: int, limits: Limits) -> tuple[dict[str, TensorEntry], dict]:
    archive = read_directory(file, limits, what=WHAT, tensor_of=_tensor_of, has_all_crcs=True)
    members = archive.members.values()
    for member in members:
        _check_name(archive, member, limits)
    return {_tensor_of(member.name): _entry(archive, member, limits) for member in members}, {}


def _tensor_of(member: str) -> str:
    return member.removesuffix(_END)


def _check_name(archive: Archive, member: Member, limits: Limits) -> None:
    name = _tensor_of(member.name)
    where = {"path": archive.file.path, "tensor": name, "offset": member.offset}
    check_name(name, limits, **where)
    if not member.name.endswith(_END):
        raise _other_format(member, where)
    # numpy.load also accepts a member's full name, which takes precedence.
    if name in archive.members:
        raise CheckpointFormatError(
            f"members '{name}' and '{member.name}': the name '{name}' is ambiguous",
            expected="one",
            found="two",
            hint="Rename one of them.",
            **where,
        )


def _other_format(member: Member, where: dict) -> CheckpointError:
    torch = member.name.endswith((".pkl", ".format_version", ".storage_alignment"))
    hint = "A PyTorch checkpoint? Give it a name that ends in .pt." if torch else None
    return CheckpointFormatError(
        f"member '{member.name}': not an array",
        expected="a member named *.npy",
        found=repr(member.name),
        hint=hint or "Leave other files out of the archive.",
        **where,
    )


def _entry(archive: Archive, member: Member, limits: Limits) -> TensorEntry:
    path, name = archive.file.path, _tensor_of(member.name)
    location = ArrayLocation(path, name, member.offset, member.method == STORED)
    head: Callable[[int], bytes] = partial(archive.head, member)
    header = read_header(head, member.size, location, limits)
    if isinstance(header.dtype, UnknownType):
        nbytes = member.compressed
        return TensorEntry(name, header.dtype, header.shape, 0, member.offset, nbytes)
    problem = f"shape: {list(header.shape)} is too large for the size of the member"
    at = location.at(header.skip)
    check_ratio(problem, header.nbytes, member.compressed, limits, **at)
    check_size(header, member.size, location)
    if not header.nbytes:
        # No data of it will ever be read, so its checksum is compared now.
        archive.read(member, member.size)
    return _located(archive, member, header, name)


def _located(archive: Archive, member: Member, header: ArrayHeader, name: str) -> TensorEntry:
    offset = member.offset + header.skip
    entry = TensorEntry(name, header.dtype, header.shape, 0, offset, header.nbytes)
    if not header.nbytes:
        return entry._replace(offset=member.offset)
    if member.method == STORED:
        checksum = archive.checksum(member)
        return entry._replace(coding=header.coding, checksum=checksum)
    coding = replace(
        archive.deflated(member), skip=header.skip, order=header.order, swap=header.swap
    )
    return entry._replace(offset=member.offset, nbytes=member.compressed, coding=coding)
