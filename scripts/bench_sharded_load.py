"""How fast, and in how much memory, a checkpoint becomes arrays sharded over eight devices.

    python scripts/bench_sharded_load.py            # 512 MB of bfloat16, 8 CPU devices
    python scripts/bench_sharded_load.py --quick    # small sizes, to see that it runs

If sharded by rows, each device's part is contiguous in the file; by columns it is a piece of every
row. Every run is a new process on a warm page cache, the methods take turns, and the figure is
the median. The time is from the path to arrays that are ready; JAX has started and the method has
run once on a tiny file. (In one process that loads again and again, huge pages that are still
warm would make methods that allocate with `malloc` look twice as fast.) The hand-written methods
use memory that JAX takes over without a copy, as maxjax does. Memory is the peak of the anonymous
pages, sampled every millisecond in further processes, less that before the run. The last figure is
the bytes that maxjax reads for four of the eight devices, as one of two processes does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench_load import MEGA, write_file

DEVICES = 8
AXES = {"rows": 0, "columns": 1}
WANTED_RATIO = 1.1
WANTED_MEMORY = 64  # MB above the weights
WANTED_SHARE = 0.51  # of the file, for one of two processes


# --- the methods: (path, axis) -> arrays ----------------------------------------------------


def sharding_of(axis: int):
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    spec = ("d", None) if axis == 0 else (None, "d")
    return NamedSharding(Mesh(jax.devices(), ("d",)), PartitionSpec(*spec))


def regions_of(shape: tuple[int, ...], axis: int):
    """Device -> its (start, stop) on each axis."""
    places = sharding_of(axis).addressable_devices_indices_map(shape)
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in places.items()
    }


def assembled(shape: tuple[int, ...], axis: int, memories: dict):
    """One sharded array from the uint8 memory of each device, which is not copied."""
    import jax
    import ml_dtypes

    part = [size // DEVICES if k == axis else size for k, size in enumerate(shape)]
    pieces = [
        jax.device_put(memory.view(ml_dtypes.bfloat16).reshape(part), device)
        for device, memory in memories.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding_of(axis), pieces)


def parts_of(table, axis: int, devices: int):
    """A Part, with newly allocated memory, for each tensor and each of the first devices."""
    from maxjax.storage import aligned_empty
    from maxjax.storage.parts import Part

    parts = {}
    for entry in table.entries.values():
        for device, region in list(regions_of(entry.shape, axis).items())[:devices]:
            memory = aligned_empty(entry.nbytes // DEVICES)
            parts[entry.name, device] = Part(entry.name, region, memory)
    return parts


def maxjax_load(path: Path, axis: int) -> list:
    import jax

    import maxjax
    from maxjax import nn
    from maxjax.graph import DeviceRef, ShardingStrategy

    def linear(shape: list[int]) -> nn.Linear:
        return nn.Linear(shape[1], shape[0], "bfloat16", DeviceRef.CPU())

    with maxjax.load_weights(path) as weights:
        shapes = {name: [int(d) for d in weight.data().shape] for name, weight in weights.items()}
        model = nn.Sequential([linear(shapes[f"{i}.weight"]) for i in range(len(shapes))])
        strategy = (ShardingStrategy.rowwise, ShardingStrategy.columnwise)[axis](DEVICES)
        model.to(*jax.devices(), sharding_strategy=strategy)
        model.load_state_dict(weights)
    return jax.tree.leaves(model)


def _entries(path: Path) -> tuple[int, dict]:
    """The offset of the data, and the header, read without a library."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


