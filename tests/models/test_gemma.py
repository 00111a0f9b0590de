"""Gemma 1, 2 and 3 against transformers: small random models in its files, read by us."""

import copy
import json

import numpy as np
import pytest

from maxjax.errors import CheckpointFormatError, UnsupportedModelError
from maxjax.models import Gemma2Config, Gemma3Config, Gemma4Config, GemmaConfig, Olmo3Config
from tests.models import decoders
from tests.models.decoders import HEADS, call, greedy, ids_of, like, logits_of, oracle, ours, same
from tests.oracles.models import OracleModel, settings_of
from tests.oracles.recorded import torch

LENGTH = 24
# Windows shorter than the text, and caps that change much.
GEMMA2 = {
    "head_dim": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 4, "sliding_window": 5,
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5,
}  # fmt: skip
STRETCHED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
GEMMA3 = {
    "head_dim": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 4, "sliding_window": 5,
    "sliding_window_pattern": 2, "rope_parameters": STRETCHED,
}  # fmt: skip
SETTINGS = {"Gemma": {"head_dim": 8}, "Gemma2": GEMMA2, "Gemma3": GEMMA3}
KINDS = pytest.mark.parametrize("kind", ["Gemma2", "Gemma3"])
SAMPLE = [
    ("mha", False, False, 1), ("gqa", True, True, 4), ("mqa", False, True, 4), ("gqa", True, True, 1)
]  # fmt: skip


def slides(config):
    """Whether each layer has a sliding window."""
    return tuple(config.window(layer) is not None for layer in range(config.num_hidden_layers))


def small(kind, **settings):
    return {**SETTINGS[kind], **settings}


@pytest.mark.sampled
@KINDS
@pytest.mark.parametrize(("heads", "tied", "stacked", "devices"), SAMPLE)
def test_logits(tmp_path, kind, heads, tied, stacked, devices):
    settings = {"num_key_value_heads": HEADS[heads], "tie_word_embeddings": tied}
    model = oracle(kind, tmp_path, **small(kind, **settings))
    ids = ids_of(2, LENGTH)
    same(call(ours(tmp_path, stacked=stacked, devices=devices), ids), logits_of(model, ids))


@pytest.mark.parametrize("heads", ["mha", "mqa"])
def test_the_first_gemma(tmp_path, heads):
    model = oracle("Gemma", tmp_path, **small("Gemma", num_key_value_heads=HEADS[heads]))
    ids = ids_of(2, LENGTH)
    same(call(ours(tmp_path), ids), logits_of(model, ids))


