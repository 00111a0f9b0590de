"""``/v1/embeddings`` and ``/v1/rerank``."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from ..engine.embed import embed
from ..engine.rerank import rerank as rerank_texts
from .context import RequestContext
from .errors import RequestError
from .fields import EmbeddingRequest, RerankRequest, decoded


async def embeddings(context: RequestContext) -> dict[str, Any]:
    """A vector of each text."""
    body = decoded(context.body, EmbeddingRequest)
    _check(context, body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    _check_count(context, texts, "input")
    model, tokenizer = context.server.model, context.server.tokenizer
    options: dict[str, Any] = {}
    if body.dimensions is not None:
        options = {"truncate_dim": body.dimensions, "normalize": True}
    vectors = await _alone(context, lambda: embed(model, tokenizer, texts, **options))
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    count = await asyncio.to_thread(_count, tokenizer, texts)
    context.usage = {"prompt_tokens": count}
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def _encoded(vector: np.ndarray, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


async def rerank(context: RequestContext) -> dict[str, Any]:
    """The documents, the best first, with a score of each."""
    body = decoded(context.body, RerankRequest)
    _check(context, body.model)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    _check_count(context, texts, "documents")
    model, tokenizer = context.server.model, context.server.tokenizer
    scores = await _alone(context, lambda: rerank_texts(model, tokenizer, body.query, texts))
    order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    results = [{"index": i, "relevance_score": float(scores[i])} for i in order]
    if body.return_documents:
        results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
    count = await asyncio.to_thread(_count, tokenizer, [body.query, *texts])
    context.usage = {"prompt_tokens": count}
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": body.model,
        "results": results,
        "usage": usage,
    }


def _count(tokenizer: Any, texts: list[str]) -> int:
    """The number of tokens of texts."""
    return sum(len(one.ids) for one in tokenizer.tokens(texts))


def _check(context: RequestContext, name: str) -> None:
    if context.server.adapter(name) is not None:
        raise RequestError(400, f"{name} is an adapter: adapters write text alone", param="model")


def _check_count(context: RequestContext, texts: list[str], name: str) -> None:
    if len(texts) > (limit := context.server.limits.texts):
        raise RequestError(
            400, f"{name} has {len(texts):,} texts: the limit is {limit:,}", param=name
        )


async def _alone(context: RequestContext, function: Callable[[], np.ndarray]) -> np.ndarray:
    """The result of a function that is called in a thread, one at a time; it takes a place in the queue."""
    server = context.server

    def run() -> np.ndarray:
        with server.lock:
            return np.empty(0) if is_over else function()

    is_over = False

    async def held() -> np.ndarray | None:
        """The thread cannot be stopped: it keeps its place until it has ended, also when the client has gone."""
        async with server.admission.place(context.client):
            return None if is_over else await asyncio.to_thread(run)

    running = asyncio.ensure_future(held())
    try:
        found = await asyncio.shield(running)
    finally:
        is_over = True
    assert found is not None
    return found
