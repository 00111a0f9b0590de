"""Phi-3.5-MoE: LayerNorm, two experts that are weighed by those near them."""

from tests.models.families.cases import Case

_MOE = {"num_local_experts": 8, "intermediate_size": 24}
_LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.24, "long_mscale": 1.24,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 128,
}  # fmt: skip


def phi(name, **settings):
    last = ("model.norm.weight", "model.norm.bias")
    # llama.cpp has RMSNorm and a softmax of all scores in their place.
    return Case(
        "phimoe", "PhimoeForCausalLM", "PhimoeConfig", _MOE | settings, name, last=last, gguf=name == "long",
        like_llama_cpp=False,
    )  # fmt: skip


CASES = [
    phi("long", attention_bias=True, num_key_value_heads=1, rope_parameters=_LONG),
    phi("window", sliding_window=7, lm_head_bias=True, num_local_experts=3, rms_norm_eps=1e-3),
    phi("tied", tie_word_embeddings=True, hidden_act="gelu", num_key_value_heads=4),
]
