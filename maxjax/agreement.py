"""What several processes are about to run, compared before they run it.

Collectives of different programs wait for each other until JAX ends both processes, half a minute
later, and neither learns why. Digests travel through the key-value store of JAX's coordination
service, not through collectives, which would be the first to hang.
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

# Settings that choose what XLA makes of the same code. Where it dumps and what it logs is each
# process's own matter.
_SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_use_shardy_partitioner", "jax_disable_jit",
    "jax_exec_time_optimization_effort", "jax_memory_fitting_effort", "jax_optimization_level",
)  # fmt: skip
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NCCL_ALGO", "NCCL_PROTO")
_OWN_FLAGS = re.compile(r"--xla_(?:dump|hlo_profile|force_host_platform_device_count)\S*")
# What a lowered program has of this process alone: where a callback lies in its memory.
_ADDRESS = re.compile(r'backend_config = "\d{6,}"')
_SHOWN = 60
_SLICE_MS = 500  # Ctrl-C is answered between two
_PATIENCE = 300


def same_program(
    name: str,
    *,
    processes: Iterable[int] | None = None,
    timeout: int = _PATIENCE,
    **parts: Any,
) -> None:
    """Compares what the processes are about to run, before they run it; each of them calls it.

    Processes that run different programs wait for each other's collectives until JAX ends them,
    half a minute later, and neither learns why. Here each sends a digest of every part to the
    coordinator, and all get the same answer. maxjax calls it itself before the first call of a
    compiled Graph (``Module.compile``, ``InferenceSession.load``) on devices of several processes.

    Compared are, besides ``name`` and ``parts``: the versions of jax, jaxlib and maxjax, maxjax's own
    code, and what chooses how XLA compiles (``XLA_FLAGS``, x64, the precision of matmuls …).

    Args:
        name: Of what is to be run, for the message.
        processes: Those that take part; None is all of them.
        timeout: Whole seconds to wait for processes that have not come here.
        parts: What must be equal, by name: text, bytes, a Path (the file's content), what
            ``jax.jit(f).lower(…)`` gives, or what ``json`` can write.

    In a program of one process nothing is compared.

    Raises:
        ProgramMismatchError: In every process: which part differs, and where. Nothing was run: all
            can end in good order.
        PeerLostError: A process does not come here in time.
        TypeError: A part is nothing of the above.

    Example:
        >>> import jax
        >>> lowered = jax.jit(lambda x: x + 1).lower(1.0)
        >>> same_program("step", program=lowered, config={"layers": 2})
    """
    facts = {part: _fact(part, value) for part, value in parts.items()}
    world = _coordinator()
    if world is None:
        return
    client, me, count = world
    members = sorted(range(count) if processes is None else set(processes))
    if me not in members:
        raise UserInputError(f"processes are {members}, and this one is process {me}")
    if len(members) == 1:
        return
    _compare(client, me, members, {"name": name} | facts | _surroundings(), timeout)


def agreed(
    run: Callable[..., Any], name: str, program: Callable[[], str], shardings: Iterable[Any]
) -> Callable[..., Any]:
    """``run``, which before its first call is compared with the other processes' programs.

    Args:
        run: A compiled program.
        name: As in :func:`same_program`.
        program: Gives its text.
        shardings: Where its arrays lie: with devices of one process alone, ``run`` itself
            comes back, and calls of it cost nothing more.
    """
    import jax

    if not jax.distributed.is_initialized():
        return run
    used = {device.process_index for one in shardings if one for device in one.device_set}
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
    """What process 0 answers to a question that the processes ask themselves.

    Who asks alone gets an answer too: its own, after so many seconds without that of process 0.

    Args:
        name: The question; what the answer depends on is part of it.
        answer: Finds one. Called in process 0, and where nobody else answers.

    Example:
        >>> as_first("tied", lambda: "yes")
        'yes'
    """
    world = _coordinator()
    if world is None:
        return answer()
    client, me, _ = world
    # The answer may be another one the next time.
    key = f"maxjax/asked/{name}/{next(_asked.setdefault(name, itertools.count()))}"
    if me == 0:
        found = answer()
        client.key_value_set(key, found)
        return found
    try:
        return _awaited(client, key, name, 0, time.monotonic() + timeout, timeout)
    except PeerLostError as error:
        if "coordination service is gone" in str(error):
            raise
        return answer()


_asked: dict[str, Iterator[int]] = {}
_turns: dict[tuple[int, ...], Iterator[int]] = {}  # by members: how often they compared


def _coordinator() -> tuple[Any, int, int] | None:
    """The client of JAX's coordination service, this process's id and how many there are."""
    import jax

    if not jax.distributed.is_initialized():
        return None
    from jax._src.distributed import global_state  # JAX shows the service nowhere else

    if global_state.client is None or (global_state.num_processes or 1) < 2:
        return None
    return global_state.client, global_state.process_id, global_state.num_processes


def _compare(
    client: Any, me: int, members: Sequence[int], facts: Mapping[str, str], timeout: int
) -> None:
    """Sends ``facts`` to the first of the members, which tells all what it makes of them."""
    turn = next(_turns.setdefault(tuple(members), itertools.count()))
    place = f"maxjax/same/{'_'.join(map(str, members))}/{turn}"
    first, deadline = members[0], time.monotonic() + timeout
    name = facts["name"]
    if me != first:
        client.key_value_set(f"{place}/{me}", json.dumps(facts))
        verdict = _awaited(client, f"{place}/verdict", name, first, deadline, timeout)
    else:
        every = {me: dict(facts)}
        for other in members[1:]:
            text = _awaited(client, f"{place}/{other}", name, other, deadline, timeout)
            every[other] = json.loads(text)
        verdict = _verdict(every)
        client.key_value_set(f"{place}/verdict", verdict)
    if verdict != "equal":
        raise ProgramMismatchError(verdict)


def _awaited(client: Any, key: str, name: str, peer: int, deadline: float, timeout: int) -> str:
    """A value of the coordination service, once it is there."""
    while True:
        try:
            return client.blocking_key_value_get(key, _SLICE_MS)
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise PeerLostError(
                    f"comparing {name!r}: the coordination service is gone "
                    f"({str(error).splitlines()[0][:300]}). Start all processes again."
                ) from error
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"comparing {name!r}: process {peer} has not come to this point in {timeout} s. "
                    "It is busy, hangs, or runs another program: its own output says which."
                ) from error


def _verdict(every: Mapping[int, Mapping[str, str]]) -> str:
    """ "equal", or what differs and where."""
    parts = list(dict.fromkeys(part for facts in every.values() for part in facts))
    differences = []
    for part in parts:
        groups: dict[str, list[int]] = {}
        for process, facts in every.items():
            groups.setdefault(facts.get(part, "nothing"), []).append(process)
        if len(groups) > 1:
            told = "; ".join(
                f"process{'es' * (len(who) > 1)} {', '.join(map(str, who))}: {value}"
                for value, who in groups.items()
            )
            differences.append(f"{part} ({told})")
    if not differences:
        return "equal"
    name = next(iter(every.values()))["name"]
    return (
        f"the processes are about to run different programs: at {name!r} these differ: "
        f"{', '.join(differences)}. Nothing was run. Start all processes with the same code, "
        "settings and checkpoint, and run the same programs in the same order in all of them."
    )


def _fact(part: str, value: Any) -> str:
    """A value as it is compared and shown: itself if it is short, else its digest."""
    if hasattr(value, "as_text"):
        value = _ADDRESS.sub("", value.as_text())
    elif isinstance(value, os.PathLike):
        value = Path(value).read_bytes()
    if not isinstance(value, (str, bytes)):
        try:
            value = json.dumps(value, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{part} is a {type(value).__name__}, which has no one text ({error}): give text, "
                "bytes, a Path, a lowered program, or what json can write"
            ) from None
    if isinstance(value, str):
        if len(value) <= _SHOWN and value.isprintable():
            return value
        value = value.encode("utf-8", "surrogatepass")
    return _digest(value)


def _digest(data: bytes) -> str:
    return f"sha256 {hashlib.sha256(data).hexdigest()[:16]}"


_around: dict[str, str] = {}


def _surroundings() -> dict[str, str]:
    """Versions, maxjax's own code, and the settings that choose what XLA makes of a program."""
    import jax

    if not _around:
        _around.update({f"version of {name}": metadata.version(name) for name in ("jax", "jaxlib")})
        root = Path(__file__).parent
        code = (
            file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes()
            for file in sorted(root.rglob("*.py"))
        )
        _around["code of maxjax"] = _digest(b"".join(code))
    settings = {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}
    flags = {
        name: " ".join(_OWN_FLAGS.sub("", os.environ.get(name, "")).split()) for name in _FLAGS
    }
    return _around | settings | flags
