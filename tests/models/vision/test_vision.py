"""Every model of images against transformers: states, vectors and logits, files, meshes, dtypes, other sizes."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import maxjax
from maxjax.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedModelError,
    UserInputError,
)
from maxjax.graph.weights import load_weights
from maxjax.models import (
    CLIPConfig,
    CLIPTextConfig,
    SiglipConfig,
    SiglipVisionConfig,
    build,
    find_family,
    read_object,
)
from maxjax.models.written import config_of
from tests.models.vision.cases import (
    CASES,
    FIRST,
    answer_of,
    compare,
    each,
    inputs,
    loaded,
    oracle_of,
    result_of,
)
from tests.oracles.recorded import torch


@each()
def test_results_and_files(tmp_path, kind, config, settings):
    oracle = oracle_of(kind, config, settings)
    oracle.save(tmp_path / "a")
    model, (pixels, ids) = loaded(tmp_path / "a"), inputs(oracle.config)
    assert type(model).__name__ == kind
    expected = oracle.ask("results", answer_of(pixels, ids))
    compare(result_of(model, pixels, ids), expected)
    maxjax.save_pretrained(model, tmp_path / "b")
    written = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
    assert written.keys() == oracle.tensors.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(array, oracle.tensors[name], err_msg=name)
    again = read_object(tmp_path / "b" / "config.json")
    assert model.family.config.from_dict(again) == model.config
    made = model.family.make(model.config, (), "float32", "float32")  # of no file
    assert made.family.config.from_dict(config_of(made)) == model.config


@pytest.mark.extra
@pytest.mark.oracle
@pytest.mark.parametrize("number", range(len(CASES)))
def test_meshes_and_what_transformers_opens(tmp_path, number):
    from tests.oracles.models import opened

    _, kind, config, settings = CASES[number]
    oracle = oracle_of(kind, config, settings)
    oracle.save(tmp_path / "a")
    pixels, ids = inputs(oracle.config, 4)
    expected = answer_of(pixels, ids)(oracle.live())
    for mesh in (maxjax.make_mesh(model=4), maxjax.make_mesh(data=2, model=2, fsdp=2)):
        split, _ = maxjax.load(tmp_path / "a", mesh=mesh, tokenizer=False)
        compare(result_of(split, pixels, ids), expected)
    maxjax.save_pretrained(split, tmp_path / "b")
    again = opened(kind, tmp_path / "b")
    for name, value in oracle.live().state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name].numpy(), value.numpy(), err_msg=name)


ENCODERS = ("siglip-vision", "clip-vision", "vit", "deit", "dinov2", "dinov2-registers", "dinov3")


def body_of(theirs):
    """transformers' model without its head."""
    has_head = "For" in type(theirs).__name__
    return getattr(theirs, theirs.base_model_prefix) if has_head else theirs


SIZES = ((20, 12), (8, 9))


@pytest.mark.parametrize("name", ENCODERS)
def test_images_of_other_sizes(tmp_path, name):
    oracle = oracle_of(*FIRST[name])
    oracle.save(tmp_path)
    model = loaded(tmp_path)
    rng = np.random.default_rng(1)
    images = [rng.standard_normal((2, 3, *size)).astype(np.float32) for size in SIZES]
    options = {} if name.startswith("dino") else {"interpolate_pos_encoding": True}

    def answer(theirs):
        theirs = body_of(theirs)
        with torch.no_grad():
            found = [theirs(torch.tensor(one), **options) for one in images]
        return [one.last_hidden_state.numpy() for one in found]

    run = jax.jit(lambda model, pixels: model(pixels, **options).last_hidden_state)
    for pixels, expected in zip(images, oracle.ask("sizes", answer), strict=True):
        np.testing.assert_allclose(run(model, pixels), expected, rtol=1e-4, atol=1e-4)
    if options:
        with pytest.raises(UserInputError, match="20 × 12 pixels"):
            model(images[0])
    with pytest.raises(UserInputError, match="smaller than a patch"):
        model(images[0][:, :, :2])
    with pytest.raises(UserInputError, match=r"\[N, 3, H, W\]"):
        model(images[0][:, :2])


