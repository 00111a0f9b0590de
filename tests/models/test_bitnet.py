"""BitNet's quantised checkpoints against transformers: each kind of linear layer, each way of writing its weight."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.errors import CheckpointFormatError, UnsupportedModelError
from maxjax.models import build
from maxjax.nn.quantized import QuantizedLinear
from tests.models.decoders import call, greedy, ids_of
from tests.models.quantizers import write
from tests.oracles.recorded import recorded, torch, transformers

CONFIG = {
    "architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "rope_theta": 500000.0, "hidden_act": "relu2",
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA = {
    **CONFIG,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
}
KINDS = {
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
    "packed": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "floats": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "bitlinear": {"linear_class": "bitlinear"},
}


# torch compiles these layers where they are defined, and warns of a part of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def two_bits(values):
    """Rows of -1, 0 and 1 as bytes: the i-th quarter of the rows is in the i-th pair of bits."""
    quarters = np.split((values + 1).astype(np.uint8), 4)
    return sum((one << np.uint8(2 * i) for i, one in enumerate(quarters)), np.uint8(0))


def repository(directory, kind, config=CONFIG, **more):
    """A checkpoint in ``directory``, and its tensors."""
    rng = np.random.default_rng(0)
    hidden, inner, kv = 32, 40, 16
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "bitnet":
        norms |= {"self_attn.attn_sub_norm": hidden, "mlp.ffn_sub_norm": inner}
    found = {"model.embed_tokens.weight": rng.normal(0, 0.6, (96, hidden))}
    for i in range(3):
        for name, shape in shapes.items():
            weight, scale = rng.normal(0, 0.3, shape), rng.uniform(0.2, 0.4, 1)
            numbers = np.clip(np.round(weight / 0.25), -1, 1)
            found[f"model.layers.{i}.{name}.weight"] = {
                "online": weight, "packed": two_bits(numbers), "floats": numbers,
                "bitlinear": two_bits(numbers),
            }[kind]  # fmt: skip
            if kind != "online":
                factor = 1 / scale if kind == "bitlinear" else scale
                found[f"model.layers.{i}.{name}.weight_scale"] = factor
        for name, size in norms.items():
            found[f"model.layers.{i}.{name}.weight"] = 1 + rng.normal(0, 0.3, size)
    found["model.norm.weight"] = 0.3 + rng.normal(0, 0.1, hidden)
    tensors = {
        name: np.asarray(one, np.uint8 if one.dtype == np.uint8 else np.float32)
        for name, one in found.items()
    }
    settings = {"quant_method": "bitnet", **KINDS[kind], **more}
    return write(directory, {**config, "quantization_config": settings}, tensors), tensors


def oracle(directory):
    """transformers' model, with layers that are not compiled."""
    from importlib import import_module

    import_module("torch._dynamo").config.disable = True
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()


