"""Engine: answers many prompts with one model, from any thread, and keeps the devices busy."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...errors import (
    PeerFailedError,
    PeerLostError,
    UserInputError,
    checked_integer,
    first_line,
)
from ...graph.placement.specs import held_bytes
from ...heartbeat import CHECK_SECONDS
from ...lockstep import Broadcast
from ...lora.side_by_side import updates_of
from ...models.weights import model_facts, named_dtype, shardings_of
from ...rendering.row import bytes_text
from ...storage.safetensors.writer import size_in_bytes
from ...text.chat import is_message
from ..generate.checks import check_chunk, check_model
from ..generate.request import Prompt, Request
from ..pictures import SeenPictures, pictures_in
from ..sampling.rows import MOST_LOGPROBS
from ..sampling.settings import Sampling
from .adapters import Adapters, updates_digest
from .answer import Branch, PendingAnswer
from .compile import compile_programs
from .draft import check_speculation
from .follower import Follower
from .grammar import matcher_of
from .memory import in_groups, page_size_of, rows_of_states, window_page_count
from .messages import tell
from .programs import LogitsProcessor
from .running import RunningText, running_text
from .scheduler import Scheduler

# Tokens of each slot for which a cache without a given size has room.
_TOKENS = 2048


class EngineStats(NamedTuple):
    """What an engine has done and is doing.

    Attributes:
        waiting, running: number of texts in the queue, and of texts that have a slot.
        pages, free_pages: number of pages of the cache, and of those that no text uses; of layers that keep all tokens.
        read_tokens, found_tokens: number of prompt tokens that were read, and that were found in the cache instead.
        written_tokens, steps: number of tokens of answers, and of decode steps.
        busy: mean share of the slots that wrote a token in a step.
        guessed_tokens, right_tokens: number of tokens that were guessed, and of those that the model agreed with.
        near_ties: number of tokens of answers that rounding may have decided (``Completion.near_ties``).
        window_pages, free_window_pages: as ``pages``, of layers with a sliding window; 0 if they keep all tokens too.
    """

    waiting: int
    running: int
    pages: int
    free_pages: int
    read_tokens: int
    found_tokens: int
    written_tokens: int
    steps: int
    busy: float
    guessed_tokens: int = 0
    right_tokens: int = 0
    near_ties: int = 0
    window_pages: int = 0
    free_window_pages: int = 0


class Engine:
    """Answers many prompts with one model, each as soon as a slot is free (continuous batching).

    The cache is a pool of pages, which texts take as they grow; texts that begin with the same tokens share pages, and
    read them once. One thread of the engine runs the model. All methods may be called from any thread.

    Several processes that share the model's mesh make the engine together, with the same arguments. The first of them
    has the queue: prompts are submitted there, and it alone gets the answers. In the others, leaving the block, or
    :meth:`close`, waits until it closes its engine. Meanwhile no other calls of maxjax may use their devices together.

    Args:
        model: a decoder, as returned by ``maxjax.load``.
        tokenizer: the model's tokenizer; with None, prompts are token ids and answers have no text.
        slots: largest number of texts that are written at once; on a mesh whose devices divide texts among them it is
            rounded up to a multiple of their number.
        cache_bytes: size of the cache on each device, in bytes or as ``"40GiB"``; by default there is room for 2,048
            tokens of each slot. A prompt that can never fit is refused.
        chunk: largest number of prompt tokens that are read between two steps of the texts that are written; a power
            of two.
        cache_dtype: dtype of keys and values, by default the model's; ``"int8"`` halves the size of a bfloat16 cache,
            and changes results slightly.
        exact: whether an answer has the same bits whatever else runs. It costs time: prompts are read page by page,
            each step is for all slots, and a prompt waits until there are pages for its longest answer.
        logits_processor: a pure function in ``jnp``, which each program calls before a token is chosen. It takes logits
            ``[B, V]`` in float32, the last token of each text and the position of the next one, int32 ``[B]`` each,
            and returns other logits.
        speculation: ``"lookup"`` guesses tokens from the text itself, and the model checks several of them in one step
            (prompt lookup, "ngram"): answers that repeat what they are about, as summaries do, come faster. ``"mtp"``
            guesses by the model's own layer of multi-token prediction (DeepSeek V3, GLM-4.5), which
            ``maxjax.load(path, mtp=True)`` loads; its keys and values are a part of ``cache_bytes``. Answers stay the
            same, also where tokens are drawn. Guesses are made only while they pay: times and rates are measured
            (``stats()``). Prompts with penalties, ``banned``, ``logit_bias`` or a grammar are written without guesses.
            With ``exact`` it is always used, so that bits do not depend on times. None: no guesses.
        draft: a smaller model of the same vocabulary that guesses tokens instead, as returned by ``maxjax.load``; an
            ``assistant_model``. It draws with the numbers that the model draws with, so that answers stay the same. It
            has a cache of its own, a part of ``cache_bytes``.
        adapters: LoRA adapters by name, as for :meth:`add_adapter`. With ``exact``, give some here: the first changes
            the programs of all answers.
        max_adapters: largest number of adapters at once; those of answers that have not ended count, also if they were
            replaced or removed.
        max_adapter_rank: largest rank of an adapter's updates.

    Raises:
        UserInputError: the model is not a language model, or an argument is invalid; another engine of several
            processes is open, or ``draft`` is not of the same processes as the model; ``speculation``
            or ``draft`` is given for a model with recurrent layers, whose state cannot go back, or on
            a mesh whose devices divide texts among them, or both are; the model has no layer of multi-token prediction;
            or the vocabulary of ``draft`` is another one.
        OutOfMemoryError: a device has no room for the cache.
        ProgramMismatchError: the model or an argument is not the same in all processes.
        PeerFailedError, PeerLostError: another process raised an error, or has ended.

    Example:
        >>> import maxjax
        >>> with maxjax.Engine(*maxjax.load("tiny"), slots=2) as engine:
        ...     answers = [engine.submit(f"What is {n} + 1?") for n in (1, 2, 3)]
        ...     [answer.result() for answer in answers]
        ['1 + 1 = 2', '2 + 1 = 3', '3 + 1 = 4']
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, slots: int = 32, cache_bytes: int | str | None = None,
        chunk: int = 512, cache_dtype: Any = None, exact: bool = False,
        logits_processor: LogitsProcessor | None = None, speculation: str | None = None,
        draft: Any = None,
        adapters: Mapping[str, Any] | None = None, max_adapters: int = 8, max_adapter_rank: int = 64,
    ):  # fmt: skip
        check_model(model)
        self.model, self.tokenizer = model, tokenizer
        self._together = Broadcast("Engine", shardings_of(model))
        try:
            with self._together:
                scheduler = self._scheduler(
                    slots, cache_bytes, chunk, cache_dtype, exact, logits_processor, speculation, draft, adapters or {},
                    max_adapters, max_adapter_rank,
                )  # fmt: skip
        except BaseException:
            self._together.close()
            raise
        self.slots, self._longest = scheduler.slots, scheduler.longest
        self._seen = SeenPictures()
        self._numbers = itertools.count()  # threads share it: each number is given once
        self._worker: Any
        if self._together.is_leader:
            self._worker = _Worker(scheduler, self._together)
        else:
            self._worker = Follower(scheduler, self._together)
        _running.add(self._worker)
        self._worker.thread.start()
        self._finalizer = weakref.finalize(self, self._worker.stop)

    def _scheduler(
        self, slots: int, cache_bytes: int | str | None, chunk: int, cache_dtype: Any, exact: bool,
        logits_processor: LogitsProcessor | None, speculation: str | None, draft: Any, adapters: Mapping[str, Any],
        max_adapters: int, max_adapter_rank: int,
    ) -> Scheduler:  # fmt: skip
        model, tokenizer, together = self.model, self.tokenizer, self._together
        slots = checked_integer("slots", slots)
        least = page_size_of(model) if exact else 16
        if (chunk := check_chunk(chunk)) < least:
            raise UserInputError(
                f"chunk is {chunk}: with exact={exact} it must be at least {least}"
            )
        _check_processor(logits_processor, model.config.vocab_size)
        check_speculation(model, speculation, draft)
        dtype = None if cache_dtype is None else named_dtype("cache_dtype", cache_dtype)
        pages = page_counts(model, slots, cache_bytes, dtype, chunk, draft, speculation == "mtp")
        read = {_adapter_name(name): updates_of(model, one) for name, one in adapters.items()}
        if together.is_shared:
            _check_processes(model, draft)
            together.agree(
                slots=slots, chunk=chunk, cache_dtype=str(cache_dtype), exact=exact, **pages._asdict(),
                logits_processor=logits_processor is not None, speculation=speculation, max_adapters=max_adapters,
                max_adapter_rank=max_adapter_rank, adapters={name: updates_digest(one) for name, one in read.items()},
                tokenizer=None if tokenizer is None else tokenizer.digest, **model_facts(model),
                draft=None if draft is None else model_facts(draft),
            )  # fmt: skip
        scheduler = Scheduler(
            model,
            slots,
            pages.pages,
            window_pages=pages.window_pages,
            chunk=chunk,
            cache_dtype=dtype,
            exact=exact,
            logits_processor=logits_processor,
            has_grammars=tokenizer is not None,
            speculation=speculation,
            draft=draft,
            together=together,
            adapters=Adapters(
                model,
                checked_integer("max_adapters", max_adapters),
                checked_integer("max_adapter_rank", max_adapter_rank),
            ),
        )
        for name, updates in read.items():
            scheduler.adapters.add(name, updates, ())
        scheduler.calls.shows = False
        return scheduler

    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: float | None = None,
        stop: str | Sequence[str] | None = None,
        eos_ids: Sequence[int] | None = None,
        key: jax.Array | None = None,
        sampling: Sampling | None = None,
        chat: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        skip_special_tokens: bool = True,
        shows_marks: bool = False,
        priority: int = 0,
        salt: str | None = None,
        adapter: str | None = None,
        prompt_logprobs: bool | int | None = None,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        **values: Any,
    ) -> PendingAnswer:
        """Puts a prompt into the queue.

        Args:
            prompt: text, the messages of a chat, token ids, or the ``prompt`` of another answer.
            max_new_tokens, stop, eos_ids, sampling, chat, template_kwargs, skip_special_tokens, values: as for
                :func:`maxjax.generate`. ``logprobs`` is at most 20. With ``max_new_tokens=math.inf`` an answer may be
                as long as the context and the cache have room.
            shows_marks: whether the pieces and the text have the tokens that mark the parts of an answer, such as
                ``[THINK]``, where these are special tokens.
            key: random key. Without it, each prompt of the engine draws with another one.
            priority: prompts with a smaller number are started first, and keep their pages when there are too few.
            salt: only prompts with an equal one share pages, so that the time of an answer tells nobody whether others
                have asked with the same beginning.
            adapter: the name of the LoRA adapter that the model has for this answer; None for the model alone.
            prompt_logprobs: True for the log-probability of each token of the prompt, in ``prompt_logprobs`` of the
                Completion; a number for so many most probable tokens beside it, at most 20. The prompt is then read by
                itself and as a whole, also where it begins as an earlier one.
            schema: a JSON schema that the answer matches, as a dict or text, a class of pydantic, or a dataclass.
            regex: a regular expression that the whole answer matches.
            grammar: a grammar that the answer follows, in the syntax of Lark or of llama.cpp (GBNF).

        Returns:
            The answer, whose pieces can be read while it is written.

        Raises:
            UserInputError, TypeError: as for :func:`maxjax.generate`; or the prompt and its answer can never fit into
                the cache, there is no such adapter, or the schema, expression or grammar is invalid.
            ImportError: llguidance, which these three need, is not installed.
            RuntimeError: the engine is closed.
            PeerLostError: the engine has failed, because another process is lost.
        """
        self._check_leads("submit")
        if adapter is not None:
            if not isinstance(adapter, str):
                raise TypeError(f"adapter must be a str, not {type(adapter).__name__}")
            self._worker.scheduler.adapters.find(adapter)
        request = Request(
            self.model, self.tokenizer, max_new_tokens, stop, eos_ids, sampling, values, chat, template_kwargs,
            skip_special_tokens, shows_marks, self._seen,
        )  # fmt: skip
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be an integer, not {type(priority).__name__}")
        if salt is not None and not isinstance(salt, str):
            raise TypeError(f"salt must be a str, not {type(salt).__name__}")
        if (request.sampling.logprobs or 0) > MOST_LOGPROBS:
            raise UserInputError(
                f"logprobs is {request.sampling.logprobs}: in an Engine it is at most {MOST_LOGPROBS}"
            )
        tops = _prompt_tops(prompt_logprobs)
        answer = PendingAnswer(self._worker)
        prompt, written = prompt if isinstance(prompt, Branch) else (prompt, ())
        if (
            self._together.is_shared
            and isinstance(prompt, (list, tuple))
            and prompt
            and is_message(prompt[0])
        ):
            if pictures_in(prompt)[1]:
                raise UserInputError("pictures are not supported in an Engine of several processes")
        read = request.prompt([*prompt, *written] if written else prompt)
        self._check_fits(read, request)
        matcher = None
        if any(one is not None for one in (schema, regex, grammar)):
            forms = {"schema": schema, "regex": regex, "grammar": grammar}
            size = self.model.config.vocab_size
            matcher = matcher_of(self.tokenizer, size, request.eos_ids, **forms)
            for token in written:
                matcher.accept(token)
        number = next(self._numbers)
        text = running_text(
            request, read, key, number if key is None else 0, number=number, matcher=matcher, priority=priority,
            salt=(salt or "").encode("utf-8", "surrogatepass"), adapter=adapter, prompt_logprobs=tops,
            on_text=answer.take, on_end=answer.finish,
        )  # fmt: skip
        options = {
            "max_new_tokens": max_new_tokens, "stop": request.stops, "eos_ids": request.eos_ids,
            "sampling": request.sampling, "skip_special_tokens": skip_special_tokens, "shows_marks": shows_marks,
            "priority": priority, "salt": salt, "adapter": adapter, "schema": schema, "regex": regex,
            "grammar": grammar,
        }  # fmt: skip
        answer.begin(text, read, self, options)
        self._worker.add(text)
        return answer

    def _check_leads(self, name: str) -> None:
        """Raises UserInputError if this is not the process that has the queue."""
        if not self._together.is_leader:
            raise UserInputError(
                f"Engine.{name} is for process {self._together.leader}, which has the queue, and this is process "
                f"{self._together.process}: leave the block or call close(), which waits for that process"
            )

    def _check_fits(self, prompt: Prompt, request: Request) -> None:
        if request.fills and len(prompt.ids) < self._longest:
            request.longest = min(request.longest, self._longest)
        if request.limit(prompt.ids) <= self._longest:
            return
        raise UserInputError(
            f"a prompt of {len(prompt.ids)} tokens and {request.max_new_tokens} new ones do not fit the cache of "
            f"{self._longest} tokens: pass a smaller max_new_tokens, or make the Engine with more cache_bytes"
        )

    def add_adapter(self, name: str, adapter: Any) -> None:
        """Adds a LoRA adapter, which prompts can name, while other answers are written.

        An adapter with the same name is replaced: answers that have begun go on with the old one.

        Args:
            name: name of the adapter.
            adapter: path of a directory that PEFT or :func:`maxjax.lora.save` wrote, or its name on the hub; or the
                model with LoRA weights. Its weights get the dtype of the model's activations. If several processes
                share the engine, each reads this directory.

        Raises:
            UserInputError: another process cannot read it, or reads others; its rank is too large or there are too many
                adapters; it has more than LoRA weights (DoRA,
                trained biases or modules) or values that are not finite; or it is of another model's layers.
            CheckpointError, UnsupportedModelError: as for :func:`maxjax.lora.load`.
            RuntimeError: the engine is closed.
        """
        self._check_leads("add_adapter")
        if self._together.is_shared and not isinstance(adapter, (str, os.PathLike)):
            raise UserInputError(
                "an adapter for an Engine of several processes is a directory, which all of them read: "
                "maxjax.lora.save writes one; or pass it as adapters= in all processes"
            )
        name, updates = _adapter_name(name), updates_of(self.model, adapter)
        path = str(adapter) if self._together.is_shared else ""
        self._worker.call(lambda scheduler: scheduler.add_adapter(name, updates, path))

    def remove_adapter(self, name: str) -> None:
        """Removes a LoRA adapter: no later prompt can name it. Answers that have begun go on with it.

        Raises:
            UserInputError: there is no such adapter.
            RuntimeError: the engine is closed.
        """
        self._check_leads("remove_adapter")
        self._worker.call(lambda scheduler: scheduler.remove_adapter(name))

    @property
    def is_closed(self) -> bool:
        """Whether the engine takes no prompts any more: it was closed, or has failed."""
        return self._worker.is_closed

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters."""
        return self._worker.scheduler.adapters.names

    def compile(self) -> int:
        """Compiles all programs that prompts can need, so that none waits for the compiler later.

        If there are LoRA adapters, these are also the programs of others in their places.

        Returns:
            The number of programs.
        """
        self._check_leads("compile")
        return self._worker.call(compile_programs)

    def stats(self) -> EngineStats:
        """What the engine has done and is doing."""
        self._check_leads("stats")
        of = self._worker.scheduler
        rows, guessed = max(of.steps * of.slots, 1), of.speculation
        return EngineStats(
            len(of.waiting) + len(self._worker.coming), len(of.running), of.memory.count, of.memory.free,
            of.read_count, of.memory.hits, of.written, of.steps, of.busy_rows / rows,
            *((guessed.made, guessed.right) if guessed else (0, 0)), of.near_ties,
            of.memory.window_count, of.memory.window_free,
        )  # fmt: skip

    def close(self) -> None:
        """Ends all answers with an error, and frees the cache; or waits until the process that has the queue does.

        Raises:
            PeerFailedError, PeerLostError: this process has waited, and another one has failed or is lost.
        """
        self._worker.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(self._worker, Follower):
            if kind is not None:
                self._worker.stop(error)
                return self._worker.thread.join()
            return self.close()
        try:
            if kind is None:
                self._worker.finish()
        finally:
            self.close()
        if kind is None and isinstance(self._worker.error, (PeerFailedError, PeerLostError)):
            raise self._worker.error

    def __repr__(self) -> str:
        of = self._worker.scheduler
        memory = getattr(of.memory, "arrays", None)  # the engine's thread may free it at any time
        size = (
            "closed"
            if memory is None
            else bytes_text(sum(leaf.nbytes for leaf in jax.tree.leaves(memory)))
        )
        return (
            f"Engine({type(self.model).__name__}, {len(of.running)} of {of.slots} slots, {len(of.waiting)} waiting, "
            f"cache {size})"
        )


# The engines whose threads run.
_running: weakref.WeakSet[_Worker | Follower] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Ends all engines before Python does: their threads could not return from JAX later, and would abort."""
    workers = list(_running)
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.thread.join()


