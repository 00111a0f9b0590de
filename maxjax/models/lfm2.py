"""LFM2: short convolutions between two gates in most layers, attention in the others.

Source: arXiv:2511.23404; transformers' ``modeling_lfm2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..graph.device import DeviceRef
from ..graph.placement.strategy import Segment, ShardingStrategy
from ..nn.kv_cache.kinds import KeysValues, Shared, State, States
from ..nn.linear import Linear, linear_rules
from ..nn.ssm.convolution import CausalConv
from ..nn.stacked_linear import StackedLinear, apart, stacked_rules
from .config import setting
from .decoder.aliases import alias
from .decoder.attention import Cached, DecoderAttention, Step
from .decoder.block import DecoderLayer
from .decoder.config import DecoderConfig, own
from .decoder.mixer import RecurrentMixer
from .decoder.mlp import GatedMLP
from .decoder.model import Decoder, DecoderFamily, DecoderModel, make
from .gguf.config.read import Config
from .gguf.metadata import MAX_LAYERS, Settings
from .gguf.names import Rule
from .gguf.state_layouts import Taps
from .gguf.table import GGUFTable

_KINDS = {"conv": True, "full_attention": False}


@dataclass(frozen=True)
class LFM2Config(DecoderConfig):
    """The settings of an LFM2.

    Attributes:
        conv_taps: number of tokens that a convolution sees.
        convolves: whether each layer has a convolution, and not attention.
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
        object.__setattr__(self, "convolves", tuple(self.convolves) or (False,) * self.num_layers)
        if len(self.convolves) != self.num_layers:
            raise ValueError(
                f"'layer_types' has {len(self.convolves)} entries for {self.num_layers} layers"
            )
        super().__post_init__()

    @property
    def layer_kinds(self) -> tuple:
        """What tells layers with other tensors apart."""
        return self.convolves

    def states(self, number: int) -> Mapping[str, KeysValues | States | Shared]:
        """The last inputs of a convolution; keys and values elsewhere."""
        if not self.convolves[number]:
            return super().states(number)
        return {ShortConv.group: ShortConv.kept(self)}

    @classmethod
    def counted(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
        """The MLP's size is computed from that of the file."""
        return raw, frozenset({"intermediate_size"})

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The kinds of the layers, the MLP's size, and settings under their first names."""
        size = _first(raw, "block_ff_dim", "intermediate_size", 12288)
        found = {
            "intermediate_size": _inner(raw, size), "attention_bias": False, "mlp_bias": False,
            "sliding_window": None, "hidden_act": "silu",
            "tie_word_embeddings": _first(raw, "tie_embedding", "tie_word_embeddings", True),
        }  # fmt: skip
        kinds, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
        listed = raw.get("full_attn_idxs")
        if (
            kinds is None
            and type(layers) is int
            and 0 < layers <= MAX_LAYERS
            and listed is not None
        ):
            if not isinstance(listed, list):
                raise ValueError("'full_attn_idxs' is not a list of numbers")
            kinds = ["full_attention" if i in listed else "conv" for i in range(layers)]
        if kinds is not None:
            if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
                raise ValueError("'layer_types' is not a list of strings")
            if other := [kind for kind in kinds if kind not in _KINDS]:
                raise UnsupportedModelError(f"'layer_types' with {other[0][:80]!r}")
            found["convolves"] = tuple(_KINDS[kind] for kind in kinds)
        return found


def _first(raw: Mapping[str, Any], first: str, second: str, default: Any) -> Any:
    """A setting under its first name, or else its second one."""
    value = raw.get(first)
    value = raw.get(second) if value is None else value
    return default if value is None else value


def _inner(raw: Mapping[str, Any], size: Any) -> Any:
    """The inner features of the MLP: two thirds of the given number, rounded up, if that is adjusted."""
    adjusts, factor = raw.get("block_auto_adjust_ff_dim"), raw.get("block_ffn_dim_multiplier", 1.0)
    every = _first(raw, "block_multiple_of", "block_multiple_of", 256)
    if adjusts is False or type(size) is not int:
        return size
    if type(every) is not int or every < 1:
        raise ValueError("'block_multiple_of' is not a positive integer")
    size = 2 * size // 3
    if factor is None:
        return size
    if type(factor) not in (int, float) or not 0 < factor < 1e6:
        raise ValueError("'block_ffn_dim_multiplier' is not a positive number")
    return every * (-int(factor * size) // every * -1)


class ShortConv(RecurrentMixer):
    """``out_proj(after · conv(before · x))``, where ``in_proj`` computes both gates and x."""

    group: ClassVar[str] = "conv"

    def __init__(self, config: LFM2Config, dtype: DType):
        super().__init__(config)
        size, bias = config.hidden_size, config.conv_bias
        self.sizes = (size,) * 3
        self.in_proj: Any = StackedLinear(
            size, self.sizes, ["before", "after", "x"], dtype, stacked=True, has_bias=bias
        )
        self.conv = CausalConv(size, config.conv_taps, dtype, bias)
        self.out_proj = Linear(size, size, dtype, DeviceRef.CPU(), has_bias=bias)

    @classmethod
    def kept(cls, config: LFM2Config) -> States:
        """The last inputs of the convolution."""
        return States((State("conv", (config.conv_taps - 1, config.hidden_size), axis=1),))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the channels."""
        segments = [Segment.even(size) for size in self.sizes]
        columns = linear_rules("out_proj", ShardingStrategy.columnwise(1))
        return stacked_rules("in_proj", self.in_proj, segments) | columns

    def mix(
        self, x: jax.Array, states: dict[str, jax.Array] | None, counts: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As :meth:`RecurrentMixer.mix`; the state is "conv"."""
        before, after, y = (a.astype(x.dtype) for a in apart(self.in_proj, x, self.sizes))
        y, conv = self.conv(before * y, None if states is None else states["conv"], counts)
        return self.out_proj(after * y.astype(x.dtype)), {"conv": conv}


class LFM2Attention(DecoderAttention):
    """Attention, by the names of LFM2's files."""

    o_proj, q_norm, k_norm = alias("out_proj"), alias("q_layernorm"), alias("k_layernorm")

    def sharding_rules(self) -> dict[str, Any]:
        """Those of other decoders, for ``out_proj``."""
        rules = super().sharding_rules().items()
        return {name.replace("o_proj", "out_proj"): rule for name, rule in rules}


class LFM2Layer(DecoderLayer):
    """A layer with a convolution (``conv``) or attention (``self_attn``), by the names of LFM2's files."""

    attention_class: ClassVar[Any] = LFM2Attention
    mlp, input_layernorm = alias("feed_forward"), alias("operator_norm")
    post_attention_layernorm = alias("ffn_norm")

    def make_mixer(self, config: Any, number: int, dtype: DType) -> None:
        """Makes ``conv`` or ``self_attn``."""
        self.convolves = config.convolves[number]
        if self.convolves:
            self.conv = ShortConv(config, dtype)
        else:
            super().make_mixer(config, number, dtype)

    def mixed(
        self, x: jax.Array, step: Step, cached: Cached, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """The result of either."""
        return (self.conv if self.convolves else self.self_attn)(x, step, cached, layer)

    def make_mlp(self, config: DecoderConfig, number: int, dtype: DType) -> GatedMLP:
        """``w2(silu(w1(x)) · w3(x))``."""
        sizes = config.hidden_size, config.intermediate_size
        return GatedMLP(("w1", "w3", "w2"), *sizes, dtype, config.hidden_act)


class LFM2Model(DecoderModel):
    """The model without its head, whose files call the last norm ``embedding_norm``."""

    norm = alias("embedding_norm")


class LFM2(Decoder):
    """An LFM2 language model.

    Example:
        >>> config = LFM2Config(100, 8, 16, num_layers=3, num_heads=2, convolves=(True, False, True))
        >>> cache = LFM2(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, cache.more["conv"].arrays["conv"].shape
        (1, (2, 1, 2, 8))
    """

    layer_class: ClassVar[Any] = LFM2Layer
    model_class: ClassVar[Any] = LFM2Model


def _read(given: Settings, tensors: Any, config: Config) -> Config:
    """The kinds of the layers, from their tensors."""
    layers = range(config["num_hidden_layers"])
    convolves = [f"blk.{i}.shortconv.conv.weight" in tensors for i in layers]
    return {
        "layer_types": ["conv" if one else "full_attention" for one in convolves],
        "conv_bias": "blk.0.shortconv.in_proj.bias" in tensors,
    }


def _write(config: LFM2Config) -> dict[str, Any]:
    """The number of KV heads of each layer, which is 0 where there is a convolution."""
    counts = [0 if one else config.kv_heads for one in config.convolves]
    return {"attention.head_count_kv": counts}


LFM2_FAMILY = LFM2.family = DecoderFamily(
    model_type=LFM2Config.model_type,
    architectures=("Lfm2ForCausalLM", "Lfm2Model"),
    config=LFM2Config,
    make=make(LFM2),
    bare=("model.", ("embed_tokens.", "layers.", "embedding_norm.")),
    gguf=GGUFTable(
        "lfm2",
        {
            "output_norm": None, "token_embd_norm": "model.embedding_norm",
            ".attn_norm": "operator_norm", ".ffn_norm": "ffn_norm",
            ".attn_output": "self_attn.out_proj",
            ".attn_q_norm": "self_attn.q_layernorm", ".attn_k_norm": "self_attn.k_layernorm",
            ".ffn_gate": "feed_forward.w1", ".ffn_up": "feed_forward.w3",
            ".ffn_down": "feed_forward.w2", ".shortconv.conv": Rule("conv.conv", Taps()),
            ".shortconv.in_proj": "conv.in_proj", ".shortconv.out_proj": "conv.out_proj",
        },
        keys={"shortconv.l_cache": "conv_L_cache"},
        fixed={"block_auto_adjust_ff_dim": False, "hidden_act": "silu"},
        read=_read, write=_write, biases=(), computed=("intermediate_size", "block_auto_adjust_ff_dim"),
        epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
    ),
)  # fmt: skip
