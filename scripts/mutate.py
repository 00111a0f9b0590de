"""Mutation testing: draws mutants of the package, and checks whether a test fails on each.

    python scripts/mutate.py --count 200 --seed 1 --json before.json
    python scripts/mutate.py --again before.json --json after.json    # the killed mutants again
    python scripts/mutate.py --show 20                                # only lists the mutants
    pytest --cov=maxjax --cov-context=test && \
        python scripts/mutate.py --contexts .coverage --json default.json  # only tests that reach the line
    python scripts/mutate.py --survivors default.json --all --contexts .coverage

A mutant has one small mistake: another comparison, constant or operator, a negated condition, or a
flush or rename that is left out or swapped with the next statement. It is made in a copy of the
package, and the tests of that file run first (the mirrored file or folder), then with ``--wide`` the
whole default set. With ``--contexts``, a data file of pytest-cov, only tests that reach the line run, at
most 80, which is much faster; with ``--all``, all cases of these tests run, and the tests of that file.
Killed means that a test failed or did not end in time. Prints the survivors.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPARE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "//"}
# Calls whose order decides whether a crash can lose a save.
DURABLE = {"fsync", "flush", "flush_directory", "rename", "replace", "link", "unlink", "sync"}


@dataclass(frozen=True)
class Mutant:
    """One mistake: the characters from ``start`` to ``end`` of a file become ``text``."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str
    was: str

    def source(self, code: str) -> str:
        """The file's code with the mistake in it."""
        if code[self.start : self.end] != self.was:
            raise ValueError(f"{self.file}:{self.line} has changed since the mutant was drawn")
        return code[: self.start] + self.text + code[self.end :]


def mutants(file: Path) -> Iterator[Mutant]:
    """Every mutant of one file."""
    code = file.read_text()
    name = file.relative_to(ROOT).as_posix()
    starts = [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = code.splitlines()

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: ast.AST) -> tuple[int, int]:
        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)  # pyright: ignore

    def made(kind: str, node: ast.AST, start: int, end: int, text: str) -> Mutant:
        return Mutant(name, node.lineno, kind, start, end, text, code[start:end])  # pyright: ignore

    for node in _running(ast.parse(code)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
            left, right = span(node.left)[1], span(node.comparators[0])[0]
            yield made("comparison", node, left, right, f" {COMPARE[type(node.ops[0])]} ")
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            between = code[span(node.left)[1] : span(node.right)[0]]
            if "(" not in between and ")" not in between:
                yield made(
                    "arithmetic",
                    node,
                    span(node.left)[1],
                    span(node.right)[0],
                    f" {ARITHMETIC[type(node.op)]} ",
                )
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            text = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield made("constant", node, *span(node), text)
        elif isinstance(node, ast.If):
            start, end = span(node.test)
            yield made("condition", node, start, end, f"not ({code[start:end]})")
        bodies = [getattr(node, part, None) for part in ("body", "orelse", "finalbody")]
        for body in (found for found in bodies if isinstance(found, list)):
            for first, second in itertools.pairwise(body):
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Call):
                    called = first.value.func
                    if getattr(called, "attr", getattr(called, "id", "")) in DURABLE:
                        (a, b), (c, d) = span(first), span(second)
                        yield made("left out", first, a, b, "pass")
                        yield made("exchanged", first, a, d, code[c:d] + code[b:c] + code[a:b])


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are run, without those of annotations and below ``TYPE_CHECKING``."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list") or (
            isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from _running(child)


def tests_of(file: str) -> list[str]:
    """The tests that mirror a file of the package: its own test file, otherwise the tests of its folder."""
    inner = Path(file).relative_to("maxjax")
    own = ROOT / "tests" / inner.parent / f"test_{inner.name}"
    folder = ROOT / "tests" / inner.parent
    while not folder.is_dir() or not any(folder.rglob("test_*.py")):
        folder = folder.parent
    found = [own] if own.exists() else []
    if folder != ROOT / "tests":
        found.append(folder)
    else:
        found += sorted(folder.glob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in found]


@cache
def _contexts_of(file: str, contexts: Path) -> dict[int, list[str]]:
    """Line of a file → the test contexts (test and phase) that reach it."""
    import coverage

    data = coverage.CoverageData(str(contexts))
    data.read()
    measured = next((f for f in data.measured_files() if f.endswith("/" + file)), "")
    return data.contexts_by_lineno(measured) if measured else {}


def reaching(mutant: Mutant, contexts: Path, few: bool) -> list[str]:
    """The tests that reach a mutant's line, those of its file first. ``few``: at most 80 different cases."""
    by_line = _contexts_of(mutant.file, contexts)
    # Coverage may record a statement of several lines at its first line.
    line = next((at for at in range(mutant.line, mutant.line - 8, -1) if by_line.get(at)), 0)
    # Case → the lines of the file that it reaches.
    reached: dict[str, set[int]] = {}
    for number, contexts_there in by_line.items():
        for context in contexts_there:
            reached.setdefault(context.rsplit("|", 1)[0], set()).add(number)
    cases = [case for case, lines in reached.items() if case and line in lines]
    own = tuple(tests_of(mutant.file))
    if not few:  # with all cases, also those that the coverage run left out
        others = {case.split("[", 1)[0] for case in cases if not case.startswith(own)}
        return [*own, *sorted(others)]
    # Of cases that reach the same lines one comes first, and the others later, so that the 80 differ.
    cases.sort(key=lambda case: (not case.startswith(own), len(reached[case]), case))
    seen: Counter[frozenset[int]] = Counter()
    turns: dict[str, int] = {}
    for case in cases:
        lines = frozenset(reached[case])
        turns[case], seen[lines] = seen[lines], seen[lines] + 1
    return sorted(cases, key=turns.__getitem__)[:80]


class Checkouts:
    """Copies of the checkout, one for each mutant that runs at the same time; they keep their bytecode."""

    def __init__(self, place: Path, count: int) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        # Python compares bytecode with its source by the time of writing, in seconds.
        self._times = itertools.count(int(time.time()) + 1)
        ignored = (".git", ".venv", "__pycache__", ".compile-cache", "build")
        for number in range(count):
            copy = place / str(number) / "checkout"
            shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*ignored))
            (ROOT / ".compile-cache").mkdir(exist_ok=True)
            (copy / ".compile-cache").symlink_to(ROOT / ".compile-cache")
            self._free.put(copy)

    @contextlib.contextmanager
    def having(self, mutant: Mutant) -> Iterator[Path]:
        """A copy of the checkout with the mistake in it."""
        copy = self._free.get()
        code = (ROOT / mutant.file).read_text()
        try:
            self._write(copy / mutant.file, mutant.source(code))
            yield copy
        finally:
            self._write(copy / mutant.file, code)
            self._free.put(copy)

    def _write(self, path: Path, code: str) -> None:
        path.write_text(code)
        moment = next(self._times)
        os.utime(path, (moment, moment))


