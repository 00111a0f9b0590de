"""Rows of a table that may be split over a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import explicit
from .blocks import decode
from .matmul import _array, _operand
from .quant_array import QuantArray


def embed(table: Any, rows: Any) -> jax.Array:
    """Rows of ``table`` by number; NaN for a number outside of it, -1 is the last.

    Args:
        table: A Weight or an array ``[n, ...]``, or a QuantArray, of which only the rows are decoded.
        rows: Integers ``[...]``.

    Returns:
        ``[..., *table.shape[1:]]`` in the dtype of the table, float32 for a packed one. On a
        mesh the result is placed as ``rows`` are: every device has whole rows of its part of
        the batch.

    Example:
        >>> import jax.numpy as jnp
        >>> print(embed(jnp.array([[1.0], [2.0]]), jnp.array([1, 2])))
        [[ 2.]
         [nan]]
    """
    table, rows = _operand(table), jnp.asarray(rows)
    if isinstance(table, QuantArray):
        return _packed(table, rows)
    table = _array(table)
    mesh = explicit.mesh_of(table, rows)
    out = None
    if mesh is not None:
        out = explicit.sharding(mesh, explicit.entries(rows) + [()] * (table.ndim - 1))
    if jnp.issubdtype(table.dtype, jnp.floating) and table.dtype.itemsize == 2:
        # XLA on a CPU widens the table for the lookup. That is part of the lookup's own loop,
        # unless there is one round it: then it would keep a float32 copy of all of it.
        table, rows = jax.lax.optimization_barrier((table, rows))
    return table.at[rows].get(mode="fill", out_sharding=out)


def _packed(table: QuantArray, rows: jax.Array) -> jax.Array:
    blocks, encoding = _array(table.blocks), table.encoding
    count = blocks.shape[0]

    def run(blocks: Any, rows: Any) -> list[jax.Array]:
        found = decode(encoding, blocks.at[rows].get(mode="fill", fill_value=0))
        # There is no NaN among blocks of some encodings, to fill in for a row that is not there.
        there = (rows >= -count) & (rows < count)
        there = there.reshape(rows.shape + (1,) * (found.ndim - rows.ndim))
        return [jnp.where(there, found, jnp.nan)]

    mesh = explicit.mesh_of(blocks, rows)
    if mesh is None:
        return run(blocks, rows)[0]
    wanted = [[*explicit.entries(rows), *[()] * (blocks.ndim - 1)]]
    return explicit.automatic(run, mesh, wanted)(blocks, rows)[0]
