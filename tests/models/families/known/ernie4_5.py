"""ERNIE 4.5 without experts."""

from tests.models.families.cases import Case


def ernie(**settings):
    return ("ernie4_5", "Ernie4_5ForCausalLM", "Ernie4_5Config", {"head_dim": 16, **settings})


CASES = [
    Case(*ernie(num_key_value_heads=1), name="0.3b"),
    Case(*ernie(use_bias=True, tie_word_embeddings=False), name="biases", gguf=False),
    Case(*ernie(rope_theta=1000.0, head_dim=8), name="narrow"),
]
