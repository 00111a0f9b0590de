"""Multi-token prediction (MTP): a layer after the model's last one guesses the token after the next one.

::

    h = hidden states of a token after the model's last norm, the inputs of the head
    x = eh_proj([enorm(embed_tokens[next token]), hnorm(h)])
    x = norm(layer(x))                                   with keys and values of its own, at the position of h
    logits of the token after the next one = lm_head(x)

A further guess has x in place of h, and the guessed token as the next one. So a text's entry at position i of the
layer's cache is made of h at i and of the token at i + 1: it is written when that token is read. The last hidden states
of each text wait for it (``MTPPool``).

Sources: DeepSeek-V3's technical report (arXiv:2412.19437), section 2.2; vLLM's ``deepseek_mtp`` for the order of the
two halves, and for x after the norm as the next h.

Shapes: B rows of T tokens, E features, V tokens of the vocabulary; R slots of texts.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...errors import UserInputError
from ...nn.kv_cache.kinds import Group
from ...nn.kv_cache.pages import MTPPool, PagedCache
from ..names import Names
from .cache import LayerCache

KEPT = 16
"""The number of last tokens whose hidden states are kept: more than a step with guesses takes back."""


class PredictsMore:
    """Mixin of models whose files may have a layer of multi-token prediction.

    Attributes:
        mtp: the layer, or None.
        mtp_class: class of the layer, made with ``(config, dtype)``; its call takes the states h, the embedded next
            tokens and the cache, and returns x and the cache. None: the family has none that maxjax knows.
    """

    mtp: Any = None
    mtp_class: ClassVar[Any] = None
    config: Any
    dtype: Any
    model: Any
    family: Any

    def make_mtp(self) -> None:
        """Makes the layer of multi-token prediction.

        Raises:
            UserInputError: the model's family has none.

        Example:
            >>> from maxjax.models import GLM4MoE, GLM4MoEConfig
            >>> model = GLM4MoE(GLM4MoEConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2))
            >>> model.make_mtp()
            >>> sorted(name for name in model.raw_state_dict() if name.startswith("mtp.") and "norm" in name)[:2]
            ['mtp.enorm.weight', 'mtp.hnorm.weight']
        """
        if self.mtp_class is None:
            raise UserInputError(
                f"multi-token prediction is not supported for {type(self).__name__}"
            )
        self.mtp = self.mtp_class(self.config, self.dtype)

    @property
    def tensor_names(self) -> Names:
        """The names of tensors in files, with those of the layer if the model has it."""
        names = self.family.names
        return names if self.mtp is None else names.with_mtp(self.config.num_hidden_layers)

    @property
    def _mtp_groups(self) -> dict[str, Group]:
        """The groups of the layer in its cache, by name: those of the model's last layer."""
        kept = self.config.states(self.config.num_hidden_layers - 1)
        return {name: Group(kind, 1, (0,), 0) for name, kind in kept.items()}

    def predict(self, ids: jax.Array, cache: PagedCache, *, lengths: jax.Array) -> Any:
        """Guesses: the logits of the token after each of these, which the model has not read.

        Args:
            ids: the last token of each text, int32 ``[B, 1]``.
            cache: the cache of the tokens before them; its pool has an ``MTPPool``.
            lengths: 1 for each real row and 0 for padding, int32 ``[B]``.

        Returns:
            Logits ``[B, V]`` in float32, and the cache in which the states x stand for those of the token.
        """
        pool, at = _pool(cache), cache.lengths - 1
        x, pool = self._run_mtp(_kept(pool, cache, at), ids, cache, pool, at, lengths)
        pool = pool.replace(states=_keep(pool, cache, x[:, None], lengths))
        return self.logits(x), cache.with_mtp(pool, cache.lengths + lengths)  # type: ignore[attr-defined]

    def _follow(
        self, x: jax.Array, ids: jax.Array, cache: PagedCache, counts: jax.Array | None
    ) -> MTPPool:
        """The pool of the layer after tokens that the model has read.

        Args:
            x: their states, ``[B, T, E]``, or ``[B, E]`` for one token of each row.
            ids: int32 ``[B, T]``.
            cache: the cache before them.
            counts: number of real tokens of each row, int32 ``[B]``; None: all are.
        """
        pool, (rows, width) = _pool(cache), ids.shape
        at = cache.lengths - 1  # the position of the first states that the layer gets in each row
        counts = jnp.full(rows, width, jnp.int32) if counts is None else counts
        # Not of states that are not there: before a text, and of tokens whose pages another text has written.
        is_known = at >= (0 if cache.found is None else cache.found)
        before = _kept(pool, cache, at)
        if x.ndim == 2:
            h = jnp.where(_follows(cache, counts)[:, None], jnp.roll(x, 1, axis=0), before)
            run = h, ids, cache, pool, jnp.maximum(at, 0), jnp.where(is_known, counts, 0)
        else:
            skip = 1 - is_known.astype(jnp.int32)
            h = jnp.concatenate([before[:, None].astype(x.dtype), x[:, :-1]], axis=1)
            places = jnp.minimum(jnp.arange(width)[None] + skip[:, None], width - 1)
            h = jnp.take_along_axis(h, places[..., None], axis=1)
            of = jnp.take_along_axis(ids, places, axis=1)
            run = h, of, cache, pool, at + skip, jnp.maximum(counts - skip, 0)
        _, pool = self._run_mtp(*run)
        states = _keep(pool, cache, x[:, None] if x.ndim == 2 else x, counts)
        return pool.replace(states=states)

    def _run_mtp(
        self, h: jax.Array, ids: jax.Array, cache: PagedCache, pool: MTPPool, starts: jax.Array, counts: jax.Array,
    ) -> tuple[jax.Array, MTPPool]:  # fmt: skip
        """The states x of tokens ``ids`` ``[B, T]`` after states ``h`` at ``starts`` and after, and the pool."""
        width = ids.shape[1]
        inner = PagedCache(
            pool.pages,
            cache.table,
            starts,
            cache.rows,
            cache.text_lengths,
            is_ragged=cache.is_ragged,
            window_table=cache.window_table,
        )
        view: LayerCache = self._view(inner, counts, width, self._mtp_groups)  # type: ignore[attr-defined]
        embedded = self.model.embed_tokens(ids[:, 0] if h.ndim == 2 else ids).astype(self.dtype.np)
        x, view = self.mtp(h.astype(self.dtype.np), embedded, view)
        return x, pool.replace(pages=inner.with_states(view.states, starts + counts).pool)


