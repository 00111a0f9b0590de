"""Lockstep: a call that several processes make together, each dispatching the same programs.

A program on the devices of several processes runs once all of them have dispatched it. So nothing
that one process finds by itself (a time, a stop string, an error, an interrupt) may decide what comes
next. Before each dispatch the processes meet in the key-value store of JAX's coordination service: the
first one decides what is next, and a process that cannot continue says so. No collective is left waiting.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Self

from . import heartbeat
from .agreement import Messages, Rounds, comparable, environment, text_digest, try_get, verdict
from .distributed import arrival_seconds, translated
from .errors import PeerFailedError, PeerLostError, ProgramMismatchError, UserInputError
from .heartbeat import coordinator

_SHOWN = 1000  # characters of an error's message that the other processes are told
_FIRST_PAUSE, _LAST_PAUSE = 5e-5, 2e-3  # seconds between two looks at a result

_digests: dict[Hashable, str] = {}  # of programs that this process has compiled
_calls: dict[tuple[int, ...], Iterator[int]] = {}  # number of calls so far, by processes
_open: Broadcast | None = None  # the one that has not been closed


class Lockstep:
    """One call that several processes make together. In one process it does nothing.

    Args:
        call: name of the call, for messages.
        shardings: shardings of the call's arrays; the processes that own their devices take part.
            None for all processes.

    Attributes:
        is_shared: whether several processes take part.
        is_leader: whether this process is the first of them, which decides.

    Each process must make its own Lockstep for each call, before anything in the call can fail.

    Raises:
        UserInputError: this process has none of the devices.

    Example:
        >>> import jax.numpy as jnp
        >>> with Lockstep("adding", [jnp.ones(2).sharding]) as together:
        ...     together.agree(numbers=[1, 1])
        ...     together.decide({"count": 3})
        {'count': 3}
    """

    def __init__(self, call: str, shardings: Iterable[Any] | None):
        self.call, self.is_shared, self.is_leader = call, False, True
        self._compared: set[Hashable] = set()  # programs, since the call began
        self._is_over = False  # every process knows how the call ended
        service = coordinator()
        if service is None:
            return
        if shardings is None:
            found = set(range(service.count))
        else:
            found = {device.process_index for s in shardings if s for device in s.device_set}
        if found <= {service.process}:
            return
        if service.process not in found:
            raise UserInputError(
                f"{call}: this is process {service.process}, and all devices of the model belong to "
                f"processes {', '.join(map(str, sorted(found)))}"
            )
        if _open is not None:
            raise UserInputError(
                f"{call}: an {_open.call} of several processes is open, and no other call may use their devices: close "
                "it first"
            )
        members = tuple(sorted(found))
        self.is_shared, self.is_leader = True, service.process == members[0]
        self._service, self._members = service, members
        number = next(_calls.setdefault(members, itertools.count()))
        self._number, self._rounds = number, Rounds(service, f"call-{number}", members)
        self._note = f"maxjax/notes/{'_'.join(map(str, members))}/{number}"

    @property
    def is_symmetric(self) -> bool:
        """Whether several processes do all of the call, so that what is next must be decided together."""
        return self.is_shared

    # --- meetings ----------------------------------------------------------------------------

    def agree(self, **facts: Any) -> None:
        """Compares facts about the call, such as its arguments. A barrier.

        Args:
            facts: values to compare by name, as for ``same_program``.

        Raises:
            ProgramMismatchError: a fact differs; every process raises it.
            PeerFailedError: another process raised an error in this call.
            PeerLostError: another process is lost, or does not come in time.
        """
        if not self.is_shared:
            return
        mine = {name: comparable(name, value) for name, value in facts.items()}
        found = self._meet(
            {"name": self.call} | mine | environment(), lambda given: {"verdict": verdict(given)}
        )
        if found["verdict"] != "equal":
            self._is_over = True
            raise ProgramMismatchError(found["verdict"])

    def gather(self, fact: str) -> dict[int, str]:
        """The facts of all processes by their ids, in all of them. A barrier.

        Raises:
            PeerFailedError, PeerLostError: as for :meth:`agree`.
        """
        if not self.is_shared:
            return {0: fact}
        found = self._meet({"fact": fact}, lambda given: {"all": given})["all"]
        return {int(process): one["fact"] for process, one in found.items()}

    def decide(self, decision: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The decision of the first process, in all processes. A barrier.

        Args:
            decision: the decision, of values that ``json`` can write; it is ignored in all
                processes but the first.

        Raises:
            PeerFailedError, PeerLostError: as for :meth:`agree`.
        """
        if not self.is_shared:
            return dict(decision or {})
        first = self._members[0]
        return self._meet(dict(decision or {}), lambda given: {"decision": given[first]})[
            "decision"
        ]

    def finish(self) -> None:
        """Waits until all processes have their results, so that none leaves the call earlier."""
        self.decide()
        self._is_over = True

    def _meet(
        self, given: dict[str, Any], conclude: Callable[[dict[int, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        found = json.loads(
            self._rounds.exchange(
                self.call,
                json.dumps({"given": given}),
                partial(_conclusion, conclude),
                arrival_seconds(),
                self._check,
            )
        )
        self._raise_for(found)
        return found

    # --- errors ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Tells the other processes about an error, unless all of them have it."""
        if not self.is_shared or error is None or isinstance(error, GeneratorExit):
            return
        found = translated(self.call, error)
        if not self._is_over:
            self._is_over = True
            self._tell(found or error)
        if found is not None:
            raise found from error

    def _tell(self, error: BaseException) -> None:
        if isinstance(error, PeerLostError):
            told = {"lost": str(error)}
        else:
            text = f"{type(error).__name__}: {error}"[:_SHOWN]
            told = {"error": f"process {self._service.process} raised {text}"}
        text = json.dumps(told)
        with contextlib.suppress(RuntimeError):  # the first error counts
            self._service.client.key_value_set(self._note, text)
        with contextlib.suppress(RuntimeError):  # the service may be gone
            if not self._rounds.given:
                self._rounds.give(text, partial(_conclusion, None))

    def _raise_for(self, found: Mapping[str, Any]) -> None:
        """Raises an error if another process has reported one."""
        if "lost" in found:
            self._is_over = True
            raise heartbeat.lost(found["lost"])
        if "error" in found:
            self._is_over = True
            raise PeerFailedError(f"{self.call}: {found['error']}")

    def _check(self) -> None:
        """Raises an error if waiting for the other processes is in vain."""
        if (note := try_get(self._service, self._note)) is not None:
            self._raise_for(json.loads(note))
        heartbeat.check(self._service.client, self.call, self._members)

    # --- programs ----------------------------------------------------------------------------

    def run(self, program: Any, *args: Any, **static: Any) -> Any:
        """Dispatches a jitted function. Its first dispatch in the call is a barrier.

        At the barrier each process has compiled the function, and the processes compare the programs.
        Without it, a process that compiles for longer than the others would seem to be lost, because
        some collectives wait for only half a minute.

        Args:
            program: jitted function.
            args: its arguments.
            static: its static arguments.

        Raises:
            ProgramMismatchError, PeerFailedError, PeerLostError: as for :meth:`agree`.
        """
        if self.is_shared:
            key = _signature(program, args, static)
            if key not in self._compared:
                if key not in _digests:
                    lowered = program.lower(*args, **static)
                    lowered.compile()
                    _digests[key] = text_digest(lowered)
                self.agree(program=_digests[key])
                self._compared.add(key)
        return program(*args, **static)

    def fetch(self, tree: Any) -> Any:
        """Waits for replicated arrays, and copies them to the host.

        It polls each device of this process: if a collective has failed, some devices have an error,
        and others wait for ever. Nothing else may be dispatched until then, because JAX could wait
        for ever for the earlier program.

        Raises:
            PeerFailedError, PeerLostError: as for :meth:`agree`.
        """
        import jax
        import numpy as np

        leaves, structure = jax.tree.flatten(tree)
        if not self.is_shared or not leaves:
            return jax.device_get(tree)
        copies = list(
            zip(
                *([shard.data for shard in leaf.addressable_shards] for leaf in leaves), strict=True
            )
        )
        pause, checked = _FIRST_PAUSE, time.monotonic()
        while True:
            for copy in copies:
                if all(array.is_ready() for array in copy):
                    return jax.tree.unflatten(structure, [np.asarray(array) for array in copy])
            time.sleep(pause)
            pause = min(1.5 * pause, _LAST_PAUSE)
            if (now := time.monotonic()) - checked > heartbeat.CHECK_SECONDS:
                checked = now
                self._check()


class Broadcast(Lockstep):
    """Calls that the first process makes, and the others repeat. In one process it does nothing.

    The first process decides alone what is next and tells the others, who wait for that, however long. While it is
    open, the same processes make no other call together: their devices could get programs in another order.

    Args:
        call, shardings: as for :class:`Lockstep`.

    Raises:
        UserInputError: another one is open; or as for :class:`Lockstep`.
    """

    def __init__(self, call: str, shardings: Iterable[Any] | None):
        global _open
        super().__init__(call, shardings)
        self._stopped: BaseException | None = None
        if self.is_shared:
            self._messages = Messages(self._service, f"call-{self._number}", self._members)
            _open = self

    @property
    def is_symmetric(self) -> bool:
        return False

    @property
    def leader(self) -> int:
        """The id of the first process."""
        return self._members[0]

    @property
    def process(self) -> int:
        """The id of this process."""
        return self._service.process

    def decide(self, decision: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The decision, which is the first process's own."""
        return dict(decision or {})

    def tell(self, message: str) -> None:
        """Tells the other processes what the first one calls.

        Raises:
            PeerLostError: the coordination service is gone.
        """
        self._messages.send(self.call, message)

    def told(self) -> str:
        """Waits for what the first process calls next.

        Raises:
            PeerFailedError, PeerLostError: as for :meth:`agree`.
        """
        return self._messages.receive(self.call, self._check)

    def fetch(self, tree: Any) -> Any:
        found = super().fetch(tree)
        if self.is_shared and self.is_leader:
            self._messages.all_received()  # without the others there would be no result
        return found

    def check(self) -> None:
        """Raises an error if another process has failed or is lost."""
        if self.is_shared:
            self._check()

    def stop(self, error: BaseException) -> None:
        """Makes this process raise an error where it waits next; may be called by any thread."""
        self._stopped = error

    def _check(self) -> None:
        if self._stopped is not None:
            raise self._stopped
        super()._check()

    def close(self) -> None:
        """Ends it: other calls may follow. Each process calls it."""
        global _open
        if _open is self:
            _open = None
            self._messages.close()


def _signature(program: Any, args: Any, static: Mapping[str, Any]) -> Hashable:
    """What decides which compiled program a jitted function dispatches."""
    import jax
    import numpy as np

    leaves, structure = jax.tree.flatten(args)
    kinds = tuple(
        (np.shape(leaf), str(leaf.dtype), getattr(leaf, "sharding", None)) for leaf in leaves
    )
    return program, structure, kinds, tuple(sorted(static.items(), key=lambda item: item[0]))


def wait_alive(done: Callable[[float | None], bool], phase: str) -> None:
    """Waits for something that all processes take part in.

    Args:
        done: function that waits for it, at most the given seconds, and returns whether it is done.
        phase: what this process is waiting in, for the message.

    Raises:
        PeerLostError: another process is lost.

    Example:
        >>> import threading
        >>> event = threading.Event()
        >>> event.set()
        >>> wait_alive(event.wait, "waiting")
    """
    service = coordinator()
    # Each wait has a limit: an interrupt that the system delivers to another thread does not wake
    # the main thread, which raises it only when it runs next.
    while not done(heartbeat.CHECK_SECONDS):
        if service is None:
            continue
        heartbeat.check(service.client, phase, range(service.count))


def _conclusion(
    conclude: Callable[[dict[int, Any]], dict[str, Any]] | None, texts: Mapping[int, str]
) -> str:
    """The text that all processes get: an error that one of them reports, or else the conclusion."""
    found = {process: json.loads(text) for process, text in sorted(texts.items())}
    for one in found.values():
        if "given" not in one:
            return json.dumps(one)
    assert conclude is not None
    return json.dumps(conclude({process: one["given"] for process, one in found.items()}))
