"""Writes the settings of a model as a ``config.json`` with Hugging Face's keys: :func:`config_of`, :func:`written`.

A field that is read from a key of its own is written under that key. The others are computed from several
keys when a file is read; ``_DERIVED`` has one function for each of these keys, and a key is written if the
family looks at it. The result is read again and must give the same settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ..errors import CheckpointFormatError, UnsupportedModelError, UserInputError, some
from .config import ModelConfig, label_names
from .decoder.config import DecoderConfig
from .family import PretrainedModel
from .parts.config import ArchitectureConfig, LanguageModelConfig
from .parts.score import ENDING
from .unread import ReadTracker

# The names of layers, by the field that tells them apart: (where it is True, where it is False).
_KINDS = {
    "linear": ("linear_attention", "full_attention"), "convolves": ("conv", "full_attention"),
    "recurs": ("mamba", "attention"),
    "slides": ("sliding_attention", "full_attention"),
}  # fmt: skip
# Keys that files have only with another value.
_USUAL = {"is_causal": True}
# Keys that are not needed beside a newer one.
_NEWER = {"first_k_dense_replace": "mlp_layer_types", "sliding_window_pattern": "layer_types"}


def config_of(
    model: PretrainedModel, tokens: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The content of ``config.json`` for a model: that of its file, or one made from its settings.

    Args:
        model: the model.
        tokens: ``eos_token_id`` and the like for a model that was made in code. null is written for those
            that are not given, since transformers has other defaults.

    Raises:
        UserInputError: the model was made in code, and such a file cannot say what it is.

    Example:
        >>> from maxjax.models import Llama, LlamaConfig
        >>> found = config_of(Llama(LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)))
        >>> found["architectures"], found["model_type"]
        (['LlamaForCausalLM'], 'llama')
    """
    if (found := model.hf_config) is not None:
        return found
    config: Any = getattr(model, "config", None)
    family, kind = model.family, type(model).__name__
    is_own = isinstance(config, family.config) and config.model_type == family.model_type != ""
    if not is_own or len(dataclasses.fields(config)) != len(dataclasses.fields(family.config)):
        raise UserInputError(
            f"cannot write config.json for a {kind}: expected a {family.config.__name__} with the model_type of its "
            f"family ({family.model_type!r}), got a {type(config).__name__}; give the class a family of its own "
            "(docs/families.md), or pass the content as config="
        )
    whole, score = family.architectures[0], getattr(model, "score", None)
    if isinstance(config, LanguageModelConfig):
        labels = None if score is None else int(score.weight.logical_shape[0])
        name = family.architectures[-1] if model.lm_head is None else whole  # type: ignore[attr-defined]
    else:
        labels = (
            None if getattr(model, "classifier", None) is None else getattr(config, "num_labels", 2)
        )
        name = whole.removesuffix(ENDING).removesuffix("Model") + "Model"
    if labels is not None:
        name = name.removesuffix("Model") + ENDING
    tokens = {**dict.fromkeys(config.special), **tokens}
    return {"architectures": [name], "dtype": None, **tokens, **written(config, labels)}


