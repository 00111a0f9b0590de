"""MAX's path of attention without RoPE, and how heads are divided over devices."""

from __future__ import annotations

from ...absent import absent as _absent
from ...graph.placement.strategy import even_range


def num_heads_for_device(*, num_heads: int, device_idx: int, num_devices: int) -> int:
    """The number of heads of a device; the first devices get one more where they do not divide evenly.

    Example:
        >>> [num_heads_for_device(num_heads=7, device_idx=i, num_devices=3) for i in range(3)]
        [3, 2, 2]
    """
    start, stop = even_range(num_heads, device_idx, num_devices)
    return stop - start


__getattr__ = _absent(__name__)
