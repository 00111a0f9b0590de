"""Programs of several processes: `jax.distributed` with checked arguments and clear errors.

JAX's coordination service does the work; this file chooses its timeouts, refuses arguments that
would make it hang or crash, and names the process that is lost.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from . import heartbeat
from .agreement import agreed as agreed
from .agreement import same_program as same_program
from .coordination import service_in_another_process
from .errors import PeerLostError, ProgramMismatchError, UserInputError, checked_integer, first_line

RETRY_SECONDS = 0.2
# Texts of JAX's errors when another process does not answer. Gloo and MPI transfer arrays between
# CPUs ("Gloo all-reduce failed: …", "Gloo AllGather failed: …"), NCCL and RCCL between GPUs; status
# codes and heartbeats are the coordination service's. NCCL's other errors are about this process,
# for example too little memory or an old driver.
_LOST = re.compile(
    r"""\bGloo\ [^:\n]*\ failed:\s
      | \bMPI\ error:\s
      | \b[NR]CCL\ [^\n]*(?:remote\ process\ exited|unhandled\ system\ error)
      | \bnccl(?:Remote|System)Error\b
      | \b(?:UNAVAILABLE|DEADLINE_EXCEEDED):\s
      | \b(?:UNKNOWN|INTERNAL|ABORTED|CANCELLED|FAILED_PRECONDITION):\ [^\n]*(?i:
          connection\ (?:closed|reset|refused|timed\ out) | socket\ closed | broken\ pipe
        | heartbeat | in\ error\ state
        | coordination\ service\ (?:has\ |is\ )?(?:been\ )?(?:stopped|shut|encountered))""",
    re.VERBOSE,
)
# Gloo's error if two processes send different messages: both run, but different programs.
_DIFFERENT = re.compile(r"\bGloo [^:\n]* failed: .*\benforce fail\b")
# Gloo's error if a process is connected but sends nothing: it hangs, or runs another program.
_SILENT = re.compile(r"\bGloo [^:\n]* failed: .*\b(?:Read timeout|Timed out waiting)\b")
# Process ids in these errors: "Task 3 heartbeat timeout", or one id per line.
_ONE_ID = re.compile(r"\bTask (\d+) heartbeat timeout")
_IDS = re.compile(r"(?:stopped sending heartbeats\)|timed out task names):\s*\n((?:\d+\n)+)")

# Seconds that a process waits for the others to make the same call of maxjax.
ARRIVAL_SECONDS = 300
_arrival = ARRIVAL_SECONDS

# (process_id, num_processes) as given to initialize. JAX tells them only through private names, or
# after it has started the devices, which may hang if another process is lost.
_world: tuple[int, int] | None = None


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    initialization_timeout: int = 60,
    heartbeat_timeout: int = 20,
    shutdown_timeout: int = 30,
    arrival_timeout: int = ARRIVAL_SECONDS,
) -> None:
    """Makes this process one of several that share one set of devices: `jax.distributed`.

    Each process calls it once, before anything that starts JAX's devices. Afterwards
    ``jax.devices()`` are those of all processes and ``jax.local_devices()`` those of this one.

    Args:
        coordinator_address: "host:port" (IPv6: "[address]:port") at which process 0 listens, the
            same in all processes; by default ``$JAX_COORDINATOR_ADDRESS``. At a loopback address
            only processes of this machine can reach it; otherwise it listens on all interfaces,
            and everyone who can reach the port is trusted.
        num_processes: number of processes.
        process_id: id of this process, 0 to ``num_processes - 1``.
        local_device_ids: ids of the GPUs that this process may use; None for all of them.
        initialization_timeout: whole seconds to wait for the coordinator and the other processes.
        heartbeat_timeout: whole seconds without a heartbeat after which a process is considered
            dead and all others are ended.
        shutdown_timeout: whole seconds that a finished process waits for the others; then JAX
            ends all of them, including those that are still running.
        arrival_timeout: whole seconds that a call which all processes make together
            (``maxjax.generate``, ``maxjax.load`` with a mesh, …) waits for live processes.

    On Slurm, Open MPI, Kubernetes and TPUs JAX fills in those of the first four that are None.

    Raises:
        UserInputError: the address is not "host:port", the host name is a loopback address on this
            machine, the port is taken, the id is out of range, or a timeout is not a positive
            whole number.
        RuntimeError: it was called a second time, or after JAX has started its devices.
        PeerLostError: nothing listens at the coordinator's address within
            ``initialization_timeout`` (in processes other than 0, if address and id are given).
            If a process registers without an id, or another one never registers, JAX raises no
            error: it prints the reason and ends this process (SIGABRT) up to 6 s after the timeout.

    Example:
        >>> initialize("localhost:1234", num_processes=2, process_id=2)
        Traceback (most recent call last):
        maxjax.errors.UserInputError: process_id is 2; it must be 0 to 1. ...
    """
    global _world, _arrival
    import jax

    num_processes, process_id = _checked_ids(num_processes, process_id)
    seconds_left = checked_integer("initialization_timeout", initialization_timeout)
    heartbeat_timeout = checked_integer("heartbeat_timeout", heartbeat_timeout)
    shutdown_timeout = checked_integer("shutdown_timeout", shutdown_timeout)
    arrival = checked_integer("arrival_timeout", arrival_timeout)
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    host, port = _host_and_port(address) if address else ("", 0)
    if host and num_processes != 1:
        _check_host(host, port)
    if jax.distributed.is_initialized():
        raise RuntimeError("initialize was called before in this process: call it only once.")
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if host and process_id == 0 and bind is None:
        bind = _bind_address(host, port)
    elif host and process_id:
        seconds_left = _wait_for_coordinator(host, port, seconds_left)
    _start(
        coordinator_address=address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=local_device_ids,
        initialization_timeout=seconds_left,
        heartbeat_timeout_seconds=heartbeat.timeout_of_jax(heartbeat_timeout),
        shutdown_timeout_seconds=shutdown_timeout,
        coordinator_bind_address=bind,
    )
    _world = None if process_id is None or num_processes is None else (process_id, num_processes)
    _arrival = arrival
    _start_heartbeat(heartbeat_timeout)


def arrival_seconds() -> int:
    """Seconds that a process waits for the others to make the same call, as given to :func:`initialize`."""
    return _arrival


@contextlib.contextmanager
def watch(phase: str) -> Iterator[None]:
    """A block in which JAX's errors about a lost process become a PeerLostError.

    Args:
        phase: description of the block for the message: "loading the weights".

    Only errors that reach Python inside the block are translated: JAX computes asynchronously, so
    wait for results (``jax.block_until_ready``) inside. Other errors pass through, and in a program
    of one process all do. A loss that does not reach Python ends this process after
    ``heartbeat_timeout``, with a line on stderr and exit status 1.

    Raises:
        PeerLostError: another process closed its connection or did not answer. The message
            contains the phase, the process's id if it is known, and the first line of JAX's error,
            which is the ``__cause__``. This process cannot continue: let it end.
        ProgramMismatchError: the processes run, but their collectives do not match.

    Example:
        >>> with watch("adding"):
        ...     print(1 + 1)
        2
    """
    try:
        yield
    except _TRANSLATED as error:
        found = translated(phase, error)
        if found is None:
            raise
        raise found from error


def translated(phase: str, error: BaseException) -> Exception | None:
    """The error that :func:`watch` raises instead of JAX's; None for an error that passes."""
    if not isinstance(error, _TRANSLATED):
        return None
    text = str(error)
    kind = _error_class(error, text)
    if kind is None:
        return None
    reason = first_line(error)
    if kind is ProgramMismatchError:
        return ProgramMismatchError(
            f"{phase}: the processes do not run the same program ({reason}). {_COMPARE}"
        )
    advice = (
        f"Or it runs another program. {_COMPARE}" if _SILENT.search(text) else heartbeat.RESTART
    )
    return heartbeat.lost(
        f"{phase}: {_lost_process(text)} is gone or does not answer ({reason}). {advice}"
    )


