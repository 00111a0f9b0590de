"""Apertus."""

from tests.models import decoders
from tests.models.families.cases import Case


def drawn(rng, name, shape):
    """Numbers of xIELU near those of published models."""
    if "act_fn" in name:
        usual = {"alpha_p": 0.2, "alpha_n": -1.0, "beta": 0.5, "eps": -1e-6}
        return usual[name.rpartition(".")[2]] * rng.uniform(0.5, 1.5, shape)
    return decoders.drawn(rng, name, shape)


def apertus(name, gguf=True, **settings):
    return Case("apertus", "ApertusForCausalLM", "ApertusConfig",
                {"hidden_act": "xielu", **settings}, name, draw=drawn, gguf=gguf)  # fmt: skip


LLAMA3 = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
CASES = [
    apertus("8b", rope_parameters=LLAMA3, num_key_value_heads=1),
    apertus("silent", num_key_value_heads=2),
    apertus("tied", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, tie_word_embeddings=True,
            num_attention_heads=8, num_key_value_heads=8, gguf=False),
    apertus("biases", attention_bias=True),
]  # fmt: skip
