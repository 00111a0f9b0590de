"""Qwen 2 MoE: an expert that every token goes through, with a gate."""

from tests.models.families.cases import Case

_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
_KINDS = ("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig")

CASES = [
    Case(*_KINDS, {**_MOE, "num_key_value_heads": 1}),
    Case(*_KINDS, {
        **_MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "use_sliding_window": True,
        "sliding_window": 5, "max_window_layers": 3, "tie_word_embeddings": True,
    }, "window", gguf=False),
    Case(*_KINDS, {**_MOE, "num_experts_per_tok": 4, "num_key_value_heads": 4,
                   "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "all"),
]  # fmt: skip
