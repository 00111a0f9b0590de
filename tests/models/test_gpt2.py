"""GPT-2 against transformers: small random models in its files, read by us."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from safetensors.numpy import save_file

import maxjax
from maxjax.errors import CheckpointFormatError, UnsupportedModelError, UserInputError
from maxjax.graph.placement.device_major import DeviceMajor
from maxjax.graph.weights import load_weights
from maxjax.models import GPT2, GPT2Config, build
from scripts.sharding_product import compiled
from tests.models import decoders
from tests.models.decoders import (
    VOCAB,
    call,
    greedy,
    ids_of,
    last,
    like,
    logits_of,
    ours,
    same,
    sampled,
)
from tests.oracles.models import ask_of, opened, settings_of
from tests.oracles.recorded import torch

LENGTH = 24
POSITIONS = 128
SMALL = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def oracle(directory, seed=0, **settings):
    return decoders.gpt2_oracle(directory, seed, **{**SMALL, **settings})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("tied", "stacked", "devices"),
    [
        (True, True, 1), (False, False, 4), (False, True, 8), (True, False, 1), (False, True, 1),
        (True, True, 4), (True, True, 2),
    ],
)  # fmt: skip
def test_logits(tmp_path, tied, stacked, devices):
    model = oracle(tmp_path, tie_word_embeddings=tied, n_head=max(4, devices))
    ids = ids_of(2, LENGTH)
    mine = ours(tmp_path, stacked=stacked, devices=devices)
    same(call(mine, ids), logits_of(model, ids))
    prompts = [ids[0], ids[1, :9]]
    np.testing.assert_array_equal(greedy(mine, prompts, 8), decoders.generated(model, prompts, 8))
    if devices > 1:
        attn = mine.transformer.h[0].attn
        assert tuple(attn.c_attn.weight.sharding.spec) == (None, "model")
        assert tuple(attn.c_proj.weight.sharding.spec) == ("model", None)
        assert mine.cache(2, 8).keys.sharding.spec[2] == "model"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"n_inner": 37, "vocab_size": 91, "n_head": 2},
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        {"scale_attn_weights": False, "activation_function": "relu", "layer_norm_epsilon": 0.1},
        {"n_embd": 36, "n_head": 4},
    ],
    ids=["odd sizes", "inverse layer", "unscaled", "odd heads"],
)
def test_settings(tmp_path, settings):
    model = oracle(tmp_path, **settings)
    ids = ids_of(2, LENGTH) % settings.get("vocab_size", VOCAB)
    mine = ours(tmp_path, devices=4 if "n_inner" in settings else 1)
    same(call(mine, ids), logits_of(model, ids))
    prompts = [ids[0, :9], ids[1, :3]]
    np.testing.assert_array_equal(greedy(mine, prompts, 4), decoders.generated(model, prompts, 4))


@pytest.mark.extra
@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunk", [None, 5], ids=["whole", "chunked"])
def test_64_tokens_of_rows_of_different_length(tmp_path, chunk):
    model = oracle(tmp_path)
    ids = ids_of(3, 13)
    prompts = [ids[0], ids[1, :4], ids[2, :1]]
    found = greedy(ours(tmp_path), prompts, 64, chunk)
    np.testing.assert_array_equal(found, decoders.generated(model, prompts, 64))


@pytest.mark.extra
def test_64_tokens_of_one_text(tmp_path):
    model = oracle(tmp_path, seed=1)
    prompt = [ids_of(1, 7)[0]]
    found = greedy(ours(tmp_path), prompt, 64)
    np.testing.assert_array_equal(found, decoders.generated(model, prompt, 64))


def test_gradients(tmp_path):
    model = oracle(tmp_path, n_layer=2)
    ids = ids_of(2, 8)
    loss = lambda m: jnp.mean(jax.nn.logsumexp(m(ids), axis=-1))
    found = jax.jit(jax.grad(loss))(ours(tmp_path)).state_dict()

    def gradients(model):
        torch.logsumexp(model(torch.tensor(ids).long()).logits, -1).mean().backward()
        grads = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
        return {name: sampled(gradient) for name, gradient in grads.items()}

    expected = model.ask("gradients", gradients)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(sampled(found[name]), gradient, atol=1e-5, err_msg=name)


def test_bfloat16(tmp_path):
    model = oracle(tmp_path)
    weights = load_weights(tmp_path)
    mine = build(weights, dtype="bfloat16")
    mine.load_state_dict(weights, cast=True)
    ids = ids_of(2, LENGTH)
    found = call(mine, ids)
    assert found.dtype == jnp.float32 and mine.cache(1, 4).keys.dtype == jnp.bfloat16
    expected = logits_of(model, ids)
    assert np.abs(like(found, expected) - expected).mean() < 0.05
    one, _ = last(mine, ids, mine.cache(2, LENGTH), np.full(2, LENGTH, np.int32))
    np.testing.assert_allclose(np.asarray(one), np.asarray(found)[:, -1], atol=0.15)


# --- the end of the learned positions ------------------------------------------------------------


@pytest.mark.extra
def test_a_text_that_is_too_long_is_refused(tmp_path):
    oracle(tmp_path, n_positions=8)
    model = ours(tmp_path)
    with pytest.raises(UserInputError, match=r"9 tokens .* 8 positions"):
        model(ids_of(1, 9))
    with pytest.raises(UserInputError, match=r"9 tokens .* 8 positions"):
        jax.eval_shape(call, model, ids_of(1, 9))
    cache = model.cache(2, 16)
    with pytest.raises(UserInputError, match=r"9 tokens .* 8 positions"):
        model(ids_of(2, 12), cache, lengths=np.array([9, 3]))
    _, cache = model(ids_of(2, 12), cache, lengths=np.array([8, 3]), last=True)
    with pytest.raises(UserInputError, match=r"9 tokens"):
        model(ids_of(2, 1), cache)


def test_inside_jit_only_tokens_beyond_are_nan(tmp_path):
    model = oracle(tmp_path, n_positions=8)
    mine, ids = ours(tmp_path), ids_of(2, 12)
    expected = logits_of(model, ids[:, :8])
    run = jax.jit(lambda m, ids, cache, n: m(ids, cache, lengths=n))
    found, cache = run(mine, ids, mine.cache(2, 16), np.array([12, 5]))
    same(found[0, :8], expected[0])
    same(found[1, :5], expected[1, :5])
    assert np.isnan(np.asarray(found[0, 8:])).all()
    one, _ = last(mine, ids[:, 5:6], cache, np.array([1, 1]))
    assert np.isnan(np.asarray(one[0])).all()
    same(one[1], expected[1, 5])
    ends, _ = last(mine, ids, mine.cache(2, 16), np.array([9, 8]))
    assert np.isnan(np.asarray(ends[0])).all()
    same(ends[1], expected[1, 7])


# --- files ---------------------------------------------------------------------------------------


def tensors_of(directory):
    from safetensors.numpy import load_file

    return load_file(directory / "model.safetensors")


def test_the_checkpoint_comes_back_as_it_was(tmp_path):
    model = oracle(tmp_path / "a")
    mine = ours(tmp_path / "a", devices=2)
    maxjax.save_pretrained(mine, tmp_path / "b")
    before, after = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert before.keys() == after.keys() == mine.state_dict().keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    ids = ids_of(1, 8)

    def again():
        with torch.no_grad():
            return opened(model.kind, tmp_path / "b")(torch.tensor(ids).long()).logits.numpy()

    same(ask_of(tmp_path / "b", "logits", again), model.logits(ids), atol=1e-5)


def test_names_without_prefix_masks_and_a_tied_head_in_the_file(tmp_path):
    from safetensors.numpy import save_file

    model = oracle(tmp_path)
    tensors = {k.removeprefix("transformer."): v for k, v in tensors_of(tmp_path).items()}
    mask = np.tril(np.ones((1, 1, POSITIONS, POSITIONS), np.float32))
    tensors |= {"h.0.attn.bias": mask, "h.1.attn.masked_bias": np.full(1, -1e4, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    decoders.change_config(tmp_path, architectures=["GPT2Model"])
    mine, ids = ours(tmp_path), ids_of(1, LENGTH)
    same(call(mine, ids), logits_of(model, ids))
    assert mine.hf_config["architectures"] == ["GPT2LMHeadModel"]
    assert "h.0.attn.bias" not in " ".join(mine.state_dict())


@pytest.mark.parametrize(
    "tied", [pytest.param(False, marks=pytest.mark.extra), True], ids=["untied", "tied"]
)
def test_gguf_of_the_same_weights(tmp_path, tied):
    from maxjax.checkpoint import convert

    model = oracle(tmp_path / "hf", tie_word_embeddings=tied, n_layer=2)
    convert(tmp_path / "hf", tmp_path / "x.gguf")
    ids = ids_of(2, LENGTH)
    found = call(ours(tmp_path / "x.gguf"), ids)
    same(found, logits_of(model, ids))
    np.testing.assert_array_equal(found, call(ours(tmp_path / "hf"), ids))


def test_packed_weights_are_decoded_first(tmp_path):
    from maxjax.checkpoint import convert

    oracle(tmp_path / "hf", n_layer=2)
    convert(tmp_path / "hf", tmp_path / "x.gguf", quantize="q8_0")
    ids = ids_of(2, 8)
    weights = load_weights(tmp_path / "x.gguf")
    decoded = build(weights, dtype="float32")
    decoded.load_state_dict(weights, cast=True)
    packed = ours(tmp_path / "x.gguf")
    assert packed.transformer.wte.weight.quantization_encoding is not None
    same(call(packed, ids), np.asarray(call(decoded, ids)), atol=2e-5)


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        ({"n_head": 5}, CheckpointFormatError, "n_head"),
        ({"n_positions": 0}, CheckpointFormatError, "n_positions"),
        ({"n_inner": "4"}, CheckpointFormatError, "n_inner"),
        ({"activation_function": "sine"}, CheckpointFormatError, "activation_function"),
        ({"scale_attn_weights": 1}, CheckpointFormatError, "scale_attn_weights"),
        ({"add_cross_attention": True}, UnsupportedModelError, "add_cross_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModelError, "gptq"),
    ],
)
def test_wrong_values_are_named(settings, error, name):
    with pytest.raises(error, match=name):
        GPT2Config.from_dict({**SMALL, **settings})


def test_settings_of_other_decoders_mean_nothing():
    other = {"rope_theta": 3.0, "sliding_window": 4, "num_key_value_heads": 1, "head_dim": 64}
    assert GPT2Config.from_dict({**SMALL, **other}) == GPT2Config.from_dict(SMALL)


def test_defaults_and_spellings_are_those_of_transformers(tmp_path):
    mine, other = GPT2Config.from_dict({}), settings_of("GPT2Config")
    assert (mine.vocab_size, mine.hidden_size) == (other.vocab_size, other.n_embd)
    assert (mine.num_hidden_layers, mine.num_attention_heads) == (other.n_layer, other.n_head)
    assert mine.max_position_embeddings == mine.n_positions == other.n_positions
    assert mine.layer_norm_epsilon == other.layer_norm_epsilon
    assert mine.activation_function == other.activation_function
    assert mine.tie_word_embeddings == other.tie_word_embeddings
    new = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3}
    old = {"n_embd": 8, "n_head": 2, "n_layer": 3}
    assert GPT2Config.from_dict(new) == GPT2Config.from_dict(json.loads(json.dumps(old)))


@pytest.mark.extra
def test_a_model_made_in_code():
    config = GPT2Config(50, 16, n_layer=2, n_head=2, n_positions=9)
    model = maxjax.init(GPT2(config), jax.random.key(0))
    logits, cache = last(model, np.ones((1, 9), np.int32), model.cache(1, 9), np.array([9]))
    assert np.isfinite(np.asarray(logits)).all() and int(cache.lengths[0]) == 9
    assert model.unstack().transformer.h[1].attn is model.model.layers[1].attn


MESHES = ({"model": 4}, {"data": 2, "model": 4}, {"fsdp": 2, "model": 2})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_c_attn_is_stored_in_the_order_of_the_devices(tmp_path, sizes, stacked, kind):
    config = GPT2Config.from_dict({**SMALL, "n_layer": 1})
    one = maxjax.init(GPT2(config, dtype="bfloat16"), jax.random.key(1))
    values = {name: np.asarray(value) for name, value in one.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")

    def read(model):
        with load_weights(tmp_path / "model.safetensors") as weights:
            model.load_state_dict(weights, cast=True)
        return model

    mesh = maxjax.make_mesh(**sizes, axis_types=kind)
    want = read(GPT2(config))
    placed = read(GPT2(config, stacked=stacked).to(mesh))
    for name, value in placed.state_dict().items():
        np.testing.assert_array_equal(value, values[name].astype(np.float32))
    ids = ids_of(2, LENGTH)
    np.testing.assert_allclose(call(placed, ids), call(want, ids), atol=1e-5)
    weight = placed.transformer.h[0].attn.c_attn.weight
    n = sizes["model"]
    assert weight.spec.layout == DeviceMajor(n, (32, 32, 32), 1)
    if "fsdp" not in sizes:  # the rows of the table, and two of the block
        assert sorted(one.kind for one in compiled(call, placed, ids)) == ["all-reduce"] * 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [True, False])
def test_a_table_that_is_split_by_columns_leaves_the_layers_whole(tied):
    config = GPT2Config.from_dict({**SMALL, "vocab_size": 131, "tie_word_embeddings": tied})
    mesh = maxjax.make_mesh(model=4, devices=jax.devices()[:4])
    model = maxjax.init(GPT2(config, stacked=False).to(mesh), jax.random.key(0))
    found = sorted(one.kind for one in compiled(call, model, ids_of(2, LENGTH)))
    # The rows of the table, two sums a layer, the logits.
    assert found == ["all-gather"] + ["all-reduce"] * (2 * config.num_hidden_layers + 1)


def test_export_for_any_length():
    """Where the length is not known there is no check of it, and tokens beyond the positions are NaN."""
    config = {k: v for k, v in SMALL.items() if not k.endswith("_id")}
    model = GPT2(
        GPT2Config.from_dict({"model_type": "gpt2", **config, "n_positions": 8, "n_layer": 2})
    )
    model = maxjax.init(model, jax.random.key(0))
    kind = jax.ShapeDtypeStruct(export.symbolic_shape("b, t"), jnp.int32)
    exported = export.export(call)(model, kind)
    np.testing.assert_allclose(
        exported.call(model, ids_of(1, 5)), call(model, ids_of(1, 5)), atol=1e-5
    )
    assert np.isnan(exported.call(model, ids_of(1, 9))[0]).any(-1).tolist() == [False] * 8 + [True]
