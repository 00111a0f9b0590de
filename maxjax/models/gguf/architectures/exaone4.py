"""GGUF files of EXAONE 4."""

from __future__ import annotations

from typing import Any

from ..metadata import unsupported
from ..names import AFTER_NORMS, HEAD_NORMS
from ..table import GGUFTable

# llama.cpp uses the sliding window only in models with exactly this many layers.
_LAYERS = 64


def _write(config: Any) -> dict[str, Any]:
    is_plain = not any(config.slides) and all(config.rotates)
    is_deep = config.slides == config.rotates and any(config.slides)
    if not (is_deep if config.num_hidden_layers == _LAYERS else is_plain):
        raise unsupported(
            f"the sliding window, or none, of an EXAONE 4 of {config.num_hidden_layers} layers in a GGUF file"
        )
    return {}


EXAONE4_GGUF = GGUFTable(
    "exaone4",
    {
        **HEAD_NORMS,
        **AFTER_NORMS,
    },
    fixed={"hidden_act": "silu"},
    read=lambda given, tensors, config: {"sliding_window": config.get("sliding_window")},
    write=_write,
    biases=(),
    period=4,
    is_divided=True,
    is_square=True,
)
