"""Sampling when each row of a batch has its own settings, which are arrays: another value compiles nothing.

What no row uses is not computed: it stands under ``lax.cond``. A row's token depends on its own logits, settings, key
and position alone.

Shapes: B rows, V tokens of the vocabulary, E tokens that end a text, R rows of :class:`Words`, L tokens of the longest
text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .draw import Chosen, Sampled, best_of, choose_drawn, columns_of, row_keys, scaled, top_logprobs
from .filters import RareFilters
from .penalties import penalised
from .sequences import Repeats, Sequences, biased, without_repeats
from .settings import Sampling

MOST_LOGPROBS = 20
"""How many of the most probable tokens are reported, unless a program is made for more."""

# Two logits are near if they differ by so much of the standard deviation of all, which is that of so many of them.
_NEAR, _SAMPLE = 1e-4, 4096


class RowSettings(NamedTuple):
    """The settings of each row, arrays ``[B]``: those of :class:`~.settings.Sampling`, and what they apply to.

    Attributes:
        temperature: divisor of the logits; 0 is greedy.
        top_k: number of tokens that are kept, int32; the size of the vocabulary is off.
        top_p: as in Sampling.
        least: the smallest shifted logit that min-p keeps; -inf is off.
        repetition_penalty, presence_penalty, frequency_penalty: as in Sampling.
        min_new_tokens: as in Sampling, int32.
        others: the settings that few requests use, those of ``RareFilters`` and then those of ``Repeats``, float32
            ``[B, 10]``: one array, as arrays cost more than numbers.
        has_words: whether the row uses its row of :class:`Words`: penalties, a bias, bans or rare filters.
        has_logprobs: whether log-probabilities are reported.
        keys: words of the random key of each row's request, uint32 ``[B, 2]``.
        numbers: the number of each row's text among those with this key, int32.
        ends: tokens that end the text, int32 ``[B, E]``, padded with -1.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    least: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    min_new_tokens: Any
    others: Any
    has_words: Any
    has_logprobs: Any
    keys: Any
    numbers: Any
    ends: Any

    @staticmethod
    def of(
        sampling: Sampling, key: np.ndarray, number: int, ends: np.ndarray, vocab_size: int
    ) -> RowSettings:
        """The settings of one row, as NumPy scalars.

        Args:
            sampling: the settings.
            key: words of the key, uint32 ``[2]``.
            number: the number of the text among those with this key.
            ends: tokens that end the text, int32 ``[E]``.
            vocab_size: V.
        """
        f = np.float32
        return RowSettings(
            f(0.0 if sampling.is_greedy else _in_range(sampling.temperature)),
            np.int32(min(sampling.top_k or vocab_size, vocab_size)),
            f(sampling.top_p), f(math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf),
            f(_in_range(sampling.repetition_penalty)),
            f(sampling.presence_penalty), f(sampling.frequency_penalty),
            np.int32(sampling.min_new_tokens), _others(sampling), np.bool_(uses_words(sampling)),
            np.bool_(sampling.logprobs is not None), key, np.int32(number), ends,
        )  # fmt: skip

    @property
    def rare_filters(self) -> RareFilters:
        """The filters that few requests use, arrays ``[B, 1]``."""
        return RareFilters(*jnp.split(self.others, self.others.shape[1], axis=1)[:_RARE])

    @property
    def repeats(self) -> Repeats:
        """The settings about repetitions, arrays ``[B, 1]``."""
        return Repeats(*jnp.split(self.others, self.others.shape[1], axis=1)[_RARE:])


_RARE = len(RareFilters._fields)


def _in_range(number: float) -> float:
    """The number, or the nearest one by which float32 divides without a NaN or infinity."""
    return min(max(number, 1e-30), 1e30)


def _others(sampling: Sampling) -> np.ndarray:
    # Greedy sampling has no filters.
    given = {name: getattr(sampling, name) for name in RareFilters._fields}
    filters = RareFilters() if sampling.is_greedy else RareFilters(**given)
    return np.asarray([*filters, *Repeats.of(sampling)], np.float32)


class TokenOrder(NamedTuple):
    """What settings about the order of tokens need. A pytree.

    Attributes:
        text: the tokens so far, prompt and answer, int32 ``[R, L]``.
        sequences: those that are biased or banned, and those that end repetitions.
    """

    text: Any
    sequences: Sequences