def close(found, expected):
    """Logits agree but where an input fell to the other side of a half, which moves it by 1/127."""
    assert 0.3 < np.std(expected) < 3
    apart = np.abs(np.asarray(found) - expected)
    assert np.mean(apart < 1e-4) > 0.9 and apart.max() < 0.1, (np.mean(apart < 1e-4), apart.max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["bitnet", "llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind, config, tmp_path):
    directory, tensors = repository(tmp_path, kind, config)
    ids = ids_of(2, 12)
    expected = recorded(lambda: oracle(directory)(torch.tensor(ids).long()).logits.detach().numpy())
    model, _ = maxjax.load(directory, tokenizer=False)
    layers = [m for _, m in model.named_modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 3 * 7
    whole = call(model, ids)
    close(whole, expected)
    cache = model.cache(2, 12)
    first, cache = model(ids[:, :7], cache)
    step, cache = model(ids[:, 7:8], cache)
    close(np.concatenate([first, step], 1), expected[:, :8])
    placed, _ = maxjax.load(directory, tokenizer=False, mesh=maxjax.make_mesh(model=2, data=2))
    close(call(placed, ids), expected)
    maxjax.save_pretrained(model, tmp_path / "saved")
    again, _ = maxjax.load(tmp_path / "saved", tokenizer=False)
    assert {n: np.asarray(a).tobytes() for n, a in again.state_dict().items()} == {
        n: a.tobytes() for n, a in tensors.items()
    }
    np.testing.assert_array_equal(call(again, ids), whole)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_opens_what_was_saved_and_writes_the_same_text(kind, tmp_path):
    directory, _ = repository(tmp_path / "theirs", kind)
    model, _ = maxjax.load(directory, tokenizer=False)
    maxjax.save_pretrained(model, tmp_path / "mine")
    ids = ids_of(1, 6)
    theirs, again = (oracle(one) for one in (directory, tmp_path / "mine"))
    one, other = (m(torch.tensor(ids).long()).logits.detach().numpy() for m in (theirs, again))
    np.testing.assert_array_equal(one, other)
    text = theirs.generate(torch.tensor(ids).long(), max_new_tokens=20, do_sample=False)[0, 6:]
    np.testing.assert_array_equal(greedy(model, [ids[0]], 20)[0], text.numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_that_of_transformers(kind, tmp_path):
    """For inputs that are far from halves, so that results agree in each number."""
    directory, _ = repository(tmp_path, kind)
    rng = np.random.default_rng(1)
    x = (rng.integers(-126, 127, (5, 32)) + rng.uniform(-0.3, 0.3, (5, 32))).astype(np.float32)
    x[:, 0] = 127
    x *= rng.uniform(1e-3, 10, (5, 1)).astype(np.float32)
    expected = recorded(
        lambda: oracle(directory).model.layers[1].mlp.gate_proj(torch.tensor(x)).detach().numpy()
    )
    model, _ = maxjax.load(directory, tokenizer=False)
    layer = model.unstack().model.layers[1].mlp.gate_proj
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    # The gradient of the input is that of a layer that does not round it.
    factors = np.cos(np.arange(40, dtype=np.float32))[None, :]
    gradient = jax.grad(lambda x: jnp.sum(layer(x) * factors))(jnp.asarray(x))
    plain = np.broadcast_to(factors @ np.asarray(layer.weight), x.shape)
    np.testing.assert_allclose(gradient, plain, rtol=1e-4, atol=1e-5)


def test_layers_that_are_not_converted(tmp_path):
    kept = ["lm_head", "model.layers.1.mlp", "o_proj"]
    directory, _ = repository(tmp_path, "online", modules_to_not_convert=kept)
    model, _ = maxjax.load(directory, tokenizer=False)
    layers = {
        name.removesuffix(".")
        for name, m in model.unstack().named_modules()
        if isinstance(m, QuantizedLinear)
    }
    assert len(layers) == 3 * 6 - 3 and "model.layers.2.mlp.up_proj" in layers
    assert not any(name.endswith("o_proj") or ".1.mlp." in name for name in layers)


def test_settings_that_are_refused(tmp_path):
    directory, _ = repository(tmp_path, "packed", use_rms_norm=True)
    with pytest.raises(UnsupportedModelError, match="use_rms_norm"):
        maxjax.load(directory, tokenizer=False)
    config = json.loads((directory / "config.json").read_text())
    for key, value in (("linear_class", "other"), ("quantization_mode", "sometimes")):
        changed = {"quant_method": "bitnet", **KINDS["packed"], key: value}
        weights = maxjax.graph.weights.load_weights(directory)
        with pytest.raises(UnsupportedModelError, match=value):
            build(weights, {**config, "quantization_config": changed})
    changed = {"quant_method": "bitnet", **KINDS["online"], "modules_to_not_convert": [1]}
    with pytest.raises(CheckpointFormatError, match="modules_to_not_convert"):
        build(
            maxjax.graph.weights.load_weights(directory), {**config, "quantization_config": changed}
        )
