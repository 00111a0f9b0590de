"""StarCoder 2."""

from tests.models.families.cases import Case

LAST = ("model.norm.weight", "model.norm.bias")


def coder(**settings):
    return ("starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", settings)


CASES = [
    Case(*coder(sliding_window=12, num_key_value_heads=1), name="15b", last=LAST),
    Case(*coder(use_bias=False, tie_word_embeddings=False), name="plain", last=LAST, gguf=False),
    Case(*coder(rope_theta=999999.4420358813, norm_epsilon=1e-3), name="3b", last=LAST),
]
