"""Reader of the safetensors format: 8 bytes of header length, a JSON header, the data.

The whole header is validated with Python integers before anything is allocated, and no data is
read. Names, dtypes and the order of the data are those of the file.
"""

from __future__ import annotations

import os
from math import prod
from operator import attrgetter
from typing import Any

from ...dtype import DType
from ...errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointTruncatedError,
    integer_text,
)
from ..blocks import KEPT, layout_of
from ..entry import MAX_DIMS, Coding, Nibbles, TensorEntry, UnknownType
from ..files import DOWNLOAD_AGAIN, OpenFile
from ..limits import Limits, check_name, is_long
from ..signatures import SNIFF_BYTES, foreign, sniff
from ..strict_json import KeyPath, Text
from ..table import TensorTable, open_single

WHAT = "a safetensors file"
# From a terabyte on, the first 8 bytes are not the length of a header but other data.
_MAX_LENGTH = 1 << 40
# Dtypes of the format that JAX lacks or would silently convert to another.
_UNSUPPORTED = {"F6_E2M3", "F6_E3M2"}
# Name → the type, its bits per value, and how its bytes become values.
_DTYPES = {
    d.safetensors: (d, d.size_in_bits, Nibbles() if d is DType.float4_e2m1fn else None)
    for d in DType.__members__.values()
    if d.safetensors and d.safetensors not in _UNSUPPORTED
}
_METADATA = "__metadata__"
# The metadata key that lists the tensors of quantised blocks, with their kind.
ENCODINGS = "maxjax.encodings"


