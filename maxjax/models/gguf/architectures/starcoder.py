"""GGUF files of StarCoder (GPT-BigCode) and StarCoder 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..metadata import unsupported
from ..names import GROUPS, Rule
from ..table import PLAIN_BIASES, GGUFTable


def _read(given: Any, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    if config["num_key_value_heads"] != 1:
        raise given.unsupported("a StarCoder with more than one key")
    return {"n_inner": config["intermediate_size"], "multi_query": True}


def _write(config: Any) -> dict[str, Any]:
    if not config.multi_query:
        raise unsupported("'multi_query' false in a GGUF file of 'starcoder'")
    return {}


STARCODER_GGUF = GGUFTable(
    "starcoder",
    {
        "token_embd": "transformer.wte", "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f", ".attn_norm": "ln_1", ".ffn_norm": "ln_2",
        **dict.fromkeys((".attn_q", ".attn_k", ".attn_v", ".ffn_gate")),
        ".attn_qkv": Rule("attn.c_attn", GROUPS), ".attn_output": "attn.c_proj",
        ".ffn_up": "mlp.c_fc", ".ffn_down": "mlp.c_proj",
    },
    fixed={"activation_function": "gelu_pytorch_tanh", "scale_attn_weights": True},
    layer="transformer.h.*.",
    read=_read, write=_write, biases=PLAIN_BIASES, has_rope=False,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
)  # fmt: skip


def _write_2(config: Any) -> dict[str, Any]:
    if not config.attention_bias:
        raise unsupported("'use_bias' false in a GGUF file of 'starcoder2'")
    return {}


STARCODER2_GGUF = GGUFTable(
    "starcoder2",
    {".ffn_gate": None, ".ffn_up": "mlp.c_fc", ".ffn_down": "mlp.c_proj"},
    keys={"attention.sliding_window": "sliding_window"},
    fixed={"hidden_act": "gelu_pytorch_tanh"},
    read=lambda given, tensors, config: {"use_bias": config["attention_bias"]},
    write=_write_2,
    biases=PLAIN_BIASES,
    epsilon=("attention.layer_norm_epsilon", "norm_epsilon"),
    unused=("attention.sliding_window",),
)
