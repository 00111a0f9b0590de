"""The tokens so far, as the penalties need them, and the logits with penalties and bans.

Counts per token of the vocabulary rather than the tokens themselves: a step adds one number to
each row, and using them is elementwise, whatever the length of the text.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...errors import UserInputError
from .settings import Amounts, Sampling


class History(NamedTuple):
    """The tokens so far of each text of a batch. A pytree; 5 bytes per token of the vocabulary.

    Attributes:
        prompt: Which tokens the prompt has, bool ``[B, V]``.
        counts: How often each token is in the answer so far, int32 ``[B, V]``.
    """

    prompt: jax.Array
    counts: jax.Array

    @staticmethod
    def start(ids: jax.Array, vocab_size: int, lengths: jax.Array | None = None) -> History:
        """The history of texts of which only the prompt is there.

        Args:
            ids: The prompts' token ids, integers ``[B, T]``, padded on the right. An id outside
                the vocabulary is left out.
            vocab_size: How wide the logits are (with their padding, if they have any).
            lengths: How many ids of each row are real, ``[B]``; all when absent.

        Example:
            >>> History.start(jnp.array([[2, 0, 3]]), 5, jnp.array([2])).prompt.tolist()
            [[True, False, True, False, False]]
        """
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise UserInputError(
                f"the history is made of token ids [B, T], not of {ids.dtype}{list(ids.shape)}"
            )
        real = (ids >= 0) & (ids < vocab_size)
        if lengths is not None:
            real &= jnp.arange(ids.shape[1], dtype=lengths.dtype)[None, :] < lengths[:, None]
        # A negative index would count from the end: what is left out goes past the end instead.
        places = jnp.where(real, ids.astype(jnp.int32), jnp.int32(vocab_size))
        empty = jnp.zeros((ids.shape[0], vocab_size), bool)
        rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        return History(
            empty.at[rows, places].set(True, mode="drop"), jnp.zeros(empty.shape, jnp.int32)
        )

    def add(self, tokens: jax.Array, active: jax.Array | None = None) -> History:
        """The history with one more token of the answer in each row.

        Args:
            tokens: int32 ``[B]``.
            active: Rows that are still being written, bool ``[B]``; all when absent.

        Example:
            >>> h = History.start(jnp.array([[2]]), 4).add(jnp.array([3])).add(jnp.array([3]))
            >>> h.counts.tolist()
            [[0, 0, 0, 2]]
        """
        one = jnp.ones(tokens.shape, jnp.int32) if active is None else active.astype(jnp.int32)
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return self._replace(counts=self.counts.at[rows, tokens].add(one, mode="drop"))


def adjusted(
    logits: jax.Array,
    settings: Sampling,
    amounts: Amounts,
    history: History | None,
    vocab_size: int,
) -> jax.Array:
    """Logits with bias, penalties and bans, float32 ``[B, V]``; -inf past ``vocab_size``.

    Example:
        >>> banned = Sampling(banned=[1])
        >>> adjusted(jnp.zeros((1, 4)), banned, banned.amounts, None, 3).tolist()
        [[0.0, -inf, 0.0, -inf]]
    """
    _check(settings, history, logits.shape, vocab_size)
    values = logits.astype(jnp.float32)
    if settings.logit_bias:
        tokens, biases = zip(*dict(settings.logit_bias).items(), strict=True)
        values = values.at[:, jnp.array(tokens, jnp.int32)].add(
            jnp.array(biases, jnp.float32)[None, :], unique_indices=True, indices_are_sorted=True
        )
    if settings.needs_history:
        assert history is not None  # checked above
        values = _penalised(values, settings, amounts, history)
    if settings.banned:
        values = values.at[:, jnp.array(tuple(settings.banned), jnp.int32)].set(
            -jnp.inf, unique_indices=True, indices_are_sorted=True
        )
    return without_padding(values, vocab_size)


def without_padding(values: jax.Array, vocab_size: int) -> jax.Array:
    """Values ``[B, V]`` with -inf in the columns that are no token."""
    if vocab_size == values.shape[1]:
        return values
    column = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.where(column < vocab_size, values, -jnp.inf)


def _penalised(
    values: jax.Array, settings: Sampling, amounts: Amounts, history: History
) -> jax.Array:
    if settings.repetition_penalty != 1:
        seen = history.prompt | (history.counts > 0)
        penalty = amounts.repetition_penalty
        values = jnp.where(seen, jnp.where(values < 0, values * penalty, values / penalty), values)
    if settings.frequency_penalty != 0:
        values = values - amounts.frequency_penalty * history.counts.astype(jnp.float32)
    if settings.presence_penalty != 0:
        values = jnp.where(history.counts > 0, values - amounts.presence_penalty, values)
    return values


def _check(
    settings: Sampling, history: History | None, shape: tuple[int, ...], vocab_size: int
) -> None:
    for name, tokens in (
        ("logit_bias", dict(settings.logit_bias)),
        ("banned", settings.banned),
    ):
        wrong = [token for token in tokens if token >= vocab_size]
        if wrong:
            raise UserInputError(
                f"{name} names token {wrong[0]}: the vocabulary has {vocab_size} tokens"
            )
    if not settings.needs_history:
        return
    if history is None:
        raise UserInputError(
            "penalties need the tokens so far: sample(…, history=History.start(…))"
        )
    if history.counts.shape != shape or history.prompt.shape != shape:
        raise UserInputError(
            f"the history is for logits {list(history.counts.shape)}, these are {list(shape)}"
        )
