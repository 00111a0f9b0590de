"""What a GGUF file of ours says and llama.cpp does not read: refused, or told of.

The table of what it reads is compared with gguf's own constants; what a case loses is asked of
transformers.
"""

import json
import logging

import pytest

import maxjax
from maxjax.checkpoint import convert
from maxjax.errors import CheckpointFormatError, UnsupportedModelError
from maxjax.graph.weights import load_weights
from maxjax.models.gguf import ARCHITECTURES
from maxjax.models.gguf.config.llama_cpp import _SAID, READ
from tests.models import decoders
from tests.models.decoders import call, ids_of, oracle, ours

gguf = pytest.importorskip("gguf")


def test_the_table_has_every_architecture_and_keys_that_there_are():
    assert set(READ) == set(ARCHITECTURES)
    groups = [value for value in vars(gguf.Keys).values() if isinstance(value, type)]
    values = [value for group in groups for value in vars(group).values()]
    known = {value.removeprefix("{arch}.") for value in values if isinstance(value, str)}
    assert set().union(*READ.values(), _SAID) <= known


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "maxjax")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("window", "context", "told"), [(7, 256, 1), (256, 256, 0), (None, 256, 0)]
)
def test_the_window_of_a_mistral_is_told_of(tmp_path, said, window, context, told):
    settings = {"sliding_window": window, "max_position_embeddings": context}
    model = oracle("Mistral", tmp_path / "hf", **settings)
    convert(tmp_path / "hf", tmp_path / "x.gguf")
    assert len([line for line in said() if "window" in line and "7 tokens" in line]) == told
    ids = ids_of(2, 23)
    decoders.same(call(ours(tmp_path / "x.gguf"), ids), decoders.logits_of(model, ids))


def test_a_llama_has_no_window_whatever_its_file_says(tmp_path, said):
    model, ids = oracle("Llama", tmp_path / "hf"), ids_of(2, 23)
    decoders.change_config(tmp_path / "hf", sliding_window=7)
    convert(tmp_path / "hf", tmp_path / "x.gguf")
    decoders.same(call(ours(tmp_path / "x.gguf"), ids), decoders.logits_of(model, ids))
    assert not said()


GEMMA3 = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
LOCAL = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
REFUSED = {
    "local rope": ("Gemma3", {**GEMMA3, "rope_parameters": LOCAL}, {}, "scaling in sliding-window layers"),
    "order": (
        "Gemma3",
        {**GEMMA3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        {},
        "layer_types",
    ),
    "biases": ("Qwen3", {"attention_bias": True, "head_dim": 16}, {}, "a bias of 'blk.0.attn"),
    "divisors": ("Qwen2", {"rope_parameters": LLAMA3}, {}, "divisor"),
    "routing": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16,
         "norm_topk_prob": False},
        {},
        "norm_topk_prob",
    ),
    "window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {},
        "use_sliding_window|layer_types",
    ),
    "caps": ("Gemma2", GEMMA3, {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
    "scale": ("Gemma2", {**GEMMA3, "query_pre_attn_scalar": 20}, {}, "query_pre_attn_scalar"),
    "part": ("Llama", {}, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "part of rope": (
        "Llama",
        {},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "act": ("Llama", {}, {"hidden_act": "gelu"}, "hidden_act"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_give_other_results_is_refused(tmp_path, case):
    kind, settings, changes, message = REFUSED[case]
    oracle(kind, tmp_path, **settings)
    decoders.change_config(tmp_path, **changes)
    error = (
        CheckpointFormatError if case == "caps" else UnsupportedModelError
    )  # no model has such a cap
    with pytest.raises(error, match=message):
        convert(tmp_path, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_layers_that_repeat_otherwise(tmp_path):
    kinds = [("full" if i == 2 else "sliding") + "_attention" for i in range(5)]
    model = oracle("Gemma3", tmp_path / "hf", **GEMMA3, num_hidden_layers=5, layer_types=kinds)
    convert(tmp_path / "hf", tmp_path / "x.gguf")
    key = load_weights(tmp_path / "x.gguf").metadata["gemma3.attention.sliding_window_pattern"]
    assert key == 3  # llama.cpp reads a number, and no list
    ids = ids_of(2, 23)
    decoders.same(call(ours(tmp_path / "x.gguf"), ids), decoders.logits_of(model, ids))


def test_a_pooling_that_no_file_can_say_is_told_of(tmp_path, said):
    oracle("Qwen3", tmp_path, head_dim=16)
    pooling = maxjax.models.pooling.Pooling(("mean", "max"), normalize=True)
    for name, content in maxjax.models.sentence_files.pooling_files(pooling, 64).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    convert(tmp_path, tmp_path / "x.gguf")
    assert any("pooled by mean, max" in line for line in said())
