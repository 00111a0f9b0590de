"""Vision-language models: pixels to logits as in transformers, with a cache, in the engine, saved and loaded."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxjax
from maxjax.engine.generate.request import Prompt, Request
from maxjax.engine.pictures import Inputs, SeenPictures, placed_pictures
from maxjax.errors import UserInputError
from maxjax.models import Gemma2, Gemma3, Llama, LlamaConfig
from tests.oracles.recorded import recorded

IMAGE = 150  # the id of the placeholder
TEXT = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
TOWER = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", "projection_dim": 16, **TOWER}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER}
PIXTRAL = {"model_type": "pixtral", **TOWER, "image_size": 64}
QWEN = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def qwen_text(**rope):
    return {**TEXT, "rope_parameters": {**ROPE, **rope}}


# Of each family: transformers' class, its settings, what a picture is, and the number of its tokens.
FAMILIES = {
    "llava": ("Llava", {
        "text_config": {"model_type": "llama", **TEXT}, "vision_config": CLIP, "image_token_index": IMAGE,
    }, "square", 16),
    "llava, SigLIP, two layers": ("Llava", {
        "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": SIGLIP, "image_token_index": IMAGE,
        "vision_feature_select_strategy": "full", "vision_feature_layer": [-1, 1],
    }, "square", 16),
    "llava_next": ("LlavaNext", {
        "text_config": {"model_type": "mistral", **TEXT}, "vision_config": CLIP, "image_token_index": IMAGE,
        "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
    }, "tiles", 70),
    "pixtral": ("Llava", {
        "text_config": {"model_type": "mistral", **TEXT, "head_dim": 8}, "vision_config": PIXTRAL,
        "image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    }, "any size", 24),
    "mistral3": ("Mistral3", {
        "text_config": {"model_type": "mistral", **TEXT, "head_dim": 8}, "vision_config": PIXTRAL,
        "image_token_index": IMAGE, "spatial_merge_size": 2,
    }, "any size", 6),
    "gemma3": ("Gemma3", {
        "text_config": {**TEXT, "head_dim": 8, "sliding_window": 6,
                        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": {**SIGLIP, "vision_use_head": False}, "image_token_index": IMAGE, "image_token_id": IMAGE,
        "mm_tokens_per_image": 4, "boi_token_index": 151, "eoi_token_index": 152,
    }, "square", 4),
    "llava_onevision": ("LlavaOnevision", {
        "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": {**SIGLIP, "vision_use_head": False},
        "image_token_index": IMAGE, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        "vision_aspect_ratio": "anyres_max_1",
    }, "tiles", 31),
    "paligemma": ("PaliGemma", {
        "text_config": {"model_type": "gemma", **TEXT, "head_dim": 8},
        "vision_config": {**SIGLIP, "vision_use_head": False},
        "image_token_index": IMAGE, "projection_dim": 32,
    }, "square", 16),
    "paligemma, Gemma 2": ("PaliGemma", {
        "text_config": {"model_type": "gemma2", **TEXT, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 16,
                        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": {**SIGLIP, "vision_use_head": False}, "image_token_index": IMAGE, "projection_dim": 32,
    }, "square", 16),
    "idefics3": ("Idefics3", {
        "text_config": {"model_type": "llama", **TEXT}, "vision_config": TOWER, "image_token_id": IMAGE,
        "scale_factor": 2,
    }, "three tiles", 12),
    "smolvlm": ("SmolVLM", {
        "text_config": {"model_type": "llama", **TEXT}, "vision_config": TOWER, "image_token_id": IMAGE,
        "scale_factor": 2,
    }, "three tiles", 12),
    "qwen2_vl": ("Qwen2VL", {
        "text_config": qwen_text(mrope_section=[1, 1, 2]), "image_token_id": IMAGE, "video_token_id": 151,
        "vision_config": {**QWEN, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
    }, "patches", 15),
    "qwen2_5_vl": ("Qwen2_5_VL", {
        "text_config": qwen_text(mrope_section=[1, 1, 2]), "image_token_id": IMAGE, "video_token_id": 151,
        "vision_config": {**QWEN, "hidden_size": 24, "intermediate_size": 32, "window_size": 16,
                          "out_hidden_size": 32, "fullatt_block_indexes": [1]},
    }, "patches", 15),
    "qwen3_vl": ("Qwen3VL", {
        "text_config": {**qwen_text(mrope_section=[2, 1, 1], mrope_interleaved=True), "head_dim": 8},
        "image_token_id": IMAGE, "video_token_id": 151,
        "vision_config": {**QWEN, "hidden_size": 24, "intermediate_size": 32, "num_position_embeddings": 25,
                          "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1]},
    }, "patches", 15),
    "qwen3_5": ("Qwen3_5", {
        "text_config": {**qwen_text(mrope_section=[1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25),
                        "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                        "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        "image_token_id": IMAGE, "video_token_id": 151,
        "vision_config": {**QWEN, "hidden_size": 24, "intermediate_size": 32, "num_position_embeddings": 25,
                          "out_hidden_size": 32},
    }, "patches", 15),
}  # fmt: skip


def picture(kind, count, seed=0):
    """What an image processor makes of a picture, and transformers' arguments for it."""
    draw = np.random.default_rng(seed)
    blank = dict.fromkeys(("sizes", "grids", "layouts"))
    found = SimpleNamespace(**blank, counts=np.array([count]))
    shapes = {"square": (1, 3, 16, 16), "tiles": (5, 3, 16, 16), "three tiles": (3, 3, 16, 16),
              "any size": (1, 3, 24, 16), "patches": (60, 3 * 2 * 16)}  # fmt: skip
    found.pixels = draw.normal(size=shapes[kind]).astype(np.float32)
    if kind == "patches":
        found.grids = np.array([[1, 6, 10]])
        return found, {"image_grid_thw": found.grids}
    if kind in ("tiles", "any size"):
        found.sizes = np.array([[24, 16]]) if kind == "any size" else np.array([[25, 40]])
        return found, {"image_sizes": found.sizes}
    return found, {}


