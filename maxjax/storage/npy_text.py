"""Floor 1. The text of a .npy file's header: a Python dict literal of three keys.

It is read by a grammar of its own that knows nothing else: no expression is ever evaluated, and
no type comes out but JAX's types of numbers. Below: files, coding. Above: npy.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from ..dtype import DType
from ..errors import CheckpointError, CheckpointFormatError, CheckpointUnsafeError
from .coding import Strided
from .entry import UnknownType
from .limits import Limits

# NumPy's own bound.
MAX_DIMS = 64
# No size has more digits; a longer number is not worth its conversion.
_DIGITS = 30
_DTYPES = {
    d.np.str[1:]: d
    for d in DType.__members__.values()
    if d.np.type.__module__ == "numpy" and d.np.kind in "biufc"
}
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
# Python 2 wrote an L behind long integers.
_SIZE = re.compile(r"(0|[1-9]\d*)L?", re.ASCII)
_OBJECT = re.compile(r"[<>|=]?O\d*", re.ASCII)
_PAIRS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says. ``skip`` is where the data begins, counted from the magic.

    ``swap``: the bytes of each value are in the order that is not this machine's.
    """

    dtype: DType | Any
    shape: tuple[int, ...]
    fortran_order: bool
    swap: bool
    skip: int

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return prod(self.shape) * self.dtype.np.itemsize

    @property
    def order(self) -> tuple[int, ...] | None:
        """The axes from the slowest to the fastest in the file; None is C order."""
        many = sum(size > 1 for size in self.shape) > 1
        return tuple(reversed(range(len(self.shape)))) if self.fortran_order and many else None

    @property
    def coding(self) -> Strided | None:
        """How data that lies in a file becomes the array; None as it is."""
        if self.order is None and not self.swap:
            return None
        order = self.order or tuple(range(len(self.shape)))
        steps = accumulate((self.shape[axis] for axis in reversed(order)), mul, initial=1)
        strides = dict(zip(reversed(order), steps, strict=False))
        return Strided(tuple(strides[axis] for axis in range(len(order))), self.swap)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies, for messages: its file, its name, its first byte.

    ``in_order``: byte k of the array is byte ``offset`` + k of the file; else it is compressed.
    """

    path: str
    tensor: str
    offset: int = 0
    in_order: bool = True

    def at(self, byte: int) -> dict[str, Any]:
        """The facts of an error at a byte of the array."""
        offset = self.offset + byte if self.in_order else self.offset
        return {"path": self.path, "tensor": self.tensor, "offset": offset}


class HeaderText:
    """A header's text, token by token. ``base`` is the byte of the array it begins at."""

    def __init__(self, text: str, encoding: str, base: int, place: Place, limits: Limits):
        # A header is filled up with spaces; a search for a token that begins at any of
        # them would go to the end again and again.
        self.text = text.rstrip(" \t\r\n")
        self.encoding = encoding
        self.base = base
        self.place = place
        self.limits = limits
        self.at = 0
        self.kind = self.token = ""
        self.shape_at = self._where()

    def header(self, skip: int) -> Header:
        """All of it; ``skip`` is where the data begins."""
        self._check_bounds()
        found: dict[str, Any] = {}
        self._next()
        self._expect("{", "header")
        read = {"descr": self._descr, "fortran_order": self._bool, "shape": self._shape}
        while self.token != "}":
            key = self.token[1:-1] if self.kind == "string" else ""
            if key not in _KEYS or key in found:
                problem = "there twice" if key in found else "not a key of a header"
                raise self._bad(f"header: {problem}", f"each of {', '.join(_KEYS)} once")
            self._next()
            self._expect(":", key)
            found[key] = read[key]()
            if self.token != "}":
                self._expect(",", key)
        self._next()
        if self.kind:
            raise self._bad("header: more after its end", "spaces")
        absent = [key for key in _KEYS if key not in found]
        if absent:
            expected = f"the keys {', '.join(_KEYS)}"
            raise self._bad("header: a key is missing", expected, f"no {', '.join(absent)}")
        dtype, swap = found["descr"]
        self._check_total(dtype, found["shape"])
        return Header(dtype, found["shape"], found["fortran_order"], swap, skip)

    def _check_bounds(self) -> None:
        """Brackets and signs inside one another, and the digits of numbers, before all else."""
        depth = deepest = signs = longest = 0
        for match in _TOKEN.finditer(self.text):
            token = match[match.lastgroup or 0]
            signs = signs + 1 if token in "+-~" else 0
            depth += (token in "([{") - (token in ")]}")
            deepest = max(deepest, depth, signs)
            if match.lastgroup == "number":
                longest = max(longest, len(token))
        for option, value, what in (
            ("json_depth", deepest, "brackets and signs inside one another"),
            ("json_digits", longest, "digits of a number"),
        ):
            if value > getattr(self.limits, option):
                problem = f"header: too many {what}"
                raise self.limits.error(problem, option, value, **self.place.at(self.base))

    def _next(self) -> None:
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            # What is left is white space, or nothing.
            self.at, self.kind, self.token = len(self.text), "", ""
            return
        self.at, self.kind = match.end(), match.lastgroup or ""
        self.token = match[self.kind]

    def _expect(self, mark: str, field: str) -> None:
        if self.token != mark:
            raise self._bad(f"{field}: not as NumPy writes it", repr(mark))
        self._next()

    def _where(self) -> dict[str, Any]:
        before = self.text[: self.at - len(self.token)].encode(self.encoding)
        return self.place.at(self.base + len(before))

    def _bad(self, problem: str, expected: str, found: str | None = None) -> CheckpointError:
        """The error at the current token; a call, a subscript or an attribute there is code."""
        if self.kind == "word" and re.match(r"\s*[(.\[]", self.text[self.at :]):
            rest = self.text[self.at - len(self.token) :][:80]
            return CheckpointUnsafeError(
                "header: code instead of a value",
                expected=expected,
                found=repr(rest),
                hint="It is not run. Do not trust this file.",
                **self._where(),
            )
        shown = repr(self.token[:80]) if self.kind else "the end of the header"
        return CheckpointFormatError(
            problem, expected=expected, found=found or shown, **self._where()
        )

    def _bool(self) -> bool:
        value = {"True": True, "False": False}.get(self.token)
        if value is None:
            raise self._bad("fortran_order: not a boolean", "True or False")
        self._next()
        return value

    def _shape(self) -> tuple[int, ...]:
        self.shape_at, sizes, comma = self._where(), [], True
        if self.token != "(":
            raise self._bad("shape: not a tuple", "a tuple of integers >= 0")
        self._next()
        while self.token != ")":
            match = _SIZE.fullmatch(self.token) if comma else None
            if match is None or len(match[1]) > _DIGITS:
                raise self._bad("shape: not a size", "an integer >= 0")
            sizes.append(int(match[1]))
            self._next()
            comma = self.token == ","
            if comma:
                self._next()
        if len(sizes) == 1 and not comma:
            raise self._bad("shape: not a tuple", "a tuple of integers >= 0", f"({sizes[0]})")
        if len(sizes) > MAX_DIMS:
            problem, most = "shape: too many dimensions", f"<= {MAX_DIMS}"
            raise CheckpointFormatError(problem, expected=most, found=len(sizes), **self.shape_at)
        self._next()
        return tuple(sizes)

    def _check_total(self, dtype: Any, shape: tuple[int, ...]) -> None:
        """No array that no machine could hold, whatever a product of its sizes wraps around to."""
        if isinstance(dtype, UnknownType):
            return
        nbytes = prod(size or 1 for size in shape) * dtype.np.itemsize
        if nbytes >= 2**63 and 0 not in shape:
            raise CheckpointFormatError(
                f"shape: no array has the size {list(shape)}",
                expected="less than 2**63 bytes",
                found=nbytes,
                **self.shape_at,
            )
        if nbytes > self.limits.tensor_bytes:
            problem = "shape: the dimensions other than 0 are too large"
            raise self.limits.error(problem, "tensor_bytes", nbytes, **self.shape_at)

    def _descr(self) -> tuple[Any, bool]:
        expected = f"one of {', '.join(_DTYPES)} with '<', '>' or '|'"
        if self.token in _PAIRS:
            error = self._structured(expected)
            if not isinstance(error, CheckpointFormatError) or not self.kind:
                raise error
            self._next()
            return UnknownType("a structured dtype", error), False
        if self.kind != "string":
            raise self._bad("descr: not a type", expected)
        descr = self.token[1:-1]
        order, dtype = descr[:1], _DTYPES.get(descr[1:])
        if dtype is None or order not in ("|" if dtype.np.itemsize == 1 else "<>"):
            error = self._unsupported(descr, expected)
            if not isinstance(error, CheckpointFormatError):
                raise error
            self._next()
            return UnknownType(descr[:80], error), False
        self._next()
        little = order == "<" if order != "|" else sys.byteorder == "little"
        return dtype, little != (sys.byteorder == "little")

    def _structured(self, expected: str) -> CheckpointError:
        """The error for a type of several fields; Python objects may be among them."""
        where, depth = self._where(), 0
        while self.kind:
            if self.kind == "string" and _OBJECT.fullmatch(self.token[1:-1]):
                return self._object()
            if self.kind == "word":
                error = self._bad("descr: not a type", expected)
                if isinstance(error, CheckpointUnsafeError):
                    return error
            depth += (self.token in _PAIRS) - (self.token in _PAIRS.values())
            if not depth:
                break
            self._next()
        return CheckpointFormatError(
            "descr: several fields in one value",
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
                "NumPy does not save the names of bfloat16 and float8: save the array's bits "
                "(array.view('uint16')), or safetensors."
            )
        found = repr(descr[:80])
        return CheckpointFormatError(
            problem, expected=expected, found=found, hint=hint, **self._where()
        )
