"""A decoder in MAX's style over a paged cache, against our own decoders of the same weights."""

import dataclasses

import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, ShardingStrategy
from maxjax.graph.weights import WeightData
from maxjax.models import build
from tests.max_style import ragged

CONFIG = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
PAGE, LENGTHS, STEPS = 4, (7, 3), 2


TWO = [DeviceRef.CPU(0), DeviceRef.CPU(1)]


@pytest.mark.sampled
@pytest.mark.parametrize("devices", [[DeviceRef.CPU()], TWO], ids=["one", "two"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_prompts_and_tokens_after_them_are_those_of_our_decoders(kind, devices):
    params = ragged.cache_of(CONFIG, PAGE, devices)
    several = len(devices) > 1
    make = ragged.distributed_decoder if several else ragged.decoder
    model = make(CONFIG, params, qk_norm=kind == "qwen3")
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(name.endswith("norm.weight"), 0.3, [int(d) for d in weight.shape]).astype(np.float32)
        for name, weight in model.raw_state_dict().items()
    }  # fmt: skip
    model.load_state_dict(weights)
    theirs = {
        ("" if name.startswith("lm_head") else "model.") + name: w for name, w in weights.items()
    }
    settings = CONFIG | {"model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"]}
    whole = build(theirs, settings)
    whole.load_state_dict(theirs)
    texts = [rng.integers(0, 40, n + STEPS) for n in LENGTHS]
    rows = np.stack([np.pad(text, (0, max(LENGTHS) + STEPS - len(text))) for text in texts])
    wanted = np.asarray(whole(rows))  # no token sees the padding after it
    program = InferenceSession().load(
        (ragged.distributed_graph_of if several else ragged.graph_of)(model),
        weights_registry=model.state_dict(),
    )
    # What was never written is no number: reading it is seen.
    pages = [np.full((6, *params.shape_per_block), np.nan, np.float32) for _ in devices]
    signals = [np.zeros(0, np.uint8)] * len(devices) if several else []
    table = np.array([[4, 1, 2], [3, 0, 5]], np.uint32)
    done = [0, 0]
    for counts in (LENGTHS, *[(1, 1)] * STEPS):
        parts = [t[d : d + n] for t, d, n in zip(texts, done, counts, strict=True)]
        offsets = np.cumsum([0, *counts]).astype(np.uint32)
        of_cache = (
            np.array(done, np.uint32), table, np.array([max(counts)], np.uint32), np.array([max(done)], np.uint32),
        )  # fmt: skip
        caches = [one for cache in pages for one in (cache, *of_cache)]
        last, logits, _, *state = program.execute(
            np.concatenate(parts), offsets, np.ones(1, np.int64), *signals, *caches
        )
        pages = state[-len(devices) :]
        want = [w[d : d + n] for w, d, n in zip(wanted, done, counts, strict=True)]
        np.testing.assert_allclose(logits.to_numpy(), np.concatenate(want), rtol=0, atol=2e-5)
        np.testing.assert_allclose(last.to_numpy(), [w[-1] for w in want], rtol=0, atol=2e-5)
        done = [d + n for d, n in zip(done, counts, strict=True)]


@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
def test_each_device_has_its_part_and_computes_there(stacked):
    one, two = (
        ragged.cache_of(CONFIG, PAGE, [DeviceRef.CPU()]),
        ragged.cache_of(CONFIG, PAGE, TWO),
    )
    assert one.shape_per_block[3] == 2 and two.shape_per_block[3] == 1
    model = ragged.distributed_decoder(CONFIG, two, False, stacked)
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(0, 0.3, [int(d) for d in weight.shape]).astype(np.float32)
        for name, weight in model.raw_state_dict().items()
    }
    model.load_state_dict(weights)
    block, w = model.layers[0], {n[9:]: v for n, v in weights.items() if n.startswith("layers.0.")}
    q, k = 4 * 8, 2 * 8  # rows of all queries; of all keys
    names = ("q_proj", "k_proj", "v_proj")
    rows = (
        np.split(w["self_attn.qkv_proj.weight"], [q, q + k])
        if stacked
        else [w[f"self_attn.{n}.weight"] for n in names]
    )
    halves = zip(
        TWO, block.self_attn.list_of_attentions, block.mlp_shards, block.input_layernorm_shards,
        strict=True,
    )  # fmt: skip
    for i, (device, attention, mlp, norm) in enumerate(halves):

        def half(array, axis, i=i):
            return np.split(array, 2, axis)[i]

        want = [half(part, 0) for part in rows]
        held = attention.qkv_proj
        found = (
            [(held.weight, np.concatenate(want))]
            if stacked
            else [(getattr(held, n).weight, part) for n, part in zip(names, want, strict=True)]
        )
        found += [
            (attention.o_proj.weight, half(w["self_attn.o_proj.weight"], 1)),
            (mlp.gate_proj.weight, half(w["mlp.gate_proj.weight"], 0)),
            (mlp.down_proj.weight, half(w["mlp.down_proj.weight"], 1)),
            (norm.weight, w["input_layernorm.weight"]),
        ]
        for weight, part in found:
            np.testing.assert_array_equal(weight.value, part)
            assert weight.device == device and weight.value.devices() == {device.to_jax()}
    with pytest.raises(ValueError, match="2 KV heads do not divide over 3"):
        block.self_attn.sharding_strategy = ShardingStrategy.tensor_parallel(3)
    with pytest.raises(ValueError, match="tensor_parallel or replicate"):
        block.self_attn.sharding_strategy = ShardingStrategy.rowwise(2)


def test_an_adapter_replaces_fields_of_weights():
    data = WeightData.from_numpy(np.ones((2, 3), np.uint8), "old")
    new = dataclasses.replace(data, name="new", dtype=DType.float8_e8m0fnu)
    assert (new.name, new.dtype, new.shape) == ("new", DType.float8_e8m0fnu, data.shape)
    assert (data.name, new.data is data.data) == ("old", True)