def prompt_of(count):
    return [5, 6, *[IMAGE] * count, 7, 8, 9, 10]


def give_pictures(patch, ids, pictures):
    """Gives these pictures to the prompt that has these ids."""
    usual = Request.prompt
    own = lambda self, given, *which: (
        Prompt(ids, None, False, pictures) if list(given) == ids else usual(self, given, *which)
    )
    patch.setattr(Request, "prompt", own)


def oracle(family):
    """transformers' class and configuration."""
    import transformers

    name, settings, *_ = FAMILIES[family]
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    return kind, kind.config_class(**json.loads(json.dumps(settings)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a small checkpoint of a family, as transformers writes it, with drawn values."""
    made = {}

    def folder_of(family):
        if family not in made:
            path = made[family] = tmp_path_factory.mktemp(family.split(",")[0])
            kept = recorded(
                lambda: written(family, path), f"tests/models/test_vision_language.py::{family}"
            )
            (path / "config.json").write_text(kept["config"])
            draw = np.random.default_rng(1)
            tensors = {
                name: (0.1 * draw.normal(size=shape) + (np.ndim(np.empty(shape)) == 1)).astype(
                    np.float32
                )
                for name, shape in sorted(kept["shapes"].items())
            }
            save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return made[family]

    return folder_of


def written(family, path):
    kind, config = oracle(family)
    kind(config).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    return {
        "config": (path / "config.json").read_text(),
        "shapes": {name: list(array.shape) for name, array in tensors.items()},
    }


def answers(family, path):
    """transformers' logits of a prompt with a picture, and 12 greedy tokens after it."""
    import torch

    kind, _ = oracle(family)
    model = kind.from_pretrained(path).eval()
    _, _, form, count = FAMILIES[family]
    inputs, more = picture(form, count)
    ids = torch.tensor([prompt_of(count)])
    pixels = torch.tensor(inputs.pixels)
    args = {"input_ids": ids, "pixel_values": pixels[None] if "tiles" in form else pixels}
    args |= {name: torch.tensor(value) for name, value in more.items()}
    if form == "patches":
        args["mm_token_type_ids"] = (ids == IMAGE).int()
    if family == "gemma3":
        args["token_type_ids"] = (ids == IMAGE).long()
    if "paligemma" in family:  # the whole prompt is the prefix
        args["token_type_ids"] = torch.zeros_like(ids)
    with torch.no_grad():
        logits = model(**args).logits.numpy()
        found = model.generate(**args, max_new_tokens=12, do_sample=False)
    return {"logits": logits[0], "tokens": found[0, ids.shape[1] :].numpy()}


def each_family():
    """All families; without ``--all`` those whose mechanisms differ most."""
    usual = ("llava", "gemma3", "qwen3_vl")
    return [pytest.param(one, marks=() if one in usual else pytest.mark.extra) for one in FAMILIES]


@pytest.mark.parametrize("family", each_family())
def test_a_picture(family, folders, tmp_path, monkeypatch):
    path = folders(family)
    expected = recorded(lambda: answers(family, path))
    model, _ = maxjax.load(path)
    assert not model.unloaded.names
    _, _, form, count = FAMILIES[family]
    ids, (inputs, _) = prompt_of(count), picture(form, count)
    pictures = placed_pictures(model, ids, [inputs], SeenPictures())
    args = Inputs.of([(pictures, 0, len(ids))], len(ids), model)._asdict()
    call = jax.jit(lambda model, ids, cache, args: model(ids, cache, **args))
    logits = jax.jit(lambda model, ids, args: model(ids, **args))(model, jnp.array([ids]), args)
    np.testing.assert_allclose(logits[0], expected["logits"], atol=1e-4)
    # The prompt at once and then token by token.
    wanted = expected["tokens"].tolist()
    logits, cache = call(model, jnp.array([ids]), model.cache(1, 128), args)
    step = jax.jit(lambda model, ids, cache: model(ids, cache))
    tokens = []
    for _ in wanted:
        tokens.append(int(logits[0, -1].argmax()))
        logits, cache = step(model, jnp.array([[tokens[-1]]]), cache)
    assert tokens == wanted
    # In the engine, in pieces, beside a text without pictures.
    of_text = list(
        maxjax.generate(model, None, [4, 5, 6], max_new_tokens=12, temperature=0, eos_ids=()).tokens
    )
    give_pictures(monkeypatch, ids, pictures)
    with maxjax.Engine(model, slots=2, chunk=16) as engine:
        given = (ids, [4, 5, 6], ids)
        pending = [
            engine.submit(one, max_new_tokens=12, temperature=0, eos_ids=()) for one in given
        ]
        found = [list(one.result().tokens) for one in pending]
    assert found == [wanted, of_text, wanted]
    # What is saved is what was loaded.
    maxjax.save_pretrained(model, tmp_path)
    saved, source = (load_file(one / "model.safetensors") for one in (tmp_path, path))
    assert saved.keys() == source.keys()
    assert all(np.array_equal(saved[name], source[name]) for name in source)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (path / "config.json").read_text()
    )


def test_pages_are_shared_by_the_same_picture_alone(folders):
    """Two texts with the same tokens share pages only if their pictures are the same."""
    model, _ = maxjax.load(folders("llava"))
    ids = [5] * 60 + prompt_of(16) + [9] * 70
    one, other = (picture("square", 16, seed)[0] for seed in (0, 1))
    seen = SeenPictures()
    each = [placed_pictures(model, ids, [inputs], seen) for inputs in (one, other, one)]
    found = []
    with maxjax.Engine(model, slots=1) as engine:
        for pictures in each:
            usual, Request.prompt = (
                Request.prompt,
                lambda *_, p=pictures: Prompt(ids, None, False, p),
            )
            try:
                answer = engine.submit(ids, max_new_tokens=1, temperature=0, logprobs=1).result()
            finally:
                Request.prompt = usual
            found.append((engine.stats().found_tokens, answer.logprobs))
    assert [count for count, _ in found] == [0, 0, 128]
    one, other, again = (each[0].logprob for _, each in found)
    assert abs(one - again) < 1e-5 < 1e-3 < abs(one - other)


def test_features_stand_in_place_of_embeddings():
    """Features that are the embeddings of tokens change nothing, and have gradients."""
    config = LlamaConfig(
        100, 16, 32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    model = maxjax.init(Llama(config), jax.random.key(0))
    ids = jnp.array([[1, 2, 3, 4], [7, 8, 9, 10]])
    at = jnp.array([[-1, 0, 1, -1], [-1, -1, 2, -1]])
    rows = jnp.asarray(model.model.embed_tokens.weight.value)[jnp.array([2, 3, 9])]
    blank = jnp.where(at >= 0, 0, ids)
    np.testing.assert_array_equal(model(blank, features=rows, at=at), model(ids))
    np.testing.assert_array_equal(model.states(blank, features=rows, at=at), model.states(ids))
    grads = jax.grad(lambda rows: model(blank, features=rows, at=at).sum())(rows)
    assert np.abs(grads).min(1).all()


@pytest.mark.parametrize("model", [Gemma2, Gemma3])
@pytest.mark.parametrize("window", [None, 2])
def test_tokens_of_a_block_see_later_ones(window, model):
    """A token depends on all tokens of its block; a window cuts what is before it in Gemma 3, not in PaliGemma 2."""
    kind = "full_attention" if window is None else "sliding_attention"
    config = model.family.config(
        100, 16, 32, num_hidden_layers=1, num_attention_heads=4, head_dim=4, num_key_value_heads=2,
        layer_types=(kind,), sliding_window=window or 99,
    )  # fmt: skip
    made = maxjax.init(model(config), jax.random.key(0))
    call = jax.jit(lambda made, ids, blocks: made.states(ids, blocks=blocks))
    ids, blocks = np.arange(10, 17)[None], np.array([[-1, 0, 0, 0, -1, 1, 1]])
    expected = call(made, ids, blocks)
    sees = np.zeros((7, 7), bool)
    for token in range(7):
        changed = np.where(np.arange(7) == token, 50, ids)
        sees[:, token] = np.abs(call(made, changed, blocks) - expected)[0].max(-1) > 1e-6
    one, other = np.arange(7)[:, None], np.arange(7)[None]
    in_window = one - other < (window or 7)
    in_block = (blocks[0] >= 0) & (blocks[0] == blocks.T)
    seen = (other <= one) & in_window | in_block
    np.testing.assert_array_equal(sees, seen & in_window if model is Gemma3 else seen)


@pytest.mark.parametrize("wrong", [
    {"blocks": jnp.zeros((1, 2), int)}, {"blocks": jnp.zeros((1, 3))},
    {"features": jnp.ones((1, 16))}, {"at": jnp.zeros((1, 3), int)},
    {"features": jnp.ones((1, 15)), "at": jnp.zeros((1, 3), int)},
    {"features": jnp.ones((1, 16), int), "at": jnp.zeros((1, 3), int)},
    {"features": jnp.ones((1, 16)), "at": jnp.zeros((1, 2), int)},
    {"features": jnp.ones((1, 16)), "at": jnp.ones((1, 3), int)},
    {"features": jnp.ones((1, 16)), "at": jnp.zeros((1, 3), int), "deepstack": jnp.ones((1, 2, 16))},
    {"positions": jnp.zeros((1, 2), int)}, {"positions": jnp.zeros((1, 3))},
])  # fmt: skip
def test_wrong_features(wrong):
    config = LlamaConfig(100, 16, 32, num_hidden_layers=1, num_attention_heads=4)
    model = maxjax.init(Llama(config), jax.random.key(0))
    with pytest.raises(UserInputError):
        model(jnp.array([[1, 2, 3]]), **wrong)


def test_as_many_placeholders_as_features(folders):
    model, _ = maxjax.load(folders("llava"))
    inputs, _ = picture("square", 16)
    with pytest.raises(UserInputError, match="15 placeholder"):
        placed_pictures(model, prompt_of(15), [inputs], SeenPictures())


def test_a_text_model_takes_no_pictures(folders):
    model, _ = maxjax.load(folders("llava"), vision=False)
    assert model.vision is None and model.unloaded.names
    message = {"role": "user", "content": [{"type": "image", "image": "cat.png"}]}
    with pytest.raises(UserInputError, match="takes text alone"):
        maxjax.generate(model, None, [message])


def test_bad_settings_of_the_vision_part(folders, tmp_path):
    path = folders("gemma3")
    raw = json.loads((path / "config.json").read_text())
    for change in ({"mm_tokens_per_image": 5}, {"image_token_id": "a", "image_token_index": "a"}):
        with pytest.raises(maxjax.errors.CheckpointFormatError):
            maxjax.load(path, config={**raw, **change})


def test_a_cache_is_not_taken_back_into_a_picture(folders):
    """Where the positions after a picture are not known, ``rewind`` says so."""
    model, _ = maxjax.load(folders("qwen3_vl"))
    ids, (inputs, _) = prompt_of(15), picture("patches", 15)
    pictures = placed_pictures(model, ids, [inputs], SeenPictures())
    args = Inputs.of([(pictures, 0, len(ids))], len(ids), model)._asdict()
    _, cache = model(jnp.array([ids]), model.cache(1, 64), **args)
    assert cache.offsets.tolist() == [-10] and cache.rewind([10]) is None
    assert cache.rewind([0]).offsets.tolist() == [0]
    assert dataclasses.replace(cache, offsets=cache.offsets * 0).rewind([10]) is not None
