"""Granite 3 MoE: the experts of a layer in one tensor of a file."""

from tests.models.families.cases import Case

_MOE = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
_KINDS = ("granitemoe", "GraniteMoeForCausalLM", "GraniteMoeConfig")

CASES = [
    Case(*_KINDS, {
        **_MOE, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
        "logits_scaling": 2.0, "tie_word_embeddings": True, "num_key_value_heads": 1,
    }),
    Case(*_KINDS, {**_MOE, "num_experts_per_tok": 6, "attention_multiplier": 0.35}, "all"),
    Case(*_KINDS, {**_MOE, "attention_bias": True, "attention_multiplier": 0.35}, "biases"),
]  # fmt: skip
