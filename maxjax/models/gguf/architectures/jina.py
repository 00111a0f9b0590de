"""GGUF files of Jina's embeddings v3."""

from __future__ import annotations

from ..config.read import rows_of
from ..table import ENCODER_BIASES, ENCODER_NAMES, GGUFTable

JINA_V3_GGUF = GGUFTable(
    "jina-bert-v3",
    {
        **ENCODER_NAMES, "token_embd_norm": "emb_ln", ".attn_qkv": "mixer.Wqkv",
        ".attn_output": "mixer.out_proj", ".attn_output_norm": "norm1", ".ffn_gate": None,
        ".ffn_up": "mlp.fc1", ".ffn_down": "mlp.fc2", ".layer_output_norm": "norm2",
    },
    fixed={"hidden_act": "gelu"},
    read=lambda given, tensors, config: {
        "type_vocab_size": rows_of("token_types.weight", tensors, given.path)
    },
    write=lambda config: {"attention.causal": False},
    biases=ENCODER_BIASES,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    layer="encoder.layers.*.",
    written=("attention.causal", "pooling_type"),
)  # fmt: skip