class _Worker:
    """The thread of an engine: it takes texts from others, and runs the scheduler while there are any."""

    def __init__(self, scheduler: Scheduler, together: Broadcast):
        self.scheduler, self._together = scheduler, together
        self.thread = threading.Thread(target=self.run, name="maxjax.Engine", daemon=True)
        self.coming: list[RunningText] = []
        self._calls: list[Any] = []
        self._changed = threading.Condition()
        self.is_closed = False
        self.error: BaseException | None = None
        self._is_idle = True

    def add(self, text: RunningText) -> None:
        with self._changed:
            if self.is_closed:
                raise self._failure("the engine is closed")
            self.coming.append(text)
            self._is_idle = False
            self._changed.notify_all()

    def cancelled(self) -> None:
        """Learns that a text has been cancelled."""
        with self._changed:
            self.scheduler.has_cancelled = True
            self._changed.notify_all()

    def check_can_wait(self) -> None:
        """Raises RuntimeError in the engine's own thread, which would wait for itself."""
        if threading.current_thread() is self.thread:
            raise RuntimeError(
                "a callback cannot wait for the engine: it is called in the engine's thread"
            )

    def call(self, function: Any) -> Any:
        """Calls a function of the scheduler in the engine's thread, between two steps."""
        self.check_can_wait()
        done: list[Any] = []
        with self._changed:
            if self.is_closed:
                raise self._failure("the engine is closed")
            self._calls.append((function, done))
            self._changed.notify_all()
            self._changed.wait_for(lambda: done or self.is_closed)
        if not done:
            raise self._failure("the engine was closed")
        result, error = done
        if error is not None:
            raise error
        return result

    def finish(self) -> None:
        """Waits until all texts have ended."""
        self.check_can_wait()
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle or self.is_closed)

    def stop(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, and waits for that."""
        self.stop()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def run(self) -> None:
        try:
            with self._together:
                while self._wait():
                    self._work()
                tell(self._together, "close")
        except BaseException as error:
            self.error = error
        finally:
            self._together.close()
            self._end()

    def _wait(self) -> bool:
        """Waits until there is something to do; returns False when the engine is closed."""
        has_work = lambda: self.coming or self._calls or self.scheduler.is_busy
        seconds = CHECK_SECONDS if self._together.is_shared else None
        while True:
            with self._changed:
                self._is_idle = not has_work()
                if self._is_idle:
                    self._changed.notify_all()
                if self._changed.wait_for(lambda: self.is_closed or has_work(), seconds):
                    return not self.is_closed
            self._together.check()  # nobody else would notice that another process is lost

    def _work(self) -> None:
        """Takes what has come from other threads, and makes the next step."""
        scheduler = self.scheduler
        with self._changed:
            coming, self.coming = self.coming, []
            calls, self._calls = self._calls, []
        for text in coming:
            scheduler.add(text)
        for function, done in calls:
            self._call(function, done)
        if scheduler.is_busy:
            scheduler.step()

    def _call(self, function: Any, done: list[Any]) -> None:
        failure = None
        try:
            found = [function(self.scheduler), None]
        except Exception as error:
            found = [None, error]
            if self._together.is_shared and not isinstance(error, UserInputError):
                failure = error  # the other processes have not had it
        with self._changed:
            done += found
            self._changed.notify_all()
        if failure is not None:
            raise failure

    def _failure(self, what: str) -> Exception:
        """The error that says why the engine takes or answers nothing any more."""
        if isinstance(self.error, PeerLostError):
            return PeerLostError(str(self.error))
        found = RuntimeError(what)
        found.__cause__ = self.error
        return found

    def _end(self) -> None:
        """Ends what has not ended, and frees the memory."""
        with self._changed:
            self.is_closed = True
            coming, self.coming = self.coming, []
            self._changed.notify_all()
        for text in [*self.scheduler.running, *self.scheduler.waiting, *coming]:
            what = "the engine was closed before the answer had ended"
            if self.error is not None:
                what = f"the engine has failed: {self.error}"
            text.end(self._failure(what))
        self.scheduler.close()


class PageCounts(NamedTuple):
    """The numbers of pages of a cache in each group of devices.

    Attributes:
        pages: number of pages of layers that keep all tokens.
        window_pages: number of pages of layers with a window; 0: they have those of the others.
    """

    pages: int
    window_pages: int


def page_counts(
    model: Any, slots: int, cache_bytes: int | str | None, dtype: DType | None, chunk: int,
    draft: Any = None, mtp: bool = False,
) -> PageCounts:  # fmt: skip
    """The numbers of pages of a cache of so many bytes on each device.

    Args:
        model: a decoder.
        slots: number of slots.
        cache_bytes: size of the cache on each device; None: 2,048 tokens for each slot.
        dtype: dtype of keys and values; None for the model's.
        chunk: largest number of prompt tokens that are read at once.
        draft: a smaller model that guesses tokens, with a cache of its own.
        mtp: whether the model's layer of multi-token prediction follows the texts.

    Raises:
        UserInputError: it has no room for a page, or for what slots need.
    """
    slots, groups = in_groups(model, slots)
    page_size = page_size_of(model)
    windows = lambda pages: window_page_count(model, slots, pages, chunk, draft)
    if cache_bytes is None:
        count = slots // groups * -(-min(model.max_length, _TOKENS) // page_size)
        return PageCounts(count, windows(count))
    size, rows = size_in_bytes(cache_bytes, "cache_bytes"), rows_of_states(model, slots)

    def held(pages: int, window_pages: int) -> int:
        """The bytes of a cache on each device."""
        pools = [model.page_pool(
            pages * groups, page_size, rows, dtype, abstract=True, mtp=mtp, window_pages=window_pages * groups
        )]  # fmt: skip
        if draft is not None:
            pools.append(draft.page_pool(pages * groups, page_size, rows, dtype, abstract=True))
        leaves = jax.tree.leaves(pools)
        return sum(held_bytes(leaf.sharding, leaf.shape, leaf.dtype.itemsize) for leaf in leaves)

    def fitting(window_pages: int) -> int:
        """The number of pages beside those of windows; it is the number of slots if no layer has any."""
        page = held(2, window_pages) - held(1, window_pages)
        rest = size - (held(1, window_pages) - page)
        count = rest // page if page else slots
        if count < 1 or rest < 0:
            raise UserInputError(
                f"cache_bytes is {bytes_text(size)}: a page of {page_size} tokens takes {bytes_text(page)} on a "
                f"device, and what {slots} slots need beside pages {bytes_text(size - rest)}"
            )
        return int(count)

    count = fitting(0)
    window_pages = windows(count)
    if not window_pages:
        return PageCounts(count, 0)
    page = held(2, window_pages) - held(1, window_pages)
    # Where all layers have windows, all that fit are theirs: they keep the beginnings of more texts.
    return PageCounts(fitting(window_pages), window_pages if page else count)


def _check_processes(model: Any, draft: Any) -> None:
    """Raises UserInputError if a draft model is not of the same processes as the model."""
    of_model, of_draft = (
        {
            device.process_index
            for where in shardings_of(one)
            if where
            for device in where.device_set
        }
        for one in (model, model if draft is None else draft)
    )
    if of_model != of_draft:
        raise UserInputError(
            f"draft must be of the processes of the model: expected {sorted(of_model)}, got {sorted(of_draft)}"
        )


def _prompt_tops(given: bool | int | None) -> int | None:
    if given is None or isinstance(given, bool):
        return 0 if given else None
    return checked_integer("prompt_logprobs", given, 0, MOST_LOGPROBS)


def _adapter_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise UserInputError(
            f"the name of an adapter must be a str that is not empty, not {name!r}"
        )
    return name


def _check_processor(processor: LogitsProcessor | None, vocab_size: int) -> None:
    if processor is None:
        return
    try:
        hash(processor)
    except TypeError as error:
        raise UserInputError(f"logits_processor must be hashable: {first_line(error)}") from error
    logits = jax.ShapeDtypeStruct((2, vocab_size), jnp.float32)
    ids = jax.ShapeDtypeStruct((2,), jnp.int32)
    found = jax.eval_shape(processor, logits, ids, ids)
    if getattr(found, "shape", None) != logits.shape or not jnp.issubdtype(
        found.dtype, jnp.floating
    ):
        raise UserInputError(
            f"logits_processor returns {found} for logits {logits.shape}: it must return floats of the same shape"
        )
