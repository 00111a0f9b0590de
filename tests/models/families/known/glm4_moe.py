"""GLM-4.5: balanced sigmoids in groups, layers without experts, half of each head rotated."""

from tests.models.families.cases import Case

_MOE = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16,
}  # fmt: skip
_KINDS = ("glm4_moe", "Glm4MoeForCausalLM", "Glm4MoeConfig")

CASES = [
    Case(*_KINDS, {
        **_MOE, "routed_scaling_factor": 2.5, "use_qk_norm": True,
        "n_shared_experts": 2, "attention_bias": True, "num_key_value_heads": 1,
    }),
    Case(*_KINDS, {**_MOE, "head_dim": 8, "norm_topk_prob": False, "first_k_dense_replace": 2,
                   "tie_word_embeddings": True}, "tied"),
    Case(*_KINDS, {**_MOE, "num_experts_per_tok": 3, "n_group": 4,
                   "topk_group": 2, "partial_rotary_factor": 0.25, "rope_theta": 1e6}, "groups", gguf=False),
]  # fmt: skip
