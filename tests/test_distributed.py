"""Several processes: which calls are refused, what the processes compute together, and how they end.

The child processes are killed at the end of each test, whatever happens. Times have a bound only
where a peer dies; heartbeats of one second work too, but not on a busy machine.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import maxjax
from maxjax import agreement, distributed
from maxjax.errors import PeerLostError, ProgramMismatchError, UserInputError

from . import distributed_calls as calls
from .distributed_model import Network
from .distributed_worker import SHUTDOWN_SECONDS

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "tests" / "distributed_worker.py"
START_SECONDS = 120  # to import JAX twice on a loaded machine
HEARTBEAT = 4
PATIENT = 20  # heartbeat of tests where no process dies, however loaded the machine is
BOUND = 5  # seconds after the timeout that the documentation promises
LOADED = 10  # seconds that a loaded machine may add
GLOO = "UNKNOWN: Gloo AllGather failed: [x/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


# The same XLA flags, so that one process computes the same bits as several.
COMPILED_ALIKE = {name: os.environ[name] for name in ("XLA_FLAGS",) if name in os.environ}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def clean() -> dict[str, str]:
    """The environment without variables that describe another cluster or other devices to JAX."""
    gone = ("JAX_", "XLA_", "SLURM_", "OMPI_", "KUBERNETES_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(gone)}
    return {name: value for name, value in kept.items() if "_proxy" not in name.lower()}


class Worker:
    """A running `distributed_worker.py`, and the results that it has written so far."""

    def __init__(
        self, scenario: str, port: int, processes: int, number: int, directory: Path, heartbeat: int
    ):
        self._results = directory / f"{number}.jsonl"
        self._log = directory / f"{number}.log"
        arguments = [scenario, port, processes, number, heartbeat, directory]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", str(WORKER), *map(str, arguments)],
                env=clean() | {"PYTHONPATH": str(ROOT)} | COMPILED_ALIKE,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def told(self) -> dict:
        lines = self._results.read_text().splitlines() if self._results.exists() else []
        return {name: value for line in lines for name, value in json.loads(line).items()}

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.told().get("ready"):
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)


@contextlib.contextmanager
def workers(
    scenario: str, directory: Path, processes: int = 2, heartbeat: int = HEARTBEAT
) -> Iterator[list[Worker]]:
    port, started = free_port(), []
    try:
        for number in reversed(range(processes)):  # the coordinator last: the others wait for it
            started.append(Worker(scenario, port, processes, number, directory, heartbeat))
        yield started[::-1]
    finally:
        for worker in started:
            worker.process.kill()
        for worker in started:
            worker.process.wait()


# --- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"coordinator_address": "node0"}, "must be like 'node0:1234'"),
        ({"coordinator_address": ":1234"}, "must be like"),
        ({"coordinator_address": "http://node0:1234"}, "must be like"),
        ({"coordinator_address": "fd00::1:1234"}, r"must be like .*'\[fd00::1\]:1234'"),
        ({"coordinator_address": "node0:port"}, "port must be 1 to 65535"),
        ({"coordinator_address": "node0:"}, "port must be 1 to 65535"),
        ({"coordinator_address": "node0:0"}, "port must be 1 to 65535"),
        ({"coordinator_address": "node0:65536"}, "port must be 1 to 65535"),
        ({"coordinator_address": "node0:٣٣"}, "port must be 1 to 65535"),
        ({"coordinator_address": "0.0.0.0:1234"}, r"Write 127\.0\.0\.1:1234 if all"),
        ({"coordinator_address": "a..b:1234"}, "is not a host name"),
        ({"num_processes": 0}, "num_processes is 0: it must be an integer of at least 1"),
        ({"num_processes": "2"}, "num_processes is '2'"),
        ({"process_id": -1}, "process_id is -1: it must be an integer of at least 0"),
        ({"process_id": 2}, "process_id is 2; it must be 0 to 1"),
        ({"process_id": True}, "process_id is True"),
        ({"initialization_timeout": 0}, "initialization_timeout is 0"),
        ({"heartbeat_timeout": -1}, "heartbeat_timeout is -1"),
        ({"heartbeat_timeout": 0.5}, "heartbeat_timeout is 0.5: it must be an integer"),
        ({"shutdown_timeout": None}, "shutdown_timeout is None"),
        ({"arrival_timeout": 0}, "arrival_timeout is 0: it must be an integer of at least 1"),
    ],
)
def test_wrong_arguments(arguments, says):
    good = {"coordinator_address": "127.0.0.1:1234", "num_processes": 2, "process_id": 1}
    with pytest.raises(UserInputError, match=says):
        distributed.initialize(**(good | arguments))


def test_a_name_that_is_a_loopback_address_here(monkeypatch):
    def lookup(*addresses):
        infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 1234)) for one in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)

    lookup("127.0.1.1")
    for process_id in (0, 1):
        with pytest.raises(UserInputError, match=r"'node0' is 127\.0\.1\.1 on this machine, .* Wr"):
            distributed.initialize("node0:1234", 2, process_id)
    lookup("127.0.1.1", "10.0.0.1")
    distributed._check_host("node0", 1234)
    lookup()
    for host in ("localhost", "LocalHost", "127.0.0.1", "127.9.9.9", "::1", "10.0.0.1", "fd00::1"):
        distributed._check_host(host, 1234)


def test_where_the_coordinator_listens():
    port = free_port()
    assert distributed._bind_address("127.0.0.1", port) == f"127.0.0.1:{port}"
    assert distributed._bind_address("localhost", port) == f"localhost:{port}"
    assert distributed._bind_address("10.0.0.1", port) is None
    with socket.create_server(("127.0.0.1", port)):
        for host in ("127.0.0.1", "10.0.0.1"):
            with pytest.raises(UserInputError, match=rf"port {port} cannot be opened .*in use"):
                distributed.initialize(f"{host}:{port}", 2, 0)


def test_nobody_listens_at_the_address(monkeypatch):
    # The socket is bound but does not listen, so that no other process can take its port meanwhile.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
        with pytest.raises(PeerLostError, match="process 0 .* after 1 s .*refused"):
            distributed.initialize(None, 2, 1, initialization_timeout=1)


def test_the_coordinator_may_come_late():
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = distributed._wait_for_coordinator("127.0.0.1", server.getsockname()[1], 60)
        assert 1 <= left <= 60


def test_too_late():
    jax.devices()
    with pytest.raises(RuntimeError, match="initialize comes too late"):
        distributed.initialize(f"127.0.0.1:{free_port()}", 1, 0)


# --- the names of what went wrong ---------------------------------------------------------


def lost(monkeypatch, text, world, kind=RuntimeError):
    """The message of `watch` for an error with this text, in a process that is one of several."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "_world", world)
    with pytest.raises(PeerLostError) as caught, distributed.watch("loading the weights"):
        raise kind(text)
    assert str(caught.value.__cause__) == text
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_who_is_gone(monkeypatch):
    of_two = lost(monkeypatch, GLOO, (0, 2), jax.errors.JaxRuntimeError)
    assert of_two.startswith("loading the weights: process 1 is gone or does not answer (UNKNOWN: ")
    assert "process 0 is" in lost(monkeypatch, GLOO, (1, 2), ValueError)
    assert "another process is" in lost(monkeypatch, GLOO, (1, 3))
    assert "another process is" in lost(monkeypatch, "UNAVAILABLE: Socket closed", None)
    task = "UNAVAILABLE: Task 3 heartbeat timeout. This indicates that"
    assert "process 3 is" in lost(monkeypatch, task, (0, 4))
    silent = (
        "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n10\n2\nx"
    )
    assert "process 2, 10 is" in lost(monkeypatch, silent, (0, 16))
    barrier = "DEADLINE_EXCEEDED: Barrier timed out.\nSome timed out task names:\n1\n\n\nRPC: /x"
    assert "process 1 is" in lost(monkeypatch, barrier, (0, 4))


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"UNKNOWN: Gloo {name} failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error"
            for name in ("all-reduce", "AllGather", "all-to-all", "collective permute",
                         "ReduceScatter", "reduce-scatter", "context initialization")
        ),
        "UNKNOWN: MPI error: MPI_ERR_PROC_FAILED: Process Failure",
        "INTERNAL: NCCL operation ncclAllReduce(a, b) failed: remote process exited or there was a"
        " network error",
        "INTERNAL: RCCL operation ncclGroupEnd() failed: unhandled system error",
        "INTERNAL: collective failed: ncclRemoteError",
        "INTERNAL: [pair.cc:547] Connection closed by peer [127.0.0.1]:1",
        "ABORTED: Connection reset by peer",
        "UNKNOWN: Socket closed",
        "INTERNAL: write: Broken pipe",
        "DEADLINE_EXCEEDED: Timed out waiting for barrier",
        "UNAVAILABLE: failed to connect to all addresses",
        "INTERNAL: Task 1 heartbeat timeout.",
        "CANCELLED: Coordination service has stopped. RecordHeartbeat() from task: 1",
        "INTERNAL: All tasks were set to error because coordination service encountered an error",
    ],
)  # fmt: skip
def test_every_spelling_of_a_loss(monkeypatch, text):
    assert "process 1 is gone" in lost(monkeypatch, text, (0, 2), jax.errors.JaxRuntimeError)


