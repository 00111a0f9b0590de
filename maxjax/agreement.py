"""Comparison of the programs that several processes are about to run, before they run them.

If processes run different programs, their collectives wait for each other until JAX ends the
processes half a minute later, without a reason. Digests are exchanged through the key-value store
of JAX's coordination service, not through collectives, which would hang.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import PeerLostError, ProgramMismatchError, UserInputError

# Settings that affect how XLA compiles the same code. Dump folders and logging may differ between
# processes.
_SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_use_shardy_partitioner", "jax_disable_jit",
    "jax_exec_time_optimization_effort", "jax_memory_fitting_effort", "jax_optimization_level",
)  # fmt: skip
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NCCL_ALGO", "NCCL_PROTO")
_OWN_FLAGS = re.compile(r"--xla_(?:dump|hlo_profile|force_host_platform_device_count)\S*")
# The address of a callback in a lowered program, which differs between processes.
_ADDRESS = re.compile(r'backend_config = "\d{6,}"')
_MAX_SHOWN = 60
_WAIT_MS = 500  # length of one wait; Ctrl-C takes effect between two of them
_TIMEOUT_SECONDS = 300


def same_program(
    name: str,
    *,
    processes: Iterable[int] | None = None,
    timeout: int = _TIMEOUT_SECONDS,
    **parts: Any,
) -> None:
    """Check that all processes are about to run the same program. Each process must call it.

    Processes that run different programs wait for each other's collectives until JAX ends them
    half a minute later, without a reason. Here each process sends a digest of every part to the
    first one, and all get the same answer. maxjax itself calls it before the first call of a
    compiled Graph (``Module.compile``, ``InferenceSession.load``) on devices of several processes.

    Besides ``name`` and ``parts`` it compares the versions of jax and jaxlib, maxjax's own code, and
    the settings that affect how XLA compiles (``XLA_FLAGS``, x64, the precision of matmuls …).

    Args:
        name: name of the program, for the message.
        processes: ids of the processes that take part; None for all of them.
        timeout: whole seconds to wait for the other processes.
        parts: values that must be equal, by name: text, bytes, a Path (for the file's content),
            the result of ``jax.jit(f).lower(…)``, or a value that ``json`` can write.

    In a program of one process nothing is compared.

    Raises:
        ProgramMismatchError: a part differs; every process raises it and names part and
            processes. Nothing was run, so all processes can exit normally.
        PeerLostError: a process did not call it in time.
        TypeError: a part is of none of these types.

    Example:
        >>> import jax
        >>> lowered = jax.jit(lambda x: x + 1).lower(1.0)
        >>> same_program("step", program=lowered, config={"layers": 2})
    """
    facts = {part: _comparable(part, value) for part, value in parts.items()}
    service = _coordinator()
    if service is None:
        return
    client, process, count = service
    members = sorted(range(count) if processes is None else set(processes))
    if process not in members:
        raise UserInputError(f"this is process {process}, which is not among processes={members}")
    if len(members) == 1:
        return
    _compare(client, process, members, {"name": name} | facts | _environment(), timeout)


def agreed(
    run: Callable[..., Any], name: str, program: Callable[[], str], shardings: Iterable[Any]
) -> Callable[..., Any]:
    """``run`` with a comparison of the processes' programs before its first call.

    Args:
        run: compiled program.
        name: name of the program, as in :func:`same_program`.
        program: function that returns the program's text.
        shardings: shardings of the program's arrays. If all their devices belong to one process,
            ``run`` itself is returned, without overhead.
    """
    import jax

    if not jax.distributed.is_initialized():
        return run
    used = {device.process_index for s in shardings if s for device in s.device_set}
    if len(used) < 2:
        return run
    digest = [_digest(_ADDRESS.sub("", program()).encode())]

    def first_compared(*args: Any) -> Any:
        if digest:
            same_program(name, processes=used, program=digest[0])
            digest.clear()
        return run(*args)

    return first_compared


def as_first(name: str, answer: Callable[[], str], *, timeout: int = 60) -> str:
    """The value that process 0 computes, shared with all processes that call this function.

    A process that does not get it from process 0 in time computes it itself.

    Args:
        name: name of the value; it must contain everything that the value depends on.
        answer: function that computes the value; it is called in process 0, and in a process that
            got no answer.
        timeout: seconds to wait for process 0.

    Example:
        >>> as_first("tied", lambda: "yes")
        'yes'
    """
    service = _coordinator()
    if service is None:
        return answer()
    client, process, _ = service
    # The number distinguishes repeated calls, whose answers may differ.
    key = f"maxjax/answers/{name}/{next(_answers.setdefault(name, itertools.count()))}"
    if process == 0:
        value = answer()
        client.key_value_set(key, value)
        return value
    try:
        return _wait_for(client, key, name, 0, time.monotonic() + timeout, timeout)
    except PeerLostError as error:
        if "coordination service is gone" in str(error):
            raise
        return answer()


_answers: dict[str, Iterator[int]] = {}
_comparisons: dict[tuple[int, ...], Iterator[int]] = {}  # number of comparisons so far, by members


def _coordinator() -> tuple[Any, int, int] | None:
    """The client of JAX's coordination service, this process's id, and the number of processes."""
    import jax

    if not jax.distributed.is_initialized():
        return None
    from jax._src.distributed import global_state  # JAX has no public name for the service

    if global_state.client is None or (global_state.num_processes or 1) < 2:
        return None
    return global_state.client, global_state.process_id, global_state.num_processes


def _compare(
    client: Any, process: int, members: Sequence[int], facts: Mapping[str, str], timeout: int
) -> None:
    """Send ``facts`` to the first member, which compares them and sends its verdict to all."""
    number = next(_comparisons.setdefault(tuple(members), itertools.count()))
    prefix = f"maxjax/same/{'_'.join(map(str, members))}/{number}"
    first, deadline = members[0], time.monotonic() + timeout
    name = facts["name"]
    if process != first:
        client.key_value_set(f"{prefix}/{process}", json.dumps(facts))
        verdict = _wait_for(client, f"{prefix}/verdict", name, first, deadline, timeout)
    else:
        all_facts = {process: dict(facts)}
        for other in members[1:]:
            text = _wait_for(client, f"{prefix}/{other}", name, other, deadline, timeout)
            all_facts[other] = json.loads(text)
        verdict = _verdict(all_facts)
        client.key_value_set(f"{prefix}/verdict", verdict)
    if verdict != "equal":
        raise ProgramMismatchError(verdict)


def _wait_for(client: Any, key: str, name: str, peer: int, deadline: float, timeout: int) -> str:
    """Wait for a value in the coordination service."""
    while True:
        try:
            return client.blocking_key_value_get(key, _WAIT_MS)
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise PeerLostError(
                    f"comparing {name!r}: the coordination service is gone "
                    f"({str(error).splitlines()[0][:300]}). Start all processes again."
                ) from error
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"comparing {name!r}: process {peer} has not reached this point in {timeout} s. "
                    "It is busy, hangs, or runs another program: see its own output."
                ) from error


def _verdict(all_facts: Mapping[int, Mapping[str, str]]) -> str:
    """ "equal", or the parts that differ, with the processes and values."""
    parts = list(dict.fromkeys(part for facts in all_facts.values() for part in facts))
    differences = []
    for part in parts:
        groups: dict[str, list[int]] = {}
        for process, facts in all_facts.items():
            groups.setdefault(facts.get(part, "missing"), []).append(process)
        if len(groups) > 1:
            values = "; ".join(
                f"process{'es' * (len(who) > 1)} {', '.join(map(str, who))}: {value}"
                for value, who in groups.items()
            )
            differences.append(f"{part} ({values})")
    if not differences:
        return "equal"
    name = next(iter(all_facts.values()))["name"]
    return (
        f"the processes are about to run different programs: at {name!r} these differ: "
        f"{', '.join(differences)}. Nothing was run. Start all processes with the same code, "
        "settings and checkpoint, and run the same programs in the same order in all of them."
    )


def _comparable(part: str, value: Any) -> str:
    """The text of a value to compare and show: the value itself if it is short, else its digest."""
    if hasattr(value, "as_text"):
        value = _ADDRESS.sub("", value.as_text())
    elif isinstance(value, os.PathLike):
        value = Path(value).read_bytes()
    if not isinstance(value, (str, bytes)):
        try:
            value = json.dumps(value, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{part} is a {type(value).__name__}, which cannot be compared ({error}): pass text, "
                "bytes, a Path, a lowered program, or a value that json can write"
            ) from None
    if isinstance(value, str):
        if len(value) <= _MAX_SHOWN and value.isprintable():
            return value
        value = value.encode("utf-8", "surrogatepass")
    return _digest(value)


def _digest(data: bytes) -> str:
    return f"sha256 {hashlib.sha256(data).hexdigest()[:16]}"


_facts: dict[str, str] = {}


def _environment() -> dict[str, str]:
    """Versions, maxjax's own code, and the settings that affect how XLA compiles."""
    import jax

    if not _facts:
        _facts.update({f"version of {name}": metadata.version(name) for name in ("jax", "jaxlib")})
        root = Path(__file__).parent
        code = (
            file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes()
            for file in sorted(root.rglob("*.py"))
        )
        _facts["code of maxjax"] = _digest(b"".join(code))
    settings = {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}
    flags = {
        name: " ".join(_OWN_FLAGS.sub("", os.environ.get(name, "")).split()) for name in _FLAGS
    }
    return _facts | settings | flags
