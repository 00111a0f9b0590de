"""Finds the model family of a configuration in the registry: :func:`find_family`."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointFormatError, UnsupportedModelError
from .family import Family
from .multimodal import text_settings
from .parts.config import LanguageModelConfig
from .parts.score import ENDING
from .registry import all_families, of_architecture, of_model_type

# The end of an architecture's name, after the model's: its head, or a part of a multimodal model.
_HEAD = re.compile(
    r"(For[A-Z]\w*|(Text|LMHead|DoubleHeads|Encoder|Decoder|Thinker|PreTrained)?Model)$"
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_PARTS = frozenset(
    "vl vision visual text omni audio image thinker talker for conditional generation".split()
)


def find_family(config: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None) -> Family:
    """Finds the family of a configuration, by its first architecture, or else by its model type.

    Raises:
        UnsupportedModelError: maxjax does not have the model; the message names the nearest one, if one is near.
        CheckpointFormatError: the configuration names neither, or not as strings.
    """
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(a, str) for a in architectures)
    ):
        raise CheckpointFormatError("'architectures' is not a list of strings", path=path)
    if model_type is not None and not isinstance(model_type, str):
        raise CheckpointFormatError("'model_type' is not a string", path=path)
    config = text_of(config, path)
    architectures, model_type = config.get("architectures"), config.get("model_type")
    # An unknown architecture with a known model type is a different model, so the type is not used.
    if architectures:
        for family in of_architecture(architectures[0]):
            if family.claims(config):
                return family
        if (family := _with_score(architectures[0], config)) is not None:
            return family
        what = f"the architecture {architectures[0]!r}"
        raise _unsupported(what, architectures[0], path, model_type)
    if model_type:
        for family in of_model_type(model_type):
            if family.claims(config):
                return family
        raise _unsupported(f"the model type {model_type!r}", model_type, path)
    raise CheckpointFormatError(
        "neither 'architectures' nor 'model_type' says what the model is", path=path
    )


def _with_score(architecture: str, config: Mapping[str, Any]) -> Family | None:
    """The decoder family of an architecture that is a decoder with a classification head; None if it is not."""
    base = architecture.removesuffix(ENDING) + "Model"
    for family in of_architecture(base) if architecture.endswith(ENDING) else ():
        if issubclass(family.config, LanguageModelConfig) and family.claims(config):
            return family
    return None


def text_of(config: Mapping[str, Any], path: Any) -> Mapping[str, Any]:
    """The text model's configuration in that of a multimodal model; any other configuration unchanged."""
    try:
        return text_settings(config)
    except ValueError as error:
        raise CheckpointFormatError(str(error), path=path) from None
    except UnsupportedModelError as error:
        where = f"{os.fspath(path)}: " if path is not None else ""
        raise UnsupportedModelError(f"{where}{error}") from None


def _unsupported(
    what: str, name: str, path: Any, model_type: str | None = None
) -> UnsupportedModelError:
    """The error for a name that no family has; its message names the nearest family."""
    said = next((one for one in all_families() if one.model_type == model_type), None)
    like = _nearest(name[:200]) if said is None else ((*said.architectures, model_type)[0], said)
    near = "" if like is None else f" The nearest is {like[1].model_type!r} ({like[0]})."
    where = f"{os.fspath(path)}: " if path is not None else ""
    return UnsupportedModelError(
        f"{where}{what[:100]} is not supported.{near} maxjax.models.families() lists the supported ones; "
        "docs/families.md shows how to add one with maxjax.models.register"
    )


def _words(name: str) -> list[str]:
    """The words and numbers of an architecture or a model type, without the head.

    Example:
        >>> _words("Qwen3VLMoeForConditionalGeneration"), _words("qwen3_vl_moe")
        (['qwen', '3', 'moe'], ['qwen', '3', 'moe'])
    """
    words = [word.lower() for word in _WORD.findall(_HEAD.sub("", name))]
    return [word for word in words if word not in _PARTS]


def _nearest(name: str) -> tuple[str, Family] | None:
    """The nearest name to an architecture or model type, and the family that has it; None if none is near.

    Among names with the same first word it is the one with the most words in common, then the fewest
    other words, then the nearest version. If no name has the same first word, the closest spelling wins
    among names with the same first letter.

    Example:
        >>> _nearest("Gemma3ForSequenceClassification")[0], _nearest("glm_moe_dsa")[0]
        ('Gemma3ForCausalLM', 'glm4_moe')
        >>> _nearest("PixtralForConditionalGeneration") is None  # a Mixtral is something else
        True
    """
    names = {n: one for one in all_families() for n in (*one.architectures, one.model_type)}
    wanted, kind = _words(name), _HEAD.search(name) is not None
    words_of = {n: _words(n) for n in names if (_HEAD.search(n) is not None) is kind}
    alike = [n for n, words in words_of.items() if words[:1] == wanted[:1] != []]
    if not alike:
        stems = {"".join(words): n for n, words in reversed(words_of.items())}
        stems = {stem: n for stem, n in stems.items() if stem[:1] == "".join(wanted)[:1]}
        like = difflib.get_close_matches("".join(wanted), stems, n=1, cutoff=0.75)
        return (stems[like[0]], names[stems[like[0]]]) if like else None

    def far(n: str) -> tuple[int, int, int, float]:
        same, others = {*words_of[n]} & {*wanted}, {*words_of[n]} - {*wanted}
        version, numbers = _version(wanted), sum(word.isdigit() for word in others)
        distance = abs(_version(words_of[n]) - version) if version else 0.0
        return -len(same), len(others) - numbers, numbers, distance

    like = min(alike, key=far)
    return like, names[like]


def _version(words: Sequence[str]) -> float:
    """The number in a name: 2.5 of ``qwen2_5``; 0 if it has none."""
    numbers = [word for word in words if word.isdigit()]
    return float(".".join(numbers[:2])) if numbers else 0.0