def written(config: Any, labels: int | None = None) -> dict[str, Any]:
    """The content of a ``config.json`` with these settings, without ``architectures``.

    Args:
        config: settings of a model.
        labels: number of labels of a decoder's classification head; None: there is no such head.

    Raises:
        UserInputError: a file with Hugging Face's keys cannot say some of the settings; the message names them.

    Example:
        >>> from maxjax.models import LlamaConfig
        >>> found = written(LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> found["num_key_value_heads"], found["rope_theta"]
        (2, 10000.0)
    """
    cls = type(config)
    if isinstance(config, ArchitectureConfig) and not isinstance(config, DecoderConfig):
        found = config.to_hf() | ({} if labels is None else label_names(labels))
        _check(config, found)
        return found
    fields = [one for one in dataclasses.fields(cls) if not one.metadata.get("own")]
    found = {cls.key_of(one.name): _plain(getattr(config, one.name)) for one in fields}
    # null counts as absent, so None is only written where it differs from the default.
    usual = {cls.key_of(one.name): one.default for one in fields}
    kept = {*cls.unsaid, *(key for key, default in usual.items() if default is not None)}
    found = {key: one for key, one in found.items() if one is not None or key in kept}
    found |= {} if labels is None else label_names(labels)
    seen: frozenset[str] = frozenset()
    while True:
        made, looked = _computed(cls, found)
        if looked <= seen:
            break
        seen |= looked
        new = {key: value(config) for key, value in _DERIVED.items() if key in seen}
        found |= {key: value for key, value in new.items() if value is not None}
        found |= _ropes(config, seen)
    # What is the same in every model of the family, whatever a file says, or follows from the rest.
    same = getattr(cls, "fixed", {}).keys() - made.keys() | (made.keys() - looked)
    same |= {key for key, newer in _NEWER.items() if newer in found and key in {*made, *looked}}
    same |= {key for key, usual in _USUAL.items() if found.get(key) is usual}
    found = {key: value for key, value in found.items() if key not in same}
    found = config.spelled({"model_type": cls.model_type, **found})
    _check(config, found)
    return found


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _computed(cls: type[ModelConfig], raw: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """(The values that a family computes when it reads a file, the keys that it looks at for them)."""
    looked, made = ReadTracker({**cls.unsaid, **raw}), {}
    for read in (
        lambda: cls.ropes(looked, raw.get("max_position_embeddings") or 2048),  # type: ignore[attr-defined]
        lambda: cls.derived(looked),  # type: ignore[attr-defined]
    ):
        try:
            made |= read()
        except (AttributeError, ValueError, UnsupportedModelError):
            pass  # keys are still missing: what it looked at so far is written, and it is asked again
    return made, looked.keys_seen


def _check(config: ModelConfig, found: Mapping[str, Any]) -> None:
    """Checks that a file with these keys is read as the same settings."""
    cls, name = type(config), type(config).__name__
    try:
        read = cls.from_dict(found)
    except (CheckpointFormatError, UnsupportedModelError) as error:
        problem = getattr(error, "problem", error)
        raise UserInputError(f"cannot write config.json for this {name}: {problem}") from None
    names = [one.name for one in dataclasses.fields(cls)]
    wrong = [one for one in names if getattr(read, one) != getattr(config, one)]
    if wrong:
        told = [f"{one}={getattr(config, one)!r:.60}" for one in wrong]
        raise UserInputError(
            f"cannot write config.json for this {name}: no key of Hugging Face's says {some(told, 3)}; "
            "pass its content as config="
        )


# --- the keys of fields that are computed -------------------------------------------------------


def _layer_types(config: Any) -> list[str] | None:
    """The name of each layer's kind; None if the family has another key for them."""
    if hasattr(config, "kinds"):
        return None
    for field, names in {**_KINDS, **type(config).layer_names}.items():
        if listed := getattr(config, field, ()):
            return [names[not one] for one in listed]
    return None


def _sparse(config: Any) -> list[int]:
    """The layers with experts."""
    return [i for i, one in enumerate(getattr(config, "sparse", ())) if one]


def _dense(config: Any) -> list[int]:
    """The layers without experts."""
    return [i for i, one in enumerate(getattr(config, "sparse", ())) if not one]


def _first_dense(config: Any) -> int:
    """The number of layers before the first with experts."""
    return min(_sparse(config), default=config.num_hidden_layers)


def _limit(config: Any) -> list[Any] | None:
    """The limits of a time step; JSON has no number for infinity."""
    low, high = config.time_steps
    return None if (low, high) == (0.0, math.inf) else [low, "inf" if high == math.inf else high]


def _expand(config: Any) -> int | None:
    """The features of all heads of Mamba 2, as a multiple of the hidden size; None if they are no multiple."""
    times, rest = divmod(config.mamba.inner, config.hidden_size)
    return None if rest else times


def _position_type(config: Any) -> str | None:
    """Granite's name of the positions; encoders have a field for it."""
    rotates = getattr(config, "rotates", None)
    return None if rotates is None else "rope" if all(rotates) else "nope"


def _scaling_of_queries(config: Any, name: str) -> float | None:
    return None if config.query_scaling is None else getattr(config.query_scaling, name)


_DERIVED: dict[str, Callable[[Any], Any]] = {
    "layer_types": _layer_types,
    "layers_block_type": lambda c: list(c.kinds) if hasattr(c, "kinds") else None,
    "use_sliding_window": lambda c: any(c.slides) or None,
    "attention_chunk_size": lambda c: c.sliding_window,
    "no_rope_layers": lambda c: [int(one) for one in c.rotates or (True,) * c.num_hidden_layers],
    "position_embedding_type": _position_type,
    "mlp_only_layers": lambda c: _dense(c) if c.num_experts else None,
    "decoder_sparse_step": lambda c: 1 if c.num_experts else None,
    "mlp_layer_types": lambda c: [("dense", "sparse")[one] for one in c.sparse],
    "first_k_dense_replace": _first_dense,
    "num_dense_layers": _first_dense,
    "moe_layers": _sparse,
    "moe_layer_end_index": lambda c: max(_sparse(c), default=0),
    "time_step_limit": _limit,
    "mamba_d_ssm": lambda c: c.mamba.inner,
    "mamba_expand": _expand,
    "mlp_multipliers": lambda c: list(c.mlp_multipliers),
    "ssm_multipliers": lambda c: list(c.ssm_multipliers),
    "block_auto_adjust_ff_dim": lambda c: False,
    "activation_sparsity_pattern": lambda c: list(c.sparsity) or None,
    "intermediate_size": lambda c: list(getattr(c, "sizes", ())) or None,
    "attn_temperature_tuning": lambda c: c.query_scaling is not None,
    "attn_scale": lambda c: _scaling_of_queries(c, "beta"),
    "floor_scale": lambda c: _scaling_of_queries(c, "length"),
}  # fmt: skip
"""Key of a ``config.json`` → its value for a configuration; None: it is not written."""


# --- RoPE ---------------------------------------------------------------------------------------


def _ropes(config: Any, seen: frozenset[str]) -> dict[str, Any]:
    """The keys of the rotary position embedding, among those that the family looks at."""
    rope, local = getattr(config, "rope", None), getattr(config, "local_rope", None)
    if rope is None:
        return {}
    # Without such an object, some families scale it all the same.
    scaling = rope.scaling_to_hf() or (
        {"rope_type": "default"} if getattr(config, "unsaid_rope", None) else None
    )
    found: dict[str, Any] = {"rope_scaling": scaling}
    if "rope_theta" in seen:
        found["rope_theta"] = rope.theta
    if "original_max_position_embeddings" in type(config).unsaid and scaling is not None:
        found["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings")
    if local is not None:
        if "rope_local_base_freq" in seen and local.scaling is None:
            found["rope_local_base_freq"] = local.theta
        elif local != dataclasses.replace(rope, scaling=None, magnitude=1.0):
            kinds = {"full_attention": (rope, scaling), "sliding_attention": (local, None)}
            return {
                "rope_parameters": {
                    kind: {"rope_type": "default", "rope_theta": one.theta, **(given or {})}
                    for kind, (one, given) in kinds.items()
                }
            }
    if {rope.part, getattr(type(config).rope, "part", 1)} != {1}:
        found["partial_rotary_factor"] = rope.part
    if "rope_interleave" in seen:
        found["rope_interleave"] = rope.interleaved
    return {key: value for key, value in found.items() if value is not None}