def test_a_loss_that_orbax_tells(monkeypatch):
    text = "Timeout waiting at barrier '1'. The original error: INTERNAL: Task 3 heartbeat timeout."
    assert "process 3 is gone" in lost(monkeypatch, text, (0, 4), TimeoutError)
    with pytest.raises(TimeoutError, match="no answer"), distributed.watch("saving"):
        raise TimeoutError("no answer")


def test_a_silent_peer_may_run_something_else(monkeypatch):
    text = "UNKNOWN: Gloo all-reduce failed: [buffer.cc:72] Read timeout [127.0.0.1]:1"
    assert "Or it runs another program" in lost(monkeypatch, text, (0, 2))
    assert "another program" not in lost(monkeypatch, GLOO, (0, 2))


def test_collectives_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "_world", (0, 2))
    with pytest.raises(ProgramMismatchError, match="do not run the same program .*16 vs 6"):
        with distributed.watch("loading"):
            raise RuntimeError(
                "UNKNOWN: Gloo AllGather failed: [enforce fail at pair.cc:459] 16 vs 6"
            )


def test_other_errors_pass(monkeypatch):
    def passes(error):
        with pytest.raises(type(error)) as caught, distributed.watch("loading"):
            raise error
        assert caught.value is error

    passes(RuntimeError(GLOO))  # this process is alone
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "_world", (0, 1))
    passes(RuntimeError(GLOO))  # one process that called initialize
    monkeypatch.setattr(distributed, "_world", (0, 2))
    passes(RuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    passes(RuntimeError("INTERNAL: NCCL operation ncclCommInitRank() failed: unhandled cuda error"))
    passes(ValueError("the socket closed: Connection reset by peer"))  # has no status code
    passes(PeerLostError(f"an inner phase: {GLOO}"))
    passes(ProgramMismatchError(f"an inner phase: {GLOO}"))
    passes(KeyError(GLOO))


# --- together -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes with two devices each said of :func:`several`, and what one process says of it."""
    directory = tmp_path_factory.mktemp("two")
    model = maxjax.init(Network(), jax.random.key(0))
    values = {name: np.asarray(array) for name, array in model.state_dict().items()}
    save_file(values, directory / "model.safetensors")
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    np.save(directory / "x.npy", x)
    axes = {"model": 4}
    alone, told = _in_several_processes("several", directory, 2, 2, axes, everything=False)
    alone["engine 0"] = calls.engine_answers(axes, directory, False)
    return SimpleNamespace(directory=directory, told=told, alone=alone, values=values, y=model(x))


def test_two_processes_multiply_and_load_a_model(two):
    nbytes = sum(array.nbytes for array in two.values.values())
    total = sum(float(array.sum(dtype=np.float64)) for array in two.values.values())
    for number, told in enumerate(two.told):
        assert told["devices"] == [4, 2]
        own = [[start, start + 8] for start in range(16 * number, 16 * number + 16, 8)]
        assert told["asked"] == [[axis, *rows] for axis in (0, 1) for rows in own]
        assert told["reduces"] and told["right"] and told["equal"] == [True, True]
        assert "initialize was called before" in told["again"]
        for name in ("list", "stack"):
            assert told[f"{name} announced"] == nbytes / 2 <= told[name] <= 0.51 * nbytes
            assert told[f"{name} equal"] == [True, True]
            found = np.load(two.directory / f"{name}-{number}.npy")
            np.testing.assert_allclose(found, two.y, atol=1e-5)
        assert told["parts"] == [1 / 4] * 3
        np.testing.assert_allclose(told["drawn"], total, rtol=1e-4)
        assert told["zeros"] == 0.0


@pytest.mark.extra
def test_two_processes_of_different_programs(tmp_path):
    """Everything refused is refused in both processes, with the same message, and both end normally."""
    with workers("differ", tmp_path) as both:
        for worker in both:
            assert worker.process.wait(START_SECONDS) == 0, worker.log()
        here, there = (worker.told() for worker in both)
    late = there.pop("late")
    assert "comparing 'late': process 0 has not reached this point in 1 s" in late
    for told in (here, there):
        assert told.pop("seconds") < 30
    assert here == there
    assert "at 'Network' these differ: program (process 0: sha256 " in here["program"]
    assert "Nothing was run" in here["program"]
    assert (here["equal"], here["dump"], here["alone"]) == ("", "", True)
    assert 'config (process 0: {"layers": 2}; process 1: {"layers": 3})' in here["config"]
    assert "text" not in here["config"]
    assert "text (process 0: sha256 " in here["long"]
    assert "name (process 0: a; process 1: b)" in here["name"]
    assert "XLA_FLAGS (process 0: --xla_cpu_enable_fast_math=False; pr" in here["flags"]


def test_one_process_compares_nothing():
    distributed.same_program("alone", config={"a": 1}, file=Path(__file__), raw=b"x")
    with pytest.raises(TypeError, match="things is a set, which cannot be compared"):
        distributed.same_program("alone", things={1, 2})


def test_who_is_compared(monkeypatch):
    compared = []
    monkeypatch.setattr(agreement, "coordinator", lambda: SimpleNamespace(process=1, count=3))
    monkeypatch.setattr(agreement, "_compare", lambda _, members, *more: compared.append(members))
    distributed.same_program("all")
    distributed.same_program("two", processes=iter([2, 1]))
    distributed.same_program("alone", processes=[1])
    assert compared == [[0, 1, 2], [1, 2]]
    with pytest.raises(UserInputError, match=r"process 1, which is not among processes=\[0, 2\]"):
        distributed.same_program("others", processes=[2, 0])


# --- calls that all make together ---------------------------------------------------------


def _settle(directory: Path, local: int, axes: dict[str, int], **more: object) -> None:
    settings = {"local": local, "axes": axes, **more}
    (directory / "settings.json").write_text(json.dumps(settings))


def _in_several_processes(
    scenario: str,
    directory: Path,
    processes: int,
    local: int,
    axes: dict[str, int],
    everything: bool,
) -> tuple[dict, list[dict]]:
    """(What one process answers and writes, what each of several said)."""
    _settle(directory, local, axes, all=everything)
    with workers(scenario, directory, processes, PATIENT) as all_of_them:
        alone = {"answers": calls.answers(axes, everything)}
        alone["files"] = calls.files(axes, directory / "alone", everything)
        for worker in all_of_them:
            assert worker.process.wait(4 * START_SECONDS) == 0, worker.log()
        return alone, [worker.told() for worker in all_of_them]


def _same(alone: dict, told: list[dict]) -> None:
    rates = [one["answers"].pop("logprobs", []) for one in (alone, *told)]
    for other in rates:
        for mine, theirs in zip(rates[0], other, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)
    expected = json.loads(json.dumps(alone["answers"]))
    for found in told:
        assert found["answers"].keys() == expected.keys()
        ends = found["answers"]
        # Of several processes the first decides; a single process is the first.
        for name, value in expected.items():
            assert ends[name] == (
                value if name != "closed on others" else expected["read to the end"]
            )
    assert told[0]["files"] == alone["files"] and len(alone["files"]) > 3


def test_two_processes_answer_as_one(two):
    """Weights are sharded over the devices of both, so that neither computes or writes anything alone."""
    _same(two.alone, two.told)


@pytest.mark.extra
@pytest.mark.parametrize(
    ("processes", "local", "axes"),
    [
        (2, 2, {"data": 2, "model": 2}), (2, 2, {"fsdp": 4}), (2, 2, {"model": 2, "data": 2}),
        (2, 4, {"data": 2, "model": 4}), (2, 4, {"fsdp": 2, "model": 4}), (2, 4, {"model": 8}),
        (4, 2, {"data": 2, "model": 4}), (4, 2, {"data": 4, "model": 2}), (4, 2, {"data": 8}),
    ],
    ids=str,
)  # fmt: skip
def test_several_processes_answer_as_one(tmp_path, processes, local, axes):
    _same(*_in_several_processes("together", tmp_path, processes, local, axes, everything=True))
    vectors = calls.vectors(axes)
    for number in range(processes):
        found = np.load(tmp_path / f"vectors-{number}.npy")
        np.testing.assert_allclose(found, vectors, atol=1e-6)


def _same_engines(alone: dict, told: list[dict], count: int) -> None:
    """The process with the queue has the answers of an engine of one process; the others are refused."""
    first, *others = told
    for number in range(count):
        expected, found = alone[f"engine {number}"], first[f"engine {number}"]
        rates = [one.pop("logprobs", []) for one in (expected, found)]
        np.testing.assert_allclose(*rates, atol=2e-5)
        assert found == json.loads(json.dumps(expected))
        for other in others:
            submit, stats, generate, again = other[f"engine {number}"]["refused"]
            assert submit.startswith(
                "UserInputError: Engine.submit is for process 0, which has the queue"
            )
            assert stats.startswith("UserInputError: Engine.stats is for process 0")
            for refused in (generate, again):
                assert (
                    "UserInputError" in refused
                    and "an Engine of several processes is open" in refused
                )
    assert {one["closed"] for one in told} == {"5 + 6 = 11"}


def test_an_engine_of_two_processes_answers_as_one(two):
    _same_engines(two.alone, two.told, 1)


@pytest.mark.extra
@pytest.mark.parametrize(
    ("processes", "local", "axes", "engines"),
    [
        (2, 2, {"model": 4}, [{"speculation": "lookup"}, {"has_draft": True}, {"exact": True}]),
        (2, 2, {"data": 2, "model": 2}, [{"slots": 4}, {"has_windows": True, "chunk": 16}]),
        (4, 1, {"model": 4}, [{"cache_dtype": "int8"}, {"cache_bytes": "1MiB"}]),
    ],
    ids=str,
)
def test_engines_of_several_processes_answer_as_one(tmp_path, processes, local, axes, engines):
    calls.save_adapter(tmp_path)
    calls.save_windows(tmp_path)
    _settle(tmp_path, local, axes, all=True, engines=engines)
    with workers("engine", tmp_path, processes, PATIENT) as all_of_them:
        each = [calls.engine_answers(axes, tmp_path, True, **options) for options in engines]
        for worker in all_of_them:
            assert worker.process.wait(8 * START_SECONDS) == 0, worker.log()
        told = [worker.told() for worker in all_of_them]
    _same_engines({f"engine {i}": one for i, one in enumerate(each)}, told, len(engines))
    assert [one["window pages"] > 0 for one in each] == ["has_windows" in one for one in engines]


def test_what_differs_or_fails_is_told_to_all(two):
    here, there = two.told
    for name in ("prompt", "settings", "key", "call", "checkpoint"):
        assert here[name] == there[name]
        assert here[name].startswith("ProgramMismatchError: the processes are about to run differ")
    assert "at 'generate' these differ: prompts (process 0: [[" in here["prompt"]
    assert "max_new_tokens (process 0: 8; process 1: 9), sampling (process 0" in here["settings"]
    assert "differ: key (process 0: [0, 0]; process 1: [0, 1])" in here["key"]
    assert "name (process 0: generate; process 1: stream)" in here["call"]
    assert "checkpoint (process 0: sha256 " in here["checkpoint"]
    empty = "UserInputError: the prompt is empty: it must have at least one token"
    assert there["empty here"] == here["empty at the first"] == empty
    assert here["empty"] == there["empty"] == empty
    assert here["empty here"] == f"PeerFailedError: generate: process 1 raised {empty}"
    assert there["empty at the first"] == f"PeerFailedError: generate: process 0 raised {empty}"
    assert there["missing"].startswith("CheckpointMissingError")
    assert here["missing"].startswith("PeerFailedError: load: process 1 raised CheckpointMissing")
    assert here["file"].startswith("Checkpoint")
    assert there["file"].startswith("PeerFailedError: save_pretrained: process 0 raised Checkpoint")
    for name in ("decoding", "decoding a stream"):
        assert there[name] == "ArithmeticError: no more"
        assert ": process 1 raised ArithmeticError: no more" in here[name]
    for told in (here, there):
        assert told["still"] == "5 + 6 = 11"
        assert max(value for name, value in told.items() if name.endswith("seconds")) < 60


@pytest.mark.extra
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    "scenario",
    [
        "die_generating",
        "die_streaming",
        "die_loading",
        "die_saving",
        "die_in_a_step",
        "die_embedding",
    ],
)
def test_a_peer_dies_in_a_call(tmp_path, scenario, processes):
    """Every survivor names the lost process before JAX would end it."""
    _settle(tmp_path, 2, {"model": 2 * processes})
    heartbeat = HEARTBEAT + 3 * processes  # JAX must not be first, also on a loaded machine
    with workers(scenario, tmp_path, processes, heartbeat) as everyone:
        *others, victim = everyone
        assert victim.process.wait(2 * START_SECONDS) == -signal.SIGKILL, victim.log()
        died = time.time()
        for worker in others:
            assert worker.process.wait(heartbeat + BOUND + LOADED) != 0
            told = worker.told()
            assert "lost" in told, worker.log()
            assert told["when"] - died < heartbeat, told
            assert f"process {processes - 1} " in told["lost"] or "another process" in told["lost"]


