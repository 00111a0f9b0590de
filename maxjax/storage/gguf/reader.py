"""Reader of the GGUF format: typed metadata, a table of tensors, aligned data.

It reads versions 2 and 3, in either byte order, in one file or split over several. The table is
validated with Python integers before anything is allocated, and no data is read.

Source: docs/gguf.md of the ggml repository; where it is ambiguous, llama.cpp decides.
"""

from __future__ import annotations

import os
import sys

from ...dtype import DType
from ...errors import CheckpointError, CheckpointFormatError, CheckpointMissingError
from ..blocks import DECODERS, KEPT, LAYOUTS, Decoded
from ..blocks.codings import Swapped
from ..boxes import c_strides
from ..directory import GGUF_PART, fetch_hint
from ..entry import Coding, Strided, TensorEntry
from ..files import OpenFile, closed_on_error, open_regular
from ..limits import Limits, in_force
from ..table import TensorTable
from .header import GGUFHeader, Info, error, read_header

_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"


def open_gguf(
    path: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> TensorTable:
    """Opens a GGUF file, or the whole set if ``path`` is a part of one: headers only, no data.

    Names are those of the file. Shapes are the file's dimensions in reversed order, so that the last
    axis is contiguous. Plain dtypes are kept. Quantised types in ``KEPT`` stay quantised (uint8, the
    last axis in bytes, ``encoding`` is their name); the others become float32 when read.
    ``metadata`` maps each key to an int, float, bool, str, a NumPy array (array of numbers) or a list
    (array of strings or of arrays). In text that is not UTF-8, invalid bytes become lone surrogates,
    which ``text.encode("utf-8", "surrogateescape")`` restores. The metadata of a set is that of its
    first part.

    Raises:
        CheckpointTruncatedError: the file is shorter than it declares, or a name is empty.
        CheckpointFormatError: the file has another format, or its header is invalid.
        CheckpointLimitError: the file exceeds ``limits``, or a count is more than the file can hold.
        CheckpointMissingError: the file, or a part of its set, does not exist.
        CheckpointUnsafeError: the file is a pickle.
        CheckpointAccessError: as for ``open_regular``.

    Example:
        >>> import os, struct, tempfile
        >>> key = struct.pack("<Q3sIQ2s", 3, b"k.n", 8, 2, b"hi")
        >>> info = struct.pack("<Q1sI2QIQ", 1, b"w", 2, 3, 2, 24, 0)    # 3 columns, 2 rows of I8
        >>> start = struct.pack("<4sI2Q", b"GGUF", 3, 1, 1) + key + info
        >>> path = os.path.join(tempfile.mkdtemp(), "m.gguf")
        >>> with open(path, "wb") as f:
        ...     _ = f.write(start + bytes(-len(start) % 32) + bytes(range(6)))
        >>> with open_gguf(path) as table:
        ...     print(table.metadata, table.read("w").tolist())
        {'k.n': 'hi'} [[0, 1, 2], [3, 4, 5]]
    """
    limits = in_force(limits)
    parts = [open_regular(path)]
    with closed_on_error(parts):
        headers = [read_header(parts[0], limits)]
        if _split_value(headers[0], _COUNT) > 1:
            _open_set(headers, parts, limits)
        entries = _entries(headers)
    return TensorTable("gguf", parts, entries, headers[0].metadata)


# --- sets of files ----------------------------------------------------------------------------


def _open_set(headers: list[GGUFHeader], parts: list[OpenFile], limits: Limits) -> None:
    """Opens the other parts of a set, in order; ``parts`` holds the one that is already open."""
    first = headers[0]
    count = _split_value(first, _COUNT)
    number = _split_value(first, _NUMBER)
    if number >= count:
        raise _split_error(first, _NUMBER, f"less than {count}, the value of '{_COUNT}'")
    stem = _stem(first, number, count)
    for k in range(count):
        if k == number:
            continue
        parts.insert(k, _open_part(f"{stem}-{k + 1:05d}-of-{count:05d}.gguf", first))
        headers.insert(k, read_header(parts[k], limits))
        for key, expected in ((_COUNT, count), (_NUMBER, k)):
            if _split_value(headers[k], key) != expected:
                raise _split_error(headers[k], key, str(expected))
    total = sum(len(header.infos) for header in headers)
    for header in headers:
        if _TENSORS in header.metadata and _split_value(header, _TENSORS) != total:
            raise _split_error(header, _TENSORS, f"{total}, as the {count} files hold")


def _stem(header: GGUFHeader, number: int, count: int) -> str:
    """The path of a part without its number, which must match the header's."""
    match = GGUF_PART.fullmatch(header.file.path)
    if match is None or int(match[3]) != count:
        name = os.path.basename(header.file.path)
        expected = f"a name that ends in -{number + 1:05d}-of-{count:05d}.gguf"
        hint = "Restore the original names of the parts, all in one directory."
        raise _split_error(header, _COUNT, expected, f"{count} parts, and the name '{name}'", hint)
    if int(match[2]) != number + 1:
        raise _split_error(header, _NUMBER, f"{int(match[2]) - 1}, by the file's name")
    return match[1]


def _split_value(header: GGUFHeader, key: str) -> int:
    """A metadata number about the split; 0 if it is absent."""
    value = header.metadata.get(key, 0)
    if type(value) is not int or value < 0:
        raise _split_error(header, key, "an integer >= 0")
    return value


def _split_error(
    header: GGUFHeader, key: str, expected: str, found: str | None = None, hint: str | None = None
) -> CheckpointError:
    present = str(header.metadata.get(key, "no such key"))[:80]
    return CheckpointFormatError(
        f"key '{key}': the parts of the set do not belong together",
        path=header.file.path,
        offset=header.positions.get(key, header.table_start),
        expected=expected,
        found=found or present,
        hint=hint,
    )


def _open_part(path: str, first: GGUFHeader) -> OpenFile:
    try:
        return open_regular(path)
    except CheckpointMissingError as error:
        name = os.path.basename(first.file.path)
        tensors = first.metadata.get(_TENSORS, "unknown")
        raise CheckpointMissingError(
            f"{error.problem}, but {name} says that its model is split over "
            f"{first.metadata[_COUNT]} files (tensors in all: {tensors})",
            path=path,
            hint=fetch_hint(path),
        ) from error


# --- entries ----------------------------------------------------------------------------------


def _entries(headers: list[GGUFHeader]) -> dict[str, TensorEntry]:
    """The entries of all files of a set; a name in two files is refused."""
    entries: dict[str, TensorEntry] = {}
    for number, header in enumerate(headers):
        swap = (header.order == ">") != (sys.byteorder == "big")
        for name, info in header.infos.items():
            if name in entries:
                other = os.path.basename(headers[entries[name].file].file.path)
                expected, problem = f"only in {other}", "name: in two files of the set"
                raise error(header.cursor, info, problem, expected, "also here", info.position)
            entries[name] = _entry(header, info, number, swap)
    return entries


def _entry(header: GGUFHeader, info: Info, number: int, swap: bool) -> TensorEntry:
    kind, shape = info.type, info.dims[::-1]
    offset, encoding = header.data_start + info.offset, None
    coding: Coding | None = None
    if kind.dtype is not None:
        dtype = kind.dtype
        if swap and kind.nbytes > 1:
            coding = Strided(c_strides(shape), swap=True)
        return TensorEntry(info.name, dtype, shape, number, offset, info.nbytes, coding)
    _check_blocks(header, info, swap)
    if kind.name in KEPT:
        dtype, encoding = DType.uint8, kind.name
        shape = (*shape[:-1], shape[-1] // kind.elements * kind.nbytes)
        wide = any(field.itemsize > 1 for field in LAYOUTS[kind.name].fields)
        coding = Swapped(kind.name) if swap and wide else None
    else:
        dtype, coding = DType.float32, Decoded(kind.name, swap)
    return TensorEntry(info.name, dtype, shape, number, offset, info.nbytes, coding, encoding)


def _check_blocks(header: GGUFHeader, info: Info, swap: bool) -> None:
    """Refuses a quantised type whose decoding, or whose big-endian form, is not known."""
    name, problem = info.type.name, None
    if name not in DECODERS:
        problem = f"type: {name} is not supported"
    elif swap and not LAYOUTS[name].swappable:
        problem = f"type: {name} has no defined form in big-endian files"
    if problem:
        position, cursor = info.offset_position - 4, header.cursor
        raise error(cursor, info, problem, "a type that can be decoded", name, position)
