"""The header of one GGUF file: its version and byte order, its metadata, its table of tensors.

Source: docs/gguf.md of the ggml repository.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from ...errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointTruncatedError,
    integer_text,
)
from ..files import DOWNLOAD_AGAIN, OpenFile
from ..limits import Limits, in_force
from ..signatures import SNIFF_BYTES, foreign, safetensors_instead
from .types import GGML_TYPES, REMOVED, GgmlType
from .values import MAX_LENGTH, UINT32, Cursor, number, own_limit

MAX_DIMS = 4
# The format says 64, but files of image models use up to 128, including C's NUL.
MAX_NAME = 127
# Byte order → for each number of dimensions the end of a row: dimensions, type, offset.
_ROWS = {
    order: [struct.Struct(f"{order}{n}QIQ") for n in range(MAX_DIMS + 1)] for order in ("<", ">")
}
CONVERT_AGAIN = "Convert the model again with a current llama.cpp."


# Not frozen, which halves the time to create a million of them.
@dataclass(slots=True)
class Info:
    """One row of the table of tensors.

    ``position`` is the row's byte offset in the file, ``dims`` has the fastest dimension first,
    ``offset`` counts from the start of the data, and ``nbytes`` excludes padding.
    """

    name: str
    position: int
    dims: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int

    @property
    def offset_position(self) -> int:
        """The byte offset in the file of the field ``offset``."""
        return self.position + 8 + len(self.name.encode()) + 4 + 8 * len(self.dims) + 4


def read_table(cursor: Cursor, count: int, infos: dict[str, Info]) -> None:
    """Reads ``count`` rows into ``infos``; after an error it holds the rows before the bad one."""
    for row in range(1, count + 1):
        info = _read_info(cursor, row)
        if info.name in infos:
            expected = f"once, at byte {infos[info.name].position}"
            raise error(cursor, info, "name: occurs twice", expected, "again", info.position)
        infos[info.name] = info


def _read_info(cursor: Cursor, number: int) -> Info:
    position = cursor.position
    length = cursor.u64("name")
    if not 0 < length <= MAX_NAME:
        raise _bad_name(cursor, number, length, position)
    at = cursor.take(length, "name")
    name = cursor.name(cursor.buffer[at : at + length], "tensor", number, position)
    count = cursor.u32("dims", name)
    if count > MAX_DIMS:
        raise _too_many_dims(cursor, name, count)
    at = cursor.take(8 * count + 12, "dims, type and offset", name)
    *dims, kind, offset = _ROWS[cursor.order][count].unpack_from(cursor.buffer, at)
    end = cursor.position
    kind = GGML_TYPES.get(kind) or _unknown_type(cursor, name, kind, end - 12)
    elements = _elements(cursor, name, dims, kind, end - 12 - 8 * count)
    nbytes = elements // kind.elements * kind.nbytes
    return Info(name, position, tuple(dims), kind, offset, nbytes)


def _bad_name(cursor: Cursor, number: int, length: int, position: int) -> CheckpointError:
    cls = CheckpointFormatError if length else CheckpointTruncatedError
    problem = f"tensor {number}: name: {'too long' if length else 'is empty'}"
    expected, found = f"1 to {MAX_NAME} bytes", f"{length} bytes"
    return cursor.error(problem, expected, found, offset=position, cls=cls)


def _too_many_dims(cursor: Cursor, name: str, count: int) -> CheckpointError:
    problem, at = "dims: too many", cursor.position - 4
    if count < 1 << 31 and 8 * count > cursor.remaining:
        where = {"path": cursor.file.path, "offset": at, "tensor": name}
        problem = f"{problem}, and more than the file can hold"
        return own_limit(problem, f"at most {MAX_DIMS}", count, "the format's own", **where)
    return cursor.error(problem, f"at most {MAX_DIMS}", count, offset=at, tensor=name)


def _unknown_type(cursor: Cursor, name: str, number: int, offset: int) -> GgmlType:
    removed = REMOVED.get(number)
    problem = f"type: {removed} was removed from ggml" if removed else "type: unknown"
    hint = CONVERT_AGAIN if removed else "Written by a newer or a modified llama.cpp?"
    expected, where = "a tensor type of ggml", {"offset": offset, "tensor": name}
    raise cursor.error(problem, expected, number, hint=hint, **where)


def _elements(cursor: Cursor, name: str, dims: list[int], kind: GgmlType, position: int) -> int:
    """The number of values in a tensor; refuses sizes too large even without dimensions of size 0."""
    elements = prod(dims)
    nonzero = elements or prod(dim or 1 for dim in dims)
    # For quantised types this is the size of the values when they are read as float32.
    size = nonzero * (kind.nbytes if kind.dtype else 4)
    row = dims[0] if dims else 1
    if row % kind.elements or size >= MAX_LENGTH or size > cursor.limits.tensor_bytes:
        raise _bad_dims(cursor, kind, dims, size, {"offset": position, "tensor": name})
    return elements


def _bad_dims(
    cursor: Cursor, kind: GgmlType, dims: list[int], size: int, where: dict[str, Any]
) -> CheckpointError:
    if dims and max(dims) >= MAX_LENGTH:
        return cursor.error("dims: not a size", f"< {MAX_LENGTH}", max(dims), **where)
    row = dims[0] if dims else 1
    if row % kind.elements:
        problem = f"dims: a row of {kind.name} must consist of complete blocks"
        return cursor.error(problem, f"a multiple of {kind.elements}", row, **where)
    problem = "dims: too large"
    if size >= MAX_LENGTH:
        return cursor.error(problem, f"less than {MAX_LENGTH} bytes", integer_text(size), **where)
    return cursor.limits.error(problem, "tensor_bytes", size, path=cursor.file.path, **where)


def check_layout(cursor: Cursor, infos: Iterable[Info], data_start: int, alignment: int) -> int:
    """Checks that the data follows the order of the table, each tensor at the next aligned offset.

    llama.cpp loads nothing else, and the check finds most corruption of the table. Returns the end of
    the last tensor.
    """
    position = end = data_start
    for info in infos:
        begin = data_start + info.offset
        end = begin + info.nbytes
        # An empty tensor needs no bytes in the file.
        if begin != position or (end > cursor.file.size and info.nbytes):
            raise _bad_offset(cursor, info, data_start, position, alignment)
        position = padded(end, alignment)
    return end


def _bad_offset(
    cursor: Cursor, info: Info, data_start: int, position: int, alignment: int
) -> CheckpointError:
    offset, size, at = info.offset, cursor.file.size, info.offset_position
    begin = data_start + offset
    end = begin + info.nbytes
    if offset % alignment or offset >= MAX_LENGTH:
        problem = "offset: not aligned" if offset % alignment else "offset: too large"
        return error(cursor, info, problem, f"a multiple of {alignment}", offset, at)
    if end > size and info.nbytes:
        return cursor.error(
            f"the data ends at byte {end} but the file has {size} bytes ({end - size} missing)",
            f"{info.nbytes} bytes",
            f"{max(size - begin, 0)} bytes",
            offset=min(begin, size),
            tensor=info.name,
            hint=DOWNLOAD_AGAIN,
            cls=CheckpointTruncatedError,
        )
    hole = "bytes before it belong to no tensor"
    problem = f"offset: {hole if begin > position else 'lies in another tensor'}"
    return error(cursor, info, problem, position - data_start, offset, at)


def error(
    cursor: Cursor, info: Info, problem: str, expected: Any, found: Any, offset: int
) -> CheckpointError:
    """An error about a tensor, at a byte offset."""
    return cursor.error(problem, expected, found, offset=offset, tensor=info.name)


def padded(size: int, alignment: int) -> int:
    """``size`` rounded up to a multiple of ``alignment``.

    Example:
        >>> padded(33, 32)
        64
    """
    return -(-size // alignment) * alignment


WHAT = "a GGUF file"
MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
# Bytes of magic, version, and the two counts.
_START_BYTES = 24
# The minimum bytes of a key (one letter, a 1-byte value) and of a table row (no dimensions).
_MIN_KEY_BYTES, _MIN_ROW_BYTES = 14, 25
# For more tensors or keys than this a wrong count is not analysed.
_MAX_EXPLAINED = 20_000
_TRAILING_BYTES = 1 << 20


def read_header(file: OpenFile, limits: Limits) -> GGUFHeader:
    """Reads and validates the header of an open file.

    Raises:
        CheckpointError: as for ``open_gguf``.
    """
    header = GGUFHeader(file, limits, _byte_order(file))
    try:
        header.read()
    except CheckpointError as error:
        if wrong := header.wrong_count():
            raise wrong from error
        raise
    return header


def typed_metadata(file: OpenFile) -> dict[str, Any]:
    """The metadata of an open file, with NumPy scalars so that each number keeps its type.

    Raises:
        CheckpointError: as for ``open_gguf``.
    """
    header = read_header(file, in_force())
    return {key: number(header.kinds[key], value) for key, value in header.metadata.items()}


def _byte_order(file: OpenFile) -> str:
    """ "<" or ">", in whichever order the version is plausible; refuses other files."""
    start = file.pread(0, min(file.size, SNIFF_BYTES))
    if start[:4] != MAGIC[: len(start)]:
        raise _other_kind(file, start)
    if len(start) < _START_BYTES:
        raise CheckpointTruncatedError(
            "the file ends inside the header" if start else "the file is empty",
            path=file.path,
            offset=len(start),
            expected=f"{_START_BYTES} bytes",
            found=f"{len(start)} bytes",
            hint=DOWNLOAD_AGAIN,
        )
    (little,), (big,) = struct.unpack_from("<I", start, 4), struct.unpack_from(">I", start, 4)
    if little in VERSIONS or big in VERSIONS:
        return "<" if little in VERSIONS else ">"
    version = 1 if big == 1 else little
    old = version <= 1
    raise CheckpointFormatError(
        "version: not a supported version of GGUF",
        path=file.path,
        offset=4,
        expected="2 or 3",
        found=version,
        hint=CONVERT_AGAIN if old else "The file is newer than this reader, or corrupt.",
    )


# First bytes of llama.cpp's files from before August 2023.
_OLD = {b"lmgg": "ggml", b"fmgg": "ggmf", b"tjgg": "ggjt", b"algg": "ggla", b"nsgg": "ggsn"}


def _other_kind(file: OpenFile, start: bytes) -> CheckpointError:
    """The error for a file that does not begin like GGUF."""
    magic, where = start[:4], {"path": file.path, "offset": 0, "expected": WHAT}
    old = _OLD.get(magic) or next((v for v in _OLD.values() if v.encode() == magic), None)
    if old:
        found = f"a pre-GGUF file ({old})"
        hint = CONVERT_AGAIN
        return CheckpointFormatError(f"the file is {found}", found=found, hint=hint, **where)
    if error := safetensors_instead(file.path, start, file.size, WHAT):
        return error
    if magic.upper() != MAGIC[::-1] and (error := foreign(file.path, start, WHAT)):
        return error
    where["expected"] = repr(MAGIC)
    return CheckpointFormatError(f"magic: not {WHAT}", found=repr(magic), **where)


class GGUFHeader:
    """The header of one file. ``order`` is its byte order, "<" or ">".

    Attributes set by ``read``: ``metadata`` (key → value), ``kinds`` (key → the number of its
    type), ``positions`` (key → byte offset), ``infos`` (name → row, in the order of the file), ``data_start``
    (byte offset).
    """

    def __init__(self, file: OpenFile, limits: Limits, order: str):
        self.file = file
        self.limits = limits
        self.order = order
        self.cursor = Cursor(file, limits, order, 8)
        self.metadata: dict[str, Any] = {}
        self.kinds: dict[str, int] = {}
        self.positions: dict[str, int] = {}
        self.infos: dict[str, Info] = {}
        self.alignment = _DEFAULT_ALIGNMENT
        self.tensors = self.keys = self.key_position = self.table_start = self.data_start = 0

    def read(self) -> None:
        """Reads and validates the whole header."""
        cursor = self.cursor
        self.tensors, self.keys = cursor.u64("tensor count"), cursor.u64("key count")
        self._check_count("tensor count", 8, self.tensors, "tensors", _MIN_ROW_BYTES)
        self._check_count("key count", 16, self.keys, "metadata_keys", _MIN_KEY_BYTES)
        for index in range(1, self.keys + 1):
            self._read_key(index)
        self.table_start = cursor.position
        read_table(cursor, self.tensors, self.infos)
        self.data_start = padded(cursor.position, self.alignment)
        end = check_layout(cursor, self.infos.values(), self.data_start, self.alignment)
        self._check_rest(end)

    def _check_count(self, what: str, offset: int, count: int, option: str, min_bytes: int) -> None:
        if count > getattr(self.limits, option):
            where = {"path": self.file.path, "offset": offset}
            raise self.limits.error(f"{what} is over the limit", option, count, **where)
        if count * min_bytes > self.cursor.remaining:
            raise self.cursor.truncated(what, count * min_bytes)

    # --- metadata ---

    def _read_key(self, number: int) -> None:
        cursor, position = self.cursor, self.cursor.position
        self.key_position = position
        key = cursor.key(number)
        what = f"key '{key[:80]}'"
        if key in self.metadata:
            expected = f"once, at byte {self.positions[key]}"
            raise cursor.error(f"{what}: occurs twice", expected, "again", offset=position)
        kind = cursor.u32(what)
        if key == ALIGNMENT_KEY:
            self.alignment = self._read_alignment(kind)
            value: Any = self.alignment
        else:
            value = cursor.value(kind, what)
        self.metadata[key], self.kinds[key], self.positions[key] = value, kind, position

    def _read_alignment(self, kind: int) -> int:
        cursor, what = self.cursor, f"key '{ALIGNMENT_KEY}'"
        if kind != UINT32:
            raise cursor.error(f"{what}: value type", f"{UINT32} (32 bits)", kind)
        position, value = cursor.position, cursor.u32(what)
        if value == 0 or value & (value - 1):
            raise cursor.error(what, "a power of two", value, offset=position)
        if value > self.limits.alignment_bytes:
            where = {"path": self.file.path, "offset": position}
            raise self.limits.error(f"{what} is over the limit", "alignment_bytes", value, **where)
        return value

    # --- the end ---

    def _check_rest(self, end: int) -> None:
        """Checks that at most padding follows the last tensor; more only if that tensor is empty."""
        rest = self.file.size - padded(end, self.alignment)
        if rest <= 0:
            return
        start = self.file.size - rest
        zero = rest <= _TRAILING_BYTES and not any(self.file.pread(start, rest))
        if not zero:
            problem = "bytes after the last tensor belong to no tensor"
            expected, found = f"a file of {start} bytes", f"{self.file.size} bytes"
            raise self.cursor.error(problem, expected, found, offset=start)

    # --- wrong counts ---

    def wrong_count(self) -> CheckpointError | None:
        """After an error, returns a clearer one if a count exceeds the items that the file holds.

        The sign of this is that the file is complete without the last item that was read.
        """
        if max(self.tensors, self.keys) > _MAX_EXPLAINED:
            return None
        done, in_table = len(self.infos), self.table_start > 0
        if in_table and 0 < done < self.tensors and self._is_complete(self.table_start, done):
            return self._too_many("tensor count", 8, self.tensors, done)
        if self.key_position and self._is_complete(self.key_position, self.tensors):
            # With a table, its start was read as the last key; without one, that key is incomplete.
            return self._too_many("key count", 16, self.keys, len(self.metadata) - in_table)
        return None

    def _is_complete(self, start: int, count: int) -> bool:
        """Whether ``count`` table rows from ``start`` on, with their data, end the file exactly."""
        infos: dict[str, Info] = {}
        if not count:
            return False
        try:
            self.cursor.seek(start)
            read_table(self.cursor, count, infos)
            data_start = padded(self.cursor.position, self.alignment)
            end = check_layout(self.cursor, infos.values(), data_start, self.alignment)
        except CheckpointError:
            return False
        return self.file.size in (end, padded(end, self.alignment))

    def _too_many(self, what: str, offset: int, count: int, present: int) -> CheckpointError:
        where = {"path": self.file.path, "offset": offset}
        problem = f"{what}: more than the file holds"
        return own_limit(problem, f"at most {present}", count, "the file's own content", **where)
