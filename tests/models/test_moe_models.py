"""Mixtral and Qwen 3 with experts against transformers: its files, read by us."""

import json
import tempfile
import warnings
import zlib
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxjax.checkpoint import convert, save_pretrained
from maxjax.errors import CheckpointFormatError, CheckpointMismatchError, UnsupportedModelError
from maxjax.graph.weights import load_weights
from maxjax.models import MixtralConfig, Qwen3MoE, Qwen3MoEConfig, build
from tests.models import decoders
from tests.models.decoders import (
    HEADS,
    call,
    greedy,
    ids_of,
    last,
    like,
    logits_of,
    oracle,
    ours,
    same,
    sampled,
)
from tests.models.gguf import files as gguf_files
from tests.oracles.models import ask_of, opened, settings_of
from tests.oracles.recorded import torch

LENGTH = 24
KINDS = pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
# Numbers of experts that 4 devices do not divide, in layers of both kinds.
MORE = {
    "Mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 2},
    "Qwen3Moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 2,
    },
}  # fmt: skip
SAMPLE = [
    ("Mixtral", "gqa", False, True, 1),
    ("Mixtral", "mha", True, True, 4),
    ("Mixtral", "mqa", False, False, 4),
    ("Qwen3Moe", "mqa", True, True, 1),
    ("Qwen3Moe", "gqa", False, True, 4),
    ("Qwen3Moe", "mha", True, False, 1),
]


def short(values):
    return "-".join(map(str, values))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", SAMPLE, ids=short)
def test_logits(tmp_path, case):
    kind, heads, tied, stacked, devices = case
    settings = {"num_key_value_heads": HEADS[heads], "tie_word_embeddings": tied, **MORE[kind]}
    model, ids = oracle(kind, tmp_path, **settings), ids_of(2, LENGTH)
    mine = ours(tmp_path, stacked=stacked, devices=devices)
    same(call(mine, ids), logits_of(model, ids))


LAYERS = {
    "every second": {"decoder_sparse_step": 2},
    "listed": {"mlp_only_layers": [0, 2]},
    "shares as they are": {"norm_topk_prob": False},
    "no experts": {"num_experts": 0},
    "one of each": {"num_experts": 1, "num_experts_per_tok": 1},
    "window": {"use_sliding_window": True, "sliding_window": 5},
    "inner features do not divide": {"moe_intermediate_size": 28},
    "biases and scaling": {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
    },
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYERS)
def test_settings_of_qwen(tmp_path, name):
    settings = {**MORE["Qwen3Moe"], "mlp_only_layers": [], "num_hidden_layers": 4, **LAYERS[name]}
    model, ids = oracle("Qwen3Moe", tmp_path, **settings), ids_of(2, LENGTH)
    mine = ours(tmp_path, devices=8 if "divide" in name else 1)
    same(call(mine, ids), logits_of(model, ids))
    experts = "model.layers.{}.mlp.experts.down_proj"
    sparse = [experts.format(i) in model.shapes for i in range(mine.config.num_hidden_layers)]
    assert [*map(mine.config.is_sparse, range(mine.config.num_hidden_layers))] == sparse


@pytest.mark.extra
def test_window_of_mixtral(tmp_path):
    model, ids = oracle("Mixtral", tmp_path, sliding_window=5), ids_of(2, LENGTH)
    same(call(ours(tmp_path), ids), logits_of(model, ids))


@pytest.mark.extra
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kind, rows, chunk",
    [
        ("Mixtral", 3, 5),
        ("Qwen3Moe", 1, None),
        ("Qwen3Moe", 3, 5),
        ("Mixtral", 1, None),
    ],
)
def test_64_tokens_alone_and_in_a_batch_in_chunks(tmp_path, kind, rows, chunk):
    model, ids = oracle(kind, tmp_path, **MORE[kind]), ids_of(3, 13)
    prompts = [ids[0], ids[1, :4], ids[2, :1]][:rows]
    expected = decoders.generated(model, prompts, 64)
    np.testing.assert_array_equal(greedy(ours(tmp_path), prompts, 64, chunk), expected)


