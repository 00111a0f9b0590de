"""Jamba: Mamba 1 with norms, attention without positions, experts in some layers."""

from tests.models.families.cases import Case

_SIZES = {
    "num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 8,
    "num_experts_per_tok": 3, "mamba_d_state": 10,
}  # fmt: skip


def jamba(name, length=24, exact=True, gguf=True, **settings):
    kinds = "jamba", "JambaForCausalLM", "JambaConfig"
    last = ("model.final_layernorm.weight",)
    # Small mean squares of time steps enlarge float32's error, transformers' as much as ours.
    return Case(
        *kinds, {**_SIZES, **settings}, name, last=last, length=length, gguf=gguf, exact=exact,
        in_float64=True,
    )  # fmt: skip


CASES = [
    jamba("mini", length=90, mamba_d_conv=3, mamba_dt_rank=8, num_key_value_heads=1, rms_norm_eps=1e-3),
    # With biases, transformers' convolution sees the padding on the left of shorter texts.
    jamba("biases", exact=False, gguf=False, mamba_proj_bias=True, mamba_conv_bias=False, mamba_expand=1,
          expert_layer_period=1, expert_layer_offset=0, num_experts_per_tok=1),
    jamba("dense", exact=False, num_experts=1, num_experts_per_tok=1, tie_word_embeddings=True,
          attn_layer_period=2, attn_layer_offset=0, mamba_dt_rank=6),
    jamba("one-of-each", exact=False, num_hidden_layers=2, expert_layer_period=4, expert_layer_offset=1,
          hidden_act="silu", mamba_dt_rank=5),
]  # fmt: skip
