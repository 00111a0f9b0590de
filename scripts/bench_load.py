"""How fast, and in how much memory, a safetensors checkpoint becomes JAX arrays.

    python scripts/bench_load.py            # 1 GB of bfloat16, in one file and in eight
    python scripts/bench_load.py --quick    # small sizes, to see that it runs

Every run is a new process on a warm page cache. The clock starts after the imports and stops when
all arrays are ready, own their memory and have been summed once: JAX's start-up and the compiling
of the sum are included, the same for every method that uses JAX. Memory is the peak resident size
until the arrays are ready, less that after the imports; XLA takes another 64 MB to compile the
sums, whatever is summed. Rounds are interleaved; the figure is the median.
A second table opens a checkpoint of many small tensors with `maxjax.load_weights`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers import installed

METHODS = ("maxjax", "safetensors.numpy", "safetensors.flax")
if __name__ == "__main__" and "--child" not in sys.argv and installed("torch"):
    METHODS += ("safetensors.torch",)
MEGA = 1 << 20
WANTED_RATIO = 1.0
WANTED_MEMORY = 64  # MB above the weights
WANTED_OPEN = (2.0, 300)  # s, MB


# --- the files ------------------------------------------------------------------------------


def shapes(layers: int, hidden: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama of that size."""
    ffn, kv = hidden * 11 // 4, hidden // 8
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            found[f"model.layers.{i}.{name}.weight"] = shape
    return found


def write_file(path: Path, tensors: dict[str, tuple[int, ...]]) -> int:
    """Writes bfloat16 tensors of small random values; returns the bytes of the data."""
    import numpy as np

    rng = np.random.default_rng(0)
    header, at = {}, 0
    for name, shape in tensors.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    # Values near 1 with random mantissas: no NaN, and no two pages alike.
    noise = (rng.integers(0, 1 << 10, 8 * MEGA, np.uint16) + 0x3C00).tobytes()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        left = at
        while left:
            left -= file.write(noise[: min(left, len(noise))])
    return at


