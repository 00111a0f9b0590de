"""How fast ggml's quantised blocks become float32, against the gguf package.

    python scripts/bench_blocks.py            # 256 MB of values of every type
    python scripts/bench_blocks.py --quick    # 4 MB, to see that it runs

maxjax and the package decode the same random bytes into fresh memory, in turns, each in one call; the
first pair is not counted. Printed are the medians of the times and of the ratios of each pair, the GB
of values a second of maxjax, and for a type that the package does not decode, maxjax's time alone.
--threads 1 limits maxjax to one thread, as the package has; --only a,b chooses types.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import gguf
import numpy as np
from gguf import quants

from maxjax.storage.blocks import DECODERS, LAYOUTS, decode

ROW = 4096  # values
WANTED = {"Q4_K": 5.0, "Q6_K": 5.0}


def measure(run: Callable[[], object]) -> float:
    """Seconds of one call, whose result is freed afterwards."""
    begin = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - begin
    del result
    return seconds


def random_blocks(name: str, megabytes: int) -> np.ndarray:
    """Rows of random bytes that decode to this many MB; scales may be NaN, which takes no longer."""
    rows = megabytes * (1 << 20) // 4 // ROW
    layout = LAYOUTS[name]
    nbytes = ROW // layout.elements * layout.nbytes
    return np.random.default_rng(0).integers(0, 256, (rows, nbytes), np.uint8)


def bench(name: str, megabytes: int, pairs: int, threads: int | None) -> bool:
    """Prints the line of one type; returns whether it reaches its wanted ratio."""
    blocks = random_blocks(name, megabytes)
    kind = getattr(gguf.GGMLQuantizationType, name, None)
    theirs_too = kind in quants._type_traits
    ours, theirs = [], []
    for pair in range(pairs + 1):
        calls = [(ours, lambda: decode(name, blocks, threads=threads))]
        if theirs_too:
            calls.append((theirs, lambda: quants.dequantize(blocks, kind)))
        for times, call in calls if pair % 2 else calls[::-1]:
            times.append(measure(call))
    seconds = statistics.median(ours[1:])
    line = f"{name:8} {seconds * 1000:9.1f} {megabytes / 1024 / seconds:8.2f}"
    ratio = None
    if theirs_too:
        ratio = statistics.median(b / a for a, b in zip(ours[1:], theirs[1:], strict=True))
        line += f" {statistics.median(theirs[1:]) * 1000:9.1f} {ratio:8.2f}"
    wanted = WANTED.get(name)
    if wanted:
        line += f"   wanted {wanted}"
    print(line, flush=True)
    return wanted is None or (ratio is not None and ratio >= wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 MB, one pair")
    parser.add_argument("--pairs", type=int, help="default 9, or 1 with --quick")
    parser.add_argument("--threads", type=int, help="of ours; default: as decode itself chooses")
    parser.add_argument("--only", help="types, separated by commas")
    parser.add_argument("--check", action="store_true", help="exit 1 when a ratio is not reached")
    options = parser.parse_args()
    megabytes = 4 if options.quick else 256
    pairs = options.pairs or (1 if options.quick else 9)
    names = options.only.split(",") if options.only else list(DECODERS)
    print(f"{megabytes} MB of values, median of {pairs} pairs")
    print(f"{'type':8} {'ours ms':>9} {'GB/s':>8} {'gguf ms':>9} {'gguf/ours':>8}")
    with np.errstate(all="ignore"):
        good = [bench(name, megabytes, pairs, options.threads) for name in names]
    return 0 if all(good) or options.quick or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
