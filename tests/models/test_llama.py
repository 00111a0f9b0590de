"""Llama and Mistral against transformers: small random models in its files, read by us."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.errors import CheckpointFormatError, CheckpointMismatchError, UnsupportedModelError
from maxjax.models import Llama, LlamaConfig, Mistral, MistralConfig, Qwen2, SeedOSS
from maxjax.models.parts.rotary import read_rope
from tests.models import decoders
from tests.models.decoders import HEADS, call, greedy, ids_of, logits_of, oracle, ours, same
from tests.oracles.models import settings_of

LENGTH = 24


@pytest.mark.parametrize(("heads", "tied"), [("mha", False), ("gqa", True), ("mqa", False)])
def test_logits(tmp_path, heads, tied):
    model = oracle("Llama", tmp_path, num_key_value_heads=HEADS[heads], tie_word_embeddings=tied)
    ids = ids_of(2, LENGTH)
    same(call(ours(tmp_path), ids), logits_of(model, ids))


@pytest.mark.parametrize("kind", [Llama, Mistral, Qwen2, SeedOSS])
def test_norms_round_before_they_multiply_by_the_weight_as_in_transformers(kind):
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    config = kind.family.config(10, 64, 16, rms_norm_eps=1e-6, **sizes)
    model = kind(config, "bfloat16", stacked=False)
    layer, rng = model.model.layers[0], np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 64)), jnp.bfloat16)
    weight = jnp.asarray(1 + 0.1 * rng.normal(size=64), jnp.bfloat16)
    wide = x.astype(jnp.float32)
    rounded = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
        norm.load_state_dict({"weight": weight})
        np.testing.assert_array_equal(norm(x), rounded.astype(jnp.bfloat16) * weight[None])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("devices", [4, 2, 8, 1])
def test_logits_stacked_and_placed(tmp_path, heads, tied, stacked, devices):
    settings = {"num_key_value_heads": 2 * HEADS[heads], "tie_word_embeddings": tied}
    settings = settings if heads != "mqa" else {**settings, "num_key_value_heads": 1}
    model = oracle("Llama", tmp_path, num_attention_heads=8, **settings)
    ids = ids_of(2, LENGTH)
    mine = ours(tmp_path, stacked=stacked, devices=devices)
    same(call(mine, ids), logits_of(model, ids))
    prompts = [ids[0], ids[1, :9]]
    np.testing.assert_array_equal(greedy(mine, prompts, 12), decoders.generated(model, prompts, 12))


def test_four_devices(tmp_path):
    model = oracle("Llama", tmp_path)
    ids = ids_of(2, LENGTH)
    mine = ours(tmp_path, devices=4)
    same(call(mine, ids), logits_of(model, ids))
    assert "model" in str(mine.model.layers[0].self_attn.q_proj.weight.sharding.spec)


def test_unstacked_layers_give_the_same(tmp_path):
    model = oracle("Llama", tmp_path)
    ids = ids_of(2, LENGTH)
    same(call(ours(tmp_path, stacked=False), ids), logits_of(model, ids))


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16, "num_hidden_layers": 1, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
    ],
    ids=["biases", "head_dim"],
)
def test_settings(tmp_path, settings):
    model = oracle("Llama", tmp_path, **settings)
    ids = ids_of(2, LENGTH)
    same(call(ours(tmp_path), ids), logits_of(model, ids))


ROPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "yarn ": {
        "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": 1.3,
        "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False,
    },
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 9.0], "factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ROPES)
def test_stretched_ropes(tmp_path, kind):
    rope = {"rope_type": kind.strip(), "rope_theta": 500.0, **ROPES[kind]}
    model = oracle("Llama", tmp_path, rope_parameters=rope, max_position_embeddings=16)
    mine = ours(tmp_path)
    for length in (6, LENGTH):  # within the first length and beyond the last
        ids = ids_of(2, length)
        same(call(mine, ids), logits_of(model, ids))


# Dynamic NTK has one length for a text, unlike transformers' generate: tests/models/test_text_lengths.py.
STEADY = [kind for kind in ROPES if kind not in ("dynamic", "longrope")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["longrope", *STEADY])
def test_stretched_ropes_token_by_token(tmp_path, kind):
    rope = {"rope_type": kind.strip(), "rope_theta": 500.0, **ROPES[kind]}
    model = oracle("Llama", tmp_path, rope_parameters=rope, max_position_embeddings=16)
    prompt = [ids_of(1, 10)[0]]
    np.testing.assert_array_equal(
        greedy(ours(tmp_path), prompt, 32), decoders.generated(model, prompt, 32)
    )


@pytest.mark.parametrize("kind", ROPES)
def test_both_spellings_of_rope(kind):
    new = {"rope_parameters": {"rope_type": kind.strip(), "rope_theta": 500.0, **ROPES[kind]}}
    old = {"rope_theta": 500.0, "rope_scaling": {"type": kind.strip(), **ROPES[kind]}}
    assert read_rope(new, 16) == read_rope(old, 16)
    assert read_rope(new, 16) != read_rope({"rope_theta": 500.0}, 16)


# --- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunk",
    [pytest.param(None, id="whole", marks=pytest.mark.extra), pytest.param(5, id="chunked")],
)
def test_64_tokens_of_rows_of_different_length(tmp_path, chunk):
    model = oracle("Llama", tmp_path)
    ids = ids_of(3, 13)
    prompts = [ids[0], ids[1, :4], ids[2, :1]]
    found = greedy(ours(tmp_path), prompts, 64, chunk)
    np.testing.assert_array_equal(found, decoders.generated(model, prompts, 64))


@pytest.mark.extra
@pytest.mark.parametrize("window", [5, None])
def test_mistral(tmp_path, window):
    model = oracle("Mistral", tmp_path, sliding_window=window, num_key_value_heads=1)
    mine, ids = ours(tmp_path), ids_of(2, LENGTH)
    same(call(mine, ids), logits_of(model, ids))
    assert mine.config.sliding_window == window
    prompts = [ids[0, :11], ids[1, :3]]
    found = greedy(mine, prompts, 24, 4)
    np.testing.assert_array_equal(found, decoders.generated(model, prompts, 24))


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gguf_of_the_same_weights(tmp_path, tied):
    from maxjax.checkpoint import convert

    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    model = oracle("Llama", tmp_path / "hf", rope_parameters=rope, tie_word_embeddings=tied)
    convert(tmp_path / "hf", tmp_path / "x.gguf")
    ids = ids_of(2, LENGTH)
    found = call(ours(tmp_path / "x.gguf"), ids)
    same(found, logits_of(model, ids))
    np.testing.assert_array_equal(found, call(ours(tmp_path / "hf"), ids))


def test_layers_of_unlike_types_are_stacked_where_they_are_alike(tmp_path):
    from safetensors.numpy import save_file

    model = oracle("Llama", tmp_path, num_hidden_layers=4)
    wide = "model.layers.0.mlp.up_proj.weight"
    tensors = model.tensors | {wide: model.tensors[wide].astype(np.float16)}
    save_file(tensors, tmp_path / "model.safetensors")
    mine, ids = ours(tmp_path), ids_of(2, 8)
    assert str(mine.model.layers._layout) == "4 layers: 3 times 1 after 1"
    same(call(mine, ids), logits_of(model, ids), atol=1e-2)


def test_a_tied_head_is_one_leaf(tmp_path):
    import jax

    oracle("Llama", tmp_path, tie_word_embeddings=True)
    model = ours(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in model.state_dict()
    shapes = [leaf.shape for leaf in jax.tree.leaves(model)]
    assert shapes.count((decoders.VOCAB, 32)) == 1


def test_names_are_those_of_the_checkpoint(tmp_path):
    model = oracle("Llama", tmp_path, attention_bias=True)
    found = {name: a.shape for name, a in ours(tmp_path).state_dict().items()}
    assert found == model.shapes


def test_a_head_that_is_missing_is_named(tmp_path):
    oracle("Llama", tmp_path, tie_word_embeddings=True)
    decoders.change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointMismatchError, match=r"lm_head\.weight"):
        ours(tmp_path)


# --- what is refused -----------------------------------------------------------------------------

RAW = {
    "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "su"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "sliding_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
    ids=["rope", "rope of layers", "partial", "quantised"],
)
def test_settings_that_are_not_supported_are_named(settings, name):
    with pytest.raises(UnsupportedModelError, match=name):
        LlamaConfig.from_dict({**RAW, **settings})


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": 3}}, "short_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "2 factors",
        ),
        ({"rope_scaling": [2]}, "rope_scaling"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"head_dim": 3}, "even"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 9}, "hidden_size"),
        ({"hidden_act": "sine"}, "hidden_act"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ],
)
def test_wrong_values_are_named(settings, name):
    with pytest.raises(CheckpointFormatError, match=name):
        LlamaConfig.from_dict({**RAW, **settings}, path="config.json")


def test_defaults_are_those_of_transformers():
    for ours_ in (LlamaConfig, MistralConfig):
        raw = {**RAW, "hidden_size": 16, "num_attention_heads": 8}
        mine, other = ours_.from_dict(raw), settings_of(ours_.__name__, raw)
        assert mine.num_key_value_heads == other.num_key_value_heads
        assert mine.max_position_embeddings == other.max_position_embeddings
        assert mine.window(0) == getattr(other, "sliding_window", None)
        assert mine.rms_norm_eps == other.rms_norm_eps
        assert mine.tie_word_embeddings == other.tie_word_embeddings
        assert mine.rope_parameters.theta == other.rope_parameters["rope_theta"]
    null = MistralConfig.from_dict({**raw, "sliding_window": None})
    assert null.sliding_window is None and null.window(0) is None


def test_a_file_cannot_say_what_only_a_family_knows():
    config = LlamaConfig.from_dict({**RAW, "norm_offset": 1.0, "slides": [True, True], "rope": 3})
    assert config == LlamaConfig.from_dict(RAW)
