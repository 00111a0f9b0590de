"""Floor 2. Rows of a table that may be split over a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import explicit
from .matmul import _array


def embed(table: Any, rows: Any) -> jax.Array:
    """Rows of ``table`` by number; NaN for a number outside of it, -1 is the last.

    Args:
        table: A Weight or an array ``[n, ...]``.
        rows: Integers ``[...]``.

    Returns:
        ``[..., *table.shape[1:]]`` in the dtype of the table. On a mesh the result is placed as
        ``rows`` are: every device has whole rows of its part of the batch.

    Example:
        >>> import jax.numpy as jnp
        >>> print(embed(jnp.array([[1.0], [2.0]]), jnp.array([1, 2])))
        [[ 2.]
         [nan]]
    """
    table, rows = _array(table), jnp.asarray(rows)
    mesh = explicit.mesh_of(table, rows)
    out = None
    if mesh is not None:
        out = explicit.sharding(mesh, explicit.entries(rows) + [()] * (table.ndim - 1))
    if jnp.issubdtype(table.dtype, jnp.floating) and table.dtype.itemsize == 2:
        # XLA on a CPU widens the table for the lookup. That is part of the lookup's own loop,
        # unless there is one round it: then it would keep a float32 copy of all of it.
        table, rows = jax.lax.optimization_barrier((table, rows))
    return table.at[rows].get(mode="fill", out_sharding=out)
