"""Bans and penalties by the order of the tokens so far: n-grams, sequences of tokens, and DRY.

All are functions of the text so far, prompt and answer together. Besides numbers of each row they need what
:class:`Sequences` holds.

Sources: n-grams and biases of sequences are defined as in transformers' ``generation/logits_process.py``, DRY as in
llama.cpp's ``src/llama-sampler.cpp``. One difference: of breakers within each other the one that ends last counts.

Shapes: B rows, V tokens of the vocabulary, L tokens of the longest text, S sequences of K tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UserInputError
from ..bucket import bucket
from .settings import Sampling

# The first sizes of a Sequences: more sequences, or longer ones, are programs of their own.
_LEAST_COUNT, _LEAST_LENGTH = 64, 8
# The largest exponent of e in float32, as llama.cpp has it.
_LARGEST_LOG = 88.7228391
_NO_TOKEN = -1
# A breaker ends with one of so many kinds of tails, of so many tokens; the first kind has none.
_TAILS, _TAIL_LENGTH = 32, 20
# The largest number of tokens of all biased sequences of a request, each counted as long as the longest one.
_MOST_CELLS = 1 << 20
# The largest penalty: a logit minus it is finite.
_LARGEST = 1e38
# Texts have fewer tokens than this, which float32 holds exactly.
_MOST_TOKENS = 1 << 24


class Repeats(NamedTuple):
    """The numeric settings, as numbers or as arrays ``[B, 1]``; as in Sampling.

    Example:
        >>> Repeats.of(Sampling(no_repeat_ngram_size=3)).no_repeat_ngram_size
        3.0
    """

    no_repeat_ngram_size: Any
    dry_multiplier: Any
    dry_base: Any
    dry_allowed_length: Any

    @staticmethod
    def of(sampling: Sampling) -> Repeats:
        """The settings of one row, as numbers that float32 holds."""
        return Repeats(
            float(min(sampling.no_repeat_ngram_size, _MOST_TOKENS)),
            sampling.dry_multiplier,
            sampling.dry_base,
            float(min(sampling.dry_allowed_length, _MOST_TOKENS)),
        )

    @property
    def are_used(self) -> jax.Array:
        """Whether a row uses n-gram bans or DRY, a bool array like the settings."""
        return (jnp.asarray(self.no_repeat_ngram_size) > 0) | (jnp.asarray(self.dry_multiplier) > 0)


class Sequences(NamedTuple):
    """Sequences of tokens of a row, or of several rows with a further first axis. A pytree.

    Attributes:
        tokens: sequences that are biased, int32 ``[S, K]``, padded with -1 at the left; a row of -1 is no sequence.
        bias: what is added to the logit of the last token of each where the others precede it, float32 ``[S]``.
        heads: first tokens of breakers, where repetitions end: bit g of a token's number says that it is one if the
            tail g follows, uint32 ``[V]``. The tail 0 is empty.
        tails: the tails, int32 ``[32, 20]``, padded as ``tokens``.
    """

    tokens: Any
    bias: Any
    heads: Any
    tails: Any

    @staticmethod
    def of(
        biases: Sequence[tuple[tuple[int, ...], float]], breakers: Sequence[tuple[int, ...]], vocab_size: int
    ) -> Sequences:  # fmt: skip
        """The sequences of one row, as NumPy arrays.

        Args:
            biases: sequences of token ids and what is added to the logit of their last token.
            breakers: the sequences where repetitions end.
            vocab_size: V.

        Raises:
            UserInputError: there are too many sequences, or they are too long.

        Example:
            >>> found = Sequences.of([((5, 6), -1.0)], [(3,), (1, 2, 3)], 8)
            >>> found.tokens.shape, found.tokens[0, -3:].tolist(), found.heads.tolist()
            ((64, 8), [-1, 5, 6], [0, 2, 0, 1, 0, 0, 0, 0])
        """
        each = [tokens for tokens, _ in biases]
        count = bucket(len(each), _LEAST_COUNT)
        length = bucket(max(map(len, each), default=0), _LEAST_LENGTH)
        if count * length > _MOST_CELLS:
            raise UserInputError(
                f"bad_words and sequence_bias have {len(each):,} sequences of up to {max(map(len, each)):,} tokens: "
                f"the product must be at most {_MOST_CELLS:,}"
            )
        bias = np.zeros(count, np.float32)
        bias[: len(biases)] = [amount for _, amount in biases]
        heads = np.zeros(vocab_size, np.uint32)
        tails: dict[tuple[int, ...], int] = {(): 0}
        for head, *tail in breakers:
            group = tails.setdefault(tuple(tail), len(tails))
            if group >= _TAILS or len(tail) > _TAIL_LENGTH:
                raise UserInputError(
                    f"dry_sequence_breakers end in more than {_TAILS - 1} different sequences, or in more than "
                    f"{_TAIL_LENGTH} tokens: pass fewer or shorter ones"
                )
            heads[head] |= np.uint32(1 << group)
        return Sequences(
            _aligned(each, count, length), bias, heads, _aligned(list(tails), _TAILS, _TAIL_LENGTH)
        )

    def resized(self, count: int, length: int) -> Sequences:
        """These sequences with padding up to the shape ``[…, count, length]``."""
        rows = [(0, 0)] * (self.bias.ndim - 1)
        more = (0, count - self.tokens.shape[-2])
        longer = (length - self.tokens.shape[-1], 0)
        pad = np.pad if isinstance(self.tokens, np.ndarray) else jnp.pad
        return self._replace(
            tokens=pad(self.tokens, [*rows, more, longer], constant_values=_NO_TOKEN),
            bias=pad(self.bias, [*rows, more]),
        )


def _aligned(each: Sequence[tuple[int, ...]], count: int, length: int) -> np.ndarray:
    """The sequences as int32 ``[count, length]``, padded with -1 at the left."""
    found = np.full((count, length), _NO_TOKEN, np.int32)
    for row, one in zip(found, each, strict=False):
        row[length - len(one) :] = one
    return found


def sequences_of(sampling: Sampling, vocab_size: int) -> Sequences:
    """The sequences that settings name, whose texts are token ids already (:func:`resolved`).

    Raises:
        UserInputError: a token is outside the vocabulary, or a text is not token ids.
    """
    check_sequences(sampling, vocab_size)
    biases: list[Any] = [*sampling.sequence_bias, *((word, -np.inf) for word in sampling.bad_words)]
    breakers: Any = sampling.dry_sequence_breakers if sampling.dry_multiplier > 0 else ()
    return Sequences.of(biases, tuple(breakers or ()), vocab_size)


def check_sequences(sampling: Sampling, vocab_size: int) -> None:
    """Raises UserInputError if a sequence has a token outside the vocabulary, or is a text."""
    named = {
        "bad_words": sampling.bad_words,
        "sequence_bias": [tokens for tokens, _ in dict(sampling.sequence_bias).items()],
        "dry_sequence_breakers": sampling.dry_sequence_breakers or (),
    }
    for name, sequences in named.items():
        for one in sequences:
            if isinstance(one, str):
                raise UserInputError(
                    f"{name} has the text {one!r}, which needs a tokenizer: pass token ids"
                )
            if max(one) >= vocab_size:
                raise UserInputError(
                    f"{name} names token {max(one)}: the vocabulary has {vocab_size} tokens"
                )


# --- what they do to logits -----------------------------------------------------------------------


def biased(
    values: jax.Array, sequences: Sequences, text: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Logits ``[B, V]`` with the biases of sequences whose last token is the only one missing.

    Args:
        values: the logits.
        sequences: those of each row.
        text: the tokens so far, int32 ``[B, L]``.
        lengths: their number, int32 ``[B]``.

    Example:
        >>> one = Sequences.of([((5, 1), 2.0)], [], 3)
        >>> of_rows = jax.tree.map(lambda a: jnp.asarray(a)[None], one)
        >>> biased(jnp.zeros((1, 3)), of_rows, jnp.array([[4, 5, 0]]), jnp.array([2])).tolist()
        [[0.0, 2.0, 0.0]]
    """
    count = sequences.tokens.shape[-1] - 1
    place = lengths[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None, :]
    before = jnp.take_along_axis(text, jnp.maximum(place, 0), axis=1)
    before = jnp.where(place >= 0, before, _NO_TOKEN - 1)[:, None, :]  # [B, 1, K - 1]
    wanted, last = sequences.tokens[:, :, :-1], sequences.tokens[:, :, -1]
    fits = jnp.all((wanted == before) | (wanted == _NO_TOKEN), axis=2) & (last != _NO_TOKEN)
    amounts = jnp.where(fits, sequences.bias, 0.0)
    return values.at[_rows(last), jnp.where(fits, last, values.shape[1])].add(amounts, mode="drop")


