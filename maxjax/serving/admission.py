"""Admission: the queue in front of the engine. It is bounded, and clients take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from .errors import RequestError


class _Waiting(NamedTuple):
    count: int
    turn: asyncio.Future[None]


class Admission:
    """Lets so many answers into the engine at once, and so many wait.

    Those that wait enter by priority, the smallest number first; clients with the same priority take turns, however
    many requests each has sent.

    Args:
        running: largest number of answers in the engine. With more than it has slots, a slot that ends finds the next
            answer there.
        waiting: largest number of answers that wait.

    Example:
        >>> async def enter():
        ...     admission = Admission(running=1, waiting=4)
        ...     async with admission.place("a"):
        ...         return admission.running, admission.waiting
        >>> asyncio.run(enter())
        (1, 0)
    """

    def __init__(self, running: int, waiting: int):
        self._most_running, self._most_waiting = running, waiting
        self.running = self.waiting = 0
        # Of each priority the clients, in the order of their turns.
        self._queues: dict[int, OrderedDict[str, deque[_Waiting]]] = {}

    @asynccontextmanager
    async def place(self, client: str, count: int = 1, priority: int = 0) -> AsyncIterator[None]:
        """Has ``count`` places of a client, as :meth:`enter`, and gives them back afterwards."""
        leave = await self.enter(client, count, priority)
        try:
            yield
        finally:
            leave()

    async def enter(self, client: str, count: int = 1, priority: int = 0) -> Callable[[], None]:
        """Waits until ``count`` answers of a client may be in the engine.

        More than may be there at once take all places, and wait for each other in the engine.

        Returns:
            A function that gives the places back; only its first call does.

        Raises:
            RequestError: too many answers are waiting.
        """
        count = min(count, self._most_running)
        if self.waiting or self.running + count > self._most_running:
            await self._wait(client, count, priority)
        else:
            self.running += count
        has_left = False

        def leave() -> None:
            nonlocal has_left
            if not has_left:
                has_left = True
                self.running -= count
                self._admit()

        return leave

    async def _wait(self, client: str, count: int, priority: int) -> None:
        if self.waiting + count > self._most_waiting:
            raise RequestError(
                429, "the server has too many requests: try again later", code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )  # fmt: skip
        entry = _Waiting(count, asyncio.get_running_loop().create_future())
        clients = self._queues.setdefault(priority, OrderedDict())
        clients.setdefault(client, deque()).append(entry)
        self.waiting += count
        self._admit()  # it may be more urgent than those that wait
        try:
            await entry.turn
        except asyncio.CancelledError:
            if not entry.turn.cancelled():  # its turn had come
                self.running -= count
            elif entry in self._queues.get(priority, {}).get(client, ()):
                self._remove(client, priority, entry)
            self._admit()
            raise

    def _remove(self, client: str, priority: int, entry: _Waiting) -> None:
        clients = self._queues[priority]
        clients[client].remove(entry)
        self.waiting -= entry.count
        if not clients[client]:
            del clients[client]
        if not clients:
            del self._queues[priority]

    def _admit(self) -> None:
        """Lets those in whose turn it is, as long as there is room."""
        while self._queues:
            priority = min(self._queues)
            client, entries = next(iter(self._queues[priority].items()))
            entry = entries[0]
            if self.running + entry.count > self._most_running:
                return
            self._remove(client, priority, entry)
            if client in self._queues.get(priority, ()):
                self._queues[priority].move_to_end(client)
            if not entry.turn.cancelled():
                self.running += entry.count
                entry.turn.set_result(None)
