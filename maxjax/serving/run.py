"""Listens on a port with uvicorn, and ends without cutting answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import UserInputError
from .server import Server

# A connection must send the headers of a request within so many seconds, and may be idle for so long.
_HEADER_S, _IDLE_S = 30, 65
# A client must read a whole response within so many seconds.
_READ_S = 60
_HEADER_BYTES = 64 << 10


class _Protocol(H11Protocol):
    """HTTP over a connection that is closed if the headers of a request do not come in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None and not self.transport.is_closing():
            self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(_READ_S, self._drop_if_unread)
        if (
            self.cycle is not None and not self.cycle.response_complete
        ):  # the next one was sent already
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _drop_if_unread(self) -> None:
        """Closes the connection of a client that has not read what it was sent."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(_HEADER_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Uvicorn(uvicorn.Server):
    """Takes no new requests after the first signal or a failure, and ends at the second signal."""

    def __init__(self, config: uvicorn.Config, server: Server, started: Callable[[str, int], None]):
        super().__init__(config)
        self._served, self._tell = server, started

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        self._tell(host, port)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._served.is_ending

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals go to the main thread
            return
        before = {
            one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            self.force_exit = True
            for task in list(self.server_state.tasks):
                task.cancel()
        self._served.is_ending = self.should_exit = True


def run(
    application: Any, server: Server, host: str, port: int, drain: float,
    started: Callable[[str, int], None] = lambda host, port: None,
) -> None:  # fmt: skip
    """Answers requests until SIGTERM or SIGINT, or until the server has failed.

    Args:
        application: the ASGI application.
        server: what it answers with.
        host, port: where it listens.
        drain: seconds in which answers may end after the signal.
        started: is called with the address and the port when it listens.

    Raises:
        UserInputError: it cannot listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserInputError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        application, host=host, port=port, http=_Protocol, ws="none", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, lifespan="off", timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=max(1, round(drain)), h11_max_incomplete_event_size=_HEADER_BYTES,
    )  # fmt: skip
    with listener:
        _Uvicorn(config, server, started).run([listener])
