"""Model families, and :func:`build`, which makes a lazy Module from a checkpoint's headers.

There is one file per family; ``FAMILIES`` below lists the families that maxjax can run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..dtype import DType
from ..errors import (
    CheckpointFormatError,
    CheckpointMissingError,
    UnsupportedModelError,
    UserInputError,
)
from ..graph.weights import GGUFWeights, WeightData, Weights
from ..graph.weights.given import data_of
from ..storage.limits import allowing
from ..storage.open import orbax_checkpoint
from .bert import BERT as _BERT
from .bert import BERT_HEAD as _BERT_HEAD
from .bert import BertConfig as BertConfig
from .bert import BertForSequenceClassification as BertForSequenceClassification
from .bert import BertModel as BertModel
from .bert import BertOutput as BertOutput
from .bounds import check_bounds
from .cohere import COHERE as _COHERE
from .cohere import COHERE2 as _COHERE2
from .cohere import Cohere as Cohere
from .cohere import Cohere2 as Cohere2
from .cohere import Cohere2Config as Cohere2Config
from .cohere import CohereConfig as CohereConfig
from .config import ModelConfig as ModelConfig
from .config import read_object
from .decoder.config import DecoderConfig as DecoderConfig
from .decoder.model import Decoder as Decoder
from .deepseek import DEEPSEEK_V2 as _DEEPSEEK_V2
from .deepseek import DEEPSEEK_V3 as _DEEPSEEK_V3
from .deepseek import KIMI_K2 as _KIMI_K2
from .deepseek import DeepseekV2 as DeepseekV2
from .deepseek import DeepseekV2Config as DeepseekV2Config
from .deepseek import DeepseekV3 as DeepseekV3
from .deepseek import DeepseekV3Config as DeepseekV3Config
from .distilbert import DISTILBERT as _DISTILBERT
from .distilbert import DISTILBERT_HEAD as _DISTILBERT_HEAD
from .distilbert import DistilBertConfig as DistilBertConfig
from .distilbert import DistilBertModel as DistilBertModel
from .encoder.config import EncoderConfig as EncoderConfig
from .encoder.model import Encoder as Encoder
from .encoder.model import EncoderOutput as EncoderOutput
from .family import Family as Family
from .family import PretrainedModel as PretrainedModel
from .family import one_head, tensors
from .gemma import GEMMA as _GEMMA
from .gemma import GEMMA2 as _GEMMA2
from .gemma import GEMMA3 as _GEMMA3
from .gemma import Gemma as Gemma
from .gemma import Gemma2 as Gemma2
from .gemma import Gemma2Config as Gemma2Config
from .gemma import Gemma3 as Gemma3
from .gemma import Gemma3Config as Gemma3Config
from .gemma import GemmaConfig as GemmaConfig
from .gemma3n import GEMMA3N as _GEMMA3N
from .gemma3n import Gemma3n as Gemma3n
from .gemma3n import Gemma3nConfig as Gemma3nConfig
from .gemma4 import GEMMA4 as _GEMMA4
from .gemma4 import Gemma4 as Gemma4
from .gemma4 import Gemma4Config as Gemma4Config
from .gguf import config_of
from .gguf.table import add_table
from .glm4 import GLM as GLM
from .glm4 import GLM4 as GLM4
from .glm4 import GLM4_FAMILY as _GLM4
from .glm4 import GLM_FAMILY as _GLM
from .glm4 import GLM4Config as GLM4Config
from .glm4 import GLMConfig as GLMConfig
from .gpt2 import GPT2 as GPT2
from .gpt2 import GPT2_FAMILY as _GPT2
from .gpt2 import GPT2Config as GPT2Config
from .gpt_oss import GPT_OSS as _GPT_OSS
from .gpt_oss import GptOss as GptOss
from .gpt_oss import GptOssConfig as GptOssConfig
from .granite import GRANITE as _GRANITE
from .granite import Granite as Granite
from .granite import GraniteConfig as GraniteConfig
from .gte import GTE as _GTE
from .gte import GTE_HEAD as _GTE_HEAD
from .gte import GteConfig as GteConfig
from .gte import GteModel as GteModel
from .jina import JINA_V3 as _JINA_V3
from .jina import JINA_V3_HEAD as _JINA_V3_HEAD
from .jina import JINA_V3_PUBLISHED as _JINA_V3_PUBLISHED
from .jina import JinaV3Config as JinaV3Config
from .jina import JinaV3Model as JinaV3Model
from .llama import LLAMA as _LLAMA
from .llama import Llama as Llama
from .llama import LlamaConfig as LlamaConfig
from .mistral import MINISTRAL3 as _MINISTRAL3
from .mistral import MISTRAL as _MISTRAL
from .mistral import Ministral3 as Ministral3
from .mistral import Ministral3Config as Ministral3Config
from .mistral import Mistral as Mistral
from .mistral import MistralConfig as MistralConfig
from .mixtral import MIXTRAL as _MIXTRAL
from .mixtral import Mixtral as Mixtral
from .mixtral import MixtralConfig as MixtralConfig
from .modernbert import MODERNBERT as _MODERNBERT
from .modernbert import MODERNBERT_HEAD as _MODERNBERT_HEAD
from .modernbert import ModernBertConfig as ModernBertConfig
from .modernbert import ModernBertModel as ModernBertModel
from .mpnet import MPNET as _MPNET
from .mpnet import MPNET_HEAD as _MPNET_HEAD
from .mpnet import MPNetConfig as MPNetConfig
from .mpnet import MPNetModel as MPNetModel
from .multimodal import ARCHITECTURES as _MULTIMODAL
from .multimodal import TEXTS as _TEXTS
from .multimodal import text_settings
from .nomic import NOMIC_BERT as _NOMIC_BERT
from .nomic import NOMIC_BERT_HEAD as _NOMIC_BERT_HEAD
from .nomic import NomicBertConfig as NomicBertConfig
from .nomic import NomicBertModel as NomicBertModel
from .olmo2 import OLMO2 as _OLMO2
from .olmo2 import OLMO3 as _OLMO3
from .olmo2 import Olmo2 as Olmo2
from .olmo2 import Olmo2Config as Olmo2Config
from .olmo2 import Olmo3 as Olmo3
from .olmo2 import Olmo3Config as Olmo3Config
from .phi3 import PHI3 as _PHI3
from .phi3 import Phi3 as Phi3
from .phi3 import Phi3Config as Phi3Config
from .quantized import KEY as _QUANTIZATION
from .quantized import Quantization, unquantised
from .qwen import QWEN2 as _QWEN2
from .qwen import QWEN3 as _QWEN3
from .qwen import Qwen2 as Qwen2
from .qwen import Qwen2Config as Qwen2Config
from .qwen import Qwen3 as Qwen3
from .qwen import Qwen3Config as Qwen3Config
from .qwen2_moe import QWEN2_MOE as _QWEN2_MOE
from .qwen2_moe import Qwen2MoE as Qwen2MoE
from .qwen2_moe import Qwen2MoEConfig as Qwen2MoEConfig
from .qwen3_5 import QWEN3_5 as _QWEN3_5
from .qwen3_5 import QWEN3_5_MOE as _QWEN3_5_MOE
from .qwen3_5 import Qwen35 as Qwen35
from .qwen3_5 import Qwen35Config as Qwen35Config
from .qwen3_5 import Qwen35MoE as Qwen35MoE
from .qwen3_5 import Qwen35MoEConfig as Qwen35MoEConfig
from .qwen3_moe import QWEN3_MOE as _QWEN3_MOE
from .qwen3_moe import Qwen3MoE as Qwen3MoE
from .qwen3_moe import Qwen3MoEConfig as Qwen3MoEConfig
from .qwen3_next import QWEN3_NEXT as _QWEN3_NEXT
from .qwen3_next import Qwen3Next as Qwen3Next
from .qwen3_next import Qwen3NextConfig as Qwen3NextConfig
from .roberta import ROBERTA as _ROBERTA
from .roberta import ROBERTA_HEAD as _ROBERTA_HEAD
from .roberta import XLM_ROBERTA as _XLM_ROBERTA
from .roberta import XLM_ROBERTA_HEAD as _XLM_ROBERTA_HEAD
from .roberta import RobertaConfig as RobertaConfig
from .roberta import RobertaModel as RobertaModel
from .roberta import XLMRobertaConfig as XLMRobertaConfig
from .roberta import XLMRobertaModel as XLMRobertaModel
from .smollm3 import SMOLLM3 as _SMOLLM3
from .smollm3 import SmolLM3 as SmolLM3
from .smollm3 import SmolLM3Config as SmolLM3Config
from .ties import is_tied, with_tie
from .weights import main_dtype

FAMILIES: list[Family] = [
    *(_LLAMA, _MISTRAL, _QWEN2, _QWEN3),
    *(_MINISTRAL3, _OLMO2, _OLMO3, _PHI3, _SMOLLM3, _GRANITE),
    *(_GLM, _GLM4, _COHERE, _COHERE2),
    *(_MIXTRAL, _QWEN2_MOE, _QWEN3_MOE, _GPT_OSS),
    *(_DEEPSEEK_V2, _DEEPSEEK_V3, _KIMI_K2),
    *(_QWEN3_NEXT, _QWEN3_5, _QWEN3_5_MOE),
    *(_GEMMA, _GEMMA2, _GEMMA3, _GEMMA3N, _GEMMA4),
    _GPT2,
    *(_BERT, _BERT_HEAD, _DISTILBERT, _DISTILBERT_HEAD, _MPNET, _MPNET_HEAD),
    *(_ROBERTA, _ROBERTA_HEAD, _JINA_V3_PUBLISHED, _XLM_ROBERTA, _XLM_ROBERTA_HEAD),
    *(_JINA_V3, _JINA_V3_HEAD, _NOMIC_BERT, _NOMIC_BERT_HEAD, _GTE, _GTE_HEAD),
    *(_MODERNBERT, _MODERNBERT_HEAD),
]
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
        add_table(family.gguf, family.model_type, family.architectures[0])
    return family


def find_family(config: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None) -> Family:
    """The family of a configuration, by its first architecture, or by its model type without one.

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
            architectures = _text(config, path)["architectures"]
        for family in FAMILIES:
            if architectures[0] in family.architectures and family.claims(config):
                return family
        raise _unsupported(f"the architecture {architectures[0]!r}", path)
    if model_type:
        if model_type in _TEXTS:
            model_type = _text(config, path)["model_type"]
        for family in FAMILIES:
            if model_type == family.model_type and family.claims(config):
                return family
        raise _unsupported(f"the model type {model_type!r}", path)
    raise CheckpointFormatError(
        "neither 'architectures' nor 'model_type' says what the model is", path=path
    )


