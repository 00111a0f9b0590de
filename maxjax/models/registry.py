"""The model families that maxjax can run: ``FAMILIES``, :func:`register` and :func:`families`.

There is one file per family. Importing this file imports them all, which takes about 0.2 s, so
``find`` looks for the file of a model's own family first.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from ..errors import UserInputError
from .config import ModelConfig
from .family import Family
from .gguf.table import ARCHITECTURE_OF, add_table

# File and name of each family, in the order in which ``find_family`` tries them.
# fmt: off
_NAMES = (
    "llama.LLAMA", "llama.MISTRAL", "llama.QWEN2", "qwen.QWEN3", "mistral.MINISTRAL3",
    "olmo2.OLMO2", "olmo2.OLMO3", "phi3.PHI3", "smollm3.SMOLLM3", "granite.GRANITE",
    "glm4.GLM_FAMILY", "glm4.GLM4_FAMILY", "cohere.COHERE", "cohere.COHERE2", "llama.SEED_OSS",
    "exaone4.EXAONE4", "starcoder2.STARCODER2", "stablelm.STABLELM", "ernie4_5.ERNIE45",
    "hunyuan.HUNYUAN", "gpt_neox.GPT_NEOX", "falcon.FALCON", "mixtral.MIXTRAL",
    "qwen2_moe.QWEN2_MOE", "qwen3_moe.QWEN3_MOE", "gpt_oss.GPT_OSS", "deepseek.DEEPSEEK_V2",
    "deepseek.DEEPSEEK_V3", "deepseek.KIMI_K2", "qwen3_next.QWEN3_NEXT", "qwen3_5.QWEN3_5",
    "qwen3_5.QWEN3_5_MOE", "glm4_moe.GLM4_MOE", "olmoe.OLMOE", "granitemoe.GRANITEMOE",
    "llama4.LLAMA4", "minimax_m2.MINIMAX_M2", "ernie4_5_moe.ERNIE4_5_MOE", "gemma.GEMMA",
    "gemma.GEMMA2", "gemma.GEMMA3", "gemma3n.GEMMA3N", "gemma4.GEMMA4", "gpt2.GPT2_FAMILY",
    "opt.OPT_FAMILY", "phi.PHI", "apertus.APERTUS", "bert.BERT", "bert.BERT_HEAD",
    "distilbert.DISTILBERT", "hunyuan_moe.HUNYUAN_MOE", "distilbert.DISTILBERT_HEAD", "mpnet.MPNET",
    "mpnet.MPNET_HEAD", "roberta.ROBERTA", "roberta.ROBERTA_HEAD", "jina.JINA_V3_PUBLISHED",
    "roberta.XLM_ROBERTA", "roberta.XLM_ROBERTA_HEAD", "jina.JINA_V3", "jina.JINA_V3_HEAD",
    "nomic.NOMIC_BERT", "nomic.NOMIC_BERT_HEAD", "gte.GTE", "gte.GTE_HEAD", "lfm2.LFM2_FAMILY",
    "granitemoehybrid.GRANITE_HYBRID", "mamba2.MAMBA2", "falcon_h1.FALCON_H1",
    "nemotron_h.NEMOTRON_H", "gpt_neo.GPT_NEO", "gptj.GPTJ_FAMILY", "codegen.CODEGEN",
    "gpt_bigcode.GPT_BIGCODE", "olmo.OLMO", "nemotron.NEMOTRON", "nemotron.ARCEE",
    "glm4_moe_lite.GLM4_MOE_LITE", "lfm2_moe.LFM2_MOE", "phimoe.PHIMOE", "helium.HELIUM",
    "modernbert.MODERNBERT", "modernbert.MODERNBERT_HEAD", "camembert.CAMEMBERT",
    "camembert.CAMEMBERT_HEAD", "electra.ELECTRA", "electra.ELECTRA_HEAD", "albert.ALBERT",
    "albert.ALBERT_HEAD", "deberta_v2.DEBERTA_V2", "deberta_v2.DEBERTA_V2_HEAD",
)
# fmt: on


def _family(name: str) -> Family:
    file, _, constant = name.partition(".")
    return getattr(import_module(f"{__package__}.{file}"), constant)


FAMILIES: list[Family] = [_family(name) for name in _NAMES]
"""The families that maxjax can run; :func:`register` adds to them."""

for _one in FAMILIES:
    if _one.gguf is not None:
        add_table(_one.gguf, _one.model_type, _one.architectures[0])


def register(family: Family) -> Family:
    """Adds a model family of your own, so that ``build`` and ``maxjax.load`` find it.

    Args:
        family: the family to add. It replaces all families of the same model type, also maxjax's
            own.

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
    """Lists the model families that maxjax can run, including those that :func:`register` added.

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
