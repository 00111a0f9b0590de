"""GGUF files of Gemma 3n and 4 beyond the round trips of ``families``: the converter's metadata, what is refused."""

import math

import numpy as np
import pytest

from maxjax.errors import CheckpointFormatError, UnsupportedModelError
from maxjax.graph.weights import WeightData
from maxjax.models.gemma4 import Gemma4Config
from maxjax.models.gguf import encodings, gguf_metadata, gguf_tensors, hf_config
from maxjax.models.gguf.tensors.types import Traits

FULL, NEAR = "full_attention", "sliding_attention"
KINDS = [NEAR, FULL, NEAR, FULL, NEAR, FULL]
SMALL = {
    "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 6,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "sliding_window": 4,
    "max_position_embeddings": 64, "layer_types": KINDS, "vocab_size_per_layer_input": 32,
}  # fmt: skip
OF_3N = {
    **SMALL, "model_type": "gemma3n_text", "num_kv_shared_layers": 0, "laurel_rank": 64,
    "activation_sparsity_pattern": [0.95] * 6,
}  # fmt: skip
OF_4 = {
    **SMALL, "model_type": "gemma4_text", "num_kv_shared_layers": 2, "global_head_dim": 8,
    "hidden_size_per_layer_input": 2,
}  # fmt: skip


def tensors(width=2):
    shapes = {"token_embd.weight": (32, 8), "per_layer_token_embd.weight": (32, 6 * width)}
    found = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    found["rope_freqs.weight"] = np.float32([1, 1e30, 1e30, 1e30])
    return {name: WeightData.from_numpy(array, name) for name, array in found.items()}


def metadata(config, **change):
    given = tensors(256 if config is OF_3N else 2)
    given["blk.1.attn_v.weight"] = given["token_embd.weight"]
    if config is OF_3N:
        del given["rope_freqs.weight"]
    return gguf_metadata({**config, **change}, given)


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (OF_3N, {"altup_num_inputs": 3}, "'altup_num_inputs' 3 .*would be 4"),
        (OF_3N, {"altup_active_idx": 1}, "'altup_active_idx' 1"),
        (OF_3N, {"altup_correct_scale": False}, "'altup_correct_scale' False"),
        (OF_3N, {"laurel_rank": 8}, "'laurel_rank' 8 .*would be 64"),
        (OF_3N, {"hidden_size_per_layer_input": 8}, "'hidden_size_per_layer_input' 8"),
        (OF_3N, {"final_logit_softcapping": 5.0}, "'final_logit_softcapping' 5"),
        (OF_3N, {"final_logit_softcapping": None}, "without 'final_logit_softcapping'"),
        (OF_3N, {"num_kv_shared_layers": 2}, "'num_kv_shared_layers' 2 .*from layer 20 on"),
        (OF_3N, {"activation_sparsity_pattern": [0.5] * 6}, "'activation_sparsity_pattern'"),
        (OF_3N, {"intermediate_size": [16] * 5 + [8]}, "'intermediate_size' that differs"),
        (OF_3N, {"hidden_activation": "relu"}, "relu"),
        (OF_4, {"layer_types": [NEAR, FULL, FULL, NEAR, NEAR, FULL]}, "'layer_types' whose layer 3"),
        (OF_4, {"rope_parameters": {FULL: {"rope_theta": 1e6}, NEAR: {}}}, "'proportional'"),
        (OF_4, {"rope_parameters": {
            FULL: {"rope_type": "proportional"}, NEAR: {"rope_type": "linear", "factor": 2.0}}},
         "rope scaling in sliding-window layers"),
        (OF_4, {"hidden_activation": "relu"}, "relu"),
    ],
)  # fmt: skip
def test_what_llama_cpp_has_in_its_code_is_refused(config, change, says):
    assert metadata(config)
    with pytest.raises(UnsupportedModelError, match=says):
        metadata(config, **change)


