"""LFM2: short convolutions between two gates in most layers, attention in the others.

Source: arXiv:2511.23404; transformers' ``modeling_lfm2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..nn.kv_cache.kinds import KeysValues, Shared, States
from .config import setting
from .decoder.attention import DecoderAttention
from .decoder.block import HybridLayer
from .decoder.config import DecoderConfig, check_kinds, count_of, kinds_of, layers_of, own
from .decoder.model import Decoder, DecoderModel
from .decoder.short_conv import ShortConv
from .family import Family
from .gguf.architectures.lfm2 import LFM2_GGUF
from .names import MULTIMODAL, ROPE_TABLES, Headless, Names
from .parts.aliases import alias

_KINDS = {"conv": True, "full_attention": False}


@dataclass(frozen=True)
class LFM2Config(DecoderConfig):
    """The settings of an LFM2.

    Attributes:
        conv_taps: number of tokens that a convolution spans.
        convolves: whether each layer has a convolution instead of attention.
    """

    model_type = "lfm2"
    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "rope_theta": 1e6}

    rms_norm_eps: float = setting("norm_eps", default=1e-5)
    max_position_embeddings: int = setting(default=128_000, minimum=1)
    tie_word_embeddings: bool = setting(default=True)
    conv_taps: int = setting("conv_L_cache", default=3, minimum=2, held="axis")
    conv_bias: bool = setting(default=False)
    qk_norm: bool | str = own(True)
    convolves: tuple = own(())

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "convolves", tuple(self.convolves) or (False,) * self.num_hidden_layers
        )
        check_kinds(self.convolves, self.num_hidden_layers)
        super().__post_init__()

    @property
    def recurs(self) -> tuple:
        """Whether each layer has a recurrent state instead of keys and values: ``convolves``."""
        return self.convolves

    @property
    def layer_kinds(self) -> tuple:
        """A kind for each layer; layers of one kind have the same tensors."""
        return self.convolves

    def states(self, number: int) -> Mapping[str, KeysValues | States | Shared]:
        """The last inputs of the convolution, or the keys and values of attention."""
        if not self.convolves[number]:
            return super().states(number)
        return {ShortConv.group: ShortConv.kept(self)}

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """:meth:`ModelConfig.bounded_sizes`, with the MLP's size computed from the size in the file."""
        try:
            return {**raw, "intermediate_size": _inner(raw)}
        except (ValueError, OverflowError):  # from_dict reports it
            return raw

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The kinds of the layers, the MLP's size, and settings under their original keys."""
        found = {
            "intermediate_size": _inner(raw), "attention_bias": False, "mlp_bias": False,
            "sliding_window": None, "hidden_act": "silu",
            "tie_word_embeddings": _first(raw, "tie_embedding", "tie_word_embeddings", True),
        }  # fmt: skip
        listed, convolves = raw.get("full_attn_idxs"), ()
        if listed is not None and raw.get("layer_types") is None:
            if not isinstance(listed, list):
                raise ValueError("'full_attn_idxs' is not a list of numbers")
            convolves = [i not in listed for i in range(layers_of(raw))]
        return {**found, "convolves": kinds_of(raw, _KINDS, convolves)}


def _first(raw: Mapping[str, Any], first: str, second: str, default: Any) -> Any:
    """The value of a setting under its first key, else under its second, else the default."""
    value = raw.get(first)
    value = raw.get(second) if value is None else value
    return default if value is None else value


def _inner(raw: Mapping[str, Any]) -> Any:
    """The inner features of the MLP: the file's number, or if ``block_auto_adjust_ff_dim`` two thirds, rounded up."""
    size = _first(raw, "block_ff_dim", "intermediate_size", 12288)
    adjusts, factor = raw.get("block_auto_adjust_ff_dim"), raw.get("block_ffn_dim_multiplier", 1.0)
    if adjusts is False or type(size) is not int:
        return size
    every = count_of(raw, "block_multiple_of", 256)
    size = 2 * size // 3
    if factor is None:
        return size
    if type(factor) not in (int, float) or not 0 < factor < 1e6:
        raise ValueError("'block_ffn_dim_multiplier' is not a positive number")
    return every * (-int(factor * size) // every * -1)


class LFM2Attention(DecoderAttention):
    """Attention with the attribute names of LFM2's files."""

    o_proj, q_norm, k_norm = alias("out_proj"), alias("q_layernorm"), alias("k_layernorm")


class LFM2Layer(HybridLayer):
    """A layer with a convolution (``conv``) or attention (``self_attn``), with the names of LFM2's files."""

    attention_class: ClassVar[Any] = LFM2Attention
    recurrent: ClassVar[tuple[str, Any]] = "conv", ShortConv
    mlp, input_layernorm = alias("feed_forward"), alias("operator_norm")
    post_attention_layernorm = alias("ffn_norm")
    mlp_names: ClassVar[tuple[str, ...]] = ("w1", "w3", "w2")


class LFM2Model(DecoderModel):
    """The model without its head, whose files call the last norm ``embedding_norm``."""

    norm = alias("embedding_norm")


class LFM2(Decoder):
    """An LFM2 language model.

    Example:
        >>> config = LFM2Config(100, 8, 16, num_hidden_layers=3, num_attention_heads=2, convolves=(True, False, True))
        >>> cache = LFM2(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, cache.more["conv"].arrays["conv"].shape
        (1, (2, 1, 2, 8))
    """

    layer_class: ClassVar[Any] = LFM2Layer
    model_class: ClassVar[Any] = LFM2Model


LFM2_FAMILY = LFM2.family = Family.of(
    LFM2,
    LFM2Config,
    "Lfm2ForCausalLM",
    "Lfm2Model",
    names=Names(
        *MULTIMODAL,
        ROPE_TABLES,
        Headless("model.", ("embed_tokens.", "layers.", "embedding_norm.")),
    ),
    gguf=LFM2_GGUF,
)
