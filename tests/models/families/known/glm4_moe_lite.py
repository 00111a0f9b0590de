"""GLM-4.7-Flash: latent attention, balanced experts, layers without experts where the file lists them."""

from tests.models.families.cases import Case

_SIZES = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "moe_intermediate_size": 12, "num_experts_per_tok": 3,
    "n_routed_experts": 8, "n_shared_experts": 1,
}  # fmt: skip


def lite(name, gguf=True, **settings):
    kind = "Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig"
    return Case("glm4_moe_lite", *kind, {**_SIZES, **settings}, name, gguf=gguf)


CASES = [
    lite("flash", v_head_dim=9, rope_theta=1e6),
    lite("listed", False, mlp_layer_types=["sparse", "dense", "sparse"], q_lora_rank=None,
         rope_interleave=False, norm_topk_prob=False, attention_bias=True),
    lite("groups", mlp_layer_types=["dense", "dense", "sparse"], n_group=4, topk_group=2,
         n_shared_experts=2, tie_word_embeddings=True),
]  # fmt: skip
