"""The configuration of a GGUF file: rope, what old files leave out, and what is refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    UnsupportedModelError,
    UserInputError,
)
from maxjax.models.gguf import ARCHITECTURES, hf_config, hf_names, pooling
from maxjax.nn.rope_scaling import Llama3RopeScalingParams, llama3_multipliers
from tests.models.gguf import files
from tests.oracles.models import settings_of
from tests.oracles.recorded import recorded, transformers

gguf = pytest.importorskip("gguf")

TENSORS = {"token_embd.weight": (64, 32), "output.weight": (64, 32)}
KEYS = {
    "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 48,
    "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def config(architecture="llama", tensors=TENSORS, divisors=None, extra=None, **more):
    metadata = {f"{architecture}.{k}": v for k, v in {**KEYS, **more}.items() if v is not None}
    metadata |= {"general.architecture": architecture, **(extra or {})}
    return hf_config(metadata, tensors, divisors=divisors, path="m.gguf")


def alike(a, b):
    """Equal, but that a float was once rounded to float32."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    return a == pytest.approx(b, rel=1e-6) if isinstance(b, float) else a == b


@pytest.mark.parametrize("case", files.CASES)
def test_settings_are_those_of_the_model(case, tmp_path):
    """All that transformers' own configuration of the model says and the file can."""
    architecture, _, settings = files.CASES[case]
    model = files.model(case)
    tensors = files.checkpoint(model, tmp_path / "original")
    metadata, stored = files.read(files.write(tmp_path / "m.gguf", case, model, tensors))
    shapes = {name: values.shape for name, values in stored.items()}
    found = hf_config(metadata, shapes, divisors=stored)
    again = settings_of(model.config_kind, found).settings
    original = model.config.settings
    # Neither in the file nor anything that a model computes by.
    unsaid = {"initializer_range", "dtype", "_name_or_path", "transformers_version", "pad_token_id"}
    unsaid |= {"feed_forward_length", "tokenizer_class"}
    if case == "bert":  # has no head
        unsaid.add("tie_word_embeddings")
    for key in original.keys() - unsaid:
        assert alike(again[key], original[key]), (key, again[key], original[key])
    assert found["torch_dtype"] == "float32"


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3s_divisors_are_recognised(width, factor):
    rope = {**files.LLAMA3, "factor": factor}
    settings = {"head_dim": width, "rope_parameters": rope, "vocab_size": 64}
    freqs = files.llama3_freqs(settings_of("LlamaConfig", settings))
    assert 1 < (freqs > 1).sum() and (freqs == factor).any()
    found = config(
        tensors={**TENSORS, "rope_freqs.weight": freqs.shape}, divisors={"rope_freqs.weight": freqs},
        **{"rope.freq_base": 500000.0, "attention.key_length": width},
    )  # fmt: skip
    assert found["rope_scaling"] == {k: v for k, v in rope.items() if k != "rope_theta"}
    multipliers = llama3_multipliers(
        width, 500000.0, Llama3RopeScalingParams(factor, 1.0, 4.0, 8192)
    )
    np.testing.assert_allclose(1 / multipliers, freqs, rtol=1e-6)


def test_other_divisors_are_listed_and_transformers_uses_them():
    freqs = np.float32([1.0, 1.5, 2.0, 7.0])
    found = config(
        tensors={**TENSORS, "rope_freqs.weight": (4,)}, divisors={"rope_freqs.weight": freqs}
    )
    assert found["rope_scaling"]["rope_type"] == "longrope"
    found["attn_implementation"] = "eager"

    text = json.dumps(found, sort_keys=True)

    def rotary():
        made = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
            transformers.LlamaConfig.from_dict(json.loads(text))
        )
        return [text, made.inv_freq.numpy(), made.attention_scaling]

    asked, frequencies, scaling = recorded(rotary)
    plain = 1 / 10000.0 ** (np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(frequencies, plain / freqs, rtol=1e-6)
    assert scaling == 1.0 and asked == text


def test_divisors_of_one_are_none():
    tensors = {**TENSORS, "rope_freqs.weight": (4,)}
    assert (
        config(tensors=tensors, divisors={"rope_freqs.weight": np.ones(4, np.float32)})[
            "rope_scaling"
        ]
        is None
    )


@pytest.mark.parametrize("freqs", [np.ones(3), np.ones((2, 2)), [1, 1, 1, 0], [1, 1, 1, np.nan]])
def test_divisors_that_cannot_be(freqs):
    with pytest.raises(CheckpointFormatError, match="rope_freqs.weight"):
        config(
            tensors={**TENSORS, "rope_freqs.weight": (4,)},
            divisors={"rope_freqs.weight": np.asarray(freqs)},
        )


def test_divisors_must_be_passed():
    with pytest.raises(UserInputError, match="rope_freqs.weight"):
        config(tensors={**TENSORS, "rope_freqs.weight": (4,)})


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
    ],
)
def test_rope_is_stretched(keys, scaling):
    assert config(**keys)["rope_scaling"] == scaling


