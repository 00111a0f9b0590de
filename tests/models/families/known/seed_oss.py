"""Seed-OSS."""

from tests.models.families.cases import Case


def seed(**settings):
    return ("seed_oss", "SeedOssForCausalLM", "SeedOssConfig", {"head_dim": 16, **settings})


CASES = [
    Case(*seed(num_key_value_heads=1, rope_theta=10000000.0), name="36b"),
    Case(*seed(attention_out_bias=True, mlp_bias=True), name="biases", gguf=False),
    Case(*seed(tie_word_embeddings=True, attention_bias=False), name="tied"),
]
