"""``/v1/completions``: texts that are continued as they are."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from .context import RequestContext
from .errors import RequestError
from .fields import CompletionRequest, decoded
from .generation import check_ends, completions_of, pieces_of, settings_of, submitted, usage_of
from .http import event
from .logprobs import text_logprobs


async def complete(context: RequestContext) -> dict[str, Any] | AsyncGenerator[bytes]:
    """Continues one or more texts, whole or as events."""
    context.server.check_writes()
    body = decoded(context.body, CompletionRequest)
    prompts = _prompts(body.prompt, context.server.limits.texts)
    settings = settings_of(context, body) | {"chat": False}
    check_ends(body, settings)
    settings["max_new_tokens"] = body.max_tokens or 16  # the default of this API
    if body.logprobs is not None:
        settings["logprobs"] = body.logprobs
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
        "model": body.model,
    }  # fmt: skip
    if body.stream:
        return _events(context, prompts, body, settings, head)
    async with submitted(context, prompts, body, settings) as pending:
        found = await completions_of(context, pending)
    choices = [
        _choice(context, i, str(one), one.logprobs, one.finish_reason)
        for i, one in enumerate(found)
    ]
    return {**head, "choices": choices, "usage": usage_of(context, found, body.n)}


def _prompts(given: Any, limit: int) -> list[Any]:
    """The prompts: texts, or lists of token ids."""
    if isinstance(given, str) or all(type(one) is int for one in given):
        return [given]
    is_ids = lambda one: isinstance(one, list) and all(type(i) is int for i in one)
    if not all(isinstance(one, str) or is_ids(one) for one in given):
        raise RequestError(
            400, "prompt must be a text, a list of token ids, or a list of these", param="prompt"
        )
    if len(given) > limit:
        raise RequestError(400, f"a request can have at most {limit:,} prompts", param="prompt")
    return list(given)


def _choice(
    context: RequestContext,
    index: int,
    text: str,
    logprobs: Any,
    reason: str | None,
    start: int = 0,
) -> dict[str, Any]:
    found = None
    if logprobs is not None:
        found = text_logprobs(context.server.tokenizer, logprobs, start)
    return {"index": index, "text": text, "logprobs": found, "finish_reason": reason}


async def _events(
    context: RequestContext, prompts: list[Any], body: CompletionRequest, settings: dict[str, Any], head: dict[str, Any]
) -> AsyncGenerator[bytes]:  # fmt: skip
    async with submitted(context, prompts, body, settings) as pending:
        shown, lengths = [0] * len(pending), [0] * len(pending)
        async for i, piece in pieces_of(context, pending):
            new = None
            if body.logprobs is not None:
                new = pending[i].logprobs_from(shown[i])
                shown[i] += len(new)
            reason = pending[i].completion.finish_reason if piece is None else None
            yield event(
                {**head, "choices": [_choice(context, i, piece or "", new, reason, lengths[i])]}
            )
            lengths[i] += len(piece or "")
        completions = [one.completion for one in pending]
    usage = usage_of(context, completions, body.n)
    if body.shows_usage:
        yield event({**head, "choices": [], "usage": usage})
    yield event("[DONE]")
