"""Each file of examples/ runs as a reader would run it, and is short. All run in one process: imports are slow."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """A reader's program runs under JAX's defaults."""


def test_they_are_listed_and_short():
    listed = (EXAMPLES / "README.md").read_text()
    assert len(FILES) >= 10
    for file in FILES:
        assert f"]({file.name})" in listed
        assert len(file.read_text().splitlines()) <= 40, file.name


# Other tests already run what the remaining examples show.
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_runs(file, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    runpy.run_path(str(file), run_name="__main__")
    assert capsys.readouterr().out
