"""What a progress bar costs a load: pairs of loads of one file, with the bar and without it.

    python scripts/bench_progress.py            # 0.5 GB, 9 pairs
    python scripts/bench_progress.py --quick    # small, to see that it runs

The bar is drawn into a file in memory ten times a second, from the start of the load on. The figure is the
median of the ratios; wanted is at most 1.02.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy

import maxjax
from maxjax import nn, progress
from maxjax.graph import DeviceRef


class Model(nn.Module):
    """Layers of one linear weight each."""

    def __init__(self, count: int, size: int):
        super().__init__()
        self.layers = nn.LayerList(
            nn.Linear(size, size, "float32", DeviceRef.CPU()) for _ in range(count)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers(x)


def seconds(path: Path, count: int, size: int, shown: str) -> float:
    """The time of one load until all arrays are ready."""
    os.environ[progress.VARIABLE] = shown
    model = Model(count, size)
    began = time.perf_counter()
    model.load_state_dict(maxjax.load_weights(path))
    jax.block_until_ready(jax.tree.leaves(model))
    return time.perf_counter() - began


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    count, size, pairs = (4, 256, 1) if options.quick else (32, 2048, 9)
    sys.stderr = io.StringIO()
    progress.DELAY = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        rng = np.random.default_rng(0)
        names = [f"layers.{i}.weight" for i in range(count)]
        safetensors.numpy.save_file({n: rng.random((size, size), np.float32) for n in names}, path)
        seconds(path, count, size, "1")  # tqdm is imported, the file is in the page cache
        found = []
        for i in range(pairs):
            both = [seconds(path, count, size, shown) for shown in ("01" if i % 2 else "10")]
            found.append(both[1] / both[0] if i % 2 else both[0] / both[1])
        drawn = sys.stderr.getvalue().count("\r")
    rate = count * size * size * 4 / 1e9
    print(f"{rate:.2f} GB, {pairs} pairs, {drawn} drawings")
    print(f"with a bar / without: {statistics.median(found):.3f}  wanted <= 1.02")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
