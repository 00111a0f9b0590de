"""DeepSeek V2, V3 and V3.2: latent attention, experts in groups, dense first layers."""

from tests.models.families.cases import Case

_SIZES = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "moe_intermediate_size": 12, "num_experts_per_tok": 3,
    "n_routed_experts": 8, "num_hidden_layers": 4,
}  # fmt: skip


def _yarn(mscale):
    return {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": mscale,
        "mscale_all_dim": mscale, "original_max_position_embeddings": 64, "beta_fast": 32,
        "beta_slow": 1,
    }  # fmt: skip


_GGUF: dict = {}
_NONE = {"gguf": False}


def _v2(name, about=_GGUF, **settings):
    settings = {**_SIZES, "n_shared_experts": 2, **settings}
    kind = "DeepseekV2ForCausalLM", "DeepseekV2Config"
    return Case("deepseek_v2", *kind, settings, name, **about)


def _v3(name, about=_GGUF, **settings):
    settings = {**_SIZES, "n_shared_experts": 1, "first_k_dense_replace": 1, **settings}
    kind = "DeepseekV3ForCausalLM", "DeepseekV3Config"
    return Case("deepseek_v3", *kind, settings, name, **about)


def _v32(name, **settings):
    settings = {
        **_SIZES, "n_shared_experts": 1, "first_k_dense_replace": 1, "index_n_heads": 8, "index_head_dim": 7,
        "index_topk": 6, **settings,
    }  # fmt: skip
    kind = "DeepseekV32ForCausalLM", "DeepseekV32Config"
    return Case("deepseek_v32", *kind, settings, name, gguf=False)


CASES = [
    _v3("yarn", n_group=4, topk_group=2, rope_parameters=_yarn(1.0)),
    _v3("without-query-rank", _NONE, q_lora_rank=None, n_group=1, topk_group=1, first_k_dense_replace=2,
        n_shared_experts=2, rope_interleave=False, attention_bias=True, norm_topk_prob=False),
    _v3("tied", n_group=2, topk_group=1, first_k_dense_replace=0, tie_word_embeddings=True,
        routed_scaling_factor=1.0, v_head_dim=9, qk_nope_head_dim=3),
    # llama.cpp takes the best two of a group.
    _v2("yarn", {"like_llama_cpp": False}, n_group=4, topk_group=2, first_k_dense_replace=1,
        topk_method="group_limited_greedy", routed_scaling_factor=16.0, rope_parameters=_yarn(0.707)),
    # llama.cpp opens a model without the rank only if it has as many layers as a published one.
    _v2("lite", num_hidden_layers=26, q_lora_rank=None, n_shared_experts=1, first_k_dense_replace=1),
    _v2("all-sparse", _NONE, first_k_dense_replace=0, attention_bias=True),
    _v32("yarn", n_group=4, topk_group=2, rope_parameters=_yarn(1.0), attention_bias=True),
    _v32("few", n_group=1, topk_group=1, index_topk=3, mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
         index_n_heads=12, index_head_dim=4, tie_word_embeddings=True),
    _v32("many", n_group=2, topk_group=1, index_topk=15, first_k_dense_replace=0, norm_topk_prob=False),
]  # fmt: skip
