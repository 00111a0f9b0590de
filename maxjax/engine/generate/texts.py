"""``generate`` and ``stream``: text generation from one or more prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import jax

from ...errors import UserInputError, checked_integer, releasing
from ...lockstep import Lockstep
from ...models.weights import shardings_of
from ...progress import Task, task
from ...text.tokenizer.arguments import check_is_tokenizer
from ..batching.running import RunningText, running_text
from ..bucket import bucket
from ..sampling.settings import Sampling
from .beams import BeamSettings, beam_answers
from .completion import Completion
from .defaults import GenerationDefaults
from .request import Prompt, Request, listed
from .stream import STREAM_S, Stream, checked_guesses, scheduler_for


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
    num_beams: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | str | None = None,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    eos_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    sampling: Sampling | None = None,
    batch_size: int = 32,
    chunk: int = 512,
    cache_dtype: Any = None,
    speculation: str | None = None,
    draft: Any = None,
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
        n: the number of answers to each prompt, which differ if tokens are drawn or ``num_beams`` is larger; None
            for one.
        num_beams: the number of answers that are continued side by side, of which the best are returned (beam search,
            as in transformers); by default that of ``generation_config.json``, or 1. It is for greedy settings, with
            ``eos_ids`` and without stop strings.
        length_penalty: the power of its length by which the score of a beam, its log-probability, is divided; 1 by
            default.
        early_stopping: True to stop when ``num_beams`` answers have ended, False when the best of the others, at its
            present length, is worse than these, "never" when none of the others can become better; False by default.
        max_new_tokens: the maximum number of generated tokens; the default is that of
            ``generation_config.json``, or 256. The model's context length is a limit as well.
        stop: one or more stop strings; they end an answer and are not part of it.
        eos_ids: the token ids that end an answer, () for none; by default those of
            ``generation_config.json``, and in a chat the tokenizer's ``eos_token`` as well.
        key: the random key, ``jax.random.key(0)`` by default; greedy sampling uses none. The same
            key gives the same texts for the same prompts, whatever the mesh and ``batch_size``.
        sampling: how the next token is chosen; by default as in ``generation_config.json``, or
            greedy without that file.
        batch_size: the maximum number of prompts at once.
        chunk: the maximum number of prompt tokens that are read at once; a power of two.
        cache_dtype: dtype of the KV cache, by default the model's; ``"int8"`` halves the size of a
            bfloat16 cache, and changes results slightly.
        speculation: ``"lookup"`` guesses tokens from the text itself, ``"mtp"`` by the model's own layer of multi-token
            prediction; answers stay the same, and come faster where guesses are right. As for :class:`maxjax.Engine`.
        draft: a smaller model of the same vocabulary that guesses tokens, as for :class:`maxjax.Engine`.
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
    defaults = getattr(model, "generation", None) or GenerationDefaults()
    beams = BeamSettings.of(num_beams, length_penalty, early_stopping, count, defaults)
    found = dict(_answers(
        model, tokenizer, several, "the prompt" if single else "prompts[{}]", count, beams, stop=stop, eos_ids=eos_ids,
        max_new_tokens=max_new_tokens, key=key, sampling=sampling, batch_size=batch_size, chunk=chunk,
        cache_dtype=cache_dtype, speculation=speculation, draft=draft, chat=chat, template_kwargs=template_kwargs,
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
    return _answers(model, tokenizer, several, "prompts[{}]", 1, None, **options)


def _answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    name: str,
    count: int,
    beams: BeamSettings | None,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    eos_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    sampling: Sampling | None = None,
    batch_size: int = 32,
    chunk: int = 512,
    cache_dtype: Any = None,
    speculation: str | None = None,
    draft: Any = None,
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
        several = [one for one in read for _ in range(count)]
        batch_size = checked_integer("batch_size", batch_size)
        request.agree(
            together, [prompt.ids for prompt in several], key,
            batch_size=batch_size, chunk=chunk, cache_dtype=cache_dtype, beams=beams,
        )  # fmt: skip
        options = {"batch_size": batch_size, "chunk": chunk, "cache_dtype": cache_dtype}
        guesses = checked_guesses(model, together, speculation, draft)
        if beams is not None and guesses:
            raise beams.refused("speculation is not supported for beam search")
        if beams is not None and any(one.pictures is not None for one in read):
            raise beams.refused("pictures are not supported for beam search")
        if beams is not None:
            answers = beam_answers(request, read, beams, count, together, **options)
        else:
            answers = _as_slots_are_free(request, several, together, key, guesses, **options)
        with _progress_of(len(several)) as shown, contextlib.closing(answers):
            for i, text in answers:
                shown.add(1)
                yield i, text
        together.finish()


def _as_slots_are_free(
    request: Request, read: Sequence[Prompt], together: Lockstep, key: Any, guesses: Mapping[str, Any], *,
    batch_size: int, chunk: int, cache_dtype: Any,
) -> Generator[tuple[int, Completion]]:  # fmt: skip
    """Answers the prompts, each as soon as one of ``batch_size`` slots is free."""
    slots = min(batch_size, bucket(len(read)))
    options = {"chunk": chunk, "cache_dtype": cache_dtype, "together": together}
    scheduler = scheduler_for(request, read, slots, **options, **guesses)
    ended: list[RunningText] = []
    try:
        for i, prompt in enumerate(read):
            scheduler.add(running_text(request, prompt, key, i, number=i, on_end=ended.append))
        while scheduler.is_busy or ended:
            if not ended:
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
    speculation: str | None = None,
    draft: Any = None,
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
        guesses = checked_guesses(model, together, speculation, draft)
        return stream_answer(request, read, key, chunk, cache_dtype, together, **guesses)


def stream_answer(
    request: Request, prompt: Prompt, key: Any, chunk: int, cache_dtype: Any, together: Lockstep, **guesses: Any
) -> Stream:  # fmt: skip
    """The stream of a request that is checked, with a cache of its own; ``guesses`` are those of ``scheduler_for``."""
    options = {"chunk": chunk, "cache_dtype": cache_dtype, "together": together}
    scheduler = scheduler_for(request, [prompt], 1, **options, **guesses, dispatch_s=STREAM_S)
    return Stream(scheduler, request, prompt, key)
