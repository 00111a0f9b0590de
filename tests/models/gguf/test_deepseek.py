"""GGUF files of DeepSeek V3: split keys and values of latents, files from before that, quantised files."""

import json

import jax
import numpy as np
import pytest

import maxjax
from maxjax.checkpoint import convert
from maxjax.errors import CheckpointFormatError, UnsupportedModelError
from maxjax.graph.weights import load_weights
from maxjax.models.deepseek import DeepseekV3, DeepseekV3Config
from maxjax.models.gguf import hf_config
from maxjax.storage.gguf.writer import plan_gguf
from maxjax.storage.save.outgoing import outgoing
from tests.models.decoders import call, ids_of, same
from tests.models.gguf import files

HEADS, RANK, ROTATED, NOPE, VALUE = 4, 32, 8, 24, 16
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 96,
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "n_shared_experts": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROTATED, "v_head_dim": VALUE, "max_position_embeddings": 128,
    "rope_scaling": {"type": "yarn", "factor": 8, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
BOTH = "model.layers.{}.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, and its GGUF file beside it."""
    folder = tmp_path_factory.mktemp("deepseek")
    model = maxjax.init(DeepseekV3(DeepseekV3Config.from_dict(CONFIG)), jax.random.key(0))
    model.hf_config = CONFIG
    maxjax.save_pretrained(model, folder / "hf")
    convert(folder / "hf", folder / "model.gguf")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return maxjax.load(folder / "hf")[0]


def rewritten(path, source, keys=None, tensors=None, without=()):
    """A GGUF file with other metadata and tensors."""
    metadata, arrays = files.read(source)
    metadata = {k: v for k, v in metadata.items() if not k.startswith("GGUF.")} | (keys or {})
    arrays = {**arrays, **(tensors or {})}
    left = {k: v for k, v in metadata.items() if v is not None}
    out = [
        outgoing(n, np.ascontiguousarray(a), None) for n, a in arrays.items() if n not in without
    ]
    path.write_bytes(b"".join(plan_gguf(left, out).pieces()))
    return path


def test_keys_and_values_are_those_of_the_converter(folder, model):
    metadata, found = files.read(folder / "model.gguf")
    values = model.state_dict()
    for layer in range(2):
        both = np.asarray(values[BOTH.format(layer)])
        both = both.reshape(HEADS, NOPE + VALUE, RANK)
        np.testing.assert_array_equal(
            found[f"blk.{layer}.attn_k_b.weight"], both[:, :NOPE].transpose(0, 2, 1)
        )
        np.testing.assert_array_equal(found[f"blk.{layer}.attn_v_b.weight"], both[:, NOPE:])
        assert f"blk.{layer}.attn_kv_b.weight" not in found
    expected = {
        "attention.head_count_kv": 1, "attention.key_length": RANK + ROTATED,
        "attention.value_length": RANK, "attention.key_length_mla": NOPE + ROTATED,
        "attention.value_length_mla": VALUE, "attention.kv_lora_rank": RANK,
        "attention.q_lora_rank": 32, "leading_dense_block_count": 1, "expert_count": 4,
        "expert_used_count": 2, "expert_shared_count": 1, "expert_weights_norm": True,
        "expert_weights_scale": 2.5, "expert_gating_func": 2, "expert_group_count": 2,
        "expert_group_used_count": 1, "rope.dimension_count": ROTATED,
        "rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": np.float32(0.0707),
    }  # fmt: skip
    assert {key: metadata[f"deepseek2.{key}"] for key in expected} == expected


def test_shares_are_normed_where_the_file_says_so(folder):
    metadata, arrays = files.read(folder / "model.gguf")
    shapes = {name: array.shape for name, array in arrays.items()}
    assert hf_config(metadata, shapes)["norm_topk_prob"] is True
    del metadata["deepseek2.expert_weights_norm"]
    assert hf_config(metadata, shapes)["norm_topk_prob"] is False


def test_files_from_before_the_split(folder, model, tmp_path):
    values = model.state_dict()
    both = {BOTH.format(i): np.asarray(values[BOTH.format(i)]) for i in range(2)}
    old = rewritten(
        tmp_path / "old.gguf", folder / "model.gguf",
        {
            "deepseek2.attention.key_length": NOPE + ROTATED,
            "deepseek2.attention.value_length": VALUE,
            "deepseek2.attention.head_count_kv": HEADS,
            "deepseek2.attention.key_length_mla": None, "deepseek2.attention.value_length_mla": None,
        },
        {f"blk.{i}.attn_kv_b.weight": both[BOTH.format(i)] for i in range(2)},
        [f"blk.{i}.attn_{part}_b.weight" for i in range(2) for part in "kv"],
    )  # fmt: skip
    again, _ = maxjax.load(old)
    found = again.state_dict()
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    ids = ids_of(1, 12) % 96
    same(call(again, ids), call(model, ids))
    both["blk.0.attn_kv_b.weight"] = both[BOTH.format(0)]
    twice = rewritten(
        tmp_path / "twice.gguf", folder / "model.gguf",
        tensors={"blk.0.attn_kv_b.weight": both[BOTH.format(0)]},
    )  # fmt: skip
    with pytest.raises(CheckpointFormatError, match="as a whole too"):
        maxjax.load(twice)


@pytest.mark.parametrize(
    ("keys", "without", "error", "text"),
    [
        ({"attention.key_length_mla": ROTATED}, (), CheckpointFormatError, "over 8"),
        ({"expert_gating_func": 3}, (), UnsupportedModelError, "expert_gating_func' 3"),
        ({"expert_group_count": 1 << 20}, (), CheckpointFormatError, "expert_group_count"),
        ({"rope.scaling.yarn_log_multiplier": None}, (), UnsupportedModelError, "yarn without"),
        ({}, ["blk.1.attn_v_b.weight"], CheckpointFormatError, "keys without values"),
        ({}, ["blk.1.attn_k_b.weight"], ValueError, "v_b_proj"),
    ],
)
def test_wrong_files(folder, tmp_path, keys, without, error, text):
    keys = {f"deepseek2.{key}": value for key, value in keys.items()}
    path = rewritten(tmp_path / "m.gguf", folder / "model.gguf", keys, without=without)
    with pytest.raises(error, match=text):
        maxjax.load(path)


def test_blocks_stay_packed(folder, tmp_path):
    convert(folder / "hf", tmp_path / "q.gguf", quantize="q8_0")
    packed, _ = maxjax.load(tmp_path / "q.gguf", activations="float")
    floats, _ = maxjax.load(tmp_path / "q.gguf", dtype="float32")
    kinds = {n: w.quantization_encoding for n, w in packed.raw_state_dict().items()}
    for name in (
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
    ):
        assert kinds[name].value == "Q8_0", name
    assert kinds[BOTH.format(1)] is None
    ids = ids_of(1, 12) % 96
    found, expected = call(packed, ids), call(floats, ids)
    same(found, expected)
    assert np.abs(expected).max() > 0.01
    convert(tmp_path / "q.gguf", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "again.gguf")
    blocks = {
        n: d.data().quantization_encoding for n, d in load_weights(tmp_path / "q.gguf").items()
    }
    again = load_weights(tmp_path / "again.gguf")
    for name, kind in blocks.items():
        data = again[name].data()
        split = name.endswith(("attn_k_b.weight", "attn_v_b.weight"))
        assert data.quantization_encoding == (None if split else kind), name


def test_layers_that_predict_further_tokens_are_left_out(folder, tmp_path):
    import safetensors.numpy

    tensors = safetensors.numpy.load_file(folder / "hf" / "model.safetensors")
    more = {n.replace("layers.1.", "layers.2."): a for n, a in tensors.items() if "layers.1." in n}
    more["model.layers.2.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    (tmp_path / "hf").mkdir()
    safetensors.numpy.save_file(
        tensors | more, tmp_path / "hf" / "model.safetensors", {"format": "pt"}
    )
    text = json.loads((folder / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps({**text, "num_nextn_predict_layers": 1})
    )
    convert(tmp_path / "hf", tmp_path / "model.gguf")
    assert (
        files.read(tmp_path / "model.gguf")[1].keys() == files.read(folder / "model.gguf")[1].keys()
    )


def test_gguf_files_with_layers_that_predict_further_tokens(folder, model, tmp_path):
    """As llama.cpp's converter writes GLM-4.7-Flash: they are counted among the layers, and left out here."""
    _, arrays = files.read(folder / "model.gguf")
    more = {n.replace("blk.1.", "blk.2."): a for n, a in arrays.items() if n.startswith("blk.1.")}
    more |= {"blk.2.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)}
    more |= {
        f"blk.2.nextn.{n}.weight": np.zeros(64, np.float32)
        for n in ("enorm", "hnorm", "shared_head_norm")
    }
    keys = {"deepseek2.block_count": 3, "deepseek2.nextn_predict_layers": 1}
    again, _ = maxjax.load(rewritten(tmp_path / "m.gguf", folder / "model.gguf", keys, more))
    found = again.state_dict()
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
