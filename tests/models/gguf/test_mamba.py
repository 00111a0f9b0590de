"""GGUF files of models with Mamba 1 or 2: as llama.cpp's converter writes them, and back again bit for bit.

The oracle is ``modify_tensors`` of the converter's ``MambaModel`` and ``Mamba2Model``, written down in NumPy;
llama.cpp itself runs such files in tests/models/families.
"""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax.checkpoint import convert
from maxjax.errors import CheckpointError, CheckpointMismatchError, UnsupportedModelError
from maxjax.models import Granite
from maxjax.models.granitemoehybrid import GraniteHybrid, GraniteHybridConfig
from tests.models.decoders import call, ids_of
from tests.models.families.cases import every
from tests.models.gguf import files
from tests.models.gguf.test_deepseek import rewritten

# Architecture of llama.cpp, and the name of the mixer in a layer.
KINDS = {
    "mamba2": ("mamba2", "mixer"),
    "granitemoehybrid": ("granitehybrid", "mamba"),
    "nemotron_h": ("nemotron_h_moe", "mixer"),
    "nemotron_h-dense": ("nemotron_h", "mixer"),
    "falcon_h1": ("falcon-h1", "mamba"),
}
# Those with Mamba 1.
SELECTIVE = {
    "mamba": ("mamba", "mixer"), "falcon_mamba": ("mamba", "mixer"), "jamba": ("jamba", "mamba"),
}  # fmt: skip
ALL = {**KINDS, **SELECTIVE}
CASES = {
    name: case for case in reversed(every()) for name in (str(case), case.family) if name in ALL
}


@pytest.fixture(scope="module", params=ALL)
def made(request, tmp_path_factory):
    """(Family or case, folder with a checkpoint in ``hf`` and ``hf.gguf``, its tensors, its configuration)."""
    folder = tmp_path_factory.mktemp(request.param)
    tensors = CASES[request.param].model(folder / "hf").tensors
    convert(folder / "hf", folder / "hf.gguf")
    config = json.loads((folder / "hf" / "config.json").read_text())
    return request.param, folder, tensors, config


def folded(name, values, config):
    """A tensor of Falcon-H1 times its factors, as the converter multiplies."""
    if config["model_type"] != "falcon_h1":
        return values
    by = {
        key: config[f"{key}_multiplier"]
        for key in ("attention_in", "attention_out", "key", "ssm_in")
    }
    for part, factors in {
        "down_proj": [config["mlp_multipliers"][1]], "gate_proj": [config["mlp_multipliers"][0]],
        "k_proj": [by["key"], by["attention_in"]], "q_proj": [by["attention_in"]],
        "v_proj": [by["attention_in"]], ".o_proj": [by["attention_out"]],
        "out_proj": [config["ssm_out_multiplier"]], "in_proj": [by["ssm_in"]],
        "lm_head": [config["lm_head_multiplier"]], "embed_tokens": [config["embedding_multiplier"]],
    }.items():  # fmt: skip
        if part in name:
            for factor in factors:
                values = values * np.float32(factor)
    if "in_proj" in name:
        inner, group = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        ends = np.cumsum([inner, inner, group, group])
        parts = zip(np.split(values, ends), config["ssm_multipliers"], strict=True)
        values = np.concatenate([part * np.float32(factor) for part, factor in parts])
    return values


def mixed(name, values, config):
    """A tensor of a mixer, as the converter stores it."""
    is_selective = config["model_type"] in SELECTIVE
    if name.endswith("A_log"):
        rates = -np.exp(values.astype(np.float64)).astype(np.float32)
        return rates if is_selective else rates[:, None]
    if name.endswith(".D"):
        return values if is_selective else values[:, None]
    if name.endswith("conv1d.weight"):
        return values[:, 0]
    if name.endswith("norm.weight"):
        groups = config.get("n_groups", config.get("mamba_n_groups"))
        return values.reshape(groups, -1)
    return folded(name, values, config)


