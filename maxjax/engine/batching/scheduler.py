"""Scheduler: which texts run, and what the devices do next.

:meth:`Scheduler.read` gives free slots and pages to texts of the queue and reads a part of their prompts;
:meth:`Scheduler.write` lets the texts that have been read write some tokens. They run in one thread; ``Engine`` has one
of its own for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ...errors import UserInputError
from ...lockstep import Lockstep
from ...lora.side_by_side import Updates
from ...models.parts.rotary import reading_length, same_until
from ..isolation import isolated
from ..pictures import Pictures
from ..sampling.draw import Sampled
from ..sampling.rows import MOST_LOGPROBS
from .adapters import Adapters, updates_digest
from .calls import Calls, compiled_count
from .dispatch import MAX_STEPS, DispatchTokens
from .draft import Drafts, Predictions
from .lookup import Lookups
from .memory import TextMemory, in_groups, window_page_count
from .messages import tell
from .programs import (
    Choosing,
    LogitsProcessor,
    decode,
    row_of,
)
from .reading import read_prompts
from .running import RunningText, Stage
from .speculation import GuessCounts, Guesses, accepted, rows_of, verify

# While prompts wait to be read, so many tokens are written between two pieces of them.
_STEPS_BETWEEN = 4


class EndedByOthers(Exception):
    """The first of several processes has ended the answer that it streams; the argument is where."""


class _Dispatch(NamedTuple):
    """Steps that the devices are making: the text of each row, what they write, how many, and when they have begun.

    ``guesses`` are what one step with guesses checks; ``written`` is then all that it has chosen. ``is_new`` says
    whether it was compiled.
    """

    rows: list[RunningText | None]
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
        pages: number of pages of the cache; of each part of it, on a mesh whose devices divide texts among them.
        most_pages: number to which they may grow; None: they do not.
        window_pages: number of pages of layers with a window, of each part; 0: these keep all tokens, in the pages of
            the others. None: as many as ``window_page_count`` says.
        longest: largest number of tokens of a text; None: the model's context, or as many as all pages have room for.
        chunk: largest number of prompt tokens that are read between two steps; a power of two.
        cache_dtype: dtype of keys and values; None for the model's.
        tops: number of most probable tokens that are reported where a text wants log-probabilities; None: none does.
        draws: False if all texts are greedy.
        delays_ends: False if no text has ``min_new_tokens``.
        exact: whether a text gets the same bits whatever else runs. Each page of a prompt is then read by itself, each
            step is for all slots, and a text gets all its pages at once, so that it is never put back.
        logits_processor: what logits go through before a token is chosen.
        has_grammars: whether texts may have grammars.
        has_order: whether texts may have settings about the order of tokens, or rare filters; if so, the programs of
            texts with penalties or biases take longer to compile.
        together: the call that the scheduler belongs to, if several processes make it together.
        dispatch_s: the duration of a dispatch that is aimed at, in seconds: new prompts wait for it, and a stop string
            is noticed only after it.
        speculation: "lookup" guesses tokens from the texts themselves (``speculation.py``), "mtp" by the model's layer
            of multi-token prediction.
        draft: a smaller model that guesses tokens.
        adapters: the adapters that texts may use.

    Raises:
        UserInputError: tokens are to be guessed on a mesh whose devices divide texts among them.
    """

    @isolated()
    def __init__(
        self, model: Any, slots: int, pages: int, *, most_pages: int | None = None,
        window_pages: int | None = None, longest: int | None = None, chunk: int = 512,
        cache_dtype: Any = None, tops: int | None = MOST_LOGPROBS, draws: bool = True, exact: bool = False,
        delays_ends: bool = True, logits_processor: LogitsProcessor | None = None,
        has_grammars: bool = False, has_order: bool = True,
        together: Lockstep | None = None, dispatch_s: float = 0.1, speculation: str | None = None,
        draft: Any = None, adapters: Adapters | None = None,
    ):  # fmt: skip
        guesses = speculation is not None or draft is not None
        if guesses and in_groups(model, slots)[1] > 1:
            raise UserInputError(
                "speculation and draft are not supported on a mesh whose devices divide texts among them: "
                "split the model over its axis 'model' alone"
            )
        self.adapters = Adapters(model) if adapters is None else adapters
        most = pages if most_pages is None else most_pages
        has_mtp = speculation == "mtp"
        if window_pages is None:
            window_pages = window_page_count(model, slots, most, chunk, draft)
        self.memory = TextMemory(
            model,
            slots,
            pages,
            most,
            cache_dtype,
            exact,
            has_order,
            has_mtp,
            window_pages,
            chunk,
            together,
        )
        self.longest = longest or model.max_length
        if self.memory.longest is not None:
            self.longest = min(self.longest, self.memory.longest)
        step = float(jnp.finfo(model.dtype.np).eps)
        how = Choosing(tops, draws, logits_processor, step, delays_ends)
        self.calls = Calls(
            model,
            self.memory,
            self.adapters,
            how,
            exact,
            has_grammars,
            self.longest,
            chunk,
            together,
        )
        self.slots, self.chunk, self._dispatch_s = self.memory.slots, chunk, dispatch_s
        self._ropes = model.config.ropes_by_length
        self.speculation: Lookups | Drafts | Predictions | None = None
        if guesses:
            options = self.slots, self.calls.row_counts(), self.calls.is_ragged, exact
            if draft is not None:
                self.speculation = Drafts(draft, self.calls, chunk, *options)
            elif has_mtp:
                self.speculation = Predictions(self.calls, *options)
            else:
                self.speculation = Lookups(*options)
        self.waiting: list[RunningText] = []
        self.has_cancelled = False  # whether a text has been cancelled since the last step
        self.running: list[RunningText] = []  # in the order in which they got a slot
        self._most_steps = 1  # in a dispatch
        self._in_flight: _Dispatch | None = None
        # Numbers of decode steps, of tokens written in them, of all tokens written and of prompt tokens read.
        self.steps = self.busy_rows = self.written = self.read_count = 0
        self.near_ties = 0  # number of tokens written that rounding may have decided

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
        if text.pictures is not None and (problem := self._why_no_pictures(text.pictures)):
            return text.end(UserInputError(f"prompt {text.number} has pictures: {problem}"))
        least = text.priority - again
        place = len(self.waiting)
        while place and self.waiting[place - 1].priority > least:
            place -= 1
        self.waiting.insert(place, text)
        if text.is_cancelled:  # before it was in the queue
            self.has_cancelled = True

    def _why_no_pictures(self, pictures: Pictures) -> str | None:
        """Why texts with these pictures are not supported; None: they are."""
        if self.speculation is not None and not isinstance(self.speculation, Lookups):
            return "draft= and speculation='mtp' are not supported with them"
        if self.calls.is_exact and pictures.are_whole:
            return "exact=True is not supported for this model with them, as it must read a picture as a whole"
        if self.calls.together.is_shared:
            return "they are not supported where several processes share the model"
        return None

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
        read = read_prompts(self.calls, self.running, self.chunk)
        self.read_count, self.written = self.read_count + read.tokens, self.written + read.began
        self.near_ties += read.near_ties
        self._release_ended()

    @isolated()
    def write(self) -> None:
        """Lets the texts that have been read write some tokens."""
        if self._in_flight is None:
            self._dispatch()
        if self._in_flight is None:
            return
        texts = self._receive()
        if self._may_go_ahead():
            self._dispatch()  # the devices write while the host makes text of these tokens
        for text in texts:
            if not text.is_lazy:
                text.take(self.calls.together.is_symmetric)
        self._release_ended()

    def close(self) -> None:
        """Frees the memory on the devices, and forgets all texts."""
        for text in self.running:
            self._end_recording(text)
        self.waiting, self.running, self._in_flight = [], [], None
        self.memory.close()
        if isinstance(self.speculation, Drafts):
            self.speculation.close()

    @isolated()
    def add_adapter(self, name: str, updates: Updates, path: str = "") -> None:
        """Adds an adapter, or a new version of one: later texts use it, and those in the queue the one that they have.

        Args:
            path: where other processes read the same updates, if there are any.

        Raises:
            UserInputError: as for ``Adapters.add``; or another process has other updates there, or cannot read them.
        """
        together = self.calls.together
        if together.is_shared:
            tell(together, "read adapter", path)
            found = together.gather(updates_digest(updates))
            if len(set(found.values())) > 1:
                each = "; ".join(f"process {process}: {one}" for process, one in found.items())
                raise UserInputError(f"adapter {name!r} is not the same for all processes: {each}")
        in_use = sorted(self._adapters_in_use())
        self.adapters.add(name, updates, in_use)
        tell(together, "add adapter", name, in_use)

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter; texts that have it go on.

        Raises:
            UserInputError: there is no such adapter.
        """
        in_use = sorted(self._adapters_in_use())
        self.adapters.remove(name, in_use)
        tell(self.calls.together, "remove adapter", name, in_use)

    def _adapters_in_use(self) -> set[int]:
        """The versions of the adapters of texts that have not ended."""
        texts = [*self.waiting, *self.running]
        return {text.loaded.version for text in texts if text.loaded is not None}

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
                self.receive()
                before, text.after = text.after, None
                pages = before.pages
                self.memory.take_over(text, before)
                if self.speculation is not None:
                    self.speculation.take_over(text, before, pages)
            has_slot = text.slot is not None or self.memory.has_free_slot
            if has_slot and self._is_prefix_coming(text):
                later.append(text)  # it is cheaper to wait for these pages than to read them twice
            elif not has_slot or not self.memory.start(text):
                later += self.waiting[place:]  # those behind it must not overtake it
                break
            else:
                text.stage = Stage.READING
                self.running.append(text)
                if text.settings.has_words:
                    self.memory.start_words(text)
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
        return [] if self.calls.observer.is_observed else self.memory.keys(text, count)

    def _publish(self, text: RunningText) -> None:
        """Lets other texts share the pages that a text has filled."""
        # What steps have stored has not the same bits as what is read.
        count = min(text.stored, text.prompt_length) if self.calls.is_exact else text.stored
        if count // self.memory.page_size > len(text.keys or ()):
            text.keys = self._keys(text, count)
        self.memory.publish(text, (text.keys or ())[: count // self.memory.page_size])

    def _is_prefix_coming(self, text: RunningText) -> bool:
        """Whether a text is being read whose pages this one will share."""
        assert text.keys is not None
        if text.scores_prompt:
            return False
        others = [one for one in self.running if one.stage is Stage.READING]
        if self.memory.is_recurrent:
            return self.memory.is_state_coming(text, others)
        known, size = self.memory.known(text.keys), self.memory.page_size
        if known == len(text.keys):
            return False
        return any(text.keys[known] in (one.keys or ())[one.stored // size :] for one in others)

    def _release(self, text: RunningText) -> None:
        """Takes slot and pages from a text."""
        is_valid = not isinstance(text.error, FloatingPointError)
        if is_valid:
            self._publish(text)
        self.memory.release(text, is_valid=is_valid)
        self.running.remove(text)

    def _release_ended(self) -> None:
        for text in [one for one in self.running if one.stage is Stage.ENDED]:
            if text.is_lazy and text.error is None:
                self.running.remove(text)
            else:
                self._release(text)
                self._end_recording(text)

    def _end_recording(self, text: RunningText) -> None:
        self.calls.observer.end(text.number, text.prompt_length + len(text.partial.tokens) - 1)

    def _preempt(self, text: RunningText) -> None:
        """Puts a running text back into the queue."""
        self._release(text)
        text.wait_again()
        self.add(text, again=True)

    # --- writing

    def _writing(self) -> list[RunningText]:
        return [
            text for text in self.running if text.stage is Stage.WRITING and not text.has_last_token
        ]

    def _may_go_ahead(self) -> bool:
        """Whether the next steps do not depend on the text of the last tokens, nor on what waits."""
        if self.waiting or any(text.stage is Stage.READING for text in self.running):
            return False
        texts = self._writing()
        if any(text.matcher is not None for text in texts):
            return False
        if self._ropes and any(text.stored >= text.text_length[1] for text in texts):
            return False
        return self.memory.can_add(texts, [self._stored_after(one, MAX_STEPS) for one in texts])

    def _dispatch(self) -> None:
        """Begins the next steps of the texts that write, as many as the first process decides."""
        if not self._writing():
            return
        if (plan := self._plan()) is not None:
            return self._dispatch_guesses(plan)
        decided = self.calls.together.decide({"steps": self._steps_now()})
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
        rows, began, compiled = (
            self.calls.placed(texts),
            time.perf_counter(),
            compiled_count(decode, verify),
        )
        written = self._decode(rows, steps)
        self._in_flight = _Dispatch(
            rows, written, steps, began, None, compiled_count(decode, verify) > compiled
        )

    def _plan(self) -> GuessCounts | None:
        """The guesses that the next step has room for; None if none are made."""
        if self.speculation is None or self.calls.observer.is_observed:
            return None
        return self.speculation.plan(self._writing())

    def _dispatch_guesses(self, plan: GuessCounts) -> None:
        """Begins a step that reads the last token of each text and the guesses for those after it."""
        assert self.speculation is not None
        texts = self._with_room(1 + plan.most)
        if not texts:
            return
        guesses = self.speculation.guesses(plan, texts)
        began, compiled = time.perf_counter(), compiled_count(decode, verify)
        rows = self.calls.placed(texts, self.slots if guesses.shape[1] == 1 else guesses.shape[0])
        args, arrays = rows_of(texts, guesses), self.calls.text_rows(rows)
        found = self.calls.run(verify, rows, arrays, *args, width=None, rows=(args[1], args[1]))
        found = self._reported(found, texts)
        self._in_flight = _Dispatch(
            rows, found, 1, began, guesses, compiled_count(decode, verify) > compiled
        )

    @isolated()
    def receive(self) -> None:
        """Waits for the steps that have begun, if there are any."""
        if self._in_flight is not None:
            self._receive()

    def _receive(self) -> list[RunningText]:
        """Waits for the steps that have begun, and gives the texts their tokens; returns the texts."""
        assert self._in_flight is not None
        (rows, written, steps, began, guesses, is_new), self._in_flight = self._in_flight, None
        texts = [text for text in rows if text is not None]
        waits = not any(text.is_lazy for text in texts) or not written.tokens.is_ready()
        found = self.calls.together.fetch(written)
        done = 1
        if guesses is None:
            done = int(found.counts.max())
        else:
            found = accepted(texts, guesses, found)
        for row, text in enumerate(rows):
            if text is not None:
                text.stored += int(found.counts[row])
                text.recorded = max(text.recorded, text.stored)
                text.receive(found, row)
                if text.stored % self.memory.page_size < found.counts[row]:
                    self._publish(text)
        self.steps += done
        self.busy_rows += int(np.minimum(found.counts, done).sum())
        self.written += int(found.counts.sum())
        near = np.asarray(found.sampled.is_near_tie)
        self.near_ties += int(near[np.arange(near.shape[1]) < found.counts[:, None]].sum())
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

    def _decode(self, texts: Sequence[RunningText | None], steps: int) -> DispatchTokens:
        """Begins so many decode steps; fewer if texts end for which others wait."""
        active = row_of(texts, lambda text: True, np.bool_(False))
        # A step with a few idle rows is cheaper than a call for each prompt.
        min_active = int(active.sum()) - max(1, self.slots // 32) if self.waiting else 0
        last = row_of(texts, lambda text: text.tokens[-1], np.int32(0))
        args = (last, active, np.int32(steps), np.int32(max(min_active, 0)))
        written = self.calls.run(
            decode,
            texts,
            self.calls.text_rows(texts),
            *args,
            width=None,
            counts=lambda one: one.counts,
        )
        return written._replace(sampled=self._reported(written.sampled, texts))

    def _reported(self, sampled: Sampled, texts: Sequence[RunningText | None]) -> Sampled:
        """The samples without log-probabilities, which are many numbers, if no text reports them."""
        if any(text is not None and text.settings.has_logprobs for text in texts):
            return sampled
        return sampled._replace(logprobs=None, top_tokens=None, top_logprobs=None)

    @staticmethod
    def _stored_after(text: RunningText, steps: int) -> int:
        """The largest number of tokens of a text that are stored after so many steps."""
        return min(text.stored + steps, text.limit - 1)

    def _with_room(self, steps: int) -> list[RunningText]:
        """The texts that write, with pages for so many more tokens; others may have lost theirs."""
        for text in self._writing():
            if self._ropes and text.stored >= text.text_length[1]:
                self._preempt(text)  # it has outgrown its RoPE, and is read again with another one
        for text in self._writing():
            while text.stage is Stage.WRITING:
                if self.memory.add_pages(text, self._stored_after(text, steps)):
                    break
                # The least urgent of its group, and of those the one that started last.
                group = self.memory.group_of(text)
                others = [
                    one for one in reversed(self.running) if self.memory.group_of(one) == group
                ]
                self._preempt(max(others, key=lambda one: one.priority))
        return self._writing()
