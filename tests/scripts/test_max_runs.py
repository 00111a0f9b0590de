"""The comparison of ``scripts/max_files.py --numbers``; its recipes need MAX, these do not."""

import numpy as np
import pytest

from scripts import max_runs
from scripts.max_recipes.kit import RECIPES, Extra, Kit, Sized, X, draw
from scripts.max_runs import compared, run

ARRAY = draw(3, X)


def linear(k):
    return Extra.of(
        k.nn.Linear(X, 4, k.f32, k.cpu), lambda layer, x: layer(x), (Sized(ARRAY, ("rows", X)),)
    )


@pytest.fixture(autouse=True)
def recipe(monkeypatch):
    monkeypatch.setitem(RECIPES, "linear.py", lambda of: linear(Kit(of, "")))


def test_equal_numbers_are_equal_and_others_are_not():
    weight = max_runs.weight_value("weight", (4, X), "float32")
    expected = ARRAY @ weight.T
    assert np.allclose(run("linear.py")[0], expected, atol=1e-5)
    assert compared("linear.py", [expected]).difference < max_runs.TOLERANCE
    assert compared("linear.py", [expected + 1e-3]).difference > max_runs.TOLERANCE


def test_what_cannot_be_compared_is_no_agreement():
    for expected, says in [
        ([np.zeros((3, 5))], "shapes"), ([np.full((3, 4), np.nan)], "not finite"),
        ("a\nValueError: no", "MAX: ValueError"),
    ]:  # fmt: skip
        found = compared("linear.py", expected)
        assert found.difference is None and says in found.error