def test_tensors_are_those_of_the_converter(made):
    family, folder, tensors, config = made
    architecture, mixer = ALL[family]
    metadata, found = files.read(folder / "hf.gguf")
    parts = {
        "in_proj.weight": "ssm_in.weight", "conv1d.weight": "ssm_conv1d.weight", "D": "ssm_d",
        "conv1d.bias": "ssm_conv1d.bias", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias",
        "norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight",
    }  # fmt: skip
    if family in SELECTIVE:
        del parts["dt_bias"], parts["norm.weight"]
        parts |= {
            f"{part}.{kind}": f"ssm_{part.removesuffix('_proj')}.{kind}"
            for part, kind in (("x_proj", "weight"), ("dt_proj", "weight"), ("dt_proj", "bias"))
        }
    seen = 0
    for name, values in tensors.items():
        front, _, part = name.partition(f".{mixer}.")
        if part in parts and "self_attn" not in name:
            stored = found[f"blk.{front.rpartition('.')[2]}.{parts[part]}"]
            expected = mixed(name, values, config)
            assert stored.shape == expected.shape, name
            np.testing.assert_array_equal(stored, expected, err_msg=name)
            seen += 1
    assert seen >= 2 * (len(parts) - 1)
    heads, inner = (
        metadata[f"{architecture}.ssm.{key}"] for key in ("time_step_rank", "inner_size")
    )
    assert found["blk.0.ssm_out.weight"].shape[1] == inner
    if family in SELECTIVE:  # "heads" is the rank of the time steps
        assert found["blk.0.ssm_dt.weight"].shape == (inner, heads)
    else:
        assert found["blk.0.ssm_a"].shape == (heads, 1)


@pytest.mark.parametrize("made", SELECTIVE, indirect=True)
def test_all_but_the_rates_of_channels_come_back_bit_for_bit(made, tmp_path):
    """Of Mamba 1's rates, a matrix in each layer, a file does not hold the exact values as well."""
    _, folder, tensors, _ = made
    convert(folder / "hf.gguf", tmp_path / "hf")
    found = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert set(found) == set(tensors) and len(found) > 20
    for name, values in tensors.items():
        if name.endswith("A_log"):
            np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("made", KINDS, indirect=True)
def test_back_again_every_bit_is_the_same(made, tmp_path):
    _, folder, tensors, config = made
    convert(folder / "hf.gguf", tmp_path / "hf")
    found = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert len(set(found) & set(tensors)) > 20
    for name in set(found) & set(tensors):
        expected = folded(name, tensors[name], config)
        np.testing.assert_array_equal(found[name].view(np.uint32), expected.view(np.uint32), name)
    convert(tmp_path / "hf", tmp_path / "hf.gguf")
    assert (tmp_path / "hf.gguf").read_bytes() == (folder / "hf.gguf").read_bytes()


@pytest.mark.parametrize("made", KINDS, indirect=True)
def test_files_of_llama_cpp_are_stable(made, tmp_path):
    """Which have no exact values beside A: these come back to a unit in the last place, all others as they are."""
    _, folder, _, _ = made
    metadata, before = files.read(folder / "hf.gguf")
    own = {key: None for key in metadata if key.startswith("maxjax.")}
    assert own
    rewritten(tmp_path / "theirs.gguf", folder / "hf.gguf", own)
    convert(tmp_path / "theirs.gguf", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "hf.gguf")
    _, after = files.read(tmp_path / "hf.gguf")
    assert set(before) == set(after)
    for name, values in before.items():
        if name.endswith("ssm_a"):
            np.testing.assert_array_max_ulp(after[name], values, 1)
        else:
            np.testing.assert_array_equal(after[name], values, err_msg=name)
    convert(tmp_path / "hf.gguf", tmp_path / "again" / "hf")
    convert(tmp_path / "again" / "hf", tmp_path / "again" / "hf.gguf")
    assert (tmp_path / "again" / "hf.gguf").read_bytes() == (tmp_path / "hf.gguf").read_bytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("made", KINDS, indirect=True)
def test_narrow_types(made, tmp_path):
    family, folder, _, _ = made
    source = "hf.gguf" if family == "falcon_h1" else "hf"  # of which no factor is left
    convert(folder / source, tmp_path / "hf", dtype="bfloat16")
    convert(tmp_path / "hf", tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path / "again")
    before, after = (maxjax.load(tmp_path / name)[0].state_dict() for name in ("hf", "again"))
    for name, values in before.items():
        assert values.dtype == after[name].dtype, name
        np.testing.assert_array_equal(
            np.asarray(values).view(np.uint16), np.asarray(after[name]).view(np.uint16), name
        )


