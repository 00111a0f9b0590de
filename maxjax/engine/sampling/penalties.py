"""Bias, penalties and bans on the logits, and History, the token counts that penalties need.

History counts each token of the vocabulary instead of keeping the tokens: a step adds one number
to each row, and a penalty is elementwise, whatever the length of the text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import UserInputError
from .settings import Amounts, Sampling


class History(NamedTuple):
    """The tokens so far of each row. A pytree of 5 bytes per row and token of the vocabulary.

    Attributes:
        prompt: whether each token is in the prompt, bool ``[B, V]``.
        counts: the number of times each token is in the answer so far, int32 ``[B, V]``.
    """

    prompt: jax.Array
    counts: jax.Array

    @staticmethod
    def start(ids: jax.Array, vocab_size: int, lengths: jax.Array | None = None) -> History:
        """The history before the first token of the answer.

        Args:
            ids: the token ids of the prompts, integers ``[B, T]``, padded on the right. Ids outside
                the vocabulary are ignored.
            vocab_size: the width of the logits, including padding.
            lengths: the number of ids of each row without padding, ``[B]``; by default all.

        Example:
            >>> History.start(jnp.array([[2, 0, 3]]), 5, jnp.array([2])).prompt.tolist()
            [[True, False, True, False, False]]
        """
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise UserInputError(
                f"ids must be integer token ids [B, T], not {ids.dtype}{list(ids.shape)}"
            )
        real = (ids >= 0) & (ids < vocab_size)
        if lengths is not None:
            real &= jnp.arange(ids.shape[1], dtype=lengths.dtype)[None, :] < lengths[:, None]
        # Ignored ids become an index past the end: a negative index would count from the end.
        columns = jnp.where(real, ids.astype(jnp.int32), jnp.int32(vocab_size))
        empty = jnp.zeros((ids.shape[0], vocab_size), bool)
        rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        return History(
            empty.at[rows, columns].set(True, mode="drop"), jnp.zeros(empty.shape, jnp.int32)
        )

    def add(self, tokens: jax.Array, active: jax.Array | None = None) -> History:
        """The history with one more token of the answer in each row.

        Args:
            tokens: the new tokens, int32 ``[B]``.
            active: whether each row gets its token, bool ``[B]``; by default all do.

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
        penalties = amounts.repetition_penalty, amounts.frequency_penalty, amounts.presence_penalty
        values = penalised(values, history.prompt, history.counts, *penalties)
    if settings.banned:
        values = values.at[:, jnp.array(tuple(settings.banned), jnp.int32)].set(
            -jnp.inf, unique_indices=True, indices_are_sorted=True
        )
    return without_padding(values, vocab_size)


def without_padding(values: jax.Array, vocab_size: int) -> jax.Array:
    """Values ``[B, V]`` with -inf in the columns from ``vocab_size`` on, which are padding."""
    if vocab_size == values.shape[1]:
        return values
    column = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.where(column < vocab_size, values, -jnp.inf)


def penalised(
    values: jax.Array,
    prompt: jax.Array,
    counts: jax.Array,
    repetition: Any,
    frequency: Any,
    presence: Any,
) -> jax.Array:
    """Logits ``[B, V]`` with the three penalties, numbers or arrays ``[B, 1]``.

    Args:
        values: the logits.
        prompt, counts: as in :class:`History`.
        repetition, frequency, presence: the penalties; 1, 0 and 0 are off.

    Example:
        >>> seen, counts = jnp.array([[True, False]]), jnp.array([[0, 2]])
        >>> penalised(jnp.ones((1, 2)), seen, counts, 2.0, 0.25, 0.0).tolist()
        [[0.5, 0.0]]
    """
    seen = prompt | (counts > 0)
    scaled = jnp.where(values < 0, values * repetition, values / repetition)
    values = jnp.where(seen, scaled, values)
    values = values - frequency * counts.astype(jnp.float32)
    return jnp.where(counts > 0, values - presence, values)


def check_tokens(settings: Sampling, vocab_size: int) -> None:
    """Raises UserInputError if the bias or the bans are of a token outside the vocabulary."""
    for name, tokens in (("logit_bias", dict(settings.logit_bias)), ("banned", settings.banned)):
        wrong = max(tokens, default=0)
        if wrong >= vocab_size:
            raise UserInputError(
                f"{name} names token {wrong}: the vocabulary has {vocab_size} tokens"
            )


def _check(
    settings: Sampling, history: History | None, shape: tuple[int, ...], vocab_size: int
) -> None:
    check_tokens(settings, vocab_size)
    if settings.needs_order:
        raise UserInputError(
            "no_repeat_ngram_size, bad_words, sequence_bias and dry_multiplier need the order of the tokens so far, "
            "which a History does not have: use maxjax.generate or maxjax.Engine"
        )
    if not settings.needs_history:
        return
    if history is None:
        raise UserInputError(
            "penalties need the tokens so far: pass history=History.start(…) to sample"
        )
    if history.counts.shape != shape or history.prompt.shape != shape:
        raise UserInputError(
            f"the history is for logits {list(history.counts.shape)}, but these are {list(shape)}"
        )