class Words(NamedTuple):
    """What the rarer settings need, in rows of which a text has one. A pytree of 13 bytes per row and token of the
    vocabulary, and the texts.

    Attributes:
        prompt: whether the token is in the prompt, bool ``[R, V]``.
        counts: how often it is in the answer so far, int32 ``[R, V]``.
        bias: what is added to its logit, float32 ``[R, V]``; -inf bans it.
        order: the order of the tokens; None if no text has settings about it or rare filters, whose programs take
            longer to compile.
    """

    prompt: Any
    counts: Any
    bias: Any
    order: TokenOrder | None

    @staticmethod
    def empty(rows: int, vocab_size: int, longest: int | None = None) -> Words:
        """The words of rows without tokens, with an order for texts of at most ``longest`` tokens.

        Example:
            >>> Words.empty(2, 5).bias.shape
            (2, 5)
        """
        shape, order = (rows, vocab_size), None
        if longest is not None:
            none = jax.tree.map(lambda a: jnp.stack([a] * rows), Sequences.of([], [], vocab_size))
            order = TokenOrder(jnp.zeros((rows, longest), jnp.int32), none)
        return Words(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32), jnp.zeros(shape), order)

    @staticmethod
    def of(
        prompt: Sequence[int], answer: Sequence[int], bias: np.ndarray | None, sequences: Sequences | None,
        longest: int | None, vocab_size: int,
    ) -> Words:  # fmt: skip
        """The words of one text, as NumPy arrays without the first axis."""
        count = lambda ids: np.bincount(np.asarray(ids, np.int32), minlength=vocab_size)
        bias, order = np.zeros(vocab_size, np.float32) if bias is None else bias, None
        if longest is not None:
            text = np.zeros(longest, np.int32)
            text[: len(prompt) + len(answer)] = [*prompt, *answer]
            order = TokenOrder(text, sequences or Sequences.of([], [], vocab_size))
        return Words(count(prompt) > 0, count(answer).astype(np.int32), bias, order)

    def added(
        self, rows: jax.Array, tokens: jax.Array, positions: jax.Array, is_new: jax.Array
    ) -> Words:
        """A copy with one more token of the answer in those of the ``rows`` ``[B]`` for which ``is_new`` is True."""
        counts = self.counts.at[rows, tokens].add(is_new.astype(jnp.int32), mode="drop")
        if self.order is None:
            return self._replace(counts=counts)
        text = self.order.text
        place = jnp.where(is_new, positions, text.shape[1])
        text = text.at[rows, place].set(tokens, mode="drop")
        return self._replace(counts=counts, order=self.order._replace(text=text))

    def resized(self, count: int, length: int, longest: int) -> Words:
        """The words with room for ``count`` sequences of ``length`` tokens and texts of ``longest`` in each row."""
        if self.order is None:
            return self
        text, sequences = self.order
        pad = np.pad if isinstance(text, np.ndarray) else jnp.pad
        text = pad(text, [*[(0, 0)] * (text.ndim - 1), (0, longest - text.shape[-1])])
        return self._replace(order=TokenOrder(text, sequences.resized(count, length)))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of sequences in a row, of tokens in each, and of tokens of the longest text."""
        if self.order is None:
            return 0, 0, 0
        count, length = self.order.sequences.tokens.shape[-2:]
        return count, length, self.order.text.shape[-1]


def uses_order(sampling: Sampling) -> bool:
    """Whether the settings need the ``order`` of :class:`Words`: they are about sequences, or rare filters.

    Example:
        >>> uses_order(Sampling(repetition_penalty=1.1)), uses_order(Sampling(no_repeat_ngram_size=3))
        (False, True)
    """
    return sampling.needs_order or sampling.has_rare_filters


def uses_words(sampling: Sampling) -> bool:
    """Whether the settings need :class:`Words`.

    Example:
        >>> uses_words(Sampling(temperature=0.5)), uses_words(Sampling(banned=[3]))
        (False, True)
    """
    of_tokens = bool(sampling.banned) or bool(sampling.logit_bias)
    return sampling.needs_history or uses_order(sampling) or of_tokens


def sample_rows(
    logits: jax.Array,
    settings: RowSettings,
    positions: jax.Array,
    written: jax.Array,
    words: Words | None = None,
    rows: jax.Array | None = None,
    tops: int | None = MOST_LOGPROBS,
    allowed: jax.Array | None = None,
    draws: bool = True,
    step: float = 0.0,
    delays_ends: bool = True,
) -> Sampled:
    """Samples the next token of each row.

    Args:
        logits: logits ``[B, V]``.
        settings: the settings of each row.
        positions: position of the new token in its text, int32 ``[B]``.
        written: number of tokens of the answer so far, int32 ``[B]``.
        words: the words of all rows; None if no row uses them.
        rows: each row's row in ``words``, int32 ``[B]``.
        tops: number of most probable tokens that are reported; None: log-probabilities are not reported at all.
        allowed: the tokens that may come next, one bit each, uint32 ``[B, ⌈V / 32⌉]``; None: all.
        draws: False if all rows are greedy: a program without drawing is compiled in a third of the time.
        step: the relative step of the floats that logits were computed in, for :func:`near_margin`.
        delays_ends: False if no row has ``min_new_tokens``: logits are then not copied.

    Returns:
        The tokens; ``top_tokens`` and ``top_logprobs`` are ``[B, min(tops, V)]``. They and ``logprobs`` are zeros where
        no row reports them. ``is_near_tie`` is about logits with the noise of drawing, where tokens are drawn; it does
        not look at what filters exclude.

    Example:
        >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]] * 2))
        >>> key, ends = np.zeros(2, np.uint32), np.full(1, -1, np.int32)
        >>> each = [RowSettings.of(Sampling(banned=b), key, 0, ends, 3) for b in ((), (1,))]
        >>> settings = jax.tree.map(lambda *a: jnp.stack(a), *each)
        >>> words = Words.empty(2, 3)._replace(bias=jnp.array([[0, 0, 0], [0, -jnp.inf, 0]]))
        >>> zeros = jnp.zeros(2, jnp.int32)
        >>> sample_rows(logits, settings, zeros, zeros, words, jnp.arange(2)).tokens.tolist()
        [1, 2]
    """
    values = logits.astype(jnp.float32)
    values = adjusted_rows(values, settings, positions, written, words, rows, delays_ends)
    if allowed is not None:
        unchanged = lambda values, *_: values
        values = jax.lax.cond(jnp.any(~allowed != 0), _masked, unchanged, values, allowed)
    top = jnp.max(values, axis=1, keepdims=True)  # NaN if any is
    valid = jnp.isfinite(top)[:, 0]
    greedy = best_of(values, top, columns_of(values))
    is_drawn = settings.temperature > 0

    def drawn(values: jax.Array) -> Chosen:
        keys = row_keys(settings.keys, settings.numbers, positions)
        temperature = jnp.where(is_drawn, settings.temperature, 1.0)[:, None]
        shifted = scaled(values, top, temperature)
        of_rows = (settings.top_k, settings.top_p, settings.least)
        top_k, top_p, least = (a[:, None] for a in of_rows)
        has_rare = words is not None and words.order is not None
        rare = settings.rare_filters if has_rare else None
        found = choose_drawn(shifted, keys, top_k, top_p, least, rare)
        found = found._replace(lead=found.lead * temperature[:, 0])
        return jax.tree.map(partial(jnp.where, is_drawn), found, greedy)

    tokens, lead = greedy
    if draws:
        tokens, lead = jax.lax.cond(jnp.any(is_drawn), drawn, lambda values: greedy, values)
    tokens = jnp.where(valid, tokens, 0)
    is_near = lead <= near_margin(logits, top[:, 0], step)
    if tops is None:
        return Sampled(tokens, valid, is_near_tie=is_near)
    count = min(tops, logits.shape[1])
    reported = jax.lax.cond(
        jnp.any(settings.has_logprobs),
        lambda: tuple(top_logprobs(logits, tokens, count)),
        lambda: (
            jnp.zeros(tokens.shape, jnp.float32),
            jnp.zeros((*tokens.shape, count), jnp.int32),
            jnp.zeros((*tokens.shape, count), jnp.float32),
        ),
    )
    return Sampled(tokens, valid, *reported, is_near_tie=is_near)


def near_margin(logits: jax.Array, top: jax.Array, step: float) -> jax.Array:
    """The difference ``[B]`` up to which rounding may decide between two logits.

    It is 1e-4 of the standard deviation of a row, or a step of the floats that logits were computed in if that is more.

    Args:
        logits: ``[B, V]``; of a large vocabulary, a part of them tells their standard deviation.
        top: the largest one of each row, ``[B]``.
        step: the relative step of these floats: ``jnp.finfo(dtype).eps``.

    Example:
        >>> near_margin(jnp.array([[0.0, 20.0]]), jnp.array([20.0]), 2**-7).tolist()
        [0.15625]
    """
    few = logits[:, :: max(logits.shape[1] // _SAMPLE, 1)].astype(jnp.float32)
    deviation = jnp.std(few, axis=1, where=jnp.isfinite(few))
    return jnp.maximum(_NEAR * deviation, step * jnp.maximum(jnp.abs(top), deviation))


def adjusted_rows(
    values: jax.Array,
    settings: RowSettings,
    positions: jax.Array,
    written: jax.Array,
    words: Words | None = None,
    rows: jax.Array | None = None,
    delays_ends: bool = True,
) -> jax.Array:
    """Logits or log-probabilities with biases, penalties and bans.

    Args:
        values: float32 ``[B, V]``.
        settings, positions, written, words, rows, delays_ends: as for :func:`sample_rows`.

    Example:
        >>> one = RowSettings.of(Sampling(min_new_tokens=1), np.zeros(2, np.uint32), 0, np.array([2]), 3)
        >>> settings, zeros = jax.tree.map(lambda a: jnp.asarray(a)[None], one), jnp.zeros(1, jnp.int32)
        >>> adjusted_rows(jnp.zeros((1, 3)), settings, zeros, zeros).tolist()
        [[0.0, 0.0, -inf]]
    """
    if words is not None and rows is not None:
        values = jax.lax.cond(
            jnp.any(settings.has_words), _adjusted, lambda values, *_: values,
            values, settings, words, rows, positions,
        )  # fmt: skip
    if not delays_ends:
        return values
    return _without_ends(values, written < settings.min_new_tokens, settings.ends)


def _adjusted(
    values: jax.Array, settings: RowSettings, words: Words, rows: jax.Array, positions: jax.Array
) -> jax.Array:
    prompt, counts, bias = (
        jnp.take(a, rows, axis=0, mode="clip") for a in (words.prompt, words.counts, words.bias)
    )
    penalties = settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty
    penalties = [a[:, None] for a in penalties]
    found = values + bias
    if words.order is None:
        found = penalised(found, prompt, counts, *penalties)
    else:
        order, repeats = words.order, settings.repeats

        def of_rows() -> TokenOrder:
            return jax.tree.map(lambda a: jnp.take(a, rows, axis=0, mode="clip"), order)

        def with_biases(values: jax.Array) -> jax.Array:
            text, sequences = of_rows()
            return biased(values, sequences, text, positions)

        def with_repeats(values: jax.Array) -> jax.Array:
            text, sequences = of_rows()
            return without_repeats(values, repeats, sequences, text, positions)

        unchanged = lambda values: values
        of_sequences = jnp.take(order.sequences.bias, rows, axis=0, mode="clip")
        has_biases = jnp.any((of_sequences != 0) & settings.has_words[:, None])
        found = jax.lax.cond(has_biases, with_biases, unchanged, found)
        found = penalised(found, prompt, counts, *penalties)
        found = jax.lax.cond(jnp.any(repeats.are_used), with_repeats, unchanged, found)
    found = jnp.where(jnp.isneginf(bias), -jnp.inf, found)
    return jnp.where(settings.has_words[:, None], found, values)


def _masked(values: jax.Array, allowed: jax.Array) -> jax.Array:
    """The values with -inf for the tokens whose bits are 0."""
    bits = jnp.repeat(allowed, 32, axis=1)[:, : values.shape[1]]
    place = jax.lax.broadcasted_iota(jnp.uint32, values.shape, 1) % 32
    return jnp.where((bits >> place) & 1 == 1, values, -jnp.inf)


def _without_ends(values: jax.Array, early: jax.Array, ends: jax.Array) -> jax.Array:
    """The values with -inf for the tokens that end a text, in the rows whose answer is too short to end."""
    row = jnp.arange(values.shape[0], dtype=jnp.int32)[:, None]
    place = jnp.where(early[:, None] & (ends >= 0), ends, values.shape[1])
    return jnp.asarray(values).at[row, place].set(-jnp.inf, mode="drop")
