"""Calls of several processes, each a thread here, with a key-value store like JAX's."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from maxjax import agreement, heartbeat, lockstep
from maxjax.agreement import Coordinator, Messages, Rounds
from maxjax.errors import PeerFailedError, PeerLostError, ProgramMismatchError
from maxjax.lockstep import Lockstep


class Store:
    """A stand-in for the key-value store of JAX's coordination service."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_increment(self, key: str, by: int) -> int:
        with self.changed:
            self.values[key] = str(int(self.values.get(key, "0")) + by)
            return int(self.values[key])

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise RuntimeError("NOT_FOUND")
        return self.values[key]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self.changed:
            return [item for item in self.values.items() if item[0].startswith(key)]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            self.values = {k: v for k, v in self.values.items() if not k.startswith(key)}


@pytest.fixture
def together(monkeypatch) -> Callable[..., list[Any]]:
    """Runs a function of a Lockstep in ``count`` threads; returns their results and errors."""
    own = threading.local()
    monkeypatch.setattr(lockstep, "coordinator", lambda: own.service)
    monkeypatch.setattr(lockstep, "arrival_seconds", lambda: 5)
    monkeypatch.setattr(agreement, "_WAIT_MS", 20)
    monkeypatch.setattr(agreement, "_spent", {})

    def run(body: Callable[[Lockstep, int], Any], count: int = 3, store: Any = None) -> list[Any]:
        found = store or Store()

        def one(process: int) -> Any:
            own.service = Coordinator(found, process, count)
            try:
                own.calls = lockstep._calls
                with Lockstep("adding", None) as call:
                    return body(call, process)
            except Exception as error:
                return error

        # Each process counts its calls, but threads share the counter.
        monkeypatch.setattr(lockstep, "_calls", _Same())
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))

    return run


class _Same(dict):
    """Gives every thread the call number 0."""

    def setdefault(self, key: Any, value: Any) -> Any:
        return itertools.repeat(0)


def test_the_first_decides(together):
    def body(call: Lockstep, process: int) -> Any:
        call.agree(size=3)
        found = [call.decide({"by": process, "round": i}) for i in range(5)]
        call.finish()
        return found

    expected = [{"by": 0, "round": i} for i in range(5)]
    assert together(body) == [expected] * 3


def test_what_is_spent_is_deleted(together):
    store = Store()

    def body(call: Lockstep, process: int) -> None:
        for _ in range(200):
            call.decide({})

    assert together(body, 2, store) == [None, None]
    assert len(store.values) < 5 * (agreement._KEPT_ROUNDS + 3)


def test_a_difference_is_everybodys_error(together):
    def body(call: Lockstep, process: int) -> None:
        call.agree(size=[3, 3, 4][process], colour="red")

    errors = together(body)
    assert {type(error) for error in errors} == {ProgramMismatchError}
    [text] = set(map(str, errors))
    assert "at 'adding' these differ: size (processes 0, 1: 3; process 2: 4). Nothing" in text


def test_an_error_of_one_is_told(together):
    def body(call: Lockstep, process: int) -> None:
        call.decide({})
        if process == 1:
            raise KeyError("mine")
        call.decide({})

    first, failed, last = together(body)
    assert isinstance(failed, KeyError)
    for error in (first, last):
        assert isinstance(error, PeerFailedError)
        assert str(error) == "adding: process 1 raised KeyError: 'mine'"


def test_an_error_while_others_fetch(together):
    """The others wait for a result that never comes, and check whether a process has failed."""

    class Never:
        def __init__(self):
            self.addressable_shards = [self]
            self.data = self

        def is_ready(self) -> bool:
            return False

    def body(call: Lockstep, process: int) -> None:
        if process == 0:
            raise KeyboardInterrupt
        call.fetch([Never()])

    with pytest.raises(KeyboardInterrupt):
        together(body)


def test_whoever_comes_late_does_not_go_on_alone(together, monkeypatch):
    monkeypatch.setattr(lockstep, "arrival_seconds", lambda: 0.1)

    def body(call: Lockstep, process: int) -> None:
        if process == 1:
            time.sleep(0.8)
        call.decide({})

    first, late = together(body, 2)
    assert isinstance(first, PeerLostError) and isinstance(late, PeerLostError)
    assert "adding: process 1 has not reached this point in 0.1 s" in str(first)
    assert "came too late" in str(late) or "has not reached" in str(late)


def test_a_lost_process_is_named(together):
    store = Store()

    def body(call: Lockstep, process: int) -> None:
        if process == 2:
            heartbeat.report(store, 2, "gave no sign of life for 3 s")
            return
        call.decide({})

    *waiting, _ = together(body, 3, store)
    for error in waiting:
        assert isinstance(error, PeerLostError)
        assert str(error).startswith("adding: process 2 gave no sign of life for 3 s. Its own")


def test_others_may_be_lost():
    store = Store()
    heartbeat.report(store, 3, "has ended")
    heartbeat.check(store, "adding", [0, 1])
    with pytest.raises(PeerLostError, match="adding: process 3 has ended"):
        heartbeat.check(store, "adding", [0, 3])


