"""LFM2 with experts: short convolutions and attention, balanced sigmoids after dense layers."""

from tests.models.families.cases import Case

_FULL, _CONV = "full_attention", "conv"


def lfm2(name, gguf=True, **settings):
    sizes = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
    }
    return Case("lfm2_moe", "Lfm2MoeForCausalLM", "Lfm2MoeConfig", sizes | settings, name,
                last=("model.embedding_norm.weight",), gguf=gguf)  # fmt: skip


CASES = [
    lfm2("8b", layer_types=[_CONV, _FULL, _CONV], num_key_value_heads=1, conv_L_cache=4),
    lfm2("plain", False, layer_types=[_FULL, _CONV, _CONV], use_expert_bias=False, norm_topk_prob=False,
         num_dense_layers=0, routed_scaling_factor=2.5, tie_word_embeddings=False),
    lfm2("dense", layer_types=[_CONV, _CONV, _FULL, _CONV], num_hidden_layers=4, num_dense_layers=2,
         norm_eps=1e-3, num_experts_per_tok=1, rope_theta=5e5),
]  # fmt: skip
