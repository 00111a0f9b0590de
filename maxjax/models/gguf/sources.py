"""Sources of tensors whose name or layout differs from that in their file. They are read in parts.

They are used in both directions: for GGUF's tensors as Hugging Face's, and the inverse. To read a part
of a tensor, only the rows of that part are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...dtype import DType
from ...graph.weights import WeightData
from ...graph.weights.weight_data import PartSource
from ...storage import aligned_empty
from ...storage.blocks import decode
from ...storage.boxes import Box, count, extents, whole
from ...storage.parts import Part
from .layouts import Expert, Layout, Matrix, Same, Transposed
from .names import Source

# Number of bytes that are read at a time of a tensor whose rows are reordered.
_READ_BYTES = 4 << 20


class ArraySource(PartSource):
    """A DataSource defined by :meth:`dtype_and_shape` and :meth:`fill`: its parts are read one after another."""

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Reads parts of tensors into the memory of each part, and returns the number of bytes read."""
        total = 0
        for name, region, memory in parts:
            if count(region):
                array = memory.view(self.dtype_and_shape(name)[0]).reshape(extents(region))
                total += self.fill(array, name, region)
        return total

    def fill(self, array: np.ndarray, name: str, region: Box) -> int:
        """Fills an array with a region of a tensor, which is not empty; returns the number of bytes read."""
        raise NotImplementedError


class Relaid(ArraySource):
    """The Source of tensors that have another name or another layout in the file."""

    def __init__(self, in_file: Mapping[str, WeightData], names: Mapping[str, Source]):
        self._tensors, self._names = in_file, names

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor as :meth:`read` returns it."""
        data, layout, is_decoded = self._of(name)
        shape = data.logical_shape if is_decoded else data.shape
        dtype = DType.float32 if is_decoded else data.dtype
        return dtype.np, layout.shape(tuple(map(int, shape)))

    def _of(self, name: str) -> tuple[WeightData, Layout, bool]:
        """(Tensor in the file, its layout, whether its blocks are dequantised) for a name."""
        where = self._names[name]
        data, layout = self._tensors[where.tensor], where.layout
        return data, layout, data.is_packed and not (layout.by_rows and layout.keeps_values)

    def fill(self, array: np.ndarray, name: str, region: Box) -> int:
        """See :class:`ArraySource`."""
        data, layout, is_decoded = self._of(name)
        shape = self.dtype_and_shape(name)[1]
        if type(layout) is Same and array.ndim > 2:
            values, total = read_box(data, region)
            array[...] = values
            return total
        if isinstance(layout, Transposed) and not is_decoded:
            values, total = read_box(data, region[::-1])
            array[...] = values.T
            return total
        if not layout.by_rows or isinstance(layout, Matrix):
            values, total = read_box(data, whole(tuple(map(int, data.shape))))
            values = _decoded(data, values) if is_decoded else values
            array[...] = layout.apply(values)[tuple(slice(*span) for span in region)]
            return total
        if isinstance(layout, Expert) and len(shape) == 1:  # the bias of one expert
            first, last = (layout.part * shape[0] + edge for edge in region[0])
            values, total = read_box(data, ((layout.index, layout.index + 1), (first, last)))
            array[...] = values[0]
            return total
        total = 0
        width = math.prod(shape[1:]) * array.itemsize
        rows = max(1, _READ_BYTES // max(1, width))
        first, last = region[0]
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            indices = layout.rows(shape[0])[start:stop]
            values, nbytes = _rows(data, indices, region[1:], is_decoded)
            array[start - first : stop - first] = layout.change(values)
            total += nbytes
        return total


def relaid(in_file: Mapping[str, WeightData], names: Mapping[str, Source]) -> dict[str, WeightData]:
    """The tensors of a file by other names and in other layouts; nothing is read.

    Args:
        in_file: the tensors by their names in the file.
        names: the new names, and where their values come from.
    """
    source, found = Relaid(in_file, names), {}
    for name, where in names.items():
        data = in_file[where.tensor]
        if type(where.layout) is Same:
            found[name] = data
            continue
        dtype, shape = source.dtype_and_shape(name)
        encoding = data.quantization_encoding if dtype == np.uint8 else None
        found[name] = WeightData.lazy(source, name, DType.of(dtype), shape, encoding)
    return found


class Stacked(ArraySource):
    """The Source of stacks of experts: tensors of the same dtype and shape, stacked along axis 0."""

    def __init__(self, stacks: Mapping[str, Sequence[WeightData]]):
        self._stacks = stacks

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of a stack."""
        stack = self._stacks[name]
        return stack[0].dtype.np, (len(stack), *map(int, stack[0].shape))

    def fill(self, array: np.ndarray, name: str, region: Box) -> int:
        """See :class:`ArraySource`."""
        total = 0
        for index, data in enumerate(self._stacks[name][slice(*region[0])]):
            array[index], nbytes = read_box(data, region[1:])
            total += nbytes
        return total


