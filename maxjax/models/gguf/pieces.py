"""Lazy tensors that are made of rows or columns of other tensors, or computed from them.

They are for families whose GGUF files split or transform a tensor of Hugging Face's, and are used in both
directions. Nothing is read before the values are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...dtype import DType
from ...errors import CheckpointFormatError, CheckpointMismatchError
from ...graph.weights import WeightData
from ...graph.weights.weight_data import PartSource
from ...storage.blocks import LAYOUTS, decode
from ...storage.boxes import Box, count, extents, whole
from ...storage.parts import Part
from .sources import ArraySource, read_box


def computed(
    name: str,
    each: Sequence[WeightData],
    function: Callable[..., np.ndarray],
    shape: Sequence[int],
    dtype: DType | None = None,
) -> WeightData:
    """A tensor that is a function of complete tensors, whose blocks are dequantised.

    Args:
        name: name of the tensor.
        each: tensors that are passed to the function, as arrays of one dtype.
        function: arrays → the array of this tensor.
        shape: shape of the tensor.
        dtype: dtype of the tensor and of the arrays; None: their common dtype, or float32 if they differ.

    Example:
        >>> halves = [WeightData.from_numpy(np.float32([[i, i]]), "half") for i in range(2)]
        >>> computed("both", halves, lambda a, b: np.concatenate([a, b]), (2, 2)).data
        array([[0., 0.],
               [1., 1.]], dtype=float32)
    """
    kinds = {DType.float32 if data.is_packed else data.dtype for data in each}
    dtype = dtype or (kinds.pop() if len(kinds) == 1 else DType.float32)
    source = _Computed(each, function, tuple(shape), dtype)
    return WeightData.lazy(source, name, dtype, tuple(shape))


def check_rows(name: str, data: WeightData, count: int) -> None:
    """Checks that a tensor has the number of rows that the settings of its model give.

    Raises:
        CheckpointMismatchError: it has another.
    """
    shape = tuple(map(int, data.logical_shape))
    if shape[:1] != (count,):
        raise CheckpointMismatchError(
            "a tensor does not fit the configuration", tensor=name,
            expected=f"{count} rows", found=f"shape {list(shape)}",
        )  # fmt: skip


def rows(name: str, each: Sequence[WeightData], order: np.ndarray) -> WeightData:
    """A tensor made of rows of several tensors; it stays quantised if all have the same encoding.

    Args:
        name: name of the tensor.
        each: tensors with rows of one length; the rows of a vector are its elements.
        order: index of each row of the new tensor among the rows of all tensors, one after another.

    Raises:
        CheckpointFormatError: the rows differ in length, or there are too few.

    Example:
        >>> parts = [WeightData.from_numpy(np.float32([0, 1]) + 2 * i, "part") for i in range(2)]
        >>> rows("mixed", parts, np.array([0, 2, 1, 3])).data
        array([0., 2., 1., 3.], dtype=float32)
    """
    shapes = [tuple(map(int, data.logical_shape)) for data in each]
    total = sum(shape[0] if shape else 0 for shape in shapes)
    if len({shape[1:] for shape in shapes}) > 1 or total <= order.max(initial=0):
        raise CheckpointFormatError(
            "parts of a tensor do not fit together", tensor=name,
            expected=f"at least {order.max(initial=0) + 1} rows of one length", found=shapes,
        )  # fmt: skip
    if len({(d.dtype, d.quantization_encoding, tuple(map(int, d.shape[1:]))) for d in each}) > 1:
        shape = (len(order), *shapes[0][1:])
        return computed(name, each, lambda *arrays: np.concatenate(arrays)[order], shape)
    first = each[0]
    source = _Rows(each, order)
    dtype, shape = source.dtype_and_shape(name)
    return WeightData.lazy(source, name, DType.of(dtype), shape, first.quantization_encoding)


def columns(name: str, data: WeightData, order: np.ndarray, width: int) -> WeightData:
    """A matrix with its heads of columns in another order; it stays quantised if heads are whole blocks.

    Args:
        name: name of the tensor.
        data: matrix with ``width`` columns for each head.
        order: index of each head of the new tensor in ``data``.
        width: number of columns of a head.

    Raises:
        CheckpointFormatError: the number of columns is not that of the heads.

    Example:
        >>> data = WeightData.from_numpy(np.float32([[0, 1, 2, 3]]), "matrix")
        >>> columns("swapped", data, np.array([1, 0]), 2).data
        array([[2., 3., 0., 1.]], dtype=float32)
    """
    shape = tuple(map(int, data.logical_shape))
    if len(shape) != 2 or shape[1] != len(order) * width:
        raise CheckpointFormatError(
            "not a matrix for the heads", tensor=name,
            expected=f"[rows, {len(order)} · {width}]", found=shape,
        )  # fmt: skip
    encoding = data.quantization_encoding if data.is_packed else None
    if encoding is not None and width % LAYOUTS[encoding.value].elements:

        def change(values: np.ndarray) -> np.ndarray:
            return values.reshape(len(values), -1, width)[:, order].reshape(shape)

        return computed(name, [data], change, shape)
    source = _Columns(data, order)
    dtype, shape = source.dtype_and_shape(name)
    return WeightData.lazy(source, name, DType.of(dtype), shape, encoding)


class _Columns(ArraySource):
    """The Source of one tensor of :func:`columns`."""

    def __init__(self, data: WeightData, order: np.ndarray):
        self._data, self._order = data, order

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of the tensor."""
        return self._data.dtype.np, tuple(map(int, self._data.shape))

    def fill(self, array: np.ndarray, name: str, region: Box) -> int:
        """See :class:`ArraySource`."""
        span, box = region
        values, nbytes = read_box(self._data, (span, (0, self.dtype_and_shape(name)[1][1])))
        heads = values.reshape(len(values), len(self._order), -1)[:, self._order]
        array[...] = heads.reshape(values.shape)[:, slice(*box)]
        return nbytes


