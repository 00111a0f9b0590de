"""ERNIE 4.5 with experts: a balanced softmax, layers without experts, neighbouring pairs rotated."""

from tests.models.families.cases import Case

_MOE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24}
_KINDS = ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig")

CASES = [
    Case(*_KINDS, {**_MOE, "moe_num_shared_experts": 2, "tie_word_embeddings": True,
                   "num_key_value_heads": 1}),
    Case(*_KINDS, {
        **_MOE, "num_hidden_layers": 6, "moe_num_shared_experts": 0, "moe_layer_interval": 2,
        "moe_layer_end_index": 4, "tie_word_embeddings": False, "use_bias": True,
    }, "biases", gguf=False),
    Case(*_KINDS, {**_MOE, "moe_k": 8, "moe_num_shared_experts": 1, "moe_layer_start_index": 2,
                   "tie_word_embeddings": False}, "late"),
]  # fmt: skip
