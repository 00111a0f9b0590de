"""Floor 5. A GGUF file as a checkpoint of Hugging Face's: the tensors by their names there.

Nothing is read before it is looked at, and a part of a tensor reads only its own rows. Below:
names, layouts; ``graph.weights``. Above: family, which loads models of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...dtype import DType
from ...graph.weights import GGUFWeights, WeightData
from ...storage import aligned_empty
from ...storage.blocks import decode
from ...storage.entry import Box, count, extents, whole
from ...storage.regions import Part
from .config import hf_config
from .layouts import Layout, Matrix, Same
from .names import Source, hf_names

# What is read at a time of a tensor whose rows lie in another order.
_READ_BYTES = 4 << 20


def config_of(weights: GGUFWeights) -> dict[str, Any]:
    """The content of a ``config.json`` for the model of a GGUF file.

    Raises:
        UnsupportedModelError, CheckpointFormatError: As for ``hf_config``.
    """
    shapes = {name: tuple(map(int, data.logical_shape)) for name, data in _stored(weights).items()}
    freqs = None
    if "rope_freqs.weight" in shapes:
        freqs = np.asarray(weights["rope_freqs.weight"].data().data)
    return hf_config(weights.metadata, shapes, rope_freqs=freqs, path=weights._path)


def hf_tensors(weights: GGUFWeights) -> dict[str, WeightData]:
    """The tensors of a GGUF file, by the names and in the layouts of Hugging Face's checkpoints.

    Blocks stay packed where the layout only moves rows.

    Raises:
        UnsupportedModelError, CheckpointMismatchError, CheckpointFormatError: As for ``hf_names``.
    """
    stored = _stored(weights)
    architecture = weights.metadata.get("general.architecture", "")
    shapes = {name: tuple(map(int, data.logical_shape)) for name, data in stored.items()}
    names = hf_names(str(architecture), shapes, weights.metadata, path=weights._path)
    source = _Relaid(stored, names)
    found = {}
    for name, where in names.items():
        data = stored[where.tensor]
        if type(where.layout) is Same:
            found[name] = data
            continue
        dtype, shape = source.stored(name)
        encoding = data.quantization_encoding if dtype == np.uint8 else None
        found[name] = WeightData._lazy(source, name, DType.of(dtype), shape, encoding)
    return found


def _stored(weights: GGUFWeights) -> dict[str, WeightData]:
    return {name: place.data() for name, place in weights.items()}


class _Relaid:
    """The Source of tensors whose values lie elsewhere, or otherwise, in the file."""

    def __init__(self, stored: Mapping[str, WeightData], names: Mapping[str, Source]):
        self._stored, self._names = stored, names

    def stored(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor as :meth:`read` gives it."""
        data, layout, is_decoded = self._of(name)
        shape = data.logical_shape if is_decoded else data.shape
        dtype = DType.float32 if is_decoded else data.dtype
        return dtype.np, layout.shape(tuple(map(int, shape)))

    def read(self, name: str) -> np.ndarray:
        """The tensor, in memory nobody else holds."""
        dtype, shape = self.stored(name)
        memory = aligned_empty(math.prod(shape) * dtype.itemsize)
        self.read_parts([Part(name, whole(shape), memory)])
        return memory.view(dtype).reshape(shape)

    def read_many(self, names: list[str]) -> dict[str, np.ndarray]:
        """Several at once."""
        return {name: self.read(name) for name in names}

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Rectangles of some, into the memory for each."""
        return sum(self._read(part) for part in parts)

    def _of(self, name: str) -> tuple[WeightData, Layout, bool]:
        """What the tensor is made of, how, and whether its blocks are decoded for it."""
        where = self._names[name]
        data, layout = self._stored[where.tensor], where.layout
        return data, layout, data._is_packed and not (layout.by_rows and layout.keeps_values)

    def _read(self, part: Part) -> int:
        data, layout, is_decoded = self._of(part.name)
        dtype, shape = self.stored(part.name)
        if not count(part.region):
            return 0
        array = part.memory.view(dtype).reshape(extents(part.region))
        if not layout.by_rows or isinstance(layout, Matrix):
            values, total = _whole(data, is_decoded)
            array[...] = layout.apply(values)[tuple(slice(*span) for span in part.region)]
            return total
        total = 0
        width = math.prod(shape[1:]) * dtype.itemsize
        rows = max(1, _READ_BYTES // max(1, width))
        first, last = part.region[0]
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            wanted = layout.rows(shape[0])[start:stop]
            values, nbytes = _rows(data, wanted, part.region[1:], is_decoded)
            array[start - first : stop - first] = layout.change(values)
            total += nbytes
        return total


def _whole(data: WeightData, is_decoded: bool) -> tuple[np.ndarray, int]:
    assert data._source is not None
    values = data._source.read(data.name)
    return _decoded(data, values) if is_decoded else values, values.nbytes


def _decoded(data: WeightData, blocks: np.ndarray) -> np.ndarray:
    assert data.quantization_encoding is not None
    return decode(data.quantization_encoding.value, blocks)


def _rows(
    data: WeightData, wanted: np.ndarray, rest: Box, is_decoded: bool
) -> tuple[np.ndarray, int]:
    """Rows of a stored tensor, whose leading axes are counted as one, and a part of its columns."""
    sizes = tuple(map(int, data.shape))
    low, high = int(wanted.min()), int(wanted.max()) + 1
    columns = (0, sizes[-1]) if is_decoded else rest[-1] if rest else None
    values, total = [], 0
    for region in _regions(sizes, low, high, columns):
        shape = extents(region)
        memory = aligned_empty(math.prod(shape) * data.dtype.np.itemsize)
        assert data._source is not None
        total += data._source.read_parts([Part(data.name, region, memory)])
        array = memory.view(data.dtype.np).reshape(shape)
        values.append(array.reshape(-1, *shape[-1:]) if len(sizes) > 1 else array)
    found = values[0] if len(values) == 1 else np.concatenate(values)
    if is_decoded:
        found = _decoded(data, found)[..., slice(*rest[-1])]
    return found[wanted - low], total


def _regions(
    sizes: tuple[int, ...], low: int, high: int, columns: tuple[int, int] | None
) -> Iterator[Box]:
    """The boxes of rows ``low`` to ``high`` of a tensor whose leading axes are counted as one."""
    if len(sizes) == 1:
        yield ((low, high),)
        return
    assert columns is not None
    if len(sizes) == 2:
        yield ((low, high), columns)
        return
    height = sizes[1]
    for index in range(low // height, (high - 1) // height + 1):
        start, stop = max(low - index * height, 0), min(high - index * height, height)
        yield ((index, index + 1), (start, stop), columns)
