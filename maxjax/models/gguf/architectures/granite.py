"""GGUF files of Granite 3, with and without experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..metadata import Settings
from ..names import expert_names
from ..table import PERMUTED, GGUFTable


def attention_scale(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, float]:
    """The factor of attention scores; in a file without one it is llama.cpp's, and not Granite's 1."""
    scale = given.number("attention.scale", 0.0, positive=False)
    return {"attention_multiplier": scale or config["head_dim"] ** -0.5}


def _with_rope(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    if not given.flag("rope.scaling.finetuned", True):
        raise given.unsupported("a Granite without RoPE and without Mamba 2")
    return attention_scale(given, tensors, config)


def _read(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    mlp_bias = "blk.0.ffn_gate.bias" in tensors
    return {**_with_rope(given, tensors, config), "mlp_bias": mlp_bias}


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
    read=_read,
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
    read=_with_rope, biases=("attn_q", "attn_k", "attn_v", "attn_output"), model_types=(),
)  # fmt: skip