# jax.errors.JaxRuntimeError is a RuntimeError; orbax makes a TimeoutError of one, which quotes it.
_TRANSLATED = (RuntimeError, ValueError, TimeoutError)
_COMPARE = "maxjax.distributed.same_program compares programs before they run."


def _checked_ids(
    num_processes: int | None, process_id: int | None
) -> tuple[int | None, int | None]:
    count = None if num_processes is None else checked_integer("num_processes", num_processes)
    number = None if process_id is None else checked_integer("process_id", process_id, 0)
    if count is not None and number is not None and number >= count:
        raise UserInputError(
            f"process_id is {number}; it must be 0 to {count - 1}. "
            f"Each of the {count} processes has an id of its own, counted from 0."
        )
    return count, number


def _host_and_port(address: str) -> tuple[str, int]:
    """The two parts of "host:port", an IPv6 address without its brackets."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or re.search(r"[\s/\[\]]", host) or (":" in host and not bracketed):
        raise UserInputError(
            f"coordinator_address is {address!r}; it must be like 'node0:1234', '10.0.0.1:1234' "
            "or '[fd00::1]:1234'."
        )
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536):
        raise UserInputError(f"coordinator_address is {address!r}; its port must be 1 to 65535.")
    return host, int(port)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """``text`` as an IP address; None if it is a host name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address or "localhost"."""
    address = _address(host)
    return address.is_loopback if address else host.lower() == "localhost"


def _check_host(host: str, port: int) -> None:
    """Refuse a host name that other machines resolve differently.

    Many installations write "127.0.1.1 node0" into node0's /etc/hosts: on node0 the name is then a
    loopback address, which no other machine can reach. As it is unknown whether there are other
    machines, the user has to decide; an explicit loopback address is accepted.
    """
    address = _address(host)
    if _is_loopback(host) or (address and not address.is_unspecified):
        return
    addresses = [host]
    if address is None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise UserInputError(f"coordinator {host!r} is not a host name: {error}") from error
        except OSError:
            return  # the name may be registered later; _wait_for_coordinator and JAX try again
        addresses = [str(info[4][0]) for info in infos]
        if not all(map(_is_loopback, addresses)):
            return
    raise UserInputError(
        f"coordinator {host!r} is {addresses[0]} on this machine, where no other machine can reach it. "
        f"Write 127.0.0.1:{port} if all processes run on this machine, otherwise the address by "
        "which the others reach process 0."
    )


def _bind_address(host: str, port: int) -> str | None:
    """The bind address of the coordinator: a loopback address itself, else None (JAX's default).

    JAX would listen on all interfaces for a loopback address as well, and its service has no
    authentication. The port is tested here because a taken port crashes JAX 0.10.2 with a
    segmentation fault.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    local = _is_loopback(host)
    try:
        socket.create_server((host if local else "", port), family=family).close()
    except OSError as error:
        raise UserInputError(
            f"port {port} cannot be opened for the coordinator ({error.strerror or error}). "
            "Choose another one, the same for all processes."
        ) from error
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") if local else None


def _wait_for_coordinator(host: str, port: int, timeout: int) -> int:
    """Wait until the coordinator listens; return the seconds that are left, at least 1.

    JAX waits for its coordinator too, but aborts the process after its timeout.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            left = max(deadline - time.monotonic(), RETRY_SECONDS)
            socket.create_connection((host, port), timeout=left).close()
            return max(1, math.ceil(deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS >= deadline:
                raise PeerLostError(
                    f"process 0 (the coordinator) does not listen at {host} port {port} after "
                    f"{timeout} s ({error.strerror or error}). Start it, or correct the address."
                ) from error
        time.sleep(RETRY_SECONDS)


def _start(**arguments: Any) -> None:
    import jax

    try:
        with service_in_another_process():
            jax.distributed.initialize(**arguments)
    except (ValueError, TypeError) as error:
        raise UserInputError(
            f"JAX cannot start as one of several processes: {error} Outside Slurm, Open MPI, "
            "Kubernetes and TPUs pass coordinator_address, num_processes and process_id."
        ) from error
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise RuntimeError(
            "initialize comes too late: JAX has started its devices in this process. Call it "
            "before the first jax.devices(), array or computation."
        ) from error


def _start_heartbeat(timeout: int) -> None:
    from jax._src.distributed import global_state  # JAX has no public name for the client

    if global_state.client is not None and (global_state.num_processes or 1) > 1:
        heartbeat.start(global_state.client, global_state.process_id, timeout)


def _error_class(error: Exception, text: str) -> type[Exception] | None:
    """The exception class for what happened to the processes; None for any other error."""
    import jax

    if isinstance(error, (PeerLostError, ProgramMismatchError)):
        return None
    if not jax.distributed.is_initialized() or (_world and _world[1] == 1):
        return None
    if _DIFFERENT.search(text):
        return ProgramMismatchError
    return PeerLostError if _LOST.search(text) else None


def _lost_process(text: str) -> str:
    """The process that an error is about: from its text, or the other one of two."""
    ids = [*_ONE_ID.findall(text), *(one for run in _IDS.findall(text) for one in run.split())]
    if not ids and _world and _world[1] == 2:
        ids = [str(1 - _world[0])]  # with two processes it is the other one
    if not ids:
        return "another process"
    return f"process {', '.join(sorted(set(ids), key=int))}"
