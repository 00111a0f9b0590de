"""Nemotron-H and Nemotron 3: each layer is Mamba 2, attention, an MLP or experts."""

from tests.models.families.cases import Case

_M, _A, _P, _E = "linear_attention", "full_attention", "mlp", "moe"
_SIZES = {
    "num_hidden_layers": None, "mamba_num_heads": 8, "mamba_head_dim": 6, "ssm_state_size": 10,
    "n_groups": 2, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip


def nemotron(name, length=24, exact=True, gguf=True, **settings):
    kind = "nemotron_h", "NemotronHForCausalLM", "NemotronHConfig"
    last = ("backbone.norm_f.weight", "model.norm_f.weight")
    settings = {**_SIZES, **settings}
    return Case(*kind, settings, name, last=last, length=length, gguf=gguf, exact=exact)


CASES = [
    nemotron("nano", length=90, layers_block_type=[_M, _E, _M, _A, _E, _M, _E], conv_kernel=3,
             num_key_value_heads=1, intermediate_size=20, moe_latent_size=12, n_group=2, topk_group=1,
             routed_scaling_factor=2.5),
    nemotron("dense", length=90, layers_block_type=[_M, _P, _M, _A, _P, _M, _P], conv_kernel=3,
             num_key_value_heads=1),
    nemotron("experts", hybrid_override_pattern="ME*ME", norm_topk_prob=False, n_groups=4,
             num_experts_per_tok=1),
    # llama.cpp has no biases of experts, and no MLPs beside them.
    nemotron("all-kinds", exact=False, gguf=False, layers_block_type=[_E, _M, _P, _A, _E], mlp_bias=True,
             moe_latent_size=16, n_group=4, topk_group=3, num_experts_per_tok=2),
    # With biases, transformers' convolution sees the padding on the left of shorter texts.
    nemotron("biases", exact=False, gguf=False, layers_block_type=[_A, _P, _M], use_bias=True, mlp_bias=True,
             use_conv_bias=False, layer_norm_epsilon=1e-3),
    # Its steps have no least length, which its chunks have.
    nemotron("letters", exact=False, gguf=False, hybrid_override_pattern="M*-M-", n_groups=4, time_step_min=0.4),
    # A bias before a convolution is another such padding.
    nemotron("mlp-biases", exact=False, layers_block_type=[_A, _M, _P, _M], mlp_bias=True),
    nemotron("no-recurrence", gguf=False, layers_block_type=[_P, _A, _P], tie_word_embeddings=False),
]  # fmt: skip
