"""Follower: repeats in this process what the engine of the first of several processes calls.

The first process has the queue, the texts and their grammars, and decides what is next. The others have the same memory
on their devices, and call the same programs with the same arrays: they know no text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ...errors import PeerFailedError, first_line
from ...heartbeat import CHECK_SECONDS
from ...lockstep import Broadcast
from ...lora.side_by_side import Updates, updates_of
from ..isolation import isolated
from .adapters import updates_digest
from .draft import ModelGuesses
from .messages import decoded
from .programs import decode, read, read_scored, read_tokens
from .scheduler import Scheduler
from .speculation import verify

_PROGRAMS: dict[str, Any] = {
    "read": read, "read_scored": read_scored, "read_tokens": read_tokens, "decode": decode, "verify": verify,
}  # fmt: skip


class Follower:
    """The thread of an engine that follows another one, until that is closed.

    Args:
        scheduler: the scheduler, of which the memory and the programs are used.
        together: the calls that it repeats.
    """

    def __init__(self, scheduler: Scheduler, together: Broadcast):
        self.scheduler, self._together = scheduler, together
        self.thread = threading.Thread(target=self.run, name="maxjax.Engine", daemon=True)
        self.is_closed, self.error = False, None
        self._updates: Updates | None = None  # of the adapter that was read last
        memory, adapters = scheduler.memory, scheduler.adapters
        self._calls: dict[str, Callable[..., Any]] = {
            "run": self._run,
            "guess": self._guess,
            "put words": memory.put_words,
            "drop words": memory.forget_words,
            "read adapter": self._read_adapter,
            "add adapter": self._add_adapter,
            "remove adapter": adapters.remove,
        }

    def run(self) -> None:
        """Repeats calls until the first process closes its engine."""
        try:
            with self._together, isolated():
                while (message := decoded(self._together.told())) != ["close"]:
                    name, *args = message
                    # A collective that has failed is noticed while its result is waited for.
                    self._together.fetch(self._calls[name](*args))
        except BaseException as error:
            self.error = error
        finally:
            self.is_closed = True
            self._together.close()
            self.scheduler.close()

    def _run(self, program: str, arrays: Any, args: list[Any], places: Any) -> Any:
        return self.scheduler.calls.dispatch(_PROGRAMS[program], arrays, args, places)

    def _guess(self, program: str, arrays: Any, args: list[Any]) -> Any:
        assert isinstance(self.scheduler.speculation, ModelGuesses)
        return self.scheduler.speculation.dispatch(_PROGRAMS[program], arrays, args)

    def _read_adapter(self, path: str) -> None:
        self._updates = None
        try:
            self._updates = updates_of(self.scheduler.memory.model, path)
            found = updates_digest(self._updates)
        except Exception as error:
            found = f"{type(error).__name__}: {first_line(error)}"
        self._together.gather(found)

    def _add_adapter(self, name: str, in_use: list[int]) -> None:
        assert self._updates is not None
        self.scheduler.adapters.add(name, self._updates, in_use)

    def close(self) -> None:
        """Waits until the first process closes its engine.

        Raises:
            PeerFailedError, PeerLostError: it has failed or is lost.
        """
        try:
            while self.thread.is_alive():  # each wait has a limit, so that Ctrl-C is noticed
                self.thread.join(CHECK_SECONDS)
        except BaseException as error:
            self.stop(error)
            raise
        if self.error is not None:
            raise self.error

    def stop(self, error: BaseException | None = None) -> None:
        """Leaves the others, which cannot go on without this process and get an error.

        Args:
            error: why; None: this program ends.
        """
        self._together.stop(
            error or PeerFailedError("its program has ended before the engine was closed")
        )
