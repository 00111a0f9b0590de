"""GGUF files of Qwen3-Next and Qwen 3.5: the tensors of the gated delta rule in llama.cpp's order.

There are several value heads for each key head. In Hugging Face's checkpoints, the value heads of one key head
are consecutive; in llama.cpp's Qwen 3.5, the first value head of every key head comes first, then the second of
every key head. Qwen3-Next's files hold ``in_proj_qkvz`` as two tensors; files from 2025 hold it as one.

Source: ``Qwen3NextModel`` and ``_LinearAttentionVReorderBase`` of llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ....graph.weights import WeightData
from ...decoder.config import all_but_every
from ..layouts import Matrix, Plus
from ..metadata import Settings, unsupported
from ..names import NEXT, NO_SUFFIX, Rule, expert_names
from ..pieces import check_rows, columns, rows
from ..state_layouts import Logarithm, Taps
from ..table import GGUFTable

# (G, Dk, H, Dv): G key heads of width Dk, H value heads of width Dv.
Sizes = tuple[int, int, int, int]
_MIXED, _GATE, _BOTH = (f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "qkvz"))


def _sizes(config: Any) -> Sizes:
    return (
        config.linear_num_key_heads, config.linear_key_head_dim,
        config.linear_num_value_heads, config.linear_value_head_dim,
    )  # fmt: skip


def _sizes_of(given: Settings) -> Sizes:
    heads, inner = given.count("ssm.time_step_rank"), given.count("ssm.inner_size")
    groups = given.count("ssm.group_count")
    for key, size, by in (("inner_size", inner, heads), ("time_step_rank", heads, groups)):
        if size % by:
            raise given.wrong(f"ssm.{key}", f"a multiple of {by}", size, "does not fit")
    return groups, given.count("ssm.state_size"), heads, inner // heads


def _named(part: str, tensors: Mapping[str, WeightData], sizes: Sizes) -> list[str]:
    """The names of the tensors ``part`` of all layers; checks that they have the rows that the sizes give."""
    groups, width, heads, values = sizes
    count = 2 * groups * width + heads * values * (2 if part == _BOTH else 1)
    names = [name for name in tensors if name.endswith(part)]
    for name in names:
        check_rows(name, tensors[name], count)
    return names


# --- Qwen3-Next: queries, keys, values and gates of each key head are consecutive ----------------


def _order(sizes: Sizes) -> np.ndarray:
    """For each row of ``in_proj_qkvz``, its index in the rows of ``in_proj_qkv`` followed by ``in_proj_z``."""
    groups, width, heads, values = sizes
    ends = np.cumsum([groups * width, groups * width, heads * values, heads * values])
    parts = np.split(np.arange(ends[-1]), ends[:-1])
    return np.concatenate([part.reshape(groups, -1) for part in parts], 1).reshape(-1)


def _join(given: Settings, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """Joins ``in_proj_qkvz`` from its two parts."""
    found, sizes = dict(tensors), _sizes_of(given)
    names = _named(_MIXED, tensors, sizes)
    if not names:
        return found
    order = _order(sizes)
    for name in names:
        front = name.removesuffix(_MIXED)
        if front + _GATE in found:
            pair = [found.pop(name), found.pop(front + _GATE)]
            found[front + _BOTH] = rows(front + _BOTH, pair, order)
    return found


def _split(config: Any, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """Splits ``in_proj_qkvz`` into its two parts."""
    sizes = _sizes(config)
    if not _named(_BOTH, tensors, sizes):
        return dict(tensors)
    where = np.argsort(_order(sizes))
    found = {}
    for name, data in tensors.items():
        if name.endswith(_BOTH):
            front, gates = name.removesuffix(_BOTH), sizes[2] * sizes[3]
            found[front + _MIXED] = rows(front + _MIXED, [data], where[:-gates])
            found[front + _GATE] = rows(front + _GATE, [data], where[-gates:])
        else:
            found[name] = data
    return found


# --- Qwen 3.5: value heads in another order ------------------------------------------------------


def _reordered(
    sizes: Sizes, tensors: Mapping[str, WeightData], *, back: bool
) -> dict[str, WeightData]:
    if not _named(_MIXED, tensors, sizes):
        return dict(tensors)
    groups, width, heads, values = sizes
    order = np.arange(heads).reshape(groups, -1).T.reshape(-1)  # the first of each, the second, …
    order = np.argsort(order) if back else order
    wide = (order[:, None] * values + np.arange(values)).reshape(-1)
    keys = 2 * groups * width
    mixed = np.concatenate([np.arange(keys), keys + wide])
    by_rows = {
        "in_proj_qkv.weight": mixed, "conv1d.weight": mixed, "in_proj_z.weight": wide,
        "in_proj_a.weight": order, "in_proj_b.weight": order, "A_log": order, "dt_bias": order,
    }  # fmt: skip
    found = {}
    for name, data in tensors.items():
        part = name.rpartition("linear_attn.")[2] if "linear_attn." in name else ""
        if part in by_rows:
            data = rows(name, [data], by_rows[part])
        elif part == "out_proj.weight":
            data = columns(name, data, order, values)
        found[name] = data
    return found


def _own_layers(
    given: Settings, tensors: Mapping[str, WeightData]
) -> Iterable[tuple[str, WeightData]]:
    """The tensors without those of layers of multi-token prediction."""
    layers = given.count("block_count")
    first = layers - given.count("nextn_predict_layers", 0, minimum=0, maximum=layers - 1)
    left = tuple(f"model.layers.{i}." for i in range(first, layers))
    return ((name, data) for name, data in tensors.items() if not name.startswith(left))


def _restored(given: Settings, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    return _reordered(_sizes_of(given), dict(_own_layers(given, tensors)), back=True)


def _tiled(config: Any, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    return _reordered(_sizes(config), tensors, back=False)


# --- settings ------------------------------------------------------------------------------------


def _of_gguf(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of the delta rule, and which layers have it."""
    groups, width, heads, values = _sizes_of(given)
    layers = config["num_hidden_layers"]
    layers -= given.count("nextn_predict_layers", 0, minimum=0, maximum=layers - 1)
    found = {
        "num_hidden_layers": layers, "linear_num_key_heads": groups, "linear_key_head_dim": width,
        "linear_num_value_heads": heads, "linear_value_head_dim": values,
        "linear_conv_kernel_dim": given.count("ssm.conv_kernel"),
    }  # fmt: skip
    if config["intermediate_size"] is None:
        found["intermediate_size"] = given.count("expert_feed_forward_length")
    if given.has("attention.recurrent_layers"):
        kinds = given.items("attention.recurrent_layers", bool)
        if len(kinds) < layers:
            raise given.wrong("attention.recurrent_layers", f"{layers} values", kinds, "is short")
        names = {True: "linear_attention", False: "full_attention"}
        return found | {"layer_types": [names[kind] for kind in kinds[:layers]]}
    return found | {"full_attention_interval": given.count("full_attention_interval", 4)}


