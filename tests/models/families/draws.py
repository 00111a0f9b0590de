"""Random configurations of every family of decoders, with settings as published files have them.

``draw("llama", rng)`` is a :class:`Case` of its own. What the classes of settings of transformers have in
common is drawn for all families that have it (``COMMON``); what is peculiar to a family is a function in
``OWN``, which gets the settings drawn so far and returns others. A family without an entry there fails
``test_draws.py``.

Files hold settings in several spellings, and leave some out. So ``Drawn.bare`` says whether the file has
what was drawn and nothing else, or what transformers writes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxjax.models import LanguageModelConfig
from maxjax.models.registry import all_families
from tests.models.families.cases import Case, every
from tests.models.families.choices import (
    FULL,
    KINDS,
    LEFT_OUT,
    NEAR,
    ORIGINAL,
    Pick,
    Settings,
    rope,
)
from tests.models.families.own_choices import OWN
from tests.oracles.recorded import transformers


@dataclass(frozen=True)
class Drawn:
    """A configuration, and how it is opened.

    Attributes:
        case: the configuration.
        bare: whether ``config.json`` has the drawn settings alone, not all that transformers writes.
        by_length: kind of RoPE ("dynamic" or "longrope") if its frequencies change while a text grows, or
            "". transformers computes only those of new tokens anew, except for Phi-3.
        model_type: name in ``config.json``, if it is not the class's own.
    """

    case: Case
    bare: bool
    by_length: str
    model_type: str


def names() -> list[str]:
    """The families of decoders."""
    return [one.model_type for one in all_families() if issubclass(one.config, LanguageModelConfig)]


# What more than one class of settings has, and what it may be. A third is left out.
COMMON: dict[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (True, False),
    "rms_norm_eps": (1e-6, 1e-5, 1e-3),
    "layer_norm_eps": (1e-6, 1e-3),
    "norm_epsilon": (1e-6, 1e-3),
    "hidden_act": ("silu", "silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "hidden_activation": ("gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu"),
    "attention_bias": (True, False),
    "attention_out_bias": (True, False),
    "mlp_bias": (True, False),
    "use_bias": (True, False),
    "use_qkv_bias": (True, False),
    "qkv_bias": (True, False),
    "use_qk_norm": (True, False),
    "use_parallel_residual": (True, False),
    "norm_topk_prob": (True, False),
    "routed_scaling_factor": (1.0, 2.5, 0.7),
    "embedding_multiplier": (12.0, 3, 0.5),
    "attention_multiplier": (0.125, 0.4),
    "residual_multiplier": (0.22, 0.7),
    "logits_scaling": (8.0, 2, 0.5),
    "logit_scale": (0.25, 0.0625, 1.5),
    "attn_logit_softcapping": (None, 2.0, 50.0),
    "final_logit_softcapping": (None, 4.0, 30.0),
    "query_pre_attn_scalar": (8, 16, 100),
    "scale_attn_weights": (True, False),
    "scale_attn_by_inverse_layer_idx": (True, False),
    "clip_qkv": (None, 0.7, 3.0),
    "swiglu_limit": (7.0, 1.0),
    "swiglu_alpha": (1.702, 1.2),
    "attn_temperature_tuning": (True, False),
    "floor_scale": (4, 8),
    "attn_scale": (0.1, 0.3),
    "moe_norm_min": (1e-12, 1e-2),
    "altup_correct_scale": (True, False),
}
# Those that a file always has.
SIZES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (89, 96, 101, 130),
    "num_hidden_layers": (1, 2, 3, 4, 5),
    "max_position_embeddings": (128, 512, 4096),
    "num_experts": (4, 5, 8),
    "num_local_experts": (4, 5, 8),
    "n_routed_experts": (4, 6, 8),
    "moe_num_experts": (4, 5, 8),
    "moe_intermediate_size": (12, 20, 32),
    "shared_expert_intermediate_size": (8, 20),
    "num_experts_per_tok": (1, 2, 3, 4),
    "moe_topk": (1, 2, 3, 4),
    "moe_k": (1, 2, 3, 4),
    "sliding_window": (3, 6, 9, 40),
    "linear_num_key_heads": (1, 2),
    "linear_key_head_dim": (6, 10),
    "linear_value_head_dim": (5, 8),
    "linear_conv_kernel_dim": (2, 4),
}


def draw(family: str, rng: np.random.Generator) -> Drawn:
    """A configuration of a family."""
    pick, base = Pick(rng), base_of(family)
    config = getattr(transformers, base.config)
    known = set(config().to_dict())
    found = sizes(pick, known, family, config)
    found |= {key: pick(*values) for key, values in SIZES.items() if key in known}
    kept = {key: pick(*values) for key, values in COMMON.items() if key in known}
    found |= {key: value for key, value in kept.items() if pick.maybe(0.67)}
    if "rope_parameters" in known:
        found |= rope(pick, found, KINDS)
    if "layer_types" in known and "sliding_window" in found and pick.maybe():
        found["layer_types"] = pick.many(found["num_hidden_layers"], FULL, NEAR)
    found |= OWN[family](pick, found)
    found = {key: value for key, value in found.items() if value is not LEFT_OUT}
    ropes = found.get("rope_scaling") or found.get("rope_parameters") or {}
    kind = ropes.get("rope_type", ropes.get("type"))
    original = found.get(ORIGINAL, ropes.get(ORIGINAL))
    if kind == "dynamic" and Pick(rng.spawn(1)[0]).maybe():
        found["max_position_embeddings"] = 32  # texts grow beyond it
    context = found["max_position_embeddings"] if kind == "dynamic" else original
    grows = kind in ("dynamic", "longrope") and context is not None and context < 64
    # Two names of one number, of which transformers reads both and writes one.
    both = {"num_experts", "num_local_experts"}
    for other, name in config.attribute_map.items():
        if {other, name} == both and Pick(rng.spawn(1)[0]).maybe():
            found[other] = found.pop(name)
    case = dataclasses.replace(base, family=family, settings=found, is_whole=True, name="drawn")
    by_length = kind if grows and not ropes.get("alpha") else ""
    return Drawn(case, pick.maybe(), by_length, family)


# Configurations of these have heads that divide the hidden size, or no width of heads of their own.
_EVEN = ("llama", "arcee", "gemma2", "gemma3_text", "gemma3n_text", "deepseek_v2")


def sizes(pick: Pick, known: set[str], family: str, config: Any) -> Settings:
    """Heads and sizes."""
    kv_default = getattr(config, "num_key_value_heads", 0)
    kv = pick(1, 2, 3, 4)
    heads, width = kv * pick(1, 2, 3), pick(4, 6, 8, 10, 16)
    hidden = pick(16, 20, 24, 36, 64)
    has_experts = any("experts" in key for key in known)
    if "head_dim" not in known:
        # torch's product of groups of rows wants 16 bytes.
        hidden = heads * (pick(4, 8, 16) if has_experts else width)
    elif family in _EVEN:
        hidden = heads * (pick(4, 8) if has_experts else pick(4, 6, 10))
    found = {
        "num_key_value_heads": kv, "num_attention_heads": heads, "hidden_size": hidden,
        "head_dim": width, "intermediate_size": pick(20, 32, 64),
        "pad_token_id": pick(0, None), "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if not has_experts:
        found["intermediate_size"] = pick(20, 33, 64)
        if "head_dim" in known and family not in _EVEN:
            found["hidden_size"] = pick(hidden, hidden, 21, 35)
    # Older files leave out what is as many as heads.
    if kv == heads and kv_default is None and pick.maybe():
        del found["num_key_value_heads"]
    return {k: v for k, v in found.items() if k in known}


# Families without cases: those of another name.
BASES = {"kimi_k2": Case("", "DeepseekV3ForCausalLM", "DeepseekV3Config")}


def base_of(family: str) -> Case:
    """A case of the family, whose settings are another's."""
    if family in BASES:
        return BASES[family]
    return next(case for case in every() if case.family == family)
