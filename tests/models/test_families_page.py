"""The page that writes a family: its Python runs as it is written, in under 100 lines."""

import re
import warnings

import numpy as np
import pytest
import transformers

import maxjax
from maxjax.models import FAMILIES
from tests.test_walk import ROOT, run_blocks

PAGE = ROOT / "docs" / "families.md"

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """A reader's program runs under JAX's defaults."""


@pytest.fixture(autouse=True)
def families():
    before = list(FAMILIES)
    yield
    FAMILIES[:] = before


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = run_blocks(PAGE)
    model = names["model"]
    assert type(model) is names["Granite"] and names["expected"].std() > 0.1
    assert model.config.residual_multiplier == 0.7
    spread = maxjax.models.build(names["weights"])
    spread.to(maxjax.make_mesh(model=2))
    spread.load_state_dict(names["weights"])
    found = np.asarray(spread(names["ids"]))
    np.testing.assert_allclose(found, np.asarray(names["logits"]), atol=1e-4)
    maxjax.save_pretrained(model, tmp_path / "again")
    again = transformers.GraniteForCausalLM.from_pretrained(tmp_path / "again")
    same = names["theirs"].state_dict()
    assert all((value == same[name]).all() for name, value in again.state_dict().items())


def test_the_family_is_under_100_lines():
    first = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    assert "register(" in first and len(first.splitlines()) < 100
