"""The file of an architecture is all of it: a copy of it elsewhere loads checkpoints, and an edit changes results.

For every architecture, its file is copied, its relative imports made absolute, and the copy registered in its place.
``copied_edits.py`` has six edits of each file that change what the model computes: a decoder's logits, or an encoder's
states and the logits of its heads for masked words and for texts.
"""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import maxjax
from maxjax.models import Family, all_families, register, registry, source_of
from maxjax.models.parts import EncoderConfig
from tests.models.copied_edits import EDITS
from tests.models.families.cases import every

MODELS = Path(maxjax.models.__file__).parent
# The first case of each family of decoders.
CASES = {case.family: case for case in reversed(every())}
FILES = {one.model_type: sys.modules[one.config.__module__].__file__ for one in all_families()}
# Encoders: the names of their classes and settings.
ENCODERS = {
    "bert": ("Bert", {}), "roberta": ("Roberta", {}), "xlm-roberta": ("XLMRoberta", {}), "camembert": ("Camembert", {}),
    "electra": ("Electra", {"embedding_size": 8}), "distilbert": ("DistilBert", {}), "mpnet": ("MPNet", {}),
    "albert": ("Albert", {"embedding_size": 8, "num_hidden_groups": 2}),
    "deberta-v2": ("DebertaV2", {"pos_att_type": ("p2c", "c2p"), "position_buckets": 4, "norm_rel_ebd": "layer_norm"}),
    "modernbert": ("ModernBert", {"local_attention": 4}), "jina_embeddings_v3": ("JinaV3", {}),
    "nomic_bert": ("NomicBert", {}), "gte": ("Gte", {}),
}  # fmt: skip
SIZES = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 21, "num_hidden_layers": 3, "num_attention_heads": 2,
         "max_position_embeddings": 20}  # fmt: skip
DISTIL = {
    "vocab_size": 41,
    "dim": 16,
    "hidden_dim": 21,
    "n_layers": 3,
    "n_heads": 2,
    "max_position_embeddings": 20,
}
EDITED_HEADS = ("fill-mask", "classify")
# Whose edits, and which encoders' copies, the default set tests: attention, latent vectors, recurrent states, windows.
DEFAULT = ("llama", "deepseek_v3", "mamba2", "modernbert")
# Architectures that are one file; the model types that the tests load with their copies.
COPIED = sorted(kind for kind in CASES if Path(FILES[kind]).stem in EDITS)


def chosen(kinds, default):
    """Parameters: those of the default set, the others for ``pytest --all``."""
    marked = {kind: [] if kind in default else pytest.mark.extra for kind in kinds}
    return [pytest.param(kind, marks=marks) for kind, marks in marked.items()]


def imported(text, directory, name):
    """The module of a text that is saved outside of the package."""
    path = directory / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


def register_copy(kind, text, directory, name):
    """Registers the families of a model type in a copy of its file: of an encoder, one for each head."""
    found = vars(imported(text, directory, name)).values()
    families = [vars(one).get("family", one) if isinstance(one, type) else one for one in found]
    families = {id(one): one for one in families if getattr(one, "model_type", None) == kind}
    families = [one for one in families.values() if isinstance(one, Family)]
    replaced = [one for one in all_families() if one.model_type == kind]
    others = (
        kind == "xlm-roberta"
    )  # Jina's model, which is in another file, has the same model type
    assert len(families) == len(replaced) - others
    for one in families:
        register(one)
    assert len([one for one in all_families() if one.model_type == kind]) == len(replaced)


@pytest.fixture
def registered():
    before = dict(registry.ENTRIES)
    yield
    registry.ENTRIES.clear()
    registry.ENTRIES.update(before)


def logits(model):
    rows = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 9)).astype(np.int32)
    return np.asarray(model(rows))


def heads_of(kind):
    """The classes of an encoder with each of its heads."""
    names = [key.partition(".")[2] for key, e in registry.ENTRIES.items() if e.model_type == kind]
    stem = Path(FILES[kind]).stem
    file = importlib.import_module(f"maxjax.models.{stem}")
    return [getattr(file, name) for name in names if "For" in name]


def save_encoders(kind, directory, heads):
    """Saves an encoder of each class with a head, whose weights are not ones and zeros; returns the folders."""
    name, settings = ENCODERS[kind]
    sizes = DISTIL if kind == "distilbert" else SIZES
    config = getattr(maxjax.models, f"{name}Config")(**sizes, **settings, num_labels=3)
    rng, folders = np.random.default_rng(0), [directory / head.__name__ for head in heads]
    for head, folder in zip(heads, folders, strict=True):
        is_v3 = head.__name__.startswith("DebertaV3")
        model = head(dataclasses.replace(config, legacy=False) if is_v3 else config)
        model = maxjax.init(model, jax.random.key(0))
        model = jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape, np.float32), model)
        maxjax.save_pretrained(model, folder)
    return folders