def without_repeats(
    values: jax.Array, repeats: Repeats, sequences: Sequences, text: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Logits ``[B, V]`` with the penalties of DRY, and -inf for tokens that would repeat an n-gram.

    Args:
        values: the logits.
        repeats: the settings, arrays ``[B, 1]``.
        sequences, text, lengths: as for :func:`biased`.

    Example:
        >>> none = jax.tree.map(lambda a: jnp.asarray(a)[None], Sequences.of([], [], 4))
        >>> settings = Repeats(*(jnp.array([[x]]) for x in (2.0, 0.0, 1.75, 2.0)))
        >>> text = jnp.array([[1, 2, 3, 1]])
        >>> without_repeats(jnp.zeros((1, 4)), settings, none, text, jnp.array([4])).tolist()
        [[0.0, 0.0, -inf, 0.0]]
    """
    place = jax.lax.broadcasted_iota(jnp.int32, text.shape, 1)
    ngram, multiplier, base, allowed = repeats
    # With a base of 1 the length of a repetition does not change its penalty.
    most = jnp.where(base > 1.000001, _LARGEST_LOG / jnp.log(jnp.maximum(base, 1.000001)), 0.0)
    most = jnp.floor(most)
    needed = jnp.maximum(ngram - 1, jnp.where(multiplier > 0, allowed + most, 0.0))
    found = match_lengths(text, lengths, needed[:, 0].astype(jnp.int32))
    is_text = place < lengths[:, None]

    # DRY: a repetition does not reach beyond the last breaker.
    since = _since_breaker(sequences, text, lengths)[:, None]
    repeated = jnp.minimum(found, since).astype(jnp.float32)
    is_long = is_text & (place > 0) & (repeated >= allowed)
    excess = jnp.minimum(repeated - allowed, jnp.where(most > 0, most, jnp.inf))
    penalty = jnp.where(is_long, multiplier * base**excess, 0.0)
    penalties = jnp.zeros_like(values).at[_rows(text), text].max(penalty, mode="drop")
    values = values - jnp.minimum(penalties, _LARGEST)

    is_banned = is_text & (ngram > 0) & (found.astype(jnp.float32) >= ngram - 1)
    column = jnp.where(is_banned, text, values.shape[1])
    return values.at[_rows(text), column].set(-jnp.inf, mode="drop")


def match_lengths(text: jax.Array, lengths: jax.Array, most: jax.Array) -> jax.Array:
    """How many tokens before each position are equal to the last tokens of its text, int32 ``[B, L]``.

    Args:
        text: the tokens, int32 ``[B, L]``.
        lengths: the number of tokens of each text, int32 ``[B]``.
        most: the largest number that is counted, int32 ``[B]``.

    Example:
        >>> match_lengths(jnp.array([[7, 1, 2, 3, 1, 2]]), jnp.array([6]), jnp.array([9])).tolist()
        [[0, 0, 0, 2, 0, 0]]
    """
    place = jax.lax.broadcasted_iota(jnp.int32, text.shape, 1)

    def go_on(state: Any) -> jax.Array:
        return jnp.any(state[1])

    def compare(state: Any) -> Any:
        k, alive, shifted, found = state
        last = jnp.take_along_axis(text, jnp.maximum(lengths - 1 - k, 0)[:, None], axis=1)
        shifted = _later(shifted, _NO_TOKEN)
        alive = alive & (shifted == last)
        found = found + alive.astype(jnp.int32)
        return k + 1, alive & (k + 1 < most[:, None]), shifted, found

    start = (place < lengths[:, None]) & (most[:, None] > 0)
    state = jnp.int32(0), start, text, jnp.zeros(text.shape, jnp.int32)
    return jax.lax.while_loop(go_on, compare, state)[3]


def _since_breaker(sequences: Sequences, text: jax.Array, lengths: jax.Array) -> jax.Array:
    """The number of tokens after the last breaker of each text, int32 ``[B]``."""
    place = jax.lax.broadcasted_iota(jnp.int32, text.shape, 1)
    heads = jnp.take_along_axis(sequences.heads, text, axis=1)
    sizes = jnp.sum((sequences.tails != _NO_TOKEN).astype(jnp.int32), axis=2)  # [B, 32]
    width = sequences.tails.shape[2]

    def with_tail(g: jax.Array, ends: jax.Array) -> jax.Array:
        tail = jax.lax.dynamic_index_in_dim(sequences.tails, g, 1, keepdims=False)

        def compare(k: jax.Array, state: Any) -> Any:
            fits, tokens, before = state
            wanted = jax.lax.dynamic_slice_in_dim(tail, width - 1 - k, 1, axis=1)  # [B, 1]
            is_one = wanted != _NO_TOKEN
            fits = fits & (~is_one | (tokens == wanted))
            move = lambda a, rest: jnp.where(is_one, _later(a, rest), a)
            return fits, move(tokens, _NO_TOKEN), move(before, jnp.uint32(0))

        start = jnp.ones(text.shape, bool), text, heads
        fits, _, before = jax.lax.fori_loop(0, jnp.max(sizes), compare, start)
        is_head = (before >> g.astype(jnp.uint32)) & 1 == 1
        return ends | (fits & is_head)

    ends = heads & 1 == 1
    count = 1 + jnp.sum(jnp.any(sizes > 0, axis=0).astype(jnp.int32))
    ends = jax.lax.fori_loop(1, count, with_tail, ends)
    last = jnp.max(jnp.where(ends & (place < lengths[:, None]), place, -1), axis=1)
    return lengths - 1 - last


def _later(array: jax.Array, rest: Any) -> jax.Array:
    """The array ``[B, L]`` moved by one place, with ``rest`` in the first."""
    return jnp.concatenate([jnp.full_like(array[:, :1], rest), array[:, :-1]], axis=1)


def _rows(columns: jax.Array) -> jax.Array:
    """The row of each element of ``[B, N]``, to index with its column."""
    return jax.lax.broadcasted_iota(jnp.int32, columns.shape, 0)
