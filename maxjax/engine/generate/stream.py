"""Stream: the pieces of one answer while it is written."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from ...errors import UserInputError
from ...lockstep import Lockstep
from ...models.weights import named_dtype
from ..batching.dispatch import DispatchTokens
from ..batching.draft import check_speculation
from ..batching.memory import in_groups, page_size_of
from ..batching.running import RunningText, Stage, running_text
from ..batching.scheduler import EndedByOthers, Scheduler
from ..bucket import bucket
from ..sampling.rows import MOST_LOGPROBS, uses_order
from .checks import check_chunk
from .completion import Completion
from .request import Prompt, Request

# Tokens of an answer for which a cache has room at first; it grows when a text needs more.
_FIRST_NEW_TOKENS = 1024
# The duration of a dispatch that a stream aims at, in seconds: its pieces come at once.
STREAM_S = 0.05


def scheduler_for(
    request: Request, prompts: Sequence[Prompt], slots: int, *, chunk: int, cache_dtype: Any,
    together: Lockstep, longest: int | None = None, dispatch_s: float = 0.1, speculation: str | None = None,
    draft: Any = None, window_pages: int | None = None,
) -> Scheduler:  # fmt: skip
    """A scheduler whose pool grows with the texts of a request, and in which no text ever waits for pages.

    Args:
        request: the settings of all texts.
        prompts: the prompts.
        slots: number of texts at once.
        chunk, cache_dtype: as for :func:`maxjax.generate`.
        together, dispatch_s, speculation, draft, window_pages: as for ``Scheduler``.
        longest: largest number of tokens of a text; None: that of these prompts.
    """
    slots, groups = in_groups(request.model, slots)
    each, page_size = slots // groups, page_size_of(request.model)
    limits = sorted((request.limit(one.ids), len(one.ids)) for one in prompts)[-each:]
    most = each * -(-request.model.max_length // page_size)
    pages = lambda sizes: min(bucket(sum(-(-n // page_size) for n in sizes)), most)
    count = request.sampling.logprobs
    return Scheduler(
        request.model,
        slots,
        pages(min(limit, length + _FIRST_NEW_TOKENS) for limit, length in limits),
        longest=longest or max((limit for limit, _ in limits), default=None),
        most_pages=pages([longest] if longest else (limit for limit, _ in limits)),
        chunk=check_chunk(chunk),
        cache_dtype=None if cache_dtype is None else named_dtype("cache_dtype", cache_dtype),
        # Programs without what no text uses are compiled sooner.
        tops=None if count is None else max(MOST_LOGPROBS, count),
        draws=not request.sampling.is_greedy,
        delays_ends=request.sampling.min_new_tokens > 0,
        has_order=uses_order(request.sampling),
        together=together,
        dispatch_s=dispatch_s,
        speculation=speculation,
        draft=draft,
        window_pages=window_pages,
    )


def checked_guesses(
    model: Any, together: Lockstep, speculation: str | None, draft: Any
) -> dict[str, Any]:
    """The arguments ``speculation`` and ``draft`` of :func:`scheduler_for`.

    Raises:
        UserInputError: an answer of this model cannot be written with such guesses.
    """
    check_speculation(model, speculation, draft)
    if speculation is None and draft is None:
        return {}
    if together.is_shared:
        raise UserInputError("speculation is not supported for a model of several processes")
    return {"speculation": speculation, "draft": draft}


class Stream(Iterator[str]):
    """An iterator over the pieces of an answer while it is generated. Made by :func:`maxjax.stream`.

    Attributes:
        completion: the answer so far.
    """

    def __init__(
        self, scheduler: Scheduler, request: Request, prompt: Prompt, key: Any,
        ended: Callable[[RunningText, bool], None] | None = None, after: RunningText | None = None,
    ):  # fmt: skip
        told: deque[str] = deque()
        text = running_text(request, prompt, key, 0, on_text=told.append, is_lazy=True, after=after)
        self._partial = text.partial
        # The generator does not refer to this object, so that dropping a stream frees its cache.
        self._pieces = _pieces(scheduler, text, told, ended)
        # Two threads take turns: a generator cannot be entered twice.
        self._lock = threading.RLock()
        next(self._pieces)  # starts it, so that its ``finally`` runs even if nothing is ever read

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        with self._lock:
            return next(self._pieces)

    def close(self) -> None:
        """Stops the generation and frees the cache.

        With several processes the first one decides: when it closes its stream, the answer ends in
        all of them. The others wait in their ``close`` until then.
        """
        with self._lock:
            self._pieces.close()

    @property
    def completion(self) -> Completion:
        return self._partial.completion()


def _pieces(
    scheduler: Scheduler, text: RunningText, told: deque[str],
    ended: Callable[[RunningText, bool], None] | None,
) -> Generator[str, None, None]:  # fmt: skip
    """An empty piece, then those of a text that is added to the scheduler; then it calls ``ended``, or frees the cache.

    Args:
        told: what :meth:`RunningText.end` tells.
        ended: takes the text, and whether the scheduler can go on.
    """
    is_clean, dispatches = False, []
    try:
        with scheduler.calls.together:
            try:
                yield ""
                yield from _written(scheduler, text, told, dispatches)
            except EndedByOthers as end:
                _finish(scheduler, text, dispatches, end.args[0])
            except GeneratorExit:
                _finish(scheduler, text, dispatches)
                is_clean = True  # between two tokens: nothing is lost
                raise
            else:
                _finish(scheduler, text, dispatches)
        is_clean = True
    finally:
        text.stage = Stage.ENDED
        if ended is None:
            scheduler.close()
        else:
            ended(text, is_clean)


def _written(
    scheduler: Scheduler, text: RunningText, told: deque[str], dispatches: list[DispatchTokens]
) -> Iterator[str]:
    """The pieces of a text; ``dispatches`` gets the tokens that this process has, if it follows another."""
    if "steps" not in (decided := scheduler.calls.together.decide({"steps": 0})):
        raise EndedByOthers(decided)
    scheduler.add(text)
    while text.stage is not Stage.ENDED:
        for step in (scheduler.read, scheduler.write):
            step()  # the first token is told before the program that writes the others is compiled
            scheduler.calls.shows = False  # what the caller prints would be overwritten
            if not scheduler.calls.together.is_leader:
                dispatches += [found for found, _ in text.received]
            yield from text.pieces()
    if text.error is not None:
        raise text.error
    while told:
        if piece := told.popleft():
            yield piece


def _finish(
    scheduler: Scheduler, text: RunningText, dispatches: list[DispatchTokens], end: Any = None
) -> None:
    """With several processes, ends the answer at the token where the first process ends it, which ``end`` says."""
    together, partial = scheduler.calls.together, text.partial
    if not together.is_shared:
        return
    if together.is_leader:
        together.decide({"tokens": len(partial.tokens), "flushed": partial.flushed})
        scheduler.receive()
    else:
        text.received.clear()
        while end is None or "steps" in end:
            end = together.decide()
            scheduler.receive()
            if "steps" in end and text.stage is Stage.WRITING:
                scheduler.dispatch(end["steps"])
            elif "steps" in end:
                scheduler.add(text)
                while text.stage is not Stage.WRITING:
                    scheduler.read()
        scheduler.receive()
        dispatches += [found for found, _ in text.received]
        partial.cut(dispatches, end["tokens"], end["flushed"])
    together.finish()