class _Computed(PartSource):
    """The Source of one tensor of :func:`computed`."""

    def __init__(
        self,
        each: Sequence[WeightData],
        function: Callable[..., np.ndarray],
        shape: tuple[int, ...],
        dtype: DType,
    ):
        self._each, self._function, self._shape, self._dtype = each, function, shape, dtype
        self._kept: np.ndarray | None = None

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of the tensor."""
        return self._dtype.np, self._shape

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Reads parts into the memory of each part, and returns the number of bytes read."""
        parts = [part for part in parts if count(part.region)]
        if not parts:
            return 0
        made, total = self._made()
        for part in parts:
            array = part.memory.view(self._dtype.np).reshape(extents(part.region))
            array[...] = made[tuple(slice(*span) for span in part.region)]
        # Files are written in pieces of rows, in order.
        is_last = any(part.region[0][1] == self._shape[0] for part in parts)
        self._kept = None if is_last else made
        return total

    def _made(self) -> tuple[np.ndarray, int]:
        """The complete tensor, and the number of bytes read for it."""
        if self._kept is not None:
            return self._kept, 0
        arrays, total = [], 0
        for data in self._each:
            values, nbytes = read_box(data, whole(tuple(map(int, data.shape))))
            total += nbytes
            if data.is_packed:
                assert data.quantization_encoding is not None
                values = decode(data.quantization_encoding.value, values)
            arrays.append(values.astype(self._dtype.np, copy=False))
        made = self._function(*arrays)
        assert made.shape == self._shape, (made.shape, self._shape)
        return made, total


class _Rows(ArraySource):
    """The Source of one tensor of :func:`rows`."""

    def __init__(self, each: Sequence[WeightData], order: np.ndarray):
        self._each, self._order = each, order
        self._starts = np.cumsum([0, *(int(data.shape[0]) for data in each)])

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of the tensor."""
        first = self._each[0]
        return first.dtype.np, (len(self._order), *map(int, first.shape[1:]))

    def fill(self, array: np.ndarray, name: str, region: Box) -> int:
        """See :class:`ArraySource`."""
        total, wanted = 0, self._order[slice(*region[0])]
        for number, data in enumerate(self._each):
            first, last = self._starts[number : number + 2]
            here = np.flatnonzero((wanted >= first) & (wanted < last))
            if not here.size:
                continue
            places = wanted[here] - first
            low, high = int(places.min()), int(places.max()) + 1
            values, nbytes = read_box(data, ((low, high), *region[1:]))
            array[here] = values[places - low]
            total += nbytes
        return total
