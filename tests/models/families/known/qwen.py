"""Qwen 2, 2.5 and 3, and Qwen 3 with experts."""

from tests.models.families.cases import Case

_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip


def _case(family, kind, name, gguf=True, **settings):
    return Case(family, f"{kind}ForCausalLM", f"{kind}Config", settings, name, gguf=gguf)


_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}

CASES = [
    _case("qwen2", "Qwen2", "windows", gguf=False, use_sliding_window=True, sliding_window=6, max_window_layers=1,
          tie_word_embeddings=True),
    _case("qwen2", "Qwen2", "yarn", rope_parameters=_YARN, num_key_value_heads=1),
    _case("qwen2", "Qwen2", "0.5b", tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=2),
    _case("qwen3", "Qwen3", "wide", head_dim=16, num_key_value_heads=1, tie_word_embeddings=True),
    _case("qwen3", "Qwen3", "biases", gguf=False, head_dim=8, attention_bias=True),
    _case("qwen3", "Qwen3", "yarn", head_dim=16, rope_parameters=_YARN),
    _case("qwen3_moe", "Qwen3Moe", "dense-between", gguf=False, **_EXPERTS, decoder_sparse_step=2, norm_topk_prob=True),
    _case("qwen3_moe", "Qwen3Moe", "mlp-only", gguf=False, **_EXPERTS, mlp_only_layers=[0], norm_topk_prob=False),
    _case("qwen3_moe", "Qwen3Moe", "30b", **_EXPERTS, norm_topk_prob=True, num_key_value_heads=1),
]  # fmt: skip
