"""Granite 3."""

from tests.models.families.cases import Case


def granite(**settings):
    return ("granite", "GraniteForCausalLM", "GraniteConfig", settings)


CASES = [
    Case(
        *granite(
            embedding_multiplier=12.0, attention_multiplier=0.125, residual_multiplier=0.22,
            logits_scaling=8.0, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
        ),
        name="2b",
    ),
    Case(
        *granite(
            embedding_multiplier=3, attention_multiplier=0.2, residual_multiplier=0.7,
            logits_scaling=0.5, num_key_value_heads=1,
        ),
        name="integers",
    ),
    Case(*granite(attention_multiplier=0.35, rope_theta=10000000.0), name="long"),
]  # fmt: skip
