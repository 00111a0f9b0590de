"""From the command to the first token: whole processes of `maxjax generate` with the small model.

cold      with an empty compile cache: everything is compiled.
second    the same again: programs come from the cache.
help      `maxjax --help` over Python's own start (`python -c pass`).

The figures are the time from the start of the process to the first character on its stdout, and the
processor time until then, which is the same on a busy machine. They are medians of --rounds runs.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PROMPT = "What is 37 + 48?"


Times = tuple[float, float]


def first_character(command: list[str], cache: str) -> Times:
    """Seconds until a process writes something, and its processor time until then."""
    environment = {**os.environ, "MAXJAX_COMPILE_CACHE": cache, "JAX_PLATFORMS": "cpu"}
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - start
        used = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        busy = (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")
        process.stdout.read()
    assert first and process.returncode == 0, command
    return seconds, busy


def ended(command: list[str]) -> Times:
    """Seconds until a process has ended, and its processor time."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, busy


def line(name: str, times: Sequence[Times], wanted: float) -> None:
    """Prints the medians."""
    seconds, busy = (statistics.median(one) for one in zip(*times, strict=True))
    print(f"{name}: {seconds:.2f} s, {busy:.2f} s of processor time  wanted <= {wanted}")


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
        whole = ended([*program, "--help"])
        helped.append((whole[0] - bare[0], whole[1] - bare[1]))
    line("first token, cold", cold, 6)
    line("first token, second process", second, 1)
    line("--help over Python's start", helped, 0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
