"""The registry of model families: where each is, and by which names files call it.

``ENTRIES`` is the only list of them. It names files, which are imported when a model of theirs is wanted:
opening a Llama imports ``llama`` and no other family. :func:`register` adds a model of your own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from ..errors import UserInputError
from ..lazy import without_collector

M = TypeVar("M")
# ``family.Family``: that file imports this one, by way of the tables of GGUF files.
Family = Any


class Entry(NamedTuple):
    """The names of one model family in files.

    Attributes:
        model_type: ``model_type`` in ``config.json``.
        architectures: names in ``architectures`` of ``config.json``, separated by spaces.
        gguf: llama.cpp's names of the architecture, separated by spaces: models are written as the first.
        family: the family, if :func:`register` added it; None: it is in its file.
        number: of the families that :func:`register` added, how many were before it, itself included.
    """

    model_type: str
    architectures: str
    gguf: str = ""
    family: Family = None
    number: int = 0


ENTRIES: dict[str, Entry] = {
    "llama.Llama": Entry("llama", "LlamaForCausalLM LlamaModel", "llama"),
    "llama.Mistral": Entry("mistral", "MistralForCausalLM MistralModel", "llama"),
    "llama.Qwen2": Entry("qwen2", "Qwen2ForCausalLM Qwen2Model", "qwen2 qwen2vl"),
    "qwen3.Qwen3": Entry("qwen3", "Qwen3ForCausalLM Qwen3Model", "qwen3 qwen3vl"),
    "ministral3.Ministral3": Entry(
        "ministral3", "Ministral3ForCausalLM Ministral3Model", "mistral3"
    ),
    "olmo2.Olmo2": Entry("olmo2", "Olmo2ForCausalLM Olmo2Model", "olmo2"),
    "olmo2.Olmo3": Entry("olmo3", "Olmo3ForCausalLM Olmo3Model", "olmo2"),
    "phi3.Phi3": Entry("phi3", "Phi3ForCausalLM Phi3Model", "phi3"),
    "smollm3.SmolLM3": Entry("smollm3", "SmolLM3ForCausalLM SmolLM3Model", "smollm3"),
    "bitnet.BitNet": Entry("bitnet", "BitNetForCausalLM BitNetModel"),
    "granite.Granite": Entry("granite", "GraniteForCausalLM GraniteModel", "granite"),
    "glm4.GLM": Entry("glm", "GlmForCausalLM GlmModel", "chatglm"),
    "glm4.GLM4": Entry("glm4", "Glm4ForCausalLM Glm4Model", "glm4"),
    "cohere.Cohere": Entry("cohere", "CohereForCausalLM CohereModel", "command-r"),
    "cohere.Cohere2": Entry("cohere2", "Cohere2ForCausalLM Cohere2Model", "cohere2"),
    "cohere2_moe.Cohere2MoE": Entry("cohere2_moe", "Cohere2MoeForCausalLM Cohere2MoeModel"),
    "llama.SeedOSS": Entry("seed_oss", "SeedOssForCausalLM SeedOssModel", "seed_oss"),
    "exaone4.Exaone4": Entry("exaone4", "Exaone4ForCausalLM Exaone4Model", "exaone4"),
    "starcoder2.Starcoder2": Entry(
        "starcoder2", "Starcoder2ForCausalLM Starcoder2Model", "starcoder2"
    ),
    "stablelm.StableLM": Entry("stablelm", "StableLmForCausalLM StableLmModel", "stablelm"),
    "ernie4_5.Ernie45": Entry("ernie4_5", "Ernie4_5ForCausalLM Ernie4_5Model", "ernie4_5"),
    "hunyuan.Hunyuan": Entry(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM HunYuanDenseV1Model",
        "hunyuan-dense",
    ),
    "gpt_neox.GPTNeoX": Entry("gpt_neox", "GPTNeoXForCausalLM GPTNeoXModel", "gptneox"),
    "falcon.Falcon": Entry("falcon", "FalconForCausalLM FalconModel", "falcon"),
    "mixtral.Mixtral": Entry("mixtral", "MixtralForCausalLM MixtralModel", "llama"),
    "qwen2_moe.Qwen2MoE": Entry("qwen2_moe", "Qwen2MoeForCausalLM Qwen2MoeModel", "qwen2moe"),
    "qwen3.Qwen3MoE": Entry(
        "qwen3_moe", "Qwen3MoeForCausalLM Qwen3MoeModel", "qwen3moe qwen3vlmoe"
    ),
    "gpt_oss.GptOss": Entry("gpt_oss", "GptOssForCausalLM GptOssModel", "gpt-oss"),
    "deepseek.DeepseekV2": Entry(
        "deepseek_v2", "DeepseekV2ForCausalLM DeepseekV2Model", "deepseek2"
    ),
    "deepseek.DeepseekV3": Entry(
        "deepseek_v3", "DeepseekV3ForCausalLM DeepseekV3Model", "deepseek2"
    ),
    "deepseek.DeepseekV32": Entry("deepseek_v32", "DeepseekV32ForCausalLM DeepseekV32Model"),
    "deepseek.KIMI_K2": Entry("kimi_k2", "", "deepseek2"),
    "qwen3_next.Qwen3Next": Entry("qwen3_next", "Qwen3NextForCausalLM Qwen3NextModel", "qwen3next"),
    "qwen3_next.Qwen35": Entry("qwen3_5_text", "Qwen3_5ForCausalLM Qwen3_5TextModel", "qwen35"),
    "qwen3_next.Qwen35MoE": Entry(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM Qwen3_5MoeTextModel",
        "qwen35moe",
    ),
    "glm4_moe.GLM4MoE": Entry("glm4_moe", "Glm4MoeForCausalLM Glm4MoeModel", "glm4moe"),
    "olmoe.OLMoE": Entry("olmoe", "OlmoeForCausalLM OlmoeModel", "olmoe"),
    "granitemoe.GraniteMoE": Entry(
        "granitemoe", "GraniteMoeForCausalLM GraniteMoeModel", "granitemoe"
    ),
    "llama4.Llama4": Entry("llama4_text", "Llama4ForCausalLM Llama4TextModel", "llama4"),
    "minimax_m2.MiniMaxM2": Entry(
        "minimax_m2", "MiniMaxM2ForCausalLM MiniMaxM2Model", "minimax-m2"
    ),
    "ernie4_5_moe.Ernie45MoE": Entry(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM Ernie4_5_MoeModel",
        "ernie4_5-moe",
    ),
    "gemma.Gemma": Entry("gemma", "GemmaForCausalLM GemmaModel", "gemma"),
    "gemma.Gemma2": Entry("gemma2", "Gemma2ForCausalLM Gemma2Model", "gemma2"),
    "gemma.Gemma3": Entry(
        "gemma3_text", "Gemma3ForCausalLM Gemma3TextModel", "gemma3 gemma-embedding"
    ),
    "gemma3n.Gemma3n": Entry("gemma3n_text", "Gemma3nForCausalLM Gemma3nTextModel", "gemma3n"),
    "gemma4.Gemma4": Entry("gemma4_text", "Gemma4ForCausalLM Gemma4TextModel", "gemma4"),
    "gpt2.GPT2": Entry("gpt2", "GPT2LMHeadModel GPT2Model", "gpt2"),
    "opt.OPT": Entry("opt", "OPTForCausalLM OPTModel"),
    "phi.Phi": Entry("phi", "PhiForCausalLM PhiModel", "phi2"),
    "apertus.Apertus": Entry("apertus", "ApertusForCausalLM ApertusModel", "apertus"),
    "bert.BertModel": Entry(
        "bert", "BertModel BertForNextSentencePrediction BertForMultipleChoice", "bert"
    ),
    "bert.BertForMaskedLM": Entry("bert", "BertForMaskedLM BertForPreTraining"),
    "bert.BertForTokenClassification": Entry("bert", "BertForTokenClassification"),
    "bert.BertForQuestionAnswering": Entry("bert", "BertForQuestionAnswering"),
    "bert.BertForSequenceClassification": Entry("bert", "BertForSequenceClassification"),
    "distilbert.DistilBertModel": Entry(
        "distilbert", "DistilBertModel DistilBertForMultipleChoice"
    ),
    "hunyuan.HunyuanMoE": Entry(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM HunYuanMoEV1Model",
        "hunyuan-moe",
    ),
    "distilbert.DistilBertForMaskedLM": Entry("distilbert", "DistilBertForMaskedLM"),
    "distilbert.DistilBertForTokenClassification": Entry(
        "distilbert", "DistilBertForTokenClassification"
    ),
    "distilbert.DistilBertForQuestionAnswering": Entry(
        "distilbert", "DistilBertForQuestionAnswering"
    ),
    "distilbert.DistilBertForSequenceClassification": Entry(
        "distilbert", "DistilBertForSequenceClassification"
    ),
    "mpnet.MPNetModel": Entry("mpnet", "MPNetModel MPNetForMultipleChoice"),
    "mpnet.MPNetForMaskedLM": Entry("mpnet", "MPNetForMaskedLM"),
    "mpnet.MPNetForTokenClassification": Entry("mpnet", "MPNetForTokenClassification"),
    "mpnet.MPNetForQuestionAnswering": Entry("mpnet", "MPNetForQuestionAnswering"),
    "mpnet.MPNetForSequenceClassification": Entry("mpnet", "MPNetForSequenceClassification"),
    "bert.RobertaModel": Entry("roberta", "RobertaModel RobertaForMultipleChoice"),
    "bert.RobertaForMaskedLM": Entry("roberta", "RobertaForMaskedLM"),
    "bert.RobertaForTokenClassification": Entry("roberta", "RobertaForTokenClassification"),
    "bert.RobertaForQuestionAnswering": Entry("roberta", "RobertaForQuestionAnswering"),
    "bert.RobertaForSequenceClassification": Entry("roberta", "RobertaForSequenceClassification"),
    "jina.JINA_V3_PUBLISHED": Entry("xlm-roberta", "XLMRobertaModel"),
    "bert.XLMRobertaModel": Entry("xlm-roberta", "XLMRobertaModel XLMRobertaForMultipleChoice"),
    "bert.XLMRobertaForMaskedLM": Entry("xlm-roberta", "XLMRobertaForMaskedLM"),
    "bert.XLMRobertaForTokenClassification": Entry(
        "xlm-roberta", "XLMRobertaForTokenClassification"
    ),
    "bert.XLMRobertaForQuestionAnswering": Entry("xlm-roberta", "XLMRobertaForQuestionAnswering"),
    "bert.XLMRobertaForSequenceClassification": Entry(
        "xlm-roberta", "XLMRobertaForSequenceClassification"
    ),
    "jina.JinaV3Model": Entry("jina_embeddings_v3", "JinaEmbeddingsV3Model", "jina-bert-v3"),
    "jina.JinaV3ForMaskedLM": Entry("jina_embeddings_v3", "JinaEmbeddingsV3ForMaskedLM"),
    "jina.JinaV3ForTokenClassification": Entry(
        "jina_embeddings_v3", "JinaEmbeddingsV3ForTokenClassification"
    ),
    "jina.JinaV3ForQuestionAnswering": Entry(
        "jina_embeddings_v3", "JinaEmbeddingsV3ForQuestionAnswering"
    ),
    "jina.JinaV3ForSequenceClassification": Entry(
        "jina_embeddings_v3", "JinaEmbeddingsV3ForSequenceClassification"
    ),
    "nomic.NomicBertModel": Entry("nomic_bert", "NomicBertModel", "nomic-bert"),
    "nomic.NomicBertForMaskedLM": Entry(
        "nomic_bert", "NomicBertForMaskedLM NomicBertForPreTraining"
    ),
    "nomic.NomicBertForTokenClassification": Entry("nomic_bert", "NomicBertForTokenClassification"),
    "nomic.NomicBertForSequenceClassification": Entry(
        "nomic_bert", "NomicBertForSequenceClassification"
    ),
    "gte.GteModel": Entry("gte", "GteModel NewModel"),
    "gte.GteForMaskedLM": Entry("gte", "GteForMaskedLM NewForMaskedLM"),
    "gte.GteForTokenClassification": Entry(
        "gte", "GteForTokenClassification NewForTokenClassification"
    ),
    "gte.GteForSequenceClassification": Entry(
        "gte", "GteForSequenceClassification NewForSequenceClassification"
    ),
    "lfm2.LFM2": Entry("lfm2", "Lfm2ForCausalLM Lfm2Model", "lfm2"),
    "granitemoehybrid.GraniteHybrid": Entry(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM GraniteMoeHybridModel",
        "granitehybrid",
    ),
    "mamba.Mamba": Entry("mamba", "MambaForCausalLM MambaModel", "mamba"),
    "mamba.FalconMamba": Entry("falcon_mamba", "FalconMambaForCausalLM FalconMambaModel", "mamba"),
    "mamba2.Mamba2": Entry("mamba2", "Mamba2ForCausalLM Mamba2Model", "mamba2"),
    "kimi_linear.KimiLinear": Entry(
        "kimi_linear", "KimiLinearForCausalLM KimiLinearModel", "kimi-linear"
    ),
    "jamba.Jamba": Entry("jamba", "JambaForCausalLM JambaModel", "jamba"),
    "falcon_h1.FalconH1": Entry("falcon_h1", "FalconH1ForCausalLM FalconH1Model", "falcon-h1"),
    "nemotron_h.NemotronH": Entry(
        "nemotron_h", "NemotronHForCausalLM NemotronHModel", "nemotron_h nemotron_h_moe"
    ),
    "gpt_neo.GPTNeo": Entry("gpt_neo", "GPTNeoForCausalLM GPTNeoModel"),
    "gptj.GPTJ": Entry("gptj", "GPTJForCausalLM GPTJModel", "gptj"),
    "gptj.CodeGen": Entry("codegen", "CodeGenForCausalLM CodeGenModel"),
    "gpt_bigcode.GPTBigCode": Entry(
        "gpt_bigcode", "GPTBigCodeForCausalLM GPTBigCodeModel", "starcoder"
    ),
    "bloom.Bloom": Entry("bloom", "BloomForCausalLM BloomModel", "bloom"),
    "mpt.MPT": Entry("mpt", "MptForCausalLM MPTForCausalLM MptModel", "mpt"),
    "olmo.Olmo": Entry("olmo", "OlmoForCausalLM OlmoModel", "olmo"),
    "nemotron.Nemotron": Entry("nemotron", "NemotronForCausalLM NemotronModel", "nemotron"),
    "nemotron.Arcee": Entry("arcee", "ArceeForCausalLM ArceeModel", "arcee"),
    "deepseek.GLM4MoELite": Entry(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM Glm4MoeLiteModel",
        "deepseek2",
    ),
    "lfm2.LFM2MoE": Entry("lfm2_moe", "Lfm2MoeForCausalLM Lfm2MoeModel", "lfm2moe"),
    "phimoe.PhiMoE": Entry("phimoe", "PhimoeForCausalLM PhiMoEForCausalLM PhimoeModel", "phimoe"),
    "helium.Helium": Entry("helium", "HeliumForCausalLM HeliumModel"),
    "modernbert.ModernBertModel": Entry(
        "modernbert", "ModernBertModel ModernBertForMultipleChoice", "modern-bert"
    ),
    "modernbert.ModernBertForMaskedLM": Entry("modernbert", "ModernBertForMaskedLM"),
    "modernbert.ModernBertForTokenClassification": Entry(
        "modernbert", "ModernBertForTokenClassification"
    ),
    "modernbert.ModernBertForQuestionAnswering": Entry(
        "modernbert", "ModernBertForQuestionAnswering"
    ),
    "modernbert.ModernBertForSequenceClassification": Entry(
        "modernbert", "ModernBertForSequenceClassification"
    ),
    "modernbert_decoder.ModernBertDecoder": Entry(
        "modernbert-decoder", "ModernBertDecoderForCausalLM"
    ),
    "bert.CamembertModel": Entry("camembert", "CamembertModel CamembertForMultipleChoice"),
    "bert.CamembertForMaskedLM": Entry("camembert", "CamembertForMaskedLM"),
    "bert.CamembertForTokenClassification": Entry("camembert", "CamembertForTokenClassification"),
    "bert.CamembertForQuestionAnswering": Entry("camembert", "CamembertForQuestionAnswering"),
    "bert.CamembertForSequenceClassification": Entry(
        "camembert", "CamembertForSequenceClassification"
    ),
    "bert.ElectraModel": Entry("electra", "ElectraModel ElectraForMultipleChoice"),
    "bert.ElectraForMaskedLM": Entry("electra", "ElectraForMaskedLM"),
    "bert.ElectraForPreTraining": Entry("electra", "ElectraForPreTraining"),
    "bert.ElectraForTokenClassification": Entry("electra", "ElectraForTokenClassification"),
    "bert.ElectraForQuestionAnswering": Entry("electra", "ElectraForQuestionAnswering"),
    "bert.ElectraForSequenceClassification": Entry("electra", "ElectraForSequenceClassification"),
    "albert.AlbertModel": Entry("albert", "AlbertModel AlbertForMultipleChoice"),
    "albert.AlbertForMaskedLM": Entry("albert", "AlbertForMaskedLM AlbertForPreTraining"),
    "albert.AlbertForTokenClassification": Entry("albert", "AlbertForTokenClassification"),
    "albert.AlbertForQuestionAnswering": Entry("albert", "AlbertForQuestionAnswering"),
    "albert.AlbertForSequenceClassification": Entry("albert", "AlbertForSequenceClassification"),
    "deberta_v2.DebertaV2Model": Entry("deberta-v2", "DebertaV2Model DebertaV2ForMultipleChoice"),
    "deberta_v2.DebertaV3ForMaskedLM": Entry("deberta-v2", "DebertaV2ForMaskedLM"),
    "deberta_v2.DebertaV2ForMaskedLM": Entry("deberta-v2", "DebertaV2ForMaskedLM"),
    "deberta_v2.DebertaV2ForTokenClassification": Entry(
        "deberta-v2", "DebertaV2ForTokenClassification"
    ),
    "deberta_v2.DebertaV2ForQuestionAnswering": Entry(
        "deberta-v2", "DebertaV2ForQuestionAnswering"
    ),
    "deberta_v2.DebertaV2ForSequenceClassification": Entry(
        "deberta-v2", "DebertaV2ForSequenceClassification"
    ),
    "vision.siglip.SiglipModel": Entry("siglip", "SiglipModel"),
    "vision.siglip.SiglipForImageClassification": Entry("siglip", "SiglipForImageClassification"),
    "vision.siglip.SiglipVisionModel": Entry("siglip_vision_model", "SiglipVisionModel"),
    "vision.siglip.SiglipTextModel": Entry("siglip_text_model", "SiglipTextModel"),
    "vision.clip.CLIPModel": Entry("clip", "CLIPModel"),
    "vision.clip.CLIPForImageClassification": Entry("clip", "CLIPForImageClassification"),
    "vision.clip.CLIPVisionModel": Entry("clip_vision_model", "CLIPVisionModel"),
    "vision.clip.CLIPVisionModelWithProjection": Entry(
        "clip_vision_model", "CLIPVisionModelWithProjection"
    ),
    "vision.clip.CLIPTextModel": Entry("clip_text_model", "CLIPTextModel"),
    "vision.clip.CLIPTextModelWithProjection": Entry(
        "clip_text_model", "CLIPTextModelWithProjection"
    ),
    "vision.vit.ViTModel": Entry("vit", "ViTModel ViTForMaskedImageModeling"),
    "vision.vit.ViTForImageClassification": Entry("vit", "ViTForImageClassification"),
    "vision.vit.DeiTModel": Entry("deit", "DeiTModel DeiTForMaskedImageModeling"),
    "vision.vit.DeiTForImageClassification": Entry("deit", "DeiTForImageClassification"),
    "vision.vit.DeiTForImageClassificationWithTeacher": Entry(
        "deit", "DeiTForImageClassificationWithTeacher"
    ),
    "vision.dinov2.Dinov2Model": Entry("dinov2", "Dinov2Model Dinov2Backbone"),
    "vision.dinov2.Dinov2ForImageClassification": Entry("dinov2", "Dinov2ForImageClassification"),
    "vision.dinov2.Dinov2WithRegistersModel": Entry(
        "dinov2_with_registers", "Dinov2WithRegistersModel Dinov2WithRegistersBackbone"
    ),
    "vision.dinov2.Dinov2WithRegistersForImageClassification": Entry(
        "dinov2_with_registers", "Dinov2WithRegistersForImageClassification"
    ),
    "vision.dinov3_vit.DINOv3ViTModel": Entry("dinov3_vit", "DINOv3ViTModel DINOv3ViTBackbone"),
}
"""File and class of each model (or its ``Family``, if it shares its class) → its names.

