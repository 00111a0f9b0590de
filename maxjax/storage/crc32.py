"""CRC-32 (that of zip and zlib), computed about as fast as memory can be read.

The native library in ``kernels/cpu`` has versions for several processors, at 10 to 50 GB/s per core
(zlib: 1 to 3 GB/s). Without that library, zlib is used.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..native_library import function

# For fewer bytes zlib finishes before the call of the native function would.
_SMALL_BYTES = 8192
# The polynomial in reversed bit order: its highest power is the lowest bit.
_POLYNOMIAL = 0xEDB88320


@functools.cache
def _compiled() -> tuple[Callable[[int, int, int], int], str] | None:
    """The compiled function (crc, address, nbytes → crc) and its level, or None without the library."""
    # Checksums alone do not compile the library: zlib is fast enough until a model has run.
    types = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t]
    return function("maxjax_crc32", "maxjax_crc32_level", ctypes.c_uint32, types, compile=False)


def level() -> str:
    """The implementation in use: "wide_clmul", "clmul", "arm", "portable", or "zlib".

    Example:
        >>> level() in ("wide_clmul", "clmul", "arm", "portable", "zlib")
        True
    """
    compiled = _compiled()
    return "zlib" if compiled is None else compiled[1]


def is_fast() -> bool:
    """Whether checksums are fast enough not to slow down reading noticeably."""
    return level() not in ("zlib", "portable")


def crc32(buffer: Any, value: int = 0) -> int:
    """zlib's CRC-32 of ``buffer``, continued from ``value``, the CRC-32 of the preceding bytes.

    ``buffer`` is an array, bytes or a memoryview, in C order. The GIL is released meanwhile.

    Example:
        >>> crc32(b"cde", crc32(b"ab")) == zlib.crc32(b"abcde")
        True
    """
    if isinstance(buffer, np.ndarray):  # also dtypes that NumPy lacks
        buffer = buffer.reshape(-1).view(np.uint8)
    nbytes = memoryview(buffer).nbytes
    if nbytes < _SMALL_BYTES or (compiled := _compiled()) is None:
        return zlib.crc32(buffer, value)
    view = np.frombuffer(buffer, np.uint8)  # keeps the buffer alive and provides its address
    return compiled[0](value, view.ctypes.data, nbytes)


def crc32_of(pieces: Iterable[Any]) -> int:
    """The CRC-32 of the concatenated pieces.

    Example:
        >>> crc32_of([b"ab", b"cde"]) == zlib.crc32(b"abcde")
        True
    """
    crc = 0
    for piece in pieces:
        crc = crc32(piece, crc)
    return crc


def combine(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two concatenated byte strings from theirs; the second has ``nbytes`` bytes.

    Example:
        >>> combine(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
        True
    """
    # CRCs are polynomials: the first is multiplied by x to the number of bits of the second.
    return _product(_power(nbytes), first) ^ second if first else second


@functools.lru_cache(256)
def _power(nbytes: int) -> int:
    """x to the number of bits of ``nbytes`` bytes, modulo the polynomial."""
    power, square = 1 << 31, 1 << 23  # 1 and x ** 8: the highest bit is the lowest power
    while nbytes:
        if nbytes & 1:
            power = _product(power, square)
        square = _product(square, square)
        nbytes >>= 1
    return power


def _product(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32, whose coefficients are bits."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
