"""How fast, and in how much memory, GGUF, PyTorch and npz files are read into arrays that own their memory.

    python scripts/bench_formats.py            # files of 1 GB, five pairs
    python scripts/bench_formats.py --quick    # 10 MB, to see that it runs

Every file holds the tensors of a Llama. maxjax loads it as a user does, into a Module of its weights by
``load_state_dict(load_weights(path))``; the other readers end with arrays that alias neither the
file nor one another. Every run is a new process on a warm page cache. The clock starts after the
imports and stops when all arrays have been summed once: for JAX it includes the start-up and the
compiling of the sums, which torch does not have. Memory is the peak resident size when the arrays
are ready, less that after the imports and less the arrays; pages of the file that a reader has
mapped count, as they do for a cgroup. Rounds are interleaved; the figures are medians, ratios
are taken within a round. --only a,b chooses files by parts of their names. Files are made one at a
time in a temporary directory. The last table decodes blocks in memory with NumPy, maxjax in
two threads (``bench_blocks.py`` has all types).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench_load import MEGA, memory, start
from peers import installed

HIDDEN = 1024
WANTED = 1.0  # maxjax's time over the other reader's
WANTED_DECODING = {"Q4_K": 5.0, "Q6_K": 5.0}  # the gguf package's time over maxjax's


def shapes(nbytes: float, itemsize: float) -> dict[str, tuple[int, ...]]:
    """Shapes of the layers of a Llama of about ``nbytes`` in all; all axes are multiples of 256."""
    hidden = HIDDEN if nbytes > 64 * MEGA else HIDDEN // 4
    layer = {
        "attn_q": (hidden, hidden),
        "attn_k": (hidden // 4, hidden),
        "attn_v": (hidden // 4, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (3 * hidden, hidden),
        "ffn_up": (3 * hidden, hidden),
        "ffn_down": (hidden, 3 * hidden),
    }
    norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    values = sum(rows * columns for rows, columns in layer.values())
    layers = max(1, round(nbytes / itemsize / values))
    return {
        f"blk.{i}.{name}.weight": shape
        for i in range(layers)
        for name, shape in (layer | norms).items()
    }


def noise(shape: tuple[int, ...], dtype: str, seed: int = 0):
    """Values near 1 with random mantissas: no NaN, and no two pages alike."""
    import ml_dtypes
    import numpy as np

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = np.random.default_rng(seed).random(shape, np.float32)
    values += 0.5
    return values.astype(kind)


# --- the files ------------------------------------------------------------------------------


def write_gguf(path: Path, nbytes: float, name: str) -> None:
    """Matrices of type ``name`` and norms of F32; scales are small, and the packed bits random."""
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType[name]
    elements, block = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(path, "llama")
    made: dict[tuple[int, ...], np.ndarray] = {}
    for tensor, shape in shapes(nbytes, block / elements).items():
        if len(shape) == 1:
            writer.add_tensor(tensor, noise(shape, "float32"))
            continue
        if shape not in made:
            made[shape] = _matrix(name, shape, elements, block)
        writer.add_tensor(tensor, made[shape], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrix(name: str, shape: tuple[int, ...], elements: int, block: int):
    import numpy as np

    if elements == 1:
        plain = {"F16": "float16", "BF16": "bfloat16"}[name]
        return noise(shape, plain).view(np.uint8 if name == "BF16" else np.float16)
    from maxjax.storage.blocks import LAYOUTS

    rows, columns = shape[0], shape[1] // elements * block
    blocks = np.random.default_rng(0).integers(0, 256, (rows, columns), np.uint8)
    records = blocks.reshape(-1, block).view(LAYOUTS[name].record)
    for field in LAYOUTS[name].fields:
        if field.code == "f2":
            records[field.name] = 0.01
    return blocks


def write_torch(path: Path, nbytes: float, is_zip: bool) -> None:
    import torch

    tensors = {
        name: torch.rand(shape, dtype=torch.bfloat16) for name, shape in shapes(nbytes, 2).items()
    }
    torch.save(tensors, path, _use_new_zipfile_serialization=is_zip)


def write_npz(path: Path, nbytes: float, is_compressed: bool) -> None:
    import numpy as np

    made: dict[tuple[int, ...], np.ndarray] = {}
    for shape in set(shapes(nbytes, 2).values()):
        made[shape] = noise(shape, "float16")
    save = np.savez_compressed if is_compressed else np.savez
    save(path, **{name: made[shape] for name, shape in shapes(nbytes, 2).items()})


# --- the readers ----------------------------------------------------------------------------
# Each is a generator: it imports up to the first yield, and then yields its arrays when they are ready.

Reader = Callable[[str], Iterator]


def read_maxjax(path: str):
    import jax

    from maxjax.graph import DeviceRef, Weight
    from maxjax.graph.weights import load_weights
    from maxjax.nn import Module

    class Tensors(Module):
        def __call__(self):
            raise NotImplementedError

    yield
    weights, model = load_weights(path), Tensors()
    for number, (name, place) in enumerate(weights.items()):
        data = place.data()
        encoding = data.quantization_encoding
        weight = Weight(name, data.dtype, data.shape, DeviceRef.CPU(), encoding)
        setattr(model, f"w{number}", weight)
    model.load_state_dict(weights)
    yield jax.tree.leaves(model)


def read_gguf(path: str):
    import jax.numpy as jnp
    import ml_dtypes
    from gguf import GGMLQuantizationType, GGUFReader

    yield
    arrays = []
    for tensor in GGUFReader(path).tensors:
        data = tensor.data
        if tensor.tensor_type == GGMLQuantizationType.BF16:
            data = data.view(ml_dtypes.bfloat16)
        arrays.append(jnp.array(data))
    yield arrays


def read_gguf_decoded(path: str):
    import jax.numpy as jnp
    from gguf import GGUFReader
    from gguf.quants import dequantize

    yield
    yield [jnp.asarray(dequantize(t.data, t.tensor_type)) for t in GGUFReader(path).tensors]


def read_torch(path: str):
    import torch

    yield
    yield list(torch.load(path, weights_only=True).values())


def read_torch_clone(path: str):
    import torch

    yield
    yield [tensor.clone() for tensor in torch.load(path, weights_only=True).values()]


def read_torch_mmap(path: str):
    import torch

    yield
    found = torch.load(path, weights_only=True, mmap=True)
    yield [tensor.clone() for tensor in found.values()]


def read_numpy(path: str):
    import jax.numpy as jnp
    import numpy as np

    yield
    with np.load(path) as archive:
        yield [jnp.asarray(archive[name]) for name in archive.files]


def total(arrays: list) -> float:
    """The sum of all values, in float32, or int32 for packed bytes."""
    if type(arrays[0]).__module__ == "torch":
        import torch

        return sum(float(tensor.sum(dtype=torch.float32)) for tensor in arrays)
    compiled = _sum()
    return sum(float(value) for value in [compiled(array) for array in arrays])


@functools.cache
def _sum() -> Callable:
    import jax
    import jax.numpy as jnp

    def of_one(array):
        packed = array.dtype == jnp.uint8
        return jnp.sum(array, dtype=jnp.uint32 if packed else jnp.float32)

    return jax.jit(of_one)


@dataclass(frozen=True)
class Case:
    """A kind of file, its readers, and the reader that maxjax should be as fast as."""

    title: str
    suffix: str
    write: Callable[[Path, float], None]
    theirs: dict[str, Reader]
    wanted: str | None = None  # the name of that reader, a key of theirs
    factor: float = 1.0  # bytes of arrays for one byte of the file

    @property
    def readers(self) -> dict[str, Reader]:
        return {"maxjax": read_maxjax, **self.theirs}


def _gguf(name: str, wanted: str | None = "gguf + copy") -> Case:
    def write(path: Path, nbytes: float) -> None:
        write_gguf(path, nbytes, name)

    return Case(f"GGUF {name}", "gguf", write, {"gguf + copy": read_gguf}, wanted)


def _decoded(name: str, factor: float) -> Case:
    def write(path: Path, nbytes: float) -> None:
        write_gguf(path, nbytes / factor, name)

    theirs = {"gguf dequantize": read_gguf_decoded}
    return Case(f"GGUF {name} decoded", "gguf", write, theirs, None, factor)


_TORCH: dict[str, Reader] = {
    "torch.load": read_torch,
    "torch.load + clone": read_torch_clone,
    "torch.load(mmap) + clone": read_torch_mmap,
}
_OLD: dict[str, Reader] = {k: v for k, v in _TORCH.items() if "mmap" not in k}
_NUMPY: dict[str, Reader] = {"np.load": read_numpy}
CASES = [
    _gguf("Q4_K"),
    _gguf("F16"),
    _gguf("BF16"),
    Case("PyTorch", "bin", lambda p, n: write_torch(p, n, True), _TORCH, "torch.load + clone"),
    Case("PyTorch legacy", "bin", lambda p, n: write_torch(p, n, False), _OLD),
    Case("npz stored", "npz", lambda p, n: write_npz(p, n, False), _NUMPY),
    Case("npz compressed", "npz", lambda p, n: write_npz(p, n, True), _NUMPY),
    _decoded("Q3_K", 256 * 4 / 110),
    _decoded("IQ3_S", 256 * 4 / 110),
]


# --- one run --------------------------------------------------------------------------------


def run(case: Case, reader: str, path: str) -> dict[str, float]:
    """Reads a file once, in this process."""
    steps = case.readers[reader](path)
    next(steps)
    begin, resident = start()
    arrays = next(steps)
    if "jax" in type(arrays[0]).__module__:
        import jax

        jax.block_until_ready(arrays)
    ready, peak = time.perf_counter() - begin, memory("VmHWM")
    found = total(arrays)
    nbytes = sum(array.nbytes for array in arrays)
    seconds = time.perf_counter() - begin
    above = peak - resident - nbytes / MEGA
    return {"seconds": seconds, "ready": ready, "memory": above, "sum": found, "bytes": nbytes}


def run_child(case: Case, reader: str, path: str) -> dict[str, float]:
    """Reads a file once, in a new process."""
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, __file__, "--child", case.title, reader, path],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{case.title}: {reader} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


# --- all of them ----------------------------------------------------------------------------


def bench(case: Case, path: Path, pairs: int, quick: bool) -> bool:
    """Prints the table of one file; returns whether the wanted ratio is reached."""
    readers = list(case.readers)
    found: dict[str, list[dict[str, float]]] = {reader: [] for reader in readers}
    one = run if quick else run_child
    for number in range(pairs):
        for reader in readers if number % 2 else readers[::-1]:
            found[reader].append(one(case, reader, str(path)))
    sums = {reader: runs[0]["sum"] for reader, runs in found.items()}
    if any(abs(value - sums["maxjax"]) > 1e-3 * abs(sums["maxjax"]) for value in sums.values()):
        sys.exit(f"{case.title}: the readers give different values: {sums}")
    size, nbytes = path.stat().st_size / MEGA, found["maxjax"][0]["bytes"] / MEGA
    print(f"\n{case.title}: {size:.0f} MB of file, {nbytes:.0f} MB of arrays, {pairs} pairs")
    print(f"{'reader':25} {'seconds':>8} {'from':>7} {'to':>7} {'ready':>7} {'ours/theirs':>12} "
          f"{'MB above':>9}")  # fmt: skip
    good = True
    for reader in readers:
        good &= _line(found, reader, case.wanted == reader and not quick)
    return good


def _line(found: dict[str, list[dict[str, float]]], reader: str, is_judged: bool) -> bool:
    def column(name: str) -> list[float]:
        return [run[name] for run in found[reader]]

    ours = [run["seconds"] for run in found["maxjax"]]
    ratio = statistics.median(a / b for a, b in zip(ours, column("seconds"), strict=True))
    good = not is_judged or ratio <= WANTED
    seconds = column("seconds")
    line = (f"{reader:25} {statistics.median(seconds):8.3f} {min(seconds):7.3f} "
            f"{max(seconds):7.3f} {statistics.median(column('ready')):7.3f} "
            f"{'' if reader == 'maxjax' else f'{ratio:.2f}':>12} "
            f"{statistics.median(column('memory')):9.0f}")  # fmt: skip
    if is_judged:
        line += f"   wanted <= {WANTED:.2f}: {'reached' if good else 'NOT REACHED'}"
    print(line, flush=True)
    return good


def bench_decoding(nbytes: float, pairs: int, quick: bool) -> bool:
    """Blocks in memory → float32 with NumPy: maxjax's decoders against those of the gguf package."""
    import gguf
    import numpy as np
    from gguf.quants import dequantize

    from maxjax.storage.blocks import LAYOUTS, decode

    good, rows = True, max(1, int(nbytes / 4 / 4096))
    print(f"\nblocks to {rows * 4096 * 4 / MEGA:.0f} MB of float32 in memory, {pairs} pairs")
    print(f"{'type':8} {'ours s':>8} {'gguf s':>8} {'gguf/ours':>10} {'from':>6} {'to':>6}")
    for name, wanted in WANTED_DECODING.items():
        blocks = _matrix(name, (rows, 4096), 256, LAYOUTS[name].nbytes)
        kind = gguf.GGMLQuantizationType[name]
        ours, theirs = [], []
        with np.errstate(all="ignore"):
            for number in range(pairs + 1):  # the first is not counted
                calls = [
                    (ours, lambda name=name, blocks=blocks: decode(name, blocks)),
                    (theirs, lambda kind=kind, blocks=blocks: dequantize(blocks, kind)),
                ]
                for times, call in calls if number % 2 else calls[::-1]:
                    begin = time.perf_counter()
                    values = call()
                    times.append(time.perf_counter() - begin)
                    del values
        ratios = [b / a for a, b in zip(ours[1:], theirs[1:], strict=True)]
        reached = statistics.median(ratios) >= wanted
        good &= reached or quick
        print(f"{name:8} {statistics.median(ours[1:]):8.3f} {statistics.median(theirs[1:]):8.3f} "
              f"{statistics.median(ratios):10.2f} {min(ratios):6.2f} {max(ratios):6.2f}"
              + ("" if quick else f"   wanted >= {wanted:.1f}: "
                 f"{'reached' if reached else 'NOT REACHED'}"), flush=True)  # fmt: skip
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 MB, two pairs, in one process")
    parser.add_argument("--pairs", type=int, help="default 5, or 2 with --quick")
    parser.add_argument("--bytes", type=float, help="of each file; default 1e9")
    parser.add_argument("--only", help="parts of titles, separated by commas; 'blocks': the last")
    parser.add_argument("--dir", help="where the temporary files go (default: the system's place)")
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure is not reached")
    parser.add_argument("--child", nargs=3, metavar=("TITLE", "READER", "PATH"), help="internal")
    options = parser.parse_args()
    if options.child:
        title, reader, path = options.child
        case = next(case for case in CASES if case.title == title)
        print(json.dumps(run(case, reader, path)))
        return 0
    pairs = options.pairs or (2 if options.quick else 5)
    nbytes = options.bytes or (1e7 if options.quick else 1e9)
    only = options.only.split(",") if options.only else [""]
    good = True
    if options.quick:
        print("too small to judge, and all in one process: neither times nor memory say much")
    with tempfile.TemporaryDirectory(prefix="maxjax-bench-", dir=options.dir) as place:
        has_torch = installed("torch")
        for case in CASES:
            if not any(part in case.title for part in only):
                continue
            if case.title.startswith("PyTorch") and not has_torch:
                continue
            free = shutil.disk_usage(place).free
            if free < 2 * nbytes:
                sys.exit(f"{place} has {free / 1e9:.1f} GB free; {2 * nbytes / 1e9:.1f} are needed")
            path = Path(place) / f"m.{case.suffix}"
            case.write(path, nbytes)
            good &= bench(case, path, pairs, options.quick)
            path.unlink()
    if any(part in "blocks" for part in only):
        # Pairs of these take less than a second each.
        good &= bench_decoding(nbytes / 4, pairs if options.quick else 2 * pairs, options.quick)
    return 0 if good or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
