"""GGUF files of OLMo, OLMo 2 and 3, and OLMoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...parts.rotary import Rope
from ..metadata import Settings, unsupported
from ..names import AFTER_NORMS, HEAD_NORMS, expert_names
from ..table import PERMUTED, GGUFTable


def _read(given: Settings, tensors: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """A file with a sliding window is that of an OLMo 3."""
    if not config.get("sliding_window"):
        return {}
    return {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}


def _write(config: Any) -> dict[str, Any]:
    """Checks the RoPE of sliding layers: llama.cpp uses the base of the other layers, without scaling."""
    near = config.local_rope
    if near is not None and near != Rope(config.rope.theta):
        raise unsupported("rope settings of sliding layers alone in a GGUF file")
    return {}


OLMO2_GGUF = GGUFTable(
    "olmo2",
    {
        **HEAD_NORMS,
        **AFTER_NORMS,
    },
    fixed={"hidden_act": "silu"},
    read=_read,
    write=_write,
    biases=(),
    period=4,
    has_head=True,
    model_types=("olmo3",),
)

OLMO_GGUF = GGUFTable(
    "olmo",
    {**PERMUTED, ".attn_norm": None, ".ffn_norm": None, "output_norm": None},
    keys={"attention.clamp_kqv": "clip_qkv"},
    fixed={"hidden_act": "silu"},
    biases=(),
    is_square=True,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
)

OLMOE_GGUF = GGUFTable(
    "olmoe",
    {
        **HEAD_NORMS,
        ".ffn_gate": None,
        ".ffn_up": None,
        ".ffn_down": None,
        **expert_names(),
    },
    keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    fixed={"hidden_act": "silu", "norm_topk_prob": False, "clip_qkv": None},
    biases=(),
)
