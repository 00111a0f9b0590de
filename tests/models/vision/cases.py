"""Small models of images with published settings, what transformers answers for them, and ours."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from maxjax.graph.weights import load_weights
from maxjax.models import build
from tests.oracles.models import OracleModel
from tests.oracles.recorded import torch

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SQUARE = {**SMALL, "image_size": 12, "patch_size": 4}
# Pixels that do not fill a patch, as in SigLIP's so400m with 384 pixels and patches of 14.
UNEVEN = {**SMALL, "image_size": 14, "patch_size": 4, "num_attention_heads": 2}
DINO = {key: value for key, value in SQUARE.items() if key != "intermediate_size"}
TEXT = {**SMALL, "vocab_size": 41, "max_position_embeddings": 9, "eos_token_id": 40}


def both(vision, text, **more):
    """The settings of a model of images and texts."""
    return {"vision_config": vision, "text_config": text, **more}


CASES = [
    ("siglip", "SiglipModel", "SiglipConfig", both(SQUARE, TEXT)),
    ("siglip", "SiglipModel", "SiglipConfig",
     both(UNEVEN, TEXT | {"hidden_size": 24, "projection_size": 32, "num_hidden_layers": 1})),
    ("siglip", "SiglipModel", "SiglipConfig",
     both(SQUARE | {"hidden_act": "gelu", "layer_norm_eps": 1e-5}, TEXT | {"hidden_act": "gelu"})),
    ("siglip", "SiglipForImageClassification", "SiglipConfig", both(UNEVEN, TEXT, num_labels=3)),
    ("siglip-vision", "SiglipVisionModel", "SiglipVisionConfig", UNEVEN),
    ("siglip-vision", "SiglipVisionModel", "SiglipVisionConfig", SQUARE | {"vision_use_head": False}),
    ("siglip-text", "SiglipTextModel", "SiglipTextConfig", TEXT),
    ("clip", "CLIPModel", "CLIPConfig", both(SQUARE, TEXT, projection_dim=20)),
    ("clip", "CLIPModel", "CLIPConfig",
     both(UNEVEN | {"hidden_act": "gelu"}, TEXT | {"hidden_act": "gelu", "hidden_size": 24, "eos_token_id": 2},
          projection_dim=16)),
    ("clip", "CLIPModel", "CLIPConfig",
     both(SQUARE | {"num_hidden_layers": 1, "layer_norm_eps": 1e-6}, TEXT | {"num_attention_heads": 2},
          projection_dim=32)),
    ("clip", "CLIPForImageClassification", "CLIPConfig", both(SQUARE, TEXT, num_labels=3)),
    ("clip-vision", "CLIPVisionModel", "CLIPVisionConfig", SQUARE),
    ("clip-vision", "CLIPVisionModelWithProjection", "CLIPVisionConfig", UNEVEN | {"projection_dim": 8}),
    ("clip-text", "CLIPTextModel", "CLIPTextConfig", TEXT | {"eos_token_id": 2}),
    ("clip-text", "CLIPTextModelWithProjection", "CLIPTextConfig", TEXT | {"projection_dim": 8}),
    ("vit", "ViTForImageClassification", "ViTConfig", SQUARE | {"num_labels": 5}),
    ("vit", "ViTModel", "ViTConfig", UNEVEN | {"qkv_bias": False, "pooler_output_size": 24}),
    ("vit", "ViTForImageClassification", "ViTConfig", UNEVEN | {"hidden_act": "relu", "num_labels": 1}),
    ("vit", "ViTModel", "ViTConfig", SQUARE | {"layer_norm_eps": 1e-6, "num_hidden_layers": 1}),
    ("deit", "DeiTForImageClassificationWithTeacher", "DeiTConfig", SQUARE | {"num_labels": 5}),
    ("deit", "DeiTForImageClassification", "DeiTConfig", UNEVEN | {"num_labels": 3}),
    ("deit", "DeiTModel", "DeiTConfig", SQUARE | {"qkv_bias": False}),
    ("dinov2", "Dinov2ForImageClassification", "Dinov2Config", DINO | {"num_labels": 5}),
    ("dinov2", "Dinov2Model", "Dinov2Config", DINO | {"use_swiglu_ffn": True}),
    ("dinov2", "Dinov2Model", "Dinov2Config", DINO | {"image_size": 14, "qkv_bias": False, "mlp_ratio": 3}),
    ("dinov2", "Dinov2ForImageClassification", "Dinov2Config", DINO | {"use_swiglu_ffn": True, "num_labels": 1}),
    ("dinov2-registers", "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig",
     DINO | {"num_labels": 5}),
    ("dinov2-registers", "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig",
     DINO | {"use_swiglu_ffn": True, "num_register_tokens": 1}),
    ("dinov3", "DINOv3ViTModel", "DINOv3ViTConfig", SQUARE | {"num_register_tokens": 4}),
    ("dinov3", "DINOv3ViTModel", "DINOv3ViTConfig",
     SQUARE | {"use_gated_mlp": True, "hidden_act": "silu", "rope_theta": 50.0, "num_attention_heads": 2}),
    ("dinov3", "DINOv3ViTModel", "DINOv3ViTConfig",
     UNEVEN | {"key_bias": True, "query_bias": False, "value_bias": False, "mlp_bias": False, "proj_bias": False}),
]  # fmt: skip


# The first case of each kind of files.
FIRST = {name: case for name, *case in reversed(CASES)}


def each():
    """A parameter for each case; the first of each kind of files is in the default set, the others are extra."""
    seen, found = set(), []
    for number, (name, *rest) in enumerate(CASES):
        marks = [pytest.mark.extra] if name in seen else []
        seen.add(name)
        found.append(pytest.param(*rest, marks=marks, id=f"{name}-{number}"))
    return pytest.mark.parametrize("kind, config, settings", found)


def drawn(rng, name, shape):
    """Values of a tensor; ones and zeros would hide a mistake."""
    if name == "logit_scale":
        return np.full(shape, 1.3)
    is_norm = any(part in name for part in ("norm", "lambda")) and not name.endswith("bias")
    return 0.3 * rng.standard_normal(shape) + is_norm


def oracle_of(kind, config, settings):
    return OracleModel(kind, config, settings, draw=drawn, file="families.vision")


def loaded(directory, **options):
    weights = load_weights(directory)
    model = build(weights, **options)
    model.load_state_dict(weights)
    return model


def inputs(config, count=3):
    """Images and token ids for a model with transformers' settings; None for what it does not take."""
    rng = np.random.default_rng(0)
    vision = getattr(config, "vision_config", None) or vars(config)
    text = getattr(config, "text_config", None) or vars(config)
    pixels = ids = None
    if "patch_size" in vision:
        size = vision["image_size"]
        pixels = rng.standard_normal((count, 3, size, size)).astype(np.float32)
    if "vocab_size" in text:
        ids = rng.integers(3, 40, (4, text["max_position_embeddings"])).astype(np.int32)
        ids[np.arange(4), [8, 3, 5, 1]] = 40  # the end of each text
    return pixels, ids