def killed(
    mutant: Mutant,
    checkouts: Checkouts,
    seconds: float,
    wide: bool,
    contexts: Path | None = None,
    is_all: bool = False,
) -> bool:
    """Whether a test fails on a mutant."""
    runs = [tests_of(mutant.file), *([[]] if wide else [])]
    # Code that runs when a file is imported belongs to no test's context.
    if contexts is not None and (found := reaching(mutant, contexts, not is_all)):
        runs = [found]
    with checkouts.having(mutant) as copy:
        environment = os.environ | {
            "PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPYCACHEPREFIX": str(copy.parent / "bytecode"),
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--all"] * is_all
        for tests in runs:
            try:
                done = subprocess.run(
                    [*command, *tests],
                    cwd=copy,
                    env=environment,
                    capture_output=True,
                    timeout=seconds,
                )
            except subprocess.TimeoutExpired:
                return True
            if done.returncode not in (0, 5):
                return True
    return False


def main() -> int:
    """Draws mutants, runs the tests on them, and prints the survivors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--under", default="maxjax", help="only files below this folder")
    parser.add_argument(
        "--seconds", type=float, default=900.0, help="a test run that takes longer has noticed"
    )
    parser.add_argument("--wide", action="store_true", help="ask the whole default set as well")
    parser.add_argument(
        "--contexts", type=Path, metavar="FILE", help="coverage of the tests, with contexts"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write what became of each")
    parser.add_argument("--again", metavar="FILE", help="those that were killed in an earlier run")
    parser.add_argument(
        "--survivors", metavar="FILE", help="those that were not killed in an earlier run"
    )
    parser.add_argument("--all", action="store_true", help="all cases of the tests")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print so many and end")
    options = parser.parse_args()
    if earlier := options.again or options.survivors:
        drawn = [
            Mutant(**one["mutant"])
            for one in json.loads(Path(earlier).read_text())
            if one["killed"] == bool(options.again)
        ]
    else:
        files = sorted((ROOT / options.under).rglob("*.py"))
        every = [one for file in files if file.name != "__init__.py" for one in mutants(file)]
        drawn = random.Random(options.seed).sample(
            every, min(options.show or options.count, len(every))
        )
        print(f"seed {options.seed}: {len(drawn)} of {len(every)} mutants")
    if options.show:
        for one in drawn:
            print(
                f"{one.file}:{one.line} {one.kind}: {one.was.strip()[:40]!r} -> {one.text.strip()[:40]!r}"
            )
        return 0

    def run(one: Mutant) -> bool:
        dead = killed(one, checkouts, options.seconds, options.wide, options.contexts, options.all)
        word = "killed" if dead else "survived"
        change = f"{one.was.strip()!r} -> {one.text.strip()!r}"
        print(f"{word}: {one.file}:{one.line} {one.kind}: {change}", flush=True)
        return dead

    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        checkouts = Checkouts(Path(place), options.jobs)
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(run, drawn))
    print(
        f"{sum(results)} of {len(drawn)} killed ({100 * sum(results) / max(1, len(drawn)):.1f} %)"
    )
    if options.json:
        found = [
            {"mutant": asdict(one), "killed": dead}
            for one, dead in zip(drawn, results, strict=True)
        ]
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
