"""The tasks of docs/finetuning.md take no more lines than promised; tests/test_walk.py runs them."""

from tests.blocks import ROOT, code_of

PAGE = ROOT / "docs" / "finetuning.md"


def lines(block, start):
    """The number of lines of a block from one that begins so, without blank ones."""
    return len([line for line in block[block.index(start) :].splitlines() if line.strip()])


def test_the_tasks_are_as_short_as_promised():
    blocks = code_of(PAGE)
    assert lines(blocks[0], "model, tokenizer") <= 12
    assert lines(blocks[-1], "class") <= 14
