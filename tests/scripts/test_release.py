"""What a release says of itself in several files, and the workflows: names in them are there."""

import re
import tomllib
from pathlib import Path

import pytest

import maxjax

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.findall(r"^## (\d\S+) \((\d{4}-\d\d-\d\d)\)$", changes, re.MULTILINE)[0]
    assert version == maxjax.__version__
    assert f"version: {version}\n" in citation
    assert f"date-released: {date}\n" in citation


def test_a_version_has_at_most_thirty_changes():
    versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert all(version.count("\n- ") <= 30 for version in versions)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_run_what_is_there(file):
    lines = re.findall(r"^ *- run: (.+)$", file.read_text(), re.MULTILINE)
    assert lines
    paths = re.findall(r"(?<!\S)(?:\.ci|scripts|tests|maxjax)/[\w/.]+", " ".join(lines))
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]
    modules = re.findall(r"-m (scripts\.\w+)", " ".join(lines))
    assert not [name for name in modules if not (ROOT / name.replace(".", "/")).exists()]


@pytest.mark.parametrize("page", ["install.md", "getting-started.md"])
def test_pages_name_extras_that_are_there(page):
    text = (ROOT / "docs" / page).read_text() + "".join(file.read_text() for file in WORKFLOWS)
    named = {
        one for found in re.findall(r'(?:maxjax|"\.)\[([\w,]+)\]', text) for one in found.split(",")
    }
    assert named
    assert named <= set(EXTRAS)
