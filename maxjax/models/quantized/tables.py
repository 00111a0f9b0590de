"""Dequantises embedding tables of MLX's repositories while they are read: a lookup needs floats."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...dtype import DType
from ...graph.weights import WeightData
from ...nn.embedding import Embedding
from ...nn.layer import Module
from ...storage.boxes import Box
from ..gguf.sources import ArraySource, read_box

_LOG = logging.getLogger("maxjax")
# Rows that are dequantised at a time.
_ROWS = 4096


def dense_tables(model: Module, found: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a checkpoint, with one float tensor in place of the three of each quantised embedding table.

    Args:
        model: the lazy model.
        found: tensors of the checkpoint by the model's names.
    """
    changed = dict(found)
    if not any(name.endswith(".biases") for name in found):
        return changed
    for prefix, module in model.named_modules():
        names = [f"{prefix.removesuffix('.')}.{one}" for one in ("weight", "scales", "biases")]
        parts = [found.get(name) for name in names]
        if type(module) is not Embedding or not all(isinstance(one, WeightData) for one in parts):
            continue
        weight: Any = module.weight
        if not weight.dtype.is_float():
            continue
        source = _Table(parts, tuple(map(int, weight.shape)), weight.dtype)
        for name in names:
            del changed[name]
        changed[names[0]] = WeightData.lazy(source, names[0], weight.dtype, source.shape)
        _LOG.info("'%s' is dequantised: a table of embeddings is held as floats", names[0])
    return changed


class _Table(ArraySource):
    """Source of a table from MLX's tensors: numbers in words of 32 bits, and a scale and a bias for each group."""

    def __init__(self, parts: Any, shape: tuple[int, ...], dtype: DType):
        self._parts, self.shape, self._dtype = parts, shape, dtype

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of the table."""
        return self._dtype.np, self.shape

    def fill(self, array: np.ndarray, name: str, region: Box) -> int:
        """See :class:`ArraySource`."""
        (first, last), columns = region
        total = 0
        for start in range(first, last, _ROWS):
            stop = min(start + _ROWS, last)
            values, read = self._rows(start, stop)
            array[start - first : stop - first] = values[:, slice(*columns)].astype(array.dtype)
            total += read
        return total

    def _rows(self, start: int, stop: int) -> tuple[np.ndarray, int]:
        """The values of some rows in float32, and the bytes that were read."""
        read, total = [], 0
        for one in self._parts:
            part, nbytes = read_box(one, ((start, stop), (0, int(one.shape[1]))))
            read.append(part)
            total += nbytes
        words, scales, biases = read
        columns = self.shape[1]
        bits = 32 * words.shape[1] // columns
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        q = (words.astype(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
        q = q.reshape(len(words), -1)[:, :columns].astype(np.float32)
        scales, biases = (
            np.repeat(one.astype(np.float32), columns // one.shape[1], axis=1)
            for one in (scales, biases)
        )
        return q * scales + biases, total
