"""Floor 1. The table of tensors of one GGUF file: reading its rows, and where the data must lie.

Below: files, ggml_types, gguf_values. Above: gguf_header.

Source: docs/gguf.md of the ggml repository.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from ..errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointTruncatedError,
)
from .ggml_types import GGML_TYPES, REMOVED, GgmlType
from .gguf_values import IMPOSSIBLE, REFETCH, Cursor

MAX_DIMS = 4
# The format says 64, but files of image models keep to twice that, the NUL of C included.
MAX_NAME = 127
REQUANTISE = "Make the file anew with a current llama.cpp."


# Not frozen: a million of them are made in half the time.
@dataclass(slots=True)
class Info:
    """One row of the table. ``place``: where it stands; ``dims``: the fastest one first.

    ``offset`` counts from the beginning of the data, ``nbytes`` are without padding.
    """

    name: str
    place: int
    dims: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int

    @property
    def offset_place(self) -> int:
        """Where ``offset`` stands in the file."""
        return self.place + 8 + len(self.name.encode()) + 4 + 8 * len(self.dims) + 4


def read_table(cursor: Cursor, count: int, infos: list[Info]) -> None:
    """Reads ``count`` rows into ``infos``, which on an error has those before the bad one."""
    names: dict[str, int] = {}
    for number in range(1, count + 1):
        info = _read_info(cursor, number)
        first = names.setdefault(info.name, info.place)
        if first != info.place:
            expected = f"once, at byte {first}"
            raise bad(cursor, info, "name: stands twice", expected, "again", info.place)
        infos.append(info)


def _read_info(cursor: Cursor, number: int) -> Info:
    place = cursor.place
    length = cursor.u64("name")
    if not 0 < length <= MAX_NAME:
        raise _bad_name(cursor, number, length, place)
    at = cursor.take(length, "name")
    name = cursor.name(cursor.buffer[at : at + length], "tensor", number, place)
    count = cursor.u32("dims", name)
    if count > MAX_DIMS:
        raise _too_many_dims(cursor, name, count)
    at = cursor.take(8 * count + 12, "dims, type and offset", name)
    *dims, kind, offset = struct.unpack_from(f"{cursor.order}{count}QIQ", cursor.buffer, at)
    end = cursor.place
    kind = GGML_TYPES.get(kind) or _unknown_type(cursor, name, kind, end - 12)
    elements = _elements(cursor, name, dims, kind, end - 12 - 8 * count)
    nbytes = elements // kind.elements * kind.nbytes
    return Info(name, place, tuple(dims), kind, offset, nbytes)


def _bad_name(cursor: Cursor, number: int, length: int, place: int) -> CheckpointError:
    cls = CheckpointFormatError if length else CheckpointTruncatedError
    problem = f"tensor {number}: name: {'too long' if length else 'is empty'}"
    expected, found = f"1 to {MAX_NAME} bytes", f"{length} bytes"
    return cursor.bad(problem, expected, found, offset=place, cls=cls)


def _too_many_dims(cursor: Cursor, name: str, count: int) -> CheckpointError:
    problem, at = "dims: too many", cursor.place - 4
    if count < 1 << 31 and 8 * count > cursor.remaining:
        where = {"path": cursor.file.path, "offset": at, "tensor": name}
        problem = f"{problem}, and more than the file can hold"
        return own_limit(problem, f"at most {MAX_DIMS}", count, "the format's own", **where)
    return cursor.bad(problem, f"at most {MAX_DIMS}", count, offset=at, tensor=name)


def _unknown_type(cursor: Cursor, name: str, number: int, offset: int) -> GgmlType:
    removed = REMOVED.get(number)
    problem = f"type: {removed} was removed from ggml" if removed else "type: unknown"
    hint = REQUANTISE if removed else "Written by a newer or a changed llama.cpp?"
    expected, where = "a tensor type of ggml", {"offset": offset, "tensor": name}
    raise cursor.bad(problem, expected, number, hint=hint, **where)


def _elements(cursor: Cursor, name: str, dims: list[int], kind: GgmlType, place: int) -> int:
    """How many values a tensor has. Without its dimensions of size 0 it must be possible too."""
    elements = prod(dims)
    nonzero = elements or prod(dim or 1 for dim in dims)
    # Of packed types this is what the values take when they are read as float32.
    size = nonzero * (kind.nbytes if kind.dtype else 4)
    row = dims[0] if dims else 1
    if row % kind.elements or size >= IMPOSSIBLE or size > cursor.limits.tensor_bytes:
        raise _bad_dims(cursor, kind, dims, size, {"offset": place, "tensor": name})
    return elements


def _bad_dims(
    cursor: Cursor, kind: GgmlType, dims: list[int], size: int, where: dict[str, Any]
) -> CheckpointError:
    if dims and max(dims) >= IMPOSSIBLE:
        return cursor.bad("dims: not a size", f"< {IMPOSSIBLE}", max(dims), **where)
    row = dims[0] if dims else 1
    if row % kind.elements:
        problem = f"dims: a row of {kind.name} has whole blocks only"
        return cursor.bad(problem, f"a multiple of {kind.elements}", row, **where)
    problem = "dims: too large"
    if size >= IMPOSSIBLE:
        return cursor.bad(problem, f"less than {IMPOSSIBLE} bytes", _shown(size), **where)
    return cursor.limits.error(problem, "tensor_bytes", size, path=cursor.file.path, **where)


def check_layout(cursor: Cursor, infos: list[Info], data_start: int, alignment: int) -> int:
    """The data lies in the order of the table, each tensor at the next aligned place.

    llama.cpp loads nothing else, and most damage to the table is found by it. Gives where the
    last tensor ends.
    """
    place = end = data_start
    for info in infos:
        begin = data_start + info.offset
        end = begin + info.nbytes
        # What has no bytes needs none in the file.
        if begin != place or (end > cursor.file.size and info.nbytes):
            raise _bad_offset(cursor, info, data_start, place, alignment)
        place = padded(end, alignment)
    return end


def _bad_offset(
    cursor: Cursor, info: Info, data_start: int, place: int, alignment: int
) -> CheckpointError:
    offset, size, at = info.offset, cursor.file.size, info.offset_place
    begin = data_start + offset
    end = begin + info.nbytes
    if offset % alignment or offset >= IMPOSSIBLE:
        problem = "offset: not aligned" if offset % alignment else "offset: impossible"
        return bad(cursor, info, problem, f"a multiple of {alignment}", offset, at)
    if end > size and info.nbytes:
        return cursor.bad(
            f"the data ends at byte {end} but the file has {size} bytes ({end - size} missing)",
            f"{info.nbytes} bytes",
            f"{max(size - begin, 0)} bytes",
            offset=min(begin, size),
            tensor=info.name,
            hint=REFETCH,
            cls=CheckpointTruncatedError,
        )
    hole = "bytes before it belong to no tensor"
    problem = f"offset: {hole if begin > place else 'lies in another tensor'}"
    return bad(cursor, info, problem, place - data_start, offset, at)


def bad(
    cursor: Cursor, info: Info, problem: str, expected: Any, found: Any, offset: int
) -> CheckpointError:
    """An error about a tensor, at a byte offset."""
    return cursor.bad(problem, expected, found, offset=offset, tensor=info.name)


def own_limit(problem: str, expected: str, found: int, which: str, **where: Any) -> CheckpointError:
    """The error for a number over a limit that is not one of ``Limits``, but ``which``."""
    hint = f"This limit is {which}: no option raises it."
    return CheckpointLimitError(problem, expected=expected, found=found, hint=hint, **where)


def padded(size: int, alignment: int) -> int:
    """``size`` rounded up to a multiple of ``alignment``.

    Example:
        >>> padded(33, 32)
        64
    """
    return -(-size // alignment) * alignment


def _shown(value: int) -> str:
    return str(value) if value < 1 << 128 else f"an integer of {value.bit_length()} bits"
