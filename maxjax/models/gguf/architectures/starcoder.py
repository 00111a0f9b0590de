"""GGUF files of StarCoder 2."""

from __future__ import annotations

from typing import Any

from ..metadata import unsupported
from ..table import PLAIN_BIASES, GGUFTable


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