def _to_gguf(config: Any, *, sections: bool) -> dict[str, Any]:
    """These settings as metadata."""
    groups, width, heads, values = _sizes(config)
    if width != values:
        raise unsupported(
            f"'linear_value_head_dim' {values}, which is not 'linear_key_head_dim' {width}, in a "
            "GGUF file"
        )
    linear = list(config.linear)
    every = 1 + (linear.index(False) if False in linear else len(linear))
    if tuple(linear) != all_but_every(every, len(linear)):
        raise unsupported("'layer_types' whose attention is not every n-th in a GGUF file")
    # llama.cpp requires the sections of RoPE for images. Text has the same position in all sections.
    pairs = config.rope.rotated(config.width) // 2
    parts = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": width,
        "ssm.group_count": groups, "ssm.time_step_rank": heads, "ssm.inner_size": heads * values,
        "full_attention_interval": every,
        **({"rope.dimension_sections": parts} if sections else {}),
    }  # fmt: skip


_ONE_ADDED = Plus(-1.0)
_NAMES = {
    "output_norm": Rule("model.norm", _ONE_ADDED),
    ".attn_norm": Rule("input_layernorm", _ONE_ADDED),
    ".ffn_norm": None,
    ".post_attention_norm": Rule("post_attention_layernorm", _ONE_ADDED),
    ".attn_q_norm": Rule("self_attn.q_norm", _ONE_ADDED),
    ".attn_k_norm": Rule("self_attn.k_norm", _ONE_ADDED),
    ".attn_qkv": "linear_attn.in_proj_qkv",
    ".attn_gate": "linear_attn.in_proj_z",
    ".ssm_conv1d": Rule("linear_attn.conv1d", Taps()),
    ".ssm_dt": Rule("linear_attn.dt_bias", only="bias"),
    ".ssm_a": Rule("linear_attn.A_log", Logarithm(), only=NO_SUFFIX),
    ".ssm_norm": "linear_attn.norm",
    ".ssm_out": "linear_attn.out_proj",
}
_APART = {".ssm_beta": "linear_attn.in_proj_b", ".ssm_alpha": "linear_attn.in_proj_a", **NEXT}
_EXPERTS = {
    **expert_names(shared="shared_expert"),
    ".ffn_gate_inp_shexp": Rule("mlp.shared_expert_gate", Matrix()),
}
_COUNTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_WRITTEN = (
    *(f"ssm.{n}" for n in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")),
    "full_attention_interval",
)  # fmt: skip
_table = partial(GGUFTable, read=_of_gguf, biases=("ssm_dt",), is_partial=True)
_SPARSE = {"hidden_act": "silu", "norm_topk_prob": True}

QWEN3_NEXT_GGUF = _table(
    "qwen3next",
    {
        **_NAMES, **_EXPERTS,
        ".ssm_in": "linear_attn.in_proj_qkvz", ".ssm_ba": "linear_attn.in_proj_ba",
    },
    keys=_COUNTS, fixed={**_SPARSE, "decoder_sparse_step": 1, "mlp_only_layers": []},
    write=partial(_to_gguf, sections=False), written=_WRITTEN, join=_join, split=_split,
)  # fmt: skip
_3_5 = partial(
    _table, write=partial(_to_gguf, sections=True), written=(*_WRITTEN, "rope.dimension_sections"),
    join=_restored, split=_tiled,
)  # fmt: skip
QWEN3_5_GGUF = _3_5("qwen35", {**_NAMES, **_APART}, fixed={"hidden_act": "silu"})
QWEN3_5_MOE_GGUF = _3_5("qwen35moe", {**_NAMES, **_APART, **_EXPERTS}, keys=_COUNTS, fixed=_SPARSE)
