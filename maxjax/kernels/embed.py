"""Embedding lookup: rows of a table that may be sharded over a mesh, or quantised."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import explicit
from .blocks import decode
from .matmul import kernel_operand, to_jax
from .quant_array import QuantArray


def embed(table: Any, rows: Any) -> jax.Array:
    """Looks up rows of ``table`` by their indices.

    Args:
        table: a Weight or an array ``[n, ...]``, or a QuantArray, of which only the rows that
            are looked up are dequantised.
        rows: integer indices ``[...]``; negative ones count from the end, -1 is the last row.

    Returns:
        The rows ``[..., *table.shape[1:]]`` in the dtype of the table, float32 for a quantised one; NaN
        for an index outside the table. On a mesh the result is sharded as ``rows`` are, and
        replicated along the axes of the table.

    Example:
        >>> import jax.numpy as jnp
        >>> print(embed(jnp.array([[1.0], [2.0]]), jnp.array([1, 2])))
        [[ 2.]
         [nan]]
    """
    table, rows = kernel_operand(table), jnp.asarray(rows)
    if isinstance(table, QuantArray):
        return _quantized(table, rows)
    table = to_jax(table)
    mesh = explicit.mesh_of(table, rows)
    out = None
    if mesh is not None:
        out = explicit.sharding(mesh, explicit.entries(rows) + [()] * (table.ndim - 1))
    if jnp.issubdtype(table.dtype, jnp.floating) and table.dtype.itemsize == 2:
        # On a CPU XLA converts the table to float32 for the lookup. That is fused into the
        # lookup, except inside a loop, where XLA would keep a float32 copy of the whole table.
        table, rows = jax.lax.optimization_barrier((table, rows))
    return table.at[rows].get(mode="fill", out_sharding=out)


def _quantized(table: QuantArray, rows: jax.Array) -> jax.Array:
    blocks, encoding = to_jax(table.blocks), table.encoding
    count = blocks.shape[0]
    if jnp.issubdtype(rows.dtype, jnp.unsignedinteger) and rows.dtype.itemsize >= 4:
        rows = jnp.minimum(
            rows, rows.dtype.type(2**31 - 1)
        )  # outside of the table, and not -1 as int32
    if (
        rows.dtype != jnp.int64
    ):  # comparisons with -count, and with counts above 127, need a signed type
        rows = rows.astype(jnp.int32)

    def run(blocks: Any, rows: Any) -> jax.Array:
        values = decode(encoding, blocks.at[rows].get(mode="fill", fill_value=0))
        # Blocks of some encodings cannot hold NaN, so rows outside the table are filled here.
        in_range = (rows >= -count) & (rows < count)
        in_range = in_range.reshape(rows.shape + (1,) * (values.ndim - rows.ndim))
        return jnp.where(in_range, values, jnp.nan)

    wanted = [*explicit.entries(rows), *[()] * (blocks.ndim - 1)]
    return explicit.automatic(run, explicit.mesh_of(blocks, rows), wanted)(blocks, rows)
