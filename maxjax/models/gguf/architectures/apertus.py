"""GGUF files of Apertus: the numbers of xIELU are metadata, not tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..names import HEAD_NORMS
from ..table import GGUFTable

# The numbers of xIELU, by the names of the files.
_SHAPES = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


def _read(given: Any, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE; a file without divisors of the frequencies has a plain one, which an Apertus must say."""
    return {"rope_scaling": config["rope_scaling"] or {"rope_type": "default"}}


APERTUS_GGUF = GGUFTable(
    "apertus",
    {
        ".attn_norm": "attention_layernorm",
        ".ffn_norm": "feedforward_layernorm",
        **HEAD_NORMS,
        ".ffn_gate": None,
    },
    fixed={"hidden_act": "xielu"},
    read=_read,
    biases=("attn_q", "attn_k", "attn_v", "attn_output"),
    is_divided=True,
    has_head=True,
    numbers={f"xielu.{name}": (f"mlp.act_fn.{name}", shape) for name, shape in _SHAPES.items()},
)
