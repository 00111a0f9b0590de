"""Layers of multi-token prediction in files: left out unless they are asked for, and saved as they were."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxjax
from maxjax.checkpoint import convert
from maxjax.errors import CheckpointMismatchError, UserInputError
from maxjax.models import DeepseekV3, DeepseekV3Config, GLM4MoE, GLM4MoEConfig, Llama, LlamaConfig
from maxjax.nn.quantized import QuantizedLinear
from tests.fill import filled
from tests.models.gguf import files
from tests.models.gguf.test_deepseek import rewritten
from tests.models.quantizers import fp8, write

WEIGHTS = "model.safetensors"
EXPERTS = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
PARTS = (
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    "self_attn.kv_b_proj",
    "mlp.experts.3.up_proj",
)


def made(mtp=True):
    model = DeepseekV3(DeepseekV3Config(60, 64, 96, **EXPERTS, **LATENT))
    if mtp:
        model.make_mtp()
    return filled(model)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint as DeepSeek's are: with copies of the table and the head, and here with a second such layer."""
    folder = tmp_path_factory.mktemp("predicting")
    maxjax.save_pretrained(made(), folder)
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"]
    tensors["model.layers.3.eh_proj.weight"] = np.ones((3, 5), np.float16)
    tensors["model.layers.3.mlp.gate.weight"] = np.ones((5, 3), np.float16)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / "maxjax_digests.json").unlink()
    return folder


def test_names_are_those_of_the_files(source):
    found = load_file(source / WEIGHTS)
    for part in PARTS:
        assert f"model.layers.2.{part}.weight" in found
    assert not [name for name in found if "mtp" in name]
    assert json.loads((source / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("mtp", [True, False])
def test_a_loaded_and_saved_checkpoint_is_the_same(source, tmp_path, mtp):
    model, _ = maxjax.load(source, mtp=mtp)
    assert (model.mtp is not None) == mtp
    left = {
        name for name in load_file(source / WEIGHTS) if "layers.2." in name or "layers.3." in name
    }
    loaded = {f"model.layers.2.{n[4:]}" for n in model.raw_state_dict() if n.startswith("mtp.")}
    assert set(model.unloaded.names) == left - loaded
    assert loaded >= {f"model.layers.2.{part}.weight" for part in PARTS if mtp}
    assert mtp or not loaded
    maxjax.save_pretrained(model, tmp_path)
    first, second = (load_file(folder / WEIGHTS) for folder in (source, tmp_path))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype and value.tobytes() == second[name].tobytes(), name
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path)]
    assert configs[0] == configs[1]


def test_weights_are_those_of_the_model_in_code(source):
    model, wanted = maxjax.load(source, mtp=True)[0], made().state_dict()
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    # The model itself is that without the layer.
    plain, ids = maxjax.load(source)[0], np.arange(9)[None]
    np.testing.assert_array_equal(plain(ids), model(ids))


@pytest.mark.parametrize("axis", ["expert", "model"])
def test_a_mesh(source, axis):
    mesh = jax.make_mesh((2,), (axis,), devices=jax.devices()[:2])
    model, _ = maxjax.load(source, mesh=mesh, mtp=True)
    found, wanted = model.state_dict(), made().state_dict()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    weights = model.raw_state_dict()
    shards = {name: weights[f"mtp.{name}.weight"].sharding.shard_shape for name in PARTS}
    assert shards["eh_proj"]((64, 128)) == (64, 128)
    split = "mlp.experts.3.up_proj" if axis == "expert" else "self_attn.kv_b_proj"
    assert np.prod(weights[f"mtp.{split}.weight"].sharding.num_devices) == 2
    if axis == "model":  # the other one divides texts among devices
        same_texts(model)


def same_texts(model):
    """Speculation runs, and changes no text."""
    found = []
    for how in ({}, {"speculation": "mtp"}):
        with maxjax.Engine(model, slots=2, exact=True, **how) as engine:
            answer = engine.submit([1, 2, 3], max_new_tokens=9, eos_ids=())
            found.append(answer.result().tokens)
            if how:
                assert engine.stats().guessed_tokens > 0
    assert found[0] == found[1]


