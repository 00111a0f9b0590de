"""The ranges of blocks of keys that each tile of queries may see; attention kernels read no others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

# Position of a key that nobody attends to, and of a query that is only padding.
NO_KEY, NO_QUERY = 2**31 - 1, -1


def key_ranges(
    attending: Any, rows: int, block: int, at: jax.Array, key_positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The first block of keys for each tile of queries, and the one after the last, ``[n, tiles, B]``.

    Args:
        attending: an ``Attending``: which keys a query attends to.
        rows, block: number of queries of a tile, and of keys of a block.
        at: positions of the queries ``[n, B, C]``, ``NO_QUERY`` for padding.
        key_positions: positions of the keys ``[B, S]``, ``NO_KEY`` for a key that nobody sees.

    Returns:
        Indices of blocks, int32. For a tile that sees no key they are ``NO_KEY`` and 0.

    Example:
        >>> from types import SimpleNamespace
        >>> positions = jnp.arange(8)[None]
        >>> low, high = key_ranges(SimpleNamespace(window=None), 4, 2, positions[None], positions)
        >>> low.tolist(), high.tolist()
        ([[[0], [0]]], [[[2], [4]]])
    """
    count, batch, queries = at.shape
    cut = lambda a, n, fill: jnp.pad(a, ((0, 0), (0, -a.shape[1] % n)), constant_values=fill)
    tiles = cut(at.reshape(count * batch, queries), rows, NO_QUERY).reshape(count, batch, -1, rows)
    last = jnp.max(tiles, axis=3)
    first = jnp.min(jnp.where(tiles < 0, NO_KEY, tiles), axis=3)
    blocks = cut(key_positions, block, NO_KEY).reshape(batch, -1, block)
    earliest = jnp.min(blocks, axis=2)
    latest = jnp.max(jnp.where(blocks == NO_KEY, -1, blocks), axis=2)
    sees = earliest[None, :, None] <= last[..., None]  # [n, B, tiles, blocks]
    if attending.window is not None:
        sees = sees & (latest[None, :, None] >= attending.first_seen(first)[..., None])
    number = jnp.arange(earliest.shape[1], dtype=jnp.int32)
    low = jnp.min(jnp.where(sees, number, NO_KEY), axis=3)
    high = jnp.max(jnp.where(sees, number + 1, 0), axis=3)
    return low.swapaxes(1, 2), high.swapaxes(1, 2)
