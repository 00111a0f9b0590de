"""Qwen3-Next and Qwen 3.5: the gated delta rule, gated attention, partial RoPE, norms around one."""

from tests.models import decoders
from tests.models.families.cases import Case

_SIZES = {
    "num_hidden_layers": 5, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
}  # fmt: skip


def _drawn(rng, name, shape):
    """1 is added to the weights of all norms but the delta rule's own.

    The rule's norm divides by the size of its results, which is near zero where a query is orthogonal to
    all keys: float32's error in a logit is up to 1e-4, transformers' as much as ours, so that they are
    compared with float64. Large inputs of the convolution's activation, and a small weight, keep it there.
    """
    if "linear_attn" not in name:
        return decoders.drawn_of_gemma(rng, name, shape)
    factor = 6.0 if "conv1d" in name else 0.15 if "norm" in name else 1.0
    return factor * decoders.drawn(rng, name, shape)


def _case(family, kind, config, name, length=24, gguf=True, **settings):
    settings = {**_SIZES, **settings}
    return Case(
        family,
        kind,
        config,
        settings,
        name,
        _drawn,
        one=1.0,
        length=length,
        gguf=gguf,
        in_float64=True,
    )


def _next(name, **settings):
    kind = "Qwen3NextForCausalLM", "Qwen3NextConfig"
    return _case("qwen3_next", *kind, name, **{**_EXPERTS, **settings})


def _dense(name, **settings):
    return _case("qwen3_5_text", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", name, **settings)


def _sparse(name, **settings):
    kind = "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig"
    return _case("qwen3_5_moe_text", *kind, name, **{**_EXPERTS, **settings})


_FULL, _LINEAR = "full_attention", "linear_attention"
CASES = [
    _next("long", length=150),
    _next("every-second", gguf=False, full_attention_interval=2, attention_bias=True, num_key_value_heads=1,
          norm_topk_prob=False, linear_conv_kernel_dim=3),
    _next("tied", gguf=False, mlp_only_layers=[1], linear_key_head_dim=6, tie_word_embeddings=True,
          layer_types=[_FULL, _LINEAR, _LINEAR, _FULL, _LINEAR],
          rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}),
    _dense("tied", tie_word_embeddings=True),
    _dense("wide-keys", gguf=False, length=100, linear_num_key_heads=4, linear_key_head_dim=10, head_dim=8,
           rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_interleaved": True, "mrope_section": [1, 0, 0]}),
    _dense("one-head", num_key_value_heads=1, linear_num_key_heads=1, num_hidden_layers=4),
    _dense("relu", gguf=False, hidden_act="relu", layer_types=[_LINEAR, _LINEAR, _FULL], num_hidden_layers=3),
    _sparse("1"),
    _sparse("tied", tie_word_embeddings=True, num_experts_per_tok=1),
    _sparse("all-linear-first", layer_types=[_LINEAR, _LINEAR, _LINEAR, _LINEAR, _FULL], length=45),
]  # fmt: skip
