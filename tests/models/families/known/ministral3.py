"""Ministral 3 without its vision part."""

from tests.models.families.cases import Case

YARN = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
    "original_max_position_embeddings": 8, "max_position_embeddings": 128, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip


def ministral(**settings):
    return ("ministral3", "Ministral3ForCausalLM", "Ministral3Config", settings)


CASES = [
    Case(*ministral(head_dim=16, rope_parameters=YARN, tie_word_embeddings=True), name="3b"),
    Case(*ministral(head_dim=8, sliding_window=12), name="window", like_llama_cpp=False),
    Case(
        *ministral(
            num_key_value_heads=1, head_dim=8, rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}
        ),
        name="14b",
    ),
]  # fmt: skip
