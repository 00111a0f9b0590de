"""Speculation: tokens of an answer are guessed, and one call of the model says which of the guesses it agrees with.

``verify`` reads the last token of each text and the guesses for the tokens after it, and chooses a token at each of
these positions as ``decode`` would: with the settings of the text and the random key of the position. A guess is right
if it equals the token that is chosen there; the first one that differs is replaced by that token, and what the model
has read after it is forgotten: the next call overwrites it. So an answer has the tokens that it has without guesses,
drawn ones too. The idea is that of Y. Leviathan et al. (arXiv:2211.17192). They accept guesses at random so that the
distribution stays the model's; here a guess and the model's own choice are made with the same random numbers, so that
it is enough to compare them.

``Speculation`` decides how many guesses are worth their time. They come from the text itself (``lookup``), from a
smaller model or from the model's own layer of multi-token prediction (``draft``).
"""

from __future__ import annotations

import abc
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...nn.kv_cache.pages import PagedCache
from ...nn.layer.observe.programs import tapped
from ..sampling.draw import Sampled
from ..shardings import Shardings
from .dispatch import DispatchTokens
from .programs import Choosing, EngineMemory, TextRows, added, placed, sampled
from .running import RunningText

# How much an older guess counts against the next newer one, and how many guesses the rate of other texts stands for.
_DECAY, _PRIOR = 0.95, 2.0
# A guess that is less probable is not made.
_LEAST_CHANCE = 0.05
# A call with guesses must promise so many times as many tokens a second.
_LEAST_GAIN = 1.15
# The time of a further token of a call, relative to a step, where it has not been measured; the number of steps after
# which measured times are too old; and of how many of them the median is taken.
_TOKEN_COST, _OLD, MEASURED = 0.1, 1000, 7
# With exact=True each call is for so many tokens of each text.
EXACT_TOKENS = 4


@partial(jax.jit, static_argnames=("how", "shardings"), donate_argnums=1)
def verify(
    model: Any, memory: EngineMemory, texts: TextRows, ids: jax.Array, text: jax.Array, starts: jax.Array,
    counts: jax.Array, *, how: Choosing, shardings: Shardings = None, patches: Any = (),
) -> Any:  # fmt: skip
    """Reads tokens of texts, and samples a token after each of them.

    Args:
        texts: the B texts; ``lengths`` are the numbers of tokens that were stored before.
        ids: R rows of tokens, int32 ``[R, T]``. With T = 1 several rows may be tokens of the same text.
        text: the number of each row's text in ``texts``, int32 ``[R]``.
        starts: the position of each row's first token, int32 ``[R]``.
        counts: number of real tokens of each row, int32 ``[R]``; the rest is padding.

    Returns:
        The memory and the samples ``[R · T]``; and what captures of the model have recorded.
    """
    each = jax.tree.map(lambda a: jnp.take(a, text, axis=0, mode="clip"), texts)
    rows, width = ids.shape
    cache = PagedCache(
        memory.pool,
        each.table,
        starts,
        each.slots,
        each.text_lengths,
        is_ragged=width == 1,
        found=each.found,
        offsets=each.offsets,
        window_table=each.window_table,
    )
    (logits, cache), taps = tapped(model, patches, lambda: model(ids, cache, lengths=counts))
    of_tokens = lambda a: jnp.repeat(a, width, axis=0)
    each = jax.tree.map(of_tokens, each)
    steps = jnp.arange(width, dtype=jnp.int32)[None]
    positions = (starts[:, None] + steps + 1).reshape(-1)
    written = each.written + positions - each.lengths - 1
    logits, ids = logits.reshape(rows * width, -1), ids.reshape(-1)
    found = sampled(logits, each, ids, positions, written, memory.words, how, shardings)
    real = (steps < counts[:, None]).reshape(-1)
    words = added(memory.words, each, found.tokens, positions, real)
    return (placed(EngineMemory(cache.pool, words), shardings), found), taps


class Rates:
    """How often guesses of each kind have been right lately.

    Args:
        before: what counts as two earlier guesses: the rates of other texts, or a number.

    Example:
        >>> rates = Rates(0.5)
        >>> for is_right in (True, True, False):
        ...     rates.add(3, is_right)
        >>> round(rates.of(3), 2), rates.of(4)
        (0.59, 0.5)
    """

    def __init__(self, before: Rates | float):
        self._before = before
        self._counts: dict[int, tuple[float, float]] = {}  # of right ones, and of all

    def add(self, kind: int, is_right: bool) -> None:
        """Counts a guess; of kind 0 there are none."""
        right, every = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = _DECAY * right + is_right, _DECAY * every + 1
        if isinstance(self._before, Rates):
            self._before.add(kind, is_right)

    def of(self, kind: int) -> float:
        """The chance of a guess."""
        before = self._before.of(kind) if isinstance(self._before, Rates) else self._before
        right, every = self._counts.get(kind, (0.0, 0.0))
        return (right + _PRIOR * before) / (every + _PRIOR)


