"""Kimi Linear: a delta rule with decays of features, latent attention without positions, balanced experts."""

from tests.models import decoders
from tests.models.families.cases import Case

_LINEAR, _FULL = "linear_attention", "full_attention"
_SIZES = {
    "num_hidden_layers": 5, "num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "linear_num_heads": 4, "linear_head_dim": 8,
    "moe_intermediate_size": 12, "num_experts_per_tok": 3, "num_local_experts": 8,
}  # fmt: skip


def _drawn(rng, name, shape):
    """Large inputs of the convolutions' activation, and small weights of the norm: as of Qwen3-Next's delta rule."""
    factor = 6.0 if "conv1d" in name else 0.15 if "o_norm" in name else 1.0
    return factor * decoders.drawn(rng, name, shape)


def kimi(name, length=24, gguf=True, exact=True, **settings):
    kind = "KimiLinearForCausalLM", "KimiLinearConfig"
    return Case(
        "kimi_linear", *kind, {**_SIZES, **settings}, name, _drawn, length=length, gguf=gguf,
        exact=exact, in_float64=True,
    )  # fmt: skip


CASES = [
    kimi("48b", length=90, linear_conv_kernel_dim=3, num_experts_per_tok=2, n_group=2, topk_group=1),
    kimi("listed", gguf=False, layer_types=[_FULL, _LINEAR, _FULL, _LINEAR], num_hidden_layers=4,
         mlp_layer_types=["sparse", "dense", "sparse", "dense"], q_lora_rank=10, attention_bias=True,
         norm_topk_prob=False, linear_num_heads=2, linear_head_dim=6),
    kimi("ranks", q_lora_rank=10, layer_types=[_LINEAR, _FULL, _LINEAR], num_hidden_layers=3,
         n_shared_experts=2, v_head_dim=9, qk_nope_head_dim=3, rms_norm_eps=1e-3),
]  # fmt: skip
