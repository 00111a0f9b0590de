"""The application: its routes, and what happens to every request.

A request is checked (key, size, fields), waits for its turn (``admission.py``), and is answered, whole or as events.
It ends early when the client goes or its time is over; then its answers are cancelled, and their slots are free.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Route

from . import about, chat, responses, text, vectors
from .context import RequestContext
from .errors import RequestError, error_of
from .hosts import HostGuard, checked_hosts
from .http import (
    ClientGoneError,
    Receive,
    Send,
    event,
    headers_of,
    read_body,
    send_bytes,
    send_events,
    send_json,
    until_gone,
)
from .server import DEFAULT_LIMITS, RequestLimits, Server

_LOG = logging.getLogger("maxjax.serving")
_ACCESS = logging.getLogger("maxjax.access")

Answer = dict[str, Any] | AsyncGenerator[bytes]
_ROUTES: dict[str, Callable[[RequestContext], Awaitable[Answer] | Answer]] = {
    "POST /v1/chat/completions": chat.chat,
    "POST /v1/completions": text.complete,
    "POST /v1/responses": responses.respond,
    "POST /v1/embeddings": vectors.embeddings,
    "POST /v1/rerank": vectors.rerank,
    "GET /v1/models": about.models,
    "GET /v1/models/{name:path}": about.model,
    "POST /tokenize": about.tokenize,
    "POST /detokenize": about.detokenize,
}
# With the names that clients of others send.
_ALIASES = {"/rerank": "/v1/rerank", "/v2/rerank": "/v1/rerank"}


def app(
    engine: Any, *, name: str | None = None, keys: Sequence[str] = (), shares_prefixes: bool = False,
    origins: Sequence[str] = (), hosts: Sequence[str] | None = None,
    limits: RequestLimits = DEFAULT_LIMITS, format: str | None = None, image_hosts: Sequence[str] = (),
) -> Starlette:  # fmt: skip
    """An ASGI application that answers OpenAI's API with an engine.

    It can be mounted in another one. ``maxjax serve`` runs it on a port.

    Args:
        engine: a :class:`maxjax.Engine` with a tokenizer.
        name: name of the model, as requests say it; by default the name of its class.
        keys: API keys, of which a client must send one; none: everybody may ask.
        shares_prefixes: whether clients with different keys share what the cache has of prompts that begin alike. The
            time of an answer then tells a client whether another one has sent the same beginning.
        origins: the origins of pages in browsers that may ask (CORS); none by default.
        hosts: the names of hosts, besides ``localhost`` and addresses like 127.0.0.1, for which it answers, by the
            ``Host`` header; None: for all. A server that only this machine may ask needs ``()``: a page of another site
            can reach it under a name of that site's own (DNS rebinding).
        limits: what a client may ask for.
        format: the format in which the model writes calls of functions, by vLLM's names (``"hermes"``); by default that
            of its chat template.
        image_hosts: hosts from which the server fetches pictures that requests name by http(s) addresses; none by
            default. ``"*.example.org"`` are all names below one, ``"*"`` all hosts. What is fetched has limits on bytes
            and time, and only public addresses are asked, also after redirects.

    Example:
        >>> import maxjax
        >>> from starlette.testclient import TestClient
        >>> with maxjax.Engine(*maxjax.load("tiny"), slots=2) as engine:
        ...     client = TestClient(app(engine, name="tiny"))
        ...     body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
        ...     client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        '2 + 3 = 5'
    """
    name = name or type(engine.model).__name__
    server = Server(name, keys, shares_prefixes, limits, format, image_hosts)
    server.use(engine.model, engine.tokenizer, engine)
    server.is_ready = True
    return application(server, origins, hosts)


def application(
    server: Server, origins: Sequence[str] = (), hosts: Sequence[str] | None = None
) -> Starlette:
    """The ASGI application of a server, whose model may come later; ``origins`` and ``hosts`` as for :func:`app`."""
    routes = [
        Route("/health", _Status(lambda: not server.has_failed)),
        Route("/ready", _Status(lambda: server.takes_requests)),
        Route("/metrics", _Metrics(server)),
    ]
    for line, answer in _ROUTES.items():
        method, path = line.split()
        for one in (path, *(alias for alias, of in _ALIASES.items() if of == path)):
            routes.append(Route(one, _Endpoint(server, method, one, answer), methods=[method]))
    middleware = [] if hosts is None else [Middleware(HostGuard, hosts=checked_hosts(hosts))]
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"],
                allow_headers=["*"], expose_headers=["retry-after"],
            )
        )  # fmt: skip
    handlers: Any = {404: _not_found, 405: _wrong_method}
    found = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    found.router.redirect_slashes = False
    return found


class _Endpoint:
    """Answers the requests to one path."""

    def __init__(
        self, server: Server, method: str, path: str, answer: Callable[[RequestContext], Any]
    ):
        self._server, self._method, self._path, self._answer = server, method, path, answer

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        context = RequestContext(self._server, "")
        sent = _Sent(send)
        try:
            await self._serve(context, scope, receive, sent)
        except ClientGoneError:
            context.status = 499  # as nginx has it: there is nobody to tell
        except asyncio.CancelledError:
            if not self._server.is_ending:
                raise
            await self._tell(context, self._server.unavailable(), sent)
        except Exception as error:
            told = error_of(error)
            if told.status == 500:
                _LOG.error("a request has failed", exc_info=error)
            await self._tell(context, told, sent)
        finally:
            self._log(context, scope)

    async def _tell(self, context: RequestContext, error: RequestError, sent: _Sent) -> None:
        context.status = error.status
        with suppress(TimeoutError):
            async with asyncio.timeout(self._server.limits.read_seconds):
                if sent.has_started:  # the status has been sent: the error comes as the last event
                    await sent({"type": "http.response.body", "body": event(error.body())})
                else:
                    await send_json(sent, error.body(), error.status, error.headers)

    async def _serve(
        self, context: RequestContext, scope: Any, receive: Receive, send: Send
    ) -> None:
        server, limits, headers = self._server, self._server.limits, headers_of(scope)
        context.client = server.client_of(headers, (scope.get("client") or ("",))[0])
        context.name = scope.get("path_params", {}).get("name", "")
        if not server.takes_requests:
            raise server.unavailable()
        if self._method == "POST":
            context.body = await read_body(headers, receive, limits.body_bytes, limits.body_seconds)

        async def work() -> None:
            found = self._answer(context)
            found = await found if isinstance(found, Awaitable) else found
            if isinstance(found, dict):
                await send_json(send, found)
            else:
                async with aclosing(found) as events:
                    await send_events(send, events, limits.read_seconds)

        try:
            async with asyncio.timeout(limits.seconds) as timer:
                await until_gone(receive, work())
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise RequestError(
                504, f"the answer has not ended within {limits.seconds:g} seconds"
            ) from error

    def _log(self, context: RequestContext, scope: Any) -> None:
        seconds = time.perf_counter() - context.began
        self._server.metrics.requests.labels(self._path, str(context.status)).inc()
        self._server.metrics.whole.observe(seconds)
        if _ACCESS.isEnabledFor(logging.INFO):
            line = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "client": self._server.log_name(context.client), "method": scope["method"],
                "path": self._path, "status": context.status, "seconds": round(seconds, 4), **context.usage,
            }  # fmt: skip
            _ACCESS.info("%s", json.dumps(line))


class _Sent:
    """The ASGI function ``send`` that knows whether the response has begun."""

    def __init__(self, send: Send):
        self._send, self.has_started = send, False

    async def __call__(self, message: Any) -> None:
        self.has_started = True
        await self._send(message)


class _Status:
    """Says whether something is so: 200 or 503."""

    def __init__(self, is_so: Callable[[], bool]):
        self._is_so = is_so

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        is_so = self._is_so()
        await send_json(send, {"status": "ok" if is_so else "not ready"}, 200 if is_so else 503)


class _Metrics:
    """The numbers for Prometheus."""

    def __init__(self, server: Server):
        self._server = server

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        data = await asyncio.to_thread(self._server.metrics.text)
        await send_bytes(send, data, "text/plain; version=0.0.4; charset=utf-8")


async def _not_found(request: Any, error: Any) -> Any:
    return _plain(RequestError(404, "there is no such path", code="unknown_url"))


async def _wrong_method(request: Any, error: Any) -> Any:
    return _plain(
        RequestError(405, f"this path does not take {request.method}", headers=error.headers)
    )


def _plain(error: RequestError) -> Any:
    return JSONResponse(error.body(), error.status, error.headers)
