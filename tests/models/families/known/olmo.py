"""OLMo, OLMo 2 and OLMo 3."""

from tests.models.families.cases import Case

NEAR = {"rope_type": "default", "rope_theta": 500000.0}
FAR = {
    "rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "attention_factor": 1.2079441541679836,
    "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


def one(**settings):
    return ("olmo", "OlmoForCausalLM", "OlmoConfig", settings)


def two(**settings):
    return ("olmo2", "Olmo2ForCausalLM", "Olmo2Config", settings)


def three(**settings):
    return ("olmo3", "Olmo3ForCausalLM", "Olmo3Config", {"sliding_window": 7, **settings})


CASES = [
    Case(*one(clip_qkv=0.7, num_key_value_heads=1), name="7b", last=("lm_head.weight",)),
    Case(*one(num_key_value_heads=4, rope_theta=5e5), name="1b", last=("lm_head.weight",)),
    Case(
        *one(hidden_act="gelu", attention_bias=True),
        name="bias",
        last=("lm_head.weight",),
        gguf=False,
    ),
    Case(*two(num_key_value_heads=4, rope_theta=500000.0), name="mha"),
    Case(*two(tie_word_embeddings=True, rms_norm_eps=1e-6), name="tied", gguf=False),
    Case(*two(num_key_value_heads=1, attention_bias=True), name="bias", gguf=False),
    Case(
        *three(
            num_hidden_layers=5, rope_parameters={"full_attention": FAR, "sliding_attention": NEAR}
        ),
        name="yarn",
    ),
    Case(*three(num_hidden_layers=8, num_key_value_heads=1), name="mqa"),
    Case(
        *three(layer_types=["full_attention", "sliding_attention", "full_attention"]),
        name="kinds",
        gguf=False,
    ),  # fmt: skip
]
