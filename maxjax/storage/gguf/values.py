"""A cursor over the header of a GGUF file, which reads its values and metadata.

The header is read in blocks. Each length and count is compared with the bytes that the file really
has before anything is allocated for it.

Source: docs/gguf.md of the ggml repository.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ...errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointTruncatedError,
)
from ..files import DOWNLOAD_AGAIN, OpenFile
from ..limits import Limits

# Bytes of one read of the header.
BLOCK_BYTES = 1 << 20
# Lengths and sizes from here on are invalid: no file has so many bytes.
MAX_LENGTH = 1 << 63

BOOL, STRING, ARRAY, UINT32 = 7, 8, 9, 4
# Number of a value type → its NumPy dtype without byte order.
_NUMBERS = {
    0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", BOOL: "u1", 10: "u8", 11: "i8",
    12: "f8",
}  # fmt: skip
_STRUCTS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
_WIDTHS = {kind: int(code[1]) for kind, code in _NUMBERS.items()}
# The minimum bytes of an item of variable size: a string's length; an array's type and count.
_MIN_BYTES = {STRING: 8, ARRAY: 12}
# The weight of such an item in the limit. Arrays take longer to create, and real files nest few of
# them, so a small file full of nested arrays is refused fast.
_WEIGHTS = {STRING: 1, ARRAY: 64}
_TYPES = "a value type from 0 to 12"

KEY_BYTES = 65_535
"""The format's own bound on the length of a key."""


def number(kind: int, value: Any) -> Any:
    """A number as a NumPy scalar of its type in the file; any other value unchanged.

    Example:
        >>> number(2, 7).dtype, number(BOOL, True), number(STRING, "7")
        (dtype('uint16'), True, '7')
    """
    return value if kind in (BOOL, STRING, ARRAY) else np.dtype(_NUMBERS[kind]).type(value)


def own_limit(problem: str, expected: str, found: int, which: str, **where: Any) -> CheckpointError:
    """The error for a number over a limit that is not one of ``Limits`` but of ``which``."""
    hint = f"This limit is {which}: no option raises it."
    return CheckpointLimitError(problem, expected=expected, found=found, hint=hint, **where)


