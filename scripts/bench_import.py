"""The processor time that `import maxjax` adds to `import jax`, in new processes, interleaved.

Wanted: at most 0.1 s, and 0.15 s with `maxjax.load` and `maxjax.Module`. maxjax imports its parts
when they are first used; the second figure includes most parts that a program uses. The bytecode
exists in these runs, as it does for users, for whom pip writes it. In a checkout the first run writes
it. With PYTHONDONTWRITEBYTECODE every run compiles all sources again, which the last line shows.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

STATEMENTS = (
    "import jax",
    "import jax, maxjax",
    "import jax, maxjax; maxjax.load, maxjax.Module",
)
WANTED = (None, 0.1, 0.15)


def seconds(statement: str, bytecode: str | None) -> float:
    """The time `statement` takes in a new interpreter, without that interpreter's start.

    Args:
        statement: the statement to run, which imports something.
        bytecode: directory that keeps compiled sources; None for no directory.
    """
    code = f"import time; t = time.process_time(); {statement}; print(time.process_time() - t)"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONDONT")}
    kept |= {"JAX_PLATFORMS": "cpu", "PYTHONPYCACHEPREFIX": bytecode or tempfile.gettempdir()}
    kept |= {} if bytecode else {"PYTHONDONTWRITEBYTECODE": "1"}
    return float(subprocess.check_output([sys.executable, "-c", code], env=kept))


def main() -> None:
    """Prints the medians, and those of the differences to `import jax`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds instead of 15")
    rounds = 3 if parser.parse_args().quick else 15
    with tempfile.TemporaryDirectory() as bytecode:
        for statement in STATEMENTS:
            seconds(statement, bytecode)  # warms the page cache and writes the bytecode
        times = [[seconds(statement, bytecode) for statement in STATEMENTS] for _ in range(rounds)]
        for i, statement in enumerate(STATEMENTS):
            added = statistics.median(row[i] - row[0] for row in times)
            wanted = f"  (wanted <= {WANTED[i]} s)" if WANTED[i] else ""
            median = statistics.median(row[i] for row in times)
            print(f"{statement:47} {median:.3f} s, {added:+.3f} s{wanted}")
    print(f"{'the last, all sources compiled':47} {seconds(STATEMENTS[-1], None):.3f} s")


if __name__ == "__main__":
    main()
