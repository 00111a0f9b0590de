"""Model families, and :func:`build`, which makes a lazy Module from a checkpoint's headers.

There is one file per family; ``registry`` lists the families that maxjax can run, and ``construct``
has ``build``.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..lazy import attributes as _attributes

if _TYPE_CHECKING:
    from .albert import AlbertConfig as AlbertConfig
    from .albert import AlbertModel as AlbertModel
    from .apertus import Apertus as Apertus
    from .apertus import ApertusConfig as ApertusConfig
    from .bert import BertConfig as BertConfig
    from .bert import BertForSequenceClassification as BertForSequenceClassification
    from .bert import BertModel as BertModel
    from .bert import BertOutput as BertOutput
    from .camembert import CamembertConfig as CamembertConfig
    from .camembert import CamembertModel as CamembertModel
    from .codegen import CodeGen as CodeGen
    from .codegen import CodeGenConfig as CodeGenConfig
    from .cohere import Cohere as Cohere
    from .cohere import Cohere2 as Cohere2
    from .cohere import Cohere2Config as Cohere2Config
    from .cohere import CohereConfig as CohereConfig
    from .config import ModelConfig as ModelConfig
    from .config import read_object as read_object
    from .construct import build as build
    from .construct import config_beside as config_beside
    from .deberta_v2 import DebertaV2Config as DebertaV2Config
    from .deberta_v2 import DebertaV2Model as DebertaV2Model
    from .decoder.config import DecoderConfig as DecoderConfig
    from .decoder.model import Decoder as Decoder
    from .decoder.model import DecoderFamily as DecoderFamily
    from .deepseek import DeepseekV2 as DeepseekV2
    from .deepseek import DeepseekV2Config as DeepseekV2Config
    from .deepseek import DeepseekV3 as DeepseekV3
    from .deepseek import DeepseekV3Config as DeepseekV3Config
    from .distilbert import DistilBertConfig as DistilBertConfig
    from .distilbert import DistilBertModel as DistilBertModel
    from .electra import ElectraConfig as ElectraConfig
    from .electra import ElectraModel as ElectraModel
    from .encoder.config import EncoderConfig as EncoderConfig
    from .encoder.model import Encoder as Encoder
    from .encoder.model import EncoderOutput as EncoderOutput
    from .ernie4_5 import Ernie45 as Ernie45
    from .ernie4_5 import Ernie45Config as Ernie45Config
    from .ernie4_5_moe import Ernie45MoE as Ernie45MoE
    from .ernie4_5_moe import Ernie45MoEConfig as Ernie45MoEConfig
    from .exaone4 import Exaone4 as Exaone4
    from .exaone4 import Exaone4Config as Exaone4Config
    from .falcon import Falcon as Falcon
    from .falcon import FalconConfig as FalconConfig
    from .falcon_h1 import FalconH1 as FalconH1
    from .falcon_h1 import FalconH1Config as FalconH1Config
    from .family import Family as Family
    from .family import PretrainedModel as PretrainedModel
    from .family import one_head as one_head
    from .family import tensors as tensors
    from .find import find_family as find_family
    from .gemma import Gemma as Gemma
    from .gemma import Gemma2 as Gemma2
    from .gemma import Gemma2Config as Gemma2Config
    from .gemma import Gemma3 as Gemma3
    from .gemma import Gemma3Config as Gemma3Config
    from .gemma import GemmaConfig as GemmaConfig
    from .gemma3n import Gemma3n as Gemma3n
    from .gemma3n import Gemma3nConfig as Gemma3nConfig
    from .gemma4 import Gemma4 as Gemma4
    from .gemma4 import Gemma4Config as Gemma4Config
    from .gguf.table import GGUFTable as GGUFTable
    from .glm4 import GLM as GLM
    from .glm4 import GLM4 as GLM4
    from .glm4 import GLM4Config as GLM4Config
    from .glm4 import GLMConfig as GLMConfig
    from .glm4_moe import GLM4MoE as GLM4MoE
    from .glm4_moe import GLM4MoEConfig as GLM4MoEConfig
    from .glm4_moe_lite import GLM4MoELite as GLM4MoELite
    from .glm4_moe_lite import GLM4MoELiteConfig as GLM4MoELiteConfig
    from .gpt2 import GPT2 as GPT2
    from .gpt2 import GPT2Config as GPT2Config
    from .gpt_bigcode import GPTBigCode as GPTBigCode
    from .gpt_bigcode import GPTBigCodeConfig as GPTBigCodeConfig
    from .gpt_neo import GPTNeo as GPTNeo
    from .gpt_neo import GPTNeoConfig as GPTNeoConfig
    from .gpt_neox import GPTNeoX as GPTNeoX
    from .gpt_neox import GPTNeoXConfig as GPTNeoXConfig
    from .gpt_oss import GptOss as GptOss
    from .gpt_oss import GptOssConfig as GptOssConfig
    from .gptj import GPTJ as GPTJ
    from .gptj import GPTJConfig as GPTJConfig
    from .granite import Granite as Granite
    from .granite import GraniteConfig as GraniteConfig
    from .granitemoe import GraniteMoE as GraniteMoE
    from .granitemoe import GraniteMoEConfig as GraniteMoEConfig
    from .granitemoehybrid import GraniteHybrid as GraniteHybrid
    from .granitemoehybrid import GraniteHybridConfig as GraniteHybridConfig
    from .gte import GteConfig as GteConfig
    from .gte import GteModel as GteModel
    from .helium import Helium as Helium
    from .helium import HeliumConfig as HeliumConfig
    from .hunyuan import Hunyuan as Hunyuan
    from .hunyuan import HunyuanConfig as HunyuanConfig
    from .hunyuan_moe import HunyuanMoE as HunyuanMoE
    from .hunyuan_moe import HunyuanMoEConfig as HunyuanMoEConfig
    from .jina import JinaV3Config as JinaV3Config
    from .jina import JinaV3Model as JinaV3Model
    from .lfm2 import LFM2 as LFM2
    from .lfm2 import LFM2Config as LFM2Config
    from .lfm2_moe import LFM2MoE as LFM2MoE
    from .lfm2_moe import LFM2MoEConfig as LFM2MoEConfig
    from .llama import Llama as Llama
    from .llama import LlamaConfig as LlamaConfig
    from .llama import Mistral as Mistral
    from .llama import MistralConfig as MistralConfig
    from .llama import Qwen2 as Qwen2
    from .llama import Qwen2Config as Qwen2Config
    from .llama import SeedOSS as SeedOSS
    from .llama import SeedOSSConfig as SeedOSSConfig
    from .llama4 import Llama4 as Llama4
    from .llama4 import Llama4Config as Llama4Config
    from .mamba2 import Mamba2 as Mamba2
    from .mamba2 import Mamba2Config as Mamba2Config
    from .minimax_m2 import MiniMaxM2 as MiniMaxM2
    from .minimax_m2 import MiniMaxM2Config as MiniMaxM2Config
    from .mistral import Ministral3 as Ministral3
    from .mistral import Ministral3Config as Ministral3Config
    from .mixtral import Mixtral as Mixtral
    from .mixtral import MixtralConfig as MixtralConfig
    from .modernbert import ModernBertConfig as ModernBertConfig
    from .modernbert import ModernBertModel as ModernBertModel
    from .mpnet import MPNetConfig as MPNetConfig
    from .mpnet import MPNetModel as MPNetModel
    from .nemotron import Arcee as Arcee
    from .nemotron import ArceeConfig as ArceeConfig
    from .nemotron import Nemotron as Nemotron
    from .nemotron import NemotronConfig as NemotronConfig
    from .nemotron_h import NemotronH as NemotronH
    from .nemotron_h import NemotronHConfig as NemotronHConfig
    from .nomic import NomicBertConfig as NomicBertConfig
    from .nomic import NomicBertModel as NomicBertModel
    from .olmo import Olmo as Olmo
    from .olmo import OlmoConfig as OlmoConfig
    from .olmo2 import Olmo2 as Olmo2
    from .olmo2 import Olmo2Config as Olmo2Config
    from .olmo2 import Olmo3 as Olmo3
    from .olmo2 import Olmo3Config as Olmo3Config
    from .olmoe import OLMoE as OLMoE
    from .olmoe import OLMoEConfig as OLMoEConfig
    from .opt import OPT as OPT
    from .opt import OPTConfig as OPTConfig
    from .parts.language_model import LanguageModel as LanguageModel
    from .phi import Phi as Phi
    from .phi import PhiConfig as PhiConfig
    from .phi3 import Phi3 as Phi3
    from .phi3 import Phi3Config as Phi3Config
    from .phimoe import PhiMoE as PhiMoE
    from .phimoe import PhiMoEConfig as PhiMoEConfig
    from .qwen import Qwen3 as Qwen3
    from .qwen import Qwen3Config as Qwen3Config
    from .qwen2_moe import Qwen2MoE as Qwen2MoE
    from .qwen2_moe import Qwen2MoEConfig as Qwen2MoEConfig
    from .qwen3_5 import Qwen35 as Qwen35
    from .qwen3_5 import Qwen35Config as Qwen35Config
    from .qwen3_5 import Qwen35MoE as Qwen35MoE
    from .qwen3_5 import Qwen35MoEConfig as Qwen35MoEConfig
    from .qwen3_moe import Qwen3MoE as Qwen3MoE
    from .qwen3_moe import Qwen3MoEConfig as Qwen3MoEConfig
    from .qwen3_next import Qwen3Next as Qwen3Next
    from .qwen3_next import Qwen3NextConfig as Qwen3NextConfig
    from .registry import FAMILIES as FAMILIES
    from .registry import FamilyNames as FamilyNames
    from .registry import families as families
    from .registry import register as register
    from .roberta import RobertaConfig as RobertaConfig
    from .roberta import RobertaModel as RobertaModel
    from .roberta import XLMRobertaConfig as XLMRobertaConfig
    from .roberta import XLMRobertaModel as XLMRobertaModel
    from .smollm3 import SmolLM3 as SmolLM3
    from .smollm3 import SmolLM3Config as SmolLM3Config
    from .stablelm import StableLM as StableLM
    from .stablelm import StableLMConfig as StableLMConfig
    from .starcoder2 import Starcoder2 as Starcoder2
    from .starcoder2 import Starcoder2Config as Starcoder2Config
    from .ties import is_tied as is_tied
    from .ties import with_tie as with_tie
    from .weights import main_dtype as main_dtype

__getattr__, __dir__, __all__ = _attributes(
    __name__,
    {
        "albert": "AlbertConfig AlbertModel",
        "camembert": "CamembertConfig CamembertModel",
        "deberta_v2": "DebertaV2Config DebertaV2Model",
        "electra": "ElectraConfig ElectraModel",
        "apertus": "Apertus ApertusConfig",
        "bert": "BertConfig BertForSequenceClassification BertModel BertOutput",
        "cohere": "Cohere Cohere2 Cohere2Config CohereConfig",
        "config": "ModelConfig read_object",
        "construct": "build config_beside",
        "decoder.config": "DecoderConfig",
        "decoder.model": "Decoder DecoderFamily",
        "deepseek": "DeepseekV2 DeepseekV2Config DeepseekV3 DeepseekV3Config",
        "distilbert": "DistilBertConfig DistilBertModel",
        "encoder.config": "EncoderConfig",
        "encoder.model": "Encoder EncoderOutput",
        "ernie4_5": "Ernie45 Ernie45Config",
        "ernie4_5_moe": "Ernie45MoE Ernie45MoEConfig",
        "exaone4": "Exaone4 Exaone4Config",
        "falcon": "Falcon FalconConfig",
        "family": "Family PretrainedModel one_head tensors",
        "find": "find_family",
        "gemma": "Gemma Gemma2 Gemma2Config Gemma3 Gemma3Config GemmaConfig",
        "gguf.table": "GGUFTable",
        "gemma3n": "Gemma3n Gemma3nConfig",
        "gemma4": "Gemma4 Gemma4Config",
        "glm4": "GLM GLM4 GLM4Config GLMConfig",
        "glm4_moe": "GLM4MoE GLM4MoEConfig",
        "gpt2": "GPT2 GPT2Config",
        "gpt_neox": "GPTNeoX GPTNeoXConfig",
        "gpt_oss": "GptOss GptOssConfig",
        "granite": "Granite GraniteConfig",
        "granitemoe": "GraniteMoE GraniteMoEConfig",
        "gte": "GteConfig GteModel",
        "hunyuan": "Hunyuan HunyuanConfig",
        "hunyuan_moe": "HunyuanMoE HunyuanMoEConfig",
        "jina": "JinaV3Config JinaV3Model",
        "lfm2": "LFM2 LFM2Config",
        "granitemoehybrid": "GraniteHybrid GraniteHybridConfig",
        "mamba2": "Mamba2 Mamba2Config",
        "falcon_h1": "FalconH1 FalconH1Config",
        "nemotron_h": "NemotronH NemotronHConfig",
        "llama": "Llama LlamaConfig Mistral MistralConfig Qwen2 Qwen2Config SeedOSS SeedOSSConfig",
        "llama4": "Llama4 Llama4Config",
        "minimax_m2": "MiniMaxM2 MiniMaxM2Config",
        "mistral": "Ministral3 Ministral3Config",
        "mixtral": "Mixtral MixtralConfig",
        "modernbert": "ModernBertConfig ModernBertModel",
        "mpnet": "MPNetConfig MPNetModel",
        "nomic": "NomicBertConfig NomicBertModel",
        "gpt_neo": "GPTNeo GPTNeoConfig",
        "codegen": "CodeGen CodeGenConfig",
        "gptj": "GPTJ GPTJConfig",
        "gpt_bigcode": "GPTBigCode GPTBigCodeConfig",
        "olmo": "Olmo OlmoConfig",
        "nemotron": "Arcee ArceeConfig Nemotron NemotronConfig",
        "glm4_moe_lite": "GLM4MoELite GLM4MoELiteConfig",
        "lfm2_moe": "LFM2MoE LFM2MoEConfig",
        "olmo2": "Olmo2 Olmo2Config Olmo3 Olmo3Config",
        "olmoe": "OLMoE OLMoEConfig",
        "opt": "OPT OPTConfig",
        "parts.language_model": "LanguageModel",
        "phi": "Phi PhiConfig",
        "phi3": "Phi3 Phi3Config",
        "phimoe": "PhiMoE PhiMoEConfig",
        "helium": "Helium HeliumConfig",
        "qwen": "Qwen3 Qwen3Config",
        "qwen2_moe": "Qwen2MoE Qwen2MoEConfig",
        "qwen3_5": "Qwen35 Qwen35Config Qwen35MoE Qwen35MoEConfig",
        "qwen3_moe": "Qwen3MoE Qwen3MoEConfig",
        "qwen3_next": "Qwen3Next Qwen3NextConfig",
        "registry": "FAMILIES FamilyNames families register",
        "roberta": "RobertaConfig RobertaModel XLMRobertaConfig XLMRobertaModel",
        "smollm3": "SmolLM3 SmolLM3Config",
        "stablelm": "StableLM StableLMConfig",
        "starcoder2": "Starcoder2 Starcoder2Config",
        "ties": "is_tied with_tie",
        "weights": "main_dtype",
    },
)