Where two have the same names, the first whose ``Family.only`` fits is meant.
"""

BUILT_IN = tuple(ENTRIES.items())


def register(model: M) -> M:
    """Adds a model of your own, so that ``build`` and ``maxjax.load`` find it in this process.

    Args:
        model: class of the model, which has a ``family`` of its own; or that ``Family``. It replaces the
            families of the same model type that have one of its architectures (and the same ``only``), or all
            of the model type if there are none; also maxjax's own.

    Returns:
        The argument.

    Raises:
        UserInputError: one of its architectures belongs to another model type, or the class has no family
            of its own.

    Example:
        >>> from maxjax.models import Llama, LlamaConfig, find_family
        >>> class MineConfig(LlamaConfig):
        ...     model_type = "mine"
        >>> class Mine(Llama):
        ...     pass
        >>> Mine.family = Llama.family.like(Mine, MineConfig)
        >>> register(Mine) is Mine
        True
        >>> find_family({"architectures": ["MineForCausalLM"]}) is Mine.family
        True
        >>> del ENTRIES["mine"]
    """
    family: Any = model
    if isinstance(model, type):
        family = vars(model).get("family")
        if family is None:
            raise UserInputError(
                f"{model.__name__} has no family of its own: "
                f"{model.__name__}.family = Family.of({model.__name__}, its config class)"
            )
    before = _replaced(family)
    for one in ENTRIES.values():
        taken = {*one.architectures.split()} & {*family.architectures}
        if taken and one.model_type != family.model_type:
            raise UserInputError(
                f"the architecture {sorted(taken)[0]!r} belongs to the family {one.model_type!r}"
            )
    gguf = next((one.gguf for one in before.values() if one.gguf), "")
    if family.gguf is not None:
        gguf = family.gguf.architecture
    names, number = " ".join(family.architectures), max(one.number for one in ENTRIES.values()) + 1
    first, *others = before or [family.model_type]
    for key in others:
        del ENTRIES[key]
    # In the place of the first: what is looked for by a model type alone is the first that fits.
    ENTRIES[first] = Entry(family.model_type, names, gguf, family, number)
    return model


def _replaced(family: Family) -> dict[str, Entry]:
    """The entries that a family replaces: an encoder has one for each head, and others stay."""
    same = {key: one for key, one in ENTRIES.items() if one.model_type == family.model_type}
    alike = {k: e for k, e in same.items() if {*e.architectures.split()} & {*family.architectures}}
    found = zip(alike.items(), _loaded(alike.items()), strict=True)
    return {key: one for (key, one), its in found if its.only == family.only} or same


def all_families() -> list[Family]:
    """Imports the files of all families and returns these, in the order of ``ENTRIES``."""
    return list(_loaded(ENTRIES.items()))


def of_architecture(name: str) -> Iterator[Family]:
    """The families that have this name in ``architectures`` of ``config.json``."""
    return _loaded((key, one) for key, one in ENTRIES.items() if name in one.architectures.split())


def of_model_type(name: str) -> Iterator[Family]:
    """The families of a model type.

    Example:
        >>> [one.config.__name__ for one in of_model_type("mistral")]
        ['MistralConfig']
    """
    return _loaded((key, one) for key, one in ENTRIES.items() if one.model_type == name)


def of_gguf(name: str) -> Family:
    """The family with the table of a GGUF architecture; None if no family has one.

    Those that :func:`register` added come first, the last of them before the others.
    """
    added = [(key, one) for key, one in ENTRIES.items() if one.family is not None]
    added.sort(key=lambda pair: -pair[1].number)
    rows = ((key, one) for key, one in (*added, *BUILT_IN) if name in one.gguf.split())
    for one in _loaded(rows):
        for table in () if one.gguf is None else (one.gguf, *one.gguf.variants):
            if table.architecture == name:
                return one if table is one.gguf else replace(one, gguf=table)
    return None


def gguf_of(model_type: str) -> str | None:
    """llama.cpp's name of the architecture that models of a model type are written as; None: it has none.

    Example:
        >>> gguf_of("mixtral"), gguf_of("opt")
        ('llama', None)
    """
    names = (one.gguf for one in ENTRIES.values() if one.model_type == model_type)
    return next((name.split()[0] for name in names if name), None)


def gguf_model_types() -> list[str]:
    """The model types that can be written as GGUF files."""
    return list(dict.fromkeys(one.model_type for one in ENTRIES.values() if one.gguf))


def gguf_architectures() -> list[str]:
    """llama.cpp's names of all architectures that can be read."""
    entries = (*ENTRIES.values(), *(one for _, one in BUILT_IN))
    return list(dict.fromkeys(name for one in entries for name in one.gguf.split()))


def classes() -> dict[str, str]:
    """File → names of its model and configuration classes, separated by spaces, for ``maxjax.models``.

    Example:
        >>> classes()["glm4"]
        'GLM GLMConfig GLM4 GLM4Config'
    """
    found: dict[str, list[str]] = {}
    for key, _ in BUILT_IN:
        file, _, name = key.rpartition(".")
        if "_" not in name:  # not a Family
            found.setdefault(file, []).append(name)
            if not re.search(
                r"(For|ModelWith)[A-Z]\w+$", name
            ):  # with a head: it has the model's configuration
                found[file].append(f"{name.removesuffix('Model')}Config")
    return {file: " ".join(names) for file, names in found.items()}


def _loaded(entries: Iterable[tuple[str, Entry]]) -> Iterator[Family]:
    for key, one in entries:
        if one.family is not None:
            yield one.family
            continue
        file, _, name = key.rpartition(".")
        with without_collector():
            found = getattr(import_module(f"{__package__}.{file}"), name)
        yield getattr(found, "family", found)


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
            gguf_of(one.model_type),
        )
        for one in all_families()
    ]  # fmt: skip
