"""Floor 1. The end record of a zip archive, and that of zip64 in front of it.

It is looked for from the end of the file, as every reader does; but it has to end the file,
to be the only one that does, and to stand right behind the directory. Below: files. Above:
zip_directory.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

from ..errors import CheckpointError, CheckpointFormatError, CheckpointTruncatedError
from .files import OpenFile

_END = Struct("<4s4H2LH")
_LOCATOR = Struct("<4sLQL")
_END64 = Struct("<4sQ2H2L4Q")
_SIGN, _SIGN64, _SIGN_LOCATOR = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF


def read_end(file: OpenFile) -> tuple[int, int, int]:
    """How many members there are; where the directory begins and where it ends.

    Raises:
        CheckpointTruncatedError: There is no end record, or not all of it.
        CheckpointFormatError: There are two, it contradicts that of zip64 or itself, something
            stands behind it, or the archive is on several disks.
    """
    base = file.size - min(file.size, _END.size + _MAX16)
    tail = file.pread(base, file.size - base)
    at = tail.rfind(_SIGN)
    if at < 0 or len(tail) - at < _END.size:
        raise _cut(file)
    _check_single(file, tail, at, base)
    _, *fields, comment = _END.unpack_from(tail, at)
    end, rest = base + at, len(tail) - at - _END.size - comment
    # In data that was cut the signature may stand by chance.
    if rest < 0 or (rest > 0 and not _has_directory(fields[4] + fields[5], end)):
        raise _cut(file)
    if rest:
        problem = "bytes after the end of the archive belong to nothing"
        raise _bad(file, problem, file.size - rest, "the end of the file", f"{rest} bytes")
    wide = _end64(file, end)
    if wide:
        _check_equal(file, end, fields, wide[1:])
        end, *fields = wide
    return _directory(file, base + at, end, fields)


def _directory(file: OpenFile, at: int, end: int, fields: list[int]) -> tuple[int, int, int]:
    """The result, of the fields of the end record at ``at``; the directory ends at ``end``."""
    disk, first_disk, here, count, nbytes, start = fields
    if disk or first_disk or here != count:
        problem = "end record: a part of an archive on several disks"
        found = f"disk {disk} of a directory on {first_disk}, {here} of {count} members"
        raise _bad(file, problem, at, "disk 0, which has all members", found)
    if start + nbytes != end:
        problem = "end record: the directory does not end where this record begins"
        found = f"{nbytes} bytes from byte {start}"
        raise _bad(file, problem, at, f"an end at byte {end}", found)
    return count, start, end


def _bad(
    file: OpenFile, problem: str, offset: int, expected: Any, found: Any
) -> CheckpointFormatError:
    return CheckpointFormatError(
        problem, path=file.path, offset=offset, expected=expected, found=found
    )


def _cut(file: OpenFile) -> CheckpointError:
    return CheckpointTruncatedError(
        "the file ends before the list of the archive's members",
        path=file.path,
        offset=file.size,
        expected=f"an end record of {_END.size} bytes or more",
        found="the end of the file",
        hint="Incomplete download? Delete the file and fetch it again.",
    )


def _has_directory(directory_end: int, end: int) -> bool:
    """Whether an end record at ``end`` is one: the directory, or zip64 records, are in front."""
    return directory_end in (end, end - _END64.size - _LOCATOR.size) or directory_end >= _MAX32


def _check_single(file: OpenFile, tail: bytes, at: int, base: int) -> None:
    """No other end record, of which the last one is the comment."""
    other = tail.rfind(_SIGN, 0, at + 3)
    while other >= 0:
        if int.from_bytes(tail[other + 20 : other + 22], "little") == len(tail) - other - 22:
            problem = "two end records: which list of members is meant is unclear"
            raise _bad(file, problem, base + other, "one", f"another at byte {base + at}")
        other = tail.rfind(_SIGN, 0, other + 3)


def _end64(file: OpenFile, end: int) -> tuple[int, ...] | None:
    """Where the zip64 end record begins, and its fields; None when there is none."""
    at = end - _LOCATOR.size
    if at < _END64.size:
        return None
    sign, disk, start, disks = _LOCATOR.unpack(file.pread(at, _LOCATOR.size))
    if sign != _SIGN_LOCATOR:
        return None
    if disk or disks > 1 or start > at - _END64.size:
        found = f"disk {disk} of {disks}, byte {start}"
        expected = f"disk 0 of 1, at most byte {at - _END64.size}"
        raise _bad(file, "zip64 locator: no place in this file", at, expected, found)
    sign, length, _, _, *fields = _END64.unpack(file.pread(start, _END64.size))
    if sign != _SIGN64 or start + 12 + length != at:
        problem = "zip64 end record: not what the locator behind it points to"
        found = f"{sign!r} and a length of {length}"
        raise _bad(file, problem, start, f"{_SIGN64!r} and {at - start - 12}", found)
    return (start, *fields)


def _check_equal(file: OpenFile, at: int, narrow: list[int], wide: tuple[int, ...]) -> None:
    """The same in the end record and in that of zip64, where the first has room for it."""
    for number, (here, there) in enumerate(zip(narrow, wide, strict=True)):
        if here != there and here != (_MAX16 if number < 4 else _MAX32):
            problem = "end record: not what the zip64 end record says"
            raise _bad(file, problem, at, there, here)
