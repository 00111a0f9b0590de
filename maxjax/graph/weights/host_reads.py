"""Reading a tensor of a checkpoint on the host, row by row, so that it is never complete in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...storage.boxes import Box, count, extents, split, whole
from ...storage.files import PIECE_BYTES, aligned_empty
from ...storage.parts import Part
from .weight_data import WeightData


def data_rows(data: WeightData) -> Iterator[np.ndarray]:
    """The values of a tensor with all casts, in order, about 16 MiB of its file at a time.

    Each array has the rank of the tensor and complete last axes. A tensor in memory is one array.
    """
    source = data.source
    if source is None or data.is_loaded:
        yield np.asarray(data.typed())
        return
    dtype, shape = source.dtype_and_shape(data.name)
    rows = getattr(source, "rows", None)
    if rows is not None:
        yield from map(data.cast, rows(data.name))
        return
    divisible = getattr(source, "is_divisible", None)
    if divisible is not None and not divisible(data.name):
        yield data.cast(source.read(data.name))
        return
    for box in row_boxes(shape, dtype.itemsize):
        memory = aligned_empty(count(box) * dtype.itemsize)
        source.read_parts([Part(data.name, box, memory)])
        yield data.cast(memory.view(dtype).reshape(extents(box)))


def row_boxes(shape: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Boxes of about 16 MiB with complete last axes, in the order of a tensor's bytes.

    Example:
        >>> list(row_boxes((2, 3, 1 << 20), 4))
        [((0, 1), (0, 3), (0, 1048576)), ((1, 2), (0, 3), (0, 1048576))]
    """
    if not shape:
        yield ()
        return
    row = max(shape[-1] * itemsize, 1)
    for box in split(whole(shape[:-1]), max(1, PIECE_BYTES // row)):
        yield (*box, (0, shape[-1]))
