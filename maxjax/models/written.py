"""Writes the settings of a model as a ``config.json`` with Hugging Face's keys: :func:`config_of`, :func:`written`.

An architecture's ``to_hf`` writes its keys. The result is read again and must give the same settings.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import CheckpointFormatError, UnsupportedModelError, UserInputError, some
from .config import ModelConfig, default_labels, label_names
from .family import PretrainedModel
from .parts.config import LanguageModelConfig
from .parts.score import ENDING
from .ties import tied_as


def config_of(
    model: PretrainedModel, tokens: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The content of ``config.json`` for a model: that of its file, or one made from its settings.

    Args:
        model: the model.
        tokens: ``eos_token_id`` and the like for a model that was made in code. null, or -1 in some
            architectures, is written for a decoder's that are not given or None, since transformers has other
            defaults.

    Raises:
        UserInputError: the model was made in code, and such a file cannot say what it is.

    Example:
        >>> from maxjax.models import Llama, LlamaConfig
        >>> found = config_of(Llama(LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)))
        >>> found["architectures"], found["model_type"]
        (['LlamaForCausalLM'], 'llama')
    """
    if (found := model.hf_config) is not None:
        if model._whole_text is None:
            return found
        return tied_as(json.loads(model._whole_text), found.get("tie_word_embeddings"))
    config: Any = getattr(model, "config", None)
    family, kind = model.family, type(model).__name__
    is_own = isinstance(config, family.config) and config.model_type == family.model_type != ""
    if not is_own or len(dataclasses.fields(config)) != len(dataclasses.fields(family.config)):
        raise UserInputError(
            f"cannot write config.json for a {kind}: expected a {family.config.__name__} with the model_type of its "
            f"family ({family.model_type!r}), got a {type(config).__name__}; give the class a family of its own "
            "(docs/families.md), or pass the content as config="
        )
    name, score, labels = family.architectures[0], getattr(model, "score", None), None
    if isinstance(config, LanguageModelConfig):
        name = family.architectures[-1] if model.lm_head is None else name  # type: ignore[attr-defined]
    if score is not None:
        labels = int(score.weight.logical_shape[0])
        name = name.removesuffix("Model") + ENDING
    known = {key: one for key, one in tokens.items() if one is not None}
    found = {"architectures": [name], "dtype": None, **config.special, **known}
    mtp = {} if getattr(model, "mtp", None) is None else {"num_nextn_predict_layers": 1}
    return {**found, **written(config, labels), **mtp}


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
    found = config.to_hf() | ({} if labels is None else label_names(default_labels(labels)))
    _check(config, found)
    return found


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