class Exact(ArraySource):
    """The Source of one tensor that the file has twice: changed, and so rounded; and exact, in the metadata.

    The exact values are used only if their change gives the tensor's values. So a program may edit the tensor
    without knowing of the exact values.
    """

    def __init__(self, shifted: WeightData, original: np.ndarray, layout: Layout):
        self._shifted, self._original, self._layout = shifted, original, layout

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of the original."""
        return self._original.dtype, self._original.shape

    def fill(self, array: np.ndarray, name: str, region: Box) -> int:
        """See :class:`ArraySource`."""
        shifted, nbytes = read_box(self._shifted, whole(self._original.shape))
        wide = self._original.astype(shifted.dtype)
        again = self._layout.apply(self._layout.back().apply(wide))
        same = np.array_equal(again, shifted, equal_nan=True)
        values = self._original if same else shifted
        array[...] = values[tuple(slice(*span) for span in region)]
        return nbytes


def read_box(data: WeightData, box: Box) -> tuple[np.ndarray, int]:
    """(The values of a box of a tensor in its declared dtype, the number of bytes read)."""
    index = tuple(slice(*span) for span in box)
    if data.is_loaded or data.source is None:
        return np.asarray(data.typed())[index], 0
    dtype, shape = data.source.dtype_and_shape(data.name)
    region = box
    if data.decodes is not None:  # the box counts values, but the file's last axis counts bytes
        region = (*box[:-1], (0, shape[-1]))
    memory = aligned_empty(math.prod(extents(region)) * dtype.itemsize)
    total = data.source.read_parts([Part(data.name, region, memory)])
    array = data.cast(memory.view(dtype).reshape(extents(region)))
    return (array[..., index[-1]] if data.decodes is not None else array), total


def _decoded(data: WeightData, blocks: np.ndarray) -> np.ndarray:
    assert data.quantization_encoding is not None
    return decode(data.quantization_encoding.value, blocks)


def _rows(
    data: WeightData, indices: np.ndarray, rest: Box, is_decoded: bool
) -> tuple[np.ndarray, int]:
    """Some rows (over all leading axes) and columns of a stored tensor, and the bytes read."""
    sizes = tuple(map(int, data.shape))
    low, high = int(indices.min()), int(indices.max()) + 1
    columns = (0, sizes[-1]) if is_decoded else rest[-1] if rest else None
    values, total = [], 0
    for region in _regions(sizes, low, high, columns):
        array, nbytes = read_box(data, region)
        values.append(array.reshape(-1, *array.shape[-1:]) if len(sizes) > 1 else array)
        total += nbytes
    found = values[0] if len(values) == 1 else np.concatenate(values)
    if is_decoded:
        found = _decoded(data, found)[..., slice(*rest[-1])]
    return found[indices - low], total


def _regions(
    sizes: tuple[int, ...], low: int, high: int, columns: tuple[int, int] | None
) -> Iterator[Box]:
    """The boxes of rows ``low`` to ``high`` of a tensor; rows are counted over all leading axes."""
    if len(sizes) == 1:
        yield ((low, high),)
        return
    assert columns is not None
    if len(sizes) == 2:
        yield ((low, high), columns)
        return
    height = sizes[1]
    if height == 1:
        yield ((low, high), (0, 1), columns)
        return
    for index in range(low // height, (high - 1) // height + 1):
        start, stop = max(low - index * height, 0), min(high - index * height, height)
        yield ((index, index + 1), (start, stop), columns)
