"""The model families that maxjax can run: ``FAMILIES``, :func:`register` and :func:`families`.

There is one file per family. Importing this file imports them all, which takes about 0.2 s, so
``find`` looks for the file of a model's own family first.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import UserInputError
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
        >>> from maxjax.models import Llama, find_family
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
