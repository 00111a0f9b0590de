"""Kills processes during saves, and checks what they leave.

    python scripts/kill_saves.py                       # 200 kills for each kind, and at every call
    python scripts/kill_saves.py --kind set --count 50 --seed 7
    python scripts/kill_saves.py --quick               # a few of each, to see that it runs

A process saves models 1, 2, 3, … to the same path and reports each one that is saved. It is ended at
random moments (SIGKILL, SIGTERM), or interrupted (SIGINT, after which it continues), or killed in
place of the n-th system call that changes a file, for each n. Each save has another configuration and
tokenizer. Wanted: the checkpoint opens, is completely of one save, which is not older than the last one
reported, agrees with its checksums, and the next save works and removes what is left over. Prints a
table; the exit code is 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.save_trials import (
    KILL,
    KINDS,
    LARGE,
    SMALL,
    Problem,
    Server,
    can_run,
    report,
    settled,
    strays,
    temporaries,
    which_save,
)  # fmt: skip

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


@dataclass
class Row:
    """The results of the trials of one way to end a save."""

    kind: str
    how: str
    trials: int = 0
    inside: int = 0  # trials that ended a save, and not the time between two
    old: int = 0
    new: int = 0
    leftovers: int = 0  # trials that left something for the next save to remove
    dropped: int = 0  # interrupts that Python itself lost
    lost: int = 0
    mixed: int = 0
    problems: list[str] = field(default_factory=list)

    def bad(self, problem: str, what: str = "") -> None:
        self.problems.append(problem)
        self.lost += what == "lost"
        self.mixed += what == "mixed"

    def look(self, path: str, atleast: int) -> int:
        """The number of the save that is there now; ``atleast`` is the last one that was reported."""
        try:
            found = which_save(self.kind, path)
        except Problem as problem:
            if not atleast and str(problem).startswith("CheckpointIncompleteError"):
                self.old += (
                    1  # the first save was ended between two renames: nothing was there before
                )
                return 0
            self.bad(str(problem), "mixed" if "mixed" in str(problem) else "lost")
            return atleast
        if found < atleast:
            self.bad(f"{atleast} was said to be saved, and {found} is there", "lost")
        self.new += found > atleast
        self.old += found <= atleast
        return max(found, atleast)


def at_random(server: Server, kind: str, how: str, count: int, rng: random.Random) -> Row:
    """Ends saves at random moments."""
    row = Row(kind, how)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint")
        k, seconds = 0, _seconds(server, kind, folder)
        for _ in range(count):
            row.trials += 1
            server.start(job="again", kind=kind, path=path, k=k + 1, nbytes=LARGE)
            server.hear()
            time.sleep(rng.uniform(0, 3 * seconds))
            os.kill(server.pid, SIGNALS[how])
            try:
                k = _after(server, row, path, k, how)
            except Problem as problem:
                row.bad(str(problem))
                server.abandon()
        _final(server, row, path, k)
    return row


def _seconds(server: Server, kind: str, folder: str) -> float:
    """Seconds that a save takes on this machine."""
    path = os.path.join(folder, "timed")
    server.start(job="again", kind=kind, path=path, k=1, nbytes=LARGE)
    times = []
    while len(times) < 4:
        server.hear()
        times.append(time.monotonic())
    os.kill(server.pid, signal.SIGKILL)
    server.end()
    return (times[-1] - times[1]) / 2


def _after(server: Server, row: Row, path: str, k: int, how: str) -> int:
    """Checks what a save that was ended has left; returns the number of the newest save there."""
    if how != "SIGINT":
        heard = server.end()
        saved = max((one.get("saved", 0) for one in heard), default=0)
        left = temporaries(path)
        row.leftovers += bool(left)
        before = max(k, saved)
        found = row.look(path, before)
        row.inside += bool(left) or found > before
        return found
    message, more = server.hear(), 0
    while "saved" in message:
        k, message, more = message["saved"], server.hear(), more + 1
        if more > 12:  # Python drops an interrupt that comes in a weakref's callback, or in __del__
            if "Exception ignored" not in server.said():
                raise Problem("an interrupt was not heeded")
            os.kill(server.pid, signal.SIGINT)
            row.dropped, more = row.dropped + 1, 0
    if "interrupted" not in message:
        server.pid = 0
        raise Problem(f"SIGINT was not caught: {message} {server.said()[-500:]}")
    row.inside += 1
    if left := temporaries(path):
        row.leftovers += 1
        row.bad(f"left after an interrupt: {left}")
    k = row.look(path, k)
    server.send(go=True)
    saved = max((one.get("saved", 0) for one in server.end()), default=0)
    if not saved:
        row.bad(f"the save after the interrupt failed: {server.said()[-500:]}")
    if which_save(row.kind, path) != saved:
        row.bad("the save after the interrupt is not what is there")
    return max(k, saved)


def _final(server: Server, row: Row, path: str, k: int) -> None:
    """Makes a save that nothing ends, and checks that it works and nothing is left over."""
    server.start(**_fault(row.kind, path, k + 1, 0, LARGE))
    message = server.hear()
    server.send(save=False)
    server.end()
    if message.get("saved") != k + 1 or which_save(row.kind, path) != k + 1:
        row.bad(f"the last save failed: {message.get('message')}")
    if left := strays(path):
        row.bad(f"the last save left over: {left}")
    if wrong := settled(row.kind, path, k + 1):
        row.bad(wrong)


def _fault(kind: str, path: str, k: int, n: int, nbytes: int) -> dict[str, Any]:
    below = os.path.dirname(path)
    fault = {"n": n, "action": KILL, "errno": 0, "forever": 0, "below": below}
    return {"job": "fault", "kind": kind, "path": path, "k": k, "nbytes": nbytes, **fault}


def at_each_call(server: Server, kind: str, most: int, start: int = 1) -> Row:
    """Kills a save in place of its first call that changes a file, another save in place of its second, …

    Two complete saves precede each of these; the first of all is save ``start``.
    """
    row = Row(kind, f"at each call of save {start + 2}")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint")
        for n in range(1, most + 1):
            k = start + 4 * n - 4  # every n replaces the same kind of save by the same kind
            _two_saves(server, row, path, k, f"call {n}")
            if not _killed_at(server, kind, path, k + 2, n):
                break
            row.trials, row.inside = row.trials + 1, row.inside + 1
            row.leftovers += bool(strays(path))
            row.look(path, k + 1)
    return row


def at_each_call_of_the_first(server: Server, kind: str, most: int) -> Row:
    """As :func:`at_each_call`, but for the first save: afterwards all of it is there, or nothing."""
    row = Row(kind, "at each call of the first")
    for n in range(1, most + 1):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "checkpoint")
            if not _killed_at(server, kind, path, 1, n):
                break
            row.trials, row.inside = row.trials + 1, row.inside + 1
            row.leftovers += bool(strays(path))
            try:
                found = which_save(kind, path)
            except Problem as problem:
                found = 0
                if "mixed" in str(problem):
                    row.bad(f"call {n}: {problem}", "mixed")
            row.new, row.old = row.new + found, row.old + 1 - found
            _two_saves(server, row, path, 2, f"call {n}")
    return row


def _two_saves(server: Server, row: Row, path: str, k: int, when: str) -> None:
    """Makes saves k and k + 1, and checks that they work and remove what an earlier save has left."""
    server.start(**_fault(row.kind, path, k, 0, SMALL))
    message = server.hear()
    server.send(save=True)
    server.end()
    if "saved" not in message or which_save(row.kind, path) != k + 1:
        row.bad(f"{when}: the save after the kill before it failed: {message.get('message')}")
    if wrong := settled(row.kind, path, k + 1):
        row.bad(wrong)
    if left := strays(path):
        row.bad(f"{when}: the saves after the kill before it left over: {left}")


def _killed_at(server: Server, kind: str, path: str, k: int, n: int) -> bool:
    """Makes save k with a kill at call n; False if it has fewer calls."""
    server.start(**_fault(kind, path, k, n, SMALL))
    if "ended" in server.hear():
        server.pid = 0
        return True
    server.send(save=False)
    server.end()
    return False


def table(rows: list[Row]) -> str:
    """The rows as markdown."""
    head = "| kind | ended | trials | in a save | old there | new there | left to sweep | lost | mixed | other |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        other = len(row.problems) - row.lost - row.mixed
        cells = [row.kind, row.how, row.trials, row.inside, row.old, row.new, row.leftovers,
                 row.lost, row.mixed, other]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--count", type=int, default=200, help="kills at random moments")
    parser.add_argument("--calls", type=int, default=1000, help="at each of so many calls")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args(arguments)
    count, most = (4, 6) if given.quick else (given.count, given.calls)
    rows: list[Row] = []
    with Server() as server:
        for kind in filter(can_run, given.kind or KINDS):
            rng = random.Random(f"{given.seed} {kind}")
            for how in SIGNALS:
                times = count if how == "SIGKILL" else (count + 3) // 4
                rows.append(at_random(server, kind, how, times, rng))
                print(rows[-1], file=sys.stderr, flush=True)
            for start in (1, 2) if kind == "turns" else (1,):
                rows.append(at_each_call(server, kind, most, start))
                print(rows[-1], file=sys.stderr, flush=True)
            rows.append(at_each_call_of_the_first(server, kind, most))
            print(rows[-1], file=sys.stderr, flush=True)
    return report(rows, table(rows), "how", given.json)


if __name__ == "__main__":
    sys.exit(main())
