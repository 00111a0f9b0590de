"""GGUF files of Hunyuan, with and without experts."""

from __future__ import annotations

from ..names import expert_names
from ..table import GGUFTable

# The norms of queries and keys: GGUF's names → the checkpoint's.
_HEAD_NORMS = {
    ".attn_q_norm": "self_attn.query_layernorm",
    ".attn_k_norm": "self_attn.key_layernorm",
}

HUNYUAN_GGUF = GGUFTable("hunyuan-dense", _HEAD_NORMS, fixed={"hidden_act": "silu"}, biases=())

HUNYUAN_MOE_GGUF = GGUFTable(
    "hunyuan-moe",
    {
        **_HEAD_NORMS,
        **expert_names(router="gate.wg", shared="shared_mlp"),
    },
    keys={
        "expert_count": "num_experts",
        "expert_used_count": "moe_topk",
        "expert_feed_forward_length": "intermediate_size",
        "expert_shared_feed_forward_length": "intermediate_size",
    },
    fixed={"hidden_act": "silu"},
    biases=(),
)
