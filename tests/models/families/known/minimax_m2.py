"""MiniMax M2: balanced sigmoids, norms over all heads, a part of each head rotated."""

from tests.models.families.cases import Case

_MOE = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "head_dim": 16,
}  # fmt: skip
_KINDS = ("minimax_m2", "MiniMaxM2ForCausalLM", "MiniMaxM2Config")

CASES = [
    Case(*_KINDS, {**_MOE, "rotary_dim": 8, "num_key_value_heads": 1}),
    Case(*_KINDS, {**_MOE, "head_dim": 8, "num_key_value_heads": 4}, "mha"),
    Case(*_KINDS, {**_MOE, "num_experts_per_tok": 8, "tie_word_embeddings": True}, "tied",
         gguf=False),
]  # fmt: skip
