"""Finds the model family of a configuration: :func:`find_family`.

The file that is named after the architecture is searched first, so that opening a Llama imports
``llama`` and not the other families. Only if that fails is ``registry`` imported, and with it all families.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import CheckpointFormatError, UnsupportedModelError, closest
from .family import Family
from .multimodal import ARCHITECTURES as _MULTIMODAL
from .multimodal import TEXTS as _TEXTS
from .multimodal import text_settings
from .parts.config import LanguageModelConfig
from .parts.score import ENDING

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
        UnsupportedModelError: maxjax does not have the model; the message lists the families.
        CheckpointFormatError: the configuration names neither, or not as strings.
    """
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(a, str) for a in architectures)
    ):
        raise CheckpointFormatError("'architectures' is not a list of strings", path=path)
    if model_type is not None and not isinstance(model_type, str):
        raise CheckpointFormatError("'model_type' is not a string", path=path)
    # An unknown architecture with a known model type is a different model, so the type is not used.
    if architectures:
        if architectures[0] in _MULTIMODAL:
            architectures = text_of(config, path)["architectures"]
        if (own := _in_own_file(architectures[0])) is not None:
            return own
        for family in all_families():
            if architectures[0] in family.architectures and family.claims(config):
                return family
        if (own := _with_score(architectures[0], config)) is not None:
            return own
        what = f"the architecture {architectures[0]!r}"
        raise _unsupported(what, architectures[0], path, model_type)
    if model_type:
        if model_type in _TEXTS:
            model_type = text_of(config, path)["model_type"]
        for family in all_families():
            if model_type == family.model_type and family.claims(config):
                return family
        raise _unsupported(f"the model type {model_type!r}", model_type, path)
    raise CheckpointFormatError(
        "neither 'architectures' nor 'model_type' says what the model is", path=path
    )


def _with_score(architecture: str, config: Mapping[str, Any]) -> Family | None:
    """The decoder family of an architecture that is a decoder with a classification head; None if it is not."""
    base = architecture.removesuffix(ENDING) + "Model"
    for family in all_families() if architecture.endswith(ENDING) else ():
        is_decoder = issubclass(family.config, LanguageModelConfig)
        if is_decoder and base in family.architectures and family.claims(config):
            return family
    return None


def text_of(config: Mapping[str, Any], path: Any) -> Mapping[str, Any]:
    """The text model's configuration in that of a multimodal model; any other configuration unchanged."""
    try:
        return text_settings(config)
    except ValueError as error:
        raise CheckpointFormatError(str(error), path=path) from None


def all_families() -> list[Family]:
    """Imports all families and returns ``FAMILIES``. Only then are all GGUF architectures known."""
    from .registry import FAMILIES

    return FAMILIES


@cache
def _files() -> frozenset[str]:
    return frozenset(path.stem for path in Path(__file__).parent.glob("*.py"))


def _in_own_file(architecture: str) -> Family | None:
    """The family of an architecture, if the file of that name has it; ``Qwen3…`` is in ``qwen``.

    None once ``registry`` is imported, since a registered family may have replaced one of maxjax's. A
    test checks that this search finds the same families as the search through all of them.
    """
    if f"{__package__}.registry" in sys.modules:
        return None
    name = _HEAD.sub("", architecture).lower()
    for file in (name, name.rstrip("0123456789")):
        if file in _files():
            for one in vars(import_module(f"{__package__}.{file}")).values():
                # A family with ``only`` shares its architectures with another.
                if isinstance(one, Family) and architecture in one.architectures and not one.only:
                    return one
    return None


def _unsupported(
    what: str, name: str, path: Any, model_type: str | None = None
) -> UnsupportedModelError:
    """The error for a name that no family has; its message names the nearest family."""
    said = next((one for one in all_families() if one.model_type == model_type), None)
    like = _nearest(name[:200]) if said is None else ((*said.architectures, model_type)[0], said)
    near = "" if like is None else f" The nearest is {like[1].model_type!r} ({like[0]})."
    where = f"{os.fspath(path)}: " if path is not None else ""
    what = what[:200]
    known = ", ".join(dict.fromkeys(one.model_type for one in all_families()))
    return UnsupportedModelError(
        f"{where}{what} is not supported.{near} Supported are {known}; maxjax.models.families() lists "
        "their architectures. maxjax.models.register(family) adds one of your own: docs/families.md "
        "shows how"
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
    other words, then the nearest version. If no name has the same first word, the closest spelling wins.

    Example:
        >>> _nearest("Gemma3ForSequenceClassification")[0], _nearest("glm_moe_dsa")[0]
        ('Gemma3ForCausalLM', 'glm4_moe')
    """
    names = {n: one for one in all_families() for n in (*one.architectures, one.model_type)}
    wanted, kind = _words(name), _HEAD.search(name) is not None
    own = {n: _words(n) for n in names if (_HEAD.search(n) is not None) is kind}
    alike = [n for n, words in own.items() if words[:1] == wanted[:1] != []]
    if not alike:
        stems = {"".join(words): n for n, words in reversed(own.items())}
        like = closest("".join(wanted), stems)
        return None if like is None else (stems[like], names[stems[like]])

    def far(n: str) -> tuple[int, int, int, float]:
        same, others = {*own[n]} & {*wanted}, {*own[n]} - {*wanted}
        version, numbers = _version(wanted), sum(word.isdigit() for word in others)
        apart = abs(_version(own[n]) - version) if version else 0.0
        return -len(same), len(others) - numbers, numbers, apart

    like = min(alike, key=far)
    return like, names[like]


def _version(words: Sequence[str]) -> float:
    """The number in a name: 2.5 of ``qwen2_5``; 0 if it has none."""
    numbers = [word for word in words if word.isdigit()]
    return float(".".join(numbers[:2])) if numbers else 0.0