def _text(config: Mapping[str, Any], path: Any) -> Mapping[str, Any]:
    """The configuration of the text model, of a multimodal one."""
    try:
        return text_settings(config)
    except ValueError as error:
        raise CheckpointFormatError(str(error), path=path) from None


def _unsupported(what: str, path: Any) -> UnsupportedModelError:
    known = "; ".join(f"{f.model_type}: {', '.join(f.architectures)}" for f in FAMILIES)
    where = f"{os.fspath(path)}: " if path is not None else ""
    what = "".join(c if c.isprintable() else "?" for c in what[:200])
    return UnsupportedModelError(
        f"{where}{what} is not supported. Supported are {known}. "
        "maxjax.models.register(family) adds one of your own"
    )


def build(
    weights: Weights | Mapping[str, Any],
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    dtype: Any = None,
    *,
    reduce_dtype: Any = DType.float32,
    stacked: bool = True,
    tie: bool | None = None,
) -> PretrainedModel:
    """A lazy Module for a checkpoint: names, shapes and dtypes without memory for values.

    ``model.load_state_dict(weights)`` then fills it. Values are read in one case only: if the
    configuration ties the head to the embedding table and the file holds both, with the same dtype
    and shape. Then they are compared, up to the first value that differs.

    Args:
        weights: checkpoint, of which only headers are read; or arrays by a checkpoint's names, with a ``config``.
        config: content of ``config.json``, or the path of one; by default the one
            beside the weights, or the metadata of a GGUF file.
        dtype: dtype of all weights; None keeps each tensor's own from the checkpoint, also
            quantised ones in layers that compute with them. Loading another dtype than the
            file's needs ``load_state_dict(..., cast=True)``.
        reduce_dtype: dtype in which norms, softmax and pooling are computed; decoders always use
            float32.
        stacked: whether the layers of a decoder are a LayerStack, compiled once, or each has
            its own weights.
        tie: whether the head is the embedding table. None follows the configuration unless the
            file holds a different head: then the head gets a weight of its own, and a warning is
            logged.

    Raises:
        UnsupportedModelError: the configuration names a model that maxjax does not have.
        CheckpointError: the configuration is missing or broken.
    """
    given = not isinstance(weights, Weights)
    with allowing(None if given else weights._family.limits):
        raw, path = _config(weights, config)
    family = find_family(raw, path=path)
    raw = _text(raw, path)
    named = {n: data_of(n, v) for n, v in weights.items()} if given else tensors(weights)
    found = family.adapt(named)
    shapes = {name: tuple(map(int, data.logical_shape)) for name, data in found.items()}
    check_bounds(family.config, raw, shapes, path=path)
    quantization = Quantization.of(raw, path=path)
    plain = raw
    if quantization is not None and not isinstance(weights, GGUFWeights):
        plain = {key: value for key, value in raw.items() if key != _QUANTIZATION}
    settings = family.config.from_dict(plain, path=path)
    tie_setting, headless = getattr(settings, "tie_word_embeddings", None), False
    if tie_setting is not None:
        tied = is_tied(family, found, tie_setting, tie=tie, path=None if given else weights._path)
        if tied is not tie_setting:
            settings, raw = replace(settings, tie_word_embeddings=tied), with_tie(raw, tied)  # type: ignore[call-arg]
        found = one_head(found, family.tied) if tied else found
        headless = not tied and family.tied[0] not in found and family.is_bare(named)
    main = _main(found) if dtype is None else DType.of(dtype)
    if dtype is None and quantization is not None:
        main = main_dtype(unquantised(found)) or DType.float32
    model = family.make(settings, found.keys(), main, DType.of(reduce_dtype))
    packed: set[str] = set()
    if quantization is not None:
        if isinstance(model, Decoder):
            model.unstack()  # a family of the user's may have stacked its layers
        packed = quantization.apply(model, found, main)
    if isinstance(model, Decoder) and headless:
        model.lm_head = None
    model.hf_config = raw
    if dtype is None:
        model._take_dtypes({name: data for name, data in found.items() if name not in packed})
    if stacked and isinstance(model, Decoder):
        model.stack()
    return model


