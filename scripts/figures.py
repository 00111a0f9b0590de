"""The figures of the documentation: measured by benchmarks, kept in one file, shown by pages.

    python scripts/figures.py                        rewrites the tables of all pages
    python scripts/figures.py --check                names the pages that differ; exit code 1
    python scripts/figures.py --run NAME …           runs a benchmark and stores its figures
    python scripts/figures.py --run NAME --output F  the same from the benchmark's earlier output, a file

All figures are in docs/figures.toml. Each entry is a table:

    [dispatch]
    title = "Calling a jitted function"
    command = "python scripts/bench_dispatch.py"      the command that prints the figures
    date = "2026-11-23"                               the date of the measurement
    machine = "zen4"                                  the machine: a key of [machines]
    note = "…"                                        optional: a sentence below the table
    columns = ["what", "figure"]
    rows = [["call of a jitted no-op", "1.02; 1.06"]]
    [[dispatch.read]]                                 optional: how `--run` finds a cell
    cell = [0, 1]                                     row and column, from 0
    form = "{}; {}"                                   one {} for each pattern
    patterns = ["290 leaves.*?maxjax +\\\\S+ +(\\\\S+) x", "11 leaves.*?maxjax +\\\\S+ +(\\\\S+) x"]

A pattern is a regular expression over the whole output of the command (a dot matches line breaks); its first
group is the value. Cells without patterns are edited by hand, and `--run` names them.

A page shows a table between two comments, and this script writes the text between them:

    <!-- figures: dispatch -->
    <!-- /figures -->

With several names, whose tables must all have the columns "what" and "figure", one table is written with a
third column for the command. The name "machines" lists the machines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "figures.toml"
BLOCK = re.compile(r"(<!-- figures: ([\w -]+?) -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
KEYS = {"title", "command", "date", "machine", "note", "columns", "rows", "read"}

Tables = dict[str, dict[str, Any]]


def pages() -> list[Path]:
    """The pages that may show figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def read(path: Path = FILE) -> tuple[dict[str, str], Tables]:
    """(machines, tables) of the file of figures.

    Raises:
        ValueError: a table lacks a key, has an unknown key, names an unknown machine, or has
            a row with another number of cells than it has columns.
    """
    tables = tomllib.loads(path.read_text())
    machines = tables.pop("machines")
    for name, table in tables.items():
        if wrong := (set(table) ^ KEYS) - {"note", "read"}:
            raise ValueError(f"{path.name}: [{name}] lacks or has too many of {sorted(wrong)}")
        if table["machine"] not in machines:
            raise ValueError(f"{path.name}: [{name}] names a machine that [machines] lacks")
        datetime.date.fromisoformat(table["date"])
        for row in table["rows"]:
            if len(row) != len(table["columns"]):
                raise ValueError(
                    f"{path.name}: [{name}] has {len(table['columns'])} columns: {row}"
                )
    return machines, tables


def write(machines: dict[str, str], tables: Tables, path: Path = FILE) -> None:
    """Writes the file of figures, with one line for each row, so that diffs are short."""
    lines = ["# scripts/figures.py says what this is, and writes it.", "", "[machines]"]
    lines += [f"{name} = {_toml(said)}" for name, said in machines.items()]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [
            f"{key} = {_toml(value)}" for key, value in table.items() if key not in ("rows", "read")
        ]
        lines += ["rows = [", *(f"  {_toml(row)}," for row in table["rows"]), "]"]
        for one in table.get("read", []):
            lines += [
                f"[[{name}.read]]",
                *(f"{key} = {_toml(value)}" for key, value in one.items()),
            ]
    path.write_text("\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    """The TOML of a string, a number or a list of them, which is the same as its JSON."""
    return json.dumps(value, ensure_ascii=False)


def table_of(names: list[str], machines: dict[str, str], tables: Tables) -> str:
    """The Markdown of one table, or of several as one; the name "machines" describes the machines."""
    if names == ["machines"]:
        return "\n" + "".join(f"* {name}: {said}\n" for name, said in machines.items()) + "\n"
    if missing := [name for name in names if name not in tables]:
        raise ValueError(f"docs/figures.toml has no table {', '.join(missing)}")
    if len(names) == 1:
        table = tables[names[0]]
        said = f"`{table['command']}`, {table['date']}, machine {table['machine']}."
        note = f" {table['note']}" if "note" in table else ""
        return f"{_markdown(table['columns'], table['rows'])}\n{said}{note}\n"
    rows = []
    for table in (tables[name] for name in names):
        if table["columns"] != ["what", "figure"]:
            raise ValueError("tables with other columns than what and figure stand alone")
        rows += [[*row, f"`{table['command']}`"] for row in table["rows"]]
    return _markdown(["what", "figure", "command"], rows)


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render(text: str, machines: dict[str, str], tables: Tables) -> str:
    """The text of a page with the tables between its comments replaced."""
    return BLOCK.sub(
        lambda found: f"{found[1]}{table_of(found[2].split(), machines, tables)}{found[4]}", text
    )


def keep(table: dict[str, Any], printed: str) -> tuple[list[str], list[list[int]]]:
    """Fills a table's cells from a command's output: (patterns not found, cells without patterns)."""
    missing, cells = [], []
    for one in table.get("read", []):
        found = [re.search(pattern, printed, re.DOTALL) for pattern in one["patterns"]]
        missing += [p for p, match in zip(one["patterns"], found, strict=True) if match is None]
        row, column = one["cell"]
        cells.append([row, column])
        if all(found):
            table["rows"][row][column] = one["form"].format(*(match[1] for match in found if match))
    figures = [[i, j] for i, row in enumerate(table["rows"]) for j in range(1, len(row))]
    return missing, [cell for cell in figures if cell not in cells]


def run(name: str, output: Path | None, machine: str | None) -> int:
    """Runs a table's command and stores its figures; if some are not found, stores none and returns 1."""
    machines, tables = read()
    table = tables[name]
    if output is None:
        command = [sys.executable if w == "python" else w for w in shlex.split(table["command"])]
        found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        printed = found.stdout
        table["date"] = datetime.date.today().isoformat()
    else:
        printed = output.read_text()
        table["date"] = datetime.date.fromtimestamp(output.stat().st_mtime).isoformat()
    table["machine"] = machine or table["machine"]
    print(printed, end="")
    missing, others = keep(table, printed)
    for pattern in missing:
        print(f"{name}: not printed: {pattern}", file=sys.stderr)
    if missing:
        return 1
    if others:
        print(f"{name}: by hand, from the lines above: {others}", file=sys.stderr)
    write(machines, tables)
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    parser.add_argument("--run", metavar="NAME", help="a table whose command is run and kept")
    parser.add_argument("--output", type=Path, help="with --run: read this file, run nothing")
    parser.add_argument("--machine", help="with --run: where it ran, a key of [machines]")
    options = parser.parse_args()
    if options.run and (failed := run(options.run, options.output, options.machine)):
        return failed
    machines, tables = read()
    differ = 0
    for page in pages():
        text = page.read_text()
        new = render(text, machines, tables)
        if new != text:
            differ += 1
            print(page.relative_to(ROOT), "differs" if options.check else "written")
            if not options.check:
                page.write_text(new)
    return int(options.check and differ > 0)


if __name__ == "__main__":
    sys.exit(main())
