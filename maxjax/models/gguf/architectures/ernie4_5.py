"""GGUF files of ERNIE 4.5, with and without experts."""

from __future__ import annotations

from typing import Any

from ..layouts import Matrix
from ..metadata import unsupported
from ..names import Rule, expert_names
from ..table import GGUFTable


def _to_gguf_moe(config: Any) -> dict[str, Any]:
    """Metadata that only this architecture has."""
    numbers = range(config.num_hidden_layers)
    if config.sparse != tuple(
        (i + 1) % config.interval == 0 and i >= config.first for i in numbers
    ):
        raise unsupported("'moe_layer_end_index' before the last layer in a GGUF file")
    return {"expert_shared_feed_forward_length": config.shared_size or 0}


ERNIE4_5_MOE_GGUF = GGUFTable(
    "ernie4_5-moe",
    {
        ".exp_probs_b": Rule("mlp.moe_statics.e_score_correction_bias", Matrix(), "bias"),
        **expert_names(shared="shared_experts"),
    },
    keys={
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "moe_num_shared_experts",
        "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
    },
    fixed={"hidden_act": "silu", "use_bias": False, "moe_norm_min": 1e-12},
    write=_to_gguf_moe,
    written=("expert_shared_feed_forward_length",),
    biases=("exp_probs_b",),
)
