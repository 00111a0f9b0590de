"""JAX's coordination service in a process of its own, so that it outlives process 0 of several.

JAX runs the service in process 0. If that one dies, JAX ends all others within a fraction of a second, before Python
learns of it: no exception says why. Here process 0 starts a small program that runs the service, and the loss of
process 0 is like that of any other one. The program ends when process 0 says so or, if that one has died, when the
connections of all others are closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

_READY, _STOP = b"ready\n", b"stop\n"
_LOOK_SECONDS = 0.5  # how often the service looks whether process 0 lives
_END_SECONDS = 5  # that process 0 waits for the service to end
_ESTABLISHED = "01"  # in /proc/net/tcp


class ServiceProcess:
    """The service in another process; JAX's ``State.service`` in process 0.

    Args:
        address: "host:port" at which the service listens.
        processes: number of processes.
        heartbeat, shutdown: JAX's timeouts in seconds.
        recoverable: whether processes that have died may come back.

    Raises:
        RuntimeError: it does not start.
    """

    def __init__(
        self, address: str, processes: int, heartbeat: int, shutdown: int, recoverable: bool
    ):
        arguments = [address, processes, heartbeat, shutdown, int(recoverable)]
        # Its parent's path has jaxlib; a session of its own gets no Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != _READY:
            code = self._process.wait()
            raise RuntimeError(
                f"the coordination service does not start at {address}: exit status {code}"
            )

    def shutdown(self) -> None:
        """Ends the service."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(_STOP)
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def service_in_another_process() -> Iterator[None]:
    """A block in which ``jax.distributed.initialize`` starts its service in another process."""
    from jax._src import distributed  # JAX has no public name for the service

    plain = getattr(distributed, "_jax", None)
    if plain is None or not sys.executable:
        yield  # another version of JAX: the service is in process 0
        return
    distributed.__dict__["_jax"] = _Substitute(plain)
    try:
        yield
    finally:
        distributed.__dict__["_jax"] = plain


class _Substitute:
    """JAX's extension module, but for the service."""

    def __init__(self, plain: Any):
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def get_distributed_runtime_service(
        self,
        address: str,
        num_nodes: int,
        *,
        heartbeat_timeout: int,
        shutdown_timeout: int,
        recoverable: bool = False,
    ) -> Any:
        """The service, in another process if there are several."""
        options = address, num_nodes, heartbeat_timeout, shutdown_timeout, recoverable
        if num_nodes > 1:
            return ServiceProcess(*options)
        return _service(self._plain, *options)


def _service(
    jax: Any, address: str, processes: int, heartbeat: int, shutdown: int, recoverable: bool
) -> Any:
    return jax.get_distributed_runtime_service(
        address,
        processes,
        heartbeat_timeout=heartbeat,
        shutdown_timeout=shutdown,
        recoverable=recoverable,
    )


# --- the program of the service ---------------------------------------------------------------


def _serve(address: str, processes: str, heartbeat: str, shutdown: str, recoverable: str) -> None:
    """Runs the service until process 0 says so, or has died and nobody is connected any more."""
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  # without the rest of JAX

    parent = os.getppid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may be a preemption notice to all
    service = _service(
        _jax, address, int(processes), int(heartbeat), int(shutdown), recoverable == "1"
    )
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
            if os.read(sys.stdin.fileno(), len(_STOP)) == _STOP:
                return service.shutdown()
            break
    # Those who do not end themselves are ended by JAX.
    deadline = time.monotonic() + int(heartbeat)
    while time.monotonic() < deadline and _is_connected(int(address.rpartition(":")[2])):
        time.sleep(_LOOK_SECONDS)
    os._exit(0)  # its destructor would wait for the processes


def _is_connected(port: int) -> bool:
    """Whether somebody is connected to this port of the machine; True if that is not known."""
    try:
        for table in ("tcp", "tcp6"):
            with open(f"/proc/net/{table}") as file:
                for line in file.readlines()[1:]:
                    _, local, _, state = line.split()[:4]
                    if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                        return True
    except OSError:
        return True
    return False


if __name__ == "__main__":
    _serve(*sys.argv[1:])
