"""Writer of the GGUF format: typed metadata, a table of tensors, aligned data.

It writes version 3, little-endian, in one file. Everything before the data is created and checked
first; then the tensors are streamed one after another.

Source: docs/gguf.md of the ggml repository; the order and the padding are those of the gguf
package's ``GGUFWriter``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ...errors import UserInputError
from ..save.outgoing import Outgoing
from .header import ALIGNMENT_KEY, MAGIC, MAX_DIMS, MAX_NAME, padded
from .types import GGML_TYPES, GGML_TYPES_BY_NAME, GgmlType
from .values import ARRAY, BOOL, KEY_BYTES, STRING

_VERSION, _ALIGNMENT = 3, 32
# NumPy dtype → number of the value type in the file.
_KINDS = {
    "u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": BOOL, "u8": 10, "i8": 11,
    "f8": 12,
}  # fmt: skip
_PLAIN = {kind.dtype: kind for kind in GGML_TYPES.values() if kind.dtype is not None}


@dataclass(frozen=True, slots=True)
class GGUFPlan:
    """A GGUF file that is ready to be written.

    Attributes:
        header: all bytes before the data, including padding.
        tensors: tensors of the data, in order.
        alignment: alignment in bytes, to which each tensor is padded.
    """

    header: bytes
    tensors: tuple[Outgoing, ...]
    alignment: int

    @property
    def nbytes(self) -> int:
        """Number of bytes of the whole file."""
        return len(self.header) + sum(padded(t.nbytes, self.alignment) for t in self.tensors)

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file in order; a piece is valid until the next one.

        Raises:
            UserInputError: a tensor has more or fewer bytes than its shape says.
        """
        yield memoryview(self.header)
        for tensor in self.tensors:
            done = 0
            for piece in tensor.pieces():
                done += piece.nbytes
                yield piece
            if done != tensor.nbytes:
                raise UserInputError(
                    f"tensor {tensor.name!r} has {done} bytes, but its shape "
                    f"{list(tensor.shape)} of {tensor.dtype.name} needs {tensor.nbytes}"
                )
            if rest := padded(done, self.alignment) - done:
                yield memoryview(bytes(rest))