class GuessCounts(NamedTuple):
    """A call of ``verify``: its R and T, and the number of guesses for each text that has some."""

    shape: tuple[int, int]
    counts: Mapping[RunningText, int]

    @property
    def most(self) -> int:
        """The largest number of guesses of a text."""
        return max(self.counts.values(), default=0)


class Guesses(NamedTuple):
    """The R and T of a call of ``verify``, and the guesses for each text that has some."""

    shape: tuple[int, int]
    tokens: Mapping[RunningText, list[int]]


class Speculation(abc.ABC):
    """Decides which guesses are worth the time of their call.

    A call with guesses takes longer than a decode step. Both times are measured while texts are written, and so is how
    often guesses are right.

    Args:
        slots: largest number of texts.
        row_counts: numbers of texts that a program may be for.
        is_ragged: whether the programs are for tokens of any text, not for the same number of each.
        is_exact: whether each call must be of the same shape, for the same bits whatever else runs.

    Attributes:
        shapes: R and T of the programs.
        made, right: numbers of guesses that were made, and that were right.
        done: number of steps.
    """

    def __init__(self, slots: int, row_counts: Sequence[int], is_ragged: bool, is_exact: bool):
        self.row_counts, self._is_ragged, self._is_exact = row_counts, is_ragged, is_exact
        most = max(16, 4 * slots)
        self.shapes: list[tuple[int, int]]
        if is_exact:
            self.shapes = [(EXACT_TOKENS * slots, 1) if is_ragged else (slots, EXACT_TOKENS)]
        elif is_ragged:
            self.shapes = [(4 << i, 1) for i in range(30) if 4 << i < 2 * most]
        else:
            self.shapes = [(rows, width) for rows in row_counts for width in (4, 8)]
        # By the number of rows, the last times of a step; and by shape too, those of a call over it, and when.
        self._seconds: dict[int, deque[float]] = {}
        self._times: dict[tuple[tuple[int, int], int], tuple[deque[float], int]] = {}
        self.done = self.made = self.right = 0

    @abc.abstractmethod
    def chances(self, text: RunningText) -> list[float]:
        """The chances that a text's next guesses are right, up to each of them."""

    @abc.abstractmethod
    def guesses(self, plan: GuessCounts, texts: Sequence[RunningText]) -> Guesses:
        """The guesses for texts, which have pages for them."""

    def take_over(  # noqa: B027
        self, text: RunningText, before: RunningText, pages: list[int]
    ) -> None:
        """Learns that a text goes on with the ``pages`` that another one had."""

    def steps(self, most: int) -> int:
        """The number of steps of the next call without guesses."""
        return most

    def extra_time(self, count: int, rows: int) -> float:
        """The time in which so many guesses for each of ``rows`` texts are made, over that of a plain step."""
        return 0.0

    def plan(self, texts: Sequence[RunningText]) -> GuessCounts | None:
        """The next call; None if one without guesses is better."""
        rows, exact = len(texts), self.shapes[0]
        if not rows:
            return None
        chains = {text: found for text in texts if (found := self.chances(text))}
        if self._is_exact:
            return GuessCounts(exact, {t: min(len(c), EXACT_TOKENS - 1) for t, c in chains.items()})
        if not chains or self.plain_seconds(rows) is None:
            return None
        best, found = _LEAST_GAIN * rows, None
        for shape in self.shapes:
            if (counts := self._counts(chains, rows, shape)) is None:
                continue
            gain = sum(sum(chains[text][:count]) for text, count in counts.items())
            time = self._time_of(shape, rows) + self.extra_time(max(counts.values()), rows)
            if (rows + gain) / time > best:
                best, found = (rows + gain) / time, GuessCounts(shape, counts)
        return found

    def learn(
        self, texts: Sequence[RunningText], guesses: Guesses | None, counts: np.ndarray
    ) -> None:
        """Learns from the ``counts`` tokens that texts have got."""
        self.done += int(counts.max()) if guesses is None else 1
        if guesses is not None:
            self.made += sum(len(guesses.tokens.get(text, ())) for text in texts)
            self.right += int(counts[: len(texts)].sum()) - len(texts)

    def took(self, texts: Sequence[RunningText], guesses: Guesses | None, seconds: float) -> None:
        """Learns the time of a call with guesses, or of a step without them."""
        rows = self.row_count(len(texts))
        if guesses is None:
            self._seconds.setdefault(rows, deque(maxlen=MEASURED)).append(seconds)
        elif (plain := self.plain_seconds(rows)) is not None:
            # Relative times stay what they are when the machine has other work too.
            times, _ = self._times.get((guesses.shape, rows), (deque(maxlen=MEASURED), 0))
            times.append(seconds / plain)
            self._times[guesses.shape, rows] = times, self.done

    def row_count(self, rows: int) -> int:
        """The number of texts of the program for so many."""
        return next(n for n in self.row_counts if n >= rows)

    def plain_seconds(self, rows: int) -> float | None:
        """The time of a step without guesses; None if it has not been measured."""
        found = self._seconds.get(self.row_count(rows))
        return None if found is None else statistics.median(found)

    def _time_of(self, shape: tuple[int, int], rows: int) -> float:
        """The time of a call over that of a step without guesses: the median of an estimate and the last times."""
        times, when = self._times.get((shape, self.row_count(rows)), ((), 0))
        estimate = 1 + _TOKEN_COST * (shape[0] * shape[1] - rows)
        return statistics.median_low([estimate, *(times if self.done - when < _OLD else ())])

    def _counts(
        self, chains: Mapping[RunningText, list[float]], rows: int, shape: tuple[int, int]
    ) -> dict[RunningText, int] | None:
        """The numbers of guesses that a call of this shape has room for; None if it is not for so many texts."""
        if not self._is_ragged:
            if shape[0] != self.row_count(rows):
                return None
            return {text: min(len(chances), shape[1] - 1) for text, chances in chains.items()}
        room = shape[0] - rows
        if room < 1:
            return None
        every = sorted((chance for chances in chains.values() for chance in chances), reverse=True)
        least, found = every[min(room, len(every)) - 1], {}
        for text, chances in chains.items():
            if count := min(sum(chance >= least for chance in chances), room):
                found[text] = count
                room -= count
        return found


