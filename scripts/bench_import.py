"""What `import maxjax` adds to `import jax`, in fresh processes, interleaved.

Wanted: at most 0.1 s. maxjax imports its parts when they are first used, so a second figure says
what a program pays that goes on to use nearly all of them.
"""

import argparse
import os
import statistics
import subprocess
import sys

STATEMENTS = (
    "import jax",
    "import jax, maxjax",
    "import jax, maxjax; maxjax.load, maxjax.Module",
)
WANTED = 0.1


def seconds(statement: str) -> float:
    """The time `statement` takes in a new interpreter, without that interpreter's start."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return float(subprocess.check_output([sys.executable, "-c", code], env=environment))


def main() -> None:
    """Prints the medians, and those of the differences to `import jax`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds instead of 15")
    rounds = 3 if parser.parse_args().quick else 15
    for statement in STATEMENTS:
        seconds(statement)  # warms the page cache and writes the bytecode
    times = [[seconds(statement) for statement in STATEMENTS] for _ in range(rounds)]
    for i, statement in enumerate(STATEMENTS):
        added = statistics.median(row[i] - row[0] for row in times)
        wanted = f"  (wanted <= {WANTED} s)" if i == 1 else ""
        print(
            f"{statement:47} {statistics.median(row[i] for row in times):.3f} s, {added:+.3f} s{wanted}"
        )


if __name__ == "__main__":
    main()
