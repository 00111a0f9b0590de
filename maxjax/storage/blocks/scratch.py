"""Helpers of the block decoders: reused scratch memory, and fast operations on bytes.

A decoder works on pieces that fit a core's cache; new memory for each would cost more than the
arithmetic. ``weave`` first copies the bytes, in chunks, into the order of the values, so that NumPy's
inner loops over floats are long. Bits are shifted left by multiplication, which takes a tenth of the
time of NumPy's shift of bytes. ``np.repeat`` is avoided because it holds the GIL.
"""

from __future__ import annotations

import threading
from math import prod

import numpy as np

from ..files import aligned_empty

# Most cached views, since pieces of every length would fill the memory.
MAX_VIEWS = 64


class Scratch:
    """Named scratch memory of one thread. An array is valid until its name is requested again."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}
        self._views: dict[tuple, np.ndarray] = {}
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: type | str) -> np.ndarray:
        """An uninitialised array."""
        key = (name, shape, dtype)
        view = self._views.get(key)
        if view is None:
            nbytes = prod(shape) * np.dtype(dtype).itemsize
            buffer = self._buffers.get(name)
            if buffer is None or buffer.size < nbytes:
                buffer = self._buffers[name] = aligned_empty(nbytes)
                self._views.clear()  # those of the smaller buffer would keep it alive
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = buffer[:nbytes].view(dtype).reshape(shape)
        return view

    def order(self, planes: int, rows: int) -> np.ndarray:
        """The row indices that interleave ``planes`` planes: row 0 of each plane, then row 1, and so on."""
        key = (planes, rows)
        order = self._orders.get(key)
        if order is None:
            if len(self._orders) >= MAX_VIEWS // 8:
                self._orders.clear()
            order = np.arange(planes * rows).reshape(planes, rows).T.reshape(-1)
            self._orders[key] = order
        return order


_OF_THREAD = threading.local()


def scratch_of_thread() -> Scratch:
    """The scratch memory of the calling thread, at most a few MB; it is freed with the thread."""
    if not hasattr(_OF_THREAD, "scratch"):
        _OF_THREAD.scratch = Scratch()
    return _OF_THREAD.scratch


def weave(scratch: Scratch, name: str, planes: np.ndarray, chunk: int) -> np.ndarray:
    """Interleaves planes in chunks of ``chunk`` bytes: uint8 ``[p, n * chunk]`` → ``[n, p, chunk]``.

    The result is one-dimensional, in scratch memory ``name``.

    Example:
        >>> planes = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.uint8)
        >>> weave(Scratch(), "woven", planes, 2)
        array([1, 2, 5, 6, 3, 4, 7, 8], dtype=uint8)
    """
    table = planes.reshape(-1, chunk)
    woven = scratch.array(name, table.shape, "u1")
    order = scratch.order(len(planes), len(table) // len(planes))
    # The mode avoids a check of every index; all are in range.
    np.take(table, order, axis=0, out=woven, mode="clip")
    return woven.reshape(-1)


def nibbles(scratch: Scratch, qs: np.ndarray, chunk: int) -> np.ndarray:
    """The nibbles of bytes ``[n, k]``: of each ``chunk`` bytes the low nibbles, then the high ones.

    The result is one-dimensional, with one nibble per byte.
    """
    planes = scratch.array("planes", (2, *qs.shape), "u1")
    np.bitwise_and(qs, 15, out=planes[0])
    np.right_shift(qs, 4, out=planes[1])
    return weave(scratch, "woven", planes.reshape(2, -1), chunk)


def bits(scratch: Scratch, qs: np.ndarray, width: int, chunk: int) -> np.ndarray:
    """The fields of ``width`` bits of bytes ``[n, k]``: of each ``chunk`` bytes the lowest, then the next.

    The result is one-dimensional, with one field per byte.
    """
    plane = scratch.array("plane", qs.shape, "u1")
    np.copyto(plane, qs)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    planes = scratch.array("planes of bits", (len(shifts), plane.size), "u1")
    np.right_shift(plane.reshape(-1), shifts, out=planes)
    planes &= (1 << width) - 1
    return weave(scratch, "woven bits", planes, chunk)


def fill_product(out: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
    """``out = values * scales``: ``[n, elements]``, with values of any dtype in the same order.

    ``scales`` is float32 of any shape; each scale applies to a run of values, all of equal length.
    """
    np.copyto(out, values.reshape(out.shape))
    runs = out.reshape(scales.size, -1)
    runs *= scales.reshape(-1, 1)


def add(out: np.ndarray, offsets: np.ndarray) -> None:
    """``out += offsets``, each for a run of values as in ``fill_product``."""
    runs = out.reshape(offsets.size, -1)
    runs += offsets.reshape(-1, 1)
