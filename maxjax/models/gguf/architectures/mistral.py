"""GGUF files of Ministral 3. A Mistral's GGUF files are those of a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..metadata import Settings, unsupported
from ..table import PERMUTED, GGUFTable


def _read(given: Settings, tensors: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The RoPE of a Ministral 3, with the scaling of queries by position."""
    rope = config["rope_scaling"] or {"rope_type": "default"}
    if (beta := given.number("attention.temperature_scale", None, positive=False)) is not None:
        rope = {**rope, "llama_4_scaling_beta": beta}
    return {"rope_scaling": rope}


def _write(config: Any) -> dict[str, Any]:
    """The scaling of queries by position, for which llama.cpp uses the original context length."""
    growth, scaling = config.query_scaling, config.rope.scaling
    if growth is None:
        return {}
    if growth.length != getattr(scaling, "original_max_position_embeddings", None):
        raise unsupported("'llama_4_scaling_beta' without yarn in a GGUF file")
    return {"attention.temperature_scale": growth.beta}


MINISTRAL3_GGUF = GGUFTable(
    "mistral3",
    PERMUTED,
    keys={"attention.sliding_window": "sliding_window"},
    fixed={"hidden_act": "silu"},
    read=_read,
    write=_write,
    written=("attention.temperature_scale",),
    unused=("attention.sliding_window",),
    biases=(),
    log_multiplier=1.0,
)