def test_yarn_has_all_that_the_file_says():
    keys = {
        "type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0,
        "yarn_beta_slow": 2.0, "yarn_attn_factor": 1.5,
    }  # fmt: skip
    assert config(**{f"rope.scaling.{k}": v for k, v in keys.items()})["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5,
    }  # fmt: skip


EXPERTS = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 8,
}
LATENT = {
    **EXPERTS, "rope.dimension_count": 4, "attention.key_length": 12, "attention.value_length": 8,
    "attention.kv_lora_rank": 16, "expert_gating_func": 2,
}  # fmt: skip
ROUTED = {"norm_topk_prob": False, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("granite", {}, {"attention_multiplier": 8**-0.5}),
        ("granite", {"attention.scale": 0.0, "attention.key_length": 16}, {"attention_multiplier": 0.25}),
        ("granite", {"attention.scale": 0.5}, {"attention_multiplier": 0.5}),
        ("granitemoe", EXPERTS, {"attention_multiplier": 8**-0.5}),
        ("glm4moe", EXPERTS, ROUTED),
        ("glm4moe", {**EXPERTS, "expert_weights_norm": True}, {**ROUTED, "norm_topk_prob": True}),
        ("deepseek2", LATENT, ROUTED),
        ("deepseek2", {**LATENT, "leading_dense_block_count": 1}, {**ROUTED, "first_k_dense_replace": 1}),
        ("qwen2", YARN, {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        }),
    ],
)  # fmt: skip
def test_what_a_file_leaves_out_is_llama_cpps(architecture, keys, expected):
    found = config(architecture, **keys)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(("architecture", "keys"), [("granite", {}), ("granitemoe", EXPERTS)])
def test_a_granite_without_rope_is_refused(architecture, keys):
    with pytest.raises(UnsupportedModelError, match="without RoPE"):
        config(architecture, **keys, **{"rope.scaling.finetuned": False})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "'longrope'"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count' is 4"),
        ({"attention.value_length": 16}, "llama.attention.value_length' is 16"),
        ({"feed_forward_length": [48, 32]}, "llama.feed_forward_length"),
    ],
)
def test_models_that_no_class_of_hugging_faces_is(keys, says):
    with pytest.raises(UnsupportedModelError, match=says):
        config(**keys)


@pytest.mark.parametrize("kind", ["adapter", "mmproj"])
def test_a_file_that_holds_no_model_says_so(kind):
    with pytest.raises(UnsupportedModelError, match=f"m.gguf: a GGUF file of the type '{kind}'"):
        config(tensors={}, extra={"general.type": kind})


def test_an_unknown_architecture_lists_the_known():
    with pytest.raises(UnsupportedModelError, match=r"'rwkv6'.*llama.*gemma3.*bert"):
        config("rwkv6")


REQUIRED = {
    "llama": list(KEYS),
    "qwen3": list(KEYS),
    "gemma2": list(KEYS),
    "gpt2": ["block_count", "embedding_length", "feed_forward_length", "attention.head_count",
             "attention.layer_norm_epsilon"],
    "bert": ["block_count", "embedding_length", "feed_forward_length", "attention.head_count",
             "attention.layer_norm_epsilon"],
}  # fmt: skip
TABLES = {**TENSORS, "position_embd.weight": (128, 32), "token_types.weight": (2, 32)}


