"""Floor 1. What a JSON text shows without being parsed: encoding, depth, size, surrogates.

One linear pass in little memory, so that a hostile text is refused before the recursive
parser starts. Below: NumPy. Above: jsontext.
"""

from __future__ import annotations

import re

import numpy as np

_ENCODINGS = {
    b"\xef\xbb\xbf": "a UTF-8 byte order mark",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"{\0": "UTF-16 or UTF-32",
    b"\0{": "UTF-16",
    b"\0\0": "NUL bytes",
}
# In a text without escaped backslashes: a high one not followed, or a low one not preceded.
# What both begin with stands before the choice: the search is forty times as fast for it.
LONE_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
# All that neither opens nor closes anything.
_PLAIN = bytes(byte for byte in range(256) if byte not in b'"[]{}')
_STEP = np.zeros(256, np.int8)
_STEP[list(b"{[")] = 1
_STEP[list(b"}]")] = -1
# A run of twice as many digits fills one aligned stretch of this length for certain.
_DIGITS = 256


def foreign_encoding(data: bytes) -> str | None:
    """What a text that is not plain UTF-8 begins with, or None.

    Example:
        >>> foreign_encoding("{}".encode("utf-16")), foreign_encoding(b"{}")
        ('UTF-16', None)
    """
    return next((what for mark, what in _ENCODINGS.items() if data.startswith(mark)), None)


def without_escaped_quotes(data: bytes) -> bytes:
    """``data`` with blanks for escaped backslashes and quotes: what remains means itself.

    Example:
        >>> without_escaped_quotes(rb'{"a\\"b": 1}')
        b'{"a  b": 1}'
    """
    if b"\\" not in data:
        return data
    return data.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")


def structure(
    data: bytes, most: tuple[int, int] | None = None, *, chunk: int = 1 << 20
) -> tuple[int, int, bool]:
    """(greatest depth, number of arrays and objects, any long run of digits) of a JSON text.

    ``data`` has no escaped quotes. Exact for valid JSON; of other text, exact up to its first
    mistake, which is as far as a parser gets. Stops soon after depth or number pass ``most``.

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
        if most and (deepest > most[0] or containers > most[1]):
            break
    return deepest, containers, digits
