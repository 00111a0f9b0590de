"""What a client can ask about the model: ``/v1/models``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio
from typing import Any

from ..engine.pictures import pictures_in
from ..text.chat import chat_prompt
from .context import RequestContext
from .errors import RequestError, checking, unsupported
from .fields import DetokenizeRequest, TokenizeRequest, decoded
from .messages import chat_of, template_variables, tools_of


def models(context: RequestContext) -> dict[str, Any]:
    """The model, and its adapters."""
    server = context.server
    length = getattr(server.model, "max_length", None)
    of = lambda name, root: {
        "id": name, "object": "model", "created": 0, "owned_by": "maxjax", "root": root,
        "parent": root if name != root else None, "max_model_len": length,
    }  # fmt: skip
    names = () if server.engine is None else server.engine.adapters
    return {"object": "list", "data": [of(name, server.name) for name in (server.name, *names)]}


def model(context: RequestContext) -> dict[str, Any]:
    """The model or the adapter of a name."""
    context.server.adapter(context.name)
    (found,) = [one for one in models(context)["data"] if one["id"] == context.name]
    return found


async def tokenize(context: RequestContext) -> dict[str, Any]:
    """The token ids of a text, or of a chat as the template formats it."""
    body, tokenizer = decoded(context.body, TokenizeRequest), context.server.tokenizer
    if body.model is not None:
        context.server.adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(400, "the body must have either prompt or messages")
    if body.messages is None:
        ids = await asyncio.to_thread(
            tokenizer.encode, body.prompt, special=body.add_special_tokens
        )
    else:
        chat = chat_of(body.messages, tokenizer)
        if pictures_in(chat)[1]:
            raise unsupported("messages", "a picture in /tokenize")
        options = template_variables(body.chat_template_kwargs)
        if body.tools:
            options["tools"] = tools_of(body.tools)
        add = body.add_generation_prompt
        make = lambda: chat_prompt(tokenizer, chat, add_generation_prompt=add, **options)
        with checking():
            ids = await asyncio.to_thread(lambda: tokenizer.encode(make(), special=False))
    length = getattr(context.server.model, "max_length", None)
    return {"count": len(ids), "max_model_len": length, "tokens": ids}


async def detokenize(context: RequestContext) -> dict[str, Any]:
    """The text of token ids."""
    body = decoded(context.body, DetokenizeRequest)
    if body.model is not None:
        context.server.adapter(body.model)
    tokenizer = context.server.tokenizer
    text = await asyncio.to_thread(lambda: tokenizer.decode(body.tokens, skip_special=False))
    return {"prompt": text}