@KINDS
def test_sizes_that_do_not_follow_from_each_other(tmp_path, kind):
    odd = {
        "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10,
        "query_pre_attn_scalar": 23, "attention_bias": True, "rms_norm_eps": 1e-3,
        "hidden_activation": "gelu", "sliding_window": 1, "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    model = oracle(kind, tmp_path, **small(kind, **odd))
    ids = ids_of(2, LENGTH)
    mine = ours(tmp_path)
    same(call(mine, ids), logits_of(model, ids))
    assert slides(mine.config) == (False, True)


@pytest.mark.parametrize("kind, key", [
    ("Gemma2", "attn_logit_softcapping"),
    ("Gemma2", "final_logit_softcapping"),
    ("Gemma3", "final_logit_softcapping"),
])  # fmt: skip
def test_soft_caps_matter_and_null_is_none(tmp_path, kind, key):
    found = {}
    for cap in (1.0, None):
        model = oracle(kind, tmp_path, **small(kind, num_hidden_layers=1, **{key: cap}))
        assert json.loads((tmp_path / "config.json").read_text())[key] == cap
        ids = ids_of(2, LENGTH)
        found[cap] = np.asarray(call(ours(tmp_path), ids))
        same(found[cap], logits_of(model, ids))
    assert np.abs(found[1.0] - found[None]).max() > 0.1


def test_gemma_3_has_no_cap_of_scores_whatever_its_file_says(tmp_path):
    settings = small("Gemma3", attn_logit_softcapping=0.5, num_hidden_layers=2)
    model = oracle("Gemma3", tmp_path, **settings)
    mine, ids = ours(tmp_path), ids_of(2, LENGTH)
    same(call(mine, ids), logits_of(model, ids))
    assert not hasattr(mine.config, "attn_logit_softcapping")


def narrowed(model, directory, ids):
    """Logits of the model in bfloat16, and of ours, which reads it."""

    def narrow(model):
        with torch.no_grad():
            logits = copy.deepcopy(model).to(torch.bfloat16)(torch.tensor(ids).long()).logits
        return logits.float().numpy()[..., :: decoders.EVERY].copy()

    model.save(directory, "bfloat16")
    mine = ours(directory)
    assert mine.model.layers[0].self_attn.q_proj.weight.dtype.name == "bfloat16"
    expected = model.ask("logits in bfloat16", narrow)
    return like(call(mine, ids), expected), expected


def test_bfloat16_is_as_exact_as_that_of_transformers(tmp_path):
    ids = ids_of(2, LENGTH)
    model = oracle("Gemma2", tmp_path, **small("Gemma2", hidden_size=40))
    exact = logits_of(model, ids)
    errors = [np.sqrt(np.mean((a - exact) ** 2)) for a in narrowed(model, tmp_path, ids)]
    assert errors[0] < 1.3 * errors[1] < 0.15


def test_the_scale_of_embeddings_is_rounded_to_their_type(tmp_path):
    # √40 is 6.3246, in bfloat16 6.3125. With layers that add nothing and norms whose eps is all
    # there is, logits grow with the scale.
    model = oracle(
        "Gemma", tmp_path, hidden_size=40, head_dim=8, num_hidden_layers=1, rms_norm_eps=1e4
    )
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        model.tensors[f"model.layers.0.{part}.weight"][:] = 0
    found, expected = narrowed(model, tmp_path, ids_of(2, LENGTH))
    assert abs(np.sum(found * expected) / np.sum(expected**2) - 1) < 5e-4


# --- tokens --------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, rows, chunk", [
    ("Gemma2", 3, None), ("Gemma2", 1, 5), ("Gemma3", 1, None), ("Gemma3", 3, 5)
])  # fmt: skip
def test_64_tokens_of_rows_of_different_length(tmp_path, kind, rows, chunk):
    model, ids = oracle(kind, tmp_path, **small(kind)), ids_of(3, 13)
    prompts = [ids[0], ids[1, :4], ids[2, :1]][:rows]
    found = greedy(ours(tmp_path), prompts, 64, chunk)
    np.testing.assert_array_equal(found, decoders.generated(model, prompts, 64))


def test_tokens_on_four_devices(tmp_path):
    model, ids = oracle("Gemma3", tmp_path, **small("Gemma3", num_hidden_layers=2)), ids_of(2, 11)
    prompts = [ids[0], ids[1, :3]]
    found = greedy(ours(tmp_path, devices=4), prompts, 12)
    np.testing.assert_array_equal(found, decoders.generated(model, prompts, 12))


def test_five_layers_of_six_are_one_pattern(tmp_path):
    more = {"num_hidden_layers": 12, "sliding_window_pattern": 6}
    model = oracle("Gemma3", tmp_path, **small("Gemma3", **more))
    mine, ids = ours(tmp_path), ids_of(2, LENGTH)
    same(call(mine, ids), logits_of(model, ids))
    assert "2 times 6" in str(mine.model.layers._layout)


# --- windows and rope ----------------------------------------------------------------------------


def test_windows_by_a_pattern_and_by_a_list():
    sixth = (True,) * 5 + (False, True)
    assert slides(Gemma3Config.from_dict(RAW)) == sixth
    by_three = {**RAW, "sliding_window_pattern": 3}
    assert slides(Gemma3Config.from_dict(by_three)) == (True, True, False) * 2 + (True,)
    listed = ["full_attention"] * 6 + ["sliding_attention"]
    listed = Gemma3Config.from_dict({**by_three, "layer_types": listed})
    assert slides(listed) == (False,) * 6 + (True,)
    assert slides(Gemma2Config.from_dict(RAW)) == (True, False) * 3 + (True,)
    nowhere = {**RAW, "layer_types": ["full_attention"] * 7}
    for window in (None, 5):
        found = Gemma3Config.from_dict({**nowhere, "sliding_window": window})
        assert found.sliding_window is None and not any(slides(found))


