"""``allreduce.sum``, under MAX's path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..value import TensorValue
from .collectives import all_summed


def sum(
    inputs: Iterable[Any],
    signal_buffers: Iterable[Any] | None = None,
    group_size: int | None = None,
) -> list[TensorValue]:
    """The sum of the tensors of all devices, for each of them.

    Args:
        inputs: a tensor for each device, of one dtype and shape.
        signal_buffers: as many buffers, which MAX's devices synchronise with; ignored.
        group_size: number of neighbours that sum with each other; all by default.

    Raises:
        ValueError: the tensors, their groups or the buffers do not fit each other.

    Example:
        >>> import jax.numpy as jnp
        >>> [print(x.value) for x in sum([jnp.ones(2), jnp.full(2, 3.0)])] and None
        [4. 4.]
        [4. 4.]
    """
    return all_summed(inputs, signal_buffers, group_size)
