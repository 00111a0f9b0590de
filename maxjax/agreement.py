"""Comparison of the programs that several processes are about to run, before they run them.

If processes run different programs, their collectives wait for each other until JAX ends the
processes half a minute later, without a reason. Digests are exchanged through the key-value store
of JAX's coordination service, not through collectives, which would hang.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from . import heartbeat
from .errors import ProgramMismatchError, UserInputError
from .heartbeat import Coordinator, coordinator

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
    """Checks that all processes are about to run the same program. Each process must call it.

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
    facts = {part: comparable(part, value) for part, value in parts.items()}
    service = coordinator()
    if service is None:
        return
    members = sorted(range(service.count) if processes is None else set(processes))
    if service.process not in members:
        raise UserInputError(
            f"this is process {service.process}, which is not among processes={members}"
        )
    if len(members) > 1:
        _compare(service, members, {"name": name} | facts | environment(), timeout)


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
    mine = [digest(_ADDRESS.sub("", program()).encode())]

    def first_compared(*args: Any) -> Any:
        if mine:
            same_program(name, processes=used, program=mine[0])
            mine.clear()
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
    service = coordinator()
    if service is None:
        return answer()
    client, process = service.client, service.process
    # The number distinguishes repeated calls, whose answers may differ.
    key = f"maxjax/answers/{name}/{next(_answers.setdefault(name, itertools.count()))}"
    if process == 0:
        value = answer()
        client.key_value_set(key, value)
        return value
    phase = f"waiting for {name!r}"
    value = wait_for(service, key, phase, timeout, lambda: heartbeat.check(client, phase, [0]))
    return answer() if value is None else value


_answers: dict[str, Iterator[int]] = {}


def _compare(
    service: Coordinator, members: Sequence[int], facts: Mapping[str, str], timeout: int
) -> None:
    rounds = _rounds.setdefault(tuple(members), Rounds(service, "same", members))
    phase = f"comparing {facts['name']!r}"
    found = rounds.exchange(
        phase,
        json.dumps(facts),
        lambda texts: verdict({process: json.loads(text) for process, text in texts.items()}),
        timeout,
        lambda: heartbeat.check(service.client, phase, members),
    )
    if found != "equal":
        raise ProgramMismatchError(found)


