"""One process of several: `distributed_worker.py SCENARIO PORT PROCESSES ID HEARTBEAT DIRECTORY`.

Started by tests/test_distributed.py. Its results go to DIRECTORY/ID.jsonl, one JSON object a
line, because gloo prints on stdout. A scenario is a function below; its argument `tell` writes
such a line.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import maxjax
from maxjax import distributed
from maxjax.errors import PeerLostError, ProgramMismatchError
from maxjax.nn.layer import state
from maxjax.storage.files import OpenFile
from tests import distributed_calls as calls
from tests import distributed_model as models

Tell = Callable[..., None]
LOCAL_DEVICES = 4
SHUTDOWN_SECONDS = 5


def matmul(tell: Tell) -> None:
    """A contraction over an axis that is split between processes, each of which made only its own part."""
    mesh = Mesh(np.array(jax.devices()), ("k",))
    left = np.arange(16.0 * 32, dtype=np.float32).reshape(16, 32) % 7
    right = np.arange(32.0 * 8, dtype=np.float32).reshape(32, 8) % 5
    asked = []

    def part(array: np.ndarray, axis: int) -> Callable[[Any], np.ndarray]:
        def read(index):
            asked.append([axis, *index[axis].indices(array.shape[axis])[:2]])
            return array[index]

        return read

    def placed(array: np.ndarray, axis: int) -> jax.Array:
        spec = PartitionSpec(*("k" if one == axis else None for one in range(2)))
        return jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, spec), part(array, axis)
        )

    everywhere = NamedSharding(mesh, PartitionSpec())
    program = jax.jit(jnp.matmul, out_shardings=everywhere)
    with distributed.watch("multiplying"):
        arguments = placed(left, 1), placed(right, 0)
        compiled = program.lower(*arguments).compile()
        mine = np.asarray(compiled(*arguments).addressable_data(0))
        gathered = multihost_utils.process_allgather(mine)
    tell(
        devices=[len(jax.devices()), len(jax.local_devices())],
        asked=sorted(asked),
        reduces="all-reduce" in compiled.as_text(),
        right=np.array_equal(mine, left @ right),
        equal=[np.array_equal(one, mine) for one in gathered],
    )
    try:
        distributed.initialize("127.0.0.1:1", 2, 0)
    except RuntimeError as error:
        tell(again=str(error))


def gather(tell: Tell) -> None:
    """Runs collectives until the process is ended."""
    step = 0
    while True:
        multihost_utils.process_allgather(np.arange(3.0) + step)
        step += 1
        if step == 3:
            tell(ready=True)


def _collective(tell: Tell, body: Callable[[jax.Array], jax.Array]) -> None:
    """Runs one collective again and again, in which process 1 dies.

    It uses one device of each process: with more, some would wait for others until JAX ends them all.
    """
    mesh = Mesh(np.array(jax.devices()[::LOCAL_DEVICES]), ("k",))
    rows = PartitionSpec("k")
    x = jax.make_array_from_callback(
        (4,), NamedSharding(mesh, rows), lambda index: np.arange(4.0)[index]
    )
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=rows, out_specs=rows))
    for step in range(1_000_000):
        program(x).block_until_ready()
        if step == 3 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def reduce(tell: Tell) -> None:
    _collective(tell, lambda x: x + jax.lax.psum(x, "k"))


def exchange(tell: Tell) -> None:
    _collective(tell, lambda x: jax.lax.all_to_all(x, "k", 0, 0, tiled=True))


def permute(tell: Tell) -> None:
    _collective(tell, lambda x: jax.lax.ppermute(x, "k", [(0, 1), (1, 0)]))


def scatter(tell: Tell) -> None:
    _collective(tell, lambda x: jax.lax.psum_scatter(x, "k", tiled=True))


def differ(tell: Tell) -> None:
    """Compares programs that are the same in both processes, and that differ, before anything runs."""
    me = jax.process_index()

    def refused(name: str, **parts: Any) -> str:
        try:
            distributed.same_program(name, **parts)
        except ProgramMismatchError as error:
            return str(error)
        return ""

    mesh = maxjax.make_mesh(model=len(jax.devices()))
    kinds = [jax.ShapeDtypeStruct((2, 64), np.float32)]
    x = np.ones((2, 64), np.float32)
    alike, other = models.Network().to(mesh), models.Network(scale=1.0 + me).to(mesh)
    values = {k: np.full(w.shape, 1e-3, np.float32) for k, w in alike.raw_state_dict().items()}
    alike.load_state_dict(values)
    other.load_state_dict(values)
    program = alike.compile(*kinds)
    began = time.monotonic()
    results = [np.asarray(program(x).addressable_data(0)) for _ in range(2)]
    tell(runs=float(results[1].sum()))
    try:
        other.compile(*kinds)(x)
    except ProgramMismatchError as error:
        tell(program=str(error))
    tell(
        equal=refused("a", config={"layers": 2}, text="x" * 100),
        config=refused("a", config={"layers": 2 + me}, text="y" * 100),
        long=refused("a", text="y" * 100 + str(me)),
        name=refused("ab"[me]),
        alone=distributed.same_program("alone", processes=[me], own=me) is None,
        seconds=time.monotonic() - began,
    )
    os.environ["XLA_FLAGS"] = f"--xla_dump_to=/nowhere/{me}"
    tell(dump=refused("a"))
    os.environ["XLA_FLAGS"] = f"--xla_cpu_enable_fast_math={bool(me)}"
    tell(flags=refused("a"))
    del os.environ["XLA_FLAGS"]
    if me == 1:
        try:
            distributed.same_program("late", timeout=1)
        except PeerLostError as error:
            tell(late=str(error))
    multihost_utils.sync_global_devices("process 0 does not end before")


def compute(tell: Tell) -> None:
    """Computes on this process's devices until the process is ended."""
    multihost_utils.process_allgather(np.arange(3.0))
    square = jax.jit(lambda x: x @ x / 400)
    x = jnp.ones((400, 400))
    tell(ready=True)
    while True:
        x = square(x).block_until_ready()