def outputs(model):
    """The states, logits and pooled states of two texts, of which one is shorter; of real tokens only."""
    ids = np.random.default_rng(0).integers(6, 41, (2, 9)).astype(np.int32)
    mask = (np.arange(9)[None] < [[9], [5]]).astype(np.int32)
    ids = np.where(mask, ids, getattr(model.config, "pad_token_id", 1))
    out = model(ids, mask)
    real = mask.astype(bool)
    found = [
        np.asarray(one) for one in out if one is not None
    ]  # [B, T, …], or [B, …] of whole texts
    return [one[real] if one.shape[:2] == real.shape else one for one in found]


def outputs_of(folders):
    models = [maxjax.load(folder, tokenizer=False)[0] for folder in folders]
    return models, [one for model in models for one in outputs(model)]


@pytest.mark.parametrize("kind", chosen(ENCODERS, DEFAULT))
def test_a_copied_encoder_is_the_same_model(kind, tmp_path, registered):
    heads = heads_of(kind)
    folders = save_encoders(kind, tmp_path, heads)
    _, expected = outputs_of(folders)
    text = source_of(kind)
    assert not [line for line in re.findall(r"^from maxjax.*", text, flags=re.M) if " _" in line]
    register_copy(kind, text, tmp_path, f"copy_of_{Path(FILES[kind]).stem}")
    models, found = outputs_of(folders)
    assert {type(one).__module__ for one in models} == {f"copy_of_{Path(FILES[kind]).stem}"}
    assert [type(one).__name__ for one in models] == [one.__name__ for one in heads]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    saved = [tmp_path / "saved" / head.__name__ for head in heads]
    for model, folder in zip(models, saved, strict=True):
        maxjax.save_pretrained(model, folder)
    for one, other in zip(outputs_of(saved)[1], expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", COPIED)
def test_a_copy_outside_of_the_package_is_the_same_model(kind, tmp_path, registered):
    CASES[kind].model(tmp_path / "hf")
    expected = logits(maxjax.load(tmp_path / "hf")[0])
    text = source_of(kind)
    private = [line for line in re.findall(r"^from maxjax.*", text, flags=re.M) if " _" in line]
    assert not private
    register_copy(kind, text, tmp_path, f"copy_of_{kind}")
    model = maxjax.load(tmp_path / "hf")[0]
    assert type(model).__module__ == f"copy_of_{kind}"
    np.testing.assert_array_equal(logits(model), expected)
    assert len(maxjax.generate(model, None, [1, 2, 3], max_new_tokens=3).tokens) == 3
    maxjax.save_pretrained(model, tmp_path / "saved")
    np.testing.assert_array_equal(logits(maxjax.load(tmp_path / "saved")[0]), expected)


EDITED = [kind for kind in (*COPIED, *ENCODERS) if kind in EDITS[Path(FILES[kind]).stem]]


@pytest.mark.parametrize("kind", chosen(EDITED, DEFAULT))
def test_each_edit_of_one_line_changes_the_results(kind, tmp_path, registered):
    is_encoder = kind in ENCODERS
    if is_encoder:
        heads = [one for one in heads_of(kind) if one.task in EDITED_HEADS]
        folders = save_encoders(kind, tmp_path, heads)
    else:
        CASES[kind].model(tmp_path / "hf")

    def results():
        if is_encoder:
            return outputs_of(folders)[1]
        return [logits(maxjax.load(tmp_path / "hf")[0])]

    expected, text = results(), source_of(kind)
    for i, (old, new) in enumerate(EDITS[Path(FILES[kind]).stem][kind]):
        assert text.count(old) == 1, f"{text.count(old)} lines have {old!r}"
        name = f"edit_{i}_of_{Path(FILES[kind]).stem}"
        register_copy(kind, text.replace(old, new), tmp_path, name)
        found = results()
        assert [one.shape for one in found] == [one.shape for one in expected]
        far = max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))
        assert far > 1e-4, f"{old!r} -> {new!r} changes nothing"


def test_every_encoder_is_copied_and_every_file_edited():
    encoders = {one.model_type for one in all_families() if issubclass(one.config, EncoderConfig)}
    assert encoders == {*ENCODERS}
    files = {Path(FILES[kind]).stem for kind in ENCODERS}
    assert files <= EDITS.keys() and all(len(one) == 6 for f in files for one in EDITS[f].values())
