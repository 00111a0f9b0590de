"""Scheduler: which texts run, and what the devices do next.

:meth:`Scheduler.read` gives free slots and pages to texts of the queue and reads a part of their prompts;
:meth:`Scheduler.write` lets the texts that have been read write some tokens. They run in one thread; ``Engine`` has one
of its own for it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...errors import UserInputError
from ...graph.placement.arrays import platform_of
from ...graph.placement.specs import mesh_of
from ...lockstep import Lockstep
from ...lora.side_by_side import Updates
from ...models.parts.rotary import reading_length, same_until
from ...nn.kv_cache.kinds import States
from ...nn.layer.observe.programs import ProgramObserver
from ...progress import compiling
from ..generate.batch import bucket
from ..generate.programs import MAX_STEPS, DispatchTokens
from ..isolation import isolated
from ..sampling.draw import Sampled
from ..sampling.rows import MOST_LOGPROBS, Words
from ..sampling.sequences import Sequences
from .adapters import Adapters, LoadedAdapter
from .draft import Drafts
from .grammar import mask_words
from .lookup import Lookups
from .pages import Pages
from .programs import (
    LEAST_TOKENS,
    Choosing,
    EngineMemory,
    LogitsProcessor,
    TextRows,
    decode,
    joined_tokens,
    moved,
    read,
    read_tokens,
    resized_words,
    row_of,
    start_words,
    token_counts,
)
from .running import RunningText, Stage
from .speculation import Guesses, Plan, accepted, rows_of, verify

PAGE_SIZE = 64
_LEAST_PAGES = 8
# Texts of this length have room in arrays about the order of tokens, if there are no pages to tell.
_LONGEST_AT_FIRST = 4096
# Up to this position, tokens of several texts are read together, each of which attends to its text by itself.
_RAGGED = 2048
# While prompts wait to be read, so many tokens are written between two pieces of them.
_STEPS_BETWEEN = 4


class EndedByOthers(Exception):
    """The first of several processes has ended the answer that it streams; the argument is where."""


class _Dispatch(NamedTuple):
    """Steps that the devices are making: of which texts, what they write, how many, and when they have begun.

    ``guesses`` are what one step with guesses checks; ``written`` is then all that it has chosen. ``is_new`` says
    whether it was compiled.
    """

    texts: list[RunningText]
    written: Any
    steps: int
    began: float
    guesses: Guesses | None
    is_new: bool


class Scheduler:
    """The texts that a model continues, and the memory that they share.

    Args:
        model: a decoder whose weights are loaded.
        slots: largest number of texts that run at once.
        pages: number of pages of the cache.
        most_pages: number to which they may grow; None: they do not.
        chunk: largest number of prompt tokens that are read between two steps; a power of two.
        cache_dtype: dtype of keys and values; None for the model's.
        tops: number of most probable tokens that are reported where a text wants log-probabilities.
        exact: whether a text gets the same bits whatever else runs. Each page of a prompt is then read by itself, each
            step is for all slots, and a text gets all its pages at once, so that it is never put back.
        logits_processor: what logits go through before a token is chosen.
        has_order: whether texts may have settings about the order of tokens, or rare filters; if so, the programs of
            texts with penalties or biases take longer to compile.
        together: the call that the scheduler belongs to, if several processes make it together.
        dispatch_s: the duration of a dispatch that is aimed at, in seconds: new prompts wait for it, and a stop string
            is noticed only after it.
        speculation: whether tokens are guessed from the texts themselves (``speculation.py``).
        draft: a smaller model that guesses tokens.
        adapters: the adapters that texts may use.
    """

    @isolated()
    def __init__(
        self, model: Any, slots: int, pages: int, *, most_pages: int | None = None, chunk: int = 512,
        cache_dtype: Any = None, tops: int = MOST_LOGPROBS, exact: bool = False,
        logits_processor: LogitsProcessor | None = None, has_order: bool = True,
        together: Lockstep | None = None, dispatch_s: float = 0.1, speculation: str | None = None,
        draft: Any = None, adapters: Adapters | None = None,
    ):  # fmt: skip
        self.adapters = Adapters(model) if adapters is None else adapters
        self.model, self.slots, self.chunk = model, slots, chunk
        self._vocab_size = model.config.vocab_size
        self._how, self._is_exact = Choosing(tops, logits_processor), exact
        self.processor = logits_processor
        self._ropes = model.config.ropes_by_length
        self._observer, self.together = ProgramObserver(model), together or Lockstep("generate", ())
        self.cache_dtype, self._dispatch_s = cache_dtype, dispatch_s
        self._has_order = has_order
        self._most_pages = pages if most_pages is None else most_pages
        pool = model.page_pool(pages, PAGE_SIZE, slots, cache_dtype)
        self._is_recurrent = any(isinstance(group.kind, States) for group in model._groups.values())
        self.pages = Pages(pool.pages, PAGE_SIZE)
        # Models with recurrent layers alone have no pages, and texts of any length.
        most = max(self._most_pages, pool.pages) * PAGE_SIZE
        self._longest = min(model.max_length, most or _LONGEST_AT_FIRST)
        # A row of recurrent states is that of the last token alone.
        self._shares = not self._is_recurrent
        leaves = jax.tree.leaves(pool)
        where = [leaf.sharding for leaf in leaves]
        self._shardings = tuple(where) if isinstance(where[0], NamedSharding) else None
        self.memory = EngineMemory(pool, None)
        platform = platform_of(mesh_of(where) or where[0])
        # Elsewhere a token of a ragged call would read a copy of all pages of its text.
        self._is_ragged = platform == "cpu" and not self._is_recurrent and not exact
        options = (slots, self._row_counts(), platform == "cpu", exact)
        self.speculation: Lookups | Drafts | None = None
        if draft is not None:
            self.speculation = Drafts(draft, self, *options)
        elif speculation is not None:
            self.speculation = Lookups(*options)
        self.waiting: list[RunningText] = []
        self.has_cancelled = False  # whether a text has been cancelled since the last step
        self.running: list[RunningText] = []  # in the order in which they got a slot
        self._free = list(range(slots - 1, -1, -1))
        self._most_steps = 1  # in a dispatch
        self._coming: _Dispatch | None = None
        self.shows = True
        # Numbers of decode steps, of tokens written in them, of all tokens written and of prompt tokens read.
        self.steps = self.busy_rows = self.written = self.read_count = 0

    # --- texts

    @property
    def is_busy(self) -> bool:
        """Whether a text waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, text: RunningText, *, again: bool = False) -> None:
        """Puts a text into the queue, behind those of its priority; in front of them if it has run before.

        It ends with an error if there is no such adapter as it wants.
        """
        if text.adapter is not None and text.loaded is None:
            try:
                text.loaded = self.adapters.find(text.adapter)
            except UserInputError as error:
                return text.end(error)
        least = text.priority - again
        place = len(self.waiting)
        while place and self.waiting[place - 1].priority > least:
            place -= 1
        self.waiting.insert(place, text)
        if text.is_cancelled:  # before it was in the queue
            self.has_cancelled = True

    def step(self) -> None:
        """Starts, reads and continues texts; each gets its new tokens."""
        self.read()
        self.write()

    @isolated()
    def read(self) -> None:
        """Starts texts, and reads the next tokens of prompts."""
        self._end_cancelled()
        self._release_ended()
        self._start()
        self._read()

    @isolated()
    def write(self) -> None:
        """Lets the texts that have been read write some tokens."""
        if self._coming is None:
            self._dispatch()
        if self._coming is None:
            return
        texts = self._receive()
        if self._may_go_ahead():
            self._dispatch()  # the devices write while the host makes text of these tokens
        for text in texts:
            if not text.is_lazy:
                text.take()
        self._release_ended()

    def close(self) -> None:
        """Frees the memory on the devices, and forgets all texts."""
        for text in self.running:
            self._end_recording(text)
        self.waiting, self.running, self._coming = [], [], None
        if hasattr(self, "memory"):
            del self.memory
            if isinstance(self.speculation, Drafts):
                self.speculation.close()

    @isolated()
    def add_adapter(self, name: str, updates: Updates) -> None:
        """Adds an adapter, or a new version of one: later texts use it, and those in the queue the one that they have.

        Raises:
            UserInputError: as for ``Adapters.add``.
        """
        self.adapters.add(name, updates, self._adapters_in_use())

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter; texts that have it go on.

        Raises:
            UserInputError: there is no such adapter.
        """
        self.adapters.remove(name, self._adapters_in_use())

    def _adapters_in_use(self) -> set[LoadedAdapter]:
        texts = [*self.waiting, *self.running]
        return {text.loaded for text in texts if text.loaded is not None}

    def _end_cancelled(self) -> None:
        if not self.has_cancelled:
            return
        self.has_cancelled = False
        for text in [*self.waiting, *self.running]:
            if text.is_cancelled:
                text.end()
        self.waiting = [text for text in self.waiting if text.stage is not Stage.ENDED]

    # --- slots and pages

    def _start(self) -> None:
        """Gives slots and pages to the first texts of the queue."""
        later = []
        for place, text in enumerate(self.waiting):
            self._prepare(text)
            if text.after is not None:
                self._take_over(text, text.after)
            if self._free and self._is_prefix_coming(text):
                later.append(text)  # it is cheaper to wait for these pages than to read them twice
            elif not self._free or not self._allocate(text):
                later += self.waiting[place:]  # those behind it must not overtake it
                break
            else:
                text.slot, text.stage = self._free.pop(), Stage.READING
                self.running.append(text)
                if text.settings.has_words:
                    self._start_words(text)
        self.waiting = later

    def _prepare(self, text: RunningText) -> None:
        """Computes what a text needs to start: the length for its RoPE, and the keys of its pages."""
        if text.keys is not None:
            return
        if self._ropes:
            length = reading_length(self._ropes, len(text.tokens), text.limit)
            text.text_length = (length, int(same_until(self._ropes, length)))
        # The last token must be read, so its page is never shared.
        text.keys = self._keys(text, len(text.tokens) - 1)

    def _keys(self, text: RunningText, count: int) -> list[bytes]:
        """The keys of the pages of a text's first tokens; none if pages are not shared."""
        if not self._shares or text.is_lazy or self._observer.is_observed:
            return []
        salt = repr((text.salt, text.loaded, text.text_length)).encode()
        return self.pages.keys(text.tokens[:count], salt)

    def _is_prefix_coming(self, text: RunningText) -> bool:
        """Whether a text is being read whose pages this one will share."""
        assert text.keys is not None
        missing = next((key for key in text.keys if not self.pages.has(key)), None)
        return missing is not None and any(
            missing in (one.keys or ())[one.stored // PAGE_SIZE :]
            for one in self.running
            if one.stage is Stage.READING
        )

    def _allocate(self, text: RunningText) -> bool:
        """Gives a text its pages, and those that it shares; False if there are too few."""
        assert text.keys is not None
        if not text.pages:
            text.pages = self.pages.share(text.keys)
            text.stored = len(text.pages) * PAGE_SIZE
        size = text.limit if self._is_exact else len(text.tokens)
        if not self._add_pages(text, size):
            self.pages.release(text.pages)
            text.pages, text.stored = [], 0
            return False
        self.pages.hits += text.stored
        return True

    def _take_over(self, text: RunningText, before: RunningText) -> None:
        """Gives a text the slot of another one, and the pages of the tokens with which both begin."""
        text.after = None
        if self._coming is not None:
            self._receive()
        if before.slot is None:
            return
        read, least = before.tokens[: before.stored], len(text.tokens) - 1
        pairs = zip(read, text.tokens[:least], strict=False)
        count = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(read), least))
        is_other = (text.text_length[1], text.loaded) != (before.text_length[1], before.loaded)
        if is_other or (self._is_recurrent and count < len(read)):
            count = 0
        kept = self.pages.needed(count)
        self.pages.release(before.pages[kept:])
        self._free.append(before.slot)  # which the text gets now
        text.pages, text.stored = before.pages[:kept], count
        before.slot, before.pages = None, []

    def _add_pages(self, text: RunningText, tokens: int) -> bool:
        """Gives a text pages for so many tokens; False if there are too few."""
        wanted = max(self.pages.needed(tokens) - len(text.pages), 0)
        if (more := self.pages.allocate(wanted)) is None:
            if wanted > self._free_pages:
                return False
            self._grow(wanted - self.pages.free)
            more = self.pages.allocate(wanted)
            assert more is not None
        text.pages += more
        return True

    @property
    def _free_pages(self) -> int:
        """The number of pages that texts can get, now or when the pool has grown."""
        return self.pages.free + self._most_pages - self.pages.count

    def _grow(self, more: int) -> None:
        """Makes the pool larger by at least so many pages."""
        count = min(bucket(self.pages.count + more), self._most_pages)
        new = self.model.page_pool(count, PAGE_SIZE, self.slots, self.cache_dtype)
        pool = moved(new, self.memory.pool, shardings=self._shardings)
        self.memory = self.memory._replace(pool=pool)
        self.pages.grow(count)
        if isinstance(self.speculation, Drafts):
            self.speculation.grow()

    def _start_words(self, text: RunningText) -> None:
        assert text.slot is not None
        size = text.prompt_length
        prompt, answer = text.tokens[:size], text.tokens[size:]
        longest = max(self._longest, bucket(text.limit)) if text.limit > self._longest else None
        self._set_words(text.slot, prompt, answer, text.bias, text.sequences, longest)

    def _set_words(
        self, slot: int, prompt: Sequence[int], answer: Sequence[int], bias: np.ndarray | None = None,
        sequences: Sequences | None = None, longest: int | None = None,
    ) -> None:  # fmt: skip
        """Sets the words of a slot."""
        size, longest = self._vocab_size, (longest or self._longest) if self._has_order else None
        words = self.memory.words or self._placed_words(Words.empty(self.slots, size, longest))
        new = Words.of(prompt, answer, bias, sequences, longest, size)
        # Arrays of sequences grow with the largest request.
        sizes = tuple(map(max, words.sizes, new.sizes))
        if sizes != words.sizes:
            words = self._placed_words(resized_words(words, sizes=sizes))
        words = start_words(words, np.int32(slot), new.resized(*sizes))
        self.memory = self.memory._replace(words=words)

    def _placed_words(self, words: Words) -> Words:
        if self._shardings is None:
            return words
        return jax.device_put(words, NamedSharding(self._shardings[0].mesh, PartitionSpec()))

    def _release(self, text: RunningText) -> None:
        """Takes slot and pages from a text."""
        assert text.slot is not None
        if isinstance(text.error, FloatingPointError):
            self.pages.withdraw(text.pages)
        else:
            # What steps have stored has not the same bits as what is read.
            count = min(text.stored, text.prompt_length) if self._is_exact else text.stored
            self.pages.publish(text.pages, self._keys(text, count))
        self.pages.release(text.pages)
        self._free.append(text.slot)
        text.slot, text.pages = None, []
        self.running.remove(text)

    def _release_ended(self) -> None:
        for text in [one for one in self.running if one.stage is Stage.ENDED]:
            if text.is_lazy and text.error is None:
                self.running.remove(text)
            else:
                self._release(text)
                self._end_recording(text)

    def _end_recording(self, text: RunningText) -> None:
        self._observer.end(text.number, text.prompt_length + len(text.partial.tokens) - 1)

    def _preempt(self, text: RunningText) -> None:
        """Puts a running text back into the queue."""
        self._release(text)
        text.wait_again()
        self.add(text, again=True)

    # --- reading

    def _read(self) -> None:
        """Reads the next tokens of prompts, ``chunk`` of them at most."""
        room, pieces = self.chunk, []
        for text in self.running:
            if text.stage is Stage.READING and room > 0:
                count = min(text.unread, room)
                if self._is_exact and count < text.unread:
                    count -= count % PAGE_SIZE  # pieces end where pages do, whatever else is read
                pieces.append((text, count))
                room -= count
        pieces = [piece for piece in pieces if piece[1]]
        if not pieces:
            return
        joined = [piece for piece in pieces if self._may_join(*piece)]
        if joined:
            self._read_tokens(joined)
        for text, count in pieces:
            if (text, count) not in joined:
                for size in self._parts(text.stored, count):
                    self._read_piece(text, size)
        self._release_ended()

    def _may_join(self, text: RunningText, count: int) -> bool:
        """Whether tokens of a text are read together with those of others."""
        is_short = text.stored + count <= _RAGGED
        return is_short and self._is_ragged and not self._observer.is_observed

    def _read_tokens(self, pieces: Sequence[tuple[RunningText, int]]) -> None:
        """Reads tokens of several texts at once."""
        texts, rows = [text for text, _ in pieces], self.slots
        args = joined_tokens([(one.tokens, one.stored, count) for one, count in pieces], rows)
        for one, count in pieces:
            self._mark_read(one, count)
        arrays = self.text_rows(texts, rows, finishes=[one.unread == 0 for one in texts])
        of = (args[1], None)
        sampled = self._run(read_tokens, texts, arrays, *args, width=None, rows=of)
        self._take_first(texts, sampled)

    def _parts(self, start: int, count: int) -> list[int]:
        """The numbers of tokens that are read at once; each page by itself where bits must be the same."""
        if not self._is_exact:
            return [count]
        borders = [*range(start, start + count, PAGE_SIZE), start + count]
        return [end - begin for begin, end in zip(borders, borders[1:], strict=False)]

    def _read_piece(self, text: RunningText, count: int) -> None:
        """Reads tokens of one text."""
        width = PAGE_SIZE if self._is_exact else bucket(count, LEAST_TOKENS)
        ids = np.zeros((1, width), np.int32)
        ids[0, :count] = text.tokens[text.stored : text.stored + count]
        arrays = self.text_rows([text], 1, finishes=[count == text.unread])
        counts, again = np.asarray([count], np.int32), text.stored < text.recorded
        sampled = self._run(
            read, [text], arrays, ids, counts, width=width, counts=lambda _: counts, keeps=not again
        )
        self._mark_read(text, count)
        self._take_first([text], sampled)

    def _mark_read(self, text: RunningText, count: int) -> None:
        text.stored += count
        text.recorded = max(text.recorded, text.stored)
        self.read_count += count
        assert text.keys is not None
        self.pages.publish(text.pages, text.keys[: text.stored // PAGE_SIZE])

    def _take_first(self, texts: Sequence[RunningText], sampled: Any) -> None:
        """Gives those texts their first token that have been read to their end."""
        if all(text.unread for text in texts) and not self.together.is_shared:
            return
        found = self.together.fetch(sampled)
        one = np.ones(found.tokens.shape, np.int32)
        first = DispatchTokens(
            found.tokens[:, None],
            one,
            ~found.valid,
            ~found.valid,
            jax.tree.map(lambda a: a[:, None], found),
        )
        for row, text in enumerate(texts):
            if not text.unread:
                text.stage = Stage.WRITING
                text.receive(first, row)
                self.written += 1
                if not text.is_lazy:
                    text.take()

    # --- writing

    def _writing(self) -> list[RunningText]:
        return [text for text in self.running if text.stage is Stage.WRITING and not text.is_whole]

    def _may_go_ahead(self) -> bool:
        """Whether the next steps do not depend on the text of the last tokens, nor on what waits."""
        if self.waiting or any(text.stage is Stage.READING for text in self.running):
            return False
        texts = self._writing()
        if any(text.matcher is not None for text in texts):
            return False
        if self._ropes and any(text.stored >= text.text_length[1] for text in texts):
            return False
        wanted = (self._wanted(text, MAX_STEPS) - len(text.pages) for text in texts)
        return sum(wanted) <= self._free_pages

    def _dispatch(self) -> None:
        """Begins the next steps of the texts that write, as many as the first process decides."""
        if not self._writing():
            return
        if (plan := self._plan()) is not None:
            return self._dispatch_guesses(plan)
        decided = self.together.decide({"steps": self._steps_now()})
        if "steps" not in decided:
            raise EndedByOthers(decided)
        self.dispatch(decided["steps"])

    @isolated()
    def dispatch(self, steps: int) -> None:
        """Begins so many steps of the texts that write."""
        texts = self._with_room(steps)
        if not texts:
            return
        if self._ropes:
            steps = min(steps, *(text.text_length[1] - text.stored for text in texts))
        began, compiled = time.perf_counter(), _compiled()
        written = self._decode(texts, steps)
        self._coming = _Dispatch(texts, written, steps, began, None, _compiled() > compiled)

    def _plan(self) -> Plan | None:
        """The guesses that the next step has room for; None if none are made."""
        if self.speculation is None or self._observer.is_observed:
            return None
        return self.speculation.plan(self._writing())

    def _dispatch_guesses(self, plan: Plan) -> None:
        """Begins a step that reads the last token of each text and the guesses for those after it."""
        assert self.speculation is not None
        texts = self._with_room(1 + plan.most)
        if not texts:
            return
        guesses = self.speculation.guesses(plan, texts)
        began, compiled = time.perf_counter(), _compiled()
        rows = self.slots if guesses.shape[1] == 1 else guesses.shape[0]
        args, arrays = rows_of(texts, guesses), self.text_rows(texts, rows)
        found = self._run(verify, texts, arrays, *args, width=None, rows=(args[1], args[1]))
        found = self._reported(found, texts)
        self._coming = _Dispatch(texts, found, 1, began, guesses, _compiled() > compiled)

    @isolated()
    def receive(self) -> None:
        """Waits for the steps that have begun, if there are any."""
        if self._coming is not None:
            self._receive()

    def _receive(self) -> list[RunningText]:
        """Waits for the steps that have begun, and gives the texts their tokens; returns the texts."""
        assert self._coming is not None
        (texts, written, steps, began, guesses, is_new), self._coming = self._coming, None
        waits = not any(text.is_lazy for text in texts) or not written.tokens.is_ready()
        found = self.together.fetch(written)
        done = 1
        if guesses is None:
            done = int(found.counts.max())
        else:
            found = accepted(texts, guesses, found)
        for row, text in enumerate(texts):
            text.stored += int(found.counts[row])
            text.recorded = max(text.recorded, text.stored)
            text.receive(found, row)
        self.steps += done
        self.busy_rows += int(np.minimum(found.counts, done).sum())
        self.written += int(found.counts.sum())
        seconds = time.perf_counter() - began
        if self.speculation is not None:
            self.speculation.learn(texts, guesses, found.counts)
            if waits and not is_new:  # otherwise the time is not that of the devices
                self.speculation.took(texts, guesses, seconds / done)
        if guesses is not None:
            return texts
        if seconds < self._dispatch_s / 2 and steps == self._most_steps:
            self._most_steps = min(2 * steps, MAX_STEPS)
        elif seconds > 2 * self._dispatch_s:
            self._most_steps = max(self._most_steps // 2, 1)
        return texts

    def _steps_now(self) -> int:
        """The number of tokens that each text may write before the next look at the queue."""
        if any(text.matcher is not None for text in self.running if text.stage is Stage.WRITING):
            return 1  # which tokens may come next is known after each token
        most = self._most_steps
        if self.speculation is not None:
            most = self.speculation.steps(most)
        reading = sum(text.stage is Stage.READING for text in self.running)
        if not reading:
            return most
        # A step costs about the same for a few texts as for all: it waits for them if they are many.
        return 1 if 2 * reading > len(self.running) else min(most, _STEPS_BETWEEN)

    def _decode(self, texts: Sequence[RunningText], steps: int) -> DispatchTokens:
        """Begins so many decode steps; fewer if texts end for which others wait."""
        # A step with a few idle rows is cheaper than a call for each prompt.
        least = len(texts) - max(1, self.slots // 32) if self.waiting else 0
        rows = next(n for n in self._row_counts() if n >= len(texts))
        last = row_of(texts, rows, lambda text: text.tokens[-1], np.int32(0))
        active = row_of(texts, rows, lambda text: True, np.bool_(False))
        args = (last, active, np.int32(steps), np.int32(max(least, 0)))
        written = self._run(
            decode,
            texts,
            self.text_rows(texts, rows),
            *args,
            width=None,
            counts=lambda one: one.counts,
        )
        return written._replace(sampled=self._reported(written.sampled, texts))

    def _reported(self, sampled: Sampled, texts: Sequence[RunningText]) -> Sampled:
        """The samples without log-probabilities, which are many numbers, if no text reports them."""
        if any(text.settings.has_logprobs for text in texts):
            return sampled
        return Sampled(sampled.tokens, sampled.valid)

    def _wanted(self, text: RunningText, steps: int) -> int:
        """The number of pages of a text after so many steps."""
        return self.pages.needed(min(text.stored + steps, text.limit - 1))

    def _with_room(self, steps: int) -> list[RunningText]:
        """The texts that write, with pages for so many more tokens; others may have lost theirs."""
        for text in self._writing():
            if self._ropes and text.stored >= text.text_length[1]:
                self._preempt(text)  # it has outgrown its RoPE, and is read again with another one
        for text in self._writing():
            while text.stage is Stage.WRITING:
                if self._add_pages(text, min(text.stored + steps, text.limit - 1)):
                    break
                # The least urgent, and of those the one that started last.
                self._preempt(max(reversed(self.running), key=lambda one: one.priority))
        return self._writing()

    # --- programs

    def text_rows(
        self, texts: Sequence[RunningText], rows: int, finishes: Sequence[bool] = ()
    ) -> TextRows:
        """The arrays of these texts, with padding up to ``rows``."""
        longest = max((len(text.pages) for text in texts), default=1)
        width = next(n for n in self._widths() if n >= longest)
        return TextRows.of(
            texts, rows, width, self.slots, vocab_size=self._vocab_size, finishes=finishes,
            has_lengths=bool(self._ropes),
        )  # fmt: skip

    def _widths(self, longest: int | None = None) -> Iterator[int]:
        """The sizes of tables of pages: few, so that few programs are compiled; up to that of ``longest`` tokens."""
        width = _LEAST_PAGES
        yield width
        while longest is None or width < self.pages.needed(longest):
            width *= 4
            yield width

    def _row_counts(self) -> list[int]:
        """The numbers of texts that a decode step may be for."""
        fewer = () if self._is_exact else (1, 8)
        return [n for n in fewer if n < self.slots] + [self.slots]

    @isolated()
    def compile(self, longest: int) -> int:
        """Compiles the programs for texts of at most ``longest`` tokens; returns their number."""
        count, had_words = 0, self.memory.words is not None
        every = np.full(mask_words(self._vocab_size), 2**32 - 1, np.uint32)
        for has_words in (True,) if had_words else (False, True):
            if has_words and not had_words:
                self._set_words(self.slots, [], [])
            each = itertools.product(self._widths(longest), (None, every), self._adapter_programs())
            for width, allowed, has_adapters in each:
                count += self._compile(width, allowed, has_adapters)
        if isinstance(self.speculation, Drafts):
            for width in self._widths(longest):
                count += self.speculation.compile(width)
        if not had_words:
            self.memory = self.memory._replace(words=None)
        return count

    def _adapter_programs(self) -> tuple[bool, ...]:
        """Whether programs are those of the model with adapters: the kinds that there are."""
        if not self.adapters.has_model:
            return (False,)
        return (True,) if self._is_exact else (False, True)

    def _compile(self, width: int, allowed: np.ndarray | None, has_adapters: bool) -> int:
        """Compiles the programs for tables of this width; returns their number."""
        count = 0

        def run(program: Any, batch: int, *args: Any, **options: Any) -> None:
            nonlocal count
            count += 1
            options = {"width": None, "has_adapters": has_adapters, **options}
            self._run(program, [], blank(batch), *args, **options)

        def blank(rows: int) -> TextRows:
            bits = None if allowed is None else np.broadcast_to(allowed, (rows, len(allowed)))
            table = np.full((rows, width), -1, np.int32)
            return self.text_rows([], rows)._replace(table=table, allowed=bits)

        for size in [PAGE_SIZE] if self._is_exact else token_counts(self.chunk):
            none = np.zeros(size, np.int32)
            if self._is_ragged:
                ends = np.zeros(self.slots, np.int32)
                run(read_tokens, self.slots, none, none, none - 1, ends, rows=(none, None))
            if not self._is_ragged or width * PAGE_SIZE > _RAGGED:
                run(read, 1, none[None], np.zeros(1, np.int32), width=size)
        shapes = [] if self.speculation is None else self.speculation.shapes
        for rows, tokens in shapes:
            none = np.zeros(rows, np.int32)
            texts = self.slots if tokens == 1 else rows
            ids = np.zeros((rows, tokens), np.int32)
            run(verify, texts, ids, none, none, none, rows=(none, none))
        for rows in self._row_counts() if not (shapes and self._is_exact) else ():
            none = np.zeros(rows, np.int32)
            run(decode, rows, none, none > 0, np.int32(1), np.int32(0))
        return count

    def _run(
        self, program: Any, texts: Sequence[RunningText], arrays: TextRows, *args: Any, width: int | None,
        counts: Callable[[Any], Any] = lambda _: None, keeps: bool = True,
        rows: tuple[np.ndarray | None, np.ndarray | None] = (None, None), has_adapters: bool = False,
    ) -> Any:  # fmt: skip
        """Dispatches a program, and keeps the memory that it returns.

        Args:
            rows: the text of each row of tokens that the model gets, and of each row of its logits; None: the texts.
            has_adapters: whether it is the model with adapters, if no text has one.
        """
        observer = self._observer
        has_adapters |= self._is_exact and self.adapters.has_model
        if has_adapters or any(text.loaded is not None for text in texts):
            no = np.int32(-1)
            place = lambda text: no if text.loaded is None else text.loaded.place
            places = row_of(texts, len(arrays.slots), place, no)
            observer = self.adapters.observer(*(places if n is None else places[n] for n in rows))
        numbers = [text.number for text in texts]
        numbers += [0] * (len(arrays.slots) - len(numbers))
        with compiling(program.__name__, self.shows):
            self.memory, result = observer.run(
                self.together, program, self.memory, arrays, *args, rows=numbers,
                counts=lambda found: counts(found[1]), width=width, keeps=keeps, how=self._how,
                shardings=self._shardings,
            )  # fmt: skip
        return result


def _compiled() -> int:
    """The number of programs of writing that have been compiled."""
    programs: list[Any] = [decode, verify]
    return sum(program._cache_size() for program in programs)