def test_fp8_blocks(source, tmp_path):
    """As DeepSeek's own files: all projections are quantised, the norms and the router are not."""
    case, rng = fp8(), np.random.default_rng(0)
    tensors, values = {}, {}
    for name, value in load_file(source / WEIGHTS).items():
        if name.endswith("_proj.weight") and "layers.3." not in name:
            stem = name.removesuffix("weight")
            parts, kept = case.quantise(value.astype(np.float64), rng)
            tensors |= {stem + part: one for part, one in parts.items()}
            values[name] = kept.astype(np.float32)
        else:
            tensors[name] = values[name] = value
    config = json.loads((source / "config.json").read_text())
    write(tmp_path / "fp8", {**config, "quantization_config": case.config}, tensors)
    write(tmp_path / "floats", config, values)
    model, _ = maxjax.load(tmp_path / "fp8", mtp=True)
    wanted, _ = maxjax.load(tmp_path / "floats", mtp=True)
    assert isinstance(model.mtp.eh_proj, QuantizedLinear)
    assert isinstance(model.mtp.self_attn.o_proj, QuantizedLinear)
    x = np.random.default_rng(1).standard_normal((4, 128), np.float32)
    np.testing.assert_allclose(model.mtp.eh_proj(x), wanted.mtp.eh_proj(x), atol=1e-4)
    same_texts(model)
    maxjax.save_pretrained(model, tmp_path / "again")
    again = maxjax.load(tmp_path / "again", mtp=True)[0].state_dict()
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_gguf(tmp_path):
    """As llama.cpp's converter writes GLM-4.5: the layer is counted among the layers, as ``blk.N`` with ``nextn``."""
    model = GLM4MoE(GLM4MoEConfig(96, 64, 96, num_key_value_heads=2, **EXPERTS))
    maxjax.save_pretrained(filled(model), tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "plain.gguf")
    _, arrays = files.read(tmp_path / "plain.gguf")
    rng = np.random.default_rng(0)
    other = lambda a: rng.standard_normal(a.shape).astype(a.dtype)
    more = {
        n.replace("blk.1.", "blk.2."): other(a) for n, a in arrays.items() if n.startswith("blk.1.")
    }
    more["blk.2.nextn.eh_proj.weight"] = rng.standard_normal((64, 128)).astype(np.float32)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        more[f"blk.2.nextn.{name}.weight"] = rng.standard_normal(64).astype(np.float32)
    for name in ("embed_tokens", "shared_head_head"):
        more[f"blk.2.nextn.{name}.weight"] = rng.standard_normal((96, 64)).astype(np.float32)
    keys = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    path = rewritten(tmp_path / "m.gguf", tmp_path / "plain.gguf", keys, more)
    found = maxjax.load(path, mtp=True)[0]
    state = found.state_dict()
    for name, own in {
        "nextn.eh_proj": "eh_proj", "nextn.enorm": "enorm", "nextn.hnorm": "hnorm",
        "nextn.shared_head_norm": "shared_head.norm", "attn_q": "self_attn.q_proj",
        "post_attention_norm": "post_attention_layernorm",
    }.items():  # fmt: skip
        np.testing.assert_array_equal(state[f"mtp.{own}.weight"], more[f"blk.2.{name}.weight"])
    experts = more["blk.2.ffn_down_exps.weight"]
    np.testing.assert_array_equal(state["mtp.mlp.experts.3.down_proj.weight"], experts[3])
    same_texts(found)
    assert maxjax.load(path)[0].mtp is None


def test_a_step_of_orbax(source, tmp_path):
    model, _ = maxjax.load(source, mtp=True)
    maxjax.checkpoint.save(tmp_path, model)
    again, _ = maxjax.load(tmp_path, mtp=True)
    wanted = model.state_dict()
    for name, value in again.state_dict().items():
        np.testing.assert_array_equal(wanted[name], value, err_msg=name)
    assert again.mtp is not None and maxjax.load(tmp_path)[0].mtp is None


def test_refused(tmp_path):
    maxjax.save_pretrained(made(mtp=False), tmp_path / "none")
    with pytest.raises(CheckpointMismatchError, match="no layer of multi-token prediction"):
        maxjax.load(tmp_path / "none", mtp=True)
    llama = LlamaConfig(60, 16, 24, num_hidden_layers=1, num_attention_heads=2)
    maxjax.save_pretrained(filled(Llama(llama)), tmp_path / "llama")
    with pytest.raises(UserInputError, match="not supported for Llama"):
        maxjax.load(tmp_path / "llama", mtp=True)


def test_a_layer_that_is_not_complete(source, tmp_path):
    tensors = load_file(source / WEIGHTS)
    del tensors["model.layers.2.hnorm.weight"]
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointMismatchError, match=r"mtp\.hnorm\.weight"):
        maxjax.load(tmp_path, mtp=True)
    maxjax.load(tmp_path)
