"""Mistral and Mixtral, with and without a sliding window."""

from tests.models.families.cases import Case


def _mistral(name, like_llama_cpp=True, **settings):
    return Case(
        "mistral", "MistralForCausalLM", "MistralConfig", settings, name,
        like_llama_cpp=like_llama_cpp,
    )  # fmt: skip


def _mixtral(name, like_llama_cpp=True, **settings):
    settings = {"num_local_experts": 4, **settings}
    return Case(
        "mixtral", "MixtralForCausalLM", "MixtralConfig", settings, name,
        like_llama_cpp=like_llama_cpp,
    )  # fmt: skip


CASES = [
    # llama.cpp has no sliding windows in this architecture, nor in that of Phi-3.
    _mistral("window", like_llama_cpp=False, sliding_window=7, num_key_value_heads=1),
    _mistral("nemo", head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    _mistral("tied", tie_word_embeddings=True, sliding_window=None, num_key_value_heads=4),
    _mixtral(
        "window",
        like_llama_cpp=False,
        num_experts_per_tok=3,
        sliding_window=6,
        num_key_value_heads=1,
    ),
    _mixtral("8x7b", num_experts_per_tok=2),
    _mixtral("one", num_local_experts=6, num_experts_per_tok=1, tie_word_embeddings=True),
]
