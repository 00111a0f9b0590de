"""Kills one of several processes that generate together, and checks how the others end and what is lost.

    python scripts/kill_peers.py                    # 50 kills, with two and with four processes
    python scripts/kill_peers.py --quick            # one of each, to see that it runs
    python scripts/kill_peers.py --processes 4 --count 10 --seed 7

The processes share the mesh of a model, answer prompts with ``maxjax.generate_each``, and process 0 appends each answer
to a file. At a random moment after JAX has started its devices a random one of them gets SIGKILL; then they start again
with the prompts that have no answer, until all have. Wanted: each survivor ends within the heartbeat timeout and five
seconds, with a PeerLostError as its only exception and nothing of a crash; no line of the file is lost or doubled, and
only the last one may be cut; and the answers are those of one process. Prints a line for each kill; the exit code is 1
if anything else happens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BOUND = 5  # seconds after the heartbeat timeout that the documentation promises
LOADED = 10  # seconds that a busy machine may add
START = 180  # seconds in which processes start and load
# A line of a C++ crash, or of an exception that nobody has caught beside the PeerLostError.
CRASHES = (
    "Check failure stack trace",
    "Fatal Python error",
    "Exception ignored",
    "Exception in",
    "terminate called",
)


def worker(port: int, processes: int, number: int, heartbeat: int, folder: Path) -> None:
    """One of the processes, as a user writes it."""
    import jax

    import maxjax
    from maxjax import distributed

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    distributed.initialize(f"127.0.0.1:{port}", processes, number, heartbeat_timeout=heartbeat)
    mesh = maxjax.make_mesh(
        model=processes
    )  # JAX starts its devices, and ends all if one process does not come
    (folder / f"ready-{number}").touch()
    model, tokenizer = maxjax.load("tiny", mesh=mesh)
    todo = json.loads((folder / "todo").read_text())
    with open(folder / "answers", "ab", buffering=0) as file:
        for i, text in maxjax.generate_each(model, tokenizer, [prompt(n) for n in todo], **OPTIONS):
            if number == 0:
                file.write(json.dumps([todo[i], text]).encode() + b"\n")


OPTIONS = {"max_new_tokens": 40, "eos_ids": (), "batch_size": 8}


def prompt(number: int) -> str:
    return f"What is {number % 50} + {number // 50}?"


@dataclass
class Job:
    """Prompts that so many processes answer, and what has been found."""

    processes: int
    prompts: int
    heartbeat: int
    folder: Path
    problems: list[str] = field(default_factory=list)

    def run(self, kill_after: float | None, victim: int = 0) -> tuple[bool, float]:
        """Lets the processes answer what has no answer; one of them may be killed so many seconds after all are ready.

        Returns:
            Whether one was killed before it had ended, and the seconds until all had ended since then, or since all
            were ready.
        """
        for old in self.folder.glob("ready-*"):
            old.unlink()
        (self.folder / "todo").write_text(json.dumps(self.missing()))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        logs = [self.folder / f"log-{number}" for number in range(self.processes)]
        started = []
        for number, log in enumerate(logs):
            command = [
                sys.executable,
                __file__,
                "--worker",
                port,
                self.processes,
                number,
                self.heartbeat,
                self.folder,
            ]
            with log.open("wb") as file:
                started.append(
                    subprocess.Popen(
                        list(map(str, command)), stdout=file, stderr=file, env=environment()
                    )
                )
        try:
            return self._watched(started, kill_after, victim)
        finally:
            for process in started:
                process.kill()
                process.wait()

    def _watched(
        self, started: list[subprocess.Popen[bytes]], kill_after: float | None, victim: int
    ) -> tuple[bool, float]:
        deadline = time.monotonic() + START
        while len(list(self.folder.glob("ready-*"))) < self.processes:
            if time.monotonic() > deadline or any(one.poll() for one in started):
                raise SystemExit(f"the processes do not start:\n{self._logs()}")
            time.sleep(0.01)
        began = time.monotonic()
        if kill_after is not None:
            time.sleep(kill_after)
            if started[victim].poll() is None:
                began = time.monotonic()
                started[victim].send_signal(signal.SIGKILL)
        others = [
            one for number, one in enumerate(started) if number != victim or kill_after is None
        ]
        bound = self.heartbeat + BOUND + LOADED if kill_after is not None else 10 * START
        for process in others:
            try:
                process.wait(max(began + bound - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                self.problems.append(f"still runs after {bound} s:\n{self._logs()}")
        seconds = time.monotonic() - began
        started[victim].wait()
        if kill_after is None or started[victim].returncode != -signal.SIGKILL:
            self._check_ended(started)
            return False, seconds
        for number, process in enumerate(started):
            if number != victim:
                self._check_survivor(number, process.returncode, victim)
        return True, seconds

    def _check_ended(self, started: list[subprocess.Popen[bytes]]) -> None:
        if any(process.returncode for process in started):
            self.problems.append(f"undisturbed processes have failed:\n{self._logs()}")

    def _check_survivor(self, number: int, code: int | None, victim: int) -> None:
        said = (self.folder / f"log-{number}").read_text(errors="replace")
        lines = said.splitlines()
        problem = ""
        if code != 1:
            problem = f"exit status {code}"
        elif any(crash in said for crash in CRASHES):
            problem = "a crash"
        elif sum(line.startswith("maxjax.errors.PeerLostError: ") for line in lines) != 1:
            problem = "not one PeerLostError"
        elif not lines[-1].startswith("maxjax.errors.PeerLostError: "):
            problem = "something after the PeerLostError"
        if problem:
            self.problems.append(
                f"process {number}, after process {victim} was killed: {problem}\n{said[-6000:]}"
            )

    def _logs(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in sorted(self.folder.glob("log-*"))
        )

    def answers(self) -> dict[int, str]:
        """The answers in the file; the last line is removed if it was cut."""
        path = self.folder / "answers"
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            path.write_bytes(whole)
        found: dict[int, str] = {}
        for line in whole.splitlines():
            number, text = json.loads(line)
            if number in found:
                self.problems.append(f"line {number} is there twice")
            found[number] = text
        return found

    def missing(self) -> list[int]:
        found = self.answers()
        return [number for number in range(self.prompts) if number not in found]


def environment() -> dict[str, str]:
    """The environment without variables that describe another cluster, or other devices."""
    gone = ("JAX_", "XLA_", "SLURM_", "OMPI_", "KUBERNETES_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(gone)}
    kept = {name: value for name, value in kept.items() if "_proxy" not in name.lower()}
    return kept | {"PYTHONPATH": str(ROOT), "MAXJAX_PROGRESS": "0"}


def alone(prompts: int) -> list[str]:
    """The answers of one process."""
    import maxjax

    model, tokenizer = maxjax.load("tiny")
    return list(
        map(str, maxjax.generate(model, tokenizer, [prompt(n) for n in range(prompts)], **OPTIONS))
    )


def campaign(
    processes: int, count: int, options: argparse.Namespace, rng: random.Random
) -> list[str]:
    """Kills so often; returns the problems."""
    expected = alone(options.prompts)
    problems: list[str] = []
    kills = dict.fromkeys(range(processes), 0)
    slowest, seconds, jobs = 0.0, 0.0, 0
    while sum(kills.values()) < count:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(processes, options.prompts, options.heartbeat, Path(folder))
            if not seconds:
                _, seconds = job.run(None)
                print(f"{processes} processes: {seconds:.1f} s undisturbed", flush=True)
                (job.folder / "answers").unlink()
            while sum(kills.values()) < count and job.missing():
                victim, before = rng.randrange(processes), len(job.problems)
                after = rng.uniform(0, seconds)
                was_killed, taken = job.run(after, victim)
                kills[victim] += was_killed
                slowest = max(slowest, taken * was_killed)
                how = "killed" if was_killed else "ended"
                print(
                    f"{processes} processes, {sum(kills.values())}: process {victim} {how}"
                    f" after {after:.1f} s, the others ended {taken:.1f} s later; {len(job.answers())} answers;"
                    f" {len(job.problems) - before} problems", flush=True,
                )  # fmt: skip
            if job.missing():
                job.run(None)
            found, jobs = job.answers(), jobs + 1
            if sorted(found) != list(range(options.prompts)):
                job.problems.append(f"lines that are not there: {job.missing()}")
            other = [n for n, text in found.items() if text != expected[n]]
            if other:
                job.problems.append(f"answers that are not those of one process: {other}")
            problems += job.problems
    each = ", ".join(f"{number}: {n}" for number, n in kills.items())
    print(
        f"{processes} processes: {sum(kills.values())} kills (of process {each}) in {jobs} jobs of {options.prompts}"
        f" prompts; survivors ended {slowest:.1f} s later at most; {len(problems)} problems", flush=True,
    )  # fmt: skip
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--count", type=int, default=50, help="kills in all")
    parser.add_argument("--prompts", type=int, default=200, help="of each job")
    parser.add_argument("--heartbeat", type=int, default=10, help="heartbeat_timeout, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="one kill for each number of processes"
    )
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        port, processes, number, heartbeat, folder = options.worker
        worker(int(port), int(processes), int(number), int(heartbeat), Path(folder))
        return 0
    if options.quick:
        options.count, options.prompts = len(options.processes), 40
    rng, problems = random.Random(options.seed), []
    for place, processes in enumerate(options.processes):
        share = options.count * (place + 1) // len(options.processes)
        problems += campaign(
            processes, share - options.count * place // len(options.processes), options, rng
        )
    print(*problems, sep="\n\n")
    print(f"{options.count} kills, {len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
