"""Every scenario gives what MAX gives, or the mended result where MAX has a defect."""

import pytest

from tests.conformance import adapters, compare, scenarios
from tests.conformance.pending import PENDING

RECORDED, MENDED = compare.recorded(), compare.mended()


def _cases() -> list:
    return [
        pytest.param(name, marks=pytest.mark.skip(reason=f"pending: step {PENDING[name]}: {name}"))
        if name in PENDING
        else name
        for name in scenarios.REGISTRY
    ]


@pytest.fixture(scope="module")
def namespace():
    return adapters.namespace_maxjax()


@pytest.mark.parametrize("name", _cases())
def test_scenario(name, namespace, tmp_path):
    namespace.tmpdir = tmp_path
    got = compare.plain(scenarios.REGISTRY[name](namespace))
    want = MENDED.get(name, RECORDED[name])["result"]
    lines = compare.differences(want, got)
    assert not lines, "\n" + "\n".join(lines)


def test_every_scenario_is_recorded():
    assert set(RECORDED) == set(scenarios.REGISTRY)


def test_pending_names_exist():
    assert set(PENDING) <= set(scenarios.REGISTRY)


def test_exactly_the_quirks_are_mended():
    quirks = {name for name, function in scenarios.REGISTRY.items() if function.quirk}
    assert set(MENDED) == quirks


@pytest.mark.parametrize(
    ("want", "got", "lines"),
    [
        ({"a": 1, "_b": 2}, {"a": 1}, 0),
        ({"a": 1}, {"a": 1, "b": None}, 1),
        ([1, 2], [1], 1),
        ([1.0], [1.0015], 0),
        ([1.0], [1.1], 1),
        (1, True, 1),
        (None, False, 1),
        ("x", "y", 1),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, 1),
    ],
)
def test_the_comparison_finds_a_difference(want, got, lines):
    assert len(compare.differences(want, got)) == lines
