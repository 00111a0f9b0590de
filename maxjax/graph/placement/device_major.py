"""DeviceMajor: a layout that stores the rows or columns of a weight device by device.

Concatenated queries, keys and values (or gate and up projections) must each be split by themselves,
which no PartitionSpec can express. A layer that supports it stores such a weight as
``[n, rows / n, ...]`` (``StackedLinear``) or ``[..., n, columns / n]`` (``TransposedLinear``), split
over n; all other code uses the logical order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


@dataclass(frozen=True)
class DeviceMajor:
    """The order in which the rows of a weight are stored, or its columns.

    Attributes:
        n: number of devices that the rows or columns are split over.
        segments: lengths of the parts of the axis that are each split by themselves; n divides
            all of them.
        axis: axis of the weight that is stored in this order.

    Example:
        >>> layout = DeviceMajor(2, (4, 2))
        >>> layout.arrange(np.arange(6))
        array([[0, 1, 4],
               [2, 3, 5]])
        >>> layout.restore(layout.arrange(np.arange(6)))
        array([0, 1, 2, 3, 4, 5])
    """

    n: int
    segments: tuple[int, ...]
    axis: int = 0

    @property
    def own(self) -> tuple[int, ...]:
        """The length of each segment on one device."""
        return tuple(length // self.n for length in self.segments)

    def shape(self, logical: Sequence[int]) -> tuple[int, ...]:
        """The stored shape."""
        size = logical[self.axis] // self.n
        return (*logical[: self.axis], self.n, size, *logical[self.axis + 1 :])

    def arrange(self, array: Any) -> Any:
        """Converts from logical to stored order."""
        xp = np if isinstance(array, np.ndarray) else jnp
        ends = list(accumulate(self.segments))[:-1]
        parts = xp.split(array, ends, axis=self.axis)
        parts = [part.reshape(self.shape(part.shape)) for part in parts]
        return xp.concatenate(parts, axis=self.axis + 1)

    def restore(self, array: Any) -> Any:
        """Converts from stored to logical order."""
        xp = np if isinstance(array, np.ndarray) else jnp
        first, rest = array.shape[: self.axis], array.shape[self.axis + 2 :]
        parts = xp.split(array, list(accumulate(self.own))[:-1], axis=self.axis + 1)
        parts = [
            part.reshape(*first, length, *rest)
            for part, length in zip(parts, self.segments, strict=True)
        ]
        return xp.concatenate(parts, axis=self.axis)

    def parts(self, array: Any) -> list[Any]:
        """The segments ``[..., length]``, in logical order, of a result ``[..., rows]`` in stored order."""
        y = array.reshape(*array.shape[:-1], self.n, -1)
        ends = list(accumulate(self.own))[:-1]
        return [part.reshape(*part.shape[:-2], -1) for part in jnp.split(y, ends, axis=-1)]

    def rows(self, device: int) -> list[tuple[int, int]]:
        """The ranges of logical rows (or columns) on one device, in its order."""
        starts = [0, *accumulate(self.segments)]
        return [(start + device * own, start + (device + 1) * own)
                for start, own in zip(starts, self.own, strict=False)]  # fmt: skip

    def sharding(self, logical: Any) -> Any:
        """The sharding of the stored array, from that of the logical one."""
        spec = list(logical.spec)
        spec.insert(self.axis + 1, None)
        spec = PartitionSpec(*spec)
        return NamedSharding(logical.mesh, spec, memory_kind=logical.memory_kind)
