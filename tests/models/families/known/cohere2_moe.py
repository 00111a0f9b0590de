"""Command-A with experts: LayerNorms or RMSNorms, shared experts, first layers without experts."""

from tests.models.families.cases import Case

_MOE = {
    "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "head_dim": 8, "sliding_window": 7,
    "logit_scale": 0.25,
}  # fmt: skip


def cohere(name, **settings):
    kinds = ("cohere2_moe", "Cohere2MoeForCausalLM", "Cohere2MoeConfig")
    return Case(*kinds, _MOE | settings, name, gguf=False)


CASES = [
    cohere(
        "plus", num_hidden_layers=6, first_k_dense_replace=1, prefix_dense_intermediate_size=40,
        num_shared_experts=2, expert_selection_fn="sigmoid", rms_norm_eps=1e-3, attention_bias=True,
        tie_word_embeddings=False,
    ),
    cohere("plain", num_key_value_heads=1, sliding_window_pattern=2, logit_scale=1.5),
    cohere(
        "sum", num_hidden_layers=4, num_shared_experts=1, shared_expert_combination_strategy="sum",
        first_k_dense_replace=2, prefix_dense_sliding_window_pattern=2, num_key_value_heads=4,
        expert_selection_fn="sigmoid", norm_topk_prob=False,
    ),
    cohere(
        "listed", head_dim=12, mlp_layer_types=["sparse", "dense", "sparse"], hidden_act="gelu",
        layer_types=["full_attention", "full_attention", "sliding_attention"],
    ),
]  # fmt: skip
