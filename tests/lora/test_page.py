"""docs/finetuning.md runs as it stands, and its tasks take no more lines than promised."""

import pytest

from tests.test_walk import ROOT, blocks_of, run_blocks

PAGE = ROOT / "docs" / "finetuning.md"


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """A reader's program runs under JAX's defaults."""


def lines(block, start):
    """The number of lines of a block from one that begins so, without blank ones."""
    return len([line for line in block[block.index(start) :].splitlines() if line.strip()])


def test_the_tasks_are_as_short_as_promised():
    blocks = blocks_of(PAGE)
    assert lines(blocks[0], "model, tokenizer") <= 12
    assert lines(blocks[-1], "class") <= 14


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("optax")
    monkeypatch.chdir(tmp_path)
    scope = run_blocks(PAGE)
    assert (tmp_path / "tuned" / "config.json").exists()
    names = {name for name in scope["tuned"].raw_state_dict() if "lora_A" in name}
    assert len(names) == 14