@pytest.mark.parametrize("name", ["siglip-vision", "clip-vision", "dinov3"])
def test_hidden_states_of_layers(tmp_path, name):
    oracle = oracle_of(*FIRST[name])
    oracle.save(tmp_path)
    pixels, _ = inputs(oracle.config, 2)

    def answer(theirs):
        theirs = body_of(theirs)
        with torch.no_grad():
            found = theirs(torch.tensor(pixels), output_hidden_states=True).hidden_states
        return [found[i].numpy() for i in (1, -2)]

    expected = oracle.ask("layers", answer)
    run = jax.jit(lambda model, pixels: [model.hidden_states(pixels, i) for i in (1, -2)])
    for model in (loaded(tmp_path), loaded(tmp_path, stacked=False)):
        for one, other in zip(run(model, pixels), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        with pytest.raises(UserInputError, match="3 layers"):
            model.hidden_states(pixels, 4)


def some(*default, extra):
    """A parameter for each name; those of ``extra`` run with ``--all`` only."""
    marked = [pytest.param(name, marks=pytest.mark.extra) for name in extra]
    return pytest.mark.parametrize("name", [*default, *marked])


@some("siglip", extra=("clip", "vit", "dinov2", "dinov3"))
def test_narrow_quantised_and_tuned(tmp_path, name):
    kind, config, settings = FIRST[name]
    settings = wider(settings)
    oracle = oracle_of(kind, config, settings)
    oracle.save(tmp_path)
    pixels, ids = inputs(oracle.config)
    model = loaded(tmp_path)
    expected = result_of(model, pixels, ids)
    narrow, _ = maxjax.load(tmp_path, dtype="bfloat16", tokenizer=False)
    found = result_of(narrow, pixels, ids)
    small = maxjax.quantize(model, "q8_0").model
    assert {w.quantization_encoding for w in small.raw_state_dict().values()} != {None}
    for one in (found, result_of(small, pixels, ids)):
        for key, value in expected.items():
            far = np.abs(np.float32(one[key]) - value).mean()
            assert far < 0.04 * np.abs(value).max(), key
    model.unstack()
    maxjax.lora.add(model, rank=2, key=jax.random.key(0))
    for key, value in result_of(model, pixels, ids).items():  # the updates begin with zeros
        np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-5, err_msg=key)


def wider(settings):
    """Settings with sizes that blocks of 32 numbers divide."""
    parts = {key: wider(one) for key, one in settings.items() if isinstance(one, dict)}
    sizes = {key: 64 for key in ("hidden_size", "intermediate_size") if key in settings}
    return {**settings, **parts, **sizes}


@some("siglip", "dinov2-registers", extra=("clip", "deit", "dinov3"))
def test_explicit_meshes(tmp_path, name):
    oracle = oracle_of(*FIRST[name])
    oracle.save(tmp_path)
    pixels, ids = inputs(oracle.config, 4)
    model = loaded(tmp_path)
    expected = result_of(model, pixels, ids)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    model.to(mesh)
    over = NamedSharding(mesh, PartitionSpec("data"))
    pixels, ids = (None if one is None else jax.device_put(one, over) for one in (pixels, ids))
    with jax.set_mesh(mesh):
        compare(result_of(model, pixels, ids), expected)


@pytest.mark.parametrize(
    "raw, error, named",
    [
        ({"model_type": "siglip2", "architectures": ["Siglip2Model"]}, UnsupportedModelError, "siglip"),
        ({"model_type": "siglip", "vision_config": {"hidden_size": 10, "num_attention_heads": 3}},
         CheckpointFormatError, "multiple"),
        ({"model_type": "clip", "text_config": {"hidden_act": "sine"}}, CheckpointFormatError, "sine"),
        ({"model_type": "clip", "vision_config": [1]}, CheckpointFormatError, "vision_config"),
        ({"model_type": "vit", "image_size": 8}, CheckpointFormatError, "patch_size"),
        ({"model_type": "vit", "image_size": 10**9}, CheckpointFormatError, "image_size"),
        ({"model_type": "dinov2", "mlp_ratio": 10**9}, CheckpointFormatError, "mlp_ratio"),
        ({"model_type": "dinov3_vit", "num_register_tokens": -1}, CheckpointFormatError, "num_register_tokens"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(raw, error, named):
    with pytest.raises(error, match=named):
        find_family(raw).config.from_dict(raw, path="config.json")


@pytest.mark.parametrize(
    "part, key", [("vision_config", "hidden_size"), ("text_config", "num_hidden_layers")]
)
def test_numbers_in_nested_settings_are_bounded_by_the_tensors(tmp_path, part, key):
    oracle = oracle_of(*FIRST["clip"])
    oracle.save(tmp_path)
    config = read_object(tmp_path / "config.json")
    config[part][key] = 999
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointMismatchError, match=key):
        build(load_weights(tmp_path))


def test_published_configurations():
    """Files of CLIP have settings in three ways; those of SigLIP leave out what is as usual."""
    old = {
        "model_type": "clip",
        "text_config": {"hidden_size": 9},
        "text_config_dict": {"hidden_size": 640},
    }
    assert CLIPConfig.from_dict(old).text_config == CLIPTextConfig(hidden_size=640)
    plain = {"model_type": "siglip", "vision_config": {"model_type": "siglip_vision_model"}}
    config = SiglipConfig.from_dict(plain)
    assert config.vision_config == SiglipVisionConfig() and config.vision_config.num_patches == 196
    so400m = SiglipVisionConfig.from_dict({"image_size": 384, "patch_size": 14, "hidden_size": 1152,
                                           "num_attention_heads": 16})  # fmt: skip
    assert so400m.num_patches == 729
