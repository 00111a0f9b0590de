"""Files of pictures to logits: maxjax's processor and model against transformers' processor and model.

Four configurations of each family, with published settings scaled down: of text models, towers, layers that features
are taken from, connectors, tiles.
"""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from PIL import Image
from safetensors.numpy import load_file, save_file

import maxjax
from maxjax.engine.generate.request import Request
from maxjax.engine.pictures import Inputs
from maxjax.errors import UserInputError
from maxjax.images import decode
from tests.images.pictures import PICTURES, hopper
from tests.images.test_prompt import GEMMA, TOKENS, bare_processor, pil_inputs, pil_processor
from tests.models.test_vision_language import FAMILIES, SIGLIP, qwen_text

pytestmark = [pytest.mark.extra, pytest.mark.oracle]

TILES = [[16, 32], [32, 16], [32, 32]]
LLAVA = {
    "patch_size": 4,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
FULL = {"vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
CUT = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
SQUARE = {"size": {"height": 16, "width": 16}}
IDEFICS = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
PACKED = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 1500}}

# Of each family the image processor with its settings, the processor of texts with its settings, and its placeholder.
PROCESSORS = {
    "llava": ("CLIP", CUT, "Llava", LLAVA, "<image>"),
    "llava_next": ("LlavaNext", {**CUT, "image_grid_pinpoints": TILES}, "LlavaNext", LLAVA, "<image>"),
    "llava_onevision": (
        "LlavaOnevision", {**SQUARE, "image_grid_pinpoints": TILES}, "LlavaOnevision",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_1"},
        "<image>",
    ),
    "pixtral": (
        "Pixtral", {"size": {"longest_edge": 320}, "patch_size": {"height": 32, "width": 32}}, "Pixtral",
        {"patch_size": 32, "spatial_merge_size": 1}, "[IMG]",
    ),
    "mistral3": (
        "Pixtral", {"size": {"longest_edge": 320}, "patch_size": {"height": 20, "width": 20}}, "Pixtral",
        {"patch_size": 20, "spatial_merge_size": 2}, "[IMG]",
    ),
    "gemma3": ("Gemma3", SQUARE, "Gemma3", {"image_seq_length": 4}, GEMMA["boi_token"]),
    "paligemma": ("Siglip", {**SQUARE, "image_seq_length": 16}, "PaliGemma", {}, "<image>"),
    "idefics3": ("Idefics3", IDEFICS, "Idefics3", {"image_seq_len": 4}, "<image>"),
    "smolvlm": ("SmolVLM", IDEFICS, "SmolVLM", {"image_seq_len": 4}, "<image>"),
    "qwen2_vl": ("Qwen2VL", PACKED, "Qwen2VL", {}, "<|image_pad|>"),
    "qwen2_5_vl": ("Qwen2VL", PACKED, "Qwen2VL", {}, "<|image_pad|>"),
    "qwen3_vl": ("Qwen2VL", PACKED, "Qwen3VL", {}, "<|image_pad|>"),
    "qwen3_5": ("Qwen2VL", PACKED, "Qwen3VL", {}, "<|image_pad|>"),
}  # fmt: skip

TIED = {"tie_word_embeddings": True}
ONE_LAYER = {"vision_config": {"num_hidden_layers": 1}, "text_config": {"num_hidden_layers": 1}}


def text(kind, **more):
    return {"text_config": {"model_type": kind, **more}}


def tower(**more):
    return {"vision_config": more}


