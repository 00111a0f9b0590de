"""GGUF files of LFM2, with and without experts. A layer with 0 KV heads has a short convolution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...decoder.experts import MAPS_W
from ..config.read import Config
from ..metadata import Settings
from ..names import Rule, expert_names
from ..state_layouts import Taps
from ..table import GGUFTable


def _read(given: Settings, tensors: Any, config: Config) -> Config:
    """The kinds of the layers, from their tensors."""
    layers = range(config["num_hidden_layers"])
    convolves = [f"blk.{i}.shortconv.conv.weight" in tensors for i in layers]
    return {
        "layer_types": ["conv" if one else "full_attention" for one in convolves],
        "conv_bias": "blk.0.shortconv.in_proj.bias" in tensors,
    }


def kv_counts(config: Any) -> dict[str, Any]:
    """The number of KV heads of each layer, which is 0 where there is a convolution."""
    counts = [0 if one else config.kv_heads for one in config.convolves]
    return {"attention.head_count_kv": counts}


LFM2_GGUF = GGUFTable(
    "lfm2",
    {
        "output_norm": None, "token_embd_norm": "model.embedding_norm",
        ".attn_norm": "operator_norm", ".ffn_norm": "ffn_norm",
        ".attn_output": "self_attn.out_proj",
        ".attn_q_norm": "self_attn.q_layernorm", ".attn_k_norm": "self_attn.k_layernorm",
        ".ffn_gate": "feed_forward.w1", ".ffn_up": "feed_forward.w3",
        ".ffn_down": "feed_forward.w2", ".shortconv.conv": Rule("conv.conv", Taps()),
        ".shortconv.in_proj": "conv.in_proj", ".shortconv.out_proj": "conv.out_proj",
    },
    keys={"shortconv.l_cache": "conv_L_cache"},
    fixed={"block_auto_adjust_ff_dim": False, "hidden_act": "silu"},
    read=_read, write=kv_counts, biases=(), computed=("intermediate_size", "block_auto_adjust_ff_dim"),
    epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
)  # fmt: skip

# How llama.cpp computes the shares of experts, whatever a file says.
_SHARES = {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True}

LFM2_MOE_GGUF = replace(
    LFM2_GGUF, architecture="lfm2moe",
    tensors={
        **LFM2_GGUF.tensors, **expert_names("feed_forward", maps=MAPS_W),
        ".exp_probs_b": Rule("feed_forward.expert_bias", only="bias"),
    },
    keys={
        **LFM2_GGUF.keys, "leading_dense_block_count": "num_dense_layers",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    },
    fixed={"hidden_act": "silu", **_SHARES},
    write=lambda config: {**kv_counts(config), "expert_gating_func": 2},
    written=("expert_gating_func",), biases=("exp_probs_b",), computed=(),
)  # fmt: skip