def of_converter(architecture, **keys):
    """Metadata as llama.cpp's converter writes it."""
    usual = {
        "block_count": 6, "context_length": 64, "embedding_length": 8, "attention.head_count": 2,
        "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 4, "attention.sliding_window_pattern": [k == NEAR for k in KINDS],
        "rope.freq_base": 1e6, "attention.shared_kv_layers": 0, **keys,
    }  # fmt: skip
    return {"general.architecture": architecture} | {
        f"{architecture}.{key}": value for key, value in usual.items() if value is not None
    }


KEYS_3N = {
    "feed_forward_length": [16] * 6, "attention.key_length": 4, "attention.value_length": 4,
    "activation_sparsity_scale": [1.6448533535003662] * 6, "altup.active_idx": 0, "altup.num_inputs": 4,
    "embedding_length_per_layer_input": 256, "final_logit_softcapping": 30.0,
}  # fmt: skip
KEYS_4 = {
    "feed_forward_length": [16] * 4 + [32] * 2, "attention.key_length": 8, "attention.value_length": 8,
    "attention.key_length_swa": 4, "attention.value_length_swa": 4, "rope.dimension_count": 8,
    "rope.dimension_count_swa": 4, "attention.shared_kv_layers": 2, "rope.freq_base_swa": 1e4,
    "embedding_length_per_layer_input": 2, "attention.head_count_kv": [1, 2] * 3,
}  # fmt: skip


def config_3n(**change):
    shapes = {name: one.shape for name, one in tensors(256).items()}
    del shapes["rope_freqs.weight"]
    return hf_config(of_converter("gemma3n", **{**KEYS_3N, **change}), shapes)


def config_4(freqs=(1, 1e30, 1e30, 1e30), **change):
    shapes = {name: one.shape for name, one in tensors().items()}
    given = of_converter("gemma4", **{**KEYS_4, **change})
    return hf_config(given, shapes, divisors={"rope_freqs.weight": np.float32(freqs)})


def test_a_file_of_the_converter_of_gemma_3n():
    found = config_3n()
    assert found["intermediate_size"] == 16 and found["num_kv_shared_layers"] == 0
    assert found["activation_sparsity_pattern"] == [0.95] * 6 and found["layer_types"] == KINDS
    assert found["vocab_size_per_layer_input"] == 32 and found["rope_local_base_freq"] == 1e4
    assert (found["laurel_rank"], found["altup_num_inputs"]) == (64, 4)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"activation_sparsity_scale": [0.0] * 6},
            UnsupportedModelError,
            "activation_sparsity_scale",
        ),
        ({"activation_sparsity_scale": [1.0] * 5}, CheckpointFormatError, "6 numbers"),
        ({"activation_sparsity_scale": [math.nan] * 6}, CheckpointFormatError, "6 numbers"),
        ({"attention.shared_kv_layers": 3}, UnsupportedModelError, "shared_kv_layers"),
        ({"vocab_size_per_layer_input": 33}, CheckpointFormatError, "1 to 32"),
        ({"feed_forward_length": [16] * 5 + [8]}, UnsupportedModelError, "feed_forward_length"),
    ],
)
def test_files_of_gemma_3n_that_are_not_read(change, error, says):
    with pytest.raises(error, match=says):
        config_3n(**change)


