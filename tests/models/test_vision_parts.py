"""The vision parts of vision-language models: on eight devices, compiled once, each a file to copy and change."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import maxjax
from maxjax.engine.pictures import Inputs, SeenPictures, placed_pictures
from maxjax.errors import CheckpointMismatchError, UserInputError
from maxjax.models import VisionPart, source_of
from maxjax.nn import LayerStack
from tests.models import test_vision_language as families
from tests.models.copied_edits import VISION_PARTS
from tests.models.test_copies import chosen, imported

folders = families.folders


def picture_of(model, family, seed=0):
    """A prompt's ids, and its picture as the model sees it."""
    _, _, form, count = families.FAMILIES[family]
    ids, (inputs, _) = families.prompt_of(count), families.picture(form, count, seed)
    return ids, placed_pictures(model, ids, [inputs], SeenPictures())


def features(pictures):
    """All features of a prompt's pictures."""
    return [pictures.rows, *([] if pictures.deepstack is None else [pictures.deepstack])]


@pytest.mark.parametrize("family", chosen(families.FAMILIES, ("qwen3_vl",)))
def test_a_picture_on_eight_devices(family, folders, monkeypatch):
    """Features, logits, and answers in the engine beside a text are those of one device."""

    def results(mesh):
        model, _ = maxjax.load(folders(family), mesh=mesh)
        ids, pictures = picture_of(model, family)
        given = Inputs.of([(pictures, 0, len(ids))], len(ids), model)
        assert given is not None
        args = given._asdict()
        logits = jax.jit(lambda model, ids, args: model(ids, **args))(model, jnp.array([ids]), args)
        settings = {"max_new_tokens": 4, "temperature": 0, "eos_ids": ()}
        with monkeypatch.context() as patch, maxjax.Engine(model, slots=2, chunk=16) as engine:
            families.give_pictures(patch, ids, pictures)
            pending = [engine.submit(one, **settings) for one in (ids, [4, 5, 6])]
            tokens = [list(one.result().tokens) for one in pending]
        return pictures.rows, np.asarray(logits), tokens

    rows, logits, tokens = results(None)
    found = results(maxjax.make_mesh(data=2, fsdp=2, model=2))
    np.testing.assert_allclose(found[0], rows, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(found[1], logits, atol=1e-4)
    assert found[2] == tokens


STACKS = {
    "llava": ["vision_tower.encoder.layers"], "llava_next": ["vision_tower.encoder.layers"],
    "pixtral": ["vision_tower.transformer.layers"], "gemma3": ["vision_tower.encoder.layers"],
    "paligemma": ["vision_tower.encoder.layers"], "llava_onevision": ["vision_tower.encoder.layers"],
    "idefics3": ["vision_model.encoder.layers"], "qwen2_vl": ["visual.blocks"],
    "qwen2_5_vl": ["visual.blocks"], "qwen3_vl": ["visual.blocks"],
}  # fmt: skip


@pytest.mark.parametrize("family", chosen(STACKS, ("llava", "qwen3_vl")))
def test_the_layers_of_a_tower_are_compiled_once(family, folders):
    """They are a stack after loading; the features are those of separate layers."""
    model, _ = maxjax.load(folders(family))
    stacks = [
        name.removesuffix(".")
        for name, m in model.vision.named_modules()
        if isinstance(m, LayerStack)
    ]
    assert stacks == STACKS[family]
    assert "(3 layers, " in repr(model).partition("\n")[0]  # of the language model
    _, stacked = picture_of(model, family)
    _, separate = picture_of(model.unstack(), family)
    assert not [m for _, m in model.vision.named_modules() if isinstance(m, LayerStack)]
    for one, other in zip(features(stacked), features(separate), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_captures_and_patches_see_a_vision_part(folders):
    """Those of the whole model too; what a patch changes is not kept for later."""
    model, _ = maxjax.load(folders("qwen3_vl"))
    ids, (inputs, _) = families.prompt_of(15), families.picture("patches", 15)
    seen, layers = SeenPictures(), "vision.visual.blocks.*"
    usual = placed_pictures(model, ids, [inputs], seen).rows
    with maxjax.capture(model, layers) as found:
        assert np.allclose(placed_pictures(model, ids, [inputs], seen).rows, usual, atol=1e-5)
    assert found[layers].shape == (3, 1, 64, 24)
    with maxjax.patch(model, {layers: lambda y: 0 * y}):
        patched = placed_pictures(model, ids, [inputs], seen).rows
    assert np.abs(patched - usual).max() > 0.01
    assert np.array_equal(placed_pictures(model, ids, [inputs], seen).rows, usual)


def modules_of(names):
    """The first two parts of names with several."""
    return {".".join(name.split(".")[:2]) for name in names}


@pytest.mark.parametrize("family", chosen(families.FAMILIES, ("gemma3",)))
def test_a_training_step_is_the_whole_model(family, folders, tmp_path):
    """It is loaded with its vision part, and a checkpoint is saved from it with the names of transformers' modules."""
    model, _ = maxjax.load(folders(family))
    maxjax.checkpoint.save(tmp_path / "run", model, step=1)
    again, _ = maxjax.load(tmp_path / "run")
    _, expected = picture_of(model, family)
    np.testing.assert_array_equal(picture_of(again, family)[1].rows, expected.rows)
    assert maxjax.load(tmp_path / "run", vision=False)[0].vision is None
    maxjax.save_pretrained(again, tmp_path / "saved")
    names = load_file(tmp_path / "saved" / "model.safetensors")
    parts = {f"model.{part}" for part in model.vision.names} | {model.vision.text_names.rstrip(".")}
    assert modules_of(names) - {"lm_head.weight"} == parts
    assert maxjax.load(tmp_path / "saved")[0].vision is not None


@pytest.mark.oracle
@pytest.mark.parametrize("family", families.FAMILIES)
def test_transformers_opens_what_a_training_step_became(family, folders, tmp_path):
    import torch

    model, _ = maxjax.load(folders(family))
    maxjax.checkpoint.save(tmp_path / "run", model, step=1)
    maxjax.save_pretrained(maxjax.load(tmp_path / "run")[0], tmp_path / "saved")
    kind, _ = families.oracle(family)
    found, wanted = (
        kind.from_pretrained(f).state_dict() for f in (tmp_path / "saved", folders(family))
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())


@pytest.mark.parametrize(("names", "module"), [(None, "language_model"), (["vision.*"], "visual")])
def test_adapters_have_the_names_of_modules(names, module, folders, tmp_path):
    model, _ = maxjax.load(folders("qwen3_vl"))
    tuned = maxjax.init(maxjax.lora.add(model, names, rank=2), jax.random.key(0))
    maxjax.lora.save(tmp_path, tuned)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.model.").split(".")[0] for name in found} - {
        "base_model"
    } == {module}
    again = maxjax.lora.load(model, tmp_path).raw_state_dict()
    for name, weight in tuned.raw_state_dict().items():
        np.testing.assert_array_equal(again[name].value, weight.value)


# --- one's own vision part


def copied(text, directory, name):
    """The class of the vision part in a copy of its file."""
    found = vars(imported(text, directory, name)).values()
    return {
        one.__name__: one
        for one in found
        if isinstance(one, type) and issubclass(one, VisionPart) and one.__module__ == name
    }


@pytest.mark.parametrize("family", chosen(VISION_PARTS, ("qwen3_vl",)))
def test_a_copy_and_its_edits(family, folders, tmp_path):
    """The copy of a vision part's file is the same, and an edit of one line changes the features."""
    model, _ = maxjax.load(folders(family))
    _, expected = picture_of(model, family)
    name, edits = type(model.vision).__name__, VISION_PARTS[family]
    text = source_of("mistral3" if family == "pixtral" else family)
    assert not [line for line in re.findall(r"^from maxjax.*", text, flags=re.M) if " _" in line]
    part = copied(text, tmp_path, f"copy_of_{family}")[name]
    model, _ = maxjax.load(folders(family), vision=part)
    assert type(model.vision) is part
    np.testing.assert_array_equal(picture_of(model, family)[1].rows, expected.rows)
    maxjax.save_pretrained(model, tmp_path / "saved")
    again, _ = maxjax.load(tmp_path / "saved")
    np.testing.assert_array_equal(picture_of(again, family)[1].rows, expected.rows)
    for i, (old, new) in enumerate(edits):
        assert text.count(old) == 1, f"{text.count(old)} lines have {old!r}"
        part = copied(text.replace(old, new), tmp_path, f"edit_{i}_of_{family}")[name]
        model, _ = maxjax.load(folders(family), vision=part)
        found = picture_of(model, family)[1]
        pairs = zip(features(found), features(expected), strict=True)
        far = max(np.abs(one - other).max() for one, other in pairs)
        assert far > 1e-4, f"{old!r} -> {new!r} changes nothing"


class Flat(VisionPart):
    """A vision part whose tensors no file has."""

    names = ("flat",)


@pytest.mark.parametrize(
    ("vision", "error"),
    [(Flat, CheckpointMismatchError), (dict, UserInputError), (1, UserInputError)],
)
def test_what_is_no_vision_part_of_the_file(vision, error, folders):
    with pytest.raises(error, match="vision"):
        maxjax.load(folders("llava"), vision=vision)
