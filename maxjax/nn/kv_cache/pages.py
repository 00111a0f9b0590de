"""PagedCache: a KV cache whose keys and values lie in pages of a pool that many sequences share.

A page holds P consecutive tokens of one sequence, for all layers. The table of a sequence says which page of the pool
holds its tokens ``m P`` to ``m P + P - 1``. So a sequence takes memory as it grows, sequences with an equal prefix
share its pages, and a call may be for any of the sequences (W. Kwon et al., arXiv:2309.06180). Layers with a sliding
window may have pages and tables of their own, in which only the tokens that can still be seen have a page.

Shapes: L layers, N pages, K KV heads, P tokens of a page, head dimension D; B sequences of a call, tables of M pages;
R rows of recurrent states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...graph.placement.rows import total
from ...kernels import explicit
from ...rendering.rendered import Rendered, summary
from ...rendering.row import Row, bytes_text
from .kinds import KeysValues, Place, States
from .recurrent import Recurrent
from .slots import Latent, Slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PagePool(Rendered):
    """The memory that sequences share: pages of keys and values, and rows of recurrent states. A pytree.

    Attributes:
        states: by the name of the group of layers, keys and values ``[L, N, K, P, D]`` or recurrent states
            ``[L, R, ...]``.
            Those of layers with pages of their own have a ``window``.
        parts: number G of equal parts into which a mesh splits pages and rows. In a call, sequences of a part of the
            batch have rows of the same part, and tables with numbers of pages in it.
        mtp: what a layer of multi-token prediction has of the same sequences; None without one.

    Example:
        >>> groups = {"full": (2, KeysValues(1, 4), Place())}
        >>> pool = PagePool.of(groups, pages=3, page_size=8, rows=1, dtype=jnp.float32)
        >>> pool.pages, pool.page_size, pool.states["full"].keys.shape
        (3, 8, (2, 3, 1, 8, 4))
    """

    states: Mapping[str, Slots | Latent | Recurrent]
    parts: int = dataclasses.field(default=1, metadata={"static": True})
    mtp: MTPPool | None = None

    @classmethod
    def of(
        cls,
        groups: Mapping[str, tuple[int, KeysValues | States, Place]],
        *,
        pages: int,
        page_size: int,
        rows: int,
        dtype: Any,
        zeros: Any = jnp.zeros,
        parts: int = 1,
        window_pages: int = 0,
    ) -> PagePool:
        """An empty pool for the given groups of layers.

        Args:
            groups: by name, the number of layers, the kind of their state, and its Place.
            pages, page_size, rows: sizes N, P and R.
            dtype: dtype of keys and values: a float, or int8.
            zeros: ``jnp.zeros``, or a function with its arguments that makes placeholders.
            parts: number G of parts into which a mesh splits pages and rows.
            window_pages: number of pages of layers with a window; 0: they have the pages of the others.
        """
        states: dict[str, Any] = {}
        for name, (layers, kind, place) in groups.items():
            if isinstance(kind, States):
                states[name] = kind.make(layers, rows, 1, dtype, place, zeros)
                continue
            # A window is a matter of the mask: a page holds all of its tokens.
            window = kind.window if window_pages else None
            kind = dataclasses.replace(kind, window=None)
            count = pages if window is None else window_pages
            made = kind.make(layers, count, page_size, dtype, place, zeros)
            states[name] = dataclasses.replace(made, window=window)
        return cls(states, parts)

    @property
    def _tokens(self) -> list[Slots | Latent]:
        return [s for s in self.states.values() if not isinstance(s, Recurrent)]

    @property
    def pages(self) -> int:
        """The number N of pages of layers that keep all tokens; 0 if there are none."""
        return next((s.keys.shape[1] for s in self._tokens if s.window is None), 0)

    @property
    def window_pages(self) -> int:
        """The number of pages of layers with a window; 0 if they have none of their own."""
        return next((s.keys.shape[1] for s in self._tokens if s.window is not None), 0)

    @property
    def page_size(self) -> int:
        """The number P of tokens of a page; 0 if no layer has keys and values."""
        return next((s.capacity for s in self._tokens), 0)

    def _mx_row(self) -> Row:
        arrays = {
            f"{name}{jax.tree_util.keystr(path)}": leaf
            for name, state in (*self.states.items(), ("mtp", self.mtp))
            for path, leaf in jax.tree.leaves_with_path(state)
        }
        return total("PagePool", arrays)

    def _mx_title(self, row: Row) -> str:
        of_windows = f" and {self.window_pages} for windows" if self.window_pages else ""
        return (
            f"PagePool({self.pages} pages of {self.page_size} tokens{of_windows}, "
            f"{bytes_text(row.nbytes)})"
        )

    def __repr__(self) -> str:
        return summary(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MTPPool:
    """What a layer of multi-token prediction has of the sequences of a pool. A pytree.

    Attributes:
        pages: its keys and values, in pages with the numbers that sequences have in the pool.
        states: hidden states of the last W tokens of each sequence, ``[R, W, E]``: of position p in place p mod W.
    """

    pages: PagePool
    states: jax.Array

    def replace(self, **changes: Any) -> MTPPool:
        """A copy with other attributes."""
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """What a call of a language model needs of a pool: which pages and rows its B sequences have. A pytree.

    ``model(ids, cache)`` takes it as it takes a ``KVCache``, inside of ``jax.jit``.

    Attributes:
        pool: the pool, with these sequences and others.
        table: the pages of each sequence in their order, int32 ``[B, M]``; other numbers than 0 to N - 1 are no page.
        lengths: number of stored tokens of each sequence, int32 ``[B]``.
        rows: row of each sequence in the recurrent states, int32 ``[B]``; R for a sequence that is padding. None: the
            states are those of these sequences (:meth:`of_sequences`).
        text_lengths: as in ``KVCache``: the length for which RoPE rotates the keys of each sequence, int32 ``[B]``;
            None for models whose RoPE does not depend on it.
        is_ragged: whether several sequences of the call are tokens of the same text, one after the other: each token
            is then stored before any attends.
        found: number of first tokens of each sequence that are in pages of other ones, int32 ``[B]``; None: none are.
        offsets: as in ``KVCache``; None: all are 0.
        window_table: as ``table``, the pages of layers with a window, of those tokens that later ones see; None: the
            pool has no pages for them alone.
    """

    pool: PagePool
    table: jax.Array
    lengths: jax.Array
    rows: jax.Array | None
    text_lengths: jax.Array | None = None
    is_ragged: bool = dataclasses.field(default=False, metadata={"static": True})
    found: jax.Array | None = None
    offsets: jax.Array | None = None
    window_table: jax.Array | None = None

    @property
    def batch(self) -> int:
        """Number B of sequences of the call."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Maximum number M · P of tokens of a sequence in this call; any number if no layer has keys and values."""
        return self.table.shape[1] * self.pool.page_size if self.pool.page_size else 2**31 - 1

    @property
    def states(self) -> dict[str, Any]:
        """The states by the name of the group: whole pools, and the recurrent states of the sequences of the call."""
        if self.rows is None:
            return dict(self.pool.states)
        return {
            name: self._of_rows(state) if isinstance(state, Recurrent) else state
            for name, state in self.pool.states.items()
        }

    def of_sequences(self) -> PagedCache:
        """A copy with the recurrent states of these sequences alone, for several calls before :meth:`put_back`."""
        pool = dataclasses.replace(self.pool, states=self.states)
        # Without recurrent states the rows are those of the layer of multi-token prediction.
        rows = None if self.pool.mtp is None else self.rows
        return dataclasses.replace(self, pool=pool, rows=rows)

    def put_back(self, pool: PagePool) -> PagePool:
        """The pool with the states after calls of what :meth:`of_sequences` has returned, whose pool is ``pool``."""
        found = self.with_states(pool.states, self.lengths).pool
        return dataclasses.replace(found, mtp=pool.mtp)

    def _of_rows(self, state: Recurrent) -> Recurrent:
        """The states of the sequences; zeros for those without tokens, whose row had another one before."""

        def take(array: jax.Array) -> jax.Array:
            each, rows = self._by_part(array)
            found = jax.vmap(lambda a, i: jnp.take(a, i, axis=1, mode="clip"), (1, 0), 1)(
                each, rows
            )
            found = found.reshape(array.shape[0], -1, *array.shape[2:])
            new = (self.lengths == 0).reshape(1, -1, *(1,) * (array.ndim - 2))
            return jnp.where(new, jnp.zeros_like(found), found)

        return Recurrent({name: _automatic(take, array) for name, array in state.arrays.items()})

    def _by_part(self, array: jax.Array) -> tuple[jax.Array, jax.Array]:
        """States ``[L, G, R / G, ...]``, and the rows ``[G, B / G]`` of the sequences in their part."""
        parts = self.pool.parts
        assert self.rows is not None
        size = array.shape[1] // parts
        rows = jnp.where(self.rows < array.shape[1], self.rows % size, size)
        return array.reshape(array.shape[0], parts, size, *array.shape[2:]), rows.reshape(parts, -1)

    def with_states(self, states: Mapping[str, Any], lengths: jax.Array) -> PagedCache:
        """A copy with the states after a call, and other lengths."""
        found = dict(self.pool.states)
        for name, state in states.items():
            if isinstance(state, Recurrent) and self.rows is not None:
                old = self.pool.states[name]
                assert isinstance(old, Recurrent)
                state = Recurrent(
                    {
                        key: _automatic(self._put, old.arrays[key], array)
                        for key, array in state.arrays.items()
                    }
                )
            found[name] = state
        pool = dataclasses.replace(self.pool, states=found)
        return dataclasses.replace(self, pool=pool, lengths=lengths)

    def _put(self, array: jax.Array, new: jax.Array) -> jax.Array:
        """States ``[L, R, ...]`` with those ``[L, B, ...]`` of the sequences of the call."""
        each, rows = self._by_part(array)
        put = lambda a, i, b: a.at[:, i].set(b, mode="drop")
        of_parts = new.reshape(*each.shape[:2], -1, *each.shape[3:])
        return jax.vmap(put, (1, 0, 1), 1)(each, rows, of_parts).reshape(array.shape)

    def with_mtp(self, mtp: MTPPool, lengths: jax.Array) -> PagedCache:
        """A copy with other states of the layer of multi-token prediction, and other lengths."""
        pool = dataclasses.replace(self.pool, mtp=mtp)
        return dataclasses.replace(self, pool=pool, lengths=lengths)

    def read_for(self, after: jax.Array) -> jax.Array:
        """The lengths ``[B]`` for which RoPE is computed in a call after which sequences have ``after`` tokens."""
        return after if self.text_lengths is None else self.text_lengths

    def check_room(self, counts: Any) -> None:
        """Nothing: who fills the table provides for room. Tokens without a page have logits of NaN."""


def _automatic(f: Any, array: jax.Array, *others: jax.Array) -> jax.Array:
    """The result of ``f``, which is sharded as ``array`` is where meshes have Explicit axes."""
    return explicit.automatic(f, explicit.mesh_of(array), explicit.entries(array))(array, *others)
