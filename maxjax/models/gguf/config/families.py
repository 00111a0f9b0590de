"""Reads a ``config.json`` for writing a GGUF file: by its model family, with defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ....errors import CheckpointFormatError
from ...bert import BertConfig
from ...config import ModelConfig, setting
from ...decoder.config import DecoderConfig, own
from ...decoder.experts import MoEConfig
from ...gemma import Gemma2Config, Gemma3Config, GemmaConfig
from ...gpt2 import GPT2Config
from ...llama import LlamaConfig
from ...mistral import MistralConfig
from ...mixtral import MixtralConfig
from ...qwen import Qwen2Config, Qwen3Config
from ...qwen3_moe import Qwen3MoEConfig
from ..metadata import MAX_EXPERTS, unsupported
from .rope import rope_divisors

_TANH = "gelu_pytorch_tanh"
# Other names of the same function.
_TANHS = frozenset({_TANH, "gelu_new", "gelu_fast"})


@dataclass(frozen=True)
class Qwen2MoEConfig(Qwen3MoEConfig):
    """The settings of a Qwen2-MoE, whose files maxjax converts but whose model it does not run."""

    unsaid: ClassVar[Mapping[str, Any]] = {**Qwen3MoEConfig.unsaid, "num_key_value_heads": 16}

    num_experts: int = setting(default=60, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=4, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=1408, minimum=1, held="axis")
    shared_size: int | None = setting(
        "shared_expert_intermediate_size", default=5632, minimum=1, held="axis"
    )
    attention_bias: bool = setting(default=True)
    output_bias: bool | None = own(False)
    qk_norm: bool = own(False)


# Hugging Face's model_type → GGUF's architecture, and the class of the configuration.
ARCHITECTURE_OF: Mapping[str, tuple[str, type[ModelConfig]]] = {
    "llama": ("llama", LlamaConfig),
    "mistral": ("llama", MistralConfig),
    "mixtral": ("llama", MixtralConfig),
    "qwen2": ("qwen2", Qwen2Config),
    "qwen2_moe": ("qwen2moe", Qwen2MoEConfig),
    "qwen3": ("qwen3", Qwen3Config),
    "qwen3_moe": ("qwen3moe", Qwen3MoEConfig),
    "gemma": ("gemma", GemmaConfig),
    "gemma2": ("gemma2", Gemma2Config),
    "gemma3_text": ("gemma3", Gemma3Config),
    "gpt2": ("gpt2", GPT2Config),
    "bert": ("bert", BertConfig),
}


@dataclass(frozen=True)
class FamilyConfig:
    """A configuration that its model family has read.

    Attributes:
        architecture: GGUF's name of the architecture.
        said: content of the file with defaults filled in and one spelling of each setting.
        config: the family's configuration object.
    """

    architecture: str
    said: dict[str, Any]
    config: Any

    @property
    def has_rope(self) -> bool:
        """Whether the model is a Llama-like decoder, which uses RoPE."""
        return isinstance(self.config, DecoderConfig) and not isinstance(self.config, GPT2Config)

    @property
    def experts(self) -> int:
        """The number of experts in a layer that has experts; 0 for a dense model."""
        return self.config.num_experts if isinstance(self.config, MoEConfig) else 0

    @property
    def kv_heads(self) -> int:
        """The number of KV heads."""
        return (
            self.config.kv_heads
            if isinstance(self.config, DecoderConfig)
            else self.config.num_heads
        )

    def divisors(self, path: Any = None) -> np.ndarray | None:
        """The values of ``rope_freqs.weight``, or None if the model needs none."""
        return (
            rope_divisors(self.config.rope, self.config.width, path=path) if self.has_rope else None
        )


def read_config(config: Mapping[str, Any], *, path: Any = None) -> FamilyConfig:
    """A configuration with its defaults filled in.

    Raises:
        UnsupportedModelError: GGUF or maxjax's tables do not have the architecture, or the family
            does not support a setting.
        CheckpointFormatError: a setting is missing or wrong; the message names it.

    Example:
        >>> model = read_config({"model_type": "gpt2", "vocab_size": 64, "n_layer": 2})
        >>> model.architecture, model.config.num_layers, model.config.max_position_embeddings
        ('gpt2', 2, 1024)
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURE_OF:
        known = ", ".join(ARCHITECTURE_OF)
        raise unsupported(f"model_type {str(kind)[:80]!r} in a GGUF file (there are {known})", path)
    architecture, family = ARCHITECTURE_OF[kind]
    said = {**family.defaults(), **config}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if kind == "gemma2" and not said[key]:  # llama.cpp has a number of its own then
            raise unsupported(f"Gemma 2 without '{key}' in a GGUF file", path)
    model = FamilyConfig(architecture, said, family.from_dict(config, path=path))
    read = model.config
    if model.has_rope:
        said["rope_theta"] = read.rope.theta
    if model.experts:
        said["num_experts"] = model.experts
    if model.experts > MAX_EXPERTS:
        raise CheckpointFormatError(
            "'num_experts' is out of range", path=path,
            expected=f"1 to {MAX_EXPERTS}", found=model.experts,
        )  # fmt: skip
    if isinstance(read, Gemma3Config) and read.local_rope is not None:
        said["rope_local_base_freq"] = read.local_rope.theta
    if isinstance(read, GemmaConfig):
        act = _TANH if read.hidden_act in _TANHS else read.hidden_act
        said["hidden_act"] = said["hidden_activation"] = act
    return model
