"""GGUF files of GLM-4.5, which may have layers of multi-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..names import HEAD_NORMS, NEXT, ROUTED_DEFAULTS, ROUTED_KEYS, Rule, expert_names
from ..table import GGUFTable


def _of_gguf_moe(given: Any, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that depend on the tensors; layers of multi-token prediction are not counted."""
    more = given.count("nextn_predict_layers", 0, minimum=0)
    return {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "num_hidden_layers": config["num_hidden_layers"] - more,
    }


GLM4_MOE_GGUF = GGUFTable(
    "glm4moe",
    {
        ".ffn_norm": None,
        ".post_attention_norm": "post_attention_layernorm",
        **HEAD_NORMS,
        ".exp_probs_b": Rule("mlp.gate.e_score_correction_bias", only="bias"),
        **expert_names(shared="shared_experts"),
        **NEXT,
    },
    keys=ROUTED_KEYS,
    fixed={"hidden_act": "silu", "n_group": 1, "topk_group": 1, **ROUTED_DEFAULTS},
    read=_of_gguf_moe,
    write=lambda config: {"expert_gating_func": 2},
    written=("expert_gating_func",),
    biases=("attn_q", "attn_k", "attn_v", "exp_probs_b"),
    is_partial=True,
)
