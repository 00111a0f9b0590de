"""The directory (list of members) of a zip archive, validated to the last byte.

Only one layout is accepted: members from byte 0 on without gaps, then the central directory, one end
record, and the end of the file. Therefore all readers find the same members in an accepted file.
Format: PKWARE's APPNOTE.TXT 6.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any

from ...errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointTruncatedError,
)
from ..files import CORRUPT, DOWNLOAD_AGAIN, OpenFile
from ..limits import Limits, raising

_END = Struct("<4s4H2LH")
_LOCATOR = Struct("<4sLQL")
_END64 = Struct("<4sQ2H2L4Q")
_SIGN, _SIGN64, _SIGN_LOCATOR = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF


def read_end(file: OpenFile) -> tuple[int, int, int]:
    """The number of members, and the byte offsets where the directory begins and ends.

    Raises:
        CheckpointTruncatedError: the end record is missing or incomplete.
        CheckpointFormatError: there are two end records, the end record contradicts that of zip64 or
            itself, bytes follow it, or the archive is on several disks.
    """
    base = file.size - min(file.size, _END.size + _MAX16)
    tail = file.pread(base, file.size - base)
    at = tail.rfind(_SIGN)
    if at < 0 or len(tail) - at < _END.size:
        raise _truncated(file)
    _check_single(file, tail, at, base)
    _, *fields, comment = _END.unpack_from(tail, at)
    end, rest = base + at, len(tail) - at - _END.size - comment
    # In a truncated file, the signature may occur by chance in the data.
    if rest < 0 or (rest > 0 and not _is_end_record(fields[4] + fields[5], end)):
        raise _truncated(file)
    if rest:
        problem = "unexpected bytes after the end of the archive"
        raise _error(file, problem, file.size - rest, "the end of the file", f"{rest} bytes")
    wide = _end64(file, end)
    if wide:
        _check_equal(file, end, fields, wide[1:])
        end, *fields = wide
    return _directory(file, base + at, end, fields)


def _directory(file: OpenFile, at: int, end: int, fields: list[int]) -> tuple[int, int, int]:
    """The result for the fields of the end record at ``at``; the directory ends at ``end``."""
    disk, first_disk, here, count, nbytes, start = fields
    if disk or first_disk or here != count:
        problem = "end record: archives on several disks are not supported"
        found = f"disk {disk} of a directory on {first_disk}, {here} of {count} members"
        raise _error(file, problem, at, "disk 0, which has all members", found)
    if start + nbytes != end:
        problem = "end record: the directory does not end where this record begins"
        found = f"{nbytes} bytes from byte {start}"
        raise _error(file, problem, at, f"an end at byte {end}", found)
    return count, start, end


def _error(
    file: OpenFile, problem: str, offset: int, expected: Any, found: Any
) -> CheckpointFormatError:
    return CheckpointFormatError(
        problem, path=file.path, offset=offset, expected=expected, found=found
    )


def _truncated(file: OpenFile) -> CheckpointError:
    return CheckpointTruncatedError(
        "the file ends before the list of the archive's members",
        path=file.path,
        offset=file.size,
        expected=f"an end record of {_END.size} bytes or more",
        found="the end of the file",
        hint=DOWNLOAD_AGAIN,
    )


def _is_end_record(directory_end: int, end: int) -> bool:
    """Whether bytes at ``end`` are a real end record: the directory or zip64 records precede it."""
    return directory_end in (end, end - _END64.size - _LOCATOR.size) or directory_end >= _MAX32


def _check_single(file: OpenFile, tail: bytes, at: int, base: int) -> None:
    """Refuses an earlier end record whose comment contains the last one."""
    other = tail.rfind(_SIGN, 0, at + 3)
    while other >= 0:
        if int.from_bytes(tail[other + 20 : other + 22], "little") == len(tail) - other - 22:
            problem = "two end records, so the list of members is ambiguous"
            raise _error(file, problem, base + other, "one", f"another at byte {base + at}")
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
        raise _error(file, "zip64 locator: does not point into this file", at, expected, found)
    sign, length, _, _, *fields = _END64.unpack(file.pread(start, _END64.size))
    if sign != _SIGN64 or start + 12 + length != at:
        problem = "zip64 end record: does not match the locator after it"
        found = f"{sign!r} and a length of {length}"
        raise _error(file, problem, start, f"{_SIGN64!r} and {at - start - 12}", found)
    return (start, *fields)


def _check_equal(file: OpenFile, at: int, narrow: list[int], wide: tuple[int, ...]) -> None:
    """Checks that the two end records agree, unless a value is too large for the first."""
    for number, (here, available) in enumerate(zip(narrow, wide, strict=True)):
        if here != available and here != (_MAX16 if number < 4 else _MAX32):
            problem = "end record: contradicts the zip64 end record"
            raise _error(file, problem, at, available, here)


STORED, DEFLATED = 0, 8
# Bytes that a member may inflate to regardless of its compression ratio.
FREE_BYTES = 1 << 20

_CENTRAL = Struct("<4s6H3L5H2L")
_LOCAL = Struct("<4s5H3L2H")
_FIELD = Struct("<2H")
# Flags: encrypted (three kinds) and patch data are refused; the name is UTF-8; the sizes may follow the
# data in a descriptor.
_REFUSED, _UTF8, _DESCRIPTOR = 0x2061, 0x800, 0x8
_MEANING = _REFUSED | _UTF8
# Extra fields: 64-bit sizes, and a second name.
_ZIP64, _UNICODE_NAME = 0x0001, 0x7075
_MAX_VERSION = 63
# The characters of names that are not UTF-8; decoded at import, which imports the codec.
_CP437 = bytes(range(256)).decode("cp437")


@dataclass(frozen=True, slots=True)
class Member:
    """One member: ``compressed`` bytes at ``offset`` that become ``size`` bytes.

    ``method`` is STORED or DEFLATED; ``crc`` is the CRC-32 of the ``size`` bytes.
    """

    name: str
    method: int
    crc: int
    compressed: int
    size: int
    offset: int


@dataclass(slots=True)
class _Record:
    """The central directory's record of a member; ``at`` is the record's byte offset."""

    at: int
    name: str
    raw_name: bytes
    flags: int
    method: int
    crc: int
    compressed: int
    size: int
    header: int


class Directory:
    """Validates one archive. Errors name member, field and byte offset.

    ``tensor_of`` gives the tensor to name with a member.
    """

    def __init__(self, file: OpenFile, limits: Limits, tensor_of: Callable[[str], str | None]):
        self.file = file
        self.limits = limits
        self.tensor_of = tensor_of

    def members(self) -> dict[str, Member]:
        """Validates the archive; returns the members by name, in the order of the directory."""
        records, start = self._records()
        found: dict[str, Member] = {}
        ordered = sorted(records.values(), key=lambda record: record.header)
        ends = [record.header for record in ordered[1:]] + [start] * bool(ordered)
        first = ordered[0].header if ordered else start
        if first:
            problem = "unexpected bytes before the first member"
            raise self._error(problem, 0, "a member or the directory at byte 0", f"at byte {first}")
        for record, end in zip(ordered, ends, strict=True):
            found[record.name] = self._member(record, end)
        return {name: found[name] for name in records}

    def _error(
        self, problem: str, offset: int, expected: Any, found: Any, record: _Record | None = None
    ) -> CheckpointError:
        return CheckpointFormatError(
            f"member '{record.name}': {problem}" if record else problem,
            path=self.file.path,
            tensor=self.tensor_of(record.name) if record else None,
            offset=min(offset, self.file.size),
            expected=expected,
            found=found,
        )

    # --- the directory ---

    def _records(self) -> tuple[dict[str, _Record], int]:
        count, start, end = read_end(self.file)
        nbytes, where = end - start, {"path": self.file.path, "offset": start}
        if count * _CENTRAL.size > nbytes:
            problem = "end record: more members than the directory has bytes for"
            raise self._error(problem, end, f"at most {nbytes // _CENTRAL.size}", count)
        if count > self.limits.tensors:
            raise self.limits.error("directory: too many members", "tensors", count, **where)
        if nbytes > self.limits.header_bytes:
            raise self.limits.error("directory: too long", "header_bytes", nbytes, **where)
        data, at = self.file.pread(start, nbytes), 0
        records: dict[str, _Record] = {}
        for _ in range(count):
            record, length = self._record(data, at, start)
            if record.name in records:
                raise self._error("occurs twice", record.at, "one of each name", "two", record)
            self._check_size(record)
            records[record.name] = record
            at += length
        if at != nbytes:
            problem = "directory: bytes after its last member"
            raise self._error(problem, start + at, f"{at} bytes", f"{nbytes} bytes")
        return records, start

    def _record(self, data: bytes, at: int, base: int) -> tuple[_Record, int]:
        if len(data) - at < _CENTRAL.size or data[at : at + 4] != b"PK\1\2":
            found = repr(data[at : at + 4])
            raise self._error("directory: not a member", base + at, "b'PK\\x01\\x02'", found)
        (
            _, _, version, flags, method, _, _, crc, compressed, size,
            name_bytes, extra_bytes, comment_bytes, disk, _, _, header,
        ) = _CENTRAL.unpack_from(data, at)  # fmt: skip
        length = _CENTRAL.size + name_bytes + extra_bytes + comment_bytes
        name_end = at + _CENTRAL.size + name_bytes
        raw = data[at + _CENTRAL.size : name_end]
        if length > len(data) - at:
            problem = "directory: the name and comment of a member exceed it"
            raise self._error(problem, base + at, f"at most {len(data) - at} bytes", length)
        name = self._name(raw, flags, base + at)
        record = _Record(base + at, name, raw, flags, method, crc, compressed, size, header)
        extra = self._extra(data[name_end : name_end + extra_bytes], record)
        record.size, record.compressed, record.header, disk = self._zip64_values(
            extra, record, ((size, 8), (compressed, 8), (header, 8), (disk, 4))
        )
        if disk:
            raise self._error("is on another disk", record.at, "disk 0", disk, record)
        self._check_kind(record, version)
        return record, length

    def _name(self, raw: bytes, flags: int, at: int) -> str:
        try:
            utf8 = flags & _UTF8 or raw.isascii()
            name = raw.decode() if utf8 else "".join(_CP437[byte] for byte in raw)
        except UnicodeDecodeError:
            found = repr(raw[:80])
            raise self._error("directory: a name is not UTF-8", at, "UTF-8", found) from None
        if "\0" in name:  # some readers treat it as the end
            raise self._error("directory: a name with a NUL", at, "no NUL", repr(name[:80]))
        return name

    def _extra(self, data: bytes, record: _Record) -> dict[int, bytes]:
        """The extra fields that affect sizes or the name of a member."""
        fields: dict[int, bytes] = {}
        at, end = 4, len(data)
        while at <= end:
            kind, length = _FIELD.unpack_from(data, at - 4)
            if length > end - at or (kind == _ZIP64 and kind in fields):
                problem = "extra field: too long, or occurs twice"
                found = f"{length} bytes of kind {kind:#06x}"
                raise self._error(problem, record.at, f"at most {end - at} bytes", found, record)
            if kind in (_ZIP64, _UNICODE_NAME):
                fields[kind] = data[at : at + length]
            at += length + 4
        second = fields.get(_UNICODE_NAME)
        if second is not None and second[5:] != record.name.encode():
            found = repr(second[5:85])
            raise self._error("has two names", record.at, repr(record.raw_name[:80]), found, record)
        return fields

    def _zip64_values(
        self, extra: dict[int, bytes], record: _Record, fields: tuple[tuple[int, int], ...]
    ) -> list[int]:
        """Fields of 32 (the last: 16) bits; those with all bits set are read from the zip64 field."""
        data, found = extra.get(_ZIP64, b""), []
        for value, width in fields:
            if value == (_MAX32 if width == 8 else _MAX16):
                if len(data) < width:
                    problem = "a size of 64 bits is missing"
                    raise self._error(
                        problem, record.at, f"{width} bytes", f"{len(data)} bytes", record
                    )
                value, data = int.from_bytes(data[:width], "little"), data[width:]
            found.append(value)
        return found

    def _check_kind(self, record: _Record, version: int) -> None:
        where = record.at
        if record.flags & _REFUSED:
            found = f"flags {record.flags:#06x}"
            raise self._error("is encrypted or a patch", where, "plain data", found, record)
        if record.method not in (STORED, DEFLATED):
            expected = f"{STORED} (stored) or {DEFLATED} (deflated)"
            raise self._error("compression method", where, expected, record.method, record)
        if version & 0xFF > _MAX_VERSION:
            expected, version = f"at most {_MAX_VERSION}", version & 0xFF
            raise self._error("needs a newer version of zip", where, expected, version, record)

    def _check_size(self, record: _Record) -> None:
        """Refuses a member with too high a compression ratio, before anything else is trusted."""
        available = min(record.compressed, self.file.size)
        where = {"tensor": self.tensor_of(record.name), "offset": record.at}
        problem = f"member '{record.name}': size is over the limit"
        check_ratio(problem, record.size, available, self.limits, path=self.file.path, **where)
        if record.method == STORED and record.compressed != record.size:
            expected = f"{record.size} bytes"
            problem = "is not compressed, but has another size"
            raise self._error(problem, record.at, expected, f"{record.compressed} bytes", record)

    # --- the header in front of each member ---

    def _member(self, record: _Record, end: int) -> Member:
        """Checks the bytes from the member's header to ``end``, where the next record begins."""
        at, length = record.header, _LOCAL.size + len(record.raw_name)
        if at + length > end:
            problem = "overlaps what comes after it"
            raise self._error(problem, at, f"{length} bytes for its header", f"{end - at}", record)
        head = self.file.pread(at, length)
        signature, _, flags, method, _, _, crc, compressed, size, name_bytes, extra = (
            _LOCAL.unpack_from(head)
        )
        offset = at + length + extra
        name = head[_LOCAL.size :] if name_bytes == len(record.raw_name) else None
        if signature != b"PK\3\4" or name != record.raw_name:
            found = repr(signature + head[_LOCAL.size :][:80])
            expected = repr(b"PK\3\4" + record.raw_name[:80])
            raise self._error("its header differs from the directory", at, expected, found, record)
        if offset + record.compressed > end:
            problem = "overlaps what comes after it"
            found = f"{record.compressed} bytes from byte {offset}"
            raise self._error(problem, at, f"an end by byte {end}", found, record)
        if _MAX32 in (size, compressed):
            fields = self._extra(self.file.pread(at + length, extra), record)
            size, compressed = self._zip64_values(fields, record, ((size, 8), (compressed, 8)))
        theirs = (flags & _MEANING, method, crc, compressed, size)
        ours = (record.flags & _MEANING, record.method, record.crc)
        ours = (*ours, record.compressed, record.size)
        blank = (*ours[:2], 0, 0, 0)
        if theirs != ours and not (flags & _DESCRIPTOR and _each_from(theirs, ours, blank)):
            if (*theirs[:2], *theirs[3:]) == (*ours[:2], *ours[3:]):
                raise self._crc_mismatch(record, at, crc)
            names = "(flags, method, CRC-32, compressed, size)"
            problem = f"header and directory differ in {names}"
            raise self._error(problem, at, ours, theirs, record)
        self._check_gap(record, flags, offset + record.compressed, end)
        return Member(record.name, method, record.crc, record.compressed, record.size, offset)

    def _crc_mismatch(self, record: _Record, at: int, crc: int) -> CheckpointError:
        """The error for two different checksums of one member, of which one is corrupt."""
        return CheckpointCorruptError(
            f"member '{record.name}': its checksum in the directory differs from that in its header",
            path=self.file.path,
            tensor=self.tensor_of(record.name),
            offset=at,
            expected=f"CRC-32 {record.crc:08x}",
            found=f"{crc:08x}",
            hint=CORRUPT,
        )

    def _check_gap(self, record: _Record, flags: int, start: int, end: int) -> None:
        """Checks that nothing but a data descriptor lies between a member and the next record."""
        gap = end - start
        if not gap:
            return
        if flags & _DESCRIPTOR and gap in (12, 16, 20, 24):
            data = self.file.pread(start, gap)
            signed = gap in (16, 24) and data[:4] == b"PK\7\x08"
            data = data[4:] if signed else data
            width = (len(data) - 4) // 2
            values = [data[:4], data[4 : 4 + width], data[4 + width :]]
            found = tuple(int.from_bytes(value, "little") for value in values)
            sizes = (record.compressed, record.size)
            if (signed or gap in (12, 20)) and found[1:] == sizes:
                if found[0] != record.crc:
                    raise self._crc_mismatch(record, start, found[0])
                return
        problem = "unexpected bytes after it"
        expected = f"the next member at byte {start}"
        raise self._error(problem, start, expected, f"at byte {end}", record)


def _each_from(values: tuple[int, ...], *choices: tuple[int, ...]) -> bool:
    return all(value in allowed for value, *allowed in zip(values, *choices, strict=True))


# --- limits -----------------------------------------------------------------------------------


def check_ratio(problem: str, size: int, available: int, limits: Limits, **where) -> None:
    """Refuses ``available`` bytes that inflate to ``size``, if that is more than the limits allow."""
    ratio = limits.member_ratio
    if size > FREE_BYTES + ratio * available:
        raise CheckpointLimitError(
            problem,
            expected=f"at most {ratio} times its {available} bytes, and {FREE_BYTES}",
            found=f"{size} bytes",
            hint=raising("member_ratio"),
            **where,
        )
