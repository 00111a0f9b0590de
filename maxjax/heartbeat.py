"""Heartbeats from Python: they detect a lost process and raise PeerLostError before JAX aborts.

JAX has heartbeats too, but when one is missed it ends all other processes (SIGABRT) before Python
learns of it. So each process also counts up a number in the key-value store of JAX's coordination
service, from a thread; process 0 watches the numbers, and names a process whose number stands still
for a third of JAX's timeout. Processes that wait for it call :func:`check`. JAX's own heartbeats
come every half of the timeout, so a process may die just before one, and half of the timeout later
JAX ends the others.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from .errors import PeerLostError, first_line

JAX_TIMEOUT = 100  # seconds; JAX's default, where a program has called jax.distributed.initialize
CHECK_SECONDS = 0.25  # how often a process that waits asks whether the others live
_BEATS = 20  # beats within JAX's timeout
# Part of JAX's timeout after which a process without a beat is lost. With two beats, and the time until
# a waiting process checks, it must be less than half of the timeout.
_PATIENCE = 0.3
_ALIVE, _GONE = "maxjax/alive/", "maxjax/gone/"
RESTART = "Its own output says why; start all processes again."

_heart: Heart | None = None
_lock = threading.Lock()


class Heart:
    """The thread that tells the other processes that this one runs.

    Args:
        client: client of JAX's coordination service.
        process: id of this process; in process 0 the thread also watches the others.
        timeout: JAX's heartbeat timeout in seconds.
    """

    def __init__(self, client: Any, process: int, timeout: float):
        self.client, self.process = client, process
        self._interval, self._patience = timeout / _BEATS, timeout * _PATIENCE
        self._stopped = threading.Event()
        self._seen: dict[str, tuple[str, float]] = {}  # process -> its number, and since when
        self._thread = threading.Thread(target=self._run, name="maxjax-heartbeat", daemon=True)

    def start(self) -> None:
        """Starts the thread. It ends with the program, and then tells the other processes so."""
        self._thread.start()
        # Before JAX's own hook, which waits for all processes.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the thread, and tells the others that this process has ended."""
        self._stopped.set()
        self._thread.join(1.0)
        with contextlib.suppress(RuntimeError):
            self.client.key_value_set(f"{_GONE}{self.process}", "has ended", allow_overwrite=True)

    def _run(self) -> None:
        beats = 0
        with contextlib.suppress(RuntimeError):  # the service is gone, and JAX ends this process
            while not self._stopped.wait(self._interval if beats else 0.0):
                beats += 1
                self.client.key_value_set(
                    f"{_ALIVE}{self.process}", str(beats), allow_overwrite=True
                )
                if self.process == 0:
                    self._watch(time.monotonic())

    def _watch(self, now: float) -> None:
        for key, number in self.client.key_value_dir_get(_ALIVE):
            other = key.rpartition("/")[2]
            last, since = self._seen.get(other, ("", now))
            if number != last:
                self._seen[other] = number, now
            elif now - since > self._patience:
                self._seen[other] = number, now
                report(self.client, other, f"gave no sign of life for {self._patience:g} s")


def start(client: Any, process: int, timeout: float | None = None) -> None:
    """Starts the heartbeats of this process, unless they are started already.

    Args:
        client: client of JAX's coordination service.
        process: id of this process.
        timeout: JAX's heartbeat timeout in seconds.
    """
    global _heart
    with _lock:
        if _heart is None or _heart.client is not client:
            _heart = Heart(client, process, timeout or JAX_TIMEOUT)
            _heart.start()


def report(client: Any, process: int | str, why: str) -> None:
    """Tells all processes that one of them is lost, and ``why``: "is gone", "has ended" …"""
    with contextlib.suppress(RuntimeError):  # it was reported already
        client.key_value_set(f"{_GONE}{process}", why)


def check(client: Any, phase: str, members: Collection[int]) -> None:
    """Raises an error if one of the processes is known to be lost.

    Args:
        client: client of JAX's coordination service.
        phase: what this process is waiting in, for the message.
        members: ids of the processes that take part.

    Raises:
        PeerLostError: one of them, or the coordination service, is gone.
    """
    try:
        gone = client.key_value_dir_get(_GONE)
    except RuntimeError as error:
        raise service_lost(phase, error) from error
    for key, why in gone:
        process = key.rpartition("/")[2]
        if process.isdecimal() and int(process) in members:
            raise PeerLostError(f"{phase}: process {process} {why}. {RESTART}")


def service_lost(phase: str, error: Exception) -> PeerLostError:
    """The error for a coordination service, which process 0 hosts, that does not answer."""
    reason = first_line(error)
    return PeerLostError(
        f"{phase}: process 0, which hosts the coordination service, is gone or does not answer "
        f"({reason}). {RESTART}"
    )


class Coordinator(NamedTuple):
    """JAX's coordination service as this process sees it.

    Attributes:
        client: the client, with a key-value store.
        process: id of this process.
        count: number of processes.
    """

    client: Any
    process: int
    count: int


def coordinator() -> Coordinator | None:
    """JAX's coordination service; None in a program of one process."""
    import jax

    if not jax.distributed.is_initialized():
        return None
    from jax._src.distributed import global_state  # JAX has no public name for the service

    if global_state.client is None or (global_state.num_processes or 1) < 2:
        return None
    start(global_state.client, global_state.process_id)
    return Coordinator(global_state.client, global_state.process_id, global_state.num_processes)
