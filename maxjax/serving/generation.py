"""Gives the prompts of a request to the engine, and takes their answers back when the client goes."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jax
import msgspec

from ..engine.batching.answer import PendingAnswer
from ..engine.batching.grammar import FORMS
from .context import RequestContext
from .errors import RequestError, checking
from .fields import GenerationRequest, Structured

# More tokens that end an answer would need programs of their own.
_MOST_ENDS = 32
# Fields that are settings of Sampling under the same name.
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias",
)  # fmt: skip


def settings_of(context: RequestContext, body: GenerationRequest) -> dict[str, Any]:
    """The arguments of :meth:`maxjax.Engine.submit` for the fields that all answers have."""
    found = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if found.get("top_k") == -1:  # vLLM's word for "off"
        found["top_k"] = 0
    if body.min_tokens:
        found["min_new_tokens"] = body.min_tokens
    if body.ignore_eos or body.stop_token_ids:
        own = () if body.ignore_eos else context.server.eos_ids
        found["eos_ids"] = (*own, *(body.stop_token_ids or ()))
    if len(found.get("eos_ids", ())) > _MOST_ENDS:
        raise RequestError(
            400, f"stop_token_ids can have at most {_MOST_ENDS} tokens, with those of the model",
            param="stop_token_ids",
        )  # fmt: skip
    if body.stream_options is not None and not body.stream:
        raise RequestError(400, "stream_options needs stream=true", param="stream_options")
    if body.stop is not None:
        found["stop"] = body.stop
    found |= {
        "max_new_tokens": body.max_tokens or math.inf,
        "skip_special_tokens": body.skip_special_tokens,
        "priority": body.priority,
        "salt": context.server.salt(context.client, body.cache_salt),
        "adapter": context.server.adapter(body.model),
    }
    return found | _structured(body.structured_outputs)


def _structured(wanted: Structured | None) -> dict[str, Any]:
    given = {} if wanted is None else msgspec.structs.asdict(wanted)
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return {}
    if len(given) > 1:
        raise RequestError(
            400, f"structured_outputs has {' and '.join(given)}: it must have one of them",
            param="structured_outputs",
        )  # fmt: skip
    (name, value), *_ = given.items()
    if name == "choice":
        return {"grammar": _choices(value)}
    return {"schema" if name == "json" else name: value}


def _choices(texts: Sequence[str]) -> str:
    """The Lark grammar of one of these texts."""
    return "start: " + " | ".join(msgspec.json.encode(text).decode() for text in texts)


def must_match(settings: Mapping[str, Any]) -> bool:
    """Whether an answer with these arguments of ``submit`` must match something."""
    return not FORMS.isdisjoint(settings)


def check_ends(body: GenerationRequest, settings: Mapping[str, Any]) -> None:
    """Raises RequestError for tokens that end an answer which must match something: they would end it anywhere."""
    if body.stop_token_ids and must_match(settings):
        raise RequestError(
            400, "stop_token_ids is not supported for answers that must match something", param="stop_token_ids"
        )  # fmt: skip


@asynccontextmanager
async def submitted(
    context: RequestContext,
    prompts: Sequence[Any],
    body: GenerationRequest,
    settings: Mapping[str, Any],
) -> AsyncIterator[list[PendingAnswer]]:
    """``n`` answers to each prompt while the engine writes them; afterwards those that have not ended are cancelled."""
    count = len(prompts) * body.n
    pending: list[PendingAnswer] = []
    is_over = False

    def submit() -> None:
        first = jax.random.key(secrets.randbits(63) if body.seed is None else body.seed % 2**63)
        for i in range(count):
            if is_over:
                break
            key = first if i == 0 else jax.random.fold_in(first, i)
            # Further answers to a prompt take it as the first one has read it.
            prompt = pending[-1].prompt if i % body.n else prompts[i // body.n]
            with checking():
                one = context.engine.submit(prompt, key=key, **settings)
            pending.append(one)

    leave = await context.server.admission.enter(context.client, count, body.priority)
    loop = asyncio.get_running_loop()

    def ended(_: PendingAnswer) -> None:
        # A client that reads slowly keeps no place of an answer that has been written.
        if len(pending) == count and all(one.is_done for one in pending):
            loop.call_soon_threadsafe(leave)

    submitting = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        await asyncio.shield(submitting)
        for one in pending:
            one.add_done_callback(ended)
        yield pending
    finally:
        is_over = True
        if not submitting.done():  # the thread goes on: what it has begun is cancelled too
            submitting.add_done_callback(lambda _: _cancel(pending))
        _cancel(pending)
        leave()


def _cancel(pending: Sequence[PendingAnswer]) -> None:
    for one in pending:
        if not one.is_done:
            one.cancel()


async def pieces_of(
    context: RequestContext, pending: Sequence[PendingAnswer]
) -> AsyncIterator[tuple[int, str | None]]:
    """The texts of several answers as they come, each with the number of its answer; None at the end of one.

    What the engine writes at once comes at once: an event for each token would cost as much as the token.
    """
    if len(pending) == 1:  # without a queue
        async for text in _texts_of(pending[0]):
            context.has_begun()
            yield 0, text
        yield 0, None
        return
    coming: asyncio.Queue[tuple[int, str | None, Exception | None]] = asyncio.Queue()

    async def follow(i: int, one: PendingAnswer) -> None:
        try:
            async for text in _texts_of(one):
                coming.put_nowait((i, text, None))
            coming.put_nowait((i, None, None))
        except Exception as error:
            coming.put_nowait((i, None, error))

    tasks = [asyncio.ensure_future(follow(i, one)) for i, one in enumerate(pending)]
    try:
        left = len(tasks)
        while left:
            i, piece, error = await coming.get()
            if error is not None:
                raise error
            context.has_begun()
            left -= piece is None
            yield i, piece
    finally:
        for task in tasks:
            task.cancel()


async def _texts_of(answer: PendingAnswer) -> AsyncIterator[str]:
    """What has been written each time that there is something new."""
    count = 0
    while found := await answer.pieces_from(count):
        count += len(found)
        yield "".join(found)


async def completions_of(context: RequestContext, pending: Sequence[PendingAnswer]) -> list[Any]:
    """The answers when all have ended."""
    found = [await one for one in pending]
    context.has_begun()
    return found


def usage_of(
    context: RequestContext, completions: Sequence[Any], n: int, reasoning: int = 0
) -> dict[str, Any]:
    """The numbers of tokens, in the form of OpenAI's API; a prompt with several answers counts once.

    Args:
        context: the request.
        completions: the answers, ``n`` to each prompt.
        n: their number.
        reasoning: number of tokens of reasoning in all of them.
    """
    first = completions[::n]
    prompt = sum(len(one.prompt_tokens) for one in first)
    written = sum(len(one.tokens) for one in completions)
    context.usage = {"prompt_tokens": prompt, "completion_tokens": written}
    return {
        **context.usage, "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in first)},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }  # fmt: skip
