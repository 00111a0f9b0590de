"""GGUF files of Phi-2 and Phi-3."""

from __future__ import annotations

from typing import Any

from ..metadata import unsupported
from ..table import GATE_UP, PLAIN_BIASES, GGUFTable, Tensors


def _split(config: Any, tensors: Tensors) -> Tensors:
    if config.qk_norm:
        raise unsupported("'qk_layernorm' in a GGUF file of 'phi2'")
    return tensors


PHI_GGUF = GGUFTable(
    "phi2",
    {
        "output_norm": "model.final_layernorm",
        ".attn_output": "self_attn.dense",
        ".ffn_norm": None,
        ".ffn_gate": None,
        ".ffn_up": "mlp.fc1",
        ".ffn_down": "mlp.fc2",
    },
    fixed={"hidden_act": "gelu_new"},
    biases=(*PLAIN_BIASES, "output"),
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    is_partial=True,
    has_head=True,
    split=_split,
)

PHI3_GGUF = GGUFTable(
    "phi3",
    {
        **GATE_UP,
        **dict.fromkeys((".attn_q", ".attn_k", ".attn_v")),
        ".attn_qkv": "self_attn.qkv_proj",
    },
    keys={
        "attention.sliding_window": "sliding_window",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
    fixed={"hidden_act": "silu"},
    unused=("attention.sliding_window",),
    biases=(),
    is_partial=True,
    is_long=True,
)
