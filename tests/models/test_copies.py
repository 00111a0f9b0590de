"""The file of an architecture is all of it: a copy of it elsewhere loads checkpoints, and an edit changes results.

For every architecture, its file is copied, its relative imports made absolute, and the copy registered in its place.
``copied_edits.py`` has six edits of each file, each of one line, that change what the model computes.
"""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import maxjax
from maxjax.models import all_families, register, registry, source_of
from tests.models.copied_edits import EDITS
from tests.models.families.cases import every

MODELS = Path(maxjax.models.__file__).parent
# The first case of each family.
CASES = {case.family: case for case in reversed(every())}
FILES = {one.model_type: sys.modules[one.config.__module__].__file__ for one in all_families()}
# Whose edits the default set makes: attention, latent vectors, recurrent states.
DEFAULT = ("llama", "deepseek_v3", "mamba2")
# Architectures that are one file; the model types that the tests load with their copies.
COPIED = sorted(kind for kind in CASES if Path(FILES[kind]).stem in EDITS)


def imported(text, directory, name):
    """The module of a text that is saved outside of the package."""
    path = directory / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


def copy_of(kind, text, directory, name):
    """The family of a model type in a copy of its file."""
    module = imported(text, directory, name)
    model = next(one for one in all_families() if one.model_type == kind)
    found = [
        v for v in vars(module).values() if isinstance(v, type(model)) and v.model_type == kind
    ]
    assert len({id(one) for one in found}) == 1
    return found[0]


@pytest.fixture
def registered():
    before = dict(registry.ENTRIES)
    yield
    registry.ENTRIES.clear()
    registry.ENTRIES.update(before)


def logits(model):
    rows = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 9)).astype(np.int32)
    return np.asarray(model(rows))


@pytest.mark.parametrize("kind", COPIED)
def test_a_copy_outside_of_the_package_is_the_same_model(kind, tmp_path, registered):
    CASES[kind].model(tmp_path / "hf")
    expected = logits(maxjax.load(tmp_path / "hf")[0])
    text = source_of(kind)
    private = [line for line in re.findall(r"^from maxjax.*", text, flags=re.M) if " _" in line]
    assert not private
    register(copy_of(kind, text, tmp_path, f"copy_of_{kind}"))
    model = maxjax.load(tmp_path / "hf")[0]
    assert type(model).__module__ == f"copy_of_{kind}"
    np.testing.assert_array_equal(logits(model), expected)
    assert len(maxjax.generate(model, None, [1, 2, 3], max_new_tokens=3).tokens) == 3
    maxjax.save_pretrained(model, tmp_path / "saved")
    np.testing.assert_array_equal(logits(maxjax.load(tmp_path / "saved")[0]), expected)


EDITED = [
    pytest.param(kind, marks=[] if kind in DEFAULT else pytest.mark.campaign)
    for kind in COPIED
    if kind in EDITS[Path(FILES[kind]).stem]
]


@pytest.mark.parametrize("kind", EDITED)
def test_each_edit_of_one_line_changes_the_logits(kind, tmp_path, registered):
    CASES[kind].model(tmp_path / "hf")
    expected = logits(maxjax.load(tmp_path / "hf")[0])
    text = source_of(kind)
    for i, (old, new) in enumerate(EDITS[Path(FILES[kind]).stem][kind]):
        assert text.count(old) == 1, f"{text.count(old)} lines have {old!r}"
        register(copy_of(kind, text.replace(old, new), tmp_path, f"edit_{i}_of_{kind}"))
        found = logits(maxjax.load(tmp_path / "hf")[0])
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() > 1e-4, f"{old!r} -> {new!r} changes nothing"
