"""The figures of the documentation: one file, and pages that show what it says."""

import shlex
import subprocess
import sys

import pytest

from scripts import figures

MACHINES, TABLES = figures.read()
# They measure what no page gives a figure of.
WITHOUT_A_TABLE = {"bench_blocks.py", "bench_gpu.py", "bench_progress.py", "bench_render.py"}

SMALL = """
[machines]
here = "a computer"
[t]
title = "T"
command = "python x.py"
date = "2026-11-01"
machine = "here"
columns = ["what", "figure"]
rows = [["a", "1"], ["b | c", "2"]]
[[t.read]]
cell = [0, 1]
form = "{}; {} s"
patterns = ["a=(\\\\d+)", "b=(\\\\d+)"]
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "figures.toml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize("page", figures.pages(), ids=lambda path: path.name)
def test_a_page_shows_what_the_file_says(page):
    text = page.read_text()
    assert figures.render(text, MACHINES, TABLES) == text, "run python scripts/figures.py"
    marks = text.count("\n<!-- figures: "), text.count("\n<!-- /figures -->")
    assert marks == (len(figures.BLOCK.findall(text)),) * 2


def test_the_page_of_figures_has_every_table():
    text = (figures.ROOT / "docs" / "figures.md").read_text()
    shown = [name for found in figures.BLOCK.findall(text) for name in found[1].split()]
    assert sorted(shown) == sorted([*TABLES, "machines"])


def test_every_benchmark_has_a_table_and_every_command_a_file():
    scripts = {
        word for table in TABLES.values() for word in shlex.split(table["command"]) if "/" in word
    }
    assert all((figures.ROOT / script).exists() for script in scripts)
    benchmarks = {path.name for path in (figures.ROOT / "scripts").glob("bench_*.py")}
    assert benchmarks - {script.split("/")[-1] for script in scripts} == WITHOUT_A_TABLE


def test_the_file_is_as_it_is_written(tmp_path):
    figures.write(MACHINES, TABLES, tmp_path / "f.toml")
    assert (tmp_path / "f.toml").read_text() == figures.FILE.read_text()


def test_a_table_is_written_between_its_comments(small):
    machines, tables = figures.read(small)
    page = "x\n<!-- figures: t -->\nold\n<!-- /figures -->\ny\n<!-- figures: t t -->\n<!-- /figures -->"
    new = figures.render(page, machines, tables)
    assert "old" not in new and new.startswith("x\n<!-- figures: t -->\n\n| what | figure |")
    assert "\n`python x.py`, 2026-11-01, machine here.\n<!-- /figures -->\ny\n" in new
    assert new.count("| a | 1 | `python x.py` |") == 2
    assert "| b \\| c | 2 |" in new
    assert figures.render(new, machines, tables) == new
    with pytest.raises(ValueError, match="no table u"):
        figures.render("<!-- figures: u -->\n<!-- /figures -->", machines, tables)


def test_what_a_command_prints_is_kept(small):
    _, tables = figures.read(small)
    assert figures.keep(tables["t"], "a=3\nb=4") == ([], [[1, 1]])
    assert tables["t"]["rows"][0] == ["a", "3; 4 s"]
    assert figures.keep(tables["t"], "b=5") == (["a=(\\d+)"], [[1, 1]])
    assert tables["t"]["rows"][0] == ["a", "3; 4 s"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('machine = "here"', 'machine = "there"', "machine that"),
        ('title = "T"\n', "", "title"),
        ('"2026-11-01"', '"November"', "isoformat"),
        ('["a", "1"]', '["a"]', "columns"),
    ],
)
def test_a_wrong_file_is_told(small, old, new, message):
    small.write_text(SMALL.replace(old, new))
    with pytest.raises(ValueError, match=message):
        figures.read(small)


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if "read" in table])
def test_a_benchmark_prints_what_is_read(name):
    table = {**TABLES[name], "rows": [list(row) for row in TABLES[name]["rows"]]}
    command = [
        sys.executable if word == "python" else word for word in shlex.split(table["command"])
    ]
    found = subprocess.run(
        [*command, "--quick"], cwd=figures.ROOT, capture_output=True, text=True, check=True
    )
    missing, _ = figures.keep(table, found.stdout)
    assert not missing, found.stdout
