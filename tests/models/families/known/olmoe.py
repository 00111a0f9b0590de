"""OLMoE: norms over all heads, clipped queries, keys and values."""

from tests.models.families.cases import Case

_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}
_KINDS = ("olmoe", "OlmoeForCausalLM", "OlmoeConfig")

CASES = [
    Case(*_KINDS, {**_MOE, "clip_qkv": 0.7, "num_key_value_heads": 1}, gguf=False),
    Case(*_KINDS, {**_MOE, "num_key_value_heads": 4}, "published"),
    Case(*_KINDS, {**_MOE, "norm_topk_prob": True, "attention_bias": True,
                   "tie_word_embeddings": True}, "biases", gguf=False),
]  # fmt: skip
