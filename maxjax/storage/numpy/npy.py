"""Reader of NumPy's .npy format: magic, version, header length, header, data.

The header is validated with Python integers before anything is allocated, and no data is read.
Format: numpy/lib/format.py, versions 1.0, 2.0 and 3.0.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from ...dtype import DType
from ...errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
)
from ..boxes import c_strides
from ..entry import MAX_DIMS, Strided, TensorEntry, UnknownType
from ..files import DOWNLOAD_AGAIN, OpenFile
from ..limits import Limits
from ..signatures import foreign
from ..table import TensorTable, open_single

# No valid size has more digits, so a longer number is not converted.
_MAX_DIGITS = 30
_DTYPES = {
    d.np.str[1:]: d
    for d in DType.__members__.values()
    if d.np.type.__module__ == "numpy" and d.np.kind in "biufc"
}
# NumPy writes bfloat16 as two bytes without a type, and jax.numpy.load reads these as bfloat16.
_BFLOAT16 = ("<V2", "|V2", ">V2")
_KEYS = ("descr", "fortran_order", "shape")
_TOKEN = re.compile(
    r"""[ \t\r\n]*(?:
    (?P<string>'[^'\\\n]*'|"[^"\\\n]*")
    |(?P<word>[^\W\d]\w*)
    |(?P<number>\d[\w.]*)
    |(?P<mark>[^ \t\r\n])
    )""",
    re.VERBOSE | re.ASCII,
)
# Python 2 wrote an L after long integers.
_SIZE = re.compile(r"(0|[1-9]\d*)L?", re.ASCII)
_OBJECT = re.compile(r"[<>|=]?O\d*", re.ASCII)
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """The content of a header. ``skip`` is the offset of the data from the start of the magic.

    ``swap`` says whether the bytes of each value must be swapped for this machine.
    """

    dtype: DType | Any
    shape: tuple[int, ...]
    fortran_order: bool
    swap: bool
    skip: int

    @property
    def nbytes(self) -> int:
        """Number of bytes of the data."""
        return prod(self.shape) * self.dtype.np.itemsize

    @property
    def order(self) -> tuple[int, ...] | None:
        """The axes from slowest to fastest in the file; None for C order."""
        many = sum(size > 1 for size in self.shape) > 1
        return tuple(reversed(range(len(self.shape)))) if self.fortran_order and many else None

    @property
    def coding(self) -> Strided | None:
        """The coding of uncompressed data; None if the bytes are those of the array."""
        if self.order is not None:
            return Strided(c_strides(self.shape[::-1])[::-1], self.swap)
        return Strided(c_strides(self.shape), swap=True) if self.swap else None


@dataclass(frozen=True, slots=True)
class ArrayLocation:
    """The location of an array, for messages: its file, its name, its first byte.

    ``in_order``: whether byte k of the array is byte ``offset`` + k of the file; if not, it is compressed.
    """

    path: str
    tensor: str
    offset: int = 0
    in_order: bool = True

    def at(self, byte: int) -> dict[str, Any]:
        """The keyword arguments of an error at a byte of the array."""
        offset = self.offset + byte if self.in_order else self.offset
        return {"path": self.path, "tensor": self.tensor, "offset": offset}


class HeaderText:
    """A parser of a header's text. ``base`` is the offset of the text in the array's bytes."""

    def __init__(
        self, text: str, encoding: str, base: int, location: ArrayLocation, limits: Limits
    ):
        # A header is padded with spaces; without this, searching a token would scan them repeatedly.
        self.text = text.rstrip(" \t\r\n")
        self.encoding = encoding
        self.base = base
        self.location = location
        self.limits = limits
        self.at = 0
        self.kind = self.token = ""
        self.shape_at = self._where()

    def header(self, skip: int) -> ArrayHeader:
        """Parses the header; ``skip`` is the offset of the data."""
        self._check_bounds()
        found: dict[str, Any] = {}
        self._next()
        self._expect("{", "header")
        read = {"descr": self._descr, "fortran_order": self._bool, "shape": self._shape}
        while self.token != "}":
            key = self.token[1:-1] if self.kind == "string" else ""
            if key not in _KEYS or key in found:
                problem = "key occurs twice" if key in found else "unknown key"
                raise self._error(f"header: {problem}", f"each of {', '.join(_KEYS)} once")
            self._next()
            self._expect(":", key)
            found[key] = read[key]()
            if self.token != "}":
                self._expect(",", key)
        self._next()
        if self.kind:
            raise self._error("header: text after its end", "spaces")
        missing = [key for key in _KEYS if key not in found]
        if missing:
            expected = f"the keys {', '.join(_KEYS)}"
            raise self._error("header: a key is missing", expected, f"no {', '.join(missing)}")
        dtype, swap = found["descr"]
        self._check_total(dtype, found["shape"])
        return ArrayHeader(dtype, found["shape"], found["fortran_order"], swap, skip)

    def _check_bounds(self) -> None:
        """Bounds the nesting of brackets and signs, and the digits of numbers, before parsing."""
        depth = deepest = signs = longest = 0
        for match in _TOKEN.finditer(self.text):
            token = match[match.lastgroup or 0]
            signs = signs + 1 if token in "+-~" else 0
            depth += (token in "([{") - (token in ")]}")
            deepest = max(deepest, depth, signs)
            if match.lastgroup == "number":
                longest = max(longest, len(token))
        for option, value, what in (
            ("json_depth", deepest, "nested brackets and signs"),
            ("json_digits", longest, "digits of a number"),
        ):
            if value > getattr(self.limits, option):
                problem = f"header: too many {what}"
                raise self.limits.error(problem, option, value, **self.location.at(self.base))

    def _next(self) -> None:
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            self.at, self.kind, self.token = len(self.text), "", ""
            return
        self.at, self.kind = match.end(), match.lastgroup or ""
        self.token = match[self.kind]

    def _expect(self, mark: str, field: str) -> None:
        if self.token != mark:
            raise self._error(f"{field}: not what NumPy writes", repr(mark))
        self._next()

    def _where(self) -> dict[str, Any]:
        before = self.text[: self.at - len(self.token)].encode(self.encoding)
        return self.location.at(self.base + len(before))

    def _error(self, problem: str, expected: str, found: str | None = None) -> CheckpointError:
        """The error at the current token; a call, a subscript or an attribute there is code."""
        if self.kind == "word" and re.match(r"\s*[(.\[]", self.text[self.at :]):
            rest = self.text[self.at - len(self.token) :][:80]
            return CheckpointUnsafeError(
                "header: code instead of a value",
                expected=expected,
                found=repr(rest),
                hint="The code was not run. Do not trust this file.",
                **self._where(),
            )
        shown = repr(self.token[:80]) if self.kind else "the end of the header"
        return CheckpointFormatError(
            problem, expected=expected, found=found or shown, **self._where()
        )

    def _bool(self) -> bool:
        value = {"True": True, "False": False}.get(self.token)
        if value is None:
            raise self._error("fortran_order: not a boolean", "True or False")
        self._next()
        return value

    def _shape(self) -> tuple[int, ...]:
        self.shape_at, sizes, comma = self._where(), [], True
        if self.token != "(":
            raise self._error("shape: not a tuple", "a tuple of integers >= 0")
        self._next()
        while self.token != ")":
            match = _SIZE.fullmatch(self.token) if comma else None
            if match is None or len(match[1]) > _MAX_DIGITS:
                raise self._error("shape: not a size", "an integer >= 0")
            sizes.append(int(match[1]))
            self._next()
            comma = self.token == ","
            if comma:
                self._next()
        if len(sizes) == 1 and not comma:
            raise self._error("shape: not a tuple", "a tuple of integers >= 0", f"({sizes[0]})")
        if len(sizes) > MAX_DIMS:
            problem, most, count = "shape: too many dimensions", f"<= {MAX_DIMS}", len(sizes)
            raise CheckpointFormatError(problem, expected=most, found=count, **self.shape_at)
        self._next()
        return tuple(sizes)

    def _check_total(self, dtype: Any, shape: tuple[int, ...]) -> None:
        """Refuses shapes that are too large, computed without overflow."""
        if isinstance(dtype, UnknownType):
            return
        nbytes = prod(size or 1 for size in shape) * dtype.np.itemsize
        if nbytes >= 2**63 and 0 not in shape:
            raise CheckpointFormatError(
                f"shape: {list(shape)} is too large for an array",
                expected="less than 2**63 bytes",
                found=nbytes,
                **self.shape_at,
            )
        if nbytes > self.limits.tensor_bytes:
            problem = "shape: too large, even without the dimensions of size 0"
            raise self.limits.error(problem, "tensor_bytes", nbytes, **self.shape_at)

    def _descr(self) -> tuple[Any, bool]:
        expected = f"one of {', '.join(_DTYPES)} with '<', '>' or '|'"
        if self.token in _BRACKETS:
            error = self._structured(expected)
            if not isinstance(error, CheckpointFormatError) or not self.kind:
                raise error
            self._next()
            return UnknownType("a structured dtype", error), False
        if self.kind != "string":
            raise self._error("descr: not a type", expected)
        descr = self.token[1:-1]
        order, dtype = descr[:1], _DTYPES.get(descr[1:])
        if descr in _BFLOAT16:
            dtype = DType.bfloat16
        elif dtype is None or order not in ("|" if dtype.np.itemsize == 1 else "<>"):
            error = self._unsupported(descr, expected)
            if not isinstance(error, CheckpointFormatError):
                raise error
            self._next()
            return UnknownType(descr[:80], error), False
        self._next()
        little = order == "<" if order != "|" else sys.byteorder == "little"
        return dtype, little != (sys.byteorder == "little")

    def _structured(self, expected: str) -> CheckpointError:
        """The error for a structured dtype, which may contain Python objects."""
        where, depth = self._where(), 0
        while self.kind:
            if self.kind == "string" and _OBJECT.fullmatch(self.token[1:-1]):
                return self._object()
            if self.kind == "word":
                error = self._error("descr: not a type", expected)
                if isinstance(error, CheckpointUnsafeError):
                    return error
            depth += (self.token in _BRACKETS) - (self.token in _BRACKETS.values())
            if not depth:
                break
            self._next()
        return CheckpointFormatError(
            "descr: a structured dtype is not supported",
            expected=expected,
            found="a structured dtype",
            hint="Save each field as an array.",
            **where,
        )

    def _object(self) -> CheckpointError:
        return CheckpointUnsafeError(
            "descr: Python objects, which are stored as a pickle",
            expected="numbers",
            found=f"dtype {self.token}",
            hint="A pickle can run any code and is never opened. Save arrays of numbers.",
            **self._where(),
        )

    def _unsupported(self, descr: str, expected: str) -> CheckpointError:
        """The error for a descr in quotes."""
        if _OBJECT.fullmatch(descr):
            return self._object()
        kinds = {"U": "text", "S": "text", "M": "dates", "m": "time spans"}
        what, hint = kinds.get(descr[1:2]), "Save numbers, or another format."
        problem = f"descr: {what} instead of numbers" if what else "descr: unknown"
        if descr[1:2] == "V":
            problem = "descr: bytes without a type"
            hint = (
                "NumPy does not save the names of float8 and smaller types: save the array's bits "
                "(array.view('uint8')), or safetensors."
            )
        found = repr(descr[:80])
        return CheckpointFormatError(
            problem, expected=expected, found=found, hint=hint, **self._where()
        )


WHAT = "a NumPy .npy array"
MAGIC = b"\x93NUMPY"
# The first read: magic, version, length, and nearly always all of the header.
_START_BYTES = 256


def open_npy(
    path: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> TensorTable:
    """Opens one .npy file: a table of one tensor, with the name of the file without ``.npy``.

    Raises:
        CheckpointTruncatedError: the file is shorter than it declares.
        CheckpointFormatError: another format, an invalid header, or values that are not numbers.
        CheckpointUnsafeError: the file holds Python objects or code, or is a pickle.
        CheckpointLimitError: the file exceeds ``limits``.
        CheckpointMissingError, CheckpointAccessError: as for ``open_regular``.

    Example:
        >>> import os, tempfile, numpy as np
        >>> path = os.path.join(tempfile.mkdtemp(), "w.npy")
        >>> np.save(path, np.arange(3))
        >>> with open_npy(path) as table:
        ...     print(table.read("w"))
        [0 1 2]
    """
    return open_single("npy", path, limits, _read)


def _read(file: OpenFile, number: int, limits: Limits) -> tuple[dict[str, TensorEntry], dict]:
    name = os.path.basename(file.path).removesuffix(".npy")
    return {name: _entry(file, name, limits)}, {}


def _entry(file: OpenFile, name: str, limits: Limits) -> TensorEntry:
    location = ArrayLocation(file.path, name)

    def head(nbytes: int) -> bytes:
        return file.pread(0, min(nbytes, file.size))

    header = read_header(head, file.size, location, limits)
    if isinstance(header.dtype, UnknownType):
        available = file.size - header.skip
        return TensorEntry(name, header.dtype, header.shape, 0, header.skip, available)
    check_size(header, file.size, location)
    return TensorEntry(
        name, header.dtype, header.shape, 0, header.skip, header.nbytes, header.coding
    )


def check_size(header: ArrayHeader, size: int, location: ArrayLocation) -> None:
    """Refuses an array whose data does not fill the rest of the ``size`` bytes after its header."""
    available = size - header.skip
    if header.nbytes > available:
        raise CheckpointTruncatedError(
            f"shape: the data of {list(header.shape)} is longer than the file",
            expected=f"{header.nbytes} bytes",
            found=f"{available} bytes",
            hint=DOWNLOAD_AGAIN,
            **location.at(header.skip),
        )
    if header.nbytes < available:
        raise CheckpointFormatError(
            f"shape: unexpected bytes after the data of {list(header.shape)}",
            expected=f"{header.nbytes} bytes of data",
            found=f"{available} bytes",
            **location.at(header.skip + header.nbytes),
        )


def read_header(
    head: Callable[[int], bytes], size: int, location: ArrayLocation, limits: Limits
) -> ArrayHeader:
    """The header of an array of ``size`` bytes, header included; ``head(n)`` gives the first n.

    Raises:
        CheckpointTruncatedError, CheckpointFormatError, CheckpointUnsafeError,
        CheckpointLimitError: as for ``open_npy``.
    """
    start = head(_START_BYTES)
    if not start.startswith(MAGIC) and not (len(start) < 6 and MAGIC.startswith(start)):
        raise _other_format(start, location)
    if len(start) < 10:
        raise _truncated(location, "magic, version and length", len(start), 10, len(start))
    version = (start[6], start[7])
    if version not in ((1, 0), (2, 0), (3, 0)):
        found = f"{version[0]}.{version[1]}"
        raise CheckpointFormatError(
            "version: not a version of the .npy format", expected="1.0, 2.0 or 3.0", found=found, **location.at(6)
        )  # fmt: skip
    fixed = 10 if version == (1, 0) else 12
    if len(start) < fixed:
        raise _truncated(location, "length of the header", len(start), fixed, len(start))
    length = int.from_bytes(start[8:fixed], "little")
    if length > limits.npy_header_bytes:
        problem = "header length is over the limit"
        raise limits.error(problem, "npy_header_bytes", length, **location.at(8))
    if fixed + length > size:
        raise _truncated(location, "header", fixed, length, size - fixed)
    data = (start if fixed + length <= len(start) else head(fixed + length))[fixed:][:length]
    encoding = "utf-8" if version == (3, 0) else "latin-1"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        found = repr(data[error.start : error.start + 8])
        raise CheckpointFormatError(
            "header: not UTF-8", expected="UTF-8", found=found, **location.at(fixed + error.start)
        ) from None
    return HeaderText(text, encoding, fixed, location, limits).header(fixed + length)


def _truncated(
    location: ArrayLocation, what: str, at: int, wanted: int, available: int
) -> CheckpointError:
    return CheckpointTruncatedError(
        f"the array ends inside the {what}",
        expected=f"{wanted} bytes",
        found=f"{available} bytes",
        hint=DOWNLOAD_AGAIN,
        **location.at(at),
    )


def _other_format(start: bytes, location: ArrayLocation) -> CheckpointError:
    """The error for a file that is not an array; it names the file's kind."""
    known = foreign(location.path, start, WHAT)
    if known is not None:
        problem, found = known.problem.replace("the file is", "not an array but"), known.found
        where = location.at(known.offset or 0)
        return type(known)(problem, expected=WHAT, found=found, hint=known.hint, **where)
    problem, found = f"not {WHAT}", repr(start[:8])
    return CheckpointFormatError(problem, expected=repr(MAGIC), found=found, **location.at(0))