def plan_gguf(metadata: Mapping[str, Any], tensors: Sequence[Outgoing]) -> GGUFPlan:
    """Plans a GGUF file of the given metadata and tensors, without reading their data.

    Args:
        metadata: key → value, in the file's order. Python values get the types that llama.cpp
            expects: an int is uint32 if it fits, else int32, else 64 bits; a float is float32; a
            list of ints is int32 if all fit. NumPy scalars and one-dimensional arrays keep their
            dtype. Lists may hold strings, numbers, bools or lists. "general.alignment" sets the alignment.
        tensors: tensors to write. Their names are written unchanged, their axes in GGUF's reversed
            order. Tensors with an ``encoding`` are uint8, and their last axis counts bytes.

    Raises:
        UserInputError: the format cannot hold a value; the message names the key or tensor.

    Example:
        >>> from maxjax.storage.save.outgoing import outgoing
        >>> plan = plan_gguf({"k.n": "hi"}, [outgoing("w", np.ones((2, 3), np.int8))])
        >>> plan.nbytes, [bytes(piece)[:6] for piece in plan.pieces()][1:]
        (128, [b'\\x01\\x01\\x01\\x01\\x01\\x01', b'\\x00\\x00\\x00\\x00\\x00\\x00'])
    """
    alignment = _alignment(metadata)
    parts = [struct.pack("<4sI2Q", MAGIC, _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        # Readers accept the alignment only as uint32.
        parts += (_key(key), _value(key, np.uint32(alignment) if key == ALIGNMENT_KEY else value))
    names: set[str] = set()
    offsets = accumulate((padded(t.nbytes, alignment) for t in tensors), initial=0)
    for tensor, offset in zip(tensors, offsets, strict=False):
        if tensor.name in names:
            raise UserInputError(f"two tensors are named {tensor.name!r}")
        names.add(tensor.name)
        parts.append(_row(tensor, offset))
    header = b"".join(parts)
    header += bytes(padded(len(header), alignment) - len(header))
    return GGUFPlan(header, tuple(tensors), alignment)


# --- the table ----------------------------------------------------------------------------------


def _row(tensor: Outgoing, offset: int) -> bytes:
    kind, dims = ggml_type(tensor), tensor.shape[::-1]
    if tensor.encoding is not None:
        dims = (dims[0] // kind.nbytes * kind.elements, *dims[1:])
    name = _utf8(tensor.name, "tensor", "strict")
    if not 0 < len(name) <= MAX_NAME or b"\0" in name:
        raise UserInputError(
            f"tensor {tensor.name[:80]!r}: GGUF's names have 1 to {MAX_NAME} bytes and no NUL"
        )
    if len(dims) > MAX_DIMS:
        raise UserInputError(
            f"tensor {tensor.name!r} has {len(dims)} axes; GGUF has at most {MAX_DIMS}"
        )
    numbers = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind.number, offset)
    return struct.pack("<Q", len(name)) + name + numbers


def ggml_type(tensor: Outgoing) -> GgmlType:
    """The ggml type of a tensor.

    Raises:
        UserInputError: GGUF has no such type, or the rows are not whole blocks.
    """
    if tensor.encoding is None:
        kind = _PLAIN.get(tensor.dtype)
        if kind is None:
            raise UserInputError(
                f"tensor {tensor.name!r}: GGUF cannot store {tensor.dtype.name}: convert it to bfloat16, "
                "float16 or float32"
            )
        return kind
    kind = GGML_TYPES_BY_NAME.get(tensor.encoding)
    if kind is None or kind.dtype is not None:
        raise UserInputError(f"tensor {tensor.name!r}: GGUF has no block type {tensor.encoding!r}")
    if not tensor.shape or tensor.shape[-1] % kind.nbytes or tensor.dtype.np != np.uint8:
        raise UserInputError(
            f"tensor {tensor.name!r}: {tensor.dtype.name} {list(tensor.shape)} is not rows of complete "
            f"{kind.name} blocks of {kind.nbytes} bytes"
        )
    return kind


# --- metadata -----------------------------------------------------------------------------------


def _alignment(metadata: Mapping[str, Any]) -> int:
    given = metadata.get(ALIGNMENT_KEY, _ALIGNMENT)
    value = given.item() if isinstance(given, np.generic) else given
    if type(value) is not int or not 0 < value < 1 << 32 or value & (value - 1):
        raise UserInputError(f"{ALIGNMENT_KEY!r} must be a power of two, not {given!r}")
    return value


def _key(key: str) -> bytes:
    raw = _utf8(key, "metadata key", "strict")
    if not 0 < len(raw) <= KEY_BYTES or b"\0" in raw:
        raise UserInputError(
            f"metadata key {key[:80]!r}: GGUF's keys have 1 to {KEY_BYTES} bytes and no NUL"
        )
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    """The bytes of a value: the number of its type, then the value."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(key, value)
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        return struct.pack("<I", ARRAY) + _array(key, value)
    kind, raw = _numbers(key, [value] if type(value) in (int, float, bool) else value)
    return struct.pack("<I", kind) + raw


def _array(key: str, values: Any) -> bytes:
    """The bytes of an array: the type and number of its items, then the items."""
    head, count = "<IQ", len(values)
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = list(values)
    if isinstance(values, np.ndarray):
        kind, raw = _numbers(key, values)
        return struct.pack(head, kind, count) + raw
    if all(isinstance(value, str) for value in values):  # an empty list counts as strings
        return struct.pack(head, STRING, count) + b"".join(_string(key, v) for v in values)
    if all(isinstance(value, (list, tuple, np.ndarray)) for value in values):
        return struct.pack(head, ARRAY, count) + b"".join(_array(key, value) for value in values)
    if any(isinstance(value, (str, list, tuple)) for value in values):
        raise UserInputError(f"metadata key {key!r}: the items of a list must have one type")
    kind, raw = _numbers(key, values, of_list=True)
    return struct.pack(head, kind, count) + raw


def _string(key: str, text: str) -> bytes:
    raw = _utf8(text, f"metadata key {key!r}:", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _utf8(text: str, what: str, errors: str) -> bytes:
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError:
        raise UserInputError(f"{what} {ascii(text[:80])} is not valid Unicode") from None


def _numbers(key: str, values: Any, of_list: bool = False) -> tuple[int, bytes]:
    """The number of the type, and the bytes; Python numbers get the type that llama.cpp expects."""
    dtype = values.dtype if isinstance(values, (np.ndarray, np.generic)) else None
    if dtype is None and isinstance(values, list):
        dtype = _dtype(values, ("i4", "u4") if of_list else ("u4", "i4"))
    kind = _KINDS.get(f"{dtype.kind}{dtype.itemsize}") if dtype is not None else None
    if kind is None or dtype is None:
        raise UserInputError(
            f"metadata key {key!r}: GGUF cannot store a {type(values).__name__}, only strings, numbers "
            "of up to 64 bits, bools, and lists of these"
        )
    return kind, np.asarray(values, dtype).astype(dtype.newbyteorder("<")).tobytes()


def _dtype(values: list[Any], small: tuple[str, str]) -> np.dtype | None:
    """The dtype for Python numbers of one kind, or None."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return np.dtype(bool)
    if kinds == {int}:
        low, high = min(values), max(values)
        limits = [np.iinfo(np.dtype(code)) for code in (*small, "i8", "u8")]
        return next((i.dtype for i in limits if i.min <= low and high <= i.max), None)
    if kinds == {float} or kinds == {int, float}:
        return np.dtype(np.float32)
    if len(kinds) == 1 and issubclass(next(iter(kinds)), np.generic):
        return values[0].dtype
    return None