def test_a_file_of_the_converter_of_gemma_4():
    found = config_4()
    assert (found["head_dim"], found["global_head_dim"]) == (4, 8)
    assert (found["num_key_value_heads"], found["num_global_key_value_heads"]) == (1, 2)
    assert found["attention_k_eq_v"] and found["use_double_wide_mlp"]
    assert (found["intermediate_size"], found["num_kv_shared_layers"]) == (16, 2)
    assert found["final_logit_softcapping"] == 30.0  # llama.cpp's default
    assert found["rope_parameters"] == {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        NEAR: {"rope_type": "default", "rope_theta": 1e4},
    }
    assert Gemma4Config.from_dict(found).rope_parameters.scaling.freqs(8, 1e6).tolist() == [
        1,
        0,
        0,
        0,
    ]
    divided = config_4((2, 2, 2, 1e30))["rope_parameters"][FULL]
    assert (divided["partial_rotary_factor"], divided["factor"]) == (0.75, 2.0)
    assert config_4((1, 1, 1, 1))["rope_parameters"][FULL]["partial_rotary_factor"] == 1.0


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"feed_forward_length": [16] * 5 + [24]}, UnsupportedModelError, "feed_forward_length"),
        ({"feed_forward_length": [16] * 5}, CheckpointFormatError, "6 values"),
        ({"feed_forward_length": []}, CheckpointFormatError, "feed_forward_length"),
        ({"feed_forward_length": [2**40] * 6}, CheckpointFormatError, "feed_forward_length"),
        ({"attention.head_count_kv": [1, 2, 1, 1, 1, 2]}, UnsupportedModelError, "head_count_kv"),
        ({"attention.head_count_kv": [1, 2.0] * 3}, CheckpointFormatError, "list of int"),
        ({"attention.head_count_kv": [2**40] * 6}, CheckpointFormatError, "head_count_kv"),
        ({"attention.value_length_swa": 8}, UnsupportedModelError, "4 wide"),
        ({"attention.key_length_swa": None}, CheckpointFormatError, "missing"),
        ({"attention.shared_kv_layers": 6}, CheckpointFormatError, "0 to 5"),
        ({"freqs": (1, 2, 1e30, 1e30)}, UnsupportedModelError, "frequencies"),
        ({"freqs": (1e30, 1, 1, 1)}, UnsupportedModelError, "frequencies"),
        ({"expert_count": 4, "expert_used_count": 5}, CheckpointFormatError, "1 to 4"),
    ],
)
def test_files_of_gemma_4_that_are_not_read(change, error, says):
    with pytest.raises(error, match=says):
        config_4(**change)


def test_tensors_that_a_checkpoint_leaves_out_are_there_for_llama_cpp():
    config = {
        **OF_3N, "num_hidden_layers": 21, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 3,
        "layer_types": KINDS[:2] * 10 + [FULL], "activation_sparsity_pattern": None,
    }  # fmt: skip
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    arrays = {"model.embed_tokens.weight": np.zeros((32, 8), np.float32),
              "model.embed_tokens_per_layer.weight": table}  # fmt: skip
    for i in range(21):
        front = f"model.layers.{i}.self_attn."
        arrays[front + "q_proj.weight"] = np.ones((8, 8), np.float32)
        if i < 20:
            arrays[front + "k_proj.weight"] = arrays[front + "v_proj.weight"] = table
            arrays[front + "k_norm.weight"] = table[0]
    for i in range(3):
        arrays[f"model.altup_projections.{i}.weight"] = np.full((8, 8), i, np.float32)
    given = {name: WeightData.from_numpy(array, name) for name, array in arrays.items()}
    found = gguf_tensors(config, given).tensors
    read = lambda name: np.asarray(found[name].data)
    np.testing.assert_array_equal(read("per_layer_token_embd.weight"), table[[0, 1, 2] + [0] * 29])
    np.testing.assert_array_equal(read("altup_proj.weight")[:, 0, 0], [0, 1, 2])
    shapes = [read(f"blk.20.attn_{name}.weight").shape for name in ("k", "v", "k_norm")]
    assert shapes == [(4, 8), (4, 8), (4,)]
    del given["model.altup_projections.1.weight"]
    with pytest.raises(CheckpointFormatError, match="each further hidden state"):
        gguf_tensors(config, given)


def test_what_llama_cpp_does_not_quantise():
    shapes = {
        "altup_proj.weight": (3, 256, 256), "blk.0.altup_router.weight": (4, 256),
        "blk.0.laurel_l.weight": (256, 256), "per_layer_model_proj.weight": (256, 256),
        "blk.0.proj.weight": (256, 256), "per_layer_token_embd.weight": (32, 512),
    }  # fmt: skip
    found = encodings(shapes, "q4_k_m", Traits(layers=1))
    assert [name for name, kind in found.items() if kind] == [*shapes][4:]
