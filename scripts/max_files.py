"""Counts the names that MAX's own model code uses and maxjax has: `python scripts/max_files.py`.

    pip install max==26.7.0                                  # into an environment of its own
    python scripts/max_files.py --max ENV/lib/python3.11/site-packages
    python scripts/max_files.py --max … --run                # import the files that define a Module, too
    python scripts/max_files.py --max … --numbers            # run layers of them, and compare with MAX
    python scripts/max_files.py --max … --json figures.json --names tests/max_names.txt

MAX is neither a part nor a requirement of maxjax, and has a licence of its own: this script reads the files of
an installation and keeps none of their lines. Each file below ``max/pipelines/architectures`` is parsed for
the names of ``max.graph``, ``nn``, ``dtype``, ``driver`` and ``engine`` that it uses. A name is *there* if maxjax
has it at the same path, *refused* if it can be imported and raises NotImplementedError when it is used, else
*missing*. With ``--run`` every file that defines a Module is imported with ``max`` changed to ``maxjax``, in new
processes for a few files each. Modules of MAX outside those five packages (its server) are read from the installation
in the same way; those that need MAX's native libraries are replaced by modules that refuse every name.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.max_import import BELOW, HOW, MaxFiles, installation

PACKAGES = ("graph", "nn", "dtype", "driver", "engine")
BATCH = 12
NAMES = Path(__file__).resolve().parent.parent / "tests" / "max_names.txt"
KINDS = ("there", "refused", "missing")
# The rows of the table; each name counts in the first row with which its path begins.
ROWS = ("graph.ops", "graph.weights", "graph", "dtype", "driver", "engine", "nn.attention", "nn.transformer", "nn.moe",
        "nn.kv_cache", "nn.kernels", "nn.state_space", "nn.quant_config", "nn.comm", "nn")  # fmt: skip


class Found(NamedTuple):
    """The names of MAX that one file uses.

    Attributes:
        uses: (path below max, name) → number of uses.
        defines_module: whether it defines a subclass of a layer of ``max.nn``.
    """

    uses: Counter[tuple[str, str]]
    defines_module: bool


# --- what the files use -------------------------------------------------------------------


class _Reader(ast.NodeVisitor):
    """Collects the names of PACKAGES in one file: imports, and uses of the names that they bind."""

    def __init__(self, root: Path):
        self.root = root
        self.modules: dict[str, str] = {}  # name in the file → module of max
        self.names: dict[str, tuple[str, str]] = {}  # … or → (module, name in it)
        self.uses: Counter[tuple[str, str]] = Counter()
        self.defines_module = False

    def is_module(self, path: str) -> bool:
        place = self.root / path.replace(".", "/")
        return place.is_dir() or place.with_suffix(".py").is_file()

    def bind(self, name: str, path: str, what: str) -> None:
        full = f"{path}.{what}" if path else what
        if full.split(".")[0] not in PACKAGES:
            return
        # A function with the name of its file, such as max.nn.clamp, counts as the function.
        if self.is_module(full) and what != path.rpartition(".")[2] and full != "nn.clamp":
            self.modules[name] = full
        if path:
            self.names[name] = path, what

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if not node.level and module.split(".")[0] == "max":
            path = module.partition(".")[2]
            for alias in node.names:
                self.bind(alias.asname or alias.name, path, alias.name)
                if path.split(".")[0] in PACKAGES:
                    self.uses[path, alias.name] += 0

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.startswith("max.") and alias.asname:
                self.bind(alias.asname, "", alias.name.partition(".")[2])

    def resolve(self, node: ast.AST) -> tuple[str, str] | None:
        """The (path, name) of max that an expression refers to, or None."""
        chain: list[str] = []
        while isinstance(node, ast.Attribute):
            chain.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        if node.id in self.modules and chain:
            path = self.modules[node.id]
            while len(chain) > 1 and self.is_module(f"{path}.{chain[0]}"):
                path = f"{path}.{chain.pop(0)}"
            return (path, chain[0]) if len(chain) == 1 else None
        return None if chain else self.names.get(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (found := self.resolve(node)) is not None:
            self.uses[found] += 1
            return
        owner = self.resolve(node.value)
        if owner is not None and owner[1][:1].isupper():
            self.uses[owner[0], f"{owner[1]}.{node.attr}"] += 1
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if (found := self.names.get(node.id)) is not None:
            self.uses[found] += 1

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            path, name = self.resolve(base) or ("", "")
            self.defines_module |= path.split(".")[0] == "nn" and name != "Shardable"
        self.generic_visit(node)


def read(file: Path, root: Path) -> Found | None:
    """The names of max that a file uses; None if it uses none of PACKAGES."""
    reader = _Reader(root)
    tree = ast.parse(file.read_bytes())
    # Imports first: a function may use a name that is imported below it.
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            reader.visit_ImportFrom(node)
        elif isinstance(node, ast.Import):
            reader.visit_Import(node)
    reader.visit(tree)
    return Found(reader.uses, reader.defines_module) if reader.uses else None


def status(path: str, name: str) -> str:
    """Whether maxjax has ``max.path.name``: "there", "refused" or "missing"."""
    from maxjax.absent import is_refused

    try:
        value: Any = importlib.import_module(f"maxjax.{path}")
        for one in name.split("."):
            value = getattr(value, one)
    except NotImplementedError:
        return "refused"
    except LookupError:  # Graph.current outside of a Graph
        return "there"
    except (ImportError, AttributeError):
        return "missing"
    return "refused" if is_refused(value) else "there"


# --- importing them -----------------------------------------------------------------------


def import_batch(root: Path, files: list[str]) -> Iterator[dict[str, Any]]:
    """Imports files of MAX, renamed, in this process."""
    finder = MaxFiles(root)
    sys.meta_path.insert(0, finder)  # the usual finder would read MAX's files unchanged
    for file in files:
        name = "maxjax." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        try:
            importlib.import_module(name)
            yield {"file": file, "error": None, "without": sorted(set(finder.refused))}
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            inside = [one for one in frames if str(root) in one.filename] or frames[-1:]
            where = f"{inside[-1].filename.removeprefix(f'{root}/')}:{inside[-1].lineno}"
            text = (str(error).splitlines() or [""])[0]
            yield {"file": file, "error": f"{type(error).__name__}: {text}"[:300], "where": where}


def import_all(site: Path, files: list[str]) -> list[dict[str, Any]]:
    """The outcome of importing each file; each batch of files has a new process."""
    found: list[dict[str, Any]] = []
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    for start in range(0, len(files), BATCH):
        batch = files[start : start + BATCH]
        done = subprocess.run(
            [sys.executable, __file__, "--max", str(site), "--batch", *batch],
            capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
        lines = [json.loads(line[1:]) for line in done.stdout.split("\n") if line[:1] == "\x1e"]
        found += lines
        gone = [file for file in batch if file not in {line["file"] for line in lines}]
        found += [
            {"file": file, "error": "the process ended: " + done.stderr[-200:]} for file in gone
        ]
    return found


# --- the report ---------------------------------------------------------------------------


def survey(root: Path) -> dict[str, Any]:
    """The figures of all files below ``root / BELOW``, without running any of them."""
    found = {
        file.relative_to(root).as_posix(): one
        for file in sorted((root / BELOW).rglob("*.py"))
        if (one := read(file, root)) is not None
    }
    uses: Counter[tuple[str, str]] = Counter()
    for one in found.values():
        uses.update(one.uses)
    state = {key: status(*key) for key in uses}
    files: dict[str, Any] = {}
    for file, one in found.items():
        lacks = {kind: [".".join(key) for key in sorted(one.uses) if state[key] == kind]
                 for kind in ("missing", "refused")}  # fmt: skip
        files[file] = lacks | {"defines_module": one.defines_module}
    names = [
        {"path": path, "name": name, "uses": count, "status": state[path, name],
         "files": sum((path, name) in one.uses for one in found.values())}
        for (path, name), count in sorted(uses.items(), key=lambda item: (-item[1], item[0]))
    ]  # fmt: skip
    return {"names": names, "files": files}


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """The totals of a survey."""
    names, files = report["names"], report["files"]
    modules = {file for file, one in files.items() if one["defines_module"]}

    def counted(*kinds: str) -> dict[str, int]:
        return {
            "names": sum(one["status"] in kinds for one in names),
            "uses": sum(one["uses"] for one in names if one["status"] in kinds),
        }

    def whole(kinds: list[str], among: set[str]) -> int:
        return sum(not any(files[file][kind] for kind in kinds) for file in among)

    result = {
        "there": counted("there"), "refused": counted("refused"), "missing": counted("missing"),
        "used": counted("there", "refused", "missing"),
        "files": {"all": len(files), "find all names": whole(["missing"], set(files)),
                  "and none is refused": whole(["missing", "refused"], set(files))},
        "files that define a Module": {
            "all": len(modules), "find all names": whole(["missing"], modules),
            "and none is refused": whole(["missing", "refused"], modules)},
    }  # fmt: skip
    if "imports" in report:
        good = [one["file"] for one in report["imports"] if not one["error"]]
        result["files that define a Module"]["import"] = len(good)
    return result


def surveyed(file: Path = NAMES) -> list[dict[str, Any]]:
    """The names in the committed file, as :func:`survey` returns them; MAX need not be installed."""
    return [
        {"path": path, "name": name, "uses": int(count), "status": status(path, name)}
        for line in file.read_text().splitlines()
        for path, _, names in [line.partition(": ")]
        for name, _, count in [one.partition("=") for one in names.split()]
    ]


def table(names: list[dict[str, Any]]) -> str:
    """The Markdown table of docs/coming-from-max.md: how many names of each part of MAX there are."""
    counts: dict[str, Counter[str]] = {title: Counter() for title in [*ROWS, "all"]}
    for one in names:
        title = next(row for row in ROWS if f"{one['path']}.".startswith(f"{row}."))
        for key in (title, "all"):
            counts[key][one["status"]] += 1
            counts[key][f"{one['status']} uses"] += one["uses"]
    lines = ["| package of `max` | names: supported | unsupported | missing "
             "| uses: supported | unsupported | missing |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for title, one in counts.items():
        cells = [one[kind + what] for what in ("", " uses") for kind in KINDS]
        label = f"`{title}`" if title != "all" else "all"
        lines.append(f"| {label} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def show(report: dict[str, Any], most: int) -> None:
    """Prints the figures, and the missing names with the most uses."""
    print(table(report["names"]), end="\n\n")
    for title, values in figures(report).items():
        print(f"{title}: " + ", ".join(f"{key} {value}" for key, value in values.items()))
    for kind in ("missing", "refused"):
        rows = [one for one in report["names"] if one["status"] == kind]
        print(f"\n{kind}, by uses:")
        for one in rows[:most]:
            print(f"  {one['uses']:5} in {one['files']:3} files  {one['path']}.{one['name']}")
    if bad := [one for one in report.get("imports", ()) if one["error"]]:
        print("\ndo not import:")
        for error, count in Counter(one["error"] for one in bad).most_common():
            first = next(one for one in bad if one["error"] == error)
            print(f"  {count:3}  {error}  ({first['file']}, {first.get('where', '')})")


def main() -> int:
    parser = argparse.ArgumentParser(description="MAX's own model files against maxjax.")
    parser.add_argument("--max", metavar="SITE", help="the site-packages that max is installed in")
    parser.add_argument("--run", action="store_true", help="import what defines a Module")
    parser.add_argument(
        "--numbers", action="store_true", help="run layers of them, and compare with MAX's numbers"
    )
    parser.add_argument("--kept", metavar="FILE", help="keep MAX's numbers of --numbers there")
    parser.add_argument("--most", type=int, default=40, help="how many names to list")
    parser.add_argument("--json", metavar="FILE", help="write everything there")
    parser.add_argument("--names", metavar="FILE", help="write the names and their uses there")
    parser.add_argument("--batch", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument(
        "--table", action="store_true", help="print the table of the docs; needs no MAX"
    )
    options = parser.parse_args()
    if options.table:
        print(table(surveyed()))
        return 0
    site = installation(options.max)
    if site is None:
        print(HOW, file=sys.stderr)
        return 2
    if options.batch:
        sys.path.append(str(site))  # other packages that MAX's files import
        for one in import_batch(site / "max", options.batch):
            print("\x1e" + json.dumps(one), flush=True)
        return 0
    if options.numbers:
        from scripts.max_runs import numbers  # here, because it needs what tests need

        numbers(site, kept=Path(options.kept) if options.kept else None)
        return 0
    report = survey(site / "max")
    if options.run:
        files = [file for file, one in report["files"].items() if one["defines_module"]]
        report["imports"] = import_all(site, files)
    show(report, options.most)
    if options.json:
        Path(options.json).write_text(json.dumps(report | {"figures": figures(report)}, indent=1))
    if options.names:
        lines: dict[str, list[str]] = defaultdict(list)
        for one in report["names"]:
            lines[one["path"]].append(f"{one['name']}={one['uses']}")
        text = "".join(f"{path}: {' '.join(names)}\n" for path, names in sorted(lines.items()))
        Path(options.names).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
