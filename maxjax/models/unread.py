"""Warns of configuration keys that change results in some model families but that the model's own does not read.

Such a key may mean that the file is of a variant that maxjax does not compute, so the results may be
wrong. Each is logged once. Only the keys below are known, since files hold many others without an effect.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_LOG = logging.getLogger("maxjax")

# Each key, and its values without an effect. null never has an effect.
EFFECTS: Mapping[str, tuple[Any, ...]] = {
    # attention
    "clip_qkv": (), "use_qk_norm": (False,), "qk_layernorm": (False,), "qk_norm": (False,),
    "attention_chunk_size": (), "attn_temperature_tuning": (False, 0), "alibi": (False,),
    "attn_logit_softcapping": (), "query_pre_attn_scalar": (), "attention_multiplier": (),
    "attn_output_gate": (False,), "gating": (False,), "use_bidirectional_attention": (False,),
    "kv_lora_rank": (), "q_lora_rank": (), "sliding_window_pattern": (),
    "num_kv_shared_layers": (0,), "use_attention_sinks": (False,),
    # rotary position embedding
    "no_rope_layers": ((),), "no_rope_layer_interval": (0,), "rope_interleave": (False,),
    "rope_interleaved": (False,), "rotary_pct": (1,), "rotary_dim": (), "rope_local_base_freq": (),
    "mrope_section": (), "position_embedding_type": ("absolute", "rope", "rope_gptj", "rotary"),
    # factors
    "embedding_multiplier": (1,), "residual_multiplier": (1,), "logits_scaling": (1,),
    "logit_scale": (1,), "lm_head_multiplier": (1,), "scale_emb": (1,), "scale_depth": (),
    "dim_model_base": (), "final_logit_softcapping": (), "mup_scale": (1,), "use_mup": (False,),
    # blocks
    "use_parallel_residual": (False,), "parallel_attn": (False,), "lm_head_bias": (False,),
    "use_post_norm": (False,), "layer_types": (), "block_types": (), "hybrid_override_pattern": (),
    "hidden_size_per_layer_input": (0,), "laurel_rank": (), "altup_num_inputs": (),
    "do_layer_norm_before": (True,), "layer_norm_elementwise_affine": (True,),
    "word_embed_proj_dim": (), "scale_embeddings": (False,),
    # experts
    "num_local_experts": (0, 1), "num_experts": (0, 1), "n_routed_experts": (0, 1),
    "n_shared_experts": (0,), "num_shared_experts": (0,), "first_k_dense_replace": (0,),
    "shared_expert_intermediate_size": (0,), "routed_scaling_factor": (1,),
    "moe_layer_freq": (), "scoring_func": (), "topk_method": (),
    # states
    "mamba_d_state": (), "ssm_state_size": (), "linear_num_value_heads": (), "conv_L_cache": (),
}  # fmt: skip

_told: set[tuple[str, str]] = set()


class ReadTracker(Mapping[str, Any]):
    """The content of a configuration file, which remembers the keys that were read.

    Attributes:
        path: path of the file, for messages; None: not known.

    Example:
        >>> raw = ReadTracker({"a": 1, "b": 2})
        >>> raw.get("a"), raw.get("c"), sorted(raw.keys_seen)
        (1, None, ['a', 'c'])
    """

    def __init__(self, values: Mapping[str, Any], path: Any = None):
        self._values, self.path = values, path
        self.keys_seen: set[str] = set()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ReadTracker:
        """Return a ReadTracker with these values; one itself, unchanged."""
        return values if isinstance(values, ReadTracker) else cls(values)

    def with_defaults(self, defaults: Mapping[str, Any]) -> ReadTracker:
        """Return the content with values for keys that the file does not have; null in the file stays null."""
        found = ReadTracker({**defaults, **self._values}, self.path)
        found.keys_seen = self.keys_seen
        return found

    def replaced(self, values: Mapping[str, Any]) -> ReadTracker:
        """Return the content with other values for some keys."""
        found = ReadTracker({**self._values, **values}, self.path)
        found.keys_seen = self.keys_seen
        return found

    def __getitem__(self, key: str) -> Any:
        self.keys_seen.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def unread(raw: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The keys in :data:`EFFECTS` that are not ``known`` and that a configuration gives a value with an effect.

    Example:
        >>> unread({"clip_qkv": 8.0, "logits_scaling": 1.0, "hidden_size": 8}, {"hidden_size"})
        ['clip_qkv']
    """
    return [key for key in EFFECTS if key not in known and _has_effect(key, raw.get(key))]


def _has_effect(key: str, value: Any) -> bool:
    if value is None:
        return False
    if key == "layer_types":
        return isinstance(value, list) and any(kind != "full_attention" for kind in value)
    if key == "no_rope_layers" and isinstance(value, list):
        return not all(value)  # 1 stands for a layer with RoPE
    if isinstance(value, list):
        return bool(value)
    return not any(value == same for same in EFFECTS[key])


def warn_of_unread(family: str, raw: Mapping[str, Any], known: Collection[str]) -> None:
    """Logs each key that :func:`unread` finds, once in a process for a family."""
    for key in unread(raw, known):
        if (family, key) not in _told:
            _told.add((family, key))
            _LOG.warning(
                "the configuration has '%s': %.60r, which changes results in some models and which "
                "maxjax does not look at in a model of type '%s': results may be wrong",
                key, raw[key], family,
            )  # fmt: skip