@pytest.mark.parametrize("made", KINDS, indirect=True)
@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"ssm.time_step_rank": 7}, "a multiple of 7"),
        ({"ssm.time_step_rank": 1 << 30}, "time_step_rank|does not fit|larger"),
        ({"ssm.inner_size": 1 << 30}, "larger than the tensors|does not fit"),
        ({"ssm.group_count": 3}, "groups|shape"),
        ({"ssm.group_count": 0}, "group_count"),
        ({"ssm.state_size": 1 << 30}, "larger than the tensors"),
        ({"ssm.conv_kernel": 1 << 30}, "larger than the tensors"),
        ({"ssm.conv_kernel": None}, "'.*ssm.conv_kernel' is missing"),
        ({"ssm.state_size": "10"}, "wrong type"),
        ({"block_count": 1 << 30}, "block_count"),
    ],
)
def test_sizes_that_do_not_fit(made, keys, text, tmp_path):
    family, folder, _, _ = made
    keys = {f"{KINDS[family][0]}.{key}": value for key, value in keys.items()}
    rewritten(tmp_path / "m.gguf", folder / "hf.gguf", keys)
    with pytest.raises(CheckpointError, match=text):
        maxjax.load(tmp_path / "m.gguf")


# --- what llama.cpp does not compute -------------------------------------------------------------

GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 96,
    "hidden_size": 16, "intermediate_size": 12, "shared_intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 2, "layer_types": ["attention", "attention"], "num_local_experts": 0,
    "position_embedding_type": "rope", "mamba_n_heads": 4, "mamba_d_state": 6,
    "attention_multiplier": 0.25, "logits_scaling": 3.0,
}  # fmt: skip


def saved(path, config):
    """A random model of a configuration, and its files."""
    model = maxjax.init(GraniteHybrid(GraniteHybridConfig.from_dict(config)), jax.random.key(0))
    model.hf_config = config
    maxjax.save_pretrained(model, path)
    return model


def test_a_granite_4_without_mamba_is_a_granite_3(tmp_path):
    """As llama.cpp's converter says, since its granitehybrid needs a layer of Mamba 2."""
    model = saved(tmp_path / "hf", GRANITE)
    convert(tmp_path / "hf", tmp_path / "model.gguf")
    again, _ = maxjax.load(tmp_path / "model.gguf")
    assert isinstance(again, Granite) and again.config.intermediate_size == 20
    ids = ids_of(1, 12) % 96
    np.testing.assert_allclose(call(again, ids), call(model, ids), rtol=0, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_local_experts": 4, "num_experts_per_tok": 2}, "without Mamba 2 and with experts"),
        ({"position_embedding_type": "nope"}, "layers without RoPE"),
        ({"layer_types": ["mamba", "attention"], "mamba_expand": 3}, "48 features of Mamba 2"),
        ({"layer_types": ["mamba", "attention"], "mamba_conv_bias": False}, "without a bias"),
        (
            {"layer_types": ["mamba", "attention"], "time_step_limit": [0.1, 1.0]},
            "time steps of 0.1",
        ),
        ({"layer_types": ["mamba", "mamba"]}, "without a layer of attention"),
        (
            {"layer_types": ["mamba", "attention"], "mamba_proj_bias": True},
            "bias of 'blk.0.ssm_in'",
        ),
        ({"layer_types": ["mamba", "attention"], "hidden_act": "gelu"}, "'gelu'"),
    ],
)
def test_what_llama_cpp_does_not_compute(settings, text, tmp_path):
    saved(tmp_path / "hf", {**GRANITE, **settings})
    with pytest.raises(UnsupportedModelError, match=text):
        convert(tmp_path / "hf", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize(
    ("family", "part"),
    [("granitemoehybrid", "shared_mlp.input_linear"), ("falcon_h1", "mamba.in_proj")],
)
def test_a_checkpoint_with_other_rows(family, part, tmp_path):
    tensors = CASES[family].model(tmp_path / "hf").tensors
    name = next(name for name in tensors if name.endswith(f"{part}.weight"))
    values = tensors[name]
    for other in (np.concatenate([values, values[:1]]), np.ascontiguousarray(values[:-1])):
        file = tmp_path / "hf" / "model.safetensors"
        safetensors.numpy.save_file({**tensors, name: other}, file)
        with pytest.raises(CheckpointMismatchError, match=part):
            convert(tmp_path / "hf", tmp_path / "model.gguf")
