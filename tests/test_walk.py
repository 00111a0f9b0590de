"""The README's Python runs as it is written, its blocks one after another."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """A reader's program runs under JAX's defaults."""


def test_the_readme_runs(minilm):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    names = {"path": str(minilm)}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["query"].exists()
    assert names["out"].last_hidden_state.shape == (1, 8, 384)
    assert list(names["model"].state_dict()) == ["layers.0.weight", "layers.1.weight"]
