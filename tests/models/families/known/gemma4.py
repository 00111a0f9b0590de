"""Gemma 3n and 4: layers that share keys and values, own widths of heads, embeddings of each layer."""

from tests.models import decoders
from tests.models.families.cases import Case

_FULL, _NEAR = "full_attention", "sliding_attention"
# llama.cpp reads the keys and values of the two layers before those that share, the last of which is full.
_KINDS = [_NEAR, _FULL, _NEAR, _FULL, _NEAR, _NEAR, _FULL]
_OTHERS = [_NEAR, _NEAR, _FULL, _NEAR, _FULL, _NEAR, _FULL]
_SIZES = {
    "num_hidden_layers": 7, "head_dim": 8, "sliding_window": 6, "layer_types": _KINDS,
    "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": decoders.VOCAB,
}  # fmt: skip
# What llama.cpp has in its code of a Gemma 3n. The deviation of inner features is that of a sample there,
# which is nearly the same of many, and it rounds GELU to half precision; over many layers both show.
_LLAMA_CPP = {
    "altup_num_inputs": 4, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
    "intermediate_size": 2048, "num_kv_shared_layers": 0,
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


def _calm(rng, name, shape):
    """Layers that add little each, since there are many."""
    found = _drawn(rng, name, shape)
    return found / 4 if "layers" in name and ".post_" in name else found


def _4(name, gguf=True, **settings):
    settings = {**_SIZES, "global_head_dim": 12, **settings}
    return Case(
        "gemma4_text", "Gemma4ForCausalLM", "Gemma4TextConfig", settings, name, _drawn, gguf=gguf
    )


def _3n(name, **settings):
    sizes = {"laurel_rank": 5, "altup_num_inputs": 3, "num_kv_shared_layers": 3}
    of_case = {key: settings.pop(key) for key in ("gguf", "draw") if key in settings}
    settings = {**_SIZES, **sizes, **settings}
    return Case(
        "gemma3n_text", "Gemma3nForCausalLM", "Gemma3nTextConfig", settings, name,
        **{"gguf": False, "draw": _drawn, **of_case},
    )  # fmt: skip


CASES = [
    _4("shared", hidden_size_per_layer_input=8, num_kv_shared_layers=3, use_double_wide_mlp=True,
       final_logit_softcapping=30.0),
    _4("keys-are-values", attention_k_eq_v=True, num_global_key_value_heads=1,
       hidden_size_per_layer_input=0, layer_types=None, num_hidden_layers=6, tie_word_embeddings=False),
    _4("one-own-of-each", gguf=False, num_kv_shared_layers=4,
       layer_types=[_NEAR, _FULL, _FULL] + _OTHERS[3:], num_key_value_heads=1, global_head_dim=16),
    _4("experts", enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=12,
       hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1),
    _3n("sparse", gguf=True, activation_sparsity_pattern=[0.95] * 7, **_LLAMA_CPP,
        vocab_size_per_layer_input=80),
    _3n("sizes", activation_sparsity_pattern=[0.9, 0.5] + [0.0] * 5, layer_types=_OTHERS,
        intermediate_size=[40, 24] + [32] * 5),
    _3n("second-active", altup_active_idx=1, altup_correct_scale=False, vocab_size_per_layer_input=80),
    _3n("none-shared", num_kv_shared_layers=0, altup_num_inputs=2, final_logit_softcapping=5.0),
    _3n("shared", gguf=True, draw=_calm, **{**_LLAMA_CPP, "num_kv_shared_layers": 2},
        num_hidden_layers=22, layer_types=([_NEAR] * 4 + [_FULL]) * 4 + [_NEAR, _FULL],
        num_key_value_heads=1, rope_parameters={
            _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            _NEAR: {"rope_type": "default", "rope_theta": 1e4},
        }),
]  # fmt: skip
