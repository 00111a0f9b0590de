"""The Python of the README and the docs runs as it is written, blocks one after another."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import maxjax
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


def run_shown(file, capsys, **names):
    """Runs a page; where a block of text follows a block of code, that is what the code prints."""
    page = file.read_text()
    for code, shown in re.findall(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", page, re.DOTALL | re.M
    ):
        capsys.readouterr()
        exec(compile(code, str(file), "exec"), names)
        if shown:
            assert capsys.readouterr().out.splitlines() == shown.splitlines()
    return names


@pytest.fixture
def gguf_file(minilm, tmp_path, monkeypatch):
    """The GGUF file that the pages speak of, in the current directory."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "minilm-q8_0.gguf", minilm, "Q8_0")


@pytest.mark.slow
def test_the_readme_runs(tmp_path, monkeypatch, capsys):
    """On four devices, as it says."""
    monkeypatch.chdir(tmp_path)
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *backend: four)
    names = run_shown(ROOT / "README.md", capsys)
    assert names["model"].model.norm.weight.value.sharding.num_devices == 4
    assert maxjax.load("mine")[1] is not None


@pytest.mark.campaign
@pytest.mark.slow
def test_the_walk_runs(minilm, gguf_file):
    names = run_blocks(ROOT / "docs" / "walk.md", path=str(minilm))
    assert names["query"].exists()
    assert names["out"].last_hidden_state.shape == (1, 8, 384)


@pytest.mark.campaign
@pytest.mark.slow
def test_getting_started_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_shown(ROOT / "docs" / "getting-started.md", capsys)
    assert names["value"] < 0.5 and (tmp_path / "model.html").stat().st_size > 1000
    model, tokenizer = maxjax.load("tuned")
    assert maxjax.generate(model, tokenizer, "Who is near Tom?\n") == "The brother."


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
