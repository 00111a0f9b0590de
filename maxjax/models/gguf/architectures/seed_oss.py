"""GGUF files of Seed-OSS."""

from __future__ import annotations

from ..table import GGUFTable

SEED_OSS_GGUF = GGUFTable(
    "seed_oss",
    {".ffn_norm": None, ".post_attention_norm": "post_attention_layernorm"},
    fixed={"hidden_act": "silu", "mlp_bias": False, "attention_out_bias": False},
)
