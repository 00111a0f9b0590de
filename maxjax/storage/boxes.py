"""Boxes: rectangular regions of tensors, with intersection, containment and splitting.

A box is a (start, stop) pair for each axis; the box of a scalar is ``()``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

# A Span is (start, stop) on one axis; a Box has one Span per axis.
Span = tuple[int, int]
Box = tuple[Span, ...]
# A part of a tensor, and the array for its values, of the tensor's dtype.
Wanted = tuple[Box, np.ndarray]


def whole(shape: Sequence[int]) -> Box:
    """The box that covers a whole tensor.

    Example:
        >>> whole((2, 3))
        ((0, 2), (0, 3))
    """
    return tuple((0, size) for size in shape)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def count(box: Box) -> int:
    """The number of elements in a box."""
    return prod(stop - start for start, stop in box)


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array in C order, counted in elements.

    Example:
        >>> c_strides((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices that select a box in the array of an ``outer`` box.

    Example:
        >>> within(((2, 3),), ((1, 9),))
        (slice(1, 2, None),)
    """
    pairs = zip(box, outer, strict=True)
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in pairs)


def split(box: Box, limit: int) -> Iterator[Box]:
    """Cuts a box into boxes of at most ``limit`` elements, along its first axes.

    Example:
        >>> list(split(((0, 4), (0, 2)), 4))
        [((0, 2), (0, 2)), ((2, 4), (0, 2))]
    """
    size = count(box)
    if size <= limit:
        yield box
        return
    axis = next(k for k, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[axis]
    step = max(1, limit * (stop - start) // size)
    for at in range(start, stop, step):
        cut = (*box[:axis], (at, min(at + step, stop)), *box[axis + 1 :])
        yield from split(cut, limit)


def overlap(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes, or None if it is empty.

    Example:
        >>> overlap(((0, 3),), ((2, 9),))
        ((2, 3),)
    """
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def copy_shared(into: Wanted, source: Wanted) -> None:
    """Copies the intersection of two parts from the array of ``source`` to that of ``into``."""
    shared = overlap(into[0], source[0])
    if shared is not None:
        into[1][(*within(shared, into[0]), ...)] = source[1][(*within(shared, source[0]), ...)]


def enclosing(boxes: Sequence[Box]) -> Box:
    """The smallest box that contains all ``boxes``.

    Example:
        >>> enclosing([((0, 2), (3, 4)), ((1, 3), (0, 1))])
        ((0, 3), (0, 4))
    """
    spans = zip(*boxes, strict=True)
    return tuple((min(a for a, _ in span), max(b for _, b in span)) for span in spans)


def is_covered(box: Box, boxes: Sequence[Box]) -> bool:
    """Whether ``boxes``, which may overlap, together cover ``box``.

    Example:
        >>> is_covered(((0, 2), (0, 4)), [((0, 2), (0, 3)), ((0, 2), (2, 4))])
        True
    """
    if not count(box):
        return True
    for number, other in enumerate(boxes):
        # Subtracts the first box that overlaps it, and checks the remaining pieces.
        if (shared := overlap(box, other)) is not None:
            return all(is_covered(rest, boxes[number + 1 :]) for rest in _without(box, shared))
    return False


def _without(box: Box, inner: Box) -> Iterator[Box]:
    """The pieces of ``box`` outside ``inner``, as boxes that do not overlap."""
    for axis, ((start, stop), (first, last)) in enumerate(zip(box, inner, strict=True)):
        before, behind = inner[:axis], box[axis + 1 :]
        for span in (start, first), (last, stop):
            if span[0] < span[1]:
                yield (*before, span, *behind)


def in_order(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Boxes that together are the flat range ``start`` to ``stop`` of an array in C order, in order.

    There are at most two boxes per axis.

    Example:
        >>> list(in_order((3, 4), 2, 9))
        [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    while start < stop:
        axis, row = len(shape), 1
        while axis and start % (row * shape[axis - 1]) == 0:
            if row * shape[axis - 1] > stop - start:
                break
            axis -= 1
            row *= shape[axis]
        box: list[tuple[int, int]] = [(0, size) for size in shape[axis:]]
        rows, number = 1, start // row
        if axis:
            number, index = divmod(number, shape[axis - 1])
            rows = min(shape[axis - 1] - index, (stop - start) // row)
            box.insert(0, (index, index + rows))
        for size in reversed(shape[: max(axis - 1, 0)]):
            number, index = divmod(number, size)
            box.insert(0, (index, index + 1))
        yield tuple(box)
        start += rows * row


def runs(shape: Sequence[int], box: Box, array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The contiguous runs of a box in a C-order tensor: the flat index of each, and its array.

    Example:
        >>> [(start, a.shape) for start, a in runs((4, 2), ((1, 3), (0, 2)), np.zeros((2, 2)))]
        [(2, (2, 2))]
    """
    axis = len(box)
    while axis and box[axis - 1] == (0, shape[axis - 1]):
        axis -= 1
    # The axis before may be sliced: its slice is still contiguous.
    axis = max(axis - 1, 0)
    for index in np.ndindex(*extents(box[:axis])):
        start = 0
        for k, size in enumerate(shape):
            begin = box[k][0] + (index[k] if k < axis else 0)
            start = start * size + begin
        yield start, array[(*index, ...)]