def _pool(cache: PagedCache) -> MTPPool:
    assert cache.pool.mtp is not None
    return cache.pool.mtp


def _rows(cache: PagedCache) -> jax.Array:
    """The slot of each row."""
    assert cache.rows is not None
    return cache.rows


def _follows(cache: PagedCache, counts: jax.Array) -> jax.Array:
    """Whether the row before each is the token before it of the same text, bools ``[B]``."""
    before = lambda array: jnp.roll(array, 1)
    is_next = (before(_rows(cache)) == _rows(cache)) & (before(cache.lengths) + 1 == cache.lengths)
    return is_next & (before(counts) > 0) & (jnp.arange(len(counts)) > 0)


def _kept(pool: MTPPool, cache: PagedCache, at: jax.Array) -> jax.Array:
    """The kept states at position ``at`` of each row, ``[B, E]``."""
    return pool.states.at[_rows(cache), at % KEPT].get(mode="clip")


def _keep(pool: MTPPool, cache: PagedCache, x: jax.Array, counts: jax.Array) -> jax.Array:
    """The kept states with those of the last of these tokens, states ``[B, T, E]``, of each text."""
    slots, steps = pool.states.shape[0], jnp.arange(x.shape[1])[None]
    at = cache.lengths[:, None] + steps
    ends = jnp.where(counts > 0, cache.lengths + counts, 0)
    ends = jnp.zeros(slots, jnp.int32).at[_rows(cache)].max(ends, mode="drop")
    is_last = at >= jnp.take(ends, _rows(cache), mode="clip")[:, None] - KEPT
    is_real = steps < counts[:, None]
    rows = jnp.where(is_real & is_last, _rows(cache)[:, None], slots)
    return pool.states.at[rows, at % KEPT].set(x.astype(pool.states.dtype), mode="drop")
