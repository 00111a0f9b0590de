"""gpt-oss: sinks, windows, biases and clamped gates of experts."""

from tests.models.families.cases import Case

_MOE = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16,
    "sliding_window": 5,
}  # fmt: skip
_KINDS = ("gpt_oss", "GptOssForCausalLM", "GptOssConfig")

# llama.cpp rounds the range of pairs that YaRN interpolates, which ``truncate`` false says not to do.
CASES = [
    Case(*_KINDS, {**_MOE, "num_hidden_layers": 4, "num_key_value_heads": 1}, like_llama_cpp=False),
    Case(*_KINDS, {
        **_MOE, "num_experts_per_tok": 4, "tie_word_embeddings": True, "swiglu_limit": 1.0,
        "swiglu_alpha": 1.2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "attention_bias": False,
    }, "tied", gguf=False),
    Case(*_KINDS, {**_MOE, "head_dim": 8, "num_local_experts": 8, "num_hidden_layers": 6,
                   "num_key_value_heads": 4,
                   "rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5}}, "wide"),
]  # fmt: skip
