"""GLM-4 (``glm``) and GLM-4-0414 (``glm4``)."""

from tests.models.families.cases import Case

ENDS = {"eos_token_id": [95]}  # by default tokens that a small vocabulary does not have
HALF = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100000.0, "partial_rotary_factor": 0.25}


def glm(**settings):
    return ("glm", "GlmForCausalLM", "GlmConfig", {**ENDS, **settings})


def glm4(**settings):
    return ("glm4", "Glm4ForCausalLM", "Glm4Config", {**ENDS, **settings})


CASES = [
    Case(*glm(head_dim=8, num_key_value_heads=1), name="9b"),
    Case(
        *glm(
            hidden_size=64,
            head_dim=16,
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters=HALF,
        ),
        name="quarter",
    ),
    Case(*glm(head_dim=12), name="12", gguf=False),
    Case(*glm4(head_dim=16, attention_bias=False), name="32b"),
    Case(*glm4(head_dim=8, num_key_value_heads=1), name="9b"),
    Case(*glm4(head_dim=12, num_key_value_heads=4, tie_word_embeddings=True), name="tied"),
]
