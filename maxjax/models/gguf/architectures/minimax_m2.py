"""GGUF files of MiniMax M2."""

from __future__ import annotations

from ...decoder.experts import MAPS_W
from ..names import HEAD_NORMS, Rule, expert_names
from ..table import GGUFTable

MINIMAX_M2_GGUF = GGUFTable(
    "minimax-m2",
    {
        **HEAD_NORMS,
        ".exp_probs_b": Rule("block_sparse_moe.e_score_correction_bias", only="bias"),
        **expert_names("block_sparse_moe", maps=MAPS_W),
    },
    keys={
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    fixed={"hidden_act": "silu"},
    read=lambda given, tensors, config: {
        "rotary_dim": given.count("rope.dimension_count", config["head_dim"])
    },
    write=lambda config: {"expert_gating_func": 2},
    written=("expert_gating_func",),
    biases=("exp_probs_b",),
    is_partial=True,
    has_head=True,
)
