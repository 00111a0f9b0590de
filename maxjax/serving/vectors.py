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
from .asked import Asked
from .errors import RequestError
from .fields import EmbeddingRequest, RerankRequest, decoded


async def embeddings(asked: Asked) -> dict[str, Any]:
    """A vector of each text."""
    body = decoded(asked.body, EmbeddingRequest)
    _check(asked, body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    _check_count(asked, texts, "input")
    model, tokenizer = asked.server.model, asked.server.tokenizer
    options: dict[str, Any] = {}
    if body.dimensions is not None:
        options = {"truncate_dim": body.dimensions, "normalize": True}
    vectors = await _alone(asked, lambda: embed(model, tokenizer, texts, **options))
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    count = await asyncio.to_thread(_count, tokenizer, texts)
    asked.usage = {"prompt_tokens": count}
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def _encoded(vector: np.ndarray, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


async def rerank(asked: Asked) -> dict[str, Any]:
    """The documents, the best first, with a score of each."""
    body = decoded(asked.body, RerankRequest)
    _check(asked, body.model)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    _check_count(asked, texts, "documents")
    model, tokenizer = asked.server.model, asked.server.tokenizer
    scores = await _alone(asked, lambda: rerank_texts(model, tokenizer, body.query, texts))
    order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    results = [{"index": i, "relevance_score": float(scores[i])} for i in order]
    if body.return_documents:
        results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
    count = await asyncio.to_thread(_count, tokenizer, [body.query, *texts])
    asked.usage = {"prompt_tokens": count}
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


def _check(asked: Asked, name: str) -> None:
    if asked.server.adapter(name) is not None:
        raise RequestError(400, f"{name} is an adapter: adapters write text alone", param="model")


def _check_count(asked: Asked, texts: list[str], name: str) -> None:
    if len(texts) > (limit := asked.server.limits.texts):
        raise RequestError(
            400, f"{name} has {len(texts):,} texts: the limit is {limit:,}", param=name
        )


async def _alone(asked: Asked, function: Callable[[], np.ndarray]) -> np.ndarray:
    """The result of a function that is called in a thread, one at a time; it takes a place in the queue."""
    server = asked.server

    def run() -> np.ndarray:
        with server.lock:
            return np.empty(0) if is_over else function()

    is_over = False

    async def held() -> np.ndarray | None:
        """The thread cannot be stopped: it keeps its place until it has ended, also when the client has gone."""
        async with server.admission.place(asked.client):
            return None if is_over else await asyncio.to_thread(run)

    running = asyncio.ensure_future(held())
    try:
        found = await asyncio.shield(running)
    finally:
        is_over = True
    assert found is not None
    return found
