"""GLM-4 (``glm``) and GLM-4-0414 (``glm4``): RoPE rotates half of each head, in pairs of neighbouring features.

Their MLPs have one linear layer for gate and up; GLM-4-0414 has norms after attention and MLP too.

Sources: arXiv:2406.12793; transformers' ``modeling_glm`` and ``modeling_glm4``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from .config import setting
from .decoder.attention import Cached, Step
from .decoder.block import DecoderLayer, FusedMLP
from .decoder.config import DecoderConfig, own
from .decoder.model import Decoder, DecoderFamily
from .decoder.norm import norm
from .gguf.architectures.glm4 import GLM4_GGUF, GLM_GGUF
from .multimodal import SIGHT
from .parts.rotary import Rope


@dataclass(frozen=True)
class GLMConfig(DecoderConfig):
    """The settings of a GLM-4: its projections of queries, keys and values have biases."""

    model_type = "glm"
    fixed = {"mlp_bias": False, "sliding_window": None}

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2}

    head_dim: int | None = setting(default=128, minimum=1, held="axis")
    max_position_embeddings: int = setting(default=131072, minimum=1)
    rms_norm_eps: float = setting(default=1.5625e-7)
    attention_bias: bool = setting(default=True)
    output_bias: bool | None = own(False)
    rope: Rope = own(Rope(part=0.5, interleaved=True))


@dataclass(frozen=True)
class GLM4Config(GLMConfig):
    """The settings of a GLM-4-0414."""

    model_type = "glm4"


class GLMLayer(DecoderLayer):
    """A decoder layer whose MLP has one linear layer for gate and up."""

    def make_mlp(self, config: DecoderConfig, number: int, dtype: DType) -> FusedMLP:
        """The layer's MLP."""
        return FusedMLP(config.hidden_size, config.intermediate_size, dtype, config.hidden_act)


class GLM4Layer(GLMLayer):
    """A :class:`GLMLayer` with norms after attention and MLP: ``post_self_attn_layernorm``, ``post_mlp_layernorm``."""

    def make_norms(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes the four norms."""
        super().make_norms(config, dtype)
        self.post_self_attn_layernorm = norm(config, dtype)
        self.post_mlp_layernorm = norm(config, dtype)

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = carry
        y, cached = self.self_attn(self.input_layernorm(x), step, cached, layer)
        x = self.added(x, self.post_self_attn_layernorm(y))
        y = self.mlp(self.post_attention_layernorm(x)).astype(x.dtype)
        return self.added(x, self.post_mlp_layernorm(y)), cached


class GLM(Decoder):
    """A GLM-4 language model.

    Example:
        >>> config = GLMConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, head_dim=4)
        >>> [n for n in GLM(config).raw_state_dict() if "layers.0.mlp" in n]
        ['model.layers.0.mlp.gate_up_proj.weight', 'model.layers.0.mlp.down_proj.weight']
    """

    layer_class: ClassVar[Any] = GLMLayer


class GLM4(Decoder):
    """A GLM-4-0414 language model."""

    layer_class: ClassVar[Any] = GLM4Layer


GLM_FAMILY = GLM.family = DecoderFamily.of(
    GLM, GLMConfig, "GlmForCausalLM", "GlmModel", gguf=GLM_GGUF
)
GLM4_FAMILY = GLM4.family = DecoderFamily.of(
    GLM4, GLM4Config, "Glm4ForCausalLM", "Glm4Model", sight=SIGHT, gguf=GLM4_GGUF
)
