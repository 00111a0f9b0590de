"""Gemma 3n and 4: layers that share keys and values, own widths of heads, embeddings of each layer."""

from tests.models import decoders
from tests.models.families.cases import Case

_FULL, _NEAR = "full_attention", "sliding_attention"
_KINDS = [_NEAR, _NEAR, _FULL, _NEAR, _FULL, _NEAR, _FULL]
_SIZES = {
    "num_hidden_layers": 7, "head_dim": 8, "sliding_window": 6, "layer_types": _KINDS,
    "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": decoders.VOCAB,
}  # fmt: skip


def _drawn(rng, name, shape):
    """Weights that multiply hidden states are near 1; those of queries have the scale, which is 1."""
    if any(
        part in name
        for part in ("layer_scalar", "correct_output_scale", "router.scale", "per_expert")
    ):
        return 1 + 0.1 * rng.normal(0, 1, shape)
    found = decoders.drawn(rng, name, shape)
    return found / 3 if "q_norm" in name else found


def _4(name, **settings):
    settings = {**_SIZES, "global_head_dim": 12, **settings}
    return Case(
        "gemma4_text", "Gemma4ForCausalLM", "Gemma4TextConfig", settings, name, _drawn, gguf=False
    )


def _3n(name, **settings):
    settings = {
        **_SIZES,
        "laurel_rank": 5,
        "altup_num_inputs": 3,
        "num_kv_shared_layers": 3,
        **settings,
    }
    return Case(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        settings,
        name,
        _drawn,
        gguf=False,
    )


CASES = [
    _4("shared", hidden_size_per_layer_input=8, num_kv_shared_layers=3, use_double_wide_mlp=True,
       final_logit_softcapping=30.0),
    _4("keys-are-values", attention_k_eq_v=True, num_global_key_value_heads=1,
       hidden_size_per_layer_input=0, layer_types=None, num_hidden_layers=6, tie_word_embeddings=False),
    _4("one-own-of-each", num_kv_shared_layers=4, layer_types=[_NEAR, _FULL, _FULL] + _KINDS[3:],
       num_key_value_heads=1, global_head_dim=16),
    _4("experts", enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=12,
       hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1),
    _3n("sparse", activation_sparsity_pattern=[0.9, 0.5] + [0.0] * 5, intermediate_size=[40, 24] + [32] * 5),
    _3n("second-active", altup_active_idx=1, altup_correct_scale=False, vocab_size_per_layer_input=80),
    _3n("none-shared", num_kv_shared_layers=0, altup_num_inputs=2, final_logit_softcapping=5.0),
]  # fmt: skip