def test_both_spellings_of_rope():
    old = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    old |= {"rope_theta": 500, "rope_local_base_freq": 30.0}
    found = Gemma3Config.from_dict({**RAW, **old})
    assert found == Gemma3Config.from_dict({**RAW, "rope_parameters": STRETCHED})
    assert found.rope_parameters.scaling.factor == 8.0 and found.local_rope_parameters.theta == 30.0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rope_theta": 7.0},
        {"rope_local_base_freq": 7.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 9.0},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 3.0}}},
        {
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3.0}},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ],
)
def test_ropes_are_read_as_transformers_reads_them(settings):
    other = settings_of("Gemma3TextConfig", {**RAW, **settings}).rope_parameters
    found = Gemma3Config.from_dict({**RAW, **settings})
    for rope, kind in (
        (found.rope_parameters, "full_attention"), (found.local_rope_parameters, "sliding_attention")
    ):  # fmt: skip
        assert rope.theta == other[kind]["rope_theta"]
        assert getattr(rope.scaling, "factor", None) == other[kind].get("factor")


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.extra
@pytest.mark.parametrize("kind", ["Gemma", "Gemma2", "Gemma3"])
def test_gguf_of_the_same_weights(tmp_path, kind):
    from maxjax.checkpoint import convert

    layers = {"num_hidden_layers": 2}
    model = oracle(kind, tmp_path / "hf", **small(kind, **layers))
    convert(tmp_path / "hf", tmp_path / "x.gguf")
    ids = ids_of(2, LENGTH)
    mine = ours(tmp_path / "x.gguf")
    found = call(mine, ids)
    same(found, logits_of(model, ids))
    np.testing.assert_array_equal(found, call(ours(tmp_path / "hf"), ids))


@pytest.mark.parametrize("kind", ["Gemma", "Gemma2", "Gemma3"])
def test_names_are_those_of_the_checkpoint(tmp_path, kind):
    model = oracle(kind, tmp_path, **small(kind, num_hidden_layers=1))
    expected = dict(model.shapes)
    expected.pop("lm_head.weight")  # tied
    assert {name: a.shape for name, a in ours(tmp_path).state_dict().items()} == expected


def seeing(tmp_path):
    """A Gemma 3 with eyes, in a directory, and the same text model alone in another."""
    alone = oracle("Gemma3", tmp_path / "alone", **small("Gemma3", num_hidden_layers=2))
    eyes = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = {
        key: value for key, value in alone.config.settings.items() if key != "transformers_version"
    }
    config = {"text_config": text, "vision_config": eyes, "mm_tokens_per_image": 4}
    whole = OracleModel(
        "Gemma3ForConditionalGeneration", "Gemma3Config", config, draw=decoders.drawn_of_gemma
    )
    whole.tensors |= {f"language_model.{name}": array for name, array in alone.tensors.items()}
    whole.save(tmp_path / "seeing")
    return alone, whole


def test_of_a_model_that_sees_the_text_part_is_read(tmp_path):
    from safetensors.numpy import save_file

    alone, whole = seeing(tmp_path)
    ids = ids_of(2, LENGTH)
    mine = ours(tmp_path / "seeing")
    expected = logits_of(alone, ids)
    np.testing.assert_allclose(logits_of(whole, ids), expected, atol=1e-5)
    same(call(mine, ids), expected)
    found = mine.hf_config
    assert found["architectures"] == ["Gemma3ForCausalLM"] and "text_config" not in found
    kept = {key: value for key, value in found.items() if key != "transformers_version"}
    assert settings_of("Gemma3TextConfig", kept).hidden_size == 32
    # In memory transformers has other names; such files may exist too.
    there = {"language_model.model": "language_model", "language_model.lm_head": "lm_head"}
    names = {}
    for name, array in whole.tensors.items():
        start = next((start for start in there if name.startswith(start)), "")
        names["model." + there.get(start, "") + name[len(start) :]] = array
    assert names.keys() == whole.shapes.keys() - {"lm_head.weight"}
    save_file(names, tmp_path / "seeing" / "model.safetensors")
    same(call(ours(tmp_path / "seeing"), ids), expected)


# --- what is said and what is refused ------------------------------------------------------------

RAW = {
    "vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 7,
    "num_attention_heads": 32,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["Gemma", "Gemma2", "Gemma3"])
def test_defaults_are_those_of_transformers(kind):
    mine = {"Gemma": GemmaConfig, "Gemma2": Gemma2Config, "Gemma3": Gemma3Config}[kind]
    found = mine.from_dict(RAW)
    other = settings_of(kind + "Text" * (kind == "Gemma3") + "Config", RAW)
    assert found.num_key_value_heads == other.num_key_value_heads
    assert found.head_dim == other.head_dim
    assert found.max_position_embeddings == other.max_position_embeddings
    assert found.rms_norm_eps == other.rms_norm_eps
    assert found.tie_word_embeddings == other.tie_word_embeddings
    assert found.attention_bias == other.attention_bias
    act = found.hidden_act if kind == "Gemma" else found.hidden_activation
    assert act == getattr(other, "hidden_activation", "gelu_pytorch_tanh")
    if kind != "Gemma":
        assert found.query_pre_attn_scalar == other.query_pre_attn_scalar
        assert found.sliding_window == other.sliding_window
        assert list(found.layer_types) == other.layer_types
        assert getattr(found, "attn_logit_softcapping", None) == other.attn_logit_softcapping
        assert found.final_logit_softcapping == other.final_logit_softcapping


