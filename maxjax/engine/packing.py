"""Short texts laid end to end in the rows of a batch, so that few of its tokens are padding.

Shapes: B rows of T tokens, K texts in a row at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..text.tokenizer.tokenizer import Encoding
from .bucket import bucket

LONGEST = 256
"""The most tokens of a text that is packed: attention scores grow with the square of a row's length."""
# The length of a row for short texts. Longer rows have less padding, but more attention scores.
_ROW = 64
# The smallest length of a row that is alone in its batch: such a row is cut to what it needs.
_SHORTEST = 16
# Tokens of a row for each text that it may hold.
_TOKENS_OF_A_TEXT = 8


class PackedBatch(NamedTuple):
    """The indices of the texts in each row of a batch, and its padded shape ``[count, length]``."""

    rows: list[list[int]]
    count: int
    length: int


class PackedTokens(NamedTuple):
    """The tokens of a batch as int32 arrays ``[B, T]``.

    Attributes:
        ids, type_ids: as in ``Encoding``.
        positions: the place of each token in its text.
        numbers: the number of each token's text in its row, from 1; 0 for padding.
    """

    ids: Any
    type_ids: Any
    positions: Any
    numbers: Any


def places(length: int) -> int:
    """The largest number of texts in a row of ``length`` tokens.

    Example:
        >>> places(64), places(5)
        (8, 1)
    """
    return max(1, length // _TOKENS_OF_A_TEXT)


def packed_batches(lengths: Sequence[int], batch_size: int, limit: int) -> list[PackedBatch]:
    """Lays texts end to end in rows, and groups the rows into batches of few shapes.

    Rows are filled by the best fit, the longest texts first (D. S. Johnson, "Near-optimal bin
    packing algorithms", 1973: at most 11/9 of the fewest rows). Rows have 64, 128 or 256 tokens, and
    a batch has as many rows as give ``batch_size`` times 64 tokens, or a power of two.

    Args:
        lengths: the number of tokens of each text, at most ``limit`` and at most :data:`LONGEST`.
        batch_size: the largest number of rows in one batch.
        limit: the largest number of tokens that the model takes.

    Example:
        >>> for batch in packed_batches([30, 100, 20, 14, 28], batch_size=32, limit=512):
        ...     print(batch)
        PackedBatch(rows=[[1, 4]], count=1, length=128)
        PackedBatch(rows=[[0, 2, 3]], count=1, length=64)
    """
    rows: dict[int, list[list[int]]] = {}  # by their length
    space: list[list[list[int]]] = [[] for _ in range(LONGEST + 1)]  # rows by their free tokens
    found = 0  # bit i: there are rows with i free tokens
    width: dict[int, int] = {}  # of each row, by its first text
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        n = max(lengths[i], 1)
        if fits := found >> n:
            free = n + (fits & -fits).bit_length() - 1
            row = space[free].pop()
            if not space[free]:
                found &= ~(1 << free)
        else:
            length = min(max(_ROW, bucket(n)), limit)
            row, free = [], length
            rows.setdefault(length, []).append(row)
            width[i] = length
        row.append(i)
        if len(row) < places(width[row[0]]) and free > n:
            space[free - n].append(row)
            found |= 1 << (free - n)
    batches = []
    for length, members in rows.items():
        if len(members) == 1:
            used = sum(max(lengths[i], 1) for i in members[0])
            needed = max(used, len(members[0]) * _TOKENS_OF_A_TEXT, _SHORTEST)
            length = min(bucket(needed), length)
        most = max(1, min(batch_size, batch_size * _ROW // length))
        for start in range(0, len(members), most):
            part = members[start : start + most]
            batches.append(PackedBatch(part, min(bucket(len(part)), most), length))
    return batches


def packed_tokens(texts: Sequence[Encoding], batch: PackedBatch, pad_id: int) -> PackedTokens:
    """The tokens of a batch as arrays.

    Example:
        >>> texts = [Encoding([5, 6], [0, 0]), Encoding([7, 8, 9], [0, 0, 0])]
        >>> found = packed_tokens(texts, PackedBatch([[1, 0]], 1, 6), pad_id=0)
        >>> for array in found:
        ...     print(*array)
        [7 8 9 5 6 0]
        [0 0 0 0 0 0]
        [0 1 2 0 1 0]
        [1 1 1 2 2 0]
    """
    shape = (batch.count, batch.length)
    ids = np.full(shape, pad_id, np.int32)
    types, positions, numbers = (np.zeros(shape, np.int32) for _ in range(3))
    for i, row in enumerate(batch.rows):
        start = 0
        for number, member in enumerate(row, 1):
            text = texts[member]
            end = start + len(text.ids)
            ids[i, start:end], types[i, start:end] = text.ids, text.type_ids
            positions[i, start:end] = np.arange(end - start)
            numbers[i, start:end] = number
            start = end
    return PackedTokens(ids, types, positions, numbers)
