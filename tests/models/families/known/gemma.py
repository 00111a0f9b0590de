"""Gemma 1, 2 and 3: norms with 1 added to their weights, caps, and windows."""

from tests.models import decoders
from tests.models.families.cases import Case


def _case(family, kind, config, name, gguf=True, **settings):
    return Case(
        family, f"{kind}ForCausalLM", config, settings, name, draw=decoders.drawn_of_gemma, one=1.0,
        gguf=gguf,
    )  # fmt: skip


def _1(name, **settings):
    return _case("gemma", "Gemma", "GemmaConfig", name, **settings)


def _2(name, **settings):
    return _case(
        "gemma2",
        "Gemma2",
        "Gemma2Config",
        name,
        **{"head_dim": 16, "query_pre_attn_scalar": 16, **settings},
    )


def _3(name, **settings):
    return _case(
        "gemma3_text",
        "Gemma3",
        "Gemma3TextConfig",
        name,
        **{"head_dim": 16, "query_pre_attn_scalar": 16, **settings},
    )


CASES = [
    _1("2b", head_dim=16, num_key_value_heads=1),
    _1("7b", head_dim=16, num_key_value_heads=4),
    _1("8", head_dim=8, num_key_value_heads=2, hidden_act="gelu"),
    _2("caps", sliding_window=6, attn_logit_softcapping=5.0, final_logit_softcapping=2.0),
    _2("uncapped", gguf=False, attn_logit_softcapping=None, final_logit_softcapping=None, num_key_value_heads=1),
    _2("9b", sliding_window=16),
    _3("windows", sliding_window=6, num_hidden_layers=7,
       layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"]),
    _3("270m", num_key_value_heads=1, sliding_window=8, num_hidden_layers=6),
    _3("27b", gguf=False, num_hidden_layers=6, sliding_window=8, query_pre_attn_scalar=8, rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }),
]  # fmt: skip
