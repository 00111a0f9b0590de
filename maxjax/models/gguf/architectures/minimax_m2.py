"""GGUF files of MiniMax M2."""

from __future__ import annotations

from typing import Any

from ...decoder.experts import MAPS_W
from ..metadata import unsupported
from ..names import HEAD_NORMS, Rule, expert_names
from ..table import GGUFTable


def _to_gguf(config: Any) -> dict[str, Any]:
    """Metadata that only this architecture has: shares are computed by sigmoids."""
    if config.tie_word_embeddings:
        raise unsupported("a tied head in a GGUF file of a MiniMax M2")
    return {"expert_gating_func": 2}


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
    write=_to_gguf,
    written=("expert_gating_func",),
    biases=("exp_probs_b",),
    is_partial=True,
)