def wait_for(
    service: Coordinator, key: str, phase: str, timeout: float, check: Callable[[], None]
) -> str | None:
    """Waits for a value in the coordination service; None if it does not come in time.

    Args:
        check: function that raises an error if waiting is in vain.

    Raises:
        PeerLostError: the coordination service is gone.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return service.client.blocking_key_value_get(key, _WAIT_MS)
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise heartbeat.service_lost(phase, error) from error
        try:
            check()
        except RuntimeError:
            if (value := try_get(service, key)) is not None:
                return value  # it was the last thing that the process did
            raise
        if time.monotonic() > deadline:
            return None


def try_get(service: Coordinator, key: str) -> str | None:
    """A value in the coordination service, or None."""
    try:
        return service.client.key_value_try_get(key)
    except RuntimeError:
        return None


class Rounds:
    """Exchanges of texts among several processes, one after the other.

    In each round every process gives a text, the last one to arrive draws a conclusion from all
    of them, and every process gets it. So a round is a barrier too.

    Args:
        name: distinguishes these rounds from others among the same processes.
        members: ids of the processes.

    Attributes:
        given: whether this process has given its text in the present round.
    """

    def __init__(self, service: Coordinator, name: str, members: Sequence[int]):
        self.service, self.members = service, tuple(members)
        self.given, self._number = False, 0
        self._group = "_".join(map(str, members))
        self._prefix = f"maxjax/rounds/{self._group}/{name}"

    def give(self, text: str, conclude: Callable[[Mapping[int, str]], str]) -> str | None:
        """Gives the text of this process without waiting; returns the conclusion if it is the last."""
        client, me = self.service.client, self.service.process
        prefix = f"{self._prefix}/{self._number}"
        client.key_value_set(f"{prefix}/{me}", text)
        self.given = True
        arrived = client.key_value_increment(f"{prefix}/count", 1)
        if arrived > _LEFT:
            raise heartbeat.lost(
                "this process came too late: another one had stopped waiting for it"
            )
        if arrived < len(self.members):
            return None
        texts = {int(key): value for key, value in self._given().items() if key.isdecimal()}
        conclusion = conclude(texts)
        client.key_value_set(f"{prefix}/all", conclusion)
        return conclusion

    def exchange(
        self,
        phase: str,
        text: str,
        conclude: Callable[[Mapping[int, str]], str],
        timeout: float,
        check: Callable[[], None],
    ) -> str:
        """Gives the text of this process, and waits for the conclusion.

        Args:
            phase: what this process is waiting in, for messages.
            text: text of this process.
            conclude: function from the texts of all processes to the conclusion.
            timeout: seconds to wait for the other processes.
            check: function that raises an error if waiting is in vain.

        Raises:
            PeerLostError: another process does not come in time.
        """
        conclusion = self.give(text, conclude)
        prefix = f"{self._prefix}/{self._number}"
        if conclusion is None:
            conclusion = wait_for(self.service, f"{prefix}/all", phase, timeout, check)
        if conclusion is None:
            # A process that arrives later sees from the count that it must not continue.
            arrived = self.service.client.key_value_increment(f"{prefix}/count", _LEFT) - _LEFT
            if arrived == len(self.members):
                conclusion = wait_for(self.service, f"{prefix}/all", phase, timeout, check)
        if conclusion is None:
            given = self._given()
            missing = [str(one) for one in self.members if str(one) not in given]
            if missing:
                problem = (
                    f"process {', '.join(missing)} has not reached this point in {timeout:g} s. "
                )
            else:
                problem = f"the process that arrived last has not answered in {timeout:g} s. "
            raise heartbeat.lost(
                f"{phase}: {problem}It is busy, hangs, or runs another program: see its own output."
            )
        self._done()
        return conclusion

    def _given(self) -> dict[str, str]:
        found = self.service.client.key_value_dir_get(f"{self._prefix}/{self._number}/")
        return {key.rpartition("/")[2]: value for key, value in found}

    def _done(self) -> None:
        """Moves on to the next round; the first process sometimes deletes the keys of earlier rounds.

        A process that takes part in a round has read the conclusions of all rounds before it.
        """
        spent = _spent.setdefault(self._group, [])
        if self.service.process == self.members[0]:
            if len(spent) >= _KEPT_ROUNDS:
                for prefix in spent:
                    self.service.client.key_value_delete(f"{prefix}/")
                spent.clear()
            spent.append(f"{self._prefix}/{self._number}")
        self._number, self.given = self._number + 1, False


class Messages:
    """Texts that the first of several processes sends to the others, which get all of them in this order.

    Sending waits for nobody, unlike a round.

    Args:
        name: distinguishes these messages from others among the same processes.
        members: ids of the processes.
    """

    def __init__(self, service: Coordinator, name: str, members: Sequence[int]):
        self._service, self._group = service, "_".join(map(str, members))
        self._prefix = f"maxjax/messages/{self._group}/{name}"
        self._number = self._deleted = 0  # of the next message, and of the next part to delete
        self._received = 0  # number of messages that all processes have received

    def _part(self, part: int) -> str:
        return f"{self._prefix}/{part}"

    def _key(self) -> str:
        return f"{self._part(self._number // _KEPT_MESSAGES)}/{self._number}"

    def send(self, phase: str, text: str) -> None:
        """Sends a message.

        Raises:
            PeerLostError: the coordination service is gone.
        """
        client = self._service.client
        try:
            client.key_value_set(self._key(), text)
            self._number += 1
            while self._deleted < self._received // _KEPT_MESSAGES:
                client.key_value_delete(f"{self._part(self._deleted)}/")
                self._deleted += 1
        except RuntimeError as error:
            raise heartbeat.service_lost(phase, error) from error

    def all_received(self) -> None:
        """Learns that the others have received what was sent: it can be deleted."""
        self._received = self._number

    def receive(self, phase: str, check: Callable[[], None]) -> str:
        """Waits for the next message, however long.

        Args:
            check: function that raises an error if waiting is in vain.

        Raises:
            PeerLostError: the coordination service is gone.
        """
        text = wait_for(self._service, self._key(), phase, math.inf, check)
        assert text is not None
        self._number += 1
        return text

    def close(self) -> None:
        """Lets later rounds of the same processes delete what is left."""
        _spent.setdefault(self._group, []).append(self._prefix)


_KEPT_MESSAGES = 64  # messages that are deleted at once

_rounds: dict[tuple[int, ...], Rounds] = {}
_spent: dict[str, list[str]] = {}  # keys of concluded rounds, by the processes that took part
_KEPT_ROUNDS = 32
_LEFT = 1 << 30  # added to the count of a round by a process that no longer waits


def verdict(all_facts: Mapping[int, Mapping[str, str]]) -> str:
    """The text "equal", or the parts that differ, with the processes and values."""
    parts = list(dict.fromkeys(part for facts in all_facts.values() for part in facts))
    differences = []
    for part in parts:
        groups: dict[str, list[int]] = {}
        for process, facts in sorted(all_facts.items()):
            groups.setdefault(facts.get(part, "missing"), []).append(process)
        if len(groups) > 1:
            values = "; ".join(
                f"process{'es' * (len(who) > 1)} {', '.join(map(str, who))}: {value}"
                for value, who in groups.items()
            )
            differences.append(f"{part} ({values})")
    if not differences:
        return "equal"
    name = all_facts[min(all_facts)]["name"]
    return (
        f"the processes are about to run different programs: at {name!r} these differ: "
        f"{', '.join(differences)}. Nothing was run. Start all processes with the same code, "
        "settings and checkpoint, and run the same programs in the same order in all of them."
    )


def comparable(part: str, value: Any) -> str:
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
    return digest(value)


def text_digest(program: Any) -> str:
    """The digest of a lowered program's text, without addresses."""
    return digest(_ADDRESS.sub("", program.as_text()).encode())


def digest(data: bytes) -> str:
    return f"sha256 {hashlib.sha256(data).hexdigest()[:16]}"


_facts: dict[str, str] = {}


def environment() -> dict[str, str]:
    """Versions, maxjax's own code, and the settings that affect how XLA compiles."""
    import jax

    if not _facts:
        root = Path(__file__).parent
        code = b"".join(
            file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes()
            for file in sorted(root.rglob("*.py"))
        )
        versions = {f"version of {name}": metadata.version(name) for name in ("jax", "jaxlib")}
        _facts.update(versions, **{"code of maxjax": digest(code)})  # at once: for other threads
    settings = {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}
    flags = {
        name: " ".join(_OWN_FLAGS.sub("", os.environ.get(name, "")).split()) for name in _FLAGS
    }
    return _facts | settings | flags
