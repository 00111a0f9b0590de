"""GGUF files of Kimi Linear: tensors and sizes as ``KimiLinearModel`` of llama.cpp's converter writes them."""

import numpy as np
import pytest

import maxjax
from maxjax.checkpoint import convert
from maxjax.errors import CheckpointError, UnsupportedModelError
from tests.models.decoders import call, ids_of
from tests.models.families.known.kimi_linear import CASES, kimi
from tests.models.gguf import files
from tests.models.gguf.test_deepseek import rewritten


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a checkpoint in ``hf`` and ``hf.gguf``, and the checkpoint's tensors."""
    folder = tmp_path_factory.mktemp("kimi")
    tensors = CASES[0].model(folder / "hf").tensors
    convert(folder / "hf", folder / "hf.gguf")
    return folder, tensors


def test_tensors_and_sizes_are_those_of_the_converter(made):
    folder, tensors = made
    metadata, found = files.read(folder / "hf.gguf")
    attn = "model.layers.0.self_attn."
    for part in "qkv":
        taps = tensors[f"{attn}{part}_conv1d.weight"]
        stored = found[f"blk.0.ssm_conv1d_{part}.weight"]
        np.testing.assert_array_equal(stored, taps.reshape(1, len(taps), 1, -1))
    rates = -np.exp(tensors[f"{attn}A_log"].astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(found["blk.0.ssm_a"], rates)
    np.testing.assert_array_equal(found["blk.0.ssm_dt.bias"], tensors[f"{attn}dt_bias"])
    np.testing.assert_array_equal(found["blk.0.ssm_beta.weight"], tensors[f"{attn}b_proj.weight"])
    experts = [tensors[f"model.layers.1.block_sparse_moe.experts.{i}.w3.weight"] for i in range(8)]
    np.testing.assert_array_equal(found["blk.1.ffn_up_exps.weight"], np.stack(experts))
    both = tensors["model.layers.4.self_attn.kv_b_proj.weight"].reshape(4, 6 + 5, 12)
    np.testing.assert_array_equal(found["blk.4.attn_k_b.weight"], both[:, :6].swapaxes(1, 2))
    np.testing.assert_array_equal(found["blk.4.attn_v_b.weight"], both[:, 6:])
    expected = {
        "attention.head_count_kv": [0, 0, 0, 0, 1], "attention.key_length": 12 + 4,
        "attention.key_length_mla": 6 + 4, "attention.value_length_mla": 5, "kda.head_dim": 8,
        "ssm.conv_kernel": 3, "leading_dense_block_count": 1, "expert_gating_func": 2,
        "expert_shared_count": 1, "rope.dimension_count": 4,
    }  # fmt: skip
    for key, value in expected.items():
        stored = metadata[f"kimi-linear.{key}"]
        assert (list(stored) if isinstance(value, list) else stored) == value, key


def test_quantised_files_open(made, tmp_path):
    folder, _ = made
    convert(folder / "hf", tmp_path / "m.gguf", quantize="q8_0")
    packed, _ = maxjax.load(tmp_path / "m.gguf", activations="float")
    convert(tmp_path / "m.gguf", tmp_path / "wide", dtype="float32")
    wide, _ = maxjax.load(tmp_path / "wide")
    ids = ids_of(1, 12)
    np.testing.assert_allclose(call(packed, ids), call(wide, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"kda.head_dim": None}, "'kimi-linear.kda.head_dim' is missing"),
        ({"kda.head_dim": 1 << 30}, "larger than the tensors|does not fit"),
        ({"ssm.conv_kernel": 1 << 30}, "larger than the tensors"),
        ({"attention.key_length_mla": 4}, "out of range"),
    ],
)
def test_sizes_that_do_not_fit(made, keys, text, tmp_path):
    keys = {f"kimi-linear.{key}": value for key, value in keys.items()}
    rewritten(tmp_path / "m.gguf", made[0] / "hf.gguf", keys)
    with pytest.raises(CheckpointError, match=text):
        maxjax.load(tmp_path / "m.gguf")


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"linear_num_heads": 2}, "'linear_num_heads' 2"),
        ({"layer_types": ["linear_attention"] * 4 + ["full_attention"], "norm_topk_prob": False}, "moe_renormalize"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]}, "after one with experts"),
    ],
)  # fmt: skip
def test_what_llama_cpp_does_not_compute(settings, text, tmp_path):
    kimi("refused", **settings).model(tmp_path / "hf")
    with pytest.raises(UnsupportedModelError, match=text):
        convert(tmp_path / "hf", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
