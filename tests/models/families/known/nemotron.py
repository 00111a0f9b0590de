"""Nemotron and Arcee: an MLP without a gate, and norms to whose weights 1 is added."""

from tests.models import decoders
from tests.models.families.cases import Case

LAST = ("model.norm.weight", "model.norm.bias")


def _draw(rng, name, shape):
    return decoders.drawn(rng, name, shape) - name.endswith("norm.weight")


def nemotron(name, gguf=True, **settings):
    return Case("nemotron", "NemotronForCausalLM", "NemotronConfig", settings, name, draw=_draw,
                last=LAST, one=1.0, gguf=gguf)  # fmt: skip


def arcee(name, gguf=True, **settings):
    return Case("arcee", "ArceeForCausalLM", "ArceeConfig", settings, name, gguf=gguf)


CASES = [
    nemotron("minitron", num_key_value_heads=1, norm_eps=1e-3),
    nemotron("biases", attention_bias=True, mlp_bias=True, partial_rotary_factor=0.25),
    nemotron("tied", False, tie_word_embeddings=True, hidden_act="gelu", rope_theta=1e6, head_dim=16),
    arcee("yarn", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 20.0,
          "original_max_position_embeddings": 16, "mscale": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}),
    arcee("biases", False, mlp_bias=True, attention_bias=True, num_key_value_heads=4),
    arcee("tied", tie_word_embeddings=True, head_dim=12, num_key_value_heads=1),
]  # fmt: skip