def answer_of(pixels, ids):
    """What transformers has for images and texts: the results of a call by name."""

    def answer(model):
        arrays = {}
        if pixels is not None:
            arrays["pixel_values"] = torch.tensor(pixels)
        if ids is not None and "Classification" not in type(model).__name__:
            arrays["input_ids"] = torch.tensor(ids).long()
        with torch.no_grad():
            found = model(**arrays)
        kept = ("last_hidden_state", "pooler_output", "image_embeds", "text_embeds", "logits",
                "logits_per_image")  # fmt: skip
        return {
            name: found[name].numpy() for name in kept if getattr(found, name, None) is not None
        }

    return answer


call = jax.jit(lambda model, *arrays, **named: model(*arrays, **named))


def result_of(model, pixels, ids):
    """Ours, by the same names."""
    if "text" not in model.takes:
        found = call(model, pixels)
    elif "image" not in model.takes:
        found = call(model, ids)
    else:
        found = call(model, ids, pixels)
    return {name: np.asarray(one) for name, one in found._asdict().items() if one is not None}


def compare(found, expected, **tolerances):
    """Compares results by name; transformers calls the vector of one encoder with a projection ``…_embeds``."""
    tolerances = {"rtol": 1e-4, "atol": 1e-4, **tolerances}
    assert expected
    for name, value in expected.items():
        ours = found.get(name, found.get("pooler_output"))
        np.testing.assert_allclose(ours, value, err_msg=name, **tolerances)
