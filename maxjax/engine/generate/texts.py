"""``generate`` and ``stream``: text generation from one or more prompts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import jax

from ...errors import UserInputError, checked_integer, releasing
from ...lockstep import Lockstep
from ...models.weights import named_dtype, shardings_of
from ...nn.layer.observe.programs import ProgramObserver
from ...progress import Task, task
from ...text.tokenizer.arguments import check_is_tokenizer
from ..batching.running import RunningText, running_text
from ..batching.scheduler import PAGE_SIZE, Scheduler
from ..sampling.rows import MOST_LOGPROBS
from ..sampling.settings import Sampling
from .batch import Batch, bucket, check_chunk
from .completion import Completion, PartialCompletion
from .programs import MAX_STEPS, DispatchTokens
from .request import Prompt, Request, listed

# The longest dispatch in seconds: Ctrl-C waits for it, and a stop string is noticed only after it.
_DISPATCH_S = 0.1
# A stream doubles the tokens per dispatch while one takes less than this many seconds.
_STREAM_S = 0.025


@overload
def generate(
    model: Any, tokenizer: Any, prompts: str | list[int] | list[dict[str, Any]], **options: Any
) -> Completion: ...
@overload
def generate(
    model: Any,
    tokenizer: Any,
    prompts: list[str] | list[list[int]] | list[list[dict[str, Any]]],
    **options: Any,
) -> list[Completion]: ...
@overload
def generate(model: Any, tokenizer: Any, prompts: Any, **options: Any) -> Any: ...
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Any = None,
    *,
    n: int | None = None,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    eos_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    sampling: Sampling | None = None,
    batch_size: int = 32,
    chunk: int = 512,
    cache_dtype: Any = None,
    chat: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    skip_special_tokens: bool = True,
    **values: Any,
) -> Any:
    """Generates text from one or more prompts.

    If the tokenizer has a chat template, a text is a user's message, which the template formats as
    the model was trained on it; ``Completion.prompt`` is what the model has read. Token ids are
    always taken as they are.

    Several processes that share the model's mesh make the call together, with the same arguments,
    and all get the texts.

    Args:
        model: a decoder, as returned by ``maxjax.load``.
        tokenizer: the model's tokenizer; with None, prompts are token ids and completions have no
            text.
        prompts: a text, the messages of a chat as dicts with "role" and "content", or token ids; or a
            list of these.
        n: the number of answers to each prompt, which differ if tokens are drawn; None for one.
        max_new_tokens: the maximum number of generated tokens; the default is that of
            ``generation_config.json``, or 256. The model's context length is a limit as well.
        stop: one or more stop strings; they end an answer and are not part of it.
        eos_ids: the token ids that end an answer, () for none; by default those of
            ``generation_config.json``, and in a chat the tokenizer's ``eos_token`` as well.
        key: the random key, ``jax.random.key(0)`` by default; greedy sampling uses none. The same
            key gives the same texts for the same prompts, whatever the mesh and ``batch_size``.
        sampling: how the next token is chosen; by default as in ``generation_config.json``, or
            greedy without that file.
        batch_size: the maximum number of prompts in one batch.
        chunk: the maximum number of prompt tokens in one prefill step; a power of two.
        cache_dtype: dtype of the KV cache, by default the model's; ``"int8"`` halves the size of a
            bfloat16 cache, and changes results slightly.
        chat: False to continue each text as it is, True to refuse a tokenizer without a chat
            template; by default a text is a user's message if there is a template.
        template_kwargs: arguments of :func:`maxjax.apply_chat_template` and variables of the
            template: ``{"enable_thinking": False}``, ``{"tools": [function]}``.
        skip_special_tokens: whether special tokens have no text; tokens that end an answer never have.
        values: single settings of :class:`Sampling` instead of ``sampling``:
            ``temperature=0.7``, ``top_p=0.9`` …

    Returns:
        A :class:`Completion`, which is a str, for one prompt; a list of them for several. With ``n``, a list of n
        completions in place of each.

    Raises:
        UserInputError: a prompt is empty, longer than the context, or has token ids outside the
            vocabulary; the model is not a language model; a sampling setting is unknown or invalid.
        TypeError: a prompt is neither text, messages nor token ids.
        FloatingPointError: the logits became NaN or infinite.
        ProgramMismatchError: the model, a prompt or a setting is not the same in all processes.
        PeerFailedError, PeerLostError: another process raised an error in this call, or has ended.

    Example:
        >>> import maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> texts = maxjax.generate(model, None, [[1, 2, 3], [4]], max_new_tokens=5)
        >>> [len(text.tokens) for text in texts], texts[0].finish_reason
        ([5, 5], 'length')
        >>> answer = maxjax.generate(*maxjax.load("tiny"), "What is 37 + 48?")
        >>> answer, answer.prompt
        ('37 + 48 = 85', 'What is 37 + 48?\\n')
    """
    check_is_tokenizer(tokenizer)
    single, several = listed(prompts)
    count = 1 if n is None else checked_integer("n", n)
    found = dict(_answers(
        model, tokenizer, several, "the prompt" if single else "prompts[{}]", count, stop=stop, eos_ids=eos_ids,
        max_new_tokens=max_new_tokens, key=key, sampling=sampling, batch_size=batch_size, chunk=chunk,
        cache_dtype=cache_dtype, chat=chat, template_kwargs=template_kwargs,
        skip_special_tokens=skip_special_tokens, **values,
    ))  # fmt: skip
    texts = [found[i] for i in range(len(found))]
    if n is not None:
        texts = [texts[i : i + n] for i in range(0, len(texts), n)]
    return texts[0] if single else texts


def generate_each(
    model: Any, tokenizer: Any, prompts: Iterable[Any], **options: Any
) -> Iterator[tuple[int, Completion]]:
    """Generates text from several prompts, and yields each answer as soon as it has ended.

    The answers are those of :func:`generate`, whose arguments are the same.

    Args:
        model, tokenizer: as for :func:`generate`.
        prompts: texts, chats or lists of token ids.
        options: the other arguments of :func:`generate`.

    Yields:
        The number of the prompt, and its answer.

    Raises:
        UserInputError, TypeError, FloatingPointError: as for :func:`generate`.

    Example:
        >>> import maxjax
        >>> model, tokenizer = maxjax.load("tiny")
        >>> for i, text in maxjax.generate_each(model, tokenizer, ["What is 2 + 3?", "What is 4 + 4?"]):
        ...     print(i, text)
        0 2 + 3 = 5
        1 4 + 4 = 8
    """
    check_is_tokenizer(tokenizer)
    single, several = listed(prompts)
    if single:
        raise UserInputError("generate_each takes a list of prompts: maxjax.generate takes one")
    return _answers(model, tokenizer, several, "prompts[{}]", 1, **options)


def _answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    name: str,
    count: int,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    eos_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    sampling: Sampling | None = None,
    batch_size: int = 32,
    chunk: int = 512,
    cache_dtype: Any = None,
    chat: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    skip_special_tokens: bool = True,
    **values: Any,
) -> Iterator[tuple[int, Completion]]:
    """The number and the answer of each prompt, ``count`` times; ``name`` is that of a prompt for messages."""
    with Lockstep("generate", shardings_of(model)) as together, releasing():
        request = Request(
            model, tokenizer, max_new_tokens, stop, eos_ids, sampling, values, chat, template_kwargs,
            skip_special_tokens,
        )  # fmt: skip
        read = [request.prompt(one, name.format(i)) for i, one in enumerate(prompts)]
        read = [one for one in read for _ in range(count)]
        batch_size = checked_integer("batch_size", batch_size)
        request.agree(
            together, [prompt.ids for prompt in read], key,
            batch_size=batch_size, chunk=chunk, cache_dtype=cache_dtype,
        )  # fmt: skip
        options = {"key": key, "batch_size": batch_size, "chunk": chunk, "cache_dtype": cache_dtype}
        if len(read) > 1 and not together.is_shared and model.shares_pages():
            answers = _as_slots_are_free(request, read, **options)
        else:
            answers = _in_batches(request, read, together, **options)
        with _progress_of(len(read)) as shown, contextlib.closing(answers):
            for i, text in answers:
                shown.add(1)
                yield i, text
        together.finish()


def _in_batches(
    request: Request, read: Sequence[Prompt], together: Lockstep, *,
    key: Any, batch_size: int, chunk: int, cache_dtype: Any,
) -> Generator[tuple[int, Completion]]:  # fmt: skip
    """Answers the prompts in batches, each of which ends with its longest answer.

    It is for a single prompt, for several processes, and for meshes whose devices divide sequences among them.
    """
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


def _as_slots_are_free(
    request: Request, read: Sequence[Prompt], *,
    key: Any, batch_size: int, chunk: int, cache_dtype: Any,
) -> Generator[tuple[int, Completion]]:  # fmt: skip
    """Answers the prompts, each as soon as one of ``batch_size`` slots is free."""
    check_chunk(chunk)
    dtype = None if cache_dtype is None else named_dtype("cache_dtype", cache_dtype)
    limits = sorted((request.limit(prompt.ids) for prompt in read), reverse=True)
    slots = min(batch_size, bucket(len(read)))
    # Room for the longest texts side by side: none of them ever waits for pages.
    pages = bucket(sum(-(-n // PAGE_SIZE) for n in limits[:slots]))
    tops = max(MOST_LOGPROBS, request.sampling.logprobs or 0)
    scheduler = Scheduler(request.model, slots, pages, chunk=chunk, cache_dtype=dtype, tops=tops)
    ended: list[RunningText] = []
    try:
        for i, prompt in enumerate(read):
            scheduler.add(running_text(request, prompt, key, i, number=i, ended=ended.append))
        while scheduler.is_busy:
            scheduler.step()
            for text in ended:
                if text.error is not None:
                    raise text.error
                yield text.number, text.partial.completion()
            ended.clear()
    finally:
        scheduler.close()


def _progress_of(count: int) -> AbstractContextManager[Task]:
    """A task of ``count`` texts; for a single text only compilation is shown."""
    if count == 1:
        return nullcontext(Task("generating"))
    return task(f"generating {count:,} texts", count, unit=" texts")


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


class Stream(Iterator[str]):
    """An iterator over the pieces of an answer while it is generated. Made by :func:`stream`.

    Attributes:
        completion: the answer so far.
    """

    def __init__(
        self,
        request: Request,
        batch: Batch,
        prompt: Prompt,
        ended: Callable[[PartialCompletion, bool], None] | None = None,
    ):
        self._partial = request.partial_completion(prompt)
        # The generator does not refer to this object, so that dropping a stream frees its cache.
        self._pieces = _pieces(batch, self._partial, ended)
        self._lock = (
            threading.RLock()
        )  # two threads take turns: a generator cannot be entered twice
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


def stream(
    model: Any,
    tokenizer: Any,
    prompt: Any = None,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    eos_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    sampling: Sampling | None = None,
    chunk: int = 512,
    cache_dtype: Any = None,
    chat: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    skip_special_tokens: bool = True,
    **values: Any,
) -> Stream:
    """Generates text from one prompt, and yields it piece by piece.

    The arguments are those of :func:`generate`, and the joined pieces are its result. No piece
    ends within a character, and text that may be the beginning of a stop string is held back until
    it is certain. If there are several processes, each gets the pieces, at the pace of the slowest.

    Returns:
        An iterator of str; its ``completion`` is the complete answer, with tokens and finish
        reason.

    Raises:
        UserInputError, TypeError, FloatingPointError: the same errors as for :func:`generate`.

    Example:
        >>> import maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> pieces = maxjax.stream(model, None, [1, 2, 3], max_new_tokens=5)
        >>> list(pieces), len(pieces.completion.tokens)
        ([], 5)
    """
    with Lockstep("stream", shardings_of(model)) as together:
        request = Request(
            model, tokenizer, max_new_tokens, stop, eos_ids, sampling, values, chat, template_kwargs,
            skip_special_tokens,
        )  # fmt: skip
        read = request.prompt(prompt)
        request.agree(together, [read.ids], key, chunk=chunk, cache_dtype=cache_dtype)
        return Stream(request, request.batch(read.ids, key, chunk, cache_dtype, together), read)


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
