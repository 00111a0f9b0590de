"""Heartbeats from Python: a lost process becomes a PeerLostError in all others, and none of them hangs.

JAX has heartbeats too, but when one is missed it ends all other processes (SIGABRT) before Python learns of it. So each
process also counts up a number in the key-value store of JAX's coordination service, from a thread; process 0 watches
the numbers, and the others that of process 0. They name a process whose number stands still for a third of the timeout.
Processes that wait for it call :func:`check`, which raises the error. Those that compute, compile or wait elsewhere are
ended by their thread when the timeout is over, with the error as their last line. JAX's own timeout is longer
(:func:`timeout_of_jax`); it ends what cannot end itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from .coordination import ServiceProcess
from .errors import PeerLostError, first_line

JAX_TIMEOUT = 100  # seconds; JAX's default, where a program has called jax.distributed.initialize
CHECK_SECONDS = 0.25  # how often a process that waits asks whether the others live
_BEATS = 20  # beats within the timeout
# Part of the timeout after which a process without a beat is lost.
_PATIENCE = 0.3
_ALIVE, _GONE, _DEAD = "maxjax/alive/", "maxjax/gone/", "maxjax/dead/"
_ENDED = "has ended"
RESTART = "Its own output says why; start all processes again."

_heart: Heart | None = None
_has_lost = False  # whether this process knows that another one is lost
_lock = threading.Lock()


class Heart:
    """The threads that tell the other processes that this one runs, and end it if one of them is lost.

    Args:
        client: client of JAX's coordination service.
        process: id of this process; it watches process 0, or as process 0 all others.
        timeout: seconds without a sign of life of one process after which all others are ended.
    """

    def __init__(self, client: Any, process: int, timeout: float):
        self.client, self.process = client, process
        self._timeout, self._interval, self._patience = (
            timeout,
            timeout / _BEATS,
            timeout * _PATIENCE,
        )
        self._stopped = threading.Event()
        self._seen: dict[str, tuple[str, float]] = {}  # process -> its number, and since when
        self._answered = time.monotonic()  # when the service has last answered
        self._threads = [
            threading.Thread(target=run, name="maxjax-heartbeat", daemon=True)
            for run in (self._beat, self._guard)
        ]

    def start(self) -> None:
        """Starts the threads. They end with the program, and then tell the other processes so."""
        for thread in self._threads:
            thread.start()
        # Before JAX's own hook, which waits for all processes.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the threads, and tells the others that this process has ended.

        If one of them is lost, the program ends here: JAX would wait for it until it aborts.
        """
        self._stopped.set()
        for thread in self._threads:
            thread.join(1.0)
        if _has_lost and not _hosts_service():
            _end()
        with contextlib.suppress(RuntimeError):
            self.client.key_value_set(f"{_GONE}{self.process}", _ENDED, allow_overwrite=True)

    def _beat(self) -> None:
        beats = 0
        with contextlib.suppress(RuntimeError):  # the service is gone, and JAX ends this process
            while not self._stopped.wait(self._interval if beats else 0.0):
                beats += 1
                self.client.key_value_set(
                    f"{_ALIVE}{self.process}/beats", str(beats), allow_overwrite=True
                )
                self._watch(time.monotonic())
                for key, why in self.client.key_value_dir_get(_DEAD):
                    self._lose(f"process {key.removeprefix(_DEAD)} {why}")
                self._answered = time.monotonic()

    def _watch(self, now: float) -> None:
        if self.process == 0:
            found = self.client.key_value_dir_get(_ALIVE)
        else:
            found = self.client.key_value_dir_get(f"{_ALIVE}0/")
        for key, number in found:
            other = key.removeprefix(_ALIVE).partition("/")[0]
            last, since = self._seen.get(other, ("", now))
            if number != last:
                self._seen[other] = number, now
            elif now - since > self._patience:
                report(self.client, other, _silent(self._patience))
                if now - since > self._timeout and not self._has_ended(other):
                    self._set(f"{_DEAD}{other}", _silent(self._timeout))

    def _has_ended(self, process: str) -> bool:
        """Whether a process has ended as it should; JAX then decides how long the others may go on."""
        return (f"{_GONE}{process}", _ENDED) in self.client.key_value_dir_get(_GONE)

    def _set(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):  # another process was first
            self.client.key_value_set(key, value)

    def _guard(self) -> None:
        """Ends this process if the service does not answer, as when the machine of process 0 is gone."""
        while not self._stopped.wait(self._interval):
            if time.monotonic() - self._answered > self._timeout:
                self._lose(
                    f"process 0, which has the coordination service, {_silent(self._timeout)}"
                )

    def _lose(self, what: str) -> None:
        """Ends this process, which is not in a call that raises the error, or has got it and goes on."""
        if self._stopped.is_set():
            return
        with contextlib.suppress(Exception):  # there may be no stderr
            print(f"{PeerLostError.__module__}.PeerLostError: {what}. {RESTART}", file=sys.stderr)
        _end()


def _silent(seconds: float) -> str:
    return f"gave no sign of life for {seconds:g} s"


def _end() -> None:
    """Ends this process without JAX's hook at its end."""
    logging.shutdown()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or None
            file.flush()
    os._exit(1)


def timeout_of_jax(timeout: int) -> int:
    """The heartbeat timeout of JAX with which it does not end a process before maxjax does.

    JAX's heartbeats come every half of its timeout, so one may be missed after half of it.
    """
    return 3 * timeout


def start(client: Any, process: int, timeout: float | None = None) -> None:
    """Starts the heartbeats of this process, unless they are started already.

    Args:
        client: client of JAX's coordination service.
        process: id of this process.
        timeout: seconds without a sign of life after which a process is dead; by default that of JAX.
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
            raise lost(f"{phase}: process {process} {why}. {RESTART}")


def lost(message: str) -> PeerLostError:
    """The error for a process that is lost; this one cannot end as JAX wants it to from now on."""
    global _has_lost
    _has_lost = True
    return PeerLostError(message)


def _hosts_service() -> bool:
    """Whether JAX's coordination service is in this process, without which the others are ended."""
    from jax._src.distributed import global_state  # JAX has no public name for the service

    return global_state.service is not None and not isinstance(global_state.service, ServiceProcess)


def service_lost(phase: str, error: Exception) -> PeerLostError:
    """The error for a coordination service, which process 0 hosts, that does not answer."""
    reason = first_line(error)
    return lost(
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
