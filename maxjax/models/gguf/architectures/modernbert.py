"""GGUF files of ModernBERT."""

from __future__ import annotations

from typing import Any

from ..config.read import Config, Shapes
from ..metadata import Settings, unsupported
from ..table import ENCODER_NAMES, GGUFTable


def _read(given: Settings, tensors: Shapes, config: Config) -> Config:
    """The settings in a GGUF file that only this architecture has."""
    if given.any("attention.sliding_window_pattern", 3) != 3:
        raise given.unsupported(f"'{given.prefix}attention.sliding_window_pattern' other than 3")
    return {
        "hidden_activation": given.text("hidden_act", "gelu"),
        "local_attention": given.count("attention.sliding_window", 128),
        "global_rope_theta": config["rope_theta"],
        "local_rope_theta": given.number("rope.freq_base_swa", 10_000.0),
        "norm_bias": "output_norm.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "attention_bias": "blk.0.attn_qkv.bias" in tensors,
    }


def _write(config: Any) -> dict[str, Any]:
    """The metadata of a GGUF file that only this architecture has."""
    if any((kind == "full_attention") != (i % 3 == 0) for i, kind in enumerate(config.layer_types)):
        raise unsupported("a ModernBERT whose windows are not in all layers but every third")
    if (
        config.local_rope_parameters.scaling is not None
        or config.rope_parameters.scaling is not None
    ):
        raise unsupported("a ModernBERT with 'rope_scaling' in a GGUF file")
    return {
        "attention.sliding_window": config.local_attention, "attention.causal": False,
        "rope.freq_base_swa": config.local_rope_parameters.theta,
    }  # fmt: skip


MODERNBERT_GGUF = GGUFTable(
    "modern-bert",
    {
        **ENCODER_NAMES, "token_embd": "embeddings.tok_embeddings", "token_types": None,
        "token_embd_norm": "embeddings.norm", "output_norm": "final_norm", ".attn_norm": "attn_norm",
        ".attn_qkv": "attn.Wqkv", ".attn_output": "attn.Wo", ".ffn_norm": "mlp_norm",
        ".ffn_gate": None, ".ffn_up": "mlp.Wi", ".ffn_down": "mlp.Wo",
    },
    read=_read,
    write=_write,
    biases=(),
    epsilon=("attention.layer_norm_epsilon", "norm_eps"),
    layer="layers.*.",
    written=(
        "attention.causal", "pooling_type", "attention.sliding_window", "rope.freq_base_swa"
    ),
)  # fmt: skip
