"""GGUF files of Nomic's BERT."""

from __future__ import annotations

from ..config.read import Config, Shapes, rows_of
from ..metadata import Settings
from ..table import ENCODER_BIASES, ENCODER_NAMES, GGUFTable


def _read(given: Settings, tensors: Shapes, config: Config) -> Config:
    """The settings in a GGUF file that only this architecture has."""
    return {
        "type_vocab_size": rows_of("token_types.weight", tensors, given.path),
        "qkv_proj_bias": "blk.0.attn_qkv.bias" in tensors,
        "mlp_fc1_bias": "blk.0.ffn_up.bias" in tensors,
        "mlp_fc2_bias": "blk.0.ffn_down.bias" in tensors,
    }


NOMIC_BERT_GGUF = GGUFTable(
    "nomic-bert",
    {
        **ENCODER_NAMES, "token_embd_norm": "emb_ln", ".attn_qkv": "attn.Wqkv",
        ".attn_output": "attn.out_proj", ".attn_output_norm": "norm1", ".ffn_gate": "mlp.fc12",
        ".ffn_up": "mlp.fc11", ".ffn_down": "mlp.fc2", ".layer_output_norm": "norm2",
    },
    fixed={"hidden_act": "silu"},
    read=_read,
    write=lambda config: {"attention.causal": False},
    biases=ENCODER_BIASES,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    layer="encoder.layers.*.",
    written=("attention.causal", "pooling_type"),
)  # fmt: skip
