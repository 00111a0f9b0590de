"""Hunyuan (0.5B to 7B)."""

from tests.models.families.cases import Case

_ALPHA = {"type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}


def hunyuan(**settings):
    return ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", settings)


CASES = [
    Case(*hunyuan(head_dim=16, rope_scaling=_ALPHA, tie_word_embeddings=True), name="0.5b"),
    Case(*hunyuan(head_dim=8, attention_bias=True, num_key_value_heads=1), name="biases", gguf=False),
    Case(*hunyuan(head_dim=12, num_key_value_heads=4, rope_theta=250000.0), name="7b"),
]  # fmt: skip
