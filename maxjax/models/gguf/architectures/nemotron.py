"""GGUF files of Nemotron and of Arcee's AFM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layouts import Plus
from ..names import Rule
from ..table import PERMUTED, PLAIN_BIASES, GGUFTable

_ONE_ADDED = Plus(-1.0)


def _read(given: Any, tensors: Mapping[str, Any], config: Any) -> dict[str, Any]:
    return {"mlp_bias": "blk.0.ffn_up.bias" in tensors}


NEMOTRON_GGUF = GGUFTable(
    "nemotron",
    {
        "output_norm": Rule("model.norm", _ONE_ADDED),
        ".attn_norm": Rule("input_layernorm", _ONE_ADDED),
        ".ffn_norm": Rule("post_attention_layernorm", _ONE_ADDED),
        ".ffn_gate": None,
    },
    fixed={"hidden_act": "relu2"},
    read=_read,
    biases=PLAIN_BIASES,
    epsilon=("attention.layer_norm_epsilon", "norm_eps"),
    is_partial=True,
    has_head=True,
    is_square=True,
)

ARCEE_GGUF = GGUFTable(
    "arcee",
    {**PERMUTED, ".ffn_gate": None},
    fixed={"hidden_act": "relu2", "mlp_bias": False},
    biases=(),
    is_divided=True,
)