def most_guesses(text: RunningText, most: int) -> int:
    """The number of guesses that a text has room for; none if what is chosen depends on counts, or on a grammar."""
    if text.matcher is not None or text.settings.has_words:
        return 0
    room = min(text.limit - len(text.tokens) - 1, most)
    if text.text_length[1]:
        room = min(room, text.text_length[1] - text.stored - 1)
    return max(room, 0)


def chain(rates: Sequence[float]) -> list[float]:
    """The chances of guesses up to each of them, as far as they are large enough.

    Example:
        >>> chain([0.5, 0.5, 0.1, 0.9])
        [0.5, 0.25]
    """
    found, chance = [], 1.0
    for rate in rates:
        chance *= rate
        if chance < _LEAST_CHANCE:
            break
        found.append(chance)
    return found


def rows_of(texts: Sequence[RunningText], guesses: Guesses) -> list[np.ndarray]:
    """The arrays of ``verify``: the last token of each text, and the guesses for those after it."""
    rows, width = guesses.shape
    ids, of, starts, counts = (np.zeros(n, np.int32) for n in ((rows, width), rows, rows, rows))
    done = 0
    for number, text in enumerate(texts):
        tokens = [text.tokens[-1], *guesses.tokens.get(text, ())]
        if width == 1:
            part = slice(done, done + len(tokens))
            ids[part, 0], of[part], counts[part] = tokens, number, 1
            starts[part] = np.arange(text.stored, text.stored + len(tokens))
            done += len(tokens)
        else:
            ids[number, : len(tokens)], of[number] = tokens, number
            starts[number], counts[number] = text.stored, len(tokens)
    return [ids, of, starts, counts]


def accepted(texts: Sequence[RunningText], guesses: Guesses, found: Sampled) -> DispatchTokens:
    """The tokens that texts get from what ``verify`` has chosen: right guesses, and the token after them."""
    read = [1 + len(guesses.tokens.get(text, ())) for text in texts]
    firsts = (
        np.cumsum([0, *read])[:-1]
        if guesses.shape[1] == 1
        else guesses.shape[1] * np.arange(len(texts))
    )
    counts, valid = np.ones(len(texts), np.int32), np.asarray(found.valid)
    for row, text in enumerate(texts):
        for guess in guesses.tokens.get(text, ()):
            place = firsts[row] + counts[row] - 1
            if found.tokens[place] != guess or not valid[place] or guess in text.settings.ends:
                break
            counts[row] += 1
    places = np.minimum(firsts[:, None] + np.arange(counts.max()), len(valid) - 1)
    each = jax.tree.map(lambda a: np.asarray(a)[places], found)
    is_bad = ~valid[firsts + counts - 1]
    return DispatchTokens(each.tokens, counts, is_bad, is_bad, each)
