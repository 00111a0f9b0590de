"""GGUF files of SmolLM3."""

from __future__ import annotations

from typing import Any

from ...decoder.config import all_but_every
from ..metadata import unsupported
from ..table import PERMUTED, GGUFTable


def _write(config: Any) -> dict[str, Any]:
    """Checks the layers without RoPE: llama.cpp has only one pattern of these."""
    if config.rotates != all_but_every(4, config.num_hidden_layers):
        raise unsupported("'no_rope_layers' other than every fourth layer in a GGUF file")
    return {}


SMOLLM3_GGUF = GGUFTable(
    "smollm3",
    PERMUTED,
    fixed={"hidden_act": "silu", "no_rope_layer_interval": 4, "use_sliding_window": False},
    write=_write,
    biases=(),
)
