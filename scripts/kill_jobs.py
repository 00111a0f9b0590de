"""Kills `maxjax generate --input … --output …` at random moments, runs it again, and compares with an undisturbed run.

    python scripts/kill_jobs.py                      # 10,000 prompts, 20 kills
    python scripts/kill_jobs.py --memory             # also how much memory 1,000 and 100,000 prompts take
    python scripts/kill_jobs.py --quick              # a small job, to see that it runs

Wanted after each kill: each line of the output but the last one is whole, no line is there twice, and none that was
there has gone. In the end: one line for each prompt, and each equal to that of the undisturbed run. The exit code is 1
if anything else happens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def write_prompts(path: Path, count: int) -> Path:
    """Writes a file of prompts: texts, chats and token ids."""
    with path.open("w") as file:
        for i in range(count):
            prompt = f"What is {i % 97} + {i // 97}?"
            forms = (
                {"prompt": prompt},
                {"messages": [{"role": "user", "content": prompt}]},
                {"tokens": [5 + i % 50, 6]},
            )
            file.write(json.dumps({**forms[i % 3], "id": f"number {i}"}) + "\n")
    return path


def command(source: Path, target: Path) -> list[str]:
    options = ["--slots", "32", "--temperature", "0.8", "--seed", "3", "--max-new-tokens", "16"]
    return [
        sys.executable,
        "-m",
        "maxjax",
        "generate",
        "--input",
        str(source),
        "--output",
        str(target),
        *options,
    ]


def lines(path: Path) -> dict[int, str]:
    """The whole lines of a file of answers, by index.

    Raises:
        ValueError: a line is there twice, or is not JSON.
    """
    content = path.read_bytes() if path.exists() else b""
    found: dict[int, str] = {}
    for line in content[: content.rfind(b"\n") + 1].decode().splitlines():
        index = json.loads(line)["index"]
        if index in found:
            raise ValueError(f"line {index} is there twice")
        found[index] = line
    return found


def memory(folder: Path, counts: list[int]) -> None:
    """Prints the largest memory of jobs of so many prompts."""
    for count in counts:
        source = write_prompts(folder / f"in-{count}", count)
        process = subprocess.Popen(
            command(source, folder / f"out-{count}"), stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        assert len(lines(folder / f"out-{count}")) == count
        print(f"{count:,} prompts: at most {usage.ru_maxrss / 1024:,.0f} MiB", flush=True)


def undisturbed(source: Path, target: Path) -> tuple[float, float]:
    """Runs the job; returns the seconds until there was an answer, and until it had ended."""
    began, first = time.monotonic(), 0.0
    process = subprocess.Popen(command(source, target), stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if not first and target.exists() and target.stat().st_size:
            first = time.monotonic() - began
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit("the undisturbed run has failed")
    return first, time.monotonic() - began


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def differences(
    found: dict[int, str], expected: dict[int, str], before: dict[int, str], is_whole: bool
) -> list[str]:
    """What is wrong with the answers that are there."""
    problems = [f"line {i} has gone" for i in before.keys() - found.keys()]
    problems += [
        f"{line} instead of {expected.get(i)}"
        for i, line in found.items()
        if line != expected.get(i)
    ]
    if is_whole:
        problems += [f"line {i} is not there" for i in expected.keys() - found.keys()]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.kills = 300, 2
    rng, problems = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        source, target = write_prompts(folder / "in", options.prompts), folder / "out"
        first, seconds = undisturbed(source, folder / "whole")
        print(
            f"{options.prompts:,} prompts, undisturbed: {seconds:.0f} s, the first answer after {first:.1f}",
            flush=True,
        )
        expected, before, kills, cut, late = lines(folder / "whole"), {}, 0, 0, 0
        while kills < options.kills:
            process = subprocess.Popen(command(source, target), stderr=subprocess.DEVNULL)
            if rng.random() < 0.25:  # while it starts
                time.sleep(rng.uniform(0, first))
            else:
                size = size_of(target) + rng.uniform(
                    0, 1.7 * size_of(folder / "whole") / options.kills
                )
                while process.poll() is None and size_of(target) <= size:
                    time.sleep(0.002)
                time.sleep(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            if process.wait() != -signal.SIGKILL:  # it had ended
                late += 1
                problems += differences(lines(target), expected, before, True)
                target.unlink()
                before = {}
                continue
            kills += 1
            content = target.read_bytes() if target.exists() else b""
            cut += not content.endswith(b"\n") and bool(content)
            found = lines(target)
            problems += differences(found, expected, before, False)
            print(
                f"kill {kills}: {len(found):,} answers, {len(found) - len(before):,} of them new",
                flush=True,
            )
            before = found
        subprocess.run(command(source, target), check=True, stderr=subprocess.DEVNULL)
        problems += differences(lines(target), expected, before, True)
        print(*problems, sep="\n")
        print(
            f"{options.prompts:,} prompts, {kills} kills: {cut} left a line that was cut, {late} runs had ended before;"
            f" {len(problems)} problems"
        )
        if options.memory:
            memory(folder, [10, 100] if options.quick else [1_000, 100_000])
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
