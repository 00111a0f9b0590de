"""Llama 4: scores on inputs, chunks, layers without RoPE, growing queries."""

from tests.models.families.cases import Case

_MOE = {
    "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24,
    "intermediate_size_mlp": 48, "head_dim": 16, "num_hidden_layers": 4,
}  # fmt: skip
_KINDS = ("llama4_text", "Llama4ForCausalLM", "Llama4TextConfig")

CASES = [
    Case(*_KINDS, {**_MOE, "attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.3,
                   "num_key_value_heads": 1}, gguf=False),
    Case(*_KINDS, {
        **_MOE, "num_experts_per_tok": 2, "attention_chunk_size": 7, "interleave_moe_layer_step": 2,
        "use_qk_norm": False, "no_rope_layer_interval": 2, "attn_temperature_tuning": False,
    }, "interleaved", gguf=False),
    Case(*_KINDS, {**_MOE, "attention_chunk_size": 8192, "head_dim": 8, "interleave_moe_layer_step": 2,
                   "rope_parameters": {
                       "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                       "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                   }}, "published"),
    # The norm of queries and keys takes YaRN's factor away again.
    Case(*_KINDS, {**_MOE, "head_dim": 8, "attention_chunk_size": 8, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "attention_factor": 1.3,
        "original_max_position_embeddings": 64,
    }}, "yarn", gguf=False),
    Case(*_KINDS, {**_MOE, "num_hidden_layers": 3, "attention_chunk_size": 5}, "all-rotate", gguf=False),
]  # fmt: skip
