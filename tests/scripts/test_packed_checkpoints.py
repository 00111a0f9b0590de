"""scripts/packed_checkpoints.py: checkpoints of all formats, as maxjax opens them."""

import json
import math

import jax
import pytest

import maxjax
from maxjax.models import build
from scripts import aot
from scripts.aot_programs import MODELS, Case
from scripts.packed_checkpoints import FORMATS, write

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = MODELS["deepseek3"] | {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 128,
    "q_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
GPT_OSS = MODELS["gptoss"] | {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def opened(config, packed, directory):
    write(directory, config, packed)
    return build(maxjax.load_weights(directory), stacked=False)


def nbytes(model, name):
    """Bytes of the arrays whose names contain a text."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for path, leaf in leaves
               if name in jax.tree_util.keystr(path, simple=True, separator="."))  # fmt: skip


# Bits of a weight with its scales and zero points, in a matrix of 512 x 256.
BITS = {
    "FP8": 8 + 32 / 128**2, "GPTQ": 4 + (16 + 4) / 128 + 32 / 512, "AWQ": 4 + (16 + 4) / 128,
    "INT8": 8 + 32 / 256, "GPTQ_ORDER": 4 + (16 + 4) / 128 + 32 / 512,
    "NVFP4": 4 + 8 / 16 + 8 * (4 + 4) / (512 * 256),
    # Tables of 16 and of 256 values, and settings of 256 bytes.
    "NF4": 4 + 32 / 64 + 8 * (16 * 4 + 256) / (512 * 256),
    "NF4_NESTED": 4 + 8 / 64 + 32 / 64 / 256 + 8 * (16 * 4 + 256 * 4 + 256) / (512 * 256),
}  # fmt: skip


@pytest.mark.parametrize("packed", BITS)
def test_a_dense_model_has_the_bits_of_the_format(packed, tmp_path):
    model = opened(LLAMA, packed, tmp_path)
    for layer in (0, 1):
        found = nbytes(model, f"layers.{layer}.mlp.up_proj.")
        assert found == pytest.approx(512 * 256 * BITS[packed] / 8, abs=1)
    assert nbytes(model, "lm_head") == 64 * 256 * 2


@pytest.mark.parametrize(("packed", "bits"), [("FP8", 8 + 32 / 128**2), ("INT4", 4 + 16 / 32)])
def test_the_experts_of_a_mixture_have_the_bits_of_the_format(packed, bits, tmp_path):
    model = opened(DEEPSEEK, packed, tmp_path)
    weights = 8 * 3 * 256 * 128
    assert nbytes(model, ".experts.") == pytest.approx(weights * bits / 8, rel=0.001)
    shared = 3 * 256 * 128 * (1 + 1 / 4096 if packed == "FP8" else 2)
    assert nbytes(model, ".shared_experts.") == pytest.approx(shared, abs=1)
    assert nbytes(model, "mlp.gate.weight") == 8 * 256 * 2


def test_the_experts_of_gpt_oss_are_packed_and_have_biases(tmp_path):
    model = opened(GPT_OSS, "MXFP4", tmp_path)
    weights, biases = 2 * 8 * 3 * 64 * 96, 2 * 8 * (2 * 96 + 64)
    assert nbytes(model, ".experts.") == weights * (4 + 8 / 32) / 8 + biases * 2
    assert nbytes(model, "layers.0.self_attn.q_proj.weight") == 128 * 64 * 2


@pytest.mark.parametrize("packed", FORMATS)
def test_files_take_no_space(packed, tmp_path):
    config = GPT_OSS if packed == "MXFP4" else LLAMA | {"hidden_size": 4096}
    write(tmp_path, config, packed)
    file = (tmp_path / "model.safetensors").stat()
    assert file.st_blocks * 512 < 1 << 16 and file.st_size > 1 << 18
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(("packed", "bits"), [("Q8_0", 8.5), ("Q4_K", 4.5)])
def test_a_model_in_blocks_of_ggml(packed, bits, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    mesh = maxjax.make_mesh(model=1)
    model = aot.model_of(Case("decode", str(tmp_path), 2, {}, 1, 1, packed=packed), mesh)
    assert nbytes(model, "mlp.up_proj.") == 2 * 512 * 256 * bits / 8
    assert model.config.vocab_size == 4096
