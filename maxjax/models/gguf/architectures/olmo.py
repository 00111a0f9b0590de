"""GGUF files of OLMo."""

from __future__ import annotations

from ..table import PERMUTED, GGUFTable

OLMO_GGUF = GGUFTable(
    "olmo",
    {**PERMUTED, ".attn_norm": None, ".ffn_norm": None, "output_norm": None},
    keys={"attention.clamp_kqv": "clip_qkv"},
    fixed={"hidden_act": "silu"},
    biases=(),
    is_square=True,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
)
