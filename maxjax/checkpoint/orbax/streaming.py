"""Writing an orbax step from another checkpoint, a few tensors at a time.

Orbax can add trees to an unfinished checkpoint, so that only one batch of tensors is in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ...dtype import DType
from ...errors import UserInputError
from ...graph.weights import WeightData
from ...graph.weights.given import host_or_jax
from ...storage.boxes import whole
from ...storage.checksums import crc32_of_boxes
from ...storage.orbax.maxjax_metadata import Extras, custom_metadata
from ...storage.save.durable import absolute
from ..file_set import in_memory
from .api import add, finish, quiet
from .arrays import check_names, storable
from .save import commit, translated
from .steps import NewStep

# Orbax's name for a tree that was written in parts.
STATE = "state"
# Bytes that are added at a time; a larger tensor is added alone.
_BATCH_BYTES = 64 << 20


def stream(
    root: str | os.PathLike[str],
    tensors: Mapping[str, WeightData],
    beside: Mapping[str, bytes],
    progress: Callable[[int], Any] | None = None,
) -> Path:
    """Save tensors as the next step of a directory.

    Args:
        root: directory of the steps.
        tensors: tensors by name; each is read only when it is written.
        beside: other files of the step: name → content.
        progress: called after each tensor with its size in bytes.

    Returns:
        The path of the step.

    Raises:
        UserInputError: no tensor has values, or orbax cannot store the dtype of one.
        CheckpointError: the source cannot be read; the step cannot be written.
    """
    check_names("tensors", tensors)
    item = Extras()
    for name, data in tensors.items():
        shape = tuple(map(int, data.shape))
        if not math.prod(shape):
            item.empty[name] = (data.dtype.name, list(shape))
        if data.quantization_encoding is not None and data.dtype is DType.uint8:
            item.encodings[name] = data.quantization_encoding.value
    if len(item.empty) == len(tensors):
        raise UserInputError("there is nothing to save: every tensor is empty (a size is 0)")
    metadata = custom_metadata({STATE: item})
    full = {name: data for name, data in tensors.items() if name not in item.empty}
    target = NewStep(absolute(root), None, sum(map(_nbytes, full.values())), beside)
    # Orbax runs in a thread, as the caller's may have a running event loop (a notebook's does).
    with ThreadPoolExecutor(1, "maxjax-save") as pool:
        try:
            sums: dict[str, int] = {}
            for batch in _batches(full):
                arrays = {
                    name: storable("tensors", name, _read(data)) for name, data in batch.items()
                }
                pool.submit(_quietly, add, target.written, arrays, metadata).result()
                for name, array in arrays.items():
                    sums[f"{STATE}/{name}"] = crc32_of_boxes(
                        array.shape, [(whole(array.shape), array)]
                    )
                    if progress is not None:
                        progress(array.nbytes)
            pool.submit(_quietly, finish, target.written).result()
            assert target.staging is not None
            commit(target, target.staging, sums, [STATE], lambda steps: steps)
        except BaseException as error:
            pool.shutdown(wait=True)  # writing has ended when the directory is deleted
            raise translated(error, target) from None
        finally:
            target.close()
    return target.path


def _quietly(function: Callable[..., None], *args: Any) -> None:
    with quiet():
        function(*args)


def _nbytes(data: WeightData) -> int:
    return math.prod(map(int, data.shape)) * data.dtype.np.itemsize


def _batches(tensors: Mapping[str, WeightData]) -> Iterator[dict[str, WeightData]]:
    batch: dict[str, WeightData] = {}
    size = 0
    for name, data in tensors.items():
        if batch and size + _nbytes(data) > _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[name] = data
        size += _nbytes(data)
    yield batch


def _read(data: WeightData) -> np.ndarray:
    """Read a tensor without keeping it, as ``data.data`` would."""
    with in_memory(data.name, _nbytes(data)):
        return np.asarray(host_or_jax(data))
