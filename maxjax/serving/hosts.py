"""The guard against DNS rebinding: a page of another site that reaches the server under a name of that site's own.

The browser takes such a page and the server for one site, so CORS does not protect the server. But the name is in the
``Host`` header.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from ..errors import UserInputError
from .errors import RequestError
from .http import Receive, Send, headers_of, send_json

_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:/]+))(?::\d*)?")


def is_loopback(name: str) -> bool:
    """Return whether an address or a name is of this machine alone.

    Example:
        >>> [is_loopback(name) for name in ("localhost", "127.8.0.1", "::1", "localhost.a.example", "0.0.0.0")]
        [True, True, True, False, False]
    """
    if name.lower() == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str | None:
    """Return the name in a ``Host`` header, without port, brackets and capitals; None if there is none.

    Example:
        >>> [host_name(header) for header in ("Localhost:8000", "[::1]", "a.example/b")]
        ['localhost', '::1', None]
    """
    found = _HOST.fullmatch(header)
    return None if found is None else (found[1] or found[2]).lower()


def checked_hosts(hosts: Sequence[str]) -> frozenset[str]:
    """Return the names without brackets and capitals.

    Raises:
        UserInputError: one has a port, or is no name.

    Example:
        >>> checked_hosts(["A.example", "[fd00::1]"]) == {"a.example", "fd00::1"}
        True
    """
    found = []
    for host in hosts:
        name = host.lower().removeprefix("[").removesuffix("]")
        if host_name(f"[{name}]" if name.count(":") > 1 else name + ":1") != name:
            raise UserInputError(
                f"a host must be a name or an address without a port, not {host!r}"
            )
        found.append(name)
    return frozenset(found)


class HostGuard:
    """ASGI middleware: requests to other hosts than these and this machine's loopback names get status 403."""

    def __init__(self, app: Any, hosts: frozenset[str]):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = host_name(headers_of(scope).get("host", ""))
            if name is None or not (is_loopback(name) or name in self._hosts):
                error = RequestError(
                    403, "the server does not answer for the host in the Host header", code="host_not_allowed"
                )  # fmt: skip
                return await send_json(send, error.body(), error.status)
        return await self._app(scope, receive, send)
