"""The model families that maxjax can run: ``FAMILIES``, :func:`register`, :func:`find_family`.

There is one file per family.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import CheckpointFormatError, UnsupportedModelError, UserInputError, closest
from .apertus import APERTUS
from .bert import BERT, BERT_HEAD
from .cohere import COHERE, COHERE2
from .config import ModelConfig
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from .distilbert import DISTILBERT, DISTILBERT_HEAD
from .ernie4_5 import ERNIE45
from .ernie4_5_moe import ERNIE4_5_MOE
from .exaone4 import EXAONE4
from .falcon import FALCON
from .falcon_h1 import FALCON_H1
from .family import Family
from .gemma import GEMMA, GEMMA2, GEMMA3
from .gemma3n import GEMMA3N
from .gemma4 import GEMMA4
from .gguf.table import ARCHITECTURE_OF, add_table
from .glm4 import GLM4_FAMILY, GLM_FAMILY
from .glm4_moe import GLM4_MOE
from .gpt2 import GPT2_FAMILY
from .gpt_neox import GPT_NEOX
from .gpt_oss import GPT_OSS
from .granite import GRANITE
from .granitemoe import GRANITEMOE
from .granitemoehybrid import GRANITE_HYBRID
from .gte import GTE, GTE_HEAD
from .hunyuan import HUNYUAN
from .hunyuan_moe import HUNYUAN_MOE
from .jina import JINA_V3, JINA_V3_HEAD, JINA_V3_PUBLISHED
from .lfm2 import LFM2_FAMILY
from .llama import LLAMA
from .llama4 import LLAMA4
from .mamba2 import MAMBA2
from .minimax_m2 import MINIMAX_M2
from .mistral import MINISTRAL3, MISTRAL
from .mixtral import MIXTRAL
from .modernbert import MODERNBERT, MODERNBERT_HEAD
from .mpnet import MPNET, MPNET_HEAD
from .multimodal import ARCHITECTURES as _MULTIMODAL
from .multimodal import TEXTS as _TEXTS
from .multimodal import text_settings
from .nemotron_h import NEMOTRON_H
from .nomic import NOMIC_BERT, NOMIC_BERT_HEAD
from .olmo2 import OLMO2, OLMO3
from .olmoe import OLMOE
from .opt import OPT_FAMILY
from .phi import PHI
from .phi3 import PHI3
from .qwen import QWEN2, QWEN3
from .qwen2_moe import QWEN2_MOE
from .qwen3_5 import QWEN3_5, QWEN3_5_MOE
from .qwen3_moe import QWEN3_MOE
from .qwen3_next import QWEN3_NEXT
from .roberta import ROBERTA, ROBERTA_HEAD, XLM_ROBERTA, XLM_ROBERTA_HEAD
from .seed_oss import SEED_OSS
from .smollm3 import SMOLLM3
from .stablelm import STABLELM
from .starcoder2 import STARCODER2

# fmt: off
FAMILIES: list[Family] = [
    LLAMA, MISTRAL, QWEN2, QWEN3, MINISTRAL3, OLMO2, OLMO3, PHI3, SMOLLM3, GRANITE, GLM_FAMILY,
    GLM4_FAMILY, COHERE, COHERE2, SEED_OSS, EXAONE4, STARCODER2, STABLELM, ERNIE45, HUNYUAN,
    GPT_NEOX, FALCON, MIXTRAL, QWEN2_MOE, QWEN3_MOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2, QWEN3_NEXT,
    QWEN3_5, QWEN3_5_MOE, GLM4_MOE, OLMOE, GRANITEMOE, LLAMA4, MINIMAX_M2, ERNIE4_5_MOE, GEMMA,
    GEMMA2, GEMMA3, GEMMA3N, GEMMA4, GPT2_FAMILY, OPT_FAMILY, PHI, APERTUS, BERT, BERT_HEAD, DISTILBERT, HUNYUAN_MOE,
    DISTILBERT_HEAD, MPNET, MPNET_HEAD, ROBERTA, ROBERTA_HEAD, JINA_V3_PUBLISHED, XLM_ROBERTA,
    XLM_ROBERTA_HEAD, JINA_V3, JINA_V3_HEAD, NOMIC_BERT, NOMIC_BERT_HEAD, GTE, GTE_HEAD,
    LFM2_FAMILY, GRANITE_HYBRID, MAMBA2, FALCON_H1, NEMOTRON_H, MODERNBERT,
    MODERNBERT_HEAD,
]
# fmt: on
"""The families that maxjax can run; :func:`register` adds to them."""

for _family in FAMILIES:
    if _family.gguf is not None:
        add_table(_family.gguf, _family.model_type, _family.architectures[0])


def register(family: Family) -> Family:
    """Adds a model family of your own, so that ``build`` and ``maxjax.load`` find it.

    Args:
        family: the family to add. It replaces a family of the same model type, also one of
            maxjax's own.

    Returns:
        The family.

    Raises:
        UserInputError: one of its architectures belongs to another family.

    Example:
        >>> import dataclasses
        >>> from maxjax.models import Llama
        >>> mine = dataclasses.replace(Llama.family, model_type="mine", architectures=("Mine",))
        >>> register(mine) is find_family({"architectures": ["Mine"]})
        True
        >>> FAMILIES.remove(mine)
    """
    others = [other for other in FAMILIES if other.model_type != family.model_type]
    for other in others:
        taken = set(other.architectures) & set(family.architectures)
        if taken:
            raise UserInputError(
                f"the architecture {sorted(taken)[0]!r} belongs to the family {other.model_type!r}"
            )
    FAMILIES[:] = [*others, family]
    if family.gguf is not None:
        ModelConfig.by_model_type[family.model_type] = family.config
        add_table(family.gguf, family.model_type, family.architectures[0])
    return family


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
    # An unknown architecture of a known model type is other code under an old name.
    if architectures:
        if architectures[0] in _MULTIMODAL:
            architectures = text_of(config, path)["architectures"]
        for family in FAMILIES:
            if architectures[0] in family.architectures and family.claims(config):
                return family
        what = f"the architecture {architectures[0]!r}"
        raise _unsupported(what, architectures[0], path, model_type)
    if model_type:
        if model_type in _TEXTS:
            model_type = text_of(config, path)["model_type"]
        for family in FAMILIES:
            if model_type == family.model_type and family.claims(config):
                return family
        raise _unsupported(f"the model type {model_type!r}", model_type, path)
    raise CheckpointFormatError(
        "neither 'architectures' nor 'model_type' says what the model is", path=path
    )


def text_of(config: Mapping[str, Any], path: Any) -> Mapping[str, Any]:
    """The configuration of the text model, of a multimodal one."""
    try:
        return text_settings(config)
    except ValueError as error:
        raise CheckpointFormatError(str(error), path=path) from None


class FamilyNames(NamedTuple):
    """The names of one model family.

    Attributes:
        family: name of its classes in ``maxjax.models``, without ``Config``.
        model_type, architectures: names in a ``config.json``.
        gguf: llama.cpp's name of the architecture; None if there are no GGUF files of the family.
    """

    family: str
    model_type: str
    architectures: tuple[str, ...]
    gguf: str | None


def families() -> list[FamilyNames]:
    """Lists the model families that maxjax can run, with those that :func:`register` added.

    Example:
        >>> families()[0]
        FamilyNames(family='Llama', model_type='llama',
                    architectures=('LlamaForCausalLM', 'LlamaModel'), gguf='llama')
    """
    return [
        FamilyNames(
            one.config.__name__.removesuffix("Config"), one.model_type, one.architectures,
            ARCHITECTURE_OF.get(one.model_type),
        )
        for one in FAMILIES
    ]  # fmt: skip


def _unsupported(
    what: str, name: str, path: Any, model_type: str | None = None
) -> UnsupportedModelError:
    """The error for a name that no family has, with the family that is the nearest to it."""
    said = next((one for one in FAMILIES if one.model_type == model_type), None)
    like = _nearest(name[:200]) if said is None else ((*said.architectures, model_type)[0], said)
    near = "" if like is None else f" The nearest is {like[1].model_type!r} ({like[0]})."
    where = f"{os.fspath(path)}: " if path is not None else ""
    what = "".join(c if c.isprintable() else "?" for c in what[:200])
    known = ", ".join(dict.fromkeys(one.model_type for one in FAMILIES))
    return UnsupportedModelError(
        f"{where}{what} is not supported.{near} Supported are {known}; maxjax.models.families() lists "
        "their architectures. maxjax.models.register(family) adds one of your own: docs/families.md "
        "shows how"
    )


# What architectures are called after the name of the model: the head, or a part of a model that sees.
_HEAD = re.compile(
    r"(For[A-Z]\w*|(Text|LMHead|DoubleHeads|Encoder|Decoder|Thinker|PreTrained)?Model)$"
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_PARTS = frozenset(
    "vl vision visual text omni audio image thinker talker for conditional generation".split()
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
    """The family that is the nearest to a name, and its own name of that kind.

    Families of the same first word are before others: that with the most words in common, the fewest
    others, and the nearest version. Without such a one, spelling decides.

    Example:
        >>> _nearest("Gemma3ForSequenceClassification")[0], _nearest("glm_moe_dsa")[0]
        ('Gemma3ForCausalLM', 'glm4_moe')
    """
    names = {n: one for one in FAMILIES for n in (*one.architectures, one.model_type)}
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
