"""BitNet b1.58, with plain weights; ``tests/models/test_bitnet.py`` has those of its published files."""

from tests.models.families.cases import Case


def bitnet(name, **settings):
    return Case("bitnet", "BitNetForCausalLM", "BitNetConfig", settings, name, gguf=False)


CASES = [
    bitnet("biases", attention_bias=True, num_key_value_heads=1, hidden_act="silu", rms_norm_eps=1e-3),
    bitnet("2b", tie_word_embeddings=True),
    bitnet("mha", num_key_value_heads=4, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
]  # fmt: skip
