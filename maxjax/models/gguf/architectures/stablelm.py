"""GGUF files of StableLM."""

from __future__ import annotations

from ..table import GGUFTable

STABLELM_GGUF = GGUFTable(
    "stablelm",
    keys={"use_parallel_residual": "use_parallel_residual"},
    fixed={"hidden_act": "silu", "qk_layernorm": False},
    read=lambda given, tensors, config: {
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
    },
    biases=("attn_q", "attn_k", "attn_v", "attn_norm", "ffn_norm", "output_norm"),
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    is_partial=True,
    has_head=True,
)