@pytest.fixture
def hearts(monkeypatch) -> Iterator[Callable[..., Any]]:
    """Makes two running hearts of one store; the times at which they end the process, which they do not, are kept."""
    made: list[heartbeat.Heart] = []

    def two(timeout: float) -> tuple[Store, list[heartbeat.Heart], list[float]]:
        store, ended = Store(), []
        monkeypatch.setattr(heartbeat, "_end", lambda: ended.append(time.monotonic()))
        monkeypatch.setattr(heartbeat, "_has_lost", False)
        made.extend(heartbeat.Heart(store, process, timeout) for process in (0, 1))
        for heart in made:
            for thread in heart._threads:
                thread.start()
        return store, made, ended

    yield two
    for heart in made:
        heart._stopped.set()


def test_a_heart_stops(hearts):
    store, (first, other), ended = hearts(2.0)
    time.sleep(0.8)
    heartbeat.check(store, "adding", [0, 1])
    other._stopped.set()  # as if killed: it sends no more heartbeats
    deadline = time.monotonic() + 10
    while f"{heartbeat._GONE}1" not in store.values and time.monotonic() < deadline:
        time.sleep(0.02)
    assert store.values[f"{heartbeat._GONE}1"] == "gave no sign of life for 0.6 s"
    first.stop()
    assert store.values[f"{heartbeat._GONE}0"] == "has ended" and not ended


@pytest.mark.parametrize("victim", [0, 1])
def test_who_does_not_wait_is_ended_when_the_time_is_over(hearts, victim, capsys):
    """The loss of process 0 too, which the others notice by themselves."""
    _, both, ended = hearts(1.0)
    time.sleep(0.2)
    both[victim]._stopped.set()
    died = time.monotonic()
    while not ended and time.monotonic() < died + 20:
        time.sleep(0.02)
    both[1 - victim]._stopped.set()
    assert ended[0] - died > 0.9
    line = f"maxjax.errors.PeerLostError: process {victim} gave no sign of life for 1 s. Its own output"
    assert capsys.readouterr().err.startswith(line)


def test_who_has_ended_is_not_dead(hearts):
    _, (first, other), ended = hearts(0.4)
    time.sleep(0.2)
    other.stop()
    time.sleep(1.2)
    first._stopped.set()
    assert not ended


def test_a_service_that_does_not_answer(hearts, capsys):
    """Its machine is gone: calls wait for ever."""
    store, both, ended = hearts(0.4)
    back = threading.Event()
    store.key_value_dir_get = lambda key: [] if back.wait() else []
    deadline = time.monotonic() + 20
    while len(ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    for heart in both:
        heart._stopped.set()
    back.set()
    assert len(ended) >= 2
    assert "process 0, which has the coordination service, gave" in capsys.readouterr().err


def test_after_a_loss_nobody_waits_for_the_others(hearts):
    store, (first, _), ended = hearts(2.0)
    assert isinstance(heartbeat.lost("one is gone"), PeerLostError)
    first.stop()
    assert ended


def test_who_is_silent_is_named_before_the_others_end():
    """Also before JAX ends them, whose heartbeats come every half of its timeout."""
    store, timeout, gone = Store(), 20.0, f"{heartbeat._GONE}1"
    store.key_value_set(f"{heartbeat._ALIVE}1/beats", "7")
    heart = heartbeat.Heart(store, 0, timeout)
    now = heart._interval  # the worst case: the last beat was just before the death
    heart._watch(now)
    while gone not in store.values and now < timeout:
        now += heart._interval
        heart._watch(now)
    assert timeout / 4 < now < timeout / 2 - agreement._WAIT_MS / 1000
    assert heartbeat.timeout_of_jax(int(timeout)) / 2 > timeout


def test_messages_come_in_order_and_are_deleted():
    store = Store()
    first, other = (Messages(Coordinator(store, i, 2), "call-0", (0, 1)) for i in range(2))
    for number in range(1000):
        first.send("Engine", str(number))
        assert other.receive("Engine", lambda: None) == str(number)
        if number % 10 == 9:
            first.all_received()
    assert len(store.values) <= 2 * agreement._KEPT_MESSAGES


def test_what_nobody_has_received_is_kept():
    store = Store()
    first, other = (Messages(Coordinator(store, i, 2), "call-0", (0, 1)) for i in range(2))
    for number in range(500):
        first.send("Engine", str(number))
    assert [other.receive("Engine", lambda: None) for _ in range(500)] == list(map(str, range(500)))


def test_who_waits_for_a_message_learns_of_a_loss(monkeypatch):
    monkeypatch.setattr(agreement, "_WAIT_MS", 20)
    store = Store()
    heartbeat.report(store, 0, "gave no sign of life for 3 s")
    other = Messages(Coordinator(store, 1, 2), "call-0", (0, 1))
    with pytest.raises(PeerLostError, match="process 0 gave no sign of life"):
        other.receive("Engine", lambda: heartbeat.check(store, "Engine", (0, 1)))


def test_rounds_of_different_processes_do_not_meet():
    store = Store()
    for members in ((0, 1), (0, 2)):
        one = Rounds(Coordinator(store, 0, 3), "same", members)
        assert one.give(json.dumps(members), lambda texts: "all") is None


def test_one_process_does_nothing():
    with Lockstep("adding", [jax.devices()[0]]) as call:
        call.agree(size=object())
        assert call.decide({"count": 3}) == {"count": 3}
        assert call.is_leader and not call.is_shared
        call.finish()
