"""Fetches the pictures that requests name by addresses of a network, from hosts that the operator allows.

A client chooses the address and could make the server ask what only the server reaches (SSRF). So the host must be
allowed, all its addresses must be public, and the connection goes to an address that was checked; the same holds for
each redirect. Bytes and time are limited, and what comes must begin as a picture. Proxies of the environment are not
asked.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any, NamedTuple

from ..errors import UserInputError
from ..images.decode import FORMATS, format_name
from .errors import RequestError

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 3
_LONGEST = 8192  # characters of an address
_AT_ONCE = 8  # requests whose pictures are fetched
_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]*:[0-9a-f:.]*")
_NAT64 = IPv6Network("64:ff9b::/96")  # the last 32 bits are an address of version 4
# Characters of the path and the query that stay as they are.
_SAFE = "/?%:@!$&'()*+,;=-._~"

_Address = IPv4Address | IPv6Address


@dataclass(frozen=True)
class FetchLimits:
    """What the pictures of a request may take together.

    Attributes:
        size: largest number of bytes.
        seconds: longest time.
    """

    size: int = 20 << 20
    seconds: float = 20.0


def is_public(address: _Address) -> bool:
    """Return whether an address is one that anybody in the internet may be asked at.

    Example:
        >>> [is_public(ip_address(one)) for one in ("93.184.216.34", "10.0.0.1", "::ffff:127.0.0.1", "224.0.0.1")]
        [True, False, False, False]
    """
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if not all(is_public(one) for one in inner if one is not None):
            return False
        if address.is_site_local:
            return False
    is_special = address.is_multicast or address.is_reserved or address.is_loopback
    return address.is_global and not (is_special or address.is_link_local)


class PictureFetcher:
    """Fetches pictures from allowed hosts.

    Args:
        patterns: hosts: a name or an address, ``*.example.org`` for all names below one, ``*`` for all.
        limits: what the pictures of a request may take together.
        is_public: whether an address may be asked.

    Raises:
        UserInputError: a pattern is neither of these.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        limits: FetchLimits | None = None,
        is_public: Callable[[_Address], bool] = is_public,
    ):
        self._patterns = [_checked_pattern(one) for one in patterns]
        self._limits, self._is_public = limits or FetchLimits(), is_public
        self._threads = ThreadPoolExecutor(_AT_ONCE, "maxjax-pictures")

    async def filled(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a chat with the bytes of its pictures in place of their addresses.

        Raises:
            RequestError: an address is not allowed, or a picture cannot be fetched.
        """
        places = [
            (i, j, part["image"])
            for i, message in enumerate(messages)
            if isinstance(message["content"], list)
            for j, part in enumerate(message["content"])
            if part["type"] == "image" and is_fetched(part["image"])
        ]
        if not places:
            return messages
        task = _Task(self._limits)
        urls = [(url, f"messages[{i}].content[{j}].image_url") for i, j, url in places]
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, self._fetched, urls, task)
        finally:
            task.deadline = 0.0  # nobody waits for the rest
        filled = [
            {**one, "content": [*one["content"]]} if isinstance(one["content"], list) else one
            for one in messages
        ]
        for (i, j, _), data in zip(places, found, strict=True):
            filled[i]["content"][j] = {"type": "image", "image": data}
        return filled

    def _fetched(self, urls: Sequence[tuple[str, str]], task: _Task) -> list[bytes]:
        task.deadline = task.deadline and time.monotonic() + self._limits.seconds
        found: dict[str, bytes] = {}
        for url, place in urls:
            try:
                found[url] = found[url] if url in found else self._fetch(url, task)
            except _FetchError as error:
                raise _refused(place, str(error)) from error
            except TimeoutError as error:
                why = f"it did not come within {self._limits.seconds:g} seconds"
                raise _refused(place, why) from error
            except (OSError, ValueError, http.client.HTTPException) as error:
                # The details may tell of the server's network.
                raise _refused(place, "the host does not answer as it should") from error
        return [found[url] for url, _ in urls]

    def _fetch(self, url: str, task: _Task) -> bytes:
        """The bytes at an address.

        Raises:
            _FetchError: it is not allowed, or has no picture.
            OSError, ValueError, HTTPException: the host cannot be reached, or does not speak HTTP.
        """
        for _ in range(_MOST_REDIRECTS + 1):
            place = self._allowed(url)
            family, address = self._resolved(place)
            with socket.socket(family, socket.SOCK_STREAM) as plain:
                plain.settimeout(task.left())
                plain.connect(address)
                with _secured(plain, place, task) as connected:
                    response = _asked(connected, place, task)
                    if response.status not in _REDIRECTS:
                        return _picture(response, task)
                    location = response.headers.get("location")
            if location is None:
                raise _FetchError("it is redirected to nowhere")
            url = urllib.parse.urljoin(url, location)
        raise _FetchError(f"it is redirected more than {_MOST_REDIRECTS} times")

    def _allowed(self, url: str) -> _Place:
        """The parts of an address, which must be allowed."""
        if len(url) > _LONGEST or "\\" in url or any(c <= " " or c == "\x7f" for c in url):
            raise _FetchError("the address is not valid")
        try:
            parts = urllib.parse.urlsplit(url)
            port, host = parts.port, (parts.hostname or "").removesuffix(".")
            host = host if ":" in host else host.encode("idna").decode("ascii")
        except ValueError as error:
            raise _FetchError("the address is not valid") from error
        if parts.scheme not in ("http", "https"):
            raise _FetchError("an address must begin with http:// or https://")
        if parts.username is not None or parts.password is not None:
            raise _FetchError("an address with a name or a password is not supported")
        if not host or not any(_matches(host, pattern) for pattern in self._patterns):
            raise _FetchError("the server fetches no pictures from this host")
        path = urllib.parse.quote(parts.path or "/", _SAFE)
        query = f"?{urllib.parse.quote(parts.query, _SAFE)}" if parts.query else ""
        is_secure = parts.scheme == "https"
        return _Place(is_secure, host, port or (443 if is_secure else 80), path + query)

    def _resolved(self, place: _Place) -> tuple[int, Any]:
        """An address of a host, all of whose addresses must be public."""
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            found = []
        addresses = [ip_address(str(one[4][0]).partition("%")[0]) for one in found]
        # One message for both: else a client could learn which names the server's own network has.
        if not addresses or not all(map(self._is_public, addresses)):
            raise _FetchError("the host has no public address, or another one too")
        return found[0][0], found[0][4]


def is_fetched(picture: Any) -> bool:
    """Return whether the picture of a part is an address of a network."""
    return isinstance(picture, str) and re.match(r"https?://", picture, re.IGNORECASE) is not None


class _FetchError(Exception):
    """Why a picture is not fetched."""


def _refused(place: str, why: str) -> RequestError:
    return RequestError(400, f"{place}: {why}", param=place, code="invalid_image_url")


class _Place(NamedTuple):
    is_secure: bool
    host: str
    port: int
    target: str


class _Task:
    """The time and the bytes that are left for the pictures of a request."""

    def __init__(self, limits: FetchLimits):
        self.limits, self.size = limits, limits.size
        self.deadline = time.monotonic() + limits.seconds

    def left(self) -> float:
        """Seconds that are left, more than 0.

        Raises:
            TimeoutError: none are.
        """
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds


def _checked_pattern(pattern: str) -> str:
    found = pattern.lower().removeprefix("[").removesuffix("]")
    if not _PATTERN.fullmatch(found):
        raise UserInputError(
            f"a host of pictures must be a name, an address, *.name or *, without a port, not {pattern!r}"
        )
    return found


def _matches(host: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return pattern in ("*", host)


# --- HTTP ---------------------------------------------------------------------------------------


def _secured(plain: socket.socket, place: _Place, task: _Task) -> socket.socket:
    """The connection, with TLS if the address says so, and a certificate for the host's name."""
    if not place.is_secure:
        return plain
    plain.settimeout(task.left())
    return _trusted().wrap_socket(plain, server_hostname=place.host)


@cache
def _trusted() -> ssl.SSLContext:
    """The authorities that this machine trusts."""
    return ssl.create_default_context()


def _asked(connected: socket.socket, place: _Place, task: _Task) -> http.client.HTTPResponse:
    """The beginning of the answer to a request."""
    connection = http.client.HTTPConnection(place.host, place.port)
    connection.default_port = 443 if place.is_secure else 80
    connection.sock = _Timed(connected, task)
    headers = {"accept": "image/*", "connection": "close", "user-agent": "maxjax"}
    connection.request("GET", place.target, headers=headers)
    return connection.getresponse()


def _picture(response: http.client.HTTPResponse, task: _Task) -> bytes:
    """The body of an answer, which must begin as a picture."""
    if response.status != 200:
        raise _FetchError(f"the host answers with status {response.status}")
    too_large = _FetchError(
        f"the pictures of a request may have {task.limits.size:,} bytes together"
    )
    if (response.length or 0) > task.size:
        raise too_large
    data = bytearray()
    while piece := response.read(1 << 16):
        data += piece
        if len(data) > task.size:
            raise too_large
    if response.length:
        raise _FetchError("the host has ended the picture too early")
    task.size -= len(data)
    if format_name(bytes(data[:16])) is None:  # nothing of it is told: it may be a secret
        raise _FetchError(f"what the host sends is no picture (supported: {FORMATS})")
    return bytes(data)


class _Timed:
    """A socket as ``http.client`` uses it; each read has the time that is left for all of them."""

    def __init__(self, connected: socket.socket, task: _Task):
        self._socket, self._task = connected, task

    def sendall(self, data: bytes) -> None:
        """Sends a request."""
        self._socket.settimeout(self._task.left())
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """What is received, as a file."""
        return io.BufferedReader(_Received(self._socket, self._task))

    def close(self) -> None:
        """Nothing: whoever has connected the socket closes it."""


class _Received(io.RawIOBase):
    """What a socket receives."""

    def __init__(self, connected: socket.socket, task: _Task):
        self._socket, self._task = connected, task

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(self._task.left())
        return self._socket.recv_into(buffer)
