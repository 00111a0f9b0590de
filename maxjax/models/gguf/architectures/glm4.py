"""GGUF files of GLM-4, GLM-4-0414 and GLM-4.5; those of GLM-4.5 may have layers of multi-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....graph.weights import WeightData
from ..metadata import Settings
from ..names import HEAD_NORMS, NEXT, ROUTED_DEFAULTS, ROUTED_KEYS, Rule, expert_names
from ..pieces import check_rows, rows
from ..table import GATE_UP, GGUFTable

GLM_GGUF = GGUFTable(
    "chatglm", GATE_UP, fixed={"hidden_act": "silu"}, is_partial=True, is_square=True
)


def _join(given: Settings, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """Puts the rotated rows of queries and keys into the order of neighbouring pairs.

    Text models of GLM-4.1V and GLM-4.6V (those with ``rope.dimension_sections``) have them in two halves, because
    llama.cpp's multimodal RoPE rotates halves (``Glm4Model.normal_to_neox`` of its converter).
    """
    found = dict(tensors)
    if not any(given.items("rope.dimension_sections", int, [])):
        return found
    heads = given.count("attention.head_count")
    width = given.count("attention.key_length", given.count("embedding_length") // heads)
    half = given.count("rope.dimension_count", width, maximum=width) // 2
    counts = {"q_proj": heads, "k_proj": given.count("attention.head_count_kv", heads)}
    for name, data in tensors.items():
        count = counts.get(name.rpartition(".")[0].rpartition(".")[2])
        if count is not None:
            check_rows(name, data, count * width)
            order = np.arange(count * width).reshape(count, width)
            halves = order[:, : 2 * half].reshape(count, 2, half)
            order[:, : 2 * half] = halves.swapaxes(1, 2).reshape(count, -1)
            found[name] = rows(name, [data], order.reshape(-1))
    return found


GLM4_GGUF = GGUFTable(
    "glm4",
    {
        **GATE_UP,
        ".post_attention_norm": "post_self_attn_layernorm",
        ".post_ffw_norm": "post_mlp_layernorm",
    },
    fixed={"hidden_act": "silu"},
    is_partial=True,
    join=_join,
)


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
