"""The loop over batches: for GPUs and TPUs, and for meshes whose devices divide sequences among them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from ...lockstep import Lockstep
from ...nn.layer.observe.programs import ProgramObserver
from .batch import Batch
from .completion import Completion, PartialCompletion
from .programs import MAX_STEPS, DispatchTokens
from .request import Prompt, Request
from .stream import Stream

# The longest dispatch in seconds: Ctrl-C waits for it, and a stop string is noticed only after it.
_DISPATCH_S = 0.1
# A stream doubles the tokens per dispatch while one takes less than this many seconds.
_STREAM_S = 0.025


def in_batches(
    request: Request, read: Sequence[Prompt], together: Lockstep, *,
    key: Any, batch_size: int, chunk: int, cache_dtype: Any,
) -> Generator[tuple[int, Completion]]:  # fmt: skip
    """Answers the prompts in batches, each of which ends with its longest answer."""
    model, rows = request.model, [prompt.ids for prompt in read]
    # Prompts of similar length share a batch: less of it is padding.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    observer = ProgramObserver(model)
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        # The last batch is padded to the size of the others, whose programs are compiled already.
        blanks = batch_size - len(members) if start else 0
        ids = [rows[i] for i in members]
        batch = Batch(
            model, [*ids, *[[]] * blanks],
            [*(request.limit(row) for row in ids), *[0] * blanks],
            sampling=request.sampling, eos_ids=request.eos_ids, key=key,
            rows=[*members, *[0] * blanks], chunk=chunk, cache_dtype=cache_dtype,
            together=together, observer=observer,
        )  # fmt: skip
        texts = [request.partial_completion(read[i]) for i in members]
        try:
            _fill(texts, batch, members)
        finally:
            batch.close()
        for i, text in zip(members, texts, strict=True):
            # The model has not read the last token; what came after a stop string is dropped.
            observer.end(i, len(rows[i]) + len(text.tokens) - 1)
            yield i, text.completion()


def _fill(
    texts: Sequence[PartialCompletion],
    batch: Batch,
    numbers: Sequence[int],
) -> None:
    """Generates until all texts have ended, each dispatch as long as ``_DISPATCH_S`` allows.

    Args:
        texts: the texts; the batch may have more rows, which are padding.
        batch: the batch of their prompts.
        numbers: the index of each text's prompt among the prompts of the call.
    """
    count, written = 4, batch.prefill()
    while True:
        for row, text in enumerate(texts):
            text.take(written, row)
        check_written(written, texts, numbers)
        done = written.done.tolist()  # True for padding
        ended = [
            *(one.done or row for one, row in zip(texts, done, strict=False)),
            *done[len(texts) :],
        ]
        # Processes that decide by themselves could decide differently, so the first one does.
        following = batch.together.decide(
            {"count": 0 if all(ended) else count, "stop": ended if ended != done else None}
        )
        if not following["count"]:
            break
        if following["stop"]:
            batch.stop(following["stop"])
        began = time.perf_counter()
        written = batch.fetch(batch.decode(following["count"]))
        if time.perf_counter() - began < _DISPATCH_S / 2:
            count = min(2 * count, MAX_STEPS)
    for text in texts:
        text.flush()


class BatchStream(Stream):
    """A Stream over a batch of one prompt."""

    def __init__(
        self,
        request: Request,
        batch: Batch,
        prompt: Prompt,
        ended: Callable[[PartialCompletion, bool], None] | None = None,
    ):
        self._partial = request.partial_completion(prompt)
        self._pieces = _pieces(batch, self._partial, ended)
        self._lock = threading.RLock()
        next(self._pieces)


def _pieces(
    batch: Batch,
    partial: PartialCompletion,
    ended: Callable[[PartialCompletion, bool], None] | None,
) -> Generator[str, None, None]:
    """An empty piece, then those of :class:`_Answer`; at the end it calls ``ended`` or frees the cache."""
    clean = False
    answer = _Answer(batch, partial)
    try:
        with batch.together:
            try:
                yield ""
                yield from answer.pieces()
            except _Ended:
                pass
            except GeneratorExit:
                answer.finish()
                clean = True  # between two tokens: nothing is lost
                raise
            answer.finish()
        clean = True
    finally:
        if ended is None:
            written = partial.completion()
            batch.observer.end(0, len(written.prompt_tokens) + len(written.tokens) - 1)
            batch.close()
        else:
            ended(partial, clean)


class _Ended(Exception):
    """The first of several processes has ended the answer."""


class _Answer:
    """The decode loop of a stream."""

    def __init__(self, batch: Batch, partial: PartialCompletion):
        self._batch, self._partial = batch, partial
        self._dispatches: list[
            DispatchTokens
        ] = []  # what this process has fetched, if it follows another
        self._coming: DispatchTokens | None = None
        self._end: dict[str, Any] | None = None

    def pieces(self) -> Iterator[str]:
        partial = self._partial
        written = self._kept(self._batch.prefill())
        self._batch.shows = False  # what the caller prints would be overwritten
        piece = partial.take(written, 0)
        check_written(written, [partial], [0])
        if piece:
            yield piece  # before the program that decodes is compiled
        count, began = 1, time.perf_counter()
        if not (partial.done or written.done[0]):
            self._dispatch(1)
        while self._coming is not None:
            written = self._fetch()
            if time.perf_counter() - began < _STREAM_S:
                count = min(2 * count, MAX_STEPS)
            # The devices compute the next tokens while the host decodes these.
            began = time.perf_counter()
            if not written.done[0]:
                self._dispatch(count)
            yield from partial.pieces(written, 0)
            check_written(written, [partial], [0])
            if partial.done:
                break
        if rest := partial.flush():
            yield rest

    def finish(self) -> None:
        """With several processes, ends the answer at the token where the first process ends it."""
        together, partial = self._batch.together, self._partial
        if not together.is_shared:
            return
        end = {"tokens": len(partial.tokens), "flushed": partial.flushed}
        if together.is_leader:
            together.decide(end)
        else:
            try:
                while self._end is None:
                    if self._coming is not None:
                        self._fetch()
                    self._dispatch(0)
            except _Ended:
                pass
            if self._coming is not None:
                self._fetch()
            assert self._end is not None
            partial.cut(self._dispatches, self._end["tokens"], self._end["flushed"])
        together.finish()

    def _dispatch(self, count: int) -> None:
        """Dispatches the next tokens, as many as the first process decides.

        Raises:
            _Ended: it has decided to end the answer.
        """
        following = self._batch.together.decide({"count": count})
        if "tokens" in following:
            self._end = following
            raise _Ended
        self._coming = self._batch.decode(following["count"])

    def _fetch(self) -> DispatchTokens:
        coming, self._coming = self._coming, None
        assert coming is not None
        return self._kept(self._batch.fetch(coming))

    def _kept(self, written: DispatchTokens) -> DispatchTokens:
        if not self._batch.together.is_leader:
            self._dispatches.append(written)
        return written


def check_written(
    written: DispatchTokens, texts: Sequence[PartialCompletion], numbers: Sequence[int]
) -> None:
    """Raises an error if an answer had logits that are not finite before it ended.

    Args:
        written: the tokens of a dispatch.
        texts: the answers, which have taken these tokens.
        numbers: the index of each answer's prompt among the prompts of the call.

    Raises:
        FloatingPointError: the logits were NaN or infinite.
    """
    bad = [row for row, text in enumerate(texts) if written.bad[row] and not text.done]
    if bad:
        row = min(bad, key=lambda row: numbers[row])
        raise FloatingPointError(
            f"after {len(texts[row].tokens)} tokens of the answer to prompt {numbers[row]} the logits are NaN or "
            "infinite: no token can be chosen. maxjax.first_nan(model, ids) names the layer"
        )
