"""Prompt lookup: tokens are guessed from the text itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .dispatch import MAX_STEPS
from .running import RunningText
from .speculation import GuessCounts, Guesses, Rates, Speculation, chain, most_guesses

# The lengths of equal parts of a text that count as different kinds of guesses, and how many earlier places are
# compared to find the longest.
_LEAST_EQUAL, _MOST_EQUAL, _MOST_PLACES = 2, 8, 16
# The largest number of guesses for a text in one call.
_MOST_GUESSES = 15


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


class Lookups(Speculation):
    """Guesses from the texts themselves.

    How often they are right is known for each text also while none is used: what the text goes on with says whether a
    guess would have been right. So guesses that do not pay cost no time of the devices.

    Args:
        options: arguments of ``Speculation``.
    """

    def __init__(self, *options: Any):
        super().__init__(*options)
        self._steps = 1  # of the next call without guesses
        self.rates = Rates(0.5)
        self._of: WeakKeyDictionary[RunningText, tuple[Lookup, Rates]] = WeakKeyDictionary()

    def chances(self, text: RunningText) -> list[float]:
        if not (most := most_guesses(text, _MOST_GUESSES)):
            return []
        lookup, rates = self._state(text)
        if not lookup.equal:
            return []
        kinds = range(lookup.equal, lookup.equal + most)
        return chain([rates.of(min(kind, _MOST_EQUAL)) for kind in kinds])

    def guesses(self, plan: GuessCounts, texts: Sequence[RunningText]) -> Guesses:
        tokens = {t: self._of[t][0].guesses(n) for t, n in plan.counts.items() if t in texts}
        return Guesses(plan.shape, tokens)

    def steps(self, most: int) -> int:
        """Few after a guess that would have been right: the text may go on repeating itself."""
        return min(self._steps, most)

    def learn(
        self, texts: Sequence[RunningText], guesses: Guesses | None, counts: np.ndarray
    ) -> None:
        super().learn(texts, guesses, counts)
        written = right = 0
        for text in texts:
            if text.matcher is not None or text.settings.has_words:
                continue
            lookup, rates = self._state(text)
            for kind, is_right in lookup.advance():
                rates.add(kind, is_right)
                written, right = written + 1, right + is_right
        if guesses is None:
            self._steps = 1 if 4 * right > written else min(2 * self._steps, MAX_STEPS)

    def _state(self, text: RunningText) -> tuple[Lookup, Rates]:
        if text not in self._of:
            self._of[text] = Lookup(text.tokens), Rates(self.rates)
        return self._of[text]
