"""GGUF files of Phi-2."""

from __future__ import annotations

from typing import Any

from ..metadata import unsupported
from ..table import PLAIN_BIASES, GGUFTable, Tensors


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
