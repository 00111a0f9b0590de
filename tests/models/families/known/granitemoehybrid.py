"""Granite 4: Mamba 2 and attention, with and without experts and RoPE."""

from tests.models.families.cases import Case

_MAMBA, _FULL = "linear_attention", "full_attention"
_SIZES = {
    "mamba_n_heads": 8, "mamba_d_state": 6, "mamba_n_groups": 1, "shared_intermediate_size": 20,
    "intermediate_size": 12, "num_local_experts": 6, "num_experts_per_tok": 2,
}  # fmt: skip


def hybrid(name, length=24, exact=True, gguf=True, **settings):
    kind = "granitemoehybrid", "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig"
    return Case(*kind, {**_SIZES, **settings}, name, length=length, gguf=gguf, exact=exact)


CASES = [
    hybrid(
        "tiny", length=90, num_hidden_layers=5, layer_types=[_MAMBA, _MAMBA, _FULL, _MAMBA, _MAMBA],
        embedding_multiplier=12.0, attention_multiplier=0.125, residual_multiplier=0.22,
        logits_scaling=3.0, tie_word_embeddings=True, mamba_d_state=10, mamba_d_conv=3,
    ),
    hybrid(
        # With biases, transformers' convolution sees the padding on the left of shorter texts.
        "micro", exact=False, gguf=False, num_local_experts=0, num_experts_per_tok=0,
        layer_types=[_MAMBA, _FULL, _MAMBA], position_embedding_type="rope", mamba_n_groups=2,
        mamba_d_head=8, mamba_proj_bias=True, mamba_conv_bias=False, rms_norm_eps=1e-5, num_key_value_heads=1,
    ),
    # llama.cpp has only layers that are twice as wide as the hidden states.
    hybrid("attention-first", length=70, gguf=False, layer_types=[_FULL, _MAMBA, _MAMBA],
           mamba_n_groups=4, mamba_expand=3, mamba_n_heads=12),
    hybrid("dense", num_local_experts=0, num_experts_per_tok=0, layer_types=[_FULL, _MAMBA, _MAMBA],
           position_embedding_type="rope", mamba_n_groups=2, attention_bias=True, num_key_value_heads=1,
           attention_multiplier=0.3, residual_multiplier=0.7),
    hybrid("no-recurrence", gguf=False, layer_types=[_FULL, _FULL, _FULL], position_embedding_type="rope",
           attention_multiplier=0.3),
]  # fmt: skip
