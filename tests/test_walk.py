"""The Python of the README and the docs runs as it is written, blocks one after another."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.engine.test_load_gguf import write

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """A reader's program runs under JAX's defaults."""


def blocks_of(file):
    blocks = re.findall(r"^```python\n(.*?)^```", file.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    return blocks


def run_blocks(file, **names):
    for block in blocks_of(file):
        exec(compile(block, str(file), "exec"), names)
    return names


@pytest.fixture
def gguf_file(minilm, tmp_path, monkeypatch):
    """The GGUF file that the pages speak of, in the current directory."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "minilm-q8_0.gguf", minilm, "Q8_0")


@pytest.mark.campaign
@pytest.mark.slow
def test_the_readme_runs(minilm, gguf_file):
    names = run_blocks(ROOT / "README.md", path=str(minilm))
    assert names["query"].exists()
    assert names["out"].last_hidden_state.shape == (1, 8, 384)
    assert list(names["model"].state_dict())[-1] == "layers.99.weight"


def test_the_page_of_formats_runs(gguf_file):
    names = run_blocks(ROOT / "docs" / "formats.md")
    assert names["data"].quantization_encoding.value == "Q8_0"
    assert names["data"].logical_shape == [384, 384] and names["data"].shape == [384, 408]


@pytest.mark.campaign
def test_the_page_of_checkpoints_runs(minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_blocks(ROOT / "docs" / "checkpoints.md", path=str(minilm))
    assert names["found"]["data"] == {"epoch": 3, "file": "a.txt"}
    model, body = names["model"].state_dict(), names["smaller"].layers.state_dict()
    assert all((np.asarray(model[f"layers.{name}"]) == body[name]).all() for name in body)


PAGES = "compile-once export placement generate rendering notebook capture".split()


@pytest.mark.campaign
@pytest.mark.parametrize("page", PAGES)
def test_the_docs_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(ROOT / "docs" / f"{page}.md")
