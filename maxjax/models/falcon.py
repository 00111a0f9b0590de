"""Falcon (7B, 40B, 180B, and Falcon 2): attention beside the MLP, and one or few KV heads.

Source: arXiv:2311.16867; transformers' ``modeling_falcon``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..dtype import DType
from ..errors import UnsupportedModelError
from .config import setting
from .decoder.block import DecoderLayer, ParallelLayer
from .decoder.config import DecoderConfig, own
from .decoder.grouped import GroupedParts
from .decoder.model import Decoder, DecoderModel
from .family import Family
from .gguf.architectures.gpt_neox import FALCON_GGUF
from .names import ROPE_TABLES, Headless, Names, Row
from .parts.aliases import alias


@dataclass(frozen=True)
class FalconConfig(DecoderConfig):
    """The settings of a Falcon.

    Attributes:
        intermediate_size: inner features of the MLP; ``4 · hidden_size`` by default.
        bias: whether the linear layers of attention and MLP have biases.
        new_decoder_architecture: whether the model is built like the 40B, with grouped KV heads.
        multi_query: whether a model of the old architecture has one KV head.
        parallel_attn: whether attention and MLP are in parallel in the old architecture.
        num_ln_in_parallel_attn: number of norms in a layer of the new architecture.
    """

    model_type = "falcon"

    intermediate_size: int | None = setting("ffn_hidden_size", default=None, minimum=1, held="axis")  # type: ignore[assignment]
    num_hidden_layers: int = setting(
        default=32, minimum=1, maximum=1000, held="layers", also=("n_layer",)
    )
    num_attention_heads: int = setting(default=71, minimum=1, held="axis", also=("n_head",))
    num_key_value_heads: int | None = setting(
        "num_kv_heads", default=None, minimum=1, held="axis", also=("n_head_kv",)
    )
    head_dim: int | None = own(None)
    rms_norm_eps: float = setting("layer_norm_epsilon", default=1e-5)
    hidden_act: str = setting("activation", default="gelu")
    tie_word_embeddings: bool = setting(default=True)
    attention_bias: bool = setting("bias", default=False)
    mlp_bias: bool = setting("bias", default=False)
    sliding_window: int | None = own(None)
    norm: str = own("layer")
    new_decoder_architecture: bool = setting(default=False)
    multi_query: bool = setting(default=True)
    parallel_attn: bool = setting(default=True)
    num_ln_in_parallel_attn: int = setting(default=2, minimum=1, maximum=2, held="axis")

    def __post_init__(self) -> None:
        if not self.new_decoder_architecture:
            object.__setattr__(
                self, "num_key_value_heads", 1 if self.multi_query else self.num_attention_heads
            )
        super().__post_init__()

    def spelled(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Without the number of norms in a model of the old architecture, which transformers would follow."""
        key = "num_ln_in_parallel_attn"
        drops = not self.new_decoder_architecture and raw.get(key) == 2
        return {name: value for name, value in raw.items() if not (drops and name == key)}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses a Falcon-RW; no value is derived.

        Raises:
            UnsupportedModelError: the model has ALiBi instead of RoPE.
        """
        if raw.get("alibi"):
            raise UnsupportedModelError("'alibi' of a Falcon, a bias of scores in place of RoPE")
        return {}


class _FalconParts(GroupedParts):
    """Mixin with the attribute names that all kinds of layers have in Falcon's files."""

    self_attn = alias("self_attention")


class FalconLayer(_FalconParts, DecoderLayer):
    """A layer with the MLP after attention."""


class FalconParallelLayer(_FalconParts, ParallelLayer):
    """A layer with the MLP beside attention, after one norm (7B, Falcon 2)."""


class FalconTwoNormLayer(_FalconParts, ParallelLayer):
    """A layer with the MLP beside attention, each after a norm of its own (40B, 180B)."""

    norms: ClassVar[int] = 2
    input_layernorm, post_attention_layernorm = alias("ln_attn"), alias("ln_mlp")


def layer(config: FalconConfig, number: int, dtype: DType) -> DecoderLayer:
    """Makes a layer of the kind that the configuration has."""
    if config.new_decoder_architecture:
        two = config.num_ln_in_parallel_attn == 2
        return (FalconTwoNormLayer if two else FalconParallelLayer)(config, number, dtype)
    return (FalconParallelLayer if config.parallel_attn else FalconLayer)(config, number, dtype)


class FalconModel(DecoderModel):
    """The model without its head."""

    embed_tokens, layers, norm = alias("word_embeddings"), alias("h"), alias("ln_f")


class Falcon(Decoder):
    """A Falcon language model.

    Example:
        >>> config = FalconConfig(100, 32, num_hidden_layers=1, num_attention_heads=4)
        >>> Falcon(config).raw_state_dict()["transformer.h.0.self_attention.query_key_value.weight"].shape
        [Dim(48), Dim(32)]
    """

    layer_class: ClassVar[Any] = staticmethod(layer)
    model_class: ClassVar[Any] = FalconModel
    model = alias("transformer")


class OneNorm(Row):
    """GGUF files have one name for the MLP's norm and for the norm of both parts: drops what the layers do not have."""

    def split(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`Row`."""
        both = any(".ln_attn." in name for name in tensors)
        if any(".input_layernorm." in n for n in tensors) and any(".ln_mlp." in n for n in tensors):
            left = ".input_layernorm." if both else ".ln_mlp."
            return {name: value for name, value in tensors.items() if left not in name}
        return tensors


FALCON = Falcon.family = Family.of(
    Falcon,
    FalconConfig,
    names=Names(
        OneNorm(), ROPE_TABLES, Headless("transformer.", ("word_embeddings.", "h.", "ln_f."))
    ),
    tied=("lm_head.weight", "transformer.word_embeddings.weight"),
    gguf=FALCON_GGUF,
)
