"""GPT-J: attention and MLP in parallel after one LayerNorm, RoPE of neighbouring features in a part of each head.

Source: transformers' ``modeling_gptj``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.attention import DecoderAttention
from .decoder.block import ParallelLayer
from .decoder.config import DecoderConfig, count_of, own
from .decoder.model import Decoder, DecoderModel
from .family import Family
from .names import Drop, Headless, Names
from .parts.aliases import alias
from .parts.rotary import Rope


@dataclass(frozen=True)
class GPTJConfig(DecoderConfig):
    """The settings of a GPT-J."""

    model_type = "gptj"

    hidden_size: int = setting(
        "n_embd", default=4096, minimum=1, held="axis", also=("hidden_size",)
    )
    intermediate_size: int | None = setting("n_inner", default=None, minimum=1, held="axis")  # type: ignore[assignment]
    num_hidden_layers: int = setting(
        "n_layer", default=28, minimum=1, maximum=1000, held="layers", also=("num_hidden_layers",)
    )
    num_attention_heads: int = setting(
        "n_head", default=16, minimum=1, held="axis", also=("num_attention_heads",)
    )
    num_key_value_heads: int | None = own(None)
    head_dim: int | None = own(None)
    max_position_embeddings: int = setting(
        "n_positions", default=2048, minimum=1, also=("max_position_embeddings",)
    )
    rms_norm_eps: float = setting("layer_norm_epsilon", default=1e-5)
    hidden_act: str = setting("activation_function", default="gelu_new")
    attention_bias: bool = own(False)
    mlp_bias: bool = own(True)
    head_bias: bool = own(True)
    sliding_window: int | None = own(None)
    norm: str = own("layer")
    rope: Rope = own(Rope(interleaved=True))

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Rope]:
        """The RoPE of the first ``rotary_dim`` features of each head."""
        sizes = {
            "n_embd": cls.value(raw, "hidden_size"),
            "n_head": cls.value(raw, "num_attention_heads"),
        }
        width = count_of(sizes, "n_embd") / count_of(sizes, "n_head")
        return {"rope": Rope(part=count_of(raw, "rotary_dim", 64) / width, interleaved=True)}


class GPTJAttention(DecoderAttention):
    """Attention whose output projection is ``out_proj``."""

    o_proj = alias("out_proj")


class GPTJBlock(ParallelLayer):
    """``x + attn(ln_1(x)) + mlp(ln_1(x))``."""

    attention_class: ClassVar[Any] = GPTJAttention
    mlp_names: ClassVar[tuple[str, ...]] = ("fc_in", "fc_out")
    self_attn, input_layernorm = alias("attn"), alias("ln_1")


class GPTJModel(DecoderModel):
    """The model without its head."""

    embed_tokens, layers, norm = alias("wte"), alias("h"), alias("ln_f")


class GPTJ(Decoder):
    """A GPT-J language model.

    Example:
        >>> model = GPTJ(GPTJConfig(100, 8, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "h.0" not in name][:3]
        ['lm_head.weight', 'lm_head.bias', 'transformer.wte.weight']
    """

    layer_class: ClassVar[Any] = GPTJBlock
    model_class: ClassVar[Any] = GPTJModel
    model = alias("transformer")


GPTJ_FAMILY = GPTJ.family = Family.of(
    GPTJ,
    GPTJConfig,
    names=Names(
        Drop("*.attn.bias", "*.attn.masked_bias", "*.attn.causal_mask", "*.embed_positions"),
        Headless("transformer.", ("wte.", "h.", "ln_f.")),
    ),
    tied=("lm_head.weight", "transformer.wte.weight"),
)
