"""The file of a model of images is all of it: a copy elsewhere loads its files, and an edit changes the results."""

import re
from typing import Any

import numpy as np
import pytest

import maxjax
from maxjax.models import all_families, registry, source_of
from maxjax.models.parts.vision import VisionModel
from tests.models.copied_edits import EDITS
from tests.models.test_copies import register_copy
from tests.models.vision.cases import FIRST, inputs, oracle_of, result_of

# The case of each file, by model type.
KINDS = {
    "siglip": "siglip", "clip": "clip", "vit": "vit", "deit": "deit", "dinov2": "dinov2",
    "dinov2_with_registers": "dinov2-registers", "dinov3_vit": "dinov3",
}  # fmt: skip
EDITS_OF = {kind: found for edits in EDITS.values() for kind, found in edits.items()}
DEFAULT = ("siglip",)
EACH = pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=[] if one in DEFAULT else pytest.mark.extra) for one in KINDS],
)


@pytest.fixture
def registered():
    before = dict(registry.ENTRIES)
    yield
    registry.ENTRIES.clear()
    registry.ENTRIES.update(before)


def results(folder, oracle):
    pixels, ids = inputs(oracle.config)
    model, _ = maxjax.load(folder, tokenizer=False)
    return model, result_of(model, pixels, ids)


@EACH
def test_a_copy_outside_of_the_package_is_the_same_model(kind, tmp_path, registered):
    oracle = oracle_of(*FIRST[KINDS[kind]])
    oracle.save(tmp_path / "hf")
    _, expected = results(tmp_path / "hf", oracle)
    text = source_of(kind)
    assert not [line for line in re.findall(r"^from maxjax.*", text, flags=re.M) if " _" in line]
    register_copy(kind, text, tmp_path, f"copy_of_{kind}")
    model, found = results(tmp_path / "hf", oracle)
    assert type(model).__module__ == f"copy_of_{kind}"
    maxjax.save_pretrained(model, tmp_path / "saved")
    for one in (found, results(tmp_path / "saved", oracle)[1]):
        for name, value in expected.items():
            np.testing.assert_array_equal(one[name], value, err_msg=name)


@EACH
def test_each_edit_of_one_line_changes_the_results(kind, tmp_path, registered):
    oracle = oracle_of(*FIRST[KINDS[kind]])
    oracle.save(tmp_path / "hf")
    (_, expected), text = results(tmp_path / "hf", oracle), source_of(kind)
    for i, (old, new) in enumerate(EDITS_OF[kind]):
        assert text.count(old) == 1, f"{text.count(old)} lines have {old!r}"
        register_copy(kind, text.replace(old, new), tmp_path, f"edit_{i}_of_{kind}")
        _, found = results(tmp_path / "hf", oracle)
        far = max(np.abs(found[name] - value).max() for name, value in expected.items())
        assert far > 1e-4, f"{old!r} -> {new!r} changes nothing"


def test_every_file_is_edited():
    makers: list[tuple[str, Any]] = [(one.model_type, one.make) for one in all_families()]
    kinds = {kind for kind, make in makers if issubclass(make.__self__, VisionModel)}
    assert kinds - {*KINDS} == {
        f"{one}_{part}_model" for one in ("siglip", "clip") for part in ("vision", "text")
    }
    assert all(len(EDITS_OF[kind]) == 6 for kind in KINDS)
