"""The activation between the projections of a device's experts, under MAX's path of its kernels."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ....absent import absent as _absent
from ....graph.ops.lift import lift
from ...activation import GatedActivation


@lift
def fused_silu(
    input: Any, row_offsets: Any, activation: Any = None, interleaved: bool = False
) -> Any:
    """The gated activation of the rows that the experts of a device got.

    Args:
        input: ``[M, 2 F]``.
        row_offsets: ``[L + 1]``, where the rows of each expert begin; those behind the last give 0.
        activation: a GatedActivation; ``silu(gate) · up`` by default.
        interleaved: whether gates and up projections are in turn, and not one after the other.

    Returns:
        ``[M, F]``.

    Raises:
        ValueError: the activation has a ``gated_activation_fn``.

    Example:
        >>> y = fused_silu(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([0, 1]))
        >>> [f"{x:.2f}" for x in y[:, 0]]
        ['1.46', '0.00']
    """
    found = activation or GatedActivation()
    found.kernel_parameters()  # refuses a function
    received = jnp.arange(input.shape[0]) < row_offsets[-1].astype(jnp.int32)
    rows = jnp.where(received[:, None], input, 0)  # what is behind them may be no numbers
    if interleaved:
        rows = jnp.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)
    return found(rows, input.shape[1] // 2)


__getattr__ = _absent(__name__)
