"""SmolLM3, with and without other patterns of layers without RoPE."""

from tests.models.families.cases import Case


def smol(**settings):
    return ("smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", settings)


CASES = [
    Case(*smol(num_hidden_layers=6, rope_theta=5000000.0), name="published"),
    Case(*smol(no_rope_layers=[1, 0, 0], tie_word_embeddings=False), name="listed", gguf=False),
    Case(
        *smol(
            num_hidden_layers=5, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=6
        ),
        name="window",
        gguf=False,
    ),  # fmt: skip
]
