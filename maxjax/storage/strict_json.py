"""A strict JSON reader, which refuses text that two parsers could read differently.

It accepts UTF-8 without a byte order mark, without duplicate keys, lone surrogates or NaN, and with
bounded depth (checked before the recursive parser starts) and digits. It reads headers, indexes,
configurations and tokenizers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from ..errors import CheckpointError, CheckpointFormatError, CheckpointTruncatedError, shown
from .files import OpenFile, read_whole
from .limits import Limits, digits_hint, in_force
from .signatures import SNIFF_BYTES, foreign

_ENCODINGS = {
    b"\xef\xbb\xbf": "a UTF-8 byte order mark",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"{\0": "UTF-16 or UTF-32",
    b"\0{": "UTF-16",
    b"\0\0": "NUL bytes",
}
# In a text without escaped backslashes: a high surrogate without a low one after it, or a low one
# without a high one before it. The common prefix comes first, which makes the search 40 times as fast.
LONE_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
# All bytes other than quotes and brackets.
_PLAIN = bytes(byte for byte in range(256) if byte not in b'"[]{}')
_STEP = np.zeros(256, np.int8)
_STEP[list(b"{[")] = 1
_STEP[list(b"}]")] = -1
# A run of twice as many digits certainly fills one aligned stretch of this length.
_DIGITS = 256


def foreign_encoding(data: bytes) -> str | None:
    """The name of the encoding or mark that a text other than plain UTF-8 begins with, or None.

    Example:
        >>> foreign_encoding("{}".encode("utf-16")), foreign_encoding(b"{}")
        ('UTF-16', None)
    """
    return next((what for mark, what in _ENCODINGS.items() if data.startswith(mark)), None)


def without_escaped_quotes(data: bytes) -> bytes:
    """``data`` with blanks for escaped backslashes and quotes, so that all remaining ones are literal.

    Example:
        >>> without_escaped_quotes(rb'{"a\\"b": 1}')
        b'{"a  b": 1}'
    """
    if b"\\" not in data:
        return data
    return data.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")


def structure(
    data: bytes, bounds: tuple[int, int] | None = None, *, chunk: int = 1 << 20
) -> tuple[int, int, bool]:
    """(greatest depth, number of arrays and objects, whether a run of digits is long) of a JSON text.

    ``data`` must have no escaped quotes. The result is exact for valid JSON; for other text it is
    exact up to the first error, where a parser stops. The scan stops soon after depth or number
    exceed ``bounds``.

    Example:
        >>> structure(b'{"a[": [1, [2]], "b": {}}')
        (3, 4, False)
    """
    inside, depth, deepest, containers, digits = np.uint8(0), 0, 0, 0, False
    for start in range(0, len(data), chunk):
        piece = data[start : start + chunk]
        marks = np.frombuffer(piece.translate(None, _PLAIN), np.uint8)
        if marks.size:
            quoted = np.bitwise_xor.accumulate((marks == 34).view(np.uint8)) ^ inside
            step = _STEP[marks] * (quoted ^ 1).view(np.int8)
            level = np.cumsum(step, dtype=np.int32) + np.int32(depth)
            deepest = max(deepest, int(level.max()))
            depth, inside = int(level[-1]), quoted[-1]
            containers += int(np.count_nonzero(step == 1))
        stretches = np.frombuffer(piece, np.uint8, len(piece) // _DIGITS * _DIGITS)
        runs = (stretches.reshape(-1, _DIGITS) - np.uint8(48)) < 10
        digits = digits or bool(runs.all(axis=1).any())
        if bounds and (deepest > bounds[0] or containers > bounds[1]):
            break
    return deepest, containers, digits


def decoded_bytes(data: bytes, *, chunk: int = 1 << 20) -> int:
    """The bytes that Python takes for UTF-8 text once it is decoded: up to four for each character.

    Example:
        >>> decoded_bytes("abc".encode()), decoded_bytes("ab\U0001f642".encode())
        (3, 12)
    """
    if data.isascii():
        return len(data)
    inside = highest = 0
    for start in range(0, len(data), chunk):
        piece = np.frombuffer(data[start : start + chunk], np.uint8)
        inside += int(np.count_nonzero(piece & np.uint8(0xC0) == np.uint8(0x80)))
        highest = max(highest, int(piece.max()))
    # The first byte of a character tells how many bytes Python takes for each of the text's.
    return (len(data) - inside) * (4 if highest >= 0xF0 else 2 if highest >= 0xC4 else 1)


KeyPath = tuple[str | int, ...]


def load_json(
    source: str | os.PathLike[str] | bytes | OpenFile,
    *,
    limits: Limits | None = None,
    allow_nan: bool = False,
    name: str | None = None,
    option: str = "json_bytes",
) -> Any:
    """Reads the value of a JSON file (a path or an open file) or of bytes, strictly.

    ``allow_nan`` accepts NaN and Infinity, which some published configurations contain.
    ``name`` replaces the path in messages if ``source`` is bytes. ``option`` is the limit on the size
    of a file.

    Raises:
        CheckpointFormatError: the text is not JSON or not UTF-8, or has a duplicate key or NaN.
        CheckpointTruncatedError: the text ends before the value does.
        CheckpointLimitError: the text is too long or too deep, or a number has too many digits.
        CheckpointMissingError, CheckpointAccessError: as for ``open_regular``.

    Example:
        >>> load_json(b'{"hidden_size": 384}')
        {'hidden_size': 384}
        >>> load_json(b'{"a": 1, "a": 2}', name="config.json")
        Traceback (most recent call last):
        maxjax.errors.CheckpointFormatError: config.json: at byte 9: key 'a' occurs twice ...
    """
    limits = in_force(limits)
    if isinstance(source, bytes):
        return Text(source, name or "<bytes>", limits).parse(allow_nan=allow_nan)
    data = read_json_bytes(source, limits, option)
    return Text(data, _path_of(source), limits).parse(allow_nan=allow_nan)


def read_json_bytes(
    source: str | os.PathLike[str] | OpenFile, limits: Limits, option: str = "json_bytes"
) -> bytes:
    """The bytes of a JSON file; a file that is recognisably something else is refused."""
    data = read_whole(source, limits, option)
    if error := foreign(_path_of(source), data[:SNIFF_BYTES], "JSON text"):
        raise error
    return data


def _path_of(source: str | os.PathLike[str] | OpenFile) -> str:
    return source.path if isinstance(source, OpenFile) else os.fspath(source)


def require(
    holds: bool,
    path: str,
    what: str,
    expected: str,
    found: Any,
    tensor: str | None = None,
    *,
    hint: str | None = None,
) -> None:
    """Raises the error of :func:`invalid` unless a condition holds."""
    if not holds:
        raise invalid(path, what, expected, found, tensor, hint=hint)


def invalid(
    path: str,
    what: str,
    expected: str,
    found: Any,
    tensor: str | None = None,
    *,
    hint: str | None = None,
) -> CheckpointFormatError:
    """The error for a field with an invalid value."""
    problem, found = f"invalid {what}", shown(found)
    return CheckpointFormatError(
        problem, path=path, tensor=tensor, expected=expected, found=found, hint=hint
    )


class Constant(float):
    """NaN or an infinity from a JSON text; the separate type allows finding it in the value."""


@dataclass
class Text:
    """A JSON text, with the context that its error messages need.

    ``base`` is the offset of ``data`` in the file at ``path``; ``tensor_of`` maps a path of keys to
    the tensor it belongs to; ``truncated`` is the exception class for a text that ends too early.
    """

    data: bytes
    path: str
    limits: Limits
    base: int = 0
    tensor_of: Callable[[KeyPath], str | None] = lambda keys: None
    truncated: type[CheckpointError] = CheckpointTruncatedError
    _repeated: list[tuple[dict, str]] = field(default_factory=list)
    _constants: list[Constant] = field(default_factory=list)
    _long: list[str] = field(default_factory=list)

    def parse(self, *, allow_nan: bool = False) -> Any:
        """Parses the value; every exception is a CheckpointError with path and offset."""
        # Shorter runs of digits than these are not looked for before parsing.
        long_digits = self._check_bytes() or self.limits.json_digits < 2 * _DIGITS
        try:
            text = self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            self._bad_utf8(error)
        decoder = json.JSONDecoder(
            object_pairs_hook=self._object,
            # With allow_nan, NaN and infinities are plain floats.
            parse_constant=float if allow_nan else self._constant,
            # Used only if necessary: the built-in conversion is much faster.
            parse_int=self._integer if long_digits or b"-0" in self.data else None,
        )
        try:
            value = decoder.decode(text)
        except json.JSONDecodeError as error:
            self._bad_json(text, error)
        except RecursionError:  # the limit was raised above what Python can parse
            problem = "nested deeper than Python can parse"
            fixed = "No value of json_depth allows it."
            raise self.limits.error(
                problem, "json_depth", "more", fixed=fixed, path=self.path
            ) from None
        self._check_flaws(value)
        return value

    def error(
        self,
        problem: str,
        keys: KeyPath = (),
        *,
        cls: type[CheckpointError] = CheckpointFormatError,
        **more,
    ) -> CheckpointError:
        """An error at the value that ``keys`` leads to; it names the tensor."""
        return cls(problem, **{**self.where(keys), **more})

    def where(self, keys: KeyPath = ()) -> dict[str, Any]:
        """``path``, ``tensor`` and ``offset`` for an error at the value that ``keys`` leads to."""
        tensor = self.tensor_of(keys) if keys else None
        return {"path": self.path, "tensor": tensor, "offset": self.locate(keys)}

    def locate(self, keys: KeyPath) -> int:
        """The offset in the file of the last of ``keys`` that can be found, searched in order.

        This is a text search, exact enough for a message, and not a second parser.
        """
        position = 0
        for key in keys:
            if isinstance(key, str):
                at = self._find(key, position)
                if at < 0:
                    break
                position = at
        return self.base + position

    def _find(self, key: str, start: int) -> int:
        """The index of ``key`` used as a key, from ``start`` on, or -1; a long key matches by prefix."""
        long = len(key) > _LONG_KEY
        key = key[:_LONG_KEY]
        for token in (json.dumps(key, ensure_ascii=False), json.dumps(key)):
            token = token.encode("utf-8", "surrogatepass")[: -1 if long else None]
            at = self.data.find(token, start)
            while at >= 0 and not (long or _COLON.match(self.data, at + len(token))):
                at = self.data.find(token, at + 1)
            if at >= 0:
                return at
        return -1

    # --- before parsing ---

    def _check_bytes(self) -> bool:
        """Refuses errors visible without parsing; returns True if a number may have too many digits."""
        # Those inside strings count too, because the check comes before the parser.
        values = self.data.count(b",")
        if b"\\" in self.data:  # a search for two bytes takes 30 times as long
            values += self.data.count(b"\\u")
        # A key with its value takes more than twice as much memory and time as a value in a list.
        values = max(values, 2 * self.data.count(b'":'))
        where = {"path": self.path}
        self.limits.check("json_values", values, "the JSON text has too many values", **where)
        decoded = decoded_bytes(self.data)
        if decoded > 2 * max(self.limits.json_bytes, self.limits.header_bytes):
            problem = "the JSON text takes too many bytes in memory"
            raise self.limits.error(problem, "json_bytes", decoded // 2, **where)
        if not _SOMETHING.search(self.data):
            found = f"{len(self.data)} bytes"
            problem = "the JSON text is empty"
            raise self.error(problem, cls=self.truncated, expected="at least 2 bytes", found=found)
        if mark := foreign_encoding(self.data):
            problem = "the JSON text must be UTF-8 without a byte order mark"
            raise self.error(problem, expected="UTF-8 text", found=mark)
        plain = without_escaped_quotes(self.data)
        if surrogate := LONE_SURROGATE.search(plain):
            raise self.error(
                "a lone surrogate is not a character",
                expected="a pair of surrogates",
                found=surrogate.group().decode(),
                offset=self.base + surrogate.start(),
            )
        # A tensor takes three arrays or objects: its entry, shape and offsets.
        bounds = self.limits.json_depth, 3 * self.limits.tensors + 8
        depth, containers, long_digits = structure(plain, bounds)
        if depth > bounds[0]:
            problem = "the JSON text is nested too deep"
            raise self.limits.error(problem, "json_depth", depth, path=self.path)
        if containers > bounds[1]:
            problem = "the JSON text has too many arrays and objects for its tensors"
            raise self.limits.error(problem, "tensors", containers // 3, path=self.path)
        return long_digits

    # --- while parsing: errors are collected, and reported when the value is complete ---

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            seen: set[str] = set()
            repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
            self._repeated.append((value, repeated))
        return value

    def _constant(self, text: str) -> Constant:
        self._constants.append(Constant(text.replace("Infinity", "inf")))
        return self._constants[-1]

    def _integer(self, text: str) -> int | float:
        if len(text) <= self.limits.json_digits:
            with suppress(ValueError):  # the interpreter has its own limit
                # JSON's -0 is not the integer 0: other parsers read it as a float.
                return -0.0 if text == "-0" else int(text)
        self._long.append(text)
        return 0

    # --- after parsing ---

    def _check_flaws(self, value: Any) -> None:
        if self._long:
            digits = max(map(len, self._long))
            offset = self.base + max(self.data.find(self._long[0].encode()), 0)
            raise self.limits.error(
                "a number has too many digits",
                "json_digits",
                digits,
                fixed=digits_hint(digits),
                path=self.path,
                offset=offset,
            )
        for owner, key in self._repeated:
            keys = (*_path_to(value, owner), key)
            first = self.locate(keys) - self.base
            again = self._find(key, first + 1)
            raise self.error(
                f"key '{key}' occurs twice",
                keys,
                offset=self.base + (again if again >= 0 else first),
                expected="each key once",
                found="a second one",
                hint="JSON parsers differ in which value they use. Write the file again.",
            )
        if self._constants:
            constant = self._constants[0]
            keys = _path_to(value, constant)
            fields = ".".join(map(str, keys))
            raise self.error(
                f"'{fields}' is not a JSON number",
                keys,
                expected="a JSON number",
                found=float(constant),
            )

    def _bad_utf8(self, error: UnicodeDecodeError) -> NoReturn:
        truncated = error.reason == "unexpected end of data"
        raise self.error(
            "the JSON text ends inside a character" if truncated else "the JSON text is not UTF-8",
            cls=self.truncated if truncated else CheckpointFormatError,
            offset=self.base + error.start,
            expected="UTF-8 text",
            found=f"byte {error.object[error.start]:02X}",
        ) from error

    def _bad_json(self, text: str, error: json.JSONDecodeError) -> NoReturn:
        rest = text[error.pos :]
        truncated = error.msg.startswith("Unterminated") or _CUT.fullmatch(rest)
        raise self.error(
            "the JSON text ends too early" if truncated else f"not valid JSON: {error.msg}",
            cls=self.truncated if truncated else CheckpointFormatError,
            offset=self.base + len(text[: error.pos].encode()),
            expected=f"more than {len(self.data)} bytes" if truncated else "JSON",
            found=f"{len(self.data)} bytes" if truncated else repr(rest[:20]),
        ) from error


# Anything but white space; a search makes no copy.
_SOMETHING = re.compile(rb"[^ \t\r\n]")
# Length of the prefix by which a long key is searched.
_LONG_KEY = 1000
_COLON = re.compile(rb"[ \t\r\n]*:")
# What may remain of a text that was truncated inside a literal.
_CUT = re.compile(r"\s*(-|t|tr|tru|f|fa|fal|fals|n|nu|nul)?\s*")


def _path_to(value: Any, target: Any) -> KeyPath:
    """The keys that lead from ``value`` to the object ``target``, compared by identity."""
    stack: list[tuple[KeyPath, Any]] = [((), value)]
    while stack:
        keys, here = stack.pop()
        if here is target:
            return keys
        if isinstance(here, dict):
            stack.extend(((*keys, key), item) for key, item in here.items())
        elif isinstance(here, list):
            stack.extend(((*keys, i), item) for i, item in enumerate(here))
    return ()
