"""``generate`` and ``stream``: text generation from one or more prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax

from ..sampling.settings import Sampling
from .batch import Batch
from .completion import Completion, PartialCompletion
from .programs import MAX_STEPS, Tokens
from .request import Request, listed, positive

# The longest dispatch in seconds: Ctrl-C waits for it, and a stop string is noticed only after it.
_DISPATCH_S = 0.1
# A stream doubles the tokens per dispatch while one takes less than this many seconds.
_STREAM_S = 0.025


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Any,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    eos_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    sampling: Sampling | None = None,
    batch_size: int = 32,
    chunk: int = 512,
    cache_dtype: Any = None,
    **values: Any,
) -> Any:
    """Generates text from one or more prompts.

    Args:
        model: a decoder, as returned by ``maxjax.load``.
        tokenizer: the model's tokenizer; with None, prompts are token ids and completions have no
            text.
        prompts: a text or its token ids, or a list of either.
        max_new_tokens: the largest number of tokens of an answer; by default that of
            ``generation_config.json``, or 256. The model's context length is a limit as well.
        stop: a stop string or several; they end an answer and are not part of it.
        eos_ids: the token ids that end an answer; by default those of the checkpoint, () for none.
        key: the random key, ``jax.random.key(0)`` by default; greedy sampling uses none. The same
            key gives the same texts, on any mesh and in any batch.
        sampling: how the next token is chosen; by default as in ``generation_config.json``, or
            greedy without that file.
        batch_size: the largest number of prompts that are generated together.
        chunk: the largest number of prompt tokens in one prefill; a power of two.
        cache_dtype: dtype of the KV cache, the model's by default; ``"int8"`` halves a bfloat16
            cache, and changes results a little.
        values: single settings of :class:`Sampling` in the place of ``sampling``:
            ``temperature=0.7``, ``top_p=0.9`` …

    Returns:
        A :class:`Completion`, which is a str, for one prompt; a list of them for several.

    Raises:
        UserInputError: a prompt is empty, longer than the context, or has token ids outside the
            vocabulary; the model is not a language model; a sampling setting is unknown or invalid.
        TypeError: a prompt is neither text nor token ids.
        FloatingPointError: the logits became NaN or infinite.

    Example:
        >>> import maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_layers=2, num_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> texts = maxjax.generate(model, None, [[1, 2, 3], [4]], max_new_tokens=5)
        >>> [len(text.tokens) for text in texts], texts[0].finish_reason
        ([5, 5], 'length')
    """
    request = Request(model, tokenizer, max_new_tokens, stop, eos_ids, sampling, values)
    single, several = listed(prompts)
    rows = [request.tokens(prompt, i, single) for i, prompt in enumerate(several)]
    batch_size = positive("batch_size", batch_size)
    found: list[Completion | None] = [None] * len(rows)
    # Prompts of similar length share a batch: less of it is padding.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        # The last batch is padded to the size of the others, whose programs are compiled already.
        blanks = batch_size - len(members) if start else 0
        texts = _generate_batch(request, rows, members, blanks, key, chunk, cache_dtype)
        for i, text in zip(members, texts, strict=True):
            found[i] = text
    return found[0] if single else found


def _generate_batch(
    request: Request,
    rows: Sequence[Sequence[int]],
    members: Sequence[int],
    blanks: int,
    key: Any,
    chunk: int,
    cache_dtype: Any,
) -> list[Completion]:
    prompts = [rows[i] for i in members]
    batch = Batch(
        request.model, [*prompts, *[[]] * blanks],
        [*(request.limit(prompt) for prompt in prompts), *[0] * blanks],
        sampling=request.sampling, eos_ids=request.eos_ids, key=key,
        rows=[*members, *[0] * blanks], chunk=chunk, cache_dtype=cache_dtype,
    )  # fmt: skip
    texts = [request.partial_completion(prompt) for prompt in prompts]
    try:
        for written in _dispatches(batch):
            for row, text in enumerate(texts):
                text.take(written, row)
            check_written(written, texts, members)
            ended = [text.done for text in texts] + [True] * blanks
            if all(done or end for done, end in zip(written.done.tolist(), ended, strict=True)):
                break
            if any(end and not done for done, end in zip(written.done, ended, strict=True)):
                batch.stop(ended)
    finally:
        batch.close()
    for text in texts:
        text.flush()
    return [text.completion() for text in texts]


def _dispatches(batch: Batch) -> Iterator[Tokens]:
    """The tokens of one dispatch after the other, each as long as ``_DISPATCH_S`` allows."""
    yield batch.prefill()
    count = 4
    while True:
        began = time.perf_counter()
        yield batch.fetch(batch.decode(count))
        if time.perf_counter() - began < _DISPATCH_S / 2:
            count = min(2 * count, MAX_STEPS)


class Stream(Iterator[str]):
    """An iterator over the pieces of an answer while it is generated. Made by :func:`stream`.

    Attributes:
        completion: the answer so far.
    """

    def __init__(
        self,
        request: Request,
        batch: Batch,
        prompt: Sequence[int],
        ended: Callable[[PartialCompletion, bool], None] | None = None,
    ):
        self._batch, self._partial = batch, request.partial_completion(prompt)
        # The generator does not refer to this object, so that dropping a stream frees its cache.
        self._pieces = _pieces(batch, self._partial, ended)
        next(self._pieces)  # starts it, so that its ``finally`` runs even if nothing is ever read

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stops the generation and frees the cache."""
        self._pieces.close()

    @property
    def completion(self) -> Completion:
        return self._partial.completion()


