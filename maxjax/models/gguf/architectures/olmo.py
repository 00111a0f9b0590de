"""GGUF files of OLMo, OLMo 2 and 3, and OLMoE."""

from __future__ import annotations

from ..names import HEAD_NORMS, expert_names
from ..table import PERMUTED, GGUFTable

OLMO_GGUF = GGUFTable(
    "olmo",
    {**PERMUTED, ".attn_norm": None, ".ffn_norm": None, "output_norm": None},
    keys={"attention.clamp_kqv": "clip_qkv"},
    fixed={"hidden_act": "silu"},
    biases=(),
    is_square=True,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
)

OLMOE_GGUF = GGUFTable(
    "olmoe",
    {
        **HEAD_NORMS,
        ".ffn_gate": None,
        ".ffn_up": None,
        ".ffn_down": None,
        **expert_names(),
    },
    keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    fixed={"hidden_act": "silu", "norm_topk_prob": False, "clip_qkv": None},
    biases=(),
)
