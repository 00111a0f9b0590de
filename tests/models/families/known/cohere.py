"""Command-R (``cohere``) and Command-A (``cohere2``)."""

from tests.models.families.cases import Case


def cohere(**settings):
    return ("cohere", "CohereForCausalLM", "CohereConfig", settings)


def cohere2(**settings):
    return ("cohere2", "Cohere2ForCausalLM", "Cohere2Config", {"sliding_window": 7, **settings})


CASES = [
    Case(
        *cohere(use_qk_norm=True, attention_bias=True, logit_scale=0.8, tie_word_embeddings=False),
        name="plus", gguf=False,
    ),  # fmt: skip
    Case(*cohere(num_key_value_heads=4), name="r"),
    Case(*cohere(num_key_value_heads=1, rope_theta=8000000.0, logit_scale=1.5), name="mqa"),
    Case(*cohere2(num_hidden_layers=5, logit_scale=0.25), name="a"),
    Case(*cohere2(num_hidden_layers=4, sliding_window_pattern=4, num_key_value_heads=1), name="r7b"),
    Case(
        *cohere2(
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            attention_bias=True, tie_word_embeddings=False,
        ),
        name="kinds", gguf=False,
    ),
]  # fmt: skip