def test_what_a_published_file_leaves_out_of_its_text_part():
    found = Gemma3Config.from_dict({"model_type": "gemma3", "text_config": {"hidden_size": 2560}})
    other = settings_of("Gemma3Config", {"text_config": {"hidden_size": 2560}}).text_config
    assert found.vocab_size == other["vocab_size"]
    assert found.num_attention_heads == other["num_attention_heads"]
    assert found.num_hidden_layers == other["num_hidden_layers"] and found.hidden_size == 2560
    assert found.intermediate_size == other["intermediate_size"]
    assert found.num_key_value_heads == other["num_key_value_heads"]


def test_the_first_files_say_gelu_and_mean_its_approximation():
    assert GemmaConfig.from_dict({**RAW, "hidden_act": "gelu"}).hidden_act == "gelu_pytorch_tanh"
    assert GemmaConfig.from_dict({**RAW, "hidden_act": "silu"}).hidden_act == "silu"
    assert Gemma2Config.from_dict({**RAW, "hidden_activation": "gelu"}).hidden_activation == "gelu"


def test_a_file_cannot_say_what_only_a_family_knows():
    wrong = {"norm_offset": 0.0, "post_norms": False, "qk_norm": False, "embedding_scale": 1.0}
    wrong |= {"sliding_window_pattern": 6, "query_scale": 3.0, "mlp_bias": True}
    assert Gemma3Config.from_dict({**RAW, **wrong}) == Gemma3Config.from_dict(RAW)


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        ({"use_bidirectional_attention": "vision"}, CheckpointFormatError, "bidirectional"),
        ({"layer_types": ["chunked_attention"] * 7}, UnsupportedModelError, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, CheckpointFormatError, "layer_types"),
        ({"sliding_window": None}, CheckpointFormatError, "sliding_window"),
        ({"sliding_window": "5"}, CheckpointFormatError, "sliding_window"),
        ({"sliding_window_pattern": 0}, CheckpointFormatError, "sliding_window_pattern"),
        ({"query_pre_attn_scalar": 0}, CheckpointFormatError, "query_pre_attn_scalar"),
        ({"final_logit_softcapping": 0.0}, CheckpointFormatError, "final_logit_softcapping"),
        ({"final_logit_softcapping": "no"}, CheckpointFormatError, "final_logit_softcapping"),
        ({"hidden_activation": "sine"}, CheckpointFormatError, "sine"),
        ({"head_dim": 7}, CheckpointFormatError, "even"),
        ({"rope_parameters": [1]}, CheckpointFormatError, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1e4}}, UnsupportedModelError, "rope_theta"),
        ({"rope_parameters": {"full_attention": 3}}, CheckpointFormatError, "full_attention"),
        ({"rope_scaling": {"rope_type": "su"}}, UnsupportedModelError, "su"),
        ({"rope_local_base_freq": -1.0}, CheckpointFormatError, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor"),
        ({"model_type": "gemma3"}, CheckpointFormatError, "text_config"),
        ({"text_config": [1]}, CheckpointFormatError, "text_config"),
        ({"text_config": RAW, "quantization_config": {"quant_method": "gptq"}},
         UnsupportedModelError, "gptq"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(settings, error, name):
    with pytest.raises(error, match=name):
        Gemma3Config.from_dict({**RAW, **settings}, path="config.json")


@pytest.mark.parametrize("config", [Olmo3Config, Gemma4Config])
def test_one_rope_for_all_kinds_of_layers_is_refused(config):
    """transformers keeps it, and uses its own defaults in all layers."""
    raw = {key: value for key, value in RAW.items() if key != "rope_parameters"}
    assert config.from_dict(raw).local_rope_parameters.theta > 0
    with pytest.raises(UnsupportedModelError, match="'rope_theta' for all layers"):
        config.from_dict({**raw, "rope_parameters": {"rope_theta": 1e6}})


def test_a_cap_of_scores_that_is_none_at_all_is_refused():
    with pytest.raises(CheckpointFormatError, match="attn_logit_softcapping"):
        Gemma2Config.from_dict({**RAW, "attn_logit_softcapping": -2.0})
