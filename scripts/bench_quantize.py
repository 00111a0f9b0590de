"""How fast float32 is quantised to ggml's blocks by compiled encoders, NumPy and llama.cpp, on one core.

    python scripts/bench_quantize.py            # 32 MB of normal values of every type
    python scripts/bench_quantize.py --quick    # 1 MB, to see that it runs

Each line has GB of float32 a second of one thread: the compiled encoders (`maxjax env` names their
instruction set), the encoders in NumPy, which run where there is no compiler, and ggml's own
`ggml_quantize_chunk`, which `llama-quantize` calls for every piece of a tensor; and the ratio of the
first to the last. They take turns on the same values; figures are medians. llama.cpp's library is that
of the Python that LLAMA_CPP_PYTHON names (see scripts/llama_cpp_peer.py), or the file GGML_LIBRARY;
without one its column is empty. --importance adds a column for blocks with an importance matrix.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import llama_cpp_peer
import numpy as np

from maxjax.storage.blocks import LAYOUTS, encoders
from maxjax.storage.blocks.encode_native import encode_native, level
from maxjax.storage.gguf.types import GGML_TYPES_BY_NAME

ROW = 4096  # values
# Prints the folder of the libraries; importing llama_cpp also checks that they fit this machine.
_FOLDER = "import llama_cpp, pathlib; print(pathlib.Path(llama_cpp.__file__).parent / 'lib')"


def ggml_library() -> str | None:
    """The path of ggml's base library, or None."""
    if found := os.environ.get("GGML_LIBRARY"):
        return found
    if not llama_cpp_peer.available():
        return None
    done = subprocess.run([llama_cpp_peer.python(), "-c", _FOLDER], capture_output=True, text=True)
    path = os.path.join(done.stdout.strip(), "libggml-base.so")
    return path if os.path.exists(path) else None


def ggml_quantiser(path: str) -> Callable[[str, np.ndarray, np.ndarray | None], np.ndarray]:
    """`ggml_quantize_chunk` as a function of a type's name, rows and importance."""
    chunk = ctypes.CDLL(path).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def quantise(name: str, rows: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        layout, number = LAYOUTS[name], GGML_TYPES_BY_NAME[name].number
        out = np.empty((rows.size // layout.elements, layout.nbytes), np.uint8)
        address = None if weights is None else weights.ctypes.data
        chunk(number, rows.ctypes.data, out.ctypes.data, 0, len(rows), rows.shape[1], address)
        return out

    return quantise


def ours(name: str, rows: np.ndarray, weights: np.ndarray | None, how: str) -> np.ndarray:
    layout = LAYOUTS[name]
    values = rows.reshape(-1, layout.elements)
    blocks = np.empty((len(values), layout.nbytes), np.uint8)
    if how == "numpy":
        step = (
            encoders.PIECE // layout.elements // (ROW // layout.elements) * (ROW // layout.elements)
        )
        for at in range(0, len(values), step):
            part = slice(at, at + step)
            encoders.encode_with_numpy(layout, values[part], weights, blocks[part])
    elif not encode_native(name, values, weights, blocks):
        raise RuntimeError("there are no compiled encoders: maxjax kernels build")
    return blocks


def bench(name: str, rows: np.ndarray, weights: np.ndarray | None, pairs: int, ggml: object) -> str:
    """The line of one type."""
    calls: dict[str, Callable[[], np.ndarray]] = {
        "numpy": lambda: ours(name, rows, weights, "numpy")
    }
    if level() != "numpy":
        calls["compiled"] = lambda: ours(name, rows, weights, "compiled")
    if ggml is not None:
        calls["llama.cpp"] = lambda: ggml(name, rows, weights)  # type: ignore[operator]
    times: dict[str, list[float]] = {how: [] for how in calls}
    results = {}
    for pair in range(pairs + 1):
        for how in list(calls) if pair % 2 else list(calls)[::-1]:
            begin = time.perf_counter()
            results[how] = calls[how]()
            if pair:
                times[how].append(time.perf_counter() - begin)
    rate = {how: rows.nbytes / 1e9 / statistics.median(each) for how, each in times.items()}
    line = f"{name + ('' if weights is None else ' importance'):17}"
    line += "".join(
        f" {rate[how]:10.3f}" if how in rate else f" {'':10}"
        for how in ("compiled", "numpy", "llama.cpp")
    )
    best = times.get("compiled", times["numpy"])
    if "llama.cpp" in times:
        ratio = statistics.median(b / a for a, b in zip(best, times["llama.cpp"], strict=True))
        same = np.mean((results["llama.cpp"] == results["numpy"]).all(1))
        line += f" {ratio:8.2f} {same:9.2%}"
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 MB, one pair")
    parser.add_argument("--pairs", type=int, help="default 5, or 1 with --quick")
    parser.add_argument("--importance", action="store_true", help="with an importance matrix too")
    parser.add_argument("--only", help="types, separated by commas")
    options = parser.parse_args()
    megabytes, pairs = (1, 1) if options.quick else (32, 5)
    rows = np.random.default_rng(0).standard_normal((megabytes << 18) // ROW * ROW, np.float32)
    rows = rows.reshape(-1, ROW)
    weights = np.random.default_rng(1).random(ROW, np.float32)
    path = ggml_library()
    if path is None:
        print(llama_cpp_peer.MISSING.format(python=llama_cpp_peer.python()), file=sys.stderr)
    ggml = ggml_quantiser(path) if path else None
    print(f"compiled: {level()}; GB of float32 a second on one core; same: blocks equal to NumPy's")
    print(f"{'':17} {'compiled':>10} {'NumPy':>10} {'llama.cpp':>10} {'ratio':>8} {'same':>9}")
    for name in options.only.split(",") if options.only else encoders.ENCODERS:
        print(bench(name, rows, None, options.pairs or pairs, ggml), flush=True)
        if options.importance and name not in ("Q8_0", "MXFP4"):
            print(bench(name, rows, weights, options.pairs or pairs, ggml), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