# Of each family changes of its first configuration: of config.json, and of the processors' settings.
CHANGES = {
    "llava": [
        ({}, {}, {}),
        ({**text("qwen2"), "vision_config": {**SIGLIP, "hidden_act": "gelu"}, "vision_feature_layer": [-1, 1],
          "vision_feature_select_strategy": "full"}, {}, FULL),
        ({**text("mistral", sliding_window=9), **tower(hidden_act="gelu"), "projector_hidden_act": "gelu_pytorch_tanh",
          "multimodal_projector_bias": False, "vision_feature_layer": -1, **TIED}, {"image_mean": [0.5] * 3}, {}),
        ({**text("gemma3_text", head_dim=8), **tower(num_hidden_layers=1), "vision_feature_select_strategy": "full"},
         {}, {**FULL, "num_additional_image_tokens": 1}),
    ],
    "llava_next": [
        ({}, {}, {}),
        ({**text("llama"), "vision_feature_layer": [0, -1], **TIED}, {}, {}),
        ({**text("qwen2"), "vision_config": SIGLIP, "vision_feature_select_strategy": "full",
          "image_grid_pinpoints": [[16, 48], [48, 16], [32, 16]]},
         {"image_grid_pinpoints": [[16, 48], [48, 16], [32, 16]]}, FULL),
        ({**ONE_LAYER, "vision_feature_layer": -1, "multimodal_projector_bias": False,
          "image_grid_pinpoints": [[32, 32]]}, {"image_grid_pinpoints": [[32, 32]]}, {}),
    ],
    "llava_onevision": [
        ({}, {}, {}),
        ({"vision_aspect_ratio": "anyres_max_9", **TIED}, {}, {"vision_aspect_ratio": "anyres_max_9"}),
        ({**text("llama"), "vision_feature_layer": -2, "vision_aspect_ratio": "anyres_max_2",
          "image_grid_pinpoints": [[16, 64], [48, 32], [64, 16]]},
         {"image_grid_pinpoints": [[16, 64], [48, 32], [64, 16]]}, {"vision_aspect_ratio": "anyres_max_2"}),
        ({**ONE_LAYER, "vision_feature_layer": [0, -1], "multimodal_projector_bias": False}, {}, {}),
    ],
    "pixtral": [
        ({}, {}, {}),
        ({"vision_feature_layer": -2, "multimodal_projector_bias": False, **tower(hidden_act="silu")}, {}, {}),
        ({**tower(rope_parameters={"rope_type": "default", "rope_theta": 100.0}, num_hidden_layers=1), **TIED}, {}, {}),
        ({**text("llama"), "vision_feature_layer": 1, **tower(num_attention_heads=1)}, {}, {}),
    ],
    "mistral3": [
        ({}, {}, {}),
        ({"multimodal_projector_bias": True, "vision_feature_layer": -2}, {}, {}),
        ({"spatial_merge_size": 3, **TIED}, {}, {"spatial_merge_size": 3}),
        ({**text("ministral3", rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}), **tower(hidden_act="silu")}, {}, {}),
    ],
    "gemma3": [
        ({}, {}, {}),
        ({"mm_tokens_per_image": 16, **tower(layer_norm_eps=1e-5)}, {}, {"image_seq_length": 16}),
        ({"text_config": {"sliding_window": 3, "query_pre_attn_scalar": 32, "num_hidden_layers": 2,
                          "layer_types": ["full_attention", "sliding_attention"]}, "mm_tokens_per_image": 1},
         {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 4,
          "pan_and_scan_min_ratio_to_activate": 1.2}, {"image_seq_length": 1}),
        ({"text_config": {"sliding_window": 64, "final_logit_softcapping": 3.0}, **tower(num_hidden_layers=1)}, {}, {}),
    ],
    "paligemma": [
        ({}, {}, {}),
        (FAMILIES["paligemma, Gemma 2"][1], {}, {}),
        ({"text_config": {"hidden_size": 40, "num_key_value_heads": 1, "num_hidden_layers": 2}, "projection_dim": 40,
          **tower(hidden_act="gelu", num_hidden_layers=1)}, {}, {}),
        ({**FAMILIES["paligemma, Gemma 2"][1],
          "text_config": {**FAMILIES["paligemma, Gemma 2"][1]["text_config"], "sliding_window": 64,
                          "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
          **tower(image_size=24)}, {"size": {"height": 24, "width": 24}, "image_seq_length": 36}, {}),
    ],
    "idefics3": [
        ({}, {}, {}),
        ({"scale_factor": 4, **TIED}, {}, {"image_seq_len": 1}),
        ({**text("mistral"), **tower(hidden_act="gelu", num_hidden_layers=1), "scale_factor": 1},
         {"size": {"longest_edge": 16}}, {"image_seq_len": 16}),
        ({**text("qwen2"), **tower(num_attention_heads=3)}, {"do_image_splitting": False}, {}),
    ],
    "smolvlm": [
        ({}, {}, {}),
        ({"scale_factor": 4, **TIED}, {}, {"image_seq_len": 1}),
        ({**tower(layer_norm_eps=1e-5, num_hidden_layers=1), "scale_factor": 1},
         {"size": {"longest_edge": 16}}, {"image_seq_len": 16}),
        ({**text("llama", num_key_value_heads=4), **tower(image_size=24)},
         {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}}, {"image_seq_len": 9}),
    ],
    "qwen2_vl": [
        ({}, {}, {}),
        ({**TIED, **tower(mlp_ratio=3, hidden_act="gelu", depth=1)}, {}, {}),
        ({**tower(spatial_merge_size=1, num_heads=3), "text_config": qwen_text(mrope_section=[2, 1, 1])},
         {"merge_size": 1}, {}),
        ({"text_config": {**qwen_text(mrope_section=[0, 2, 2]), "num_hidden_layers": 1},
          **tower(embed_dim=32, temporal_patch_size=1, patch_size=8)}, {"temporal_patch_size": 1, "patch_size": 8}, {}),
    ],
    "qwen2_5_vl": [
        ({}, {}, {}),
        ({**TIED, **tower(fullatt_block_indexes=[], window_size=8)}, {}, {}),
        ({**tower(fullatt_block_indexes=[0, 2], window_size=32, hidden_act="gelu")}, {}, {}),
        ({"text_config": {**qwen_text(mrope_section=[2, 2, 0]), "num_hidden_layers": 1},
          **tower(depth=1, patch_size=8, window_size=32)}, {"patch_size": 8}, {}),
    ],
    "qwen3_vl": [
        ({}, {}, {}),
        ({**TIED, **tower(deepstack_visual_indexes=[], num_position_embeddings=16)}, {}, {}),
        ({**tower(deepstack_visual_indexes=[2], num_position_embeddings=64, hidden_act="gelu"),
          "text_config": {**qwen_text(mrope_section=[1, 2, 1], mrope_interleaved=True)}}, {}, {}),
        ({**tower(depth=2, deepstack_visual_indexes=[1, 0], patch_size=8)}, {"patch_size": 8}, {}),
    ],
    "qwen3_5": [
        ({}, {}, {}),
        ({**TIED, **tower(depth=1, num_position_embeddings=16)}, {}, {}),
        ({"text_config": {"rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
            "mrope_interleaved": True}}, **tower(num_heads=3)}, {}, {}),
        ({"text_config": {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
          **tower(hidden_act="gelu", patch_size=8)}, {"patch_size": 8}, {}),
    ],
}  # fmt: skip

