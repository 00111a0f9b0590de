"""A ``config.json`` as the writers of GGUF files need it: defaults filled in, checked.

A configuration leaves out what its class has as a default, and says some things in two ways.

Source: the configuration classes of transformers, for defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...config import ModelConfig, setting
from ..metadata import MAX_EXPERTS, MAX_LAYERS, unsupported
from .rope import Rope, one_rope, rope_divisors

_TANH = "gelu_pytorch_tanh"
# Other names of the same function.
_TANHS = frozenset({_TANH, "gelu_new", "gelu_fast"})

# Hugging Face's model_type → GGUF's architecture.
ARCHITECTURE_OF = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "gpt2": "gpt2", "bert": "bert",
}  # fmt: skip

_ALL = {"rope_theta": 10_000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
_GEMMA = {
    "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": _TANH,
    "attention_bias": False, "max_position_embeddings": 8192,
}  # fmt: skip
_GEMMA_SCALED = {**_GEMMA, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_QWEN = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "use_sliding_window": False}
_SPARSE = {**_QWEN, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
# What transformers takes for what a file does not say.
DEFAULTS: Mapping[str, dict[str, Any]] = {
    "llama": {
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "mixtral": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
        "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen2_moe": {
        **_SPARSE, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    },
    "qwen3": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    "qwen3_moe": {
        **_SPARSE, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "attention_bias": False,
    },
    "gemma": {**_GEMMA, "num_key_value_heads": 16},
    "gemma2": {
        **_GEMMA_SCALED, "num_key_value_heads": 4, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA_SCALED, "num_key_value_heads": 4, "max_position_embeddings": 131072,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    "gpt2": {"tie_word_embeddings": True, "activation_function": "gelu_new"},
    "bert": {
        "hidden_act": "gelu", "position_embedding_type": "absolute", "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "is_decoder": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Decoder(ModelConfig):
    """The settings of a decoder of Llama's kind."""

    vocab_size: int = setting(minimum=1, held="axis")
    hidden_size: int = setting(minimum=1, held="axis")
    intermediate_size: int = setting(minimum=1, held="axis")
    layers: int = setting("num_hidden_layers", minimum=1, maximum=MAX_LAYERS, held="layers")
    heads: int = setting("num_attention_heads", minimum=1, held="axis")
    rms_norm_eps: float = setting()
    context: int = setting("max_position_embeddings", minimum=1)
    rope_theta: float = setting(minimum=1e-3, maximum=1e30)
    given_kv_heads: int | None = setting(
        "num_key_value_heads", default=None, minimum=1, held="axis"
    )
    given_head_dim: int | None = setting("head_dim", default=None, minimum=1, held="axis")
    local_theta: float | None = setting("rope_local_base_freq", default=None)
    sliding_window: int | None = setting(default=None)
    num_experts: int | None = setting(default=None, minimum=1, maximum=MAX_EXPERTS, held="axis")
    num_local_experts: int | None = setting(
        default=None, minimum=1, maximum=MAX_EXPERTS, held="axis"
    )
    experts_used: int | None = setting("num_experts_per_tok", default=None, minimum=1, held="axis")
    expert_width: int | None = setting(
        "moe_intermediate_size", default=None, minimum=1, held="axis"
    )
    shared_width: int | None = setting(
        "shared_expert_intermediate_size", default=None, minimum=1, held="axis"
    )
    attn_cap: float | None = setting("attn_logit_softcapping", default=None)
    final_cap: float | None = setting("final_logit_softcapping", default=None)

    def __post_init__(self) -> None:
        if self.given_head_dim is None and self.hidden_size % self.heads:
            raise ValueError(
                f"'hidden_size' {self.hidden_size} is not a multiple of 'num_attention_heads' {self.heads}"
            )

    @classmethod
    def counted(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
        """The width of an MLP may count nothing where there are experts."""
        return raw, frozenset({"intermediate_size"} if raw.get("num_experts") else ())

    @property
    def kv_heads(self) -> int:
        return self.given_kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        return self.given_head_dim or self.hidden_size // self.heads

    @property
    def experts(self) -> int | None:
        return self.num_experts or self.num_local_experts


@dataclass(frozen=True)
class Plain(ModelConfig):
    """The settings of GPT-2 and of BERT, which have neither rope nor grouped heads.

    ``inner`` is None for four times the hidden size.
    """

    vocab_size: int = setting(minimum=1, held="axis")
    hidden_size: int = setting("hidden_size", minimum=1, held="axis")
    layers: int = setting("num_hidden_layers", minimum=1, maximum=MAX_LAYERS, held="layers")
    heads: int = setting("num_attention_heads", minimum=1, held="axis")
    context: int = setting("max_position_embeddings", minimum=1)
    eps: float = setting("layer_norm_eps")
    inner: int | None = setting("intermediate_size", default=None, minimum=1, held="axis")
    token_types: int | None = setting("type_vocab_size", default=None, minimum=1, held="axis")

    experts = None

    @property
    def kv_heads(self) -> int:
        return self.heads


_GPT2_KEYS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "n_inner": "intermediate_size",
}  # fmt: skip
_GPT2_DEFAULTS = {
    "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5,
    "n_inner": None,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A configuration, read.

    Attributes:
        architecture: GGUF's name of it.
        said: The configuration with defaults and with one way of saying each thing.
        size: Its counts and sizes.
        rope: How rope is stretched; None if it is not.
    """

    architecture: str
    said: dict[str, Any]
    size: Decoder | Plain
    rope: Rope | None

    def divisors(self, path: Any = None) -> np.ndarray | None:
        """The values of ``rope_freqs.weight``, None where there is none."""
        if not isinstance(self.size, Decoder):
            return None
        return rope_divisors(self.rope, self.size.head_dim, self.size.rope_theta, path=path)


def read_config(config: Mapping[str, Any], *, path: Any = None) -> Model:
    """A configuration with its defaults filled in.

    Raises:
        UnsupportedModelError: There is no such architecture in GGUF, or no table for it.
        CheckpointFormatError: A setting is missing or wrong; names it.

    Example:
        >>> model = read_config({"model_type": "gpt2", "vocab_size": 64, "n_layer": 2})
        >>> model.architecture, model.size.layers, model.size.context
        ('gpt2', 2, 1024)
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURE_OF:
        known = ", ".join(ARCHITECTURE_OF)
        raise unsupported(f"model_type {str(kind)[:80]!r} in a GGUF file (there are {known})", path)
    said = {**DEFAULTS[kind], **config}
    for one, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        if one in DEFAULTS[kind] and config.get(one) is None and config.get(other) is not None:
            said[one] = config[other]  # transformers writes either
    if kind in ("gpt2", "bert"):
        if kind == "gpt2":
            said = {**_GPT2_DEFAULTS, **said}
            renamed = {new: said.get(old) for old, new in _GPT2_KEYS.items()}
        else:
            renamed = {}
        size = Plain.from_dict({**said, **renamed}, path=path)
        if size.hidden_size % size.heads:
            raise unsupported(f"{size.heads} heads in {size.hidden_size} features", path)
        return Model(ARCHITECTURE_OF[kind], said, size, None)
    said, rope = one_rope({**_ALL, **said}, path)
    if kind.startswith("gemma"):
        given = config.get("hidden_activation") or _TANH
        said["hidden_act"] = said["hidden_activation"] = _TANH if given in _TANHS else given
    return Model(ARCHITECTURE_OF[kind], said, Decoder.from_dict(said, path=path), rope)
