"""From the command to the first token: whole processes of `maxjax generate` with the small model.

cold      an empty compile cache: everything is compiled.
second    the same again: programs come from the cache.
help      `maxjax --help` over Python's own start (`python -c pass`).

A time is from the start of the process to the first character on its stdout. Medians of --rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

PROMPT = "What is 37 + 48?"


def first_character(command: list[str], cache: str) -> float:
    """Seconds until a process writes something."""
    environment = {**os.environ, "MAXJAX_COMPILE_CACHE": cache, "JAX_PLATFORMS": "cpu"}
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    assert first and process.returncode == 0, command
    return seconds


def ended(command: list[str]) -> float:
    """Seconds until a process has ended."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    program = [sys.executable, "-m", "maxjax"]
    cold, second, helped = [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(first_character([*program, "generate", PROMPT], cache))
            second.append(first_character([*program, "generate", PROMPT], cache))
        bare = ended([sys.executable, "-c", "pass"])
        helped.append(ended([*program, "--help"]) - bare)
    print(f"first token, cold: {statistics.median(cold):.2f} s  wanted <= 6")
    print(f"first token, second process: {statistics.median(second):.2f} s  wanted <= 3")
    print(f"--help over Python's start: {statistics.median(helped):.2f} s  wanted <= 0.5")
    return 0


if __name__ == "__main__":
    sys.exit(main())
