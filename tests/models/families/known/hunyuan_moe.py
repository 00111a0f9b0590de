"""Hunyuan with experts: norms after RoPE, whose base a factor stretches."""

from tests.models.families.cases import Case

_MOE = {"num_experts": 8, "moe_topk": 3, "intermediate_size": 24, "head_dim": 16}
_KINDS = ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config")

CASES = [
    Case(*_KINDS, {**_MOE, "num_key_value_heads": 1}),
    Case(*_KINDS, {**_MOE, "head_dim": 8, "tie_word_embeddings": True, "attention_bias": True,
                   "moe_topk": 8}, "tied", gguf=False),
    Case(*_KINDS, {**_MOE, "num_key_value_heads": 4, "num_experts": 4, "moe_topk": 1}, "one"),
]  # fmt: skip
