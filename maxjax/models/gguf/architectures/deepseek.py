"""GGUF files of DeepSeek V2 and V3.

GGUF files hold ``kv_b_proj`` as two tensors, keys ``[C, N]`` and values ``[V, C]`` of each head for latents of
size C, so that llama.cpp can attend to latents as to one KV head. Files from before April 2025 hold it unsplit.

Source: ``DeepseekV2Model`` of llama.cpp's converter, its ``src/models/deepseek2.cpp``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import CheckpointFormatError
from ....graph.weights import WeightData
from ..metadata import MAX_EXPERTS, Settings, unsupported
from ..names import NEXT, ROUTED_DEFAULTS, ROUTED_KEYS, Rule, expert_names
from ..pieces import computed
from ..table import GGUFTable

_LOG = logging.getLogger("maxjax")
_BOTH, _KEYS, _VALUES = (f"self_attn.{part}_proj.weight" for part in ("kv_b", "k_b", "v_b"))
# llama.cpp's numbers of the functions that give scores to experts.
_SOFTMAX, _SIGMOID = 1, 2


def _join(given: Settings, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """Joins keys ``[H, C, N]`` and values ``[H, V, C]`` to ``kv_b_proj`` ``[H · (N + V), C]``."""
    found = dict(tensors)
    for name in tensors:
        if not name.endswith(_KEYS):
            continue
        front = name.removesuffix(_KEYS)
        pair: list[Any] = [found.pop(name), found.pop(front + _VALUES, None)]
        shapes: list[Any] = [
            () if one is None else tuple(map(int, one.logical_shape)) for one in pair
        ]
        if pair[1] is None or [len(shape) for shape in shapes] != [3, 3]:
            raise CheckpointFormatError(
                "keys without values of latents", path=given.path, tensor=name,
                expected="[H, C, N] and [H, V, C]", found=shapes,
            )  # fmt: skip
        (heads, size, keys), (others, values, other) = shapes
        if (heads, size) != (others, other):
            raise CheckpointFormatError(
                "keys and values differ in their heads or latents", path=given.path, tensor=name,
                expected=[heads, values, size], found=shapes[1],
            )  # fmt: skip

        def join(k: np.ndarray, v: np.ndarray) -> np.ndarray:
            return np.concatenate([k.swapaxes(1, 2), v], 1).reshape(-1, k.shape[1])

        new = front + _BOTH
        if new in found:
            raise CheckpointFormatError(
                "the tensor is there as a whole too", path=given.path, tensor=name
            )
        found[new] = computed(new, pair, join, (heads * (keys + values), size))
    return found


def _split(config: Any, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """Splits ``kv_b_proj`` into keys ``[H, C, N]`` and values ``[H, V, C]``; blocks are dequantised."""
    heads, keys, values = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    size = config.kv_lora_rank

    def split(both: np.ndarray) -> np.ndarray:
        return both.reshape(heads, keys + values, size)[:, :keys].swapaxes(1, 2)

    def rest(both: np.ndarray) -> np.ndarray:
        return both.reshape(heads, keys + values, size)[:, keys:]

    found: dict[str, WeightData] = {}
    for name, data in tensors.items():
        if not name.endswith(_BOTH):
            found[name] = data
            continue
        front = name.removesuffix(_BOTH)
        shape = tuple(map(int, data.logical_shape))
        if shape != (heads * (keys + values), size):
            raise CheckpointFormatError(
                "not the shape that the configuration says", tensor=name,
                expected=[heads * (keys + values), size], found=shape,
            )  # fmt: skip
        found[front + _KEYS] = computed(front + _KEYS, [data], split, (heads, size, keys))
        found[front + _VALUES] = computed(front + _VALUES, [data], rest, (heads, values, size))
    return found


def _of_gguf(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The family (V2 or V3), the widths of a head, and values that files leave out."""
    rotated = given.count("rope.dimension_count")
    width, value = (
        given.count(f"attention.{kind}_length_mla", given.count(f"attention.{kind}_length"))
        for kind in ("key", "value")
    )
    if width <= rotated:
        raise given.wrong("attention.key_length_mla", f"over {rotated}", width, "is out of range")
    gating = given.count("expert_gating_func", 0, minimum=0) or _SOFTMAX
    if gating not in (_SOFTMAX, _SIGMOID):
        raise given.unsupported(f"'{given.prefix}expert_gating_func' {gating}")
    # Layers of multi-token prediction, as of GLM-4.7-Flash.
    more = given.count("nextn_predict_layers", 0, minimum=0)
    found = {
        "num_hidden_layers": config["num_hidden_layers"] - more,
        "num_key_value_heads": config["num_attention_heads"],
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": width - rotated, "v_head_dim": value,
        "q_lora_rank": given.count("attention.q_lora_rank", None),
        "routed_scaling_factor": config["routed_scaling_factor"] or 1.0,
    }  # fmt: skip
    groups = given.count("expert_group_count", 1, maximum=MAX_EXPERTS)
    chosen = given.count("expert_group_used_count", groups, maximum=groups)
    if gating == _SIGMOID or groups > 1:
        found |= {"n_group": groups, "topk_group": chosen}
    if gating == _SOFTMAX:
        method = "group_limited_greedy" if groups > 1 else "greedy"
        kinds = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
        found |= {**kinds, "topk_method": method}
    return found


def _to_gguf(config: Any) -> dict[str, Any]:
    """The widths of a head, and how experts are chosen."""
    if not config.rope.interleaved:
        raise unsupported("'rope_interleave' False in a GGUF file")
    if not config.shared_size:
        raise unsupported("'n_shared_experts' 0 in a GGUF file")
    softmax = config.scoring == "softmax"
    groups = {}
    if config.n_group > 1:
        groups = {
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
        if softmax:
            _LOG.warning(
                "llama.cpp chooses groups of experts by the two best scores, this model by the best: "
                "its results differ"
            )
    size, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    dense = config.sparse.index(True) if any(config.sparse) else config.num_hidden_layers
    if not all(config.sparse[dense:]):
        raise unsupported("layers without experts after one with experts in a GGUF file")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": size + rotated,
        "attention.value_length": size,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "leading_dense_block_count": dense,
        "expert_gating_func": _SOFTMAX if softmax else _SIGMOID,
        **groups,
    }


_EXTRA = ("q_a", "q_b", "kv_b", "k_b", "v_b")
DEEPSEEK_GGUF = GGUFTable(
    "deepseek2",
    {
        ".attn_k": None,
        ".attn_v": None,
        **{f".attn_{part}": f"self_attn.{part}_proj" for part in _EXTRA},
        ".attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        ".attn_q_a_norm": "self_attn.q_a_layernorm",
        ".attn_kv_a_norm": "self_attn.kv_a_layernorm",
        ".exp_probs_b": Rule("mlp.gate.e_score_correction_bias", only="bias"),
        **expert_names(shared="shared_experts"),
        **NEXT,
    },
    keys={
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length_mla": "v_head_dim",
        **ROUTED_KEYS,
    },
    fixed={"hidden_act": "silu", "rope_interleave": True, **ROUTED_DEFAULTS},
    read=_of_gguf,
    write=_to_gguf,
    written=(
        "attention.key_length_mla", "expert_gating_func", "expert_group_count",
        "expert_group_used_count",
    ),
    biases=("exp_probs_b",),
    width="rope.dimension_count",
    log_multiplier=0.1,
    join=_join,
    split=_split,
)  # fmt: skip