# --- the end of a peer --------------------------------------------------------------------


@pytest.mark.extra
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("scenario", ["gather", "compute", "sleep"])
def test_the_survivor_ends_soon(tmp_path, scenario, victim):
    with workers(scenario, tmp_path) as both:
        for worker in both:
            worker.wait_until_ready()
        both[victim].process.send_signal(signal.SIGKILL)
        survivor = both[1 - victim]
        assert survivor.process.wait(HEARTBEAT + BOUND + LOADED) != 0
        message = survivor.told().get("lost")
        if (scenario, victim) == ("gather", 1):
            assert message.startswith("gather: process 1 is gone or does not answer"), message
            assert "PeerLostError: gather: process 1" in survivor.log()
        else:  # with nothing to do for Python there is no exception
            assert message is None or scenario == "gather"
            assert (
                f"PeerLostError: process {victim} gave no sign of life" in survivor.log() or message
            )
        assert survivor.process.returncode == 1 and "stack trace" not in survivor.log()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "scenario",
    [
        "reduce",
        *(one for one in ("exchange", "permute", "scatter")),
    ],
)
def test_a_peer_dies_in_a_collective(tmp_path, scenario):
    """The survivor names the lost process if it lives long enough: JAX may end it first."""
    with workers(scenario, tmp_path) as both:
        assert both[1].process.wait(START_SECONDS) == -signal.SIGKILL, both[1].log()
        deadline = time.monotonic() + LOADED
        while "lost" not in both[0].told() and time.monotonic() < deadline:
            assert "error" not in both[0].told(), both[0].told()
            time.sleep(0.02)
        message = both[0].told().get("lost", both[0].log())
    assert message.startswith(f"{scenario}: process 1 is gone or does not answer (UNKNOWN: Gloo ")


@pytest.mark.extra
def test_a_frozen_peer(tmp_path):
    """Its connections stay open, as when a network fails: only the heartbeat tells."""
    with workers("gather", tmp_path) as both:
        for worker in both:
            worker.wait_until_ready()
        both[1].process.send_signal(signal.SIGSTOP)
        assert both[0].process.wait(HEARTBEAT + BOUND + LOADED) != 0
        assert "PeerLostError: process 1 gave no sign of life" in both[0].log()


@pytest.mark.extra
def test_a_peer_with_an_error_of_its_own(tmp_path):
    """The failed process waits for the others while it ends, so shutdown_timeout is the bound."""
    with workers("own_error", tmp_path) as both:
        for worker in both:
            worker.wait_until_ready()
        for worker in both:
            assert worker.process.wait(SHUTDOWN_SECONDS + BOUND + LOADED) != 0
        assert "KeyError: 'an error of its own'" in both[1].log()
