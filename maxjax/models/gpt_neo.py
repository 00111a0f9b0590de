"""GPT-Neo and TinyStories: learned positions, a sliding window in every other layer, unscaled attention scores.

Source: transformers' ``modeling_gpt_neo``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..nn.layer import Module
from .config import setting
from .decoder.attention import Cached, Step
from .decoder.config import kinds_of, own
from .decoder.positions import PositionedConfig
from .gpt2 import GPT2, GPT2_FAMILY, GPT2Layer
from .gptj import GPTJAttention

_KINDS = {"global": False, "local": True}


@dataclass(frozen=True)
class GPTNeoConfig(PositionedConfig):
    """The settings of a GPT-Neo."""

    model_type = "gpt_neo"

    intermediate_size: int | None = setting(default=None, minimum=1, held="axis")  # type: ignore[assignment]
    num_hidden_layers: int = setting(
        "num_layers",
        default=24,
        minimum=1,
        maximum=1000,
        held="layers",
        also=("num_hidden_layers",),
    )
    num_attention_heads: int = setting(
        "num_heads", default=16, minimum=1, held="axis", also=("num_attention_heads",)
    )
    rms_norm_eps: float = setting("layer_norm_epsilon", default=1e-5)
    hidden_act: str = setting("activation_function", default="gelu_new")
    output_bias: bool | None = own(True)
    mlp_bias: bool = own(True)
    sliding_window: int | None = setting("window_size", default=256, minimum=1)
    query_scale: float | None = own(1.0)

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with the sliding window: those of ``attention_layers``, else of ``attention_types``.

        Raises:
            ValueError, UnsupportedModelError: the list is invalid, or names an unknown kind of layer.
        """
        if raw.get("attention_layers") is not None:
            slides = kinds_of(raw, _KINDS, key="attention_layers")
            return {"slides": slides, "attention_bias": False}
        given, kinds = raw.get("attention_types"), []
        if not isinstance(given, list | None):
            raise ValueError("'attention_types' is not a list of pairs of kinds and a number")
        for pair in [[["global", "local"], 12]] if given is None else given:
            names, count = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
            if not isinstance(names, list) or type(count) is not int or not 0 < count <= 1000:
                raise ValueError("'attention_types' is not a list of pairs of kinds and a number")
            kinds += names * count
        slides = kinds_of({"attention_types": kinds}, _KINDS, key="attention_types")
        return {"slides": slides, "attention_bias": False}


class GPTNeoAttention(Module):
    """The module ``attn`` of the files, which holds only the module ``attention``."""

    _mx_carries = True

    def __init__(self, config: GPTNeoConfig, slides: bool, dtype: DType):
        super().__init__()
        self.attention = GPTJAttention(config, slides, dtype)

    def __call__(
        self, x: jax.Array, step: Step, cached: Cached, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """As a call of the attention."""
        return self.attention(x, step, cached, layer)


class GPTNeoBlock(GPT2Layer):
    """A layer of a GPT-Neo."""

    attention_class: ClassVar[Any] = GPTNeoAttention


class GPTNeo(GPT2):
    """A GPT-Neo language model.

    Example:
        >>> config = GPTNeoConfig(100, 8, num_hidden_layers=2, num_attention_heads=2, slides=(False, True))
        >>> [name for name in GPTNeo(config).raw_state_dict() if "1.attn" in name][-2:]
        ['transformer.h.1.attn.attention.out_proj.weight', 'transformer.h.1.attn.attention.out_proj.bias']
    """

    layer_class: ClassVar[Any] = GPTNeoBlock


GPT_NEO = GPTNeo.family = GPT2_FAMILY.like(
    GPTNeo, GPTNeoConfig, ignored=("*.attn.attention.bias", "*.attn.attention.masked_bias")
)