WRONG = [None, "text", True, -1, 0, float("nan"), [], {}, b"1", 2**64]


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        (architecture, key, value)
        for architecture, keys in REQUIRED.items()
        for key in keys
        for value in WRONG
        if not (value == 2**64 and "epsilon" in key)  # which is a number
    ],
)
def test_keys_that_are_missing_or_wrong(architecture, key, value):
    good = {"attention.layer_norm_epsilon": 1e-5}
    assert config(architecture, TABLES, **good)
    with pytest.raises(CheckpointFormatError) as info:
        config(architecture, TABLES, **{**good, key: value})
    assert f"m.gguf: metadata key '{architecture}.{key}' " in str(info.value)
    if value is not None:
        assert info.value.expected and info.value.found is not None


def test_the_vocabulary_is_the_table_of_words():
    assert config(tensors={"token_embd.weight": (99, 32)}, vocab_size=64)["vocab_size"] == 99
    for bad in ({}, {"token_embd.weight": (64,)}, {"token_embd.weight": (0, 32)}):
        with pytest.raises(CheckpointFormatError, match="token_embd.weight"):
            config(tensors=bad)


def test_special_tokens_are_in_the_vocabulary():
    extra = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 63}
    found = config(extra=extra)
    assert (found["bos_token_id"], found["eos_token_id"]) == (0, 63)
    assert "pad_token_id" not in found
    with pytest.raises(CheckpointFormatError, match=r"eos_token_id' is out of range .* 0 to 63"):
        config(extra={"tokenizer.ggml.eos_token_id": 64})
    with pytest.raises(UnsupportedModelError, match=r"bos_token_id' \(1 and 2\)"):
        config(extra={"tokenizer.ggml.bos_token_id": np.array([1, 2])})


@pytest.mark.parametrize(
    ("number", "name"), [(0, "float32"), (1, "float16"), (32, "bfloat16"), (15, "bfloat16")]
)
def test_the_type_of_values(number, name):
    assert config(extra={"general.file_type": number})["torch_dtype"] == name
    assert "torch_dtype" not in config()


def test_gemmas_old_files_leave_things_to_llama_cpp():
    found = config("gemma2")
    assert (found["attn_logit_softcapping"], found["final_logit_softcapping"]) == (50.0, 30.0)
    assert found["sliding_window"] == 4096
    assert found["layer_types"] == ["sliding_attention", "full_attention"]
    assert config("gemma3")["rope_local_base_freq"] == 10000.0


def test_gemmas_largest_divide_their_queries_otherwise():
    keys = {"embedding_length": 4608, "attention.head_count": 32, "attention.key_length": 128}
    assert config("gemma2", block_count=46, **keys)["query_pre_attn_scalar"] == 144
    assert config("gemma2", block_count=42, **keys)["query_pre_attn_scalar"] == 128
    keys["embedding_length"] = 5376
    assert config("gemma3", block_count=62, **keys)["query_pre_attn_scalar"] == 168


def test_gemma3s_windows():
    slides = lambda found: [kind == "sliding_attention" for kind in found["layer_types"]]
    window = {"attention.sliding_window": 16, "block_count": 7}
    assert slides(config("gemma3", **window)) == [True] * 5 + [False, True]
    assert slides(config("gemma3", block_count=7)) == [False] * 7
    pattern = "attention.sliding_window_pattern"
    assert slides(config("gemma3", **window, **{pattern: 2})) == [True, False] * 3 + [True]
    listed = [True, True, False, False, True, False, True]
    assert slides(config("gemma3", **window, **{pattern: np.array(listed)})) == listed
    for bad in ([True], [1] * 7, 0, "x"):
        with pytest.raises(CheckpointFormatError, match=pattern):
            config("gemma3", **window, **{pattern: bad})


def test_experts_widths_of_old_files():
    tensors = {
        **TENSORS, "blk.0.ffn_up_exps.weight": (4, 24, 32), "blk.0.ffn_gate_shexp.weight": (40, 32)
    }  # fmt: skip
    experts = {"expert_count": 4, "expert_used_count": 2}
    found = config("qwen2moe", tensors, **experts)
    assert found["moe_intermediate_size"] == 24
    assert found["shared_expert_intermediate_size"] == 40
    with pytest.raises(CheckpointFormatError, match="expert_feed_forward_length' is missing"):
        config("qwen2moe", TENSORS, **experts)
    with pytest.raises(CheckpointFormatError, match="expert_used_count' is out of range"):
        config("qwen2moe", tensors, expert_count=4, expert_used_count=5)
    alone = {**experts, "expert_feed_forward_length": 24, "feed_forward_length": None}
    assert config("qwen3moe", tensors, **alone)["intermediate_size"] == 24


