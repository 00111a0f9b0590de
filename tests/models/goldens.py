"""Small models of every family whose weights are made of their names, and transformers' logits.

``goldens.npz`` has the logits, so that they are compared without torch; with it they are made anew.
``python -m tests.models.goldens`` writes the file.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import safetensors.numpy

from maxjax.dtype import DType
from maxjax.models import find_family

FILE = Path(__file__).parent / "goldens.npz"
VOCAB = 80
IDS = np.random.default_rng(5).integers(1, VOCAB, (2, 14)).astype(np.int32)

_SMALL = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "rope_theta": 10000.0,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 16,
          "sliding_window": 5}  # fmt: skip
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

# Name → architecture, model type, settings.
MODELS = {
    "llama": ("LlamaForCausalLM", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("LlamaForCausalLM", "llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("LlamaForCausalLM", "llama", {"rope_scaling": YARN, "num_key_value_heads": 1}),
    "llama-linear": ("LlamaForCausalLM", "llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-dynamic": ("LlamaForCausalLM", "llama", {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8}),
    "mistral": ("MistralForCausalLM", "mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {"head_dim": None}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"num_key_value_heads": 4}),
    "gemma": ("GemmaForCausalLM", "gemma", _GEMMA | {"num_key_value_heads": 1}),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _GEMMA | _CAPS),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _GEMMA | {
        "num_hidden_layers": 7, "rope_local_base_freq": 500.0, "layer_types":
        ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]}),
    "gpt2": ("GPT2LMHeadModel", "gpt2", {
        "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", "mixtral", _EXPERTS),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "qwen3_moe", {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
        "decoder_sparse_step": 2}),
}  # fmt: skip


def config_of(name):
    """The content of ``config.json``."""
    architecture, model_type, settings = MODELS[name]
    base = {"vocab_size": VOCAB} if model_type == "gpt2" else _SMALL
    found = {**base, **settings, "architectures": [architecture], "model_type": model_type}
    return {key: value for key, value in found.items() if value is not None}


def values(name, shape, model_type):
    """The values of a weight, by its name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    norm = "norm" in name or ".ln_" in name
    if norm and name.endswith("weight"):
        return (rng.normal(0, 0.2, shape) + ("gemma" not in model_type)).astype(np.float32)
    size = 1.5 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.3
    return rng.normal(0, size, shape).astype(np.float32)


def write(name, directory):
    """The model's directory, as Hugging Face lays it out."""
    raw = config_of(name)
    family = find_family(raw)
    settings = family.config.from_dict(raw)
    model = family.make(settings, (), DType.float32, DType.float32)
    shapes = {key: tuple(map(int, weight.shape)) for key, weight in model.raw_state_dict().items()}
    if settings.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    tensors = {key: values(key, shape, raw["model_type"]) for key, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw))


def of_transformers(directory):
    """transformers' logits, float64 inside."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor(IDS).long()).logits.float().numpy()


def main():
    import tempfile

    found = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as directory:
            write(name, Path(directory))
            found[name] = of_transformers(directory)
        print(name, found[name].std())
    np.savez_compressed(FILE, **found)


if __name__ == "__main__":
    main()
