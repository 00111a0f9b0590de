"""Runs every notebook from its first cell to its last, and fails on an error.

`scripts/run_notebooks.py [NOTEBOOK …] [--write]` runs all of `notebooks/` unless some are named;
`--write` stores the outputs in the files. A notebook starts in its own folder.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent


def run(path: Path, write: bool, timeout: int) -> str | None:
    """Runs one notebook; returns the error as text, or None."""
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("MAXJAX_PROGRESS", "0")  # when a bar appears depends on the machine
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute()
    except (CellExecutionError, DeadKernelError, TimeoutError) as error:
        return str(error)
    if write:
        nbformat.write(notebook, path)
    return None


def main() -> int:
    """Runs all notebooks; returns the exit code, 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="store the outputs")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one cell")
    options = parser.parse_args()
    paths = options.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb"))
    os.environ["MAXJAX_PROGRESS"] = "0"  # a bar that moves would be stored as many lines
    failed = 0
    for path in paths:
        start = time.perf_counter()
        error = run(path, options.write, options.timeout)
        print(f"{'FAILED' if error else 'ok    '} {path.name} {time.perf_counter() - start:.1f} s")
        if error:
            failed += 1
            print(error, file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