# Slots of the cache and tokens of a prompt: one program for all prompts of a model.
SLOTS, WIDTH = 320, 288
ANSWER = 20


def merged(settings, changes):
    """The settings with changes, also of the objects in them; an object of another model type replaces the first."""
    found = dict(settings)
    for key, value in changes.items():
        inner = found.get(key)
        if isinstance(value, dict) and isinstance(inner, dict) and not key.startswith("rope"):
            value = merged(inner, value)
        found[key] = value
    return found


def tokenizer_files(path, placeholder):
    """Files of a tokenizer of characters, with the tokens of pictures and a template of chats."""
    characters = [*map(chr, range(32, 127)), "\n"]
    model = tokenizers.models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(
        [*TOKENS, "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image_pad|>", "<bos>"]
    )
    made.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<bos>"}
    if placeholder is not None:
        settings["chat_template"] = (
            "{% for m in messages %}{% for part in m.content %}"
            f"{{{{ '[{placeholder}]' if part.type == 'image' else part.text }}}}"
            "{% endfor %}{% endfor %}"
        )
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def written(family, changes, path):
    """Write a checkpoint as transformers does, with drawn values; returns its model, processors and tokenizer."""
    import transformers

    name, first, *_ = FAMILIES[family]
    stem, settings, texts, outer, placeholder = PROCESSORS[family]
    config, settings, outer = (
        merged(one, change) for one, change in zip((first, settings, outer), changes, strict=True)
    )
    tokenizer = tokenizer_files(path, None if family == "paligemma" else placeholder)
    feature = GEMMA["image_token"] if family == "gemma3" else placeholder
    image_token = tokenizer.token_to_id(feature)
    keys = {"image_token_index", "image_token_id"} & config.keys()
    config |= dict.fromkeys(keys, image_token)
    if stem == "Pixtral":
        size = {"patch_size": outer["patch_size"], "image_size": 320}
        config["vision_config"] = {**config["vision_config"], **size}
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    model = kind(kind.config_class(**json.loads(json.dumps(config))))
    model.save_pretrained(path)
    draw = np.random.default_rng(1)
    tensors = {
        name: (0.1 * draw.normal(size=one.shape) + (one.ndim == 1)).astype(np.float32)
        for name, one in sorted(load_file(path / "model.safetensors").items())
    }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": f"{stem}ImageProcessor", **settings})
    )
    (path / "processor_config.json").write_text(
        json.dumps({"processor_class": f"{texts}Processor", **outer})
    )
    images = pil_processor(stem, settings, outer)
    bare = bare_processor(texts, outer, images)
    return kind.from_pretrained(path).eval(), images, bare, tokenizer, image_token


