"""EXAONE 4: with a sliding window (32B) and without (1.2B)."""

from tests.models.families.cases import Case

FULL = {"sliding_window": None, "layer_types": ["full_attention"] * 3}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


def exaone(**settings):
    return ("exaone4", "Exaone4ForCausalLM", "Exaone4Config", settings)


CASES = [
    Case(*exaone(sliding_window=7, num_hidden_layers=5), name="32b", gguf=False),
    Case(*exaone(**FULL, tie_word_embeddings=True, rope_parameters=LLAMA3), name="1b"),
    Case(*exaone(**FULL, num_key_value_heads=1, head_dim=16), name="wide", gguf=False),
    Case(*exaone(**FULL, num_key_value_heads=4), name="mha"),
    Case(*exaone(sliding_window=5, sliding_window_pattern=2), name="half", gguf=False),
]
