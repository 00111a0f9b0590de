"""Collectives over lists of tensors, one for each device, as MAX's code writes them.

A list of tensors is what ``layer.shard(devices)`` and ``forward_sharded_layers`` work with. Eagerly, each result is
on the device of its input. In a program, XLA decides where parts of it run, so that a list is as many
copies: for a program that is spread over devices, keep one model and give its weights to a mesh (``Module.to``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..value import TensorValue
from .lift import axis_of


def inputs_of(
    op: str, inputs: Iterable[Any], signal_buffers: Iterable[Any] | None
) -> list[TensorValue]:
    """The tensors of a collective.

    Raises:
        ValueError: there is none, or not one signal buffer for each.
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
    """Neighbours that communicate, ``size`` of them in each group; all by default.

    Raises:
        ValueError: the groups are not whole.
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
        ValueError: they have not.
    """
    for one in group:
        if one.dtype != group[0].dtype or one.shape != group[0].shape:
            raise ValueError(f"{op} needs tensors of one dtype and shape, not {group[0].dtype} {group[0].shape} and "
                             f"{one.dtype} {one.shape}")  # fmt: skip


def together(values: Sequence[TensorValue]) -> list[Any]:
    """The arrays of tensors, on the device of the first one."""
    arrays = [x.value for x in values]
    return [placed(x, arrays[0]) for x in arrays]


def placed(x: Any, like: Any) -> Any:
    """An array on the device of another; traced arrays are on none."""
    if isinstance(x, Tracer) or isinstance(like, Tracer) or not getattr(like, "committed", False):
        return x
    return (
        x if x.sharding.device_set == like.sharding.device_set else jax.device_put(x, like.sharding)
    )


def all_summed(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None = None,
    group_size: int | None = None,
) -> list[TensorValue]:
    """For each tensor of a group, the sum of all of them."""
    values = inputs_of("allreduce.sum", inputs, signal_buffers)
    found: list[TensorValue] = []
    for group in groups_of("allreduce.sum", values, group_size):
        same_shapes("allreduce.sum", group)
        arrays = together(group)
        total = arrays[0]
        for one in arrays[1:]:
            total = total + one
        found += [TensorValue(placed(total, x.value)) for x in group]
    return found


def scattered_sums(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None = None,
    axis: int = 0,
    group_size: int | None = None,
) -> list[TensorValue]:
    """For each tensor of a group, its part of their sum along an axis; the first parts are one longer where
    they do not divide evenly."""
    values = inputs_of("reducescatter.sum", inputs, signal_buffers)
    groups = groups_of("reducescatter.sum", values, group_size)
    axis = axis_of(axis, values[0].rank, "reducescatter.sum")
    found: list[TensorValue] = []
    for group in groups:
        total = all_summed(group)[0].value
        base, more = divmod(total.shape[axis], len(group))
        start = 0
        for i, one in enumerate(group):
            stop = start + base + (i < more)
            part = jax.lax.slice_in_dim(total, start, stop, axis=axis)
            found.append(TensorValue(placed(part, one.value)))
            start = stop
    return found


def allgather(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None = None,
    axis: int = 0,
    group_size: int | None = None,
) -> list[TensorValue]:
    """The tensors of all devices joined along an axis, for each of them.

    Args:
        inputs: a tensor for each device; they may differ in size along the axis.
        signal_buffers, group_size: as for ``allreduce.sum``.
        axis: axis along which they are joined.

    Raises:
        ValueError: the tensors, their groups or the buffers do not fit each other.
    """
    values = inputs_of("allgather", inputs, signal_buffers)
    axis = axis_of(axis, values[0].rank, "allgather")
    found: list[TensorValue] = []
    for group in groups_of("allgather", values, group_size):
        joined = jnp.concatenate(together(group), axis=axis) if len(group) > 1 else group[0].value
        found += [TensorValue(placed(joined, x.value)) for x in group]
    return found


def distributed_broadcast(input: Any, signal_buffers: Iterable[Any]) -> list[TensorValue]:
    """The tensor on each device.

    Args:
        input: the tensor.
        signal_buffers: a buffer on each device.

    Raises:
        ValueError: there is no signal buffer.
    """
    value, buffers = TensorValue(input), list(signal_buffers)
    if not buffers:
        raise ValueError("distributed_broadcast needs at least one signal buffer")
    return [TensorValue(placed(value.value, getattr(one, "value", one))) for one in buffers]
