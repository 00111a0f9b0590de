"""``fused_silu``, the gated activation of a device's experts, under MAX's path of its kernels."""

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
    """The gated activation of the rows that the experts of a device received.

    Args:
        input: gate and up projections ``[M, 2 F]``.
        row_offsets: offsets of the rows of each expert, ``[L + 1]``; rows after the last offset give 0.
        activation: GatedActivation; ``silu(gate) · up`` by default.
        interleaved: whether gates and up projections alternate; otherwise all gates precede all up projections.

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
    found.kernel_parameters()  # raises if there is a gated_activation_fn
    received = jnp.arange(input.shape[0]) < row_offsets[-1].astype(jnp.int32)
    rows = jnp.where(received[:, None], input, 0)  # the other rows may hold NaN
    if interleaved:
        rows = jnp.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)
    return found(rows, input.shape[1] // 2)


__getattr__ = _absent(__name__)
