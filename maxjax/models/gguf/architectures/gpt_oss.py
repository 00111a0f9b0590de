"""GGUF files of gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..names import Rule, expert_names
from ..table import GGUFTable


def _of_gguf(given: Any, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE as in gpt-oss's own files: YaRN with ``truncate`` false, for which GGUF has no key."""
    rope = config["rope_scaling"]
    if rope is None:
        return {"rope_scaling": {"rope_type": "default"}}
    return {"rope_scaling": {**rope, "truncate": False}}


GPT_OSS_GGUF = GGUFTable(
    "gpt-oss",
    {
        ".ffn_norm": None, ".post_attention_norm": "post_attention_layernorm",
        ".attn_sinks": Rule("self_attn.sinks", only="weight"), **expert_names(router="router"),
    },
    keys={
        "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    fixed={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    read=_of_gguf,
    biases=(
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps",
        "ffn_down_exps",
    ),
    period=2, truncates=False,
)  # fmt: skip
