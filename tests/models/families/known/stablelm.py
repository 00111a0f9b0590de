"""StableLM 2."""

from tests.models.families.cases import Case

LAST = ("model.norm.weight", "model.norm.bias")


def stable(**settings):
    return ("stablelm", "StableLmForCausalLM", "StableLmConfig", {"hidden_size": 64, **settings})


CASES = [
    Case(*stable(use_parallel_residual=True, use_qkv_bias=True), name="parallel", last=LAST),
    Case(
        *stable(use_parallel_residual=True, qk_layernorm=True, num_key_value_heads=2),
        name="12b",
        last=LAST,
    ),
    Case(*stable(num_key_value_heads=4, partial_rotary_factor=0.5), name="3b", last=LAST),
    Case(*stable(use_qkv_bias=True, tie_word_embeddings=True), name="tied", last=LAST, gguf=False),
]
