"""Generate and stream: prompts → what a language model writes after them."""

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

# A dispatch is to last no longer: for so long Ctrl-C waits, and texts that ended are not noticed.
_DISPATCH_S = 0.1
# Of a stream: more tokens at once as long as that is quicker, which nobody sees at 20 times a second.
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
    """Has a language model go on with texts.

    Args:
        model: A decoder, as ``maxjax.load`` gives it.
        tokenizer: Its tokenizer; with None, prompts are token ids and there is no text.
        prompts: A text, or the ids of its tokens; or several of either.
        max_new_tokens: The most tokens of an answer; what ``generation_config.json`` says, or 256,
            by default. The model's context ends it in any case.
        stop: Texts that end an answer; the answer does not contain them.
        eos_ids: Tokens that end an answer: by default those of the checkpoint's files; () for none.
        key: Of the random numbers. The same key gives the same texts, on any mesh and in any batch;
            ``jax.random.key(0)`` by default. Greedy sampling uses none.
        sampling: How tokens are chosen; by default as ``generation_config.json`` says, else greedy.
        batch_size: The most texts at once.
        chunk: The most tokens of a prompt that are read at once; a power of two.
        cache_dtype: Of the cache of keys and values: as the model's by default; ``"int8"`` halves
            a bfloat16 cache, and changes results a little.
        values: Single settings of :class:`Sampling` instead: ``temperature=0.7``, ``top_p=0.9`` …

    Returns:
        A :class:`Completion`, which is a str, for one prompt; a list of them for several.

    Raises:
        UserInputError: A prompt is empty, longer than the context, or has tokens that are not in
            the vocabulary; no language model; an unknown or wrong sampling value.
        TypeError: A prompt is neither text nor ids.
        FloatingPointError: The logits became NaN or infinite.

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
    # Texts of like length together: less of a batch is padding.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        # The last batch is as wide as the others, which are compiled already.
        blanks = batch_size - len(members) if start else 0
        texts = _batch(request, rows, members, blanks, key, chunk, cache_dtype)
        for i, text in zip(members, texts, strict=True):
            found[i] = text
    return found[0] if single else found


def _batch(
    request: Request,
    rows: Sequence[Sequence[int]],
    members: Sequence[int],
    blanks: int,
    key: Any,
    chunk: int,
    cache_dtype: Any,
) -> list[Completion]:
    prompts = [rows[i] for i in members]
    decoding = Batch(
        request.model, [*prompts, *[[]] * blanks],
        [*(request.limit(prompt) for prompt in prompts), *[0] * blanks],
        sampling=request.sampling, eos_ids=request.eos_ids, key=key,
        rows=[*members, *[0] * blanks], chunk=chunk, cache_dtype=cache_dtype,
    )  # fmt: skip
    texts = [request.growing(prompt) for prompt in prompts]
    try:
        for written in _dispatches(decoding):
            for row, text in enumerate(texts):
                text.take(written, row)
            check_written(written, texts, members)
            ended = [text.done for text in texts] + [True] * blanks
            if all(done or end for done, end in zip(written.done.tolist(), ended, strict=True)):
                break
            if any(end and not done for done, end in zip(written.done, ended, strict=True)):
                decoding.stop(ended)
    finally:
        decoding.close()
    for text in texts:
        text.flush()
    return [text.completion() for text in texts]


def _dispatches(decoding: Batch) -> Iterator[Tokens]:
    """What one dispatch after the other writes, each of as many tokens as is quick enough."""
    yield decoding.prefill()
    count = 4
    while True:
        began = time.perf_counter()
        yield decoding.fetch(decoding.decode(count))
        if time.perf_counter() - began < _DISPATCH_S / 2:
            count = min(2 * count, MAX_STEPS)


class Stream(Iterator[str]):
    """The text of an answer piece by piece, as it is written. Made by :func:`stream`.

    Attributes:
        completion: The answer so far; all of it at the end.
    """

    def __init__(
        self,
        request: Request,
        decoding: Batch,
        prompt: Sequence[int],
        ended: Callable[[PartialCompletion, bool], None] | None = None,
    ):
        self._decoding, self._growing = decoding, request.growing(prompt)
        # It refers to this object nowhere: who drops a stream lets go of its cache at once.
        self._pieces = _pieces(decoding, self._growing, ended)
        next(self._pieces)  # begins it, so that its end is seen to also if nothing is ever read

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends it before its end, and lets go of the cache."""
        self._pieces.close()

    @property
    def completion(self) -> Completion:
        return self._growing.completion()


def _pieces(
    decoding: Batch,
    growing: PartialCompletion,
    ended: Callable[[PartialCompletion, bool], None] | None,
) -> Generator[str, None, None]:
    """An empty piece, and those of :func:`_texts`; sees to the end, whatever it is."""
    whole = False
    try:
        yield ""
        yield from _texts(decoding, growing)
        whole = True
    except GeneratorExit:
        whole = True  # between two tokens: nothing is lost
        raise
    finally:
        if ended is None:
            decoding.close()
        else:
            ended(growing, whole)


def _texts(decoding: Batch, growing: PartialCompletion) -> Iterator[str]:
    written = decoding.prefill()
    piece = growing.take(written, 0)
    check_written(written, [growing], [0])
    if piece:
        yield piece  # before the program that decodes is compiled
    count, began = 1, time.perf_counter()
    coming = decoding.decode(1) if not (growing.done or written.done[0]) else None
    while coming is not None:
        written = decoding.fetch(coming)
        if time.perf_counter() - began < _STREAM_S:
            count = min(2 * count, MAX_STEPS)
        # While the host makes text of these tokens, the devices write the next.
        began = time.perf_counter()
        coming = None if written.done[0] else decoding.decode(count)
        yield from growing.pieces(written, 0)
        check_written(written, [growing], [0])
        if growing.done:
            break
    if rest := growing.flush():
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
    """As :func:`generate` for one prompt, and gives pieces of the text as they are written.

    The pieces together are what ``generate`` gives. No piece ends within a character, and what may
    be the beginning of a stop text is held back until that is known.

    Returns:
        An iterator of str; its ``completion`` is the whole, with tokens and how it ended.

    Raises:
        UserInputError, TypeError, FloatingPointError: As :func:`generate`.

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
    return Stream(request, request.decoding(ids, key, chunk, cache_dtype), ids)


def check_written(
    written: Tokens, texts: Sequence[PartialCompletion], numbers: Sequence[int]
) -> None:
    """Refuses texts that could not be gone on with, and were not ended before.

    Args:
        written: What was written.
        texts: Which have taken it.
        numbers: Of their prompts.

    Raises:
        FloatingPointError: Logits were NaN or infinite.
    """
    bad = [row for row, text in enumerate(texts) if written.bad[row] and not text.done]
    if bad:
        row = min(bad, key=lambda row: numbers[row])
        raise FloatingPointError(
            f"after {len(texts[row].tokens)} tokens of the answer to prompt {numbers[row]} the logits are NaN or "
            "infinite: no token can be chosen. maxjax.first_nan(model, ids) names the layer"
        )
