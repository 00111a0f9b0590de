"""GGUF files of Llama 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...decoder.config import all_but_every
from ..metadata import unsupported
from ..names import expert_names
from ..table import GGUFTable

# n, where every n-th layer has full attention and no RoPE.
_PERIOD = 4


def _of_gguf(given: Any, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The widths, and settings that are fixed in llama.cpp's code."""
    if given.count("attention.sliding_window", 1, minimum=0) == 0:
        raise given.unsupported("a Llama 4 without chunks")
    chunked = all_but_every(_PERIOD, config["num_hidden_layers"])
    return {
        "intermediate_size": given.count("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": given.count("interleave_moe_layer_step", 1),
        "use_qk_norm": given.count("expert_count") != 128,
        "sliding_window": None,
        "layer_types": ["chunked_attention" if one else "full_attention" for one in chunked],
    }


def _to_gguf(config: Any) -> dict[str, Any]:
    """The widths, and which layers have experts."""
    if config.rotates != all_but_every(_PERIOD, config.num_hidden_layers):
        raise unsupported("other layers without RoPE than every fourth in a GGUF file")
    step = config.sparse.index(True) + 1 if any(config.sparse) else 0
    if not step or config.sparse != tuple(
        (i + 1) % step == 0 for i in range(config.num_hidden_layers)
    ):
        raise unsupported("experts in other layers than every n-th in a GGUF file")
    return {
        "feed_forward_length": config.dense_size, "interleave_moe_layer_step": step,
        "expert_feed_forward_length": config.intermediate_size,
    }  # fmt: skip


LLAMA4_GGUF = GGUFTable(
    "llama4",
    {
        **{f".ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **expert_names("feed_forward", "router", shared="shared_expert"),
    },
    keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    fixed={
        "hidden_act": "silu", "attention_chunk_size": 8192, "attn_temperature_tuning": True,
        "floor_scale": 8192, "attn_scale": 0.1,
    },
    read=_of_gguf, write=_to_gguf,
    written=("expert_feed_forward_length", "interleave_moe_layer_step"),
    biases=(), period=_PERIOD, is_divided=True,
)  # fmt: skip
