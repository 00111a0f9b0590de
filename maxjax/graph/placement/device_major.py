"""DeviceMajor: a layout that stores the rows of a weight device by device.

Concatenated queries, keys and values, or gates and ups, are each split by themselves, which no
PartitionSpec can express. A layer that supports it (``StackedLinear``) stores such a weight as
``[n, rows / n, ...]``, split over n; everything else sees logical order.
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
    """The order in which the rows of a weight are stored.

    Attributes:
        n: number of devices that the rows are split over.
        segments: lengths of the parts of the axis that are each split by themselves; n divides
            all of them.

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

    @property
    def own(self) -> tuple[int, ...]:
        """The length of each segment on one device."""
        return tuple(length // self.n for length in self.segments)

    def shape(self, logical: Sequence[int]) -> tuple[int, ...]:
        """The stored shape."""
        return (self.n, logical[0] // self.n, *logical[1:])

    def arrange(self, array: Any) -> Any:
        """Converts from logical to stored order."""
        xp = np if isinstance(array, np.ndarray) else jnp
        ends = list(accumulate(self.segments))[:-1]
        parts = xp.split(array, ends)
        rest = array.shape[1:]
        return xp.concatenate([part.reshape(self.n, -1, *rest) for part in parts], axis=1)

    def restore(self, array: Any) -> Any:
        """Converts from stored to logical order."""
        xp = np if isinstance(array, np.ndarray) else jnp
        rest = array.shape[2:]
        parts = xp.split(array, list(accumulate(self.own))[:-1], axis=1)
        return xp.concatenate([part.reshape(length, *rest)
                               for part, length in zip(parts, self.segments, strict=True)])  # fmt: skip

    def rows(self, device: int) -> list[tuple[int, int]]:
        """The ranges of logical rows on one device, in its order."""
        starts = [0, *accumulate(self.segments)]
        return [(start + device * own, start + (device + 1) * own)
                for start, own in zip(starts, self.own, strict=False)]  # fmt: skip

    def sharding(self, logical: Any) -> Any:
        """The sharding of the stored array, from that of the logical one."""
        first, *rest = logical.spec
        spec = PartitionSpec(first, None, *rest)
        return NamedSharding(logical.mesh, spec, memory_kind=logical.memory_kind)
