"""``bucket``: sizes of arrays are powers of two, so that few programs are compiled."""

from __future__ import annotations


def bucket(count: int, least: int = 1) -> int:
    """The smallest power of two that is not below ``count``, or ``least`` if that is larger.

    Example:
        >>> bucket(5), bucket(5, 16), bucket(64)
        (8, 16, 64)
    """
    return max(least, 1 << (max(count, 1) - 1).bit_length())
