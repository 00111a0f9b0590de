"""Collectives over lists of tensors, one tensor for each device, as in MAX.

``layer.shard(devices)`` and ``forward_sharded_layers`` work with such lists. Eagerly, each result is on the device
of its input. Under ``jax.jit`` the tensors of a list are not bound to devices, so that each result is a copy: for a
program that runs on several devices, keep one model and shard its weights over a mesh (``Module.to``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from ..placement.arrays import beside
from ..value import TensorValue
from .lift import axis_of


def inputs_of(
    op: str, inputs: Iterable[Any], signal_buffers: Iterable[Any] | None
) -> list[TensorValue]:
    """The tensors of a collective.

    Raises:
        ValueError: there is no tensor, or not one signal buffer for each.
    """
    values = [TensorValue(x) for x in inputs]
    if not values:
        raise ValueError(f"{op} needs at least one tensor")
    if signal_buffers is not None and (count := len(list(signal_buffers))) != len(values):
        raise ValueError(
            f"{op} needs one signal buffer for each tensor, not {count} for {len(values)}"
        )
    return values


def groups_of(op: str, values: Sequence[TensorValue], size: int | None) -> list[list[TensorValue]]:
    """The tensors in groups of ``size`` consecutive ones, which communicate; one group if ``size`` is None.

    Raises:
        ValueError: ``size`` does not divide the number of tensors.
    """
    size = len(values) if size is None else size
    if size < 1 or len(values) % size:
        raise ValueError(
            f"{op} needs a group_size that divides the number of its tensors, {len(values)}, not {size}"
        )
    return [list(values[start : start + size]) for start in range(0, len(values), size)]


def same_shapes(op: str, group: Sequence[TensorValue]) -> None:
    """Checks that tensors have one dtype and shape.

    Raises:
        ValueError: they differ.
    """
    for one in group:
        if one.dtype != group[0].dtype or one.shape != group[0].shape:
            raise ValueError(f"{op} needs tensors of one dtype and shape, not {group[0].dtype} {group[0].shape} and "
                             f"{one.dtype} {one.shape}")  # fmt: skip


def together(values: Sequence[TensorValue]) -> list[Any]:
    """The arrays of tensors, on the device of the first one."""
    arrays = [x.value for x in values]
    return [beside(x, arrays[0]) for x in arrays]


def allgather(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None = None,
    axis: int = 0,
    group_size: int | None = None,
) -> list[TensorValue]:
    """The devices' tensors concatenated along an axis, once for each device.

    Args:
        inputs: a tensor for each device; they may differ in size along the axis.
        signal_buffers, group_size: as for ``allreduce.sum``.
        axis: axis along which the tensors are concatenated.

    Raises:
        ValueError: there is no tensor or no such axis, ``group_size`` does not divide the number of tensors, the
            number of buffers is another, or the tensors differ in dtype, rank, or size along another axis.
    """
    values = inputs_of("allgather", inputs, signal_buffers)
    axis = axis_of(axis, values[0].rank, "allgather")
    found: list[TensorValue] = []
    for group in groups_of("allgather", values, group_size):
        _same_along_others(group, axis)
        joined = jnp.concatenate(together(group), axis=axis) if len(group) > 1 else group[0].value
        found += [TensorValue(beside(joined, x.value)) for x in group]
    return found


def _same_along_others(group: Sequence[TensorValue], axis: int) -> None:
    kinds = [(one.dtype, [*one.shape[:axis], *one.shape[axis + 1 :]]) for one in group]
    for one, kind in zip(group, kinds, strict=True):
        if kind != kinds[0] or one.rank != group[0].rank:
            raise ValueError(f"allgather needs tensors of one dtype, and of one size along all axes but {axis}, not "
                             f"{group[0].dtype} {group[0].shape} and {one.dtype} {one.shape}")  # fmt: skip


def distributed_broadcast(input: Any, signal_buffers: Iterable[Any]) -> list[TensorValue]:
    """A copy of a tensor on the device of each signal buffer.

    Args:
        input: the tensor.
        signal_buffers: a buffer on each device that receives the tensor.

    Raises:
        ValueError: there is no signal buffer.
    """
    value, buffers = TensorValue(input), list(signal_buffers)
    if not buffers:
        raise ValueError("distributed_broadcast needs at least one signal buffer")
    return [TensorValue(beside(value.value, getattr(one, "value", one))) for one in buffers]
