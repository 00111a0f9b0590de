"""Helium 1: RoPE of neighbours."""

from tests.models.families.cases import Case


def helium(name, **settings):
    return Case("helium", "HeliumForCausalLM", "HeliumConfig", settings, name, gguf=False)


CASES = [
    helium("2b", num_key_value_heads=1, head_dim=8, rope_theta=1e5),
    helium("biases", attention_bias=True, mlp_bias=True, head_dim=8, rms_norm_eps=1e-3),
    helium("tied", tie_word_embeddings=True, head_dim=8, hidden_act="gelu"),
]