def test_padding_changes_nothing(tmp_path):
    oracle("Mixtral", tmp_path, **MORE["Mixtral"])
    mine, ids = ours(tmp_path), ids_of(2, 20)
    lengths = np.array([20, 6], np.int32)
    others = ids.copy()
    others[1, 6:] = ids_of(1, 14, seed=9)
    found, cache = last(mine, ids, mine.cache(2, 24), lengths)
    again, other = last(mine, others, mine.cache(2, 24), lengths)
    np.testing.assert_allclose(found, again, rtol=0, atol=1e-6)
    alone = call(mine, ids[1:, :6])[:, -1]
    np.testing.assert_allclose(found[1:], alone, rtol=0, atol=1e-5)


@pytest.mark.sampled(1)
@KINDS
def test_gradients_are_those_of_torch(tmp_path, kind):
    model, ids = oracle(kind, tmp_path, **MORE[kind]), ids_of(1, 9)
    mine = ours(tmp_path)

    def loss(model):
        return -jnp.mean(jax.nn.log_softmax(model(ids), -1)[..., 5])

    found = jax.jit(jax.grad(loss))(mine)

    def gradients(model):
        logits = model(torch.tensor(ids).long()).logits
        (-torch.log_softmax(logits, -1)[..., 5].mean()).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(folder)
            found = load_file(Path(folder, "model.safetensors"))
        return {name: sampled(gradient) for name, gradient in found.items()}

    expected = model.ask("gradients", gradients)
    state = {name: np.asarray(w) for name, w in found.raw_state_dict().items()}
    assert sorted(state) == sorted(expected)
    largest = max(np.abs(g).max() for g in expected.values())
    for name, gradient in expected.items():
        np.testing.assert_allclose(
            sampled(state[name]), gradient, rtol=0, atol=1e-3 * largest, err_msg=name
        )


# --- files -------------------------------------------------------------------------------------


@KINDS
def test_there_and_back(tmp_path, kind):
    model, ids = oracle(kind, tmp_path / "hf", **MORE[kind]), ids_of(2, LENGTH)
    mine = ours(tmp_path / "hf", devices=4)
    save_pretrained(mine, tmp_path / "ours")
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert sorted(written) == sorted(theirs) == sorted(mine.raw_state_dict())
    assert all(written[name].tobytes() == theirs[name].tobytes() for name in theirs)

    def again():
        found, info = opened(model.kind, tmp_path / "ours", output_loading_info=True)
        with torch.no_grad():
            logits = found(torch.tensor(ids).long()).logits.numpy()[..., :: decoders.EVERY]
        return [any(info.values()), logits.copy()]

    complains, logits = ask_of(tmp_path / "ours", "info and logits", again)
    assert not complains
    np.testing.assert_allclose(logits, logits_of(model, ids), atol=1e-5)


def in_memory(model):
    """The weights as transformers has them in memory: those of all experts in two tensors."""
    found, experts = dict(model.tensors), {}
    for name in model.tensors:
        before, is_expert, rest = name.partition(".experts.")
        if is_expert:
            number, part, _ = rest.split(".")
            layer = before.replace("block_sparse_moe", "mlp") + ".experts"
            experts.setdefault(layer, {}).setdefault(part, {})[int(number)] = found.pop(name)
        elif "block_sparse_moe" in name:
            found[name.replace("block_sparse_moe", "mlp")] = found.pop(name)
    for layer, parts in experts.items():
        parts = {
            part: np.stack([each[i] for i in range(len(each))]) for part, each in parts.items()
        }
        gate, up, down = (
            parts[part]
            for part in (
                ("w1", "w3", "w2") if "w1" in parts else ("gate_proj", "up_proj", "down_proj")
            )
        )
        found[f"{layer}.gate_up_proj"] = np.concatenate([gate, up], 1)
        found[f"{layer}.down_proj"] = down
    if model.config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]

    def checksums(model):
        state = {name: weight.numpy() for name, weight in model.state_dict().items()}
        return {name: zlib.crc32(np.ascontiguousarray(state[name])) for name in sorted(state)}

    sums = {name: zlib.crc32(np.ascontiguousarray(found[name])) for name in sorted(found)}
    assert sums == model.ask("checksums in memory", checksums)
    return found