def test_a_bert_without_token_types():
    tensors = {"token_embd.weight": (64, 32), "position_embd.weight": (128, 32)}
    with pytest.raises(UnsupportedModelError, match="token types"):
        config("bert", tensors, **{"attention.layer_norm_epsilon": 1e-5})


def test_pooling():
    assert pooling({"general.architecture": "bert"}) is None
    names = {kind.value: kind.name.lower() for kind in gguf.PoolingType}
    for number, name in names.items():
        found = pooling({"general.architecture": "bert", "bert.pooling_type": number})
        assert found == (name if number else None)
    with pytest.raises(CheckpointFormatError, match="bert.pooling_type' is unknown"):
        pooling({"general.architecture": "bert", "bert.pooling_type": 9})


def test_a_message_is_one_short_line():
    with pytest.raises(CheckpointFormatError) as info:
        config(block_count="\n" + "x" * 10**6)
    assert "\n" not in str(info.value) and len(str(info.value)) < 300
    with pytest.raises(UnsupportedModelError) as info:
        config("\n" + "y" * 10**6)
    assert "\n" not in str(info.value) and len(str(info.value)) < 800
    with pytest.raises(CheckpointFormatError, match="general.architecture' is missing"):
        hf_config({}, {})


ANY = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
)
ANY |= st.lists(st.integers(-1, 9) | st.text(max_size=3), max_size=4) | st.binary(max_size=3)
SUFFIXES = [*KEYS, "attention.head_count_kv", "attention.key_length", "attention.value_length"]
SUFFIXES += ["rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"]
SUFFIXES += ["rope.scaling.original_context_length", "rope.freq_base_swa", "expert_count"]
SUFFIXES += ["expert_used_count", "attention.sliding_window", "attention.sliding_window_pattern"]
SUFFIXES += ["final_logit_softcapping", "attention.layer_norm_epsilon", "pooling_type"]
SUFFIXES += ["expert_feed_forward_length", "rope.dimension_count"]
WHOLE = ["general.architecture", "general.file_type", "tokenizer.ggml.bos_token_id"]
STORED = [*TABLES, "blk.0.attn_q.weight", "blk.1.attn_k.bias", "blk.0.ffn_gate_up_exps.weight"]
STORED += ["blk.0.ffn_up_exps.weight", "blk.0.ffn_gate.1.weight", "rope_freqs.weight", "blk.0.x"]


@given(
    st.sampled_from(sorted(ARCHITECTURES)),
    st.dictionaries(st.sampled_from(SUFFIXES), ANY, max_size=4),
    st.dictionaries(st.sampled_from(WHOLE), ANY, max_size=1),
    st.dictionaries(st.sampled_from(STORED), st.lists(st.integers(0, 9), max_size=4), max_size=4),
)
def test_whatever_a_file_says_only_our_errors_leave(architecture, keys, whole, tensors):
    metadata = {f"{architecture}.{k}": v for k, v in {**KEYS, **keys}.items()}
    metadata |= {"general.architecture": architecture, **whole}
    tensors = {**TABLES, **{name: tuple(shape) for name, shape in tensors.items()}}
    for call in (
        lambda: hf_config(metadata, tensors, divisors={"rope_freqs.weight": np.full(4, 3.0)}),
        lambda: hf_names(architecture, tensors, metadata),
        lambda: pooling(metadata),
    ):
        try:
            json.dumps(call(), default=str)
        except (CheckpointError, UnsupportedModelError) as error:
            assert "\n" not in str(error)


def test_a_window_of_0_is_none():
    """As llama.cpp's converter writes Phi-4."""
    for window in (0, 8):
        found = config("phi3", **{"attention.sliding_window": window})
        assert found["sliding_window"] == (window or None)


def test_attention_both_ways_is_read():
    for causal in (True, False):
        found = config(**{"attention.causal": causal})
        assert found.get("is_causal", True) is causal


def test_a_special_token_of_minus_one_is_none():
    ids = {"tokenizer.ggml.padding_token_id": 2**32 - 1, "tokenizer.ggml.eos_token_id": 3}
    found = config(extra=ids)
    assert "pad_token_id" not in found and found["eos_token_id"] == 3
