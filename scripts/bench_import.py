"""What `import maxjax` adds to `import jax`, in fresh processes, interleaved.

maxjax imports its parts on first use, so the last row uses one that needs nearly all of them:
what counts is that row less the first. Wanted: at most 0.1 s.
"""

import argparse
import os
import statistics
import subprocess
import sys

STATEMENTS = ("import jax", "import maxjax", "import maxjax; maxjax.load, maxjax.Module")
WANTED = 0.1


def seconds(statement: str) -> float:
    """The time `statement` takes in a new interpreter, without that interpreter's start."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return float(subprocess.check_output([sys.executable, "-c", code], env=environment))


def main() -> None:
    """Prints the medians, and that of the differences between last and first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds instead of 15")
    rounds = 3 if parser.parse_args().quick else 15
    for statement in STATEMENTS:
        seconds(statement)  # warms the page cache and writes the bytecode
    times = [[seconds(statement) for statement in STATEMENTS] for _ in range(rounds)]
    for statement, samples in zip(STATEMENTS, zip(*times, strict=True), strict=True):
        print(f"{statement:42} {statistics.median(samples):.3f} s")
    difference = statistics.median(row[-1] - row[0] for row in times)
    print(f"{'added by maxjax':42} {difference:.3f} s  (wanted <= {WANTED} s; {rounds} rounds)")


if __name__ == "__main__":
    main()