def write_set(directory: Path, tensors: dict[str, tuple[int, ...]], files: int) -> int:
    """Writes `tensors` to `files` files with an index (one file: model.safetensors)."""
    directory.mkdir()
    if files == 1:
        return write_file(directory / "model.safetensors", tensors)
    weight_map, total = {}, 0
    names = list(tensors)
    sizes = [_size(tensors[name]) for name in names]
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(files)]
    whole, seen = sum(sizes), 0
    for name, size in zip(names, sizes, strict=True):
        part = min(seen * files // whole, files - 1)
        parts[part][name] = tensors[name]
        seen += size
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{files:05d}.safetensors"
        total += write_file(directory / file, part)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total


def _size(shape: tuple[int, ...]) -> int:
    size = 2
    for dim in shape:
        size *= dim
    return size


# --- one run, in a process of its own -------------------------------------------------------


def memory(field: str) -> float:
    """A field of /proc/self/status in MB: VmRSS now, VmHWM at the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def start() -> tuple[float, float]:
    """(time, resident MB) at the start of a run; resets the peak of the memory."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # then a peak during the imports may count against the method
    return time.perf_counter(), memory("VmRSS")


def child_load(method: str, directory: Path) -> dict[str, float]:
    """Runs one method: a generator that yields the start, the peak when the arrays are ready, and the sum."""
    files = sorted(map(str, directory.glob("*.safetensors")))
    run = {
        "maxjax": _maxjax,
        "safetensors.numpy": _numpy,
        "safetensors.flax": _flax,
        "safetensors.torch": _torch,
    }[method](directory, files)
    begin, resident = next(run)
    peak, total = next(run), next(run)
    return {"seconds": time.perf_counter() - begin, "memory": peak - resident, "sum": total}


def _jax_sum(arrays):
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(arrays)
    yield memory("VmHWM")
    total = jax.jit(lambda array: jnp.sum(array, dtype=jnp.float32))
    yield sum(float(value) for value in [total(array) for array in arrays])


def _maxjax(directory, files):
    import jax

    from maxjax.storage import open_checkpoint

    yield start()
    with open_checkpoint(directory) as table:
        # device_put aliases aligned memory; jnp.asarray would copy it.
        arrays = [jax.device_put(array) for array in table.read_many().values()]
    yield from _jax_sum(arrays)


def _numpy(directory, files):
    import jax.numpy as jnp
    from safetensors.numpy import load_file

    yield start()
    arrays = []
    for file in files:
        arrays.extend(jnp.array(array) for array in load_file(file).values())
    yield from _jax_sum(arrays)


def _flax(directory, files):
    import jax.numpy as jnp  # noqa: F401 (an import, so not on the clock)
    from safetensors.flax import load_file

    yield start()
    arrays = []
    for file in files:
        arrays.extend(load_file(file).values())
    yield from _jax_sum(arrays)


def _torch(directory, files):
    import torch
    from safetensors.torch import load_file

    yield start()
    tensors = []
    for file in files:
        tensors.extend(tensor.clone() for tensor in load_file(file).values())
    yield memory("VmHWM")
    yield sum(float(tensor.sum(dtype=torch.float32)) for tensor in tensors)


def child_open(directory: Path) -> dict[str, float]:
    from maxjax.graph.weights import load_weights

    begin, resident = start()
    weights = load_weights(directory)
    count = sum(1 for _ in weights.items())
    return {
        "seconds": time.perf_counter() - begin,
        "memory": memory("VmHWM") - resident,
        "count": count,
    }


# --- all of them ----------------------------------------------------------------------------


def run_child(*arguments: str) -> dict[str, float]:
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def bench_load(directory: Path, nbytes: int, rounds: int, title: str, quick: bool) -> bool:
    found: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    for number in range(rounds):
        for method in METHODS[number % len(METHODS) :] + METHODS[: number % len(METHODS)]:
            found[method].append(run_child("load", method, str(directory)))
    sums = {method: found[method][0]["sum"] for method in METHODS}
    reference = sums[METHODS[-1]]
    if any(abs(value - reference) > 1e-3 * abs(reference) for value in sums.values()):
        sys.exit(f"the methods read different values: {sums}")
    seconds = {m: statistics.median(run["seconds"] for run in found[m]) for m in METHODS}
    peak = {m: statistics.median(run["memory"] for run in found[m]) for m in METHODS}
    weights = nbytes / MEGA
    print(f"\n{title}: {weights:.0f} MB of bfloat16, median of {rounds}")
    print(f"{'method':20} {'seconds':>8} {'ours/theirs':>12} {'peak MB':>9} {'above weights':>14}")
    for method in METHODS:
        ratio = "" if method == "maxjax" else f"{seconds['maxjax'] / seconds[method]:.2f}"
        print(f"{method:20} {seconds[method]:8.3f} {ratio:>12} {peak[method]:9.0f} "
              f"{peak[method] - weights:14.0f}")  # fmt: skip
    if quick:
        print("too small to judge: what is timed is the start of JAX and the compiling of the sum")
        return True
    slower = [m for m in METHODS if seconds["maxjax"] > WANTED_RATIO * seconds[m]]
    over = peak["maxjax"] - weights > WANTED_MEMORY
    print(f"wanted: ours/theirs <= {WANTED_RATIO:.2f}, above weights <= {WANTED_MEMORY} MB: "
          f"{'NOT REACHED' if slower or over else 'reached'}")  # fmt: skip
    return not slower and not over


def bench_open(directory: Path, rounds: int, title: str) -> bool:
    found = [run_child("open", "-", str(directory)) for _ in range(rounds)]
    seconds = statistics.median(run["seconds"] for run in found)
    peak = statistics.median(run["memory"] for run in found)
    good = seconds < WANTED_OPEN[0] and peak < WANTED_OPEN[1]
    print(f"{title:40} {found[0]['count']:8.0f} tensors {seconds:7.2f} s {peak:6.0f} MB   "
          f"wanted < {WANTED_OPEN[0]:.0f} s, < {WANTED_OPEN[1]} MB: "
          f"{'reached' if good else 'NOT REACHED'}")  # fmt: skip
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--rounds", type=int, help="default 5, or 1 with --quick")
    parser.add_argument("--dir", help="where the temporary files go (default: the system's place)")
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure is not reached")
    parser.add_argument("--child", nargs=3, metavar=("KIND", "METHOD", "DIR"), help="internal")
    options = parser.parse_args()
    if options.child:
        kind, method, directory = options.child
        run = child_load(method, Path(directory)) if kind == "load" else child_open(Path(directory))
        print(json.dumps(run))
        return 0
    rounds = options.rounds or (1 if options.quick else 5)
    small = 2_000 if options.quick else 100_000
    model = shapes(4, 256, 1000) if options.quick else shapes(11, 2048, 20_000)
    tiny = {f"layers.{i // 100}.experts.{i % 100}.w.weight": (2, 4) for i in range(small)}
    good = True
    with tempfile.TemporaryDirectory(prefix="maxjax-bench-", dir=options.dir) as place:
        for files, title in ((1, "one file"), (8, "eight files")):
            directory = Path(place) / f"load-{files}"
            nbytes = write_set(directory, model, files)
            good &= bench_load(directory, nbytes, rounds, title, options.quick)
            for path in directory.iterdir():
                path.unlink()
        print("\nopening many small tensors")
        for files, title in ((1, "one file"), (20, "20 files and an index")):
            directory = Path(place) / f"open-{files}"
            write_set(directory, tiny, files)
            good &= bench_open(directory, rounds, title)
    return 0 if good or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
