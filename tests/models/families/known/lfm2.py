"""LFM2: short convolutions and attention, an MLP whose size is computed."""

from tests.models.families.cases import Case

_FULL, _CONV = "full_attention", "conv"


def lfm2(name, biases=False, **settings):
    """With biases, transformers' convolution sees padding on the left, and llama.cpp has no such files."""
    kind = "lfm2", "Lfm2ForCausalLM", "Lfm2Config"
    settings = {"conv_bias": biases, **settings}
    last = ("model.embedding_norm.weight",)
    return Case(*kind, settings, name, last=last, gguf=not biases, exact=not biases)


CASES = [
    lfm2(
        "adjusted", num_hidden_layers=5, layer_types=[_CONV, _CONV, _FULL, _CONV, _FULL],
        block_multiple_of=8, intermediate_size=70, block_ffn_dim_multiplier=0.9, conv_L_cache=4,
        tie_word_embeddings=False, num_key_value_heads=1,
    ),
    lfm2("biases", True, layer_types=[_FULL, _CONV, _CONV],
        block_auto_adjust_ff_dim=False, norm_eps=1e-3),
    lfm2("attention", full_attn_idxs=[1], num_hidden_layers=4, block_ffn_dim_multiplier=1.5,
         rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
]  # fmt: skip
