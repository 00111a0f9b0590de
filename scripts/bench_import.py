"""What `import maxjax` adds to `import jax`, in fresh processes, interleaved.

Both end with jax imported, so a lazy maxjax cannot hide its cost. Wanted: at most 0.1 s more.
"""

import argparse
import os
import statistics
import subprocess
import sys

STATEMENTS = {"import jax": "import jax", "import maxjax, jax": "import maxjax, jax"}
WANTED = 0.1


def seconds(statement: str) -> float:
    """The time `statement` takes in a new interpreter, without that interpreter's start."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return float(subprocess.check_output([sys.executable, "-c", code], env=environment))


def main() -> None:
    """Prints the medians and their difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds instead of 15")
    rounds = 3 if parser.parse_args().quick else 15
    for statement in STATEMENTS.values():
        seconds(statement)  # warms the page cache and writes the bytecode
    times = {name: [] for name in STATEMENTS}
    for _ in range(rounds):
        for name, statement in STATEMENTS.items():
            times[name].append(seconds(statement))
    for name, samples in times.items():
        print(f"{name:20} {statistics.median(samples):.3f} s")
    bare, ours = times.values()
    difference = statistics.median(b - a for a, b in zip(bare, ours, strict=True))
    print(f"{'difference':20} {difference:.3f} s  (wanted <= {WANTED} s; {rounds} rounds)")


if __name__ == "__main__":
    main()