def theirs(family, made, pictures, before, after):
    """transformers' token ids of a prompt with pictures, its logits, and greedy tokens after it."""
    import torch

    model, images, bare, tokenizer, image_token = made
    stem, _, texts, _, placeholder = PROCESSORS[family]
    inputs = dict(pil_inputs(texts, images, pictures))
    text = before + f"[{placeholder}]" * len(pictures) + after
    if texts == "PaliGemma":  # as prepare_inputs_layout
        text = f"{placeholder * len(pictures)}<bos>{before}{after}\n"
    parts = text.split(placeholder)
    found = parts[0]
    for number, part in enumerate(parts[1:]):
        found += bare.replace_image_token(inputs, number) + part
    ids = torch.tensor([tokenizer.encode(found).ids])
    takes = inspect.signature(model.forward).parameters
    args = {key: torch.tensor(np.asarray(one)) for key, one in inputs.items() if key in takes}
    args["input_ids"] = ids
    is_picture = (ids == image_token).int()
    if "mm_token_type_ids" in takes:
        args["mm_token_type_ids"] = is_picture
    if family in ("gemma3", "paligemma"):
        args["token_type_ids"] = is_picture.long() * (family == "gemma3")
    with torch.no_grad():
        logits = model(**args).logits[0].numpy()
        mask = torch.ones_like(ids)  # a character's id may be that of padding
        tokens = model.generate(
            **args, attention_mask=mask, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None
        )
    return ids[0].tolist(), logits, tokens[0, ids.shape[1] :].tolist()


@jax.jit
def run(model, ids, cache, lengths, args):
    return model(ids, cache, lengths=lengths, **args)


@jax.jit
def step(model, ids, cache):
    return model(ids, cache)


def ours(model, tokenizer, files, before, after):
    """The same of maxjax, from the pictures' files."""
    parts = [{"type": "image", "image": str(one)} for one in files]
    parts = [{"type": "text", "text": before}, *parts, {"type": "text", "text": after}]
    request = Request(model, tokenizer, None, None, (), None, {})
    prompt = request.of_messages([{"role": "user", "content": parts}])
    ids, count = np.zeros((1, WIDTH), np.int32), len(prompt.ids)
    ids[0, :count] = prompt.ids
    args = Inputs.of([(prompt.pictures, 0, count)], WIDTH, model)._asdict()
    logits, cache = run(model, ids, model.cache(1, SLOTS), jnp.array([count]), args)
    tokens, last = [], logits[0, count - 1]
    for _ in range(ANSWER):
        tokens.append(int(last.argmax()))
        last, cache = step(model, jnp.array([[tokens[-1]]]), cache)
        last = last[0, -1]
    return prompt.ids, np.asarray(logits[0, :count]), tokens


PROMPTS = {
    "photograph": ("", ["hopper"], "What is this?"),
    "page": ("Read: ", ["page"], "\n"),
    "dot": ("", ["dot"], "?"),
    "strip": ("", ["strip"], "?"),
    "two": ("Is it ", ["portrait", "landscape"], ", or no?"),
}


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("family", PROCESSORS)
def test_files_to_logits(family, number, tmp_path):
    made = written(family, CHANGES[family][number], tmp_path)
    model, tokenizer = maxjax.load(tmp_path)
    assert not model.unloaded.names
    pictures = {**PICTURES, "hopper": decode(hopper())}
    for name, one in pictures.items():
        Image.fromarray(one).save(tmp_path / f"{name}.png")
    for name, (before, shown, after) in PROMPTS.items():
        files = [tmp_path / f"{one}.png" for one in shown]
        if name == "strip" and family.startswith("qwen"):
            with pytest.raises(UserInputError, match="200 times"):
                ours(model, tokenizer, files, before, after)
            continue
        if name == "dot" and family == "mistral3":  # transformers fails with a picture of one token
            assert np.isfinite(ours(model, tokenizer, files, before, after)[1]).all()
            continue
        ids, logits, tokens = theirs(family, made, [pictures[one] for one in shown], before, after)
        found = ours(model, tokenizer, files, before, after)
        assert found[0] == ids, name
        np.testing.assert_allclose(found[1], logits, rtol=0, atol=1e-4, err_msg=name)
        assert found[2] == tokens, name
    maxjax.save_pretrained(model, tmp_path / "saved")
    saved, source = (load_file(one / "model.safetensors") for one in (tmp_path / "saved", tmp_path))
    assert saved.keys() == source.keys()
    assert all(np.array_equal(saved[name], source[name]) for name in source)
    config = (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == json.loads(config)
