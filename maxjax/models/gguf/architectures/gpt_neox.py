"""GGUF files of GPT-NeoX and Falcon, whose queries, keys and values are one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..metadata import Settings, unsupported
from ..names import GROUPS, Rule
from ..table import PLAIN_BIASES, GGUFTable


def _grouped(attention: str) -> dict[str, Any]:
    """The GGUF names of a layer's weights; ``attention`` is the checkpoint's name of the layer's attention."""
    return {
        **dict.fromkeys((".attn_q", ".attn_k", ".attn_v", ".ffn_gate")),
        ".attn_qkv": Rule(f"{attention}.query_key_value", GROUPS),
        ".attn_output": f"{attention}.dense",
        ".ffn_up": "mlp.dense_h_to_4h",
        ".ffn_down": "mlp.dense_4h_to_h",
    }


GPT_NEOX_GGUF = GGUFTable(
    "gptneox",
    {
        **_grouped("attention"),
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    keys={"use_parallel_residual": "use_parallel_residual"},
    fixed={"hidden_act": "gelu", "attention_bias": True},
    layer="gpt_neox.layers.*.",
    read=lambda given, tensors, config: {"attention_bias": "blk.0.attn_qkv.bias" in tensors},
    biases=PLAIN_BIASES,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    is_partial=True,
    has_head=True,
)


def _read_falcon(
    given: Settings, tensors: Mapping[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
    """The settings of a Falcon's architecture, which its norms and KV heads tell."""
    heads, two = config["num_key_value_heads"], "blk.0.attn_norm_2.weight" in tensors
    found = {"ffn_hidden_size": config["intermediate_size"]}
    if heads == 1 and not two:
        return {**found, "new_decoder_architecture": False, "multi_query": True}
    norms = {"num_ln_in_parallel_attn": 1 + two}
    return {**found, **norms, "new_decoder_architecture": True, "num_kv_heads": heads}


def _write_falcon(config: Any) -> dict[str, Any]:
    if not config.new_decoder_architecture and not config.parallel_attn:
        raise unsupported("'parallel_attn' false in a GGUF file of 'falcon'")
    return {}


FALCON_GGUF = GGUFTable(
    "falcon",
    {
        **_grouped("self_attention"),
        ".ffn_norm": None,
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        ".attn_norm": (Rule("input_layernorm"), Rule("ln_mlp")),
        ".attn_norm_2": "ln_attn",
    },
    fixed={"activation": "gelu", "bias": False},
    layer="transformer.h.*.",
    read=_read_falcon,
    write=_write_falcon,
    biases=("attn_norm", "attn_norm_2", "output_norm"),
    epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
)
