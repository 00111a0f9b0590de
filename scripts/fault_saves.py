"""Lets system calls fail during saves, and checks what is left.

    python scripts/fault_saves.py                      # every call, four errors, once and from then on
    python scripts/fault_saves.py --kind set --calls 20 --error EIO
    python scripts/fault_saves.py --quick              # a few of each, to see that it runs

For n = 1, 2, … the n-th call that changes a file or makes it durable (write, fsync, rename, link,
open for a new file, mkdir, unlink, …) fails with ENOSPC, EIO, EDQUOT or EROFS, once or from then
on, or writes only half. Wanted: the save raises CheckpointSaveError with that errno and the old
checkpoint is still there, or the save succeeds if the call only cleans up; nothing temporary is left;
the next save in the same process works; and it ends within 5 s. Prints a table; the exit code is 1 if
anything else happens.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.save_trials import (
    ERRORS,
    EXIT_SECONDS,
    FAIL,
    KINDS,
    SHORT,
    SMALL,
    Problem,
    Server,
    can_run,
    report,
    strays,
    which_save,
)  # fmt: skip

# The calls that clean up: what they cannot remove is left for the next save.
CLEANING = ("unlink", "unlinkat", "rmdir")


@dataclass
class Row:
    """The results of the trials with one error."""

    kind: str
    fault: str
    trials: int = 0
    raised: int = 0
    saved: int = 0  # in spite of the fault
    left: int = 0  # times that the next save had to clean up
    slowest_exit: float = 0.0
    problems: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)


@dataclass
class Trial:
    """A save of model k with a fault at call n, over a good save of model k - 1."""

    server: Server
    row: Row
    path: str
    k: int
    n: int
    number: int  # the errno; 0 for a short write
    forever: bool

    def bad(self, problem: str) -> None:
        self.row.problems.append(f"call {self.n} ({self.call}): {problem}")

    call = "?"

    def run(self) -> int | None:
        """The number of the model that is there at the end; None if there is no n-th call."""
        action = FAIL if self.number else SHORT
        fault = {"n": self.n, "action": action, "errno": self.number, "forever": self.forever}
        job = {"job": "fault", "kind": self.row.kind, "path": self.path, "k": self.k}
        self.server.start(**job, **fault, below=os.path.dirname(self.path), nbytes=SMALL)
        message = self.server.hear()
        names = message.get("names", ())
        if len(names) < self.n:
            self.server.send(save=False)
            self.server.end()
            self.row.calls = dict(Counter(name.split()[0] for name in names))
            return None
        self.call = names[self.n - 1]
        self.row.trials += 1
        self._judge(message)
        self.server.send(save=True)
        return self._next()

    def _judge(self, message: dict[str, Any]) -> None:
        found = which_save(self.row.kind, self.path)
        if "saved" in message:
            self.row.saved += 1
            if found != self.k:
                self.bad(f"it was said to be saved, and {found} is there, not {self.k}")
        else:
            self.row.raised += 1
            right = ("CheckpointSaveError", self.number)
            if (message["error"], message["errno"]) != right:
                self.bad(
                    f"raised {message['error']}, errno {message['errno']}: {message['message']}"
                )
            # If the failing call also prevents the undo, the new checkpoint is there, complete.
            if found != self.k - 1 and not (self.forever and found == self.k):
                self.bad(f"the save failed, and {found} is there, not {self.k - 1}")
        if left := strays(self.path):
            self.row.left += 1
            if not self.forever and self.call.split()[0] not in CLEANING:
                self.bad(f"left over: {left}")

    def _next(self) -> int:
        heard = self.server.end()
        leaving = next((one["leaving"] for one in heard if "leaving" in one), None)
        if not any("saved" in one for one in heard) or leaving is None:
            self.bad(f"the next save failed: {self.server.said()[-400:]}")
            return which_save(self.row.kind, self.path)
        seconds = time.time() - leaving
        self.row.slowest_exit = max(self.row.slowest_exit, seconds)
        if seconds > EXIT_SECONDS:
            self.bad(f"the process took {seconds:.1f} s to end")
        found = which_save(self.row.kind, self.path)
        if found != self.k + 1:
            self.bad(f"after the next save {found} is there, not {self.k + 1}")
        if left := strays(self.path):
            self.bad(f"the next save left over: {left}")
        return found


def campaign(
    server: Server, kind: str, fault: str, *, forever: bool, calls: list[int], start: int = 0
) -> Row:
    """Runs a trial with a fault at each of these calls."""
    row = Row(kind, fault + (" from then on" if forever else ""))
    number = ERRORS.get(fault, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint")
        _save(server, kind, path, start + 1)
        k = start + 2
        for n in calls:
            try:
                found = Trial(server, row, path, k, n, number, forever).run()
            except Problem as problem:
                row.problems.append(f"call {n}: {problem}")
                server.abandon()
                break
            if found is None:
                break
            k += 2  # even steps: the same kind of model is replaced in each trial
    return row


def _save(server: Server, kind: str, path: str, k: int) -> None:
    fault = {"n": 0, "action": FAIL, "errno": 0, "forever": 0, "below": os.path.dirname(path)}
    server.start(job="fault", kind=kind, path=path, k=k, nbytes=SMALL, **fault)
    if "saved" not in (message := server.hear()):
        raise Problem(f"a save without a fault failed: {message}")
    server.send(save=False)
    server.end()


def table(rows: list[Row]) -> str:
    """The rows as markdown."""
    head = "| kind | fault | trials | raised | saved all the same | left to sweep | slowest exit, s | wrong |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row.kind, row.fault, row.trials, row.raised, row.saved, row.left,
                 f"{row.slowest_exit:.2f}", len(row.problems)]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--error", choices=[*ERRORS, "short"], action="append")
    parser.add_argument("--calls", type=int, default=200, help="a fault at each of so many calls")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args(arguments)
    calls = [1, 3, 8, 20] if given.quick else list(range(1, given.calls + 1))
    rows: list[Row] = []
    with Server() as server:
        for kind in filter(can_run, given.kind or KINDS):
            for fault in given.error or [*ERRORS, "short"]:
                for forever in (False, True):
                    for start in (0, 1) if kind == "turns" else (0,):
                        rows.append(
                            campaign(server, kind, fault, forever=forever, calls=calls, start=start)
                        )
                        print(rows[-1], file=sys.stderr, flush=True)
    return report(rows, table(rows), "fault", given.json)


if __name__ == "__main__":
    sys.exit(main())
