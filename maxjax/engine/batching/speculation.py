"""Speculation: tokens of an answer are guessed, and one call of the model says which of the guesses it agrees with.

``verify`` reads the last token of each text and the guesses for the tokens after it, and chooses a token at each of
these positions as ``decode`` would: with the settings of the text and the random key of the position. A guess is right
if it equals the token that is chosen there; the first one that differs is replaced by that token, and what the model
has read after it is forgotten: the next call overwrites it. So an answer has the tokens that it has without guesses,
drawn ones too. The idea is that of Y. Leviathan et al. (arXiv:2211.17192). They accept guesses at random so that the
distribution stays the model's; here a guess and the model's own choice are made with the same random numbers, so that
it is enough to compare them.

``Lookup`` guesses from the text itself. ``Speculation`` decides how many guesses are worth their time.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UserInputError, shown
from ...nn.kv_cache.kinds import States
from ...nn.kv_cache.pages import PagedCache
from ...nn.layer.observe.programs import tapped
from ..generate.programs import MAX_STEPS, DispatchTokens, Shardings
from ..sampling.draw import Sampled
from .programs import Choosing, EngineMemory, TextRows, added, placed, sampled
from .running import RunningText

# The lengths of equal parts of a text that count as different kinds of guesses, and how many earlier places are
# compared to find the longest.
_LEAST_EQUAL, _MOST_EQUAL, _MOST_PLACES = 2, 8, 16
# The largest number of guesses for a text in one call.
_MOST_GUESSES = 15
# How much an older guess counts against the next newer one, and how many guesses the rate of other texts stands for.
_DECAY, _PRIOR = 0.95, 2.0
# A guess that is less probable is not made.
_LEAST_CHANCE = 0.05
# A call with guesses must promise so many times as many tokens a second.
_LEAST_GAIN = 1.05
# The time of a further token of a call, relative to a step, where it has not been measured; the number of calls after
# which measured times are too old; and of how many of them the median is taken.
_TOKEN_COST, _OLD, _MEASURED = 0.1, 1000, 7
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
        memory.pool, each.table, starts, each.slots, each.text_lengths, is_ragged=width == 1
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


class Lookup:
    """Guesses the next tokens of a text: those that came after the longest part of it that equals its end.

    That is prompt lookup decoding: an answer repeats much of what it summarises, corrects or quotes. Earlier places
    are found as LZ77 compressors find them, by chains of the places of equal pairs of tokens.

    Args:
        tokens: the text, a list to which its next tokens are added.

    Attributes:
        equal: the number of tokens before the place that equal the end of the text, 8 at most; 0: no such place.

    Example:
        >>> tokens = [7, 8, 9, 5, 7, 8]
        >>> lookup = Lookup(tokens)
        >>> lookup.guesses(6)
        [9, 5, 7, 8, 9, 5]
        >>> tokens += [9, 4]
        >>> list(lookup.advance())
        [(2, True), (3, False)]
    """

    def __init__(self, tokens: list[int]):
        self._tokens, self._count = tokens, 0
        self._places: dict[tuple[int, ...], int] = {}  # after the last of these pairs
        self._earlier: list[int] = []  # for each place, the earlier one after the same pair
        self._place = self.equal = 0
        for count in range(1, len(tokens) + 1):
            if count == len(tokens):
                self._find(count)
            self._add(count)

    def advance(self) -> Iterator[tuple[int, bool]]:
        """Takes the tokens that were added to the text; for each, ``equal`` and whether the guess was right."""
        tokens = self._tokens
        for count in range(self._count + 1, len(tokens) + 1):
            is_right = self.equal > 0 and tokens[self._place] == tokens[count - 1]
            yield self.equal, is_right
            if is_right:
                self._place += 1
                self.equal = min(self.equal + 1, _MOST_EQUAL)
            else:
                self._find(count)
            self._add(count)

    def guesses(self, count: int) -> list[int]:
        """The next so many tokens as they were there; those of a text that repeats itself do so."""
        if not self.equal:
            return []
        found = self._tokens[self._place : self._place + count]
        return list(itertools.islice(itertools.cycle(found), count))

    def _add(self, count: int) -> None:
        """Learns the last pair of the first ``count`` tokens."""
        pair = tuple(self._tokens[max(count - 2, 0) : count])
        self._earlier.append(self._places.get(pair, 0))
        self._places[pair], self._count = count, count

    def _find(self, count: int) -> None:
        """Finds the place for the first ``count`` tokens."""
        tokens, self.equal = self._tokens, 0
        place = self._places.get(tuple(tokens[max(count - 2, 0) : count]), 0)
        for _ in range(_MOST_PLACES):
            if place < _LEAST_EQUAL:
                break
            equal, most = _LEAST_EQUAL, min(_MOST_EQUAL, place)
            while equal < most and tokens[place - 1 - equal] == tokens[count - 1 - equal]:
                equal += 1
            if equal > self.equal:
                self._place, self.equal = place, equal
            if equal == _MOST_EQUAL:
                break
            place = self._earlier[place - 1]


class Rates:
    """How often guesses of each kind have been right lately.

    Args:
        parent: rates of other texts, which count as much as two guesses; None: half of those were right.

    Example:
        >>> rates = Rates(None)
        >>> for is_right in (True, True, False):
        ...     rates.add(3, is_right)
        >>> round(rates.of(3), 2), rates.of(4)
        (0.59, 0.5)
    """

    def __init__(self, parent: Rates | None):
        self._parent = parent
        self._right = [0.0] * (_MOST_EQUAL + 1)
        self._all = [0.0] * (_MOST_EQUAL + 1)

    def add(self, kind: int, is_right: bool) -> None:
        """Counts a guess; of kind 0 there are none."""
        self._right[kind] = _DECAY * self._right[kind] + is_right
        self._all[kind] = _DECAY * self._all[kind] + 1
        if self._parent is not None:
            self._parent.add(kind, is_right)

    def of(self, kind: int) -> float:
        """The chance of a guess."""
        before = 0.5 if self._parent is None else self._parent.of(kind)
        return (self._right[kind] + _PRIOR * before) / (self._all[kind] + _PRIOR)


class Guesses(NamedTuple):
    """What ``verify`` is called with.

    Attributes:
        shape: R and T.
        tokens: the guesses for each text that has some.
    """

    shape: tuple[int, int]
    tokens: Mapping[RunningText, list[int]]

    @property
    def most(self) -> int:
        """The largest number of guesses of a text."""
        return max(map(len, self.tokens.values()), default=0)


class Speculation:
    """Decides which guesses are worth the time of their call.

    A call with guesses takes longer than a decode step. Both times are measured while texts are written, and how
    often guesses are right is known for each text, also while none of them is used: what the text goes on with says
    whether a guess would have been right. So guesses that do not pay cost no time of the devices.

    Args:
        slots: largest number of texts.
        row_counts: numbers of texts that a program may be for.
        is_ragged: whether the programs are for tokens of any text, not for the same number of each.
        is_exact: whether each call must be of the same shape, for the same bits whatever else runs.

    Attributes:
        shapes: R and T of the programs.
        made, right: numbers of guesses that were made, and that were right.
    """

    def __init__(self, slots: int, row_counts: Sequence[int], is_ragged: bool, is_exact: bool):
        self._slots, self._row_counts = slots, row_counts
        self._is_ragged, self._is_exact = is_ragged, is_exact
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
        self._calls = 0
        self._steps = 1  # of the next call without guesses
        self._rates = Rates(None)
        self._of: WeakKeyDictionary[RunningText, tuple[Lookup, Rates]] = WeakKeyDictionary()
        self.made = self.right = 0

    def guesses(self, texts: Sequence[RunningText]) -> Guesses | None:
        """The guesses for the next call; None if a call without them is better."""
        rows, exact = len(texts), self.shapes[0]
        chains = {text: chances for text in texts if (chances := self._chances(text))}
        if self._is_exact:
            return Guesses(
                exact, self._tokens({t: c[: EXACT_TOKENS - 1] for t, c in chains.items()})
            )
        if not chains or self._plain_seconds(rows) is None:
            return None
        best, found = _LEAST_GAIN * rows, None
        for shape in self.shapes:
            if (chosen := self._chosen(chains, rows, shape)) is None:
                continue
            gain = sum(sum(chances) for chances in chosen.values())
            value = (rows + gain) / self._time_of(shape, rows)
            if value > best:
                best, found = value, (shape, chosen)
        return None if found is None else Guesses(found[0], self._tokens(found[1]))

    def steps(self, most: int) -> int:
        """The number of steps of the next call without guesses.

        A text that repeats itself may do so again soon, which is noticed between two calls only.
        """
        return min(self._steps, most)

    def learn(
        self, texts: Sequence[RunningText], guesses: Guesses | None, counts: np.ndarray
    ) -> None:
        """Learns from the ``counts`` tokens that texts have got."""
        if guesses is not None:
            self.made += sum(len(guesses.tokens.get(text, ())) for text in texts)
            self.right += int(counts[: len(texts)].sum()) - len(texts)
        written = right = 0
        for text in filter(_can_guess, texts):
            lookup, rates = self._state(text)
            for kind, is_right in lookup.advance():
                rates.add(kind, is_right)
                written, right = written + 1, right + is_right
        if guesses is None:
            self._steps = 1 if 4 * right > written else min(2 * self._steps, MAX_STEPS)

    def took(self, texts: Sequence[RunningText], guesses: Guesses | None, seconds: float) -> None:
        """Learns the time of a call with guesses, or of a step without them."""
        self._calls += 1
        rows = self._row_count(len(texts))
        if guesses is None:
            self._seconds.setdefault(rows, deque(maxlen=_MEASURED)).append(seconds)
        elif (plain := self._plain_seconds(rows)) is not None:
            # Relative times stay what they are when the machine has other work too.
            times, _ = self._times.get((guesses.shape, rows), (deque(maxlen=_MEASURED), 0))
            times.append(seconds / plain)
            self._times[guesses.shape, rows] = times, self._calls

    def _state(self, text: RunningText) -> tuple[Lookup, Rates]:
        if text not in self._of:
            self._of[text] = Lookup(text.tokens), Rates(self._rates)
        return self._of[text]

    def _chances(self, text: RunningText) -> list[float]:
        """The chances that the text's guesses are right, up to each of them."""
        if not _can_guess(text):
            return []
        room = min(text.limit - len(text.tokens) - 1, _MOST_GUESSES)
        if text.text_length[1]:
            room = min(room, text.text_length[1] - text.stored - 1)
        lookup, rates = self._state(text)
        found, chance, kind = [], 1.0, lookup.equal
        while kind and len(found) < room:
            chance *= rates.of(kind)
            if chance < _LEAST_CHANCE:
                break
            found.append(chance)
            kind = min(kind + 1, _MOST_EQUAL)
        return found

    def _tokens(self, chains: Mapping[RunningText, list[float]]) -> dict[RunningText, list[int]]:
        return {text: self._of[text][0].guesses(len(chain)) for text, chain in chains.items()}

    def _chosen(
        self, chains: Mapping[RunningText, list[float]], rows: int, shape: tuple[int, int]
    ) -> Mapping[RunningText, list[float]] | None:
        """The guesses that a call of this shape has room for; None if another shape fits better."""
        if not self._is_ragged:
            if shape[0] != self._row_count(rows):
                return None
            return {text: chances[: shape[1] - 1] for text, chances in chains.items()}
        room = shape[0] - rows
        if room < 1:
            return None
        every = sorted((chance for chances in chains.values() for chance in chances), reverse=True)
        least = every[min(room, len(every)) - 1]
        found = {}
        for text, chances in chains.items():
            count = min(sum(chance >= least for chance in chances), room)
            if count:
                found[text] = chances[:count]
                room -= count
        return found

    def _row_count(self, rows: int) -> int:
        return next(n for n in self._row_counts if n >= rows)

    def _plain_seconds(self, rows: int) -> float | None:
        """The time of a step without guesses; None if it has not been measured."""
        found = self._seconds.get(self._row_count(rows))
        return None if found is None else statistics.median(found)

    def _time_of(self, shape: tuple[int, int], rows: int) -> float:
        """The time of a call over that of a step without guesses: the median of an estimate and the last times."""
        times, when = self._times.get((shape, self._row_count(rows)), ((), 0))
        estimate = 1 + _TOKEN_COST * (shape[0] * shape[1] - rows)
        return statistics.median_low([estimate, *(times if self._calls - when < _OLD else ())])


def _can_guess(text: RunningText) -> bool:
    """Whether tokens of a text are chosen without counts of those before, and without a grammar."""
    return text.matcher is None and not text.settings.has_words


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


def check_speculation(model: Any, speculation: Any) -> None:
    """Raises UserInputError unless a model can be used with this value of ``speculation``."""
    if speculation not in (None, "lookup"):
        raise UserInputError(f"speculation must be 'lookup' or None, got {shown(speculation)}")
    kinds = (group.kind for group in model._groups.values())
    if speculation is not None and any(isinstance(kind, States) for kind in kinds):
        raise UserInputError(
            f"speculation is not supported for {type(model).__name__}: the state of its recurrent layers cannot go "
            "back to the token before a wrong guess"
        )