def open_safetensors(
    path: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> TensorTable:
    """Opens one safetensors file: reads and validates its header, none of its data.

    Raises:
        CheckpointTruncatedError: the file is shorter than it declares.
        CheckpointFormatError: the file has another format, or its header is invalid.
        CheckpointUnsafeError: the file is a pickle.
        CheckpointLimitError: the file exceeds ``limits``.
        CheckpointMissingError, CheckpointAccessError: as for ``open_regular``.
    """
    return open_single("safetensors", path, limits, read_header)


def read_header(
    file: OpenFile, number: int, limits: Limits
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Reads (entries in header order, metadata) of an open file; ``number`` is its index in a set."""
    data = _header(file, limits)
    text = Text(data, file.path, limits, 8, _tensor_of, CheckpointFormatError)
    return _HeaderParser(file, number, limits, text).entries(text.parse())


def _tensor_of(keys: KeyPath) -> str | None:
    return None if keys[0] == _METADATA else str(keys[0])


def _header(file: OpenFile, limits: Limits) -> bytes:
    """The bytes of the JSON header; the error for another kind of file names that kind."""
    start = file.pread(0, min(file.size, SNIFF_BYTES))
    length = int.from_bytes(start[:8], "little")
    if length > limits.header_bytes or start[8:9] not in (b"{", b""):
        # A pickle's first bytes may look like a length, but never one that fits the file.
        if length > file.size - 8 or sniff(start) != "pickle":
            if error := foreign(file.path, start, WHAT):
                raise error
    _check_length(file, length, limits)
    if start[8:9] != b"{":
        raise CheckpointFormatError(
            "header: must be a JSON object in UTF-8",
            path=file.path,
            offset=8,
            expected="'{'",
            found=repr(start[8 : 8 + min(length, 12)]),
        )
    return file.pread(8, length)


def _check_length(file: OpenFile, length: int, limits: Limits) -> None:
    """Refuses a header length that is absurd, over the limit, or longer than the file."""
    field, available = "header length", file.size - 8
    if available < 0 or available < length <= min(limits.header_bytes, _MAX_LENGTH - 1):
        offset, wanted, found = (8, length, available) if available >= 0 else (0, 8, file.size)
        raise CheckpointTruncatedError(
            f"the file ends inside the {'header' if available >= 0 else field}",
            path=file.path,
            offset=offset,
            expected=f"{wanted} bytes",
            found=f"{found} bytes",
            hint=DOWNLOAD_AGAIN,
        )
    if length == 0 or length >= _MAX_LENGTH:
        expected = f"a length between 2 and {available}"
        raise CheckpointFormatError(
            f"{field}: not {WHAT}", path=file.path, offset=0, expected=expected, found=length
        )
    if length > limits.header_bytes:
        problem = f"{field} is over the limit"
        raise limits.error(problem, "header_bytes", length, path=file.path, offset=0)


class _HeaderParser:
    """Validates one parsed header. Errors name tensor, field and byte offset."""

    def __init__(self, file: OpenFile, number: int, limits: Limits, text: Text):
        self.file = file
        self.number = number
        self.limits = limits
        self.text = text
        self.data_start = 8 + len(text.data)
        self.data_bytes = file.size - self.data_start

    def entries(self, header: dict[str, Any]) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        metadata = self._metadata(header.pop(_METADATA, None))
        if len(header) > self.limits.tensors:
            raise self.limits.error(
                "header: too many tensors", "tensors", len(header), path=self.file.path
            )
        entries = {name: self._entry(name, spec) for name, spec in header.items()}
        self._check_layout(entries)
        for name, encoding in self._encodings(metadata).items():
            entries[name] = self._packed(name, entries.get(name), encoding)
        return entries, metadata

    def _encodings(self, metadata: dict[str, str]) -> dict[str, Any]:
        """Tensor → kind of its quantised blocks, from the metadata that maxjax writes."""
        if ENCODINGS not in metadata:
            return {}
        try:
            data = metadata[ENCODINGS].encode()
        except UnicodeEncodeError:
            data = b""
        found = Text(data, self.file.path, self.limits, truncated=CheckpointFormatError).parse()
        if type(found) is not dict:
            raise self._error(_METADATA, ENCODINGS, "not an object", "an object of names", found)
        return found

    def _packed(self, name: str, entry: TensorEntry | None, encoding: Any) -> TensorEntry:
        block = layout_of(encoding).nbytes if encoding in KEPT else None
        if entry is None or block is None:
            problem, expected = "no such tensor", "a tensor of the file"
            if entry is not None:
                problem, expected = "an unknown encoding", f"one of {', '.join(KEPT)}"
            raise self._error(_METADATA, ENCODINGS, f"'{name}': {problem}", expected, encoding)
        if entry.dtype is not DType.uint8 or not entry.shape or entry.shape[-1] % block:
            problem = f"'{name}' is not {encoding}: its rows are not blocks of {block} bytes"
            found = f"{entry.dtype.name} {_shown(list(entry.shape))}"
            raise self._error(_METADATA, ENCODINGS, problem, f"uint8 rows of {block} bytes", found)
        return entry._replace(encoding=encoding)

    def _error(
        self, name: str, field: str, problem: str, expected: Any, found: Any, hint: str = ""
    ) -> CheckpointFormatError:
        where = self.text.where((name, field))
        problem = f"{field}: {problem}"
        found = _shown(found)
        return CheckpointFormatError(
            problem, expected=expected, found=found, hint=hint or None, **where
        )

    def _metadata(self, value: Any) -> dict[str, str]:
        if value is None:  # null is none, as for the safetensors library
            return {}
        if type(value) is not dict:
            raise self._error(_METADATA, _METADATA, "not an object", "an object of strings", value)
        for key, item in value.items():
            if type(item) is not str:
                raise self._error(_METADATA, key, "metadata is not a string", "a string", item)
        return value

    def _entry(self, name: str, spec: Any) -> TensorEntry:
        if is_long(name, self.limits):  # to find where the name is takes time
            check_name(name, self.limits, **self.text.where((name,)))
        if type(spec) is not dict:
            raise self._error(name, "entry", "not an object", "an object", spec)
        try:
            kind, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
        except KeyError as missing:
            field, found = missing.args[0], ", ".join(spec)[:80] or "no field"
            problem, expected = "the field is missing", f"a field '{field}'"
            raise self._error(name, field, problem, expected, found) from None
        dtype, bits, coding = self._dtype(name, kind)
        shape = self._integers(name, "shape", shape)
        offsets = self._integers(name, "data_offsets", offsets)
        if len(shape) > MAX_DIMS:
            raise self._error(name, "shape", "too many dimensions", f"<= {MAX_DIMS}", len(shape))
        if len(offsets) != 2:
            raise self._error(name, "data_offsets", "not begin and end", "2 numbers", len(offsets))
        begin, end = offsets
        self._check_size(name, bits, shape, begin, end)
        start = self.data_start + begin
        return TensorEntry(name, dtype, shape, self.number, start, end - begin, coding)

    def _dtype(self, name: str, value: Any) -> tuple[Any, int | None, Coding | None]:
        """The dtype, its bits per value, and its coding; bits are None for an unsupported dtype."""
        known = _DTYPES.get(value) if type(value) is str else None
        if known is not None:
            return known
        supported = f"one of {', '.join(map(str, _DTYPES))}"
        if type(value) is not str:
            raise self._error(name, "dtype", "not a name", supported, value)
        problem, hint = "unknown", ""
        if value in _UNSUPPORTED:
            problem, hint = "not supported", "Convert the tensor to another type."
        error = self._error(name, "dtype", problem, supported, value, hint)
        return UnknownType(_shown(value), error), None, None

    def _integers(self, name: str, field: str, value: Any) -> tuple[int, ...]:
        if type(value) is not list:
            raise self._error(name, field, "not a list", "a list", value)
        for item in value:
            # The exact type: True is an int to isinstance.
            if type(item) is not int or item < 0:
                raise self._error(name, field, "not a size", "an integer >= 0", item)
        return tuple(value)

    def _check_size(
        self, name: str, bits: int | None, shape: tuple[int, ...], begin: int, end: int
    ) -> None:
        if begin > end:
            raise self._error(name, "data_offsets", "end before begin", f"an end >= {begin}", end)
        if self.data_bytes < end < 2**63:
            raise self._beyond_the_file(name, begin, end)
        if bits is None:
            return
        elements = prod(shape)
        nonzero = elements or prod(dim or 1 for dim in shape)
        if elements * bits != 8 * (end - begin):
            problem = f"the size does not match shape {_shown(list(shape))} and the dtype"
            nbytes, rest = divmod(elements * bits, 8)
            expected = f"{_shown(nbytes)}{'.5' if rest else ''} bytes"
            raise self._error(
                name, "data_offsets", problem, expected, f"{_shown(end - begin)} bytes"
            )
        nbytes = nonzero * bits // 8
        if nbytes > self.limits.tensor_bytes:
            problem = "shape: too large, even without the dimensions of size 0"
            where = self.text.where((name, "shape"))
            raise self.limits.error(problem, "tensor_bytes", nbytes, **where)

    def _beyond_the_file(self, name: str, begin: int, end: int) -> CheckpointError:
        missing = end - self.data_bytes
        return CheckpointTruncatedError(
            f"data_offsets: the data ends at byte {self.data_start + end} but the file has "
            f"{self.file.size} bytes ({missing} missing)",
            path=self.file.path,
            tensor=name,
            offset=self.data_start + begin,
            expected=f"{end - begin} bytes",
            found=f"{max(self.data_bytes - begin, 0)} bytes",
            hint=DOWNLOAD_AGAIN,
        )

    def _check_layout(self, entries: dict[str, TensorEntry]) -> None:
        """Checks that the tensors cover the data without gaps, overlaps or trailing bytes."""
        position, shared = self.data_start, 0
        for entry in sorted(entries.values(), key=attrgetter("offset", "nbytes")):
            if entry.offset != position:
                shared += self._check_begin(entry, position)
                if shared > self.limits.shared_bytes:
                    where = self.text.where((entry.name, "data_offsets"))
                    problem = "data_offsets: the data overlaps that of another tensor"
                    raise self.limits.error(problem, "shared_bytes", shared, **where)
            position = max(position, entry.offset + entry.nbytes)
        if position != self.file.size:
            raise CheckpointFormatError(
                "bytes after the last tensor belong to no tensor",
                path=self.file.path,
                offset=position,
                expected=f"a file of {position} bytes",
                found=f"{self.file.size} bytes",
                hint=DOWNLOAD_AGAIN,
            )

    def _check_begin(self, entry: TensorEntry, position: int) -> int:
        """The number of bytes that a tensor which begins before ``position`` shares with others."""
        if entry.offset < position and entry.nbytes:
            return min(position, entry.offset + entry.nbytes) - entry.offset
        is_gap = entry.offset > position
        problem = "bytes before it belong to no tensor" if is_gap else "lies inside another tensor"
        begin = entry.offset - self.data_start
        expected = f"a begin of {position - self.data_start}"
        raise self._error(entry.name, "data_offsets", problem, expected, begin)


def _shown(value: Any) -> str:
    """A header value as short text, since a huge one must not be printed in full."""
    if isinstance(value, dict | list) and len(value) > 8:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} items"
    return integer_text(value) if isinstance(value, int) else str(value)[:200]
