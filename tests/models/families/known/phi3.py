"""Phi-3, Phi-4 and Phi-4-mini."""

from tests.models.families.cases import Case


def phi(**settings):
    return ("phi3", "Phi3ForCausalLM", "Phi3Config", settings)


def longrope(pairs):
    short, long = ([first + step * i for i in range(pairs)] for first, step in ((1, 0.1), (2, 0.3)))
    return {"type": "longrope", "short_factor": short, "long_factor": long}


CASES = [
    Case(
        *phi(
            hidden_size=64, partial_rotary_factor=0.75, original_max_position_embeddings=16,
            tie_word_embeddings=True, rope_scaling=longrope(6),
        ),
        # Texts that pass the original length, where a call with a cache must begin again.
        # llama.cpp uses those of long texts wherever its context is longer than the original one.
        name="mini", like_llama_cpp=False, exact=False,
    ),
    Case(*phi(num_key_value_heads=4, sliding_window=12), name="window", like_llama_cpp=False),
    Case(
        *phi(original_max_position_embeddings=128, rope_scaling=longrope(4)), name="long",
    ),
    Case(*phi(num_key_value_heads=1, rope_theta=250000.0), name="4"),
]  # fmt: skip
