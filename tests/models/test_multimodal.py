"""The text models of multimodal checkpoints: their settings, their tensors, and what is saved."""

import copy
import itertools

import numpy as np
import pytest
from safetensors.numpy import load_file

import maxjax
from maxjax.checkpoint import convert
from maxjax.errors import CheckpointFormatError, UnsupportedModelError
from maxjax.graph.weights import load_weights
from maxjax.models import find_family
from maxjax.models.gguf.config.read import hf_config
from maxjax.models.multimodal import _SIZES, ARCHITECTURES, WRAPPERS, text_settings
from maxjax.models.names import MULTIMODAL, Names
from maxjax.models.qwen3 import Qwen3MoEConfig
from maxjax.models.registry import of_model_type
from maxjax.models.ties import says_tied
from tests.models import decoders
from tests.models.decoders import SMALL, call, ids_of, logits_of, same
from tests.oracles.models import OracleModel

TEXT = Names(*MULTIMODAL)

PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 8, "image_size": 16, "patch_size": 4,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip2_vision_model", "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_patches": 16, "patch_size": 4,
}  # fmt: skip
SEEN = {
    "depth": 1,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 16,
}
HEARD = {
    "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16,
    "output_dim": 32, "n_window": 2, "max_source_positions": 8, "downsample_hidden_size": 4,
}  # fmt: skip
NORMS = (
    "model.norm.weight", "model.embedding_norm.weight", "model.final_layer_norm.weight",
    "model.final_layernorm.weight",
)  # fmt: skip
SECTIONS = {"type": "mrope", "mrope_section": [1, 1, 2]}.items()
EVEN = {"rope_type": "default", "rope_theta": 1e6}
WIDE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
# transformers' class → that of its settings, the text model's settings, the vision part's, and others.
KINDS = {
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config", {"model_type": "ministral3", "head_dim": 16, "rope_parameters": YARN}, PIXTRAL,
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig", {"rope_scaling": dict(SECTIONS), "rope_theta": 1e6}, SEEN,
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLConfig", {"head_dim": 16, "rope_scaling": WIDE, "rope_theta": 5e6},
        {**SEEN, "patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeConfig",
        {
            "head_dim": 16, "rope_scaling": WIDE, "rope_theta": 5e6, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        },
        {**SEEN, "patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "Qwen2_5OmniThinkerForConditionalGeneration": (
        "Qwen2_5OmniThinkerConfig", {"rope_parameters": {**EVEN, "mrope_section": [1, 1, 2]}}, SEEN,
    ),
    "Qwen3OmniMoeThinkerForConditionalGeneration": (
        "Qwen3OmniMoeThinkerConfig",
        {
            "head_dim": 16, "rope_scaling": WIDE, "rope_theta": 5e6, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        },
        {**SEEN, "patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "Glm4vForConditionalGeneration": (
        "Glm4vConfig",
        {
            "head_dim": 8,
            "rope_parameters": {**EVEN, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
        },
        {**SEEN, "patch_size": 4, "image_size": 16},
    ),
    "Glm4vMoeForConditionalGeneration": (
        "Glm4vMoeConfig",
        {
            "head_dim": 16, "rope_parameters": {**EVEN, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        },
        {**SEEN, "patch_size": 4, "image_size": 16},
    ),
    "Lfm2VlForConditionalGeneration": (
        "Lfm2VlConfig",
        {
            "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3, "conv_L_cache": 3,
        },
        SIGLIP,
    ),
}  # fmt: skip


CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 14, "patch_size": 7, "projection_dim": 16,
}  # fmt: skip
IDEFICS = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 14, "patch_size": 7,
}  # fmt: skip
INTERN = {**IDEFICS, "image_size": [28, 28], "patch_size": [14, 14]}
# The text model's factor of the logits is 1: transformers' classes of multimodal models leave it out.
GRANITE = {
    "model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
    "attention_multiplier": 0.2, "logits_scaling": 1.0,
}  # fmt: skip
COHERE = {"model_type": "cohere2", "head_dim": 8, "logit_scale": 1.0, "sliding_window": 8}
MOE = {
    "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
NEOX = {"model_type": "gpt_neox", "rotary_pct": 0.25, "use_parallel_residual": True}
ASR = {**HEARD, "num_mel_bins": 16}
# Multimodal models that may have a text model of any family, with one that their published files have not:
# transformers' class → as in KINDS, with the key of the other part's settings.
PAIRS = {
    "LlavaForConditionalGeneration": (
        "LlavaConfig", NEOX, {"vision_config": CLIP, "tie_word_embeddings": False},
    ),
    "LlavaNextForConditionalGeneration": ("LlavaNextConfig", GRANITE, {"vision_config": CLIP}),
    # Its head has no bias there, unlike that of a Phi.
    "VipLlavaForConditionalGeneration": (
        "VipLlavaConfig", {"model_type": "phi", "partial_rotary_factor": 0.5}, {"vision_config": CLIP},
    ),
    "LlavaOnevisionForConditionalGeneration": (
        "LlavaOnevisionConfig", {"model_type": "phi3"}, {"vision_config": CLIP},
    ),
    "InternVLForConditionalGeneration": ("InternVLConfig", MOE, {"vision_config": INTERN}),
    "Idefics3ForConditionalGeneration": (
        "Idefics3Config", {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
        {"vision_config": IDEFICS},
    ),
    "AyaVisionForConditionalGeneration": (
        "AyaVisionConfig", COHERE, {"vision_config": {**SIGLIP, "model_type": "siglip_vision_model"}},
    ),
    "Qwen2AudioForConditionalGeneration": (
        "Qwen2AudioConfig", {"model_type": "olmo2"},
        {"audio_config": {**ASR, "model_type": "qwen2_audio_encoder"}},
    ),
}  # fmt: skip


# Those that have a GGUF architecture of their own for the text half, and the keys that it adds.
GGUF = {
    "Qwen2_5_VLForConditionalGeneration": ("qwen2vl", {"rope.dimension_sections": [1, 1, 2, 0]}),
    "Qwen2_5OmniThinkerForConditionalGeneration": (
        "qwen2vl", {"rope.dimension_sections": [1, 1, 2, 0]},
    ),
    "Qwen3VLForConditionalGeneration": (
        "qwen3vl", {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 1},
    ),
    **dict.fromkeys(
        ("Qwen3VLMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
        ("qwen3vlmoe", {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 1}),
    ),
}  # fmt: skip


def theirs(kind, directory):
    config, text, other = KINDS[kind] if kind in KINDS else PAIRS[kind]
    other = {"vision_config": other} if kind in KINDS else other
    settings = {"text_config": {**SMALL, **text}, "tie_word_embeddings": True, **other}
    settings |= {"audio_config": HEARD} if "Omni" in kind else {}

    def scaled(tensors, by):
        (name,) = (n for n in tensors if TEXT.model_name(n) in NORMS)
        return tensors | {name: tensors[name] / np.float32(by)}

    made = OracleModel(
        kind, config, settings, draw=decoders.drawn, measure=spread, scale=scaled,
        file="models.test_multimodal",
    )  # fmt: skip
    made.save(directory)
    return made


def spread(model):
    """The deviation of the logits."""
    from tests.oracles.recorded import torch

    with torch.no_grad():
        return float(model(torch.tensor(ids_of(4, 24)).long()).logits.std())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_model_of_a_multimodal_checkpoint(kind, tmp_path):
    oracle = theirs(kind, tmp_path / "seeing")
    model, _ = maxjax.load(tmp_path / "seeing")
    ids = ids_of(2, 24)
    same(call(model, ids), logits_of(oracle, ids))
    # Saved it is the text model alone.
    maxjax.save_pretrained(model, tmp_path / "text")
    again, _ = maxjax.load(tmp_path / "text")
    config = again.hf_config
    assert config["model_type"] == model.family.model_type and "vision_config" not in config
    np.testing.assert_array_equal(call(again, ids), call(model, ids))
    if model.family.model_type != "ministral3":
        convert(tmp_path / "seeing", tmp_path / "text.gguf")
        found, _ = maxjax.load(tmp_path / "text.gguf")
        same(call(found, ids), logits_of(oracle, ids))
        with load_weights(tmp_path / "text.gguf") as weights:
            metadata = dict(weights.metadata)
        architecture = metadata["general.architecture"]
        more = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
        found = {key: list(more[key]) if "sections" in key else more[key] for key in (
            "rope.dimension_sections", "n_deepstack_layers") if key in more}  # fmt: skip
        assert (architecture, found) == GGUF.get(kind, (architecture, {}))


def test_pairs_that_turn_by_a_fourth_position():
    """A text token's is 0 in llama.cpp, so such pairs would not turn."""
    keys = {
        "block_count": 1, "context_length": 64, "embedding_length": 16, "feed_forward_length": 16,
        "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_sections": [2, 1, 1, 0],
    }  # fmt: skip
    metadata = {"general.architecture": "qwen2vl", **{f"qwen2vl.{k}": v for k, v in keys.items()}}
    assert hf_config(metadata, {"token_embd.weight": (10, 16)})["model_type"] == "qwen2"
    metadata["qwen2vl.rope.dimension_sections"] = [1, 1, 1, 1]
    with pytest.raises(UnsupportedModelError, match="fourth position"):
        hf_config(metadata, {"token_embd.weight": (10, 16)})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", PAIRS)
def test_a_text_model_of_any_family(kind, tmp_path):
    oracle = theirs(kind, tmp_path / "seeing")
    model, _ = maxjax.load(tmp_path / "seeing")
    assert model.family.model_type == PAIRS[kind][1]["model_type"]
    ids = ids_of(2, 24)
    same(call(model, ids), logits_of(oracle, ids))
    # Saved it is the multimodal model again, with all its tensors.
    maxjax.save_pretrained(model, tmp_path / "again")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("seeing", "again")
    )
    assert {name: one.tobytes() for name, one in before.items()} == {
        name: one.tobytes() for name, one in after.items()
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_finds_the_family_of_its_text(architecture):
    config = {"architectures": [architecture], "text_config": {"hidden_size": 8}}
    family = find_family(config)
    assert family.architectures[0] == text_settings(config)["architectures"][0]


def test_settings_of_old_files_stand_among_the_others():
    """As Qwen2.5-VL was published, without ``text_config``."""
    sections = dict(SECTIONS)  # transformers changes what it is given
    flat = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        **SMALL, "vision_config": {"hidden_size": 99}, "rope_scaling": sections,
    }  # fmt: skip
    found = text_settings(flat)
    assert found["model_type"] == "qwen2" and found["hidden_size"] == 32
    assert found["rope_scaling"] is None and found["rms_norm_eps"] == 1e-5
    assert find_family(flat).config.from_dict(flat).hidden_size == 32


def test_the_settings_of_a_nemotron_omni():
    """As it is published, and as transformers writes it; without a key, the text model decides on the tie."""
    text = {"hidden_size": 32, "tie_word_embeddings": True}
    for key in ("llm_config", "text_config"):
        config = {"architectures": ["NemotronH_Omni_Reasoning_V3"], key: text}
        found = text_settings(config)
        assert (found["model_type"], found["hidden_size"]) == ("nemotron_h", 32)
        assert found["tie_word_embeddings"] is True


def test_the_thinker_of_an_omni_model():
    """As Qwen3-Omni is published: the settings are two objects deep, and the tensors have a prefix."""
    config = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe",
        "dtype": "bfloat16", "thinker_config": {"text_config": {**SMALL, "num_experts": 4}},
    }  # fmt: skip
    found = text_settings(config)
    assert (found["hidden_size"], found["dtype"], found["norm_topk_prob"]) == (32, "bfloat16", True)
    assert (
        TEXT.model_name("thinker.model.layers.0.mlp.gate.weight")
        == "model.layers.0.mlp.gate.weight"
    )
    assert TEXT.model_name("thinker.lm_head.weight") == "lm_head.weight"
    for other in (
        "talker.model.norm.weight",
        "code2wav.x",
        "thinker.visual.x",
        "thinker.audio_tower.x",
    ):
        assert TEXT.model_name(other) is None


@pytest.mark.parametrize("text", [[1], "small", 3])
def test_a_text_config_that_is_none_is_refused(text):
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    with pytest.raises(CheckpointFormatError, match="text_config"):
        find_family(config)


def test_one_of_several_text_models():
    """The one that ``text_config`` names, with what LLaVA's files leave out; no other in its place."""
    config = {"architectures": ["LlavaNextForConditionalGeneration"]}
    text = {"model_type": "mistral", "vocab_size": 9, "sliding_window": None}
    found = text_settings({**config, "text_config": text})
    assert found["architectures"] == ["MistralForCausalLM"] and found["hidden_size"] == 4096
    assert found["vocab_size"] == 9 and found["intermediate_size"] == 14_336
    found = text_settings({**config, "text_config": {"model_type": "phi3"}})
    assert found["architectures"] == ["Phi3ForCausalLM"] and found["hidden_size"] == 3072
    for other in ("persimmon", "bert"):
        with pytest.raises(
            UnsupportedModelError, match=f"type '{other}' is not supported for llava_next"
        ):
            text_settings({**config, "text_config": {"model_type": other}})


@pytest.mark.oracle
@pytest.mark.parametrize("kind", _SIZES)
def test_sizes_that_files_leave_out(kind):
    """Those of transformers' classes: a text model without any settings is the same."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = next(of_model_type(kind))
    whole = {**CONFIG_MAPPING[kind]().to_dict(), "architectures": [family.architectures[0]]}
    whole["tie_word_embeddings"] = False
    bare = {"model_type": "llava_next", "text_config": {"model_type": kind}}
    assert family.config.from_dict(bare) == family.config.from_dict(whole)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", WRAPPERS)
def test_whether_the_head_is_tied(kind):
    """As transformers' class decides for each value at the top level and in ``text_config``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind in ("qwen2_5_omni", "qwen3_omni_moe"):
        pytest.skip("its settings are those of the thinker")
    if kind in ("nemotron_h_omni", "blip-2", "instructblip", "instructblipvideo"):
        pytest.skip("it holds a whole language model, whose own settings decide")
    cls, values = CONFIG_MAPPING[kind], (None, True, False)
    for outer, inner in itertools.product(values, values):
        text = {"vocab_size": 64, "tie_word_embeddings": inner, "model_type": WRAPPERS[kind].text}
        if not WRAPPERS[kind].takes_any:
            del text["model_type"]
        text = {key: value for key, value in text.items() if value is not None}
        config = {"model_type": kind, "text_config": text}
        config |= {} if outer is None else {"tie_word_embeddings": outer}
        theirs = getattr(cls(**copy.deepcopy(config)), "tie_word_embeddings", False)
        settings = text_settings(config)
        family = next(of_model_type(settings["model_type"]))
        mine = settings.get("tie_word_embeddings", family.config.tie_word_embeddings)
        assert mine is (theirs or False), (outer, inner)


@pytest.mark.parametrize(
    "kind, tied", [("mistral3", True), ("internvl", True), ("llava_next", False)]
)
def test_a_file_that_does_not_say_whether_the_head_is_tied(kind, tied):
    text = {"model_type": "qwen2", "tie_word_embeddings": False}
    assert says_tied(None, {"model_type": kind, "text_config": text}) is tied
    assert not says_tied(
        None, {"model_type": kind, "text_config": text, "tie_word_embeddings": False}
    )


@pytest.mark.parametrize(
    "kind, text, expected",
    [
        (
            "voxtral",
            "llama",
            {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "theta": 1e8},
        ),
        ("qwen2_5_vl", None, {"num_key_value_heads": 8}),
        ("qwen2_5_omni_thinker", None, {"num_key_value_heads": 4}),
        ("mistral3", "mistral", {"sliding_window": 4096}),
        ("qwen3_vl_moe", None, {"num_experts": 60}),
        ("glm4v", "glm4v_text", {"rms_norm_eps": 1e-5, "max_position_embeddings": 32_768}),
        ("glm4v_moe", "glm4v_moe_text", {"max_position_embeddings": 65_536}),
    ],
)
def test_what_a_text_config_leaves_out(kind, text, expected):
    """The defaults of transformers' classes of the text models, which differ from those of the plain families."""
    sizes = {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 32,
    }  # fmt: skip
    sizes |= {} if text is None else {"model_type": text}
    settings = text_settings({"model_type": kind, "text_config": sizes})
    config = next(of_model_type(settings["model_type"])).config.from_dict(settings)
    rope = getattr(config, "rope_parameters", None) or config.rope
    found = {key: rope.theta if key == "theta" else getattr(config, key) for key in expected}
    assert found == expected
    assert (
        text_settings({"model_type": kind, "text_config": {**sizes, "num_key_value_heads": 2}})[
            "num_key_value_heads"
        ]
        == 2
    )


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_either_name_of_the_number_of_experts(name):
    """Qwen's own files have the first, those of transformers 5 the second."""
    text = {
        "vocab_size": 64,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "intermediate_size": 48,
        name: 4,
    }
    settings = text_settings({"model_type": "qwen3_vl_moe", "text_config": text})
    assert Qwen3MoEConfig.from_dict(settings).num_experts == 4


def test_names_of_any_age():
    places = ("language_model.model.", "model.language_model.", "model.text_model.", "model.")
    for prefix in places:
        assert TEXT.model_name(f"{prefix}norm.weight") == "model.norm.weight"
    for part in (
        "visual.blocks.0.x",
        "model.vision_tower.x",
        "multi_modal_projector.w",
        "image_newline",
        "model.vision_encoder.x",  # LightOn OCR
        "model.image_tower.x",  # Video-LLaVA
        "encoder.layers.0.x",  # Granite Speech
        "mlp1.0.weight",  # Qianfan OCR
        "model.visual_embeddings_table.weight",  # Ovis 2
        "model.generation_head.x",  # Janus
    ):
        assert TEXT.model_name(part) is None
