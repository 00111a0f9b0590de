"""GGUF files of Granite 3, with and without experts."""

from __future__ import annotations

from dataclasses import replace

from ..names import expert_names
from ..table import PERMUTED, GGUFTable

GRANITE_GGUF = GGUFTable(
    "granite",
    PERMUTED,
    keys={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    fixed={"hidden_act": "silu"},
    read=lambda given, tensors, config: {"mlp_bias": "blk.0.ffn_gate.bias" in tensors},
    biases=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    is_divided=True,
)

GRANITEMOE_GGUF = replace(
    GRANITE_GGUF,
    architecture="granitemoe",
    tensors={**GRANITE_GGUF.tensors, **expert_names("block_sparse_moe", "router.layer")},
    keys={
        **GRANITE_GGUF.keys, "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    read=None, biases=("attn_q", "attn_k", "attn_v", "attn_output"), model_types=(),
)  # fmt: skip