def _one_by_hand(fd: int, start: int, shape: tuple[int, ...], axis: int):
    import numpy as np

    from maxjax.storage import aligned_empty

    rows, columns = shape[0], 2 * shape[1]
    memories = {
        device: aligned_empty(rows * columns // DEVICES) for device in regions_of(shape, axis)
    }
    if axis == 0:
        for memory in memories.values():
            start += os.preadv(fd, [memory], start)
    else:
        step, width = max(1, MEGA // columns), columns // DEVICES
        block = np.empty((step, columns), np.uint8)
        targets = [memory.reshape(rows, width) for memory in memories.values()]
        for row in range(0, rows, step):
            count = min(step, rows - row)
            os.preadv(fd, [block[:count].reshape(-1)], start + row * columns)
            for k, target in enumerate(targets):
                target[row : row + count] = block[:count, k * width : (k + 1) * width]
    return assembled(shape, axis, memories)


def by_hand(path: Path, axis: int, threads: int = 1) -> list:
    start, header = _entries(path)
    fd = os.open(path, os.O_RDONLY)

    def one(spec):
        return _one_by_hand(fd, start + spec["data_offsets"][0], tuple(spec["shape"]), axis)

    try:
        if threads == 1:
            return [one(spec) for spec in header.values()]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(one, header.values()))
    finally:
        os.close(fd)


def by_hand_in_threads(path: Path, axis: int) -> list:
    return by_hand(path, axis, os.cpu_count() or 1)


def peer_flax(path: Path, axis: int) -> list:
    import jax
    from safetensors.flax import load_file

    return [jax.device_put(array, sharding_of(axis)) for array in load_file(path).values()]


def peer_slices(path: Path, axis: int) -> list:
    import jax
    from safetensors import safe_open

    with safe_open(path, framework="flax") as file:
        return [
            jax.make_array_from_callback(
                tuple(file.get_slice(name).get_shape()),
                sharding_of(axis),
                file.get_slice(name).__getitem__,
            )
            for name in file.keys()
        ]


OURS = {"maxjax": maxjax_load}
HAND = {"by hand": by_hand, "by hand, in threads": by_hand_in_threads}
PEERS = {"peer: flax.load_file": peer_flax, "peer: get_slice": peer_slices}
METHODS = {**OURS, **HAND, **PEERS}


# --- one measurement, in a process of its own -------------------------------------------------


def child_time(path: Path, axis: int, name: str) -> float:
    """Seconds of one run; compares the values of the last tensor with the file afterwards."""
    import jax
    import numpy as np

    begin = time.perf_counter()
    arrays = jax.block_until_ready(METHODS[name](path, axis))
    seconds = time.perf_counter() - begin
    start, header = _entries(path)
    last = list(header.values())[-1]
    file = np.memmap(path, np.uint16, "r", start + last["data_offsets"][0])
    if not np.array_equal(np.asarray(arrays[-1]).view(np.uint16).ravel(), file):
        sys.exit(f"{name} loads other values")
    return seconds


def anonymous() -> float:
    """Anonymous resident memory of this process in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise KeyError("RssAnon")


def child_memory(path: Path, axis: int, name: str) -> float:
    """The peak in MB while the method runs."""
    import jax

    gc.collect()
    before, peak, stop = anonymous(), [0.0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.001):
            peak[0] = max(peak[0], anonymous())

    sampler = threading.Thread(target=sample)
    sampler.start()
    arrays = jax.block_until_ready(METHODS[name](path, axis))
    stop.set()
    sampler.join()
    peak[0] = max(peak[0], anonymous())
    del arrays
    return peak[0] - before


def child_share(path: Path, axis: int, name: str) -> float:
    """The share of the weights' bytes that maxjax reads for half of the devices."""
    from maxjax.storage import open_checkpoint
    from maxjax.storage.parts import read_parts

    with open_checkpoint(path) as table:
        count = read_parts(table, list(parts_of(table, axis, DEVICES // 2).values()))
        return count / sum(entry.nbytes for entry in table.entries.values())


def child(kind: str, path: Path, axis: int, name: str) -> float:
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    # Imports all code and starts JAX.
    jax.block_until_ready(METHODS[name](path.with_name("small.safetensors"), axis))
    gc.collect()  # garbage of the imports must not count for a method
    return {"time": child_time, "memory": child_memory, "share": child_share}[kind](
        path, axis, name
    )


# --- all of them ------------------------------------------------------------------------------


def run_child(kind: str, path: Path, axis: int, name: str) -> float:
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    arguments = json.dumps([kind, str(path), axis, name])
    done = subprocess.run(
        [sys.executable, __file__, "--child", arguments],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{arguments} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def bench(path: Path, nbytes: int, title: str, names: list[str], rounds: int, quick: bool) -> bool:
    axis, weights = AXES[title], nbytes / MEGA
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(run_child("time", path, axis, name))
    seconds = {name: statistics.median(times[name]) for name in names}
    above = {name: run_child("memory", path, axis, name) - weights for name in names}
    share = run_child("share", path, axis, "maxjax")
    print(f"\nby {title}: {weights:.0f} MB of bfloat16 on {DEVICES} devices, median of {rounds}")
    print(f"{'method':22} {'seconds':>8} {'ours/theirs':>12} {'MB above weights':>17}")
    for name in names:
        ratio = "" if name in OURS else f"{seconds['maxjax'] / seconds[name]:.2f}"
        print(f"{name:22} {seconds[name]:8.3f} {ratio:>12} {above[name]:17.0f}")
    print(f"read for one of two processes: {share:.1%} of the bytes")
    if quick:
        print("too small to judge the times and the memory")
        return share <= WANTED_SHARE
    good = (
        seconds["maxjax"] <= WANTED_RATIO * seconds["by hand"]
        and above["maxjax"] <= WANTED_MEMORY
        and share <= WANTED_SHARE
    )
    print(f"wanted: ours/by hand <= {WANTED_RATIO:.2f}, above weights <= {WANTED_MEMORY} MB, "
          f"read <= {WANTED_SHARE:.0%}: {'reached' if good else 'NOT REACHED'}")  # fmt: skip
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, no peers")
    parser.add_argument("--rounds", type=int, help="default 9, or 1 with --quick")
    parser.add_argument("--dir", help="where the temporary files go (default: the system's place)")
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure is not reached")
    parser.add_argument("--child", help="internal")
    options = parser.parse_args()
    if options.child:
        kind, path, axis, name = json.loads(options.child)
        print(json.dumps(child(kind, Path(path), axis, name)))
        return 0
    rounds = options.rounds or (1 if options.quick else 9)
    side, count = (2048, 2) if options.quick else (4096, 16)
    names = [*OURS, *HAND] if options.quick else list(METHODS)
    good = True
    with tempfile.TemporaryDirectory(prefix="maxjax-bench-", dir=options.dir) as place:
        path = Path(place) / "model.safetensors"
        nbytes = write_file(path, {f"{i}.weight": (side, side) for i in range(count)})
        write_file(path.with_name("small.safetensors"), {"0.weight": (64, 64)})
        for title in AXES:
            good &= bench(path, nbytes, title, names, rounds, options.quick)
    return 0 if good or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
