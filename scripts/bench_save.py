"""How fast, and in how much memory, a model is saved and restored, compared with orbax and safetensors.

    python scripts/bench_save.py            # 1 GB of float32, on 1 device and on 8 CPU devices
    python scripts/bench_save.py --quick    # small sizes, to see that it runs

maxjax writes the checksum of every tensor, flushes what it wrote to the disk and compares the
checksums when it reads. The others are called as their documentation says: orbax
(`ocp.save`, `ocp.load`), and `safetensors.flax` with the fsync that makes a file durable.
Every run is a new process, pairs take turns, and the figure is the median of the ratios. The
time of a save is from arrays that are ready to a checkpoint on the disk; that of a restore, from
the path to arrays that are ready, with the file in the page cache. Each process has saved and
restored a tiny model before. Memory is the peak resident size less that before the run, and for a
restore less the arrays themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_load import memory

PEERS = {"orbax": "orbax", "safetensors": "safetensors + fsync"}
WANTED_RATIO = 1.1
WANTED_MEMORY = 64  # MB
SIDE = 4096  # rows and columns of the square weights
LAYERS = 16


def model_of(layers: int, side: int, devices: int, is_lazy: bool = False):
    """Square Linear layers with random values or none, sharded over the devices by rows."""
    import jax

    import maxjax
    from maxjax import nn
    from maxjax.graph import DeviceRef, ShardingStrategy

    model = nn.LayerList(nn.Linear(side, side, "float32", DeviceRef.CPU()) for _ in range(layers))
    if devices > 1:
        model.to(
            maxjax.make_mesh(model=devices), sharding_strategy=ShardingStrategy.rowwise(devices)
        )
    return model if is_lazy else jax.block_until_ready(maxjax.init(model, jax.random.key(0)))


def abstract(model):
    import jax

    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: jax.ShapeDtypeStruct(
            tuple(map(int, w.shape)), w.dtype.np, sharding=w.sharding or first
        )
        for name, w in model.raw_state_dict().items()
    }


# --- the methods: save(model, path), restore(model, wanted, path) -> arrays --------------------------


def save_safetensors(model, path: Path) -> None:
    from safetensors.flax import save_file

    path.mkdir()
    save_file(model.state_dict(), str(path / "model.safetensors"))
    for name in (path / "model.safetensors", path):
        fd = os.open(name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def restore_safetensors(model, wanted, path: Path):
    import jax
    from safetensors.flax import load_file

    found = load_file(str(path / "model.safetensors"))
    return {name: jax.device_put(a, wanted[name].sharding) for name, a in found.items()}


def save_orbax(model, path: Path) -> None:
    import orbax.checkpoint.experimental.v1 as ocp

    ocp.save(str(path), model.state_dict())


def restore_orbax(model, wanted, path: Path):
    import orbax.checkpoint.experimental.v1 as ocp

    return ocp.load(str(path), wanted)


def save_maxjax_safetensors(model, path: Path) -> None:
    import maxjax

    maxjax.save_pretrained(model, path)


def restore_maxjax_safetensors(model, wanted, path: Path):
    import maxjax

    with maxjax.load_weights(path) as weights:
        model.load_state_dict(weights)
    return model.state_dict()


def save_maxjax_orbax(model, path: Path) -> None:
    import maxjax

    maxjax.checkpoint.save(path, model)


def restore_maxjax_orbax(model, wanted, path: Path):
    import maxjax

    maxjax.checkpoint.restore(path, model)
    return model.state_dict()


METHODS = {
    ("safetensors", "maxjax"): (save_maxjax_safetensors, restore_maxjax_safetensors),
    ("safetensors", "peer"): (save_safetensors, restore_safetensors),
    ("orbax", "maxjax"): (save_maxjax_orbax, restore_maxjax_orbax),
    ("orbax", "peer"): (save_orbax, restore_orbax),
}


# --- one run, in a process of its own -------------------------------------------------------


def child(format: str, who: str, act: str, path: Path, layers: int, side: int, devices: int):
    import jax

    save, restore = METHODS[format, who]
    tiny = model_of(2, 64, devices)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        save(tiny, Path(folder) / "tiny")
        jax.block_until_ready(restore(tiny, abstract(tiny), Path(folder) / "tiny"))
    # The other libraries are given shapes and shardings to restore.
    model = model_of(layers, side, devices, is_lazy=act == "restore")
    wanted = abstract(model)
    os.sync()
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = memory("VmRSS"), time.perf_counter()
    if act == "save":
        save(model, path)
    else:
        jax.block_until_ready(restore(model, wanted, path))
    seconds = time.perf_counter() - begin
    nbytes = 4 * layers * side * side / 2**20 if act == "restore" else 0
    print(json.dumps({"seconds": seconds, "memory": memory("VmHWM") - before - nbytes}))


def run(format: str, who: str, act: str, path: Path, options) -> dict[str, float]:
    names = [format, who, act, str(path), str(options.layers), str(options.side)]
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
    command = [sys.executable, __file__, "--child", *names, "--devices", str(options.devices)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def pairs(format: str, options, folder: Path) -> None:
    figures: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for who in ("maxjax", "peer"):
            path = folder / who
            for act in ("save", "restore"):
                figures.setdefault((act, who), []).append(run(format, who, act, path, options))
            shutil.rmtree(path)
    shard = 4 * options.side**2 / 2**20
    for act in ("save", "restore"):
        ours, theirs = figures[act, "maxjax"], figures[act, "peer"]
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(ours, theirs, strict=True)]
        ratio, extra = statistics.median(ratios), statistics.median(a["memory"] for a in ours)
        mark = "" if ratio <= WANTED_RATIO else f"  (wanted: at most {WANTED_RATIO})"
        more = "" if extra <= shard + WANTED_MEMORY else f" (wanted: {shard + WANTED_MEMORY:.0f})"
        print(
            f"{format:11} {act:7} {options.devices} devices: {ratio:.2f} of {PEERS[format]}"
            f" ({statistics.median(a['seconds'] for a in ours):.2f} s,"
            f" {statistics.median(b['seconds'] for b in theirs):.2f} s){mark};"
            f" memory +{extra:.0f} MB{more}, theirs"
            f" +{statistics.median(b['memory'] for b in theirs):.0f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--devices", type=int, default=None)
    parser.add_argument("--format", choices=list(PEERS), default=None)
    parser.add_argument("--child", nargs=6)
    options = parser.parse_args()
    if options.child:
        format, who, act, path, layers, side = options.child
        child(format, who, act, Path(path), int(layers), int(side), options.devices)
        return
    if options.quick:
        options.rounds, options.layers, options.side = 1, 4, 512
    with tempfile.TemporaryDirectory() as folder:
        for format in [options.format] if options.format else PEERS:
            for devices in [options.devices] if options.devices else (1, 8):
                options.devices = devices
                pairs(format, options, Path(folder))
                options.devices = None


if __name__ == "__main__":
    main()
