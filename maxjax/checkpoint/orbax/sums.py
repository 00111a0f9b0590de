"""The checksums of the arrays of a checkpoint, computed by all processes from their parts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ...storage.boxes import Box, extents
from ...storage.checksums import crc32_of_boxes
from ...storage.crc32 import combine, crc32
from .arrays import held_parts, is_on_host, owners
from .tree import Item


class ArraySums:
    """The checksums of arrays.

    Each process counts the parts of others as zeros. The XOR of their CRC-32s is that of the complete
    array; for an even number of processes, the CRC-32 of zeros has to be added.
    """

    def __init__(self, items: Mapping[str, Item]):
        self._sums: dict[str, int] = {}
        self._shapes: dict[str, int] = {}
        self._parts: dict[str, tuple[tuple[int, ...], list[tuple[Box, Any]], list[Box], Any]] = {}
        for title, item in items.items():
            for name, array in item.arrays.items():
                self._take(f"{title}/{name}", array)

    def _take(self, name: str, array: Any) -> None:
        mine, others = held_parts(array), []
        if not mine and not (isinstance(array, jax.Array) and jax.process_index() == 0):
            return
        if isinstance(array, jax.Array):
            have = {box for box, _ in mine}
            others = [box for box in owners(array) if box not in have]
        dtype = np.dtype(array.dtype)
        if is_on_host(array):
            mine = [(box, np.asarray(part)) for box, part in mine]
        self._shapes[name] = math.prod(array.shape) * dtype.itemsize
        self._parts[name] = (tuple(array.shape), mine, others, dtype)

    def compute(self) -> None:
        """Compute the checksums; arrays on accelerators are copied to the host one by one."""
        for name in list(self._parts):
            shape, mine, others, dtype = self._parts.pop(name)
            parts = [(box, np.asarray(part)) for box, part in mine]
            parts += [(box, np.zeros(extents(box), dtype)) for box in others]
            self._sums[name] = crc32_of_boxes(shape, parts)

    def share(self, folder: str) -> None:
        """Write this process's checksums to a file for the first process, unless this is the first."""
        if jax.process_index() > 0:
            path = os.path.join(folder, f"sums-{jax.process_index()}")
            with open(path, "x") as file:
                json.dump([self._sums, self._shapes], file)

    def all(self, folder: str) -> dict[str, int]:
        """The checksums of complete arrays, after all processes have called :meth:`share`."""
        found, counts, lengths = dict(self._sums), dict.fromkeys(self._sums, 1), dict(self._shapes)
        for process in range(1, jax.process_count()):
            with open(os.path.join(folder, f"sums-{process}")) as file:
                sums, shapes = json.load(file)
            lengths.update(shapes)
            for name, crc in sums.items():
                found[name] = found.get(name, 0) ^ crc
                counts[name] = counts.get(name, 0) + 1
        for name, count in counts.items():
            if count % 2 == 0:
                found[name] ^= zeros_sum(lengths[name])
        return found


def zeros_sum(nbytes: int) -> int:
    """The CRC-32 of so many zero bytes.

    Example:
        >>> zeros_sum(3_000_001) == crc32(bytes(3_000_001))
        True
    """
    if nbytes <= 1 << 16:
        return crc32(bytes(nbytes))
    half = zeros_sum(nbytes // 2)
    both = combine(half, half, nbytes // 2)
    return combine(both, crc32(b"\0"), 1) if nbytes % 2 else both
