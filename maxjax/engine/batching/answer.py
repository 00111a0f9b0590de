"""PendingAnswer: the answer to a prompt that an Engine is working on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

from ..generate.completion import Completion, TokenLogprob
from ..generate.request import Prompt
from ..sampling.settings import Sampling
from .grammar import FORMS
from .running import RunningText

_LOG = logging.getLogger("maxjax")


_SETTINGS = {field.name for field in fields(Sampling)}


class Branch(NamedTuple):
    """A prompt and the tokens of an answer to it, from which another answer goes on."""

    prompt: list[int]
    written: list[int]


class PendingAnswer:
    """The answer to one prompt, made by :meth:`Engine.submit`; its pieces can be read while it is written.

    ``for piece in answer`` and ``async for piece in answer`` give the pieces from the first one on, in any thread and
    more than once; joined they are :meth:`result`. ``await answer`` is the result too.

    Example:
        >>> import maxjax
        >>> with maxjax.Engine(*maxjax.load("tiny"), slots=2) as engine:
        ...     answer = engine.submit("What is 37 + 48?")
        ...     "".join(answer)
        '37 + 48 = 85'
    """

    def __init__(self, worker: Any):
        self._worker, self._is_done = worker, False
        self._pieces: list[str] = []
        self._changed = threading.Condition()
        self._waiting: list[tuple[Any, asyncio.Future[None]]] = []
        self._callbacks: list[Callable[[PendingAnswer], None]] = []
        self._text: RunningText | None = None
        self._prompt: Prompt | None = None
        self._engine: Any = None
        self._engine_of_forks: Any = lambda: None
        self._options: dict[str, Any] = {}

    def begin(
        self, text: RunningText, prompt: Prompt, engine: Any, options: dict[str, Any]
    ) -> None:
        """Learns what it is the answer to, and the options of ``submit``; keeps the engine until it has ended."""
        self._text, self._prompt, self._engine, self._options = text, prompt, engine, options
        self._engine_of_forks = weakref.ref(engine)

    def take(self, piece: str) -> None:
        """Takes a piece from the engine's thread."""
        with self._changed:
            self._pieces.append(piece)
        self._notify()

    def finish(self, text: RunningText) -> None:
        """Learns from the engine's thread that the answer has ended."""
        with self._changed:
            self._is_done = True
            self._worker = self._engine = None  # an answer that is kept does not keep the model
            callbacks, self._callbacks = self._callbacks, []
        self._notify()
        for function in callbacks:
            try:
                function(self)
            except BaseException:  # it is the caller's, SystemExit too, and other answers go on
                _LOG.exception("a callback of an answer has raised an error")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            # A loop that is closed raises this: nobody waits in it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda one=future: one.done() or one.set_result(None))

    def _wait(self, is_over: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits, with the lock held, until something is so; returns whether it is."""
        if not is_over() and self._worker is not None:
            self._worker.check_can_wait()
        return self._changed.wait_for(is_over, timeout)

    @property
    def is_done(self) -> bool:
        """Whether the answer has ended."""
        return self._is_done

    @property
    def prompt(self) -> Prompt:
        """The prompt, formatted and tokenized: :meth:`Engine.submit` takes it, for another answer to it."""
        assert self._prompt is not None
        return self._prompt

    @property
    def completion(self) -> Completion:
        """The answer so far."""
        assert self._text is not None
        return self._text.partial.completion()

    def logprobs_from(self, start: int) -> list[TokenLogprob]:
        """The log-probabilities of the answer's tokens from this one on, as far as there are any."""
        assert self._text is not None
        return self._text.partial.logprobs[start:]

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end of the answer.

        Args:
            timeout: largest number of seconds to wait; None for any.

        Raises:
            TimeoutError: it has not ended by then; it goes on.
            FloatingPointError: the logits became NaN or infinite.
            RuntimeError: the engine was closed, or has failed, before the end; or this is the engine's own thread, as
                in a callback, and the answer has not ended.
        """
        with self._changed:
            if not self._wait(lambda: self._is_done, timeout):
                raise TimeoutError(f"the answer has not ended within {timeout} seconds")
        return self._end()

    def add_done_callback(self, function: Callable[[PendingAnswer], None]) -> None:
        """Has a function called with this answer when it has ended; at once if it has.

        It is called in the engine's thread, so it must be short, and cannot wait for other answers. An error that it
        raises is logged.
        """
        with self._changed:
            if not self._is_done:
                self._callbacks.append(function)
                return
        function(self)

    def fork(self, **changes: Any) -> PendingAnswer:
        """Submits another answer, which goes on from the tokens of this one so far; this one goes on too.

        Both share the pages of these tokens. The other one has only its own tokens: those so far are the end of its
        prompt, without an end-of-text token.

        Args:
            changes: arguments of :meth:`Engine.submit`; the others are as for this answer. Without ``key``, the other
                one draws with another key. A ``schema``, ``regex`` or ``grammar`` that is given here begins here; that
                of this answer goes on.

        Raises:
            UserInputError, TypeError, RuntimeError: as for :meth:`Engine.submit`.

        Example:
            >>> import maxjax
            >>> with maxjax.Engine(*maxjax.load("tiny"), slots=2) as engine:
            ...     answer = engine.submit("What is 37 + 48?", max_new_tokens=4)
            ...     answer.result(), answer.fork(max_new_tokens=40).result()
            ('37 + ', '48 = 85')
        """
        assert self._text is not None
        engine = self._engine_of_forks()
        if engine is None:
            raise RuntimeError("the engine is closed")
        prompt = self._text.tokens[: self._text.prompt_length]
        branch = Branch(prompt, self._text.partial.unended_tokens())
        if not FORMS.isdisjoint(changes):  # one that is given takes the place of the others
            branch, changes = [*prompt, *branch.written], dict.fromkeys(FORMS) | changes
        settings = {name: changes.pop(name) for name in _SETTINGS & changes.keys()}
        if settings and "sampling" not in changes:
            settings = {"sampling": replace(self._options["sampling"], **settings)}
        return engine.submit(branch, **self._options | changes | settings)

    def cancel(self) -> None:
        """Ends the answer where it is: :meth:`result` is what was written before. Others go on."""
        assert self._text is not None
        self._text.is_cancelled = True
        worker = self._worker
        if worker is not None:
            worker.cancelled()

    def _end(self) -> Completion:
        assert self._text is not None
        if self._text.error is not None:
            raise self._text.error
        return self.completion

    def __iter__(self) -> Iterator[str]:
        number = 0
        while True:
            with self._changed:
                self._wait(lambda n=number: self._is_done or len(self._pieces) > n)
                if number == len(self._pieces):
                    break
                piece = self._pieces[number]
            number += 1
            yield piece
        self._end()

    async def __aiter__(self) -> AsyncIterator[str]:
        number = 0
        while await self._reached(number + 1):
            yield self._pieces[number]
            number += 1
        self._end()

    def __await__(self) -> Generator[Any, None, Completion]:
        while not self._is_done:
            yield from self._reached(len(self._pieces) + 1).__await__()
        return self._end()

    async def pieces_from(self, start: int) -> list[str]:
        """Waits for the piece of this number, and returns it with all that there are after it; [] at the end.

        Raises:
            FloatingPointError, RuntimeError: as :meth:`result`, after the last piece.
        """
        if not await self._reached(start + 1):
            self._end()
        return self._pieces[start:]

    async def _reached(self, count: int) -> bool:
        """Waits until there are so many pieces, or the answer has ended; returns whether there are."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if len(self._pieces) >= count or self._is_done:
                    return len(self._pieces) >= count
                future: asyncio.Future[None] = loop.create_future()
                self._waiting.append((loop, future))
            await future