@pytest.mark.sampled(1)
@KINDS
def test_experts_of_a_layer_in_one_tensor(tmp_path, kind):
    model = oracle(kind, tmp_path, **MORE[kind])
    apart = ours(tmp_path).state_dict()
    state = in_memory(model)
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    for found in (ours(tmp_path), ours(tmp_path, devices=4)):
        found = found.state_dict()
        assert sorted(found) == sorted(apart)
        assert all(np.array_equal(found[name], apart[name]) for name in apart)
    mine = build(load_weights(tmp_path))
    mine.load_state_dict(state)  # arrays of the host
    assert all(np.array_equal(found, apart[n]) for n, found in mine.state_dict().items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("inner", [2, 4, 6, 8])  # of one size for both orders of a tensor, too
def test_published_files_of_qwen3_vl_have_experts_in_the_other_order(inner):
    config = Qwen3MoEConfig(
        16,
        8,
        16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=inner,
    )
    model = Qwen3MoE(config)
    rng = np.random.default_rng(inner)
    state = {n: rng.normal(size=w.shape).astype("f") for n, w in model.state_dict().items()}
    mlp = "model.layers.0.mlp.experts."
    each = [
        [state.pop(f"{mlp}{x}.{k}_proj.weight") for k in ("gate", "up", "down")] for x in range(3)
    ]
    stacks = {
        f"{mlp}gate_up_proj": np.stack([np.concatenate(one[:2]) for one in each]),
        f"{mlp}down_proj": np.stack([one[2] for one in each]),
    }
    # In memory, and in files, where they are also within a multimodal model.
    turned = {name: np.ascontiguousarray(one.swapaxes(1, 2)) for name, one in stacks.items()}
    inside = {
        name.replace("model.", "model.language_model.", 1): one
        for name, one in (state | turned).items()
    }
    for given in (state | stacks, state | turned, inside):
        model.load_state_dict(given)
        found = {name: np.asarray(weight) for name, weight in model.state_dict().items()}
        for x, one in enumerate(each):
            for kind, value in zip(("gate", "up", "down"), one, strict=True):
                np.testing.assert_array_equal(found[f"{mlp}{x}.{kind}_proj.weight"], value)


def test_wrong_stacks_are_named(tmp_path):
    model = oracle("Mixtral", tmp_path, **MORE["Mixtral"])
    state = in_memory(model)
    mine = build(load_weights(tmp_path))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for wrong in (state[name][0], state[name][:, 1:], state[name][:0]):
        with pytest.raises(CheckpointFormatError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
            mine.load_state_dict({**state, name: wrong})
    for wrong in (state[name][:2], np.concatenate([state[name]] * 2)):
        with pytest.raises(ValueError, match=r"layers\.1\.block_sparse_moe\.experts\."):
            mine.load_state_dict({**state, name: wrong})
    with pytest.raises(CheckpointFormatError, match=r"experts\.0\.w1"):
        mine.load_state_dict({**state, "model.layers.1.block_sparse_moe.experts.0.w1.weight": 0})


def test_another_number_of_experts_than_the_configuration_says(tmp_path):
    oracle("Mixtral", tmp_path, **MORE["Mixtral"])
    decoders.change_config(tmp_path, num_local_experts=4)
    with pytest.raises(CheckpointMismatchError, match=r"experts\.3\."):
        ours(tmp_path)


@pytest.mark.sampled(1)
@KINDS
def test_gguf_of_the_same_weights(tmp_path, kind):
    settings = {**MORE[kind], "mlp_only_layers": []}
    oracle(kind, tmp_path / "hf", **settings)
    convert(tmp_path / "hf", tmp_path / "x.gguf")
    names = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert "blk.1.ffn_gate_exps.weight" in names
    ids = ids_of(2, LENGTH)
    found, expected = (call(ours(tmp_path / path), ids) for path in ("x.gguf", "hf"))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case, fused", [("mixtral", False), ("qwen3moe", True)])
def test_gguf_as_llama_cpp_writes_it(tmp_path, case, fused):
    model = gguf_files.model(case)
    tensors = gguf_files.checkpoint(model, tmp_path / "hf")
    path = gguf_files.write(tmp_path / "x.gguf", case, model, tensors, fused=fused)
    ids = ids_of(2, LENGTH) % 64
    np.testing.assert_allclose(call(ours(path), ids), model.logits(ids), rtol=0, atol=1e-5)


@pytest.mark.sampled(1)
@KINDS
def test_packed_experts_equal_decoding_first(tmp_path, kind):
    wide = {"hidden_size": 64, "intermediate_size": 64}
    settings = {**MORE[kind], **wide, "mlp_only_layers": []}
    if kind == "Qwen3Moe":
        settings["moe_intermediate_size"] = 32
    oracle(kind, tmp_path / "hf", **settings)
    convert(tmp_path / "hf", tmp_path / "q8.gguf", quantize="q8_0")
    ids = ids_of(2, LENGTH)
    packed = ours(tmp_path / "q8.gguf")
    kinds = {
        name.split(".experts.")[1].split(".")[1]: weight.quantization_encoding
        for name, weight in packed.raw_state_dict().items()
        if ".experts." in name
    }
    assert len(kinds) == 3 and all(kinds.values())
    decoded = ours(tmp_path / "q8.gguf", dtype="float32")
    expected = call(decoded, ids)
    same(call(packed, ids), np.asarray(expected), atol=2e-5)
    same(call(ours(tmp_path / "q8.gguf", devices=2), ids), np.asarray(expected), atol=2e-5)


def test_shares_that_llama_cpp_would_change_are_not_written(tmp_path):
    settings = {**MORE["Qwen3Moe"], "mlp_only_layers": [], "norm_topk_prob": False}
    oracle("Qwen3Moe", tmp_path / "hf", **settings)
    with pytest.raises(UnsupportedModelError, match="norm_topk_prob"):
        convert(tmp_path / "hf", tmp_path / "x.gguf")


def test_bfloat16(tmp_path):
    model, ids = oracle("Mixtral", tmp_path, **MORE["Mixtral"]), ids_of(2, LENGTH)
    weights = load_weights(tmp_path)
    mine = build(weights, dtype="bfloat16")
    mine.load_state_dict(weights, cast=True)
    expected = logits_of(model, ids)
    found = np.asarray(call(mine, ids))
    assert found.dtype == np.float32
    assert np.median(np.abs(like(found, expected) - expected)) < 0.1


# --- settings ----------------------------------------------------------------------------------

RAW = {
    "vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 3,
    "num_attention_heads": 32,
}  # fmt: skip


def test_defaults_of_mixtral_are_those_of_transformers():
    config, other = MixtralConfig.from_dict(RAW), settings_of("MixtralConfig", RAW)
    for name in (
        "num_key_value_heads num_local_experts num_experts_per_tok max_position_embeddings rms_norm_eps"
        " sliding_window hidden_act tie_word_embeddings"
    ).split():
        assert getattr(config, name) == getattr(other, name), name
    assert config.rope_parameters.theta == other.rope_parameters["rope_theta"]
    found = MixtralConfig.from_dict({**RAW, "num_key_value_heads": None, "num_experts": 4})
    assert found.num_key_value_heads == 32 and found.num_local_experts == 4


def test_defaults_of_qwen_are_those_of_transformers():
    config, other = Qwen3MoEConfig.from_dict(RAW), settings_of("Qwen3MoeConfig", RAW)
    for name in (
        "num_key_value_heads num_experts_per_tok max_position_embeddings rms_norm_eps sliding_window"
        " hidden_act tie_word_embeddings moe_intermediate_size norm_topk_prob"
    ).split():
        assert getattr(config, name) == getattr(other, name), name
    assert config.num_experts == other.num_local_experts
    assert config.rope_parameters.theta == other.rope_parameters["rope_theta"]
    assert Qwen3MoEConfig.from_dict({**RAW, "num_local_experts": 16}).num_experts == 16


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"decoder_sparse_step": "1"}, "decoder_sparse_step"),
        ({"mlp_only_layers": 1}, "mlp_only_layers"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers"),
        ({"num_experts": "8"}, "num_experts"),
        ({"num_experts": -1}, "num_experts"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ],
)
def test_what_is_wrong_is_named(settings, name):
    with pytest.raises(CheckpointFormatError, match=name):
        Qwen3MoEConfig.from_dict({**RAW, **settings})


def test_config_json_stays_what_it_was(tmp_path):
    oracle("Qwen3Moe", tmp_path / "hf", **MORE["Qwen3Moe"])
    save_pretrained(ours(tmp_path / "hf"), tmp_path / "ours")
    before, after = (
        json.loads((tmp_path / where / "config.json").read_text()) for where in ("hf", "ours")
    )
    assert after == before