def _main(found: Mapping[str, WeightData]) -> DType:
    """The dtype of activations: the dtype of most values, or float32 if any are quantised."""
    if any(data.is_packed for data in found.values()):
        return DType.float32  # the few float tensors of such a file do not tell the others' range
    return main_dtype(found) or DType.float32


def _config(
    weights: Weights | Mapping[str, Any], config: Any
) -> tuple[Mapping[str, Any], Path | None]:
    if isinstance(config, Mapping):
        return config, None
    if config is not None:
        path = Path(os.fsdecode(config))
        return read_object(path), path
    if isinstance(weights, GGUFWeights):
        return config_of(weights), Path(weights._path)
    if not isinstance(weights, Weights):
        raise UserInputError("arrays by name do not say what model they are of: pass its config")
    with weights._beside.files("config.json") as folder:
        path = config_beside(folder)
        return read_object(path), path


def config_beside(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint's ``config.json``: in its directory, for Orbax in its step's directory.

    Raises:
        CheckpointMissingError: there is no such file.
    """
    path = Path(os.fsdecode(path))
    directory = Path(orbax_checkpoint(path) or path) if path.is_dir() else path.parent
    config = directory / "config.json"
    if not config.exists():
        if (directory / "adapter_config.json").exists():
            raise CheckpointMissingError(
                "there is no config.json: this is a LoRA adapter", path=directory,
                hint="Load its base model, and then maxjax.lora.load(model, path).",
            )  # fmt: skip
        raise CheckpointMissingError(
            "there is no config.json, which says what model this is", path=directory,
            hint="Put it there, or in Python pass its content or its path as config=.",
        )  # fmt: skip
    return config
