"""Llama: what the other tests of its own do not cover."""

from tests.models.families.cases import Case

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip

CASES = [
    Case("llama", "LlamaForCausalLM", "LlamaConfig", {"head_dim": 16, "num_key_value_heads": 1}),
    Case("llama", "LlamaForCausalLM", "LlamaConfig",
         {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}, "tied"),
    Case("llama", "LlamaForCausalLM", "LlamaConfig",
         {"attention_bias": True, "mlp_bias": True}, "biases"),
]  # fmt: skip
