"""The comparison of two tensors of a checkpoint, which reads as little as possible.

Published checkpoints may contain a tied embedding table twice: as two names of one storage, or as a
copy. Offsets and checksums in the file are compared first; otherwise values are read on the host,
up to the first difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...storage.entry import TensorEntry
from ...storage.table import TensorTable
from .cursor import CheckpointSource
from .given import dtype_of, host_or_jax, shape_of
from .host_reads import data_rows
from .weight_data import WeightData


def same_values(a: WeightData, b: WeightData) -> bool:
    """Whether two tensors have the same type, shape and encoding, and bitwise equal values.

    Results for two tensors of an open checkpoint are cached with it.

    Example:
        >>> one, other = (WeightData.from_numpy(np.float32(x), "w") for x in ([1, 2], [1, 3]))
        >>> same_values(one, one), same_values(one, other)
        (True, False)
    """
    if not same_kind(a, b):
        return False
    family = a.source
    if isinstance(family, CheckpointSource) and family is b.source and _is_read_alike(a, b):
        key = (min(a.name, b.name), max(a.name, b.name))
        if key not in family.same:
            found = _by_entries(family.open_table(), a.name, b.name)
            family.same[key] = _by_values(a, b) if found is None else found
        return family.same[key]
    return _by_values(a, b)


def same_content(a: Any, b: Any) -> bool:
    """Whether two values, from any library, hold the same bytes."""
    if a is b:
        return True
    if isinstance(a, WeightData) and isinstance(b, WeightData):
        return same_values(a, b)
    if dtype_of(a) is not dtype_of(b) or list(map(int, shape_of(a))) != list(map(int, shape_of(b))):
        return False
    one, other = (np.ascontiguousarray(np.asarray(host_or_jax(v))).reshape(-1) for v in (a, b))
    return np.array_equal(one.view(np.uint8), other.view(np.uint8))


def same_kind(a: WeightData, b: WeightData) -> bool:
    """Whether two tensors have the same type, shape and encoding; nothing is read."""
    kinds = ((d.dtype, tuple(map(int, d.shape)), d.quantization_encoding) for d in (a, b))
    return next(kinds) == next(kinds)


def _is_read_alike(a: WeightData, b: WeightData) -> bool:
    """Whether both are read from disk, with the same casts."""
    return not (a.is_loaded or b.is_loaded) and (a.decodes, a.casts) == (b.decodes, b.casts)


def _by_entries(table: TensorTable, one: str, other: str) -> bool | None:
    """The result by offsets and checksums; None if they do not decide."""
    a, b = table.entries[one], table.entries[other]
    if (a.file, a.offset, a.nbytes, a.coding) == (b.file, b.offset, b.nbytes, b.coding):
        return True
    sums = [_sum_of(entry) for entry in (a, b)]
    # With verification off, or always on, the values are compared instead of checksums.
    if table.verify == "auto" and (None,) not in sums and sums[0][1:] == sums[1][1:]:
        return sums[0] == sums[1]
    return None


def _sum_of(entry: TensorEntry) -> tuple[Any, ...]:
    """The checksum of exactly this tensor, and its kind; (None,) if there is none, or it covers more."""
    found = entry.checksum
    if found is None or found.also:
        return (None,)
    if found.of_values:
        return found.crc, found.nbytes
    is_whole = (found.offset, found.nbytes) == (entry.offset, entry.nbytes)
    return (found.crc, found.nbytes, entry.coding) if is_whole else (None,)


def _by_values(a: WeightData, b: WeightData) -> bool:
    ours, theirs = _bytes(a), _bytes(b)
    left, right = next(ours, None), next(theirs, None)
    while left is not None and right is not None:
        size = min(len(left), len(right))
        if not _equal(left[:size], right[:size]):
            return False
        left, right = left[size:], right[size:]
        left = left if len(left) else next(ours, None)
        right = right if len(right) else next(theirs, None)
    return left is None and right is None


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    words = len(a) // 8 * 8  # eight bytes at a time
    return np.array_equal(a[:words].view(np.uint64), b[:words].view(np.uint64)) and np.array_equal(
        a[words:], b[words:]
    )


def _bytes(data: WeightData) -> Iterator[np.ndarray]:
    """The bytes of a tensor, about 16 MiB at a time."""
    for rows in data_rows(data):
        found = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        if len(found):
            yield found