def _pieces(
    batch: Batch,
    partial: PartialCompletion,
    ended: Callable[[PartialCompletion, bool], None] | None,
) -> Generator[str, None, None]:
    """An empty piece, then those of :func:`_decode_pieces`; at the end it calls ``ended`` or frees the cache."""
    clean = False
    try:
        yield ""
        yield from _decode_pieces(batch, partial)
        clean = True
    except GeneratorExit:
        clean = True  # between two tokens: nothing is lost
        raise
    finally:
        if ended is None:
            batch.close()
        else:
            ended(partial, clean)


def _decode_pieces(batch: Batch, partial: PartialCompletion) -> Iterator[str]:
    written = batch.prefill()
    piece = partial.take(written, 0)
    check_written(written, [partial], [0])
    if piece:
        yield piece  # before the program that decodes is compiled
    count, began = 1, time.perf_counter()
    coming = batch.decode(1) if not (partial.done or written.done[0]) else None
    while coming is not None:
        written = batch.fetch(coming)
        if time.perf_counter() - began < _STREAM_S:
            count = min(2 * count, MAX_STEPS)
        # The devices compute the next tokens while the host decodes these.
        began = time.perf_counter()
        coming = None if written.done[0] else batch.decode(count)
        yield from partial.pieces(written, 0)
        check_written(written, [partial], [0])
        if partial.done:
            break
    if rest := partial.flush():
        yield rest


def stream(
    model: Any,
    tokenizer: Any,
    prompt: Any,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    eos_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    sampling: Sampling | None = None,
    chunk: int = 512,
    cache_dtype: Any = None,
    **values: Any,
) -> Stream:
    """Generates text from one prompt, and gives it piece by piece.

    The arguments are those of :func:`generate`, and the pieces together are its result. No piece
    ends within a character, and text that may be the beginning of a stop string is held back until
    that is decided.

    Returns:
        An iterator of str; its ``completion`` is the whole answer, with its tokens and finish reason.

    Raises:
        UserInputError, TypeError, FloatingPointError: the same errors as for :func:`generate`.

    Example:
        >>> import maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_layers=2, num_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> pieces = maxjax.stream(model, None, [1, 2, 3], max_new_tokens=5)
        >>> list(pieces), len(pieces.completion.tokens)
        ([], 5)
    """
    request = Request(model, tokenizer, max_new_tokens, stop, eos_ids, sampling, values)
    ids = request.tokens(prompt, 0, True)
    return Stream(request, request.batch(ids, key, chunk, cache_dtype), ids)


def check_written(
    written: Tokens, texts: Sequence[PartialCompletion], numbers: Sequence[int]
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
