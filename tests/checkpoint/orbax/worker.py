"""A process of its own: `orbax_worker.py SCENARIO DIRECTORY [PORT PROCESSES ID]`.

Started by the tests of this folder, for what a process does to the end: how it exits, what it
prints, and what several do together. What a scenario finds goes to DIRECTORY/ID.json.
"""

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import maxjax
from maxjax import distributed, nn
from maxjax.checkpoint.orbax import save as saving
from maxjax.checkpoint.orbax.checkpoint import restore, save, save_async
from maxjax.errors import CheckpointSaveError
from maxjax.graph import DeviceRef

LOCAL_DEVICES = 4


class Net(nn.Module):
    """Layers of a kind, in a list or a stack, and a weight with another shape."""

    def __init__(self, stacked: bool = False, width: int = 16, layers: int = 3):
        super().__init__()
        cpu = DeviceRef.CPU()
        made = nn.LayerList(nn.Linear(width, width, "float32", cpu) for _ in range(layers))
        self.layers = made.stack() if stacked else made
        self.head = nn.Linear(width, 2 * width, "bfloat16", cpu, has_bias=True)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def values(model: Net, seed: int = 0) -> dict[str, np.ndarray]:
    """What to load, the same in every process."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal([int(d) for d in weight.shape]).astype(weight.dtype.np)
        for name, weight in model.raw_state_dict().items()
    }


def filled(model: Net, seed: int = 0) -> Net:
    model.load_state_dict(values(model, seed))
    return model


def no_room(directory: Path) -> dict[str, Any]:
    """A file cannot become as long as it has to be, which shows while the arrays are written."""
    root = directory / "root"
    save(root, None, first=jnp.ones(3))
    model = filled(Net(width=1024))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    found = []
    for begin in (save, lambda *a: save_async(*a).result()):
        try:
            begin(root, model)
        except CheckpointSaveError as error:
            found.append([error.errno, str(error)])
    threads = [one.name for one in threading.enumerate() if one is not threading.main_thread()]
    return {"errors": found, "left": sorted(os.listdir(root)), "threads": threads}


def interrupted(root: Path) -> dict[str, Any]:
    """Ctrl-C while a save runs."""
    save(root, None, first=jnp.ones(3))
    model = filled(Net(width=64))
    writing = saving.Writing

    class Slow(writing):
        def wait(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            response, deadline = saving._running[os.path.realpath(root)], time.monotonic() + 60
            while not response._cancelled and time.monotonic() < deadline:
                time.sleep(0.01)
            super().wait()

    saving.Writing = Slow
    try:
        save(root, model)
        caught = False
    except KeyboardInterrupt:
        caught = True
    saving.Writing = writing
    left = sorted(os.listdir(root))
    return {"caught": caught, "left": left, "next": save(root, model).name}


def leave(directory: Path) -> dict[str, Any]:
    """After an interrupt of another save, the program ends just when an asynchronous one has begun."""
    found = interrupted(directory / "interrupted")
    response = save_async(directory / "root", filled(Net(width=1024)))
    return found | {"done": response.done()}


def save_together(directory: Path) -> dict[str, Any]:
    """All processes save what they hold, and restore it in other places."""
    root = directory / "root"
    mesh = maxjax.make_mesh(model=len(jax.devices()))
    rules = {"*.weight": PartitionSpec("model", None), "*": PartitionSpec()}
    model = filled(Net(True).to(mesh, rules=rules))
    split = jax.make_array_from_callback(
        (8, 24), NamedSharding(mesh, PartitionSpec(None, "model")), lambda part: matrix()[part]
    )
    state = {"split": split, "count": 3, "host": np.arange(5)}
    first = save(root, model, step=5, state=state)
    other = maxjax.make_mesh(data=2, model=len(jax.devices()) // 2)
    again = Net().to(other, rules={"*.weight": PartitionSpec(None, "model")})
    placed = NamedSharding(other, PartitionSpec("data"))
    like = jax.ShapeDtypeStruct((8, 24), np.float32, sharding=placed)
    wanted = {"split": like, "count": 0, "host": np.zeros(5, np.int64)}
    state = restore(root, again, verify=True, state=wanted)["state"]
    pairs = [(state["split"], matrix()), (state["host"], np.arange(5))]
    expected = values(again)
    pairs += [(weight.value, expected[name]) for name, weight in again.raw_state_dict().items()]
    second = save_async(root, model, keep=1).result()
    return {
        "paths": [first.name, second.name],
        "steps": sorted(os.listdir(root)),
        "right": [_held_right(*pair) for pair in pairs],
        "count": state["count"],
    }


def _held_right(array: Any, expected: np.ndarray) -> bool:
    """Whether what this process holds of an array is right."""
    if isinstance(array, np.ndarray):
        return np.array_equal(array, expected)
    return all(
        np.array_equal(np.asarray(shard.data), expected[shard.index])
        for shard in array.addressable_shards
    )


def matrix() -> np.ndarray:
    return np.arange(8 * 24, dtype=np.float32).reshape(8, 24)


SCENARIOS = {one.__name__: one for one in (no_room, leave, save_together)}


def main() -> None:
    scenario, directory, *cluster = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", LOCAL_DEVICES)
    number = 0
    if cluster:
        port, processes, number = map(int, cluster)
        distributed.initialize(f"127.0.0.1:{port}", processes, number, heartbeat_timeout=10)
    found = SCENARIOS[scenario](Path(directory))
    Path(directory, f"{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
