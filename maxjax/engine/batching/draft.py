"""Guesses that are written: by a draft model, or by the model's own layer of multi-token prediction.

``ModelGuesses`` decides when to ask and what guesses are worth; ``Drafts`` and ``Predictions`` have the memory and the
programs.
"""

from __future__ import annotations

import abc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from ...errors import UserInputError, shown
from ...nn.layer import Module
from ...progress import compiling
from ..bucket import bucket
from ..generate.checks import check_model
from ..shardings import shardings_on_mesh
from .calls import Calls, compiled_count, platform_of_arrays
from .dispatch import DispatchTokens
from .memory import is_recurrent
from .messages import tell
from .pages import Key
from .programs import (
    LEAST_TOKENS,
    EngineMemory,
    TextRows,
    decode,
    joined_tokens,
    moved,
    read,
    read_tokens,
    row_of,
    token_counts,
)
from .running import RunningText
from .speculation import MEASURED, GuessCounts, Guesses, Rates, Speculation, chain, most_guesses

_MOST_GUESSES = 7
# The rate of guesses that is assumed at first.
_RATE = 0.8
# The number of steps without guesses after which they are tried again.
_AGAIN = 256


class ModelGuesses(Speculation):
    """Guesses that a model writes: the next tokens of all texts, with their settings and random keys.

    Where both models draw with the same numbers from similar distributions, they mostly draw the same token.

    Args:
        model: what guesses, called as a model.
        size: bytes of the weights that a step of it reads.
        calls: the calls of the model, which know the texts' pages.
        options: arguments of ``Speculation``.
    """

    _more_steps = 0  # after the last guess

    def __init__(self, model: Any, size: int, calls: Calls, *options: Any):
        super().__init__(*options)
        self._model, self._calls, self._room = model, calls, calls.memory
        self._how = calls.how._replace(tops=None)
        # The time of a step over that of a step of the model: what weights alone would make it, and measured ones.
        self._size = size / weight_bytes(calls.memory.model)
        self._step_times: deque[float] = deque(maxlen=MEASURED)
        self._rates: WeakKeyDictionary[RunningText, Rates] = WeakKeyDictionary()
        self._last = 0  # step with guesses

    def _run(self, program: Any, texts: TextRows, *args: Any) -> Any:
        """Calls a program with the memory of what guesses, and keeps the memory that it returns."""
        tell(self._calls.together, "guess", program.__name__, texts, args)
        return self.dispatch(program, texts, args)

    @abc.abstractmethod
    def dispatch(self, program: Any, texts: TextRows, args: Sequence[Any]) -> Any:
        """Calls such a program in this process."""

    def _read(self, texts: Sequence[RunningText]) -> bool:
        """Reads the tokens of texts that the model has read and this one has not; returns whether there are any."""
        return False

    def _has_stored(self, text: RunningText, count: int) -> None:
        """Learns that so many tokens of a text have been stored, some of which may be wrong guesses."""

    def chances(self, text: RunningText) -> list[float]:
        most = most_guesses(text, _MOST_GUESSES)
        return chain([self._rates_of(text).of(1)] * most)

    def extra_time(self, count: int, rows: int) -> float:
        return (count + self._more_steps) * statistics.median_low([self._size, *self._step_times])

    def plan(self, texts: Sequence[RunningText]) -> GuessCounts | None:
        if self.done - self._last > _AGAIN:
            self._rates.clear()  # the texts may go on with what is easier to guess
            self._step_times.clear()
            self._last = self.done
        if (found := super().plan(texts)) is not None and found.counts:
            self._last = self.done
        return found

    def guesses(self, plan: GuessCounts, texts: Sequence[RunningText]) -> Guesses:
        texts = [text for text in texts if text in plan.counts]
        if not texts:
            return Guesses(plan.shape, {})
        has_read = self._read(texts)
        steps = self._more_steps + max(plan.counts[text] for text in texts)
        began, compiled = time.perf_counter(), compiled_count(decode)
        found = self._calls.together.fetch(self._decode(texts, steps))
        plain = self.plain_seconds(len(texts))
        if compiled == compiled_count(decode) and not has_read and plain is not None:
            self._step_times.append((time.perf_counter() - began) / steps / plain)
        tokens = {}
        for row, text in enumerate(texts):
            count = min(int(found.counts[row]), plan.counts[text])
            if found.bad[row]:
                count = min(count, int(found.counts[row]) - 1)
            if count:
                tokens[text] = found.tokens[row, :count].tolist()
            self._has_stored(text, text.stored + int(found.counts[row]))
        return Guesses(plan.shape, tokens)

    def learn(
        self, texts: Sequence[RunningText], guesses: Guesses | None, counts: np.ndarray
    ) -> None:
        super().learn(texts, guesses, counts)
        if guesses is None:
            return
        for text, count in zip(texts, counts.tolist(), strict=False):
            for place in range(min(count, len(guesses.tokens.get(text, ())))):
                self._rates_of(text).add(1, place < count - 1)

    def _rates_of(self, text: RunningText) -> Rates:
        if text not in self._rates:
            self._rates[text] = Rates(_RATE)
        return self._rates[text]

    # --- programs

    def _decode(self, texts: Sequence[RunningText], steps: int) -> DispatchTokens:
        rows = self._calls.placed(texts)
        last = row_of(rows, lambda text: text.tokens[-1], np.int32(0))
        active = row_of(rows, lambda text: True, np.bool_(False))
        return self._run(decode, self._texts(rows), last, active, np.int32(steps), np.int32(0))

    def _texts(self, rows: Sequence[RunningText | None], **table: Any) -> TextRows:
        """The arrays of texts, without what guesses do not depend on."""
        found, none = self._calls.text_rows(rows, **table), np.zeros(len(rows), bool)
        settings = found.settings._replace(has_words=none, has_logprobs=none)
        return found._replace(settings=settings, allowed=None)

    def compile(self) -> int:
        """Compiles all programs; returns their number."""
        steps = list(itertools.product(self.row_counts, self._calls.widths()))
        for rows, width in steps:
            none = np.zeros(rows, np.int32)
            texts = self._texts([None] * rows, width=width)
            self._run(decode, texts, none, none > 0, np.int32(1), np.int32(0))
        return len(steps)


