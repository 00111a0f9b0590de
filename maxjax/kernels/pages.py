"""Tables of pages: which page of a pool holds which tokens of each sequence.

A pool ``[L, N, K, P, ...]`` has N pages of P tokens each. Entry m of a row of a table ``[B, M]`` is the page
that holds the tokens m · P to m · P + P - 1 of that sequence; an entry outside 0 to N - 1 means no page.

Shapes: L layers, N pages, K KV heads, P slots of a page, B sequences, M entries for each, T tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Places(NamedTuple):
    """Where tokens are in a pool.

    Attributes:
        page, slot: the page and the slot in it of each token, ``[B, T]``; slot P, which does not exist, without a page.
        exists: whether each token has a page, bools ``[B, T]``.
    """

    page: jax.Array
    slot: jax.Array
    exists: jax.Array


def places_of(table: jax.Array, position: jax.Array, pages: int, size: int) -> Places:
    """Return the places of the tokens at ``position`` ``[B, T]``, in a pool of ``pages`` pages of ``size`` tokens.

    Example:
        >>> found = places_of(jnp.array([[7, 2, -1]]), jnp.array([[3, 4, 8, 12]]), 8, 4)
        >>> found.page[0, :2].tolist(), found.slot[0].tolist()
        ([7, 2], [3, 0, 4, 4])
    """
    count = table.shape[1]
    page = jnp.take_along_axis(table, jnp.clip(position // size, 0, count - 1), axis=1)
    exists = (position >= 0) & (position < count * size) & is_page(page, pages)
    return Places(page, jnp.where(exists, position % size, size), exists)


def is_page(table: jax.Array, pages: int) -> jax.Array:
    """Return whether each entry of a table is one of ``pages`` pages."""
    return (table >= 0) & (table < pages)


def checked_table(table: Any, batch: Any) -> jax.Array:
    """Return the table of ``batch`` sequences as int32.

    Raises:
        ValueError: it is not integers ``[B, M]`` with M > 0.
    """
    table = jnp.asarray(table)
    is_integer = jnp.issubdtype(table.dtype, jnp.integer)
    if table.ndim != 2 or table.shape[0] != batch or table.shape[1] == 0 or not is_integer:
        raise ValueError(
            f"table must be integers [{batch}, M] with M > 0, got {table.dtype}{list(table.shape)}"
        )
    return table.astype(jnp.int32)
