"""Reads the bodies of requests and sends answers, whole or as events, to readers that may be slow or go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from .errors import RequestError

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class ClientGoneError(Exception):
    """The client has closed the connection, or reads no more."""


def headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """The headers of a request by their names in lower case; of several with one name the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(
    headers: Mapping[str, str], receive: Receive, limit: int, seconds: float
) -> bytes:
    """Reads the JSON of a request.

    Raises:
        RequestError: it is not JSON by its type, has more than ``limit`` bytes, or takes longer than ``seconds``.
        ClientGoneError: the client has gone.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # pages of other sites could send anything else without asking
        raise RequestError(415, "the content-type must be application/json")
    too_large = RequestError(413, f"the body is larger than {limit:,} bytes")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise too_large
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise RequestError(408, f"the body did not come within {seconds:g} seconds") from None


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs ``work``, and cancels it when the client goes.

    Raises:
        ClientGoneError: the client has gone.
    """
    working = asyncio.ensure_future(work)
    going = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        working.result()
    finally:
        for task in (working, going):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(
    send: Send, body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """Sends a JSON object, or text that is JSON already."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    await send_bytes(send, data, "application/json", status, headers)


async def send_bytes(
    send: Send, data: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """Sends a whole response."""
    named = {"content-type": kind, "content-length": str(len(data)), **(headers or {})}
    await send({"type": "http.response.start", "status": status, "headers": _encoded(named)})
    await send({"type": "http.response.body", "body": data})


async def send_events(send: Send, events: AsyncIterator[bytes], seconds: float) -> None:
    """Sends server-sent events as they come; headers go with the first one, so that an error before it has a status.

    Args:
        send: the ASGI function.
        events: the events, encoded.
        seconds: how long the client may take to read what it has been sent.

    Raises:
        ClientGoneError: it has taken longer.
    """
    started = False
    async for event in events:
        try:
            async with asyncio.timeout(seconds):
                if not started:
                    named = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store",
                             "x-accel-buffering": "no"}  # fmt: skip
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": _encoded(named)}
                    )
                    started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except TimeoutError:
            raise ClientGoneError from None
    await send({"type": "http.response.body", "body": b""})


def event(body: Any, name: str | None = None) -> bytes:
    """A server-sent event (WHATWG HTML, section 9.2).

    Example:
        >>> event({"a": 1})
        b'data: {"a":1}\\n\\n'
        >>> event("[DONE]")
        b'data: [DONE]\\n\\n'
    """
    data = body.encode() if isinstance(body, str) else msgspec.json.encode(body)
    return (
        (b"" if name is None else b"event: " + name.encode() + b"\n") + b"data: " + data + b"\n\n"
    )


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