class Drafts(ModelGuesses):
    """Guesses of a smaller model with the same vocabulary.

    Its keys and values are in a pool of its own, in the pages with the numbers that texts have in the model's pool. It
    reads the tokens of a text when it first guesses for it, and those that were written without it when it does so
    again.

    Args:
        model: the smaller model.
        calls: the calls of the model, which know the texts' pages.
        chunk: largest number of tokens that are read at once; a power of two.
        options: arguments of ``Speculation``.
    """

    _more_steps = 1  # which stores the last guess

    def __init__(self, model: Any, calls: Calls, chunk: int, *options: Any):
        super().__init__(model, weight_bytes(model), calls, *options)
        self._chunk = chunk
        pool = self._pool()
        self._shardings = shardings_on_mesh(pool)
        self._reads_tokens = platform_of_arrays(pool) == "cpu"
        self._memory = EngineMemory(pool, None)
        # The list of pages of a text, which is another one when it gets others, and the number of tokens in them.
        self._stored: WeakKeyDictionary[RunningText, tuple[list[int], int]] = WeakKeyDictionary()
        self._keys: dict[int, Key] = {}  # of the pages that hold what their key says here too

    def _pool(self) -> Any:
        of = self._room
        return self._model.page_pool(of.pages.count, of.pages.size, of.slots, of.cache_dtype)

    def close(self) -> None:
        """Frees the memory on the devices."""
        if hasattr(self, "_memory"):
            del self._memory

    def _grow(self) -> None:
        """Makes the pool as large as the model's."""
        if self._memory.pool.pages == self._room.pages.count:
            return
        pool = moved(self._pool(), self._memory.pool, shardings=self._shardings)
        self._memory = EngineMemory(pool, None)

    def chances(self, text: RunningText) -> list[float]:
        return super().chances(text)[: max(self._model.max_length - text.stored - 1, 0)]

    def learn(
        self, texts: Sequence[RunningText], guesses: Guesses | None, counts: np.ndarray
    ) -> None:
        super().learn(texts, guesses, counts)
        for text in texts if guesses is not None else ():
            if text in self._stored:
                pages, stored = self._stored[text]
                self._stored[text] = pages, min(stored, text.stored)

    def _has_stored(self, text: RunningText, count: int) -> None:
        self._stored[text] = text.pages, count

    def take_over(self, text: RunningText, before: RunningText, pages: list[int]) -> None:
        held, stored = self._stored.get(before, (None, 0))
        if held is pages:
            self._stored[text] = text.pages, min(stored, text.stored)

    # --- programs

    def _read(self, texts: Sequence[RunningText]) -> bool:
        self._grow()
        chunk, pieces, room, has_read = self._chunk, [], 0, False
        for text in texts:
            start = self._first_unread(text)
            while start < text.stored:
                if not room:
                    self._read_pieces(pieces)
                    pieces, room = [], chunk
                count = min(text.stored - start, room)
                pieces.append((text, start, count))
                start, room, has_read = start + count, room - count, True
            self._stored[text] = text.pages, text.stored
        self._read_pieces(pieces)
        for text in texts:
            for page in text.pages[: text.stored // self._room.pages.size]:
                if (key := self._room.pages.key(page)) is not None:
                    self._keys[page] = key
        return has_read

    def _first_unread(self, text: RunningText) -> int:
        pages, stored = self._stored.get(text, (None, 0))
        if pages is text.pages:
            return stored
        of, count = self._room.pages, 0
        for page in text.pages[: text.stored // of.size]:
            if (key := of.key(page)) is None or self._keys.get(page) != key:
                break
            count += of.size
        return count

    def _read_pieces(self, pieces: Sequence[tuple[RunningText, int, int]]) -> None:
        if not pieces:
            return
        if self._reads_tokens:
            rows = self._room.slots
            args = joined_tokens([(text.tokens, a, n) for text, a, n in pieces], rows)
            texts = self._calls.placed([text for text, *_ in pieces], rows)
            self._run(read_tokens, self._texts(texts), *args)
            return
        for text, start, count in pieces:
            ids = np.zeros((1, bucket(count, LEAST_TOKENS)), np.int32)
            ids[0, :count] = text.tokens[start : start + count]
            rows = self._texts([text], gathers=True)._replace(lengths=np.asarray([start], np.int32))
            self._run(read, rows, ids, np.asarray([count], np.int32))

    def _texts(self, rows: Sequence[RunningText | None], **table: Any) -> TextRows:
        own = {"text_lengths": None, "found": None, "window_table": None}
        return super()._texts(rows, **table)._replace(**own)

    def compile(self) -> int:
        of, sizes = self._room, token_counts(self._chunk)
        blank = lambda rows, width: self._texts([None] * rows, width=width)
        widths = self._calls.widths(gathers=not self._reads_tokens)
        for size, width in itertools.product(sizes, widths):
            none = np.zeros(size, np.int32)
            if self._reads_tokens:
                ends = np.zeros(of.slots, np.int32)
                self._run(read_tokens, blank(of.slots, width), none, none, none - 1, ends)
            else:
                self._run(read, blank(1, width), none[None], np.zeros(1, np.int32))
        return len(sizes) * len(widths) + super().compile()

    def dispatch(self, program: Any, texts: TextRows, args: Sequence[Any]) -> Any:
        options = {"how": self._how, "shardings": self._shardings}
        with compiling(program.__name__, self._calls.shows):
            (self._memory, found), _ = self._calls.together.run(
                program, self._model, self._memory, texts, *args, **options
            )
        return found


class _Predictor(Module):
    """The layer of multi-token prediction of a model, called as a model that writes text."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def __call__(self, ids: Any, cache: Any, *, lengths: Any, last: bool) -> Any:
        return self.model.predict(ids, cache, lengths=lengths)


class Predictions(ModelGuesses):
    """Guesses of the model's own layer of multi-token prediction (``models/parts/mtp.py``).

    Its memory is a part of the model's pool, and all programs of the model keep it up: it has nothing to read.

    Args:
        calls: the calls of the model.
        options: arguments of ``Speculation``.
    """

    def __init__(self, calls: Calls, *options: Any):
        model = calls.memory.model
        size = weight_bytes(model.mtp) + weight_bytes(model.lm_head)
        super().__init__(_Predictor(model), size, calls, *options)

    def dispatch(self, program: Any, texts: TextRows, args: Sequence[Any]) -> Any:
        room, arrays = self._room, self._room.arrays
        memory, options = EngineMemory(arrays.pool, None), {"shardings": room.shardings}
        with compiling(program.__name__, self._calls.shows):
            (memory, found), _ = self._calls.together.run(
                program, self._model, memory, texts, *args, how=self._how, **options
            )
        room.arrays = arrays._replace(pool=memory.pool)
        return found


def check_speculation(model: Any, speculation: Any, draft: Any) -> None:
    """Raises UserInputError unless tokens of a model can be guessed in this way."""
    if speculation not in (None, "lookup", "mtp"):
        raise UserInputError(
            f"speculation must be 'lookup', 'mtp' or None, got {shown(speculation)}"
        )
    if speculation == "mtp" and model.mtp is None:
        name = type(model).__name__
        if model.mtp_class is None:
            raise UserInputError(f"multi-token prediction is not supported for {name}")
        raise UserInputError(
            f"this {name} has no layer of multi-token prediction: load it with maxjax.load(path, mtp=True)"
        )
    if speculation is not None and draft is not None:
        raise UserInputError("speculation and draft are two ways to guess tokens: pass one of them")
    if speculation is None and draft is None:
        return
    if draft is not None:
        check_model(draft)
    for one in (model, draft):
        if one is not None and is_recurrent(one):
            raise UserInputError(
                f"speculation is not supported for {type(one).__name__}: the state of its recurrent layers cannot go "
                "back to the token before a wrong guess"
            )
    if draft is None:
        return
    sizes = model.config.vocab_size, draft.config.vocab_size
    if sizes[0] != sizes[1]:
        raise UserInputError(
            f"draft must have the vocabulary of the model: expected {sizes[0]:,} tokens, got {sizes[1]:,}"
        )
    if draft.config.ropes_by_length:
        raise UserInputError(
            f"this {type(draft).__name__} is not supported as draft: its RoPE depends on the length of the text"
        )


def weight_bytes(model: Any) -> int:
    """The size of the weights of a module."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model))
