"""Splits a ragged batch into one batch for each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ...graph.value import TensorValue


def _numbers(x: Any) -> np.ndarray:
    array = TensorValue(x).value
    if isinstance(array, Tracer):
        raise NotImplementedError(
            "a batch whose parts depend on values cannot be split in a program, because XLA needs their sizes: split "
            "it before, or shard its axis over a mesh (jax.sharding.PartitionSpec)"
        )
    return np.asarray(array)


def _parts(splits: Any, offsets: Any, count: int) -> list[tuple[slice, slice, int]]:
    """For each part: the slice of its tokens, the slice of its offsets, and the index of its first token."""
    bounds, starts = _numbers(splits), _numbers(offsets)
    if len(bounds) != count + 1:
        raise ValueError(
            f"{count} parts need {count + 1} numbers in data_parallel_splits, not {len(bounds)}"
        )
    return [
        (slice(int(starts[a]), int(starts[b])), slice(int(a), int(b) + 1), int(starts[a]))
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def _on(value: Any, device: Any) -> TensorValue:
    return TensorValue(jax.device_put(TensorValue(value).value, device.to_jax()))


def split_batch(
    devices: Sequence[Any], input: Any, input_row_offsets: Any, data_parallel_splits: Any
) -> tuple[list[TensorValue], list[TensorValue]]:
    """Splits the sequences of a ragged batch into one batch for each device.

    Args:
        devices: DeviceRefs.
        input: ragged batch ``[tokens, …]``.
        input_row_offsets: offsets ``[B + 1]``: where each sequence begins, and where the last one ends.
        data_parallel_splits: index of the first sequence of each device, and then B, ``[len(devices) + 1]``.

    Returns:
        For each device the tokens of its sequences and their offsets, which start at 0, as arrays on that device.

    Raises:
        ValueError: ``devices`` is empty, or ``data_parallel_splits`` does not have one entry more than devices.
        NotImplementedError: the offsets or splits are tracers, and there are several devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import DeviceRef
        >>> inputs, offsets = split_batch([DeviceRef.CPU()] * 2, jnp.arange(5), jnp.array([0, 1, 3, 5]),
        ...                               jnp.array([0, 2, 3]))
        >>> [x.value.tolist() for x in inputs], [x.value.tolist() for x in offsets]
        ([[0, 1, 2], [3, 4]], [[0, 1, 3], [0, 2]])
    """
    devices = list(devices)
    if not devices:
        raise ValueError("a batch is split over at least one device")
    if len(devices) == 1:
        return [TensorValue(input)], [TensorValue(input_row_offsets)]
    batch, offsets = TensorValue(input), TensorValue(input_row_offsets)
    parts = _parts(data_parallel_splits, offsets, len(devices))
    return (
        [_on(batch[tokens], device) for (tokens, _, _), device in zip(parts, devices, strict=True)],
        [
            _on(offsets[rows] - first, device)
            for (_, rows, first), device in zip(parts, devices, strict=True)
        ],
    )


def split_batch_replicated(
    devices: Sequence[Any],
    input: Sequence[Any],
    input_row_offsets: Sequence[Any],
    input_row_offsets_int64: Any,
    data_parallel_splits: Any,
    prefix: str = "",
    group_size: int = 1,
) -> tuple[list[TensorValue], list[TensorValue]]:
    """:func:`split_batch` for a batch of which each device has a copy.

    Args:
        devices: DeviceRefs.
        input, input_row_offsets: copies of the batch and of its offsets, one for each device.
        input_row_offsets_int64: offsets on the host.
        data_parallel_splits: index of the first sequence of each part, and then the number B of sequences.
        prefix: argument of MAX, ignored.
        group_size: number of consecutive devices that share a part.

    Raises:
        ValueError: the lists or splits do not fit the devices.
        NotImplementedError: the offsets on the host or the splits are tracers, and there are several parts.
    """
    if (
        len(input) != len(devices)
        or len(input_row_offsets) != len(devices)
        or len(devices) % group_size
    ):
        raise ValueError(f"{len(devices)} devices in groups of {group_size} do not fit {len(input)} inputs and "
                         f"{len(input_row_offsets)} offsets")  # fmt: skip
    count = len(devices) // group_size
    batches, offsets = [TensorValue(x) for x in input], [TensorValue(x) for x in input_row_offsets]
    if count == 1:
        return batches, offsets
    parts = [
        one
        for one in _parts(data_parallel_splits, input_row_offsets_int64, count)
        for _ in range(group_size)
    ]
    return (
        [x[tokens] for x, (tokens, _, _) in zip(batches, parts, strict=True)],
        [x[rows] - first for x, (_, rows, first) in zip(offsets, parts, strict=True)],
    )