def sleep(tell: Tell) -> None:
    """Only sleeps in Python."""
    multihost_utils.process_allgather(np.arange(3.0))
    tell(ready=True)
    time.sleep(600)


def own_error(tell: Tell) -> None:
    """Process 1 raises an error of its own, while process 0 waits for it in a collective."""
    multihost_utils.process_allgather(np.arange(3.0))
    tell(ready=True)
    if jax.process_index() == 1:
        raise KeyError("an error of its own")
    multihost_utils.process_allgather(np.arange(3.0))


def load(tell: Tell) -> None:
    """Loads a model on a mesh of both processes' devices: each reads only its own bytes."""
    directory = Path(sys.argv[-1])
    read: list[int] = []
    announced: list[int] = []
    state.reading = announced.append
    scatter = OpenFile.pread_some

    def counted(self: OpenFile, *args: Any, **options: Any) -> int:
        read.append(scatter(self, *args, **options))
        return read[-1]

    OpenFile.pread_some = counted
    x = np.load(directory / "x.npy")
    for name in ("list", "stack"):
        read.clear()
        mesh = maxjax.make_mesh(model=len(jax.devices()))
        model = models.Network(name == "stack").to(mesh)
        with maxjax.load_weights(directory / "model.safetensors") as weights:
            model.load_state_dict(weights)
        everywhere = NamedSharding(mesh, PartitionSpec())
        whole = jax.make_array_from_callback(x.shape, everywhere, lambda part: x[part])
        y = jax.jit(lambda m, x: m(x), out_shardings=everywhere)(model, whole)
        mine = np.asarray(y.addressable_data(0))
        gathered = multihost_utils.process_allgather(mine)
        np.save(directory / f"{name}-{jax.process_index()}.npy", mine)
        tell(**{f"{name} announced": announced.pop()})
        tell(**{name: sum(read), f"{name} equal": [np.array_equal(one, mine) for one in gathered]})
    parts = [
        leaf.addressable_shards[0].data.nbytes / leaf.nbytes for leaf in jax.tree.leaves(model)
    ]
    drawn = maxjax.init(models.Network().to(mesh), jax.random.key(0))
    total = jax.jit(lambda m: sum(w.sum() for w in jax.tree.leaves(m)), out_shardings=everywhere)
    tell(parts=parts, drawn=float(np.asarray(total(drawn).addressable_data(0))))
    model.load_state_dict(
        {k: np.zeros(w.shape, np.float32) for k, w in model.raw_state_dict().items()}
    )
    tell(zeros=float(np.asarray(total(model).addressable_data(0))))


def several(tell: Tell) -> None:
    """Several scenarios in the same processes, as their start takes longer than most of them."""
    for scenario in (matmul, load, calls.together, calls.refuse, calls.engine):
        scenario(tell)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        several, gather, compute, sleep, own_error, reduce, exchange, permute, scatter, differ,
        *calls.SCENARIOS,
    )
}  # fmt: skip


def main() -> None:
    scenario, port, processes, process_id, heartbeat, directory = sys.argv[1:]
    results = Path(directory, f"{process_id}.jsonl")

    def tell(**facts: Any) -> None:
        with results.open("a") as file:
            file.write(json.dumps(facts) + "\n")
            file.flush()
            os.fsync(file.fileno())

    jax.config.update("jax_platforms", "cpu")
    settings = Path(directory, "settings.json")
    local = json.loads(settings.read_text())["local"] if settings.exists() else LOCAL_DEVICES
    jax.config.update("jax_num_cpu_devices", local)
    distributed.initialize(
        f"127.0.0.1:{port}",
        int(processes),
        int(process_id),
        heartbeat_timeout=int(heartbeat),
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    try:
        with distributed.watch(scenario):
            SCENARIOS[scenario](tell)
    except PeerLostError as error:
        tell(lost=str(error))
        raise


if __name__ == "__main__":
    main()
