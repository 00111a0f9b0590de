"""Falcon-H1: attention beside Mamba 2, factors throughout, a norm before or after the gate or none."""

from tests.models.families.cases import Case

_SIZES = {
    "mamba_d_ssm": 48, "mamba_n_heads": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "head_dim": 16,
}  # fmt: skip


def falcon(name, length=24, exact=True, gguf=True, **settings):
    kind = "falcon_h1", "FalconH1ForCausalLM", "FalconH1Config"
    last = ("model.final_layernorm.weight",)
    settings = {**_SIZES, **settings}
    return Case(
        *kind, settings, name, last=last, length=length, gguf=gguf, exact=exact, is_folded=True
    )


CASES = [
    falcon(
        "factors", length=90, embedding_multiplier=5.6, lm_head_multiplier=0.5, key_multiplier=0.4,
        attention_in_multiplier=0.8, attention_out_multiplier=0.9, ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.7, ssm_multipliers=[0.35, 0.25, 0.18, 0.5, 0.31],
        mlp_multipliers=[0.88, 0.63], num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e11},
    ),
    falcon("norm", gguf=False, mamba_rms_norm=True, mamba_norm_before_gate=False, tie_word_embeddings=True,
           attention_bias=True, mlp_bias=True, mamba_conv_bias=False, mamba_d_conv=3),
    # With biases, transformers' convolution sees the padding on the left of shorter texts.
    falcon("before", exact=False, gguf=False, mamba_rms_norm=True, projectors_bias=True, mamba_proj_bias=True,
           mamba_d_ssm=None, mamba_expand=3, mamba_d_head=12, mamba_n_groups=4),
    falcon("tied", exact=False, mamba_rms_norm=True, mamba_norm_before_gate=False, tie_word_embeddings=True,
           mlp_bias=True, mamba_d_conv=3, embedding_multiplier=2.5, lm_head_multiplier=0.3,
           mlp_multipliers=[0.8, 1.2], ssm_in_multiplier=1.3),
]  # fmt: skip