class Cursor:
    """A position in the header of an open file, with a buffered block of the file around it.

    ``order`` is the byte order of all numbers, "<" or ">"; ``position`` is a byte offset in the file.
    """

    def __init__(self, file: OpenFile, limits: Limits, order: str, position: int):
        self.file = file
        self.limits = limits
        self.order = order
        self._u32 = struct.Struct(order + "I")
        self._u64 = struct.Struct(order + "Q")
        self._items = 0
        self.seek(position)

    def seek(self, position: int) -> None:
        """Moves to another byte offset."""
        self.position = self.start = position
        self.buffer = b""

    @property
    def remaining(self) -> int:
        """Number of bytes of the file after the position."""
        return self.file.size - self.position

    def error(
        self,
        problem: str,
        expected: Any,
        found: Any,
        *,
        offset: int | None = None,
        tensor: str | None = None,
        hint: str | None = None,
        cls: type[CheckpointError] = CheckpointFormatError,
    ) -> CheckpointError:
        """An error at ``offset``, by default the current position."""
        return cls(
            problem,
            path=self.file.path,
            tensor=tensor,
            offset=self.position if offset is None else offset,
            expected=expected,
            found=found,
            hint=hint,
        )

    def truncated(self, what: str, nbytes: int, tensor: str | None = None) -> CheckpointError:
        """The error for a file that ends before the next ``nbytes`` bytes, those of ``what``."""
        return self.error(
            f"{what}: the file ends inside the header",
            f"{nbytes} bytes",
            f"{self.remaining} bytes",
            tensor=tensor,
            hint=DOWNLOAD_AGAIN,
            cls=CheckpointTruncatedError,
        )

    # --- bytes, integers, strings ---

    def take(self, nbytes: int, what: str, tensor: str | None = None) -> int:
        """Advances by ``nbytes`` bytes; returns their index in ``buffer``."""
        at = self.position - self.start
        if at + nbytes > len(self.buffer):
            self._fill(nbytes, what, tensor)
            at = 0
        self.position += nbytes
        return at

    def _fill(self, nbytes: int, what: str, tensor: str | None) -> None:
        if nbytes > self.remaining:
            raise self.truncated(what, nbytes, tensor)
        allowed = self.limits.header_bytes - self.position
        if nbytes > allowed:
            where = {"path": self.file.path, "offset": self.position, "tensor": tensor}
            problem, end = f"{what}: the header is too long", self.position + nbytes
            raise self.limits.error(problem, "header_bytes", end, **where)
        wanted = min(max(nbytes, BLOCK_BYTES), allowed, self.remaining)
        self.buffer = self.file.pread(self.position, wanted)
        self.start = self.position

    def u32(self, what: str, tensor: str | None = None) -> int:
        """An unsigned integer of 4 bytes."""
        at = self.take(4, what, tensor)
        return self._u32.unpack_from(self.buffer, at)[0]

    def u64(self, what: str) -> int:
        """An unsigned integer of 8 bytes."""
        at = self.take(8, what)
        return self._u64.unpack_from(self.buffer, at)[0]

    def string(self, what: str) -> bytes:
        """A string: 8 bytes of length, then its bytes."""
        length = self.u64(what)
        if length >= MAX_LENGTH:
            raise self.error(f"{what}: not a length", f"<= {self.remaining}", length)
        at = self.take(length, what)
        return self.buffer[at : at + length]

    # --- keys and values ---

    def key(self, number: int) -> str:
        """The name of the ``number``-th key of the file, counted from 1."""
        what, position = f"key {number}: name", self.position
        length = self.u64(what)
        if length > KEY_BYTES:
            raise self._long_key(what, length, position)
        if not length:
            raise self.error(
                f"{what}: is empty", "at least 1 byte", "0 bytes", offset=position,
                cls=CheckpointTruncatedError,
            )  # fmt: skip
        at = self.take(length, what)
        return self.name(self.buffer[at : at + length], "key", number, position)

    def _long_key(self, what: str, length: int, position: int) -> CheckpointError:
        if length < MAX_LENGTH and length > self.remaining:
            problem, expected = (
                f"{what}: longer than the file, and than a name may be",
                f"at most {KEY_BYTES} bytes",
            )
            where = {"path": self.file.path, "offset": position}
            return own_limit(problem, expected, length, "the format's own", **where)
        problem, expected = f"{what}: too long", f"at most {KEY_BYTES} bytes"
        return self.error(problem, expected, length, offset=position)

    def name(self, raw: bytes, of: str, number: int, position: int) -> str:
        """Decodes the name of the ``number``-th "key" or "tensor"; refuses a NUL, which ends it in C."""
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            problem = f"{of} {number}: name: not UTF-8"
            found = f"byte {raw[error.start]:02X}"
            raise self.error(problem, "UTF-8", found, offset=position + 8 + error.start) from error
        if "\0" in text:
            problem, found = f"{of} {number}: name: holds a NUL", f"'{text[:80]}'"
            raise self.error(problem, "text without NUL", found, offset=position)
        return text

    def value(self, kind: int, what: str) -> Any:
        """A value of the type ``kind``: int, float, bool, str, an array of numbers, or a list.

        Invalid UTF-8 bytes in a string become lone surrogates ("surrogateescape").
        """
        if kind == STRING:
            return self.string(what).decode("utf-8", "surrogateescape")
        if kind == ARRAY:
            return self._array(what)
        code = _STRUCTS.get(kind)
        if code is None:
            raise self.error(f"{what}: unknown value type", _TYPES, kind, offset=self.position - 4)
        at = self.take(_WIDTHS[kind], what)
        (value,) = struct.unpack_from(self.order + code, self.buffer, at)
        if kind == BOOL:
            if value > 1:
                raise self._not_bool(what, value, self.position - 1)
            return value == 1
        return value

    def _not_bool(self, what: str, found: int, position: int) -> CheckpointError:
        return self.error(f"{what}: a boolean must be 0 or 1", "0 or 1", found, offset=position)

    def _array(self, what: str) -> Any:
        """An array; nested arrays are read with an explicit stack, which cannot overflow."""
        outermost: list[Any] = []
        # The lists that nested arrays are appended to, with the number of arrays left.
        stack: list[tuple[list[Any], int]] = [(outermost, 1)]
        while stack:
            values, left = stack.pop()
            if not left:
                continue
            stack.append((values, left - 1))
            kind, count = self._array_head(what, len(stack))
            if kind == ARRAY:
                inner: list[Any] = []
                values.append(inner)
                stack.append((inner, count))
            else:
                plain = kind != STRING
                values.append(
                    self._numbers(kind, count, what) if plain else self._strings(count, what)
                )
        return outermost[0]

    def _array_head(self, what: str, depth: int) -> tuple[int, int]:
        """The type and number of an array's items, checked against the rest of the file."""
        position = self.position
        where = {"path": self.file.path, "offset": position}
        if depth > self.limits.array_depth:
            raise self.limits.error(f"{what}: arrays too deep", "array_depth", depth, **where)
        kind, count = self.u32(what), self.u64(what)
        if kind in _MIN_BYTES:
            self._items += count * _WEIGHTS[kind]
            if self._items > self.limits.array_items:
                problem = f"{what}: too many items in arrays"
                raise self.limits.error(problem, "array_items", self._items, **where)
            if count * _MIN_BYTES[kind] > self.remaining:
                raise self.truncated(what, count * _MIN_BYTES[kind])
        elif kind not in _NUMBERS:
            raise self.error(f"{what}: unknown type of array", _TYPES, kind, offset=position)
        elif count * _WIDTHS[kind] >= MAX_LENGTH:
            expected = f"<= {self.remaining // _WIDTHS[kind]}"
            raise self.error(f"{what}: array length", expected, count, offset=position + 4)
        return kind, count

    def _numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        position, dtype = self.position, np.dtype(self.order + _NUMBERS[kind])
        at = self.take(count * dtype.itemsize, what)
        values = np.frombuffer(self.buffer, dtype, count, at)
        if kind != BOOL:
            return values.astype(dtype.newbyteorder("="))
        if count and values.max() > 1:
            index = int((values > 1).argmax())
            raise self._not_bool(what, int(values[index]), position + index)
        return values == 1

    def _strings(self, count: int, what: str) -> list[str]:
        """``count`` strings. Most lie completely in the buffer, and are read without a call."""
        values: list[str] = []
        unpack = self._u64.unpack_from
        while len(values) < count:
            buffer, at = self.buffer, self.position - self.start
            size = len(buffer)
            for _ in range(count - len(values)):
                if at + 8 > size:
                    break
                end = at + 8 + unpack(buffer, at)[0]
                if end > size:
                    break
                values.append(str(buffer[at + 8 : end], "utf-8", "surrogateescape"))
                at = end
            self.position = self.start + at
            if len(values) < count:
                values.append(self.string(what).decode("utf-8", "surrogateescape"))
        return values
