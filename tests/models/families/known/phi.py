"""Phi-1, Phi-1.5 and Phi-2."""

from tests.models.families.cases import Case

LAST = ("model.final_layernorm.weight", "model.final_layernorm.bias")


def phi(name, gguf=True, **settings):
    return Case("phi", "PhiForCausalLM", "PhiConfig", settings, name, last=LAST, gguf=gguf)


CASES = [
    phi("2", hidden_size=80, partial_rotary_factor=0.4, num_key_value_heads=4),
    phi("1", hidden_size=64, num_key_value_heads=2),
    phi("norms", hidden_size=64, qk_layernorm=True, hidden_act="gelu", tie_word_embeddings=True, gguf=False),
]  # fmt: skip
