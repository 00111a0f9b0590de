"""ModernBERT's decoders: two bases of RoPE, a head of two layers, and biases everywhere or nowhere."""

from tests.models.families.cases import Case


def decoder(name, **settings):
    kinds = ("modernbert-decoder", "ModernBertDecoderForCausalLM", "ModernBertDecoderConfig")
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "local_attention": 14}
    last = ("lm_head.norm.weight", "lm_head.norm.bias", "decoder.bias")
    return Case(*kinds, special | settings, name, last=last, gguf=False)


CASES = [
    decoder(
        "biases", num_hidden_layers=5, norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True,
        tie_word_embeddings=False, global_rope_theta=1000.0, local_rope_theta=50.0,
    ),
    decoder("ettin", num_hidden_layers=7, num_attention_heads=2),
    decoder(
        "listed", layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        local_attention=15, classifier_activation="relu", hidden_activation="silu", decoder_bias=False,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 160000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
]  # fmt: skip
