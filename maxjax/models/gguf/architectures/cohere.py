"""GGUF files of Command-R and Command-A."""

from __future__ import annotations

from typing import Any

from ..metadata import unsupported
from ..names import HEAD_NORMS
from ..table import GGUFTable

_EPSILON = ("attention.layer_norm_epsilon", "layer_norm_eps")

# llama.cpp reads norms of queries and keys only in models with at least this many layers.
_DEEP = 64


def _write(config: Any) -> dict[str, Any]:
    if bool(config.qk_norm) is not (config.num_hidden_layers >= _DEEP):
        raise unsupported(f"'use_qk_norm' in a GGUF file of {config.num_hidden_layers} layers")
    return {}


COHERE_GGUF = GGUFTable(
    "command-r",
    {
        ".ffn_norm": None,
        **HEAD_NORMS,
    },
    keys={"logit_scale": "logit_scale"},
    fixed={"hidden_act": "silu"},
    read=lambda given, tensors, config: {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors},
    write=_write,
    biases=(),
    epsilon=_EPSILON,
    is_tied=True,
)

COHERE2_GGUF = GGUFTable(
    "cohere2",
    {".ffn_norm": None},
    keys={"logit_scale": "logit_scale"},
    fixed={"hidden_act": "silu"},
    biases=(),
    epsilon=_EPSILON,
    period=4,
    is_tied=True,
)
