"""Llama 4, the text model: experts beside an MLP, and attention in chunks.

Three of every four layers have RoPE of neighbouring features, normalised queries and keys, and attention
within a chunk. The fourth has no RoPE, full attention, and queries that are scaled by position.

Source: transformers' ``modeling_llama4``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..nn.linear import MLP
from .config import setting
from .decoder.attention import DecoderAttention
from .decoder.config import count_of, kinds_of, layers_of, own, rotates_of, windowed
from .decoder.experts import MoEConfig, MoELayer, SparseMLP
from .decoder.model import Decoder
from .decoder.norm import unit_rms
from .family import Family
from .fused_experts import FusedExperts
from .gguf.architectures.llama4 import LLAMA4_GGUF
from .names import DECODER, MULTIMODAL, Names
from .parts.aliases import alias
from .parts.rotary import QueryScaling, Rope, read_rope

_CHUNKED = {"full_attention": False, "chunked_attention": True}


@dataclass(frozen=True)
class Llama4Config(MoEConfig):
    """The settings of a Llama 4's text model; ``intermediate_size`` is the inner size of an expert.

    Attributes:
        dense_size: inner features of the MLPs of layers without experts.
        qk_norm_l2: whether queries and keys of layers with RoPE are divided by their root mean square.
    """

    model_type = "llama4_text"
    fixed = {"norm_topk_prob": True}
    layer_names = {"slides": ("chunked_attention", "full_attention")}

    unsaid: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8, "rope_theta": 5e5, "attention_chunk_size": 8192,
    }  # fmt: skip

    head_dim: int | None = setting(default=128, minimum=1, held="axis")
    max_position_embeddings: int = setting(default=131072, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)
    num_experts: int = setting("num_local_experts", default=16, minimum=1, held="axis")
    moe_intermediate_size: int | None = own(None)
    num_experts_per_tok: int = setting(default=1, minimum=1, held="axis")
    dense_size: int = setting("intermediate_size_mlp", default=16384, minimum=1, held="axis")
    qk_norm_l2: bool = setting("use_qk_norm", default=True)
    shared_size: int | None = own(None)
    rope: Rope = own(Rope(5e5, interleaved=True))

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_size", self.intermediate_size)
        super().__post_init__()

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """The RoPE, and the scaling of queries by position in layers without RoPE."""
        found: dict[str, Any] = {"rope": read_rope(raw, context, 5e5, interleaved=True)}
        if raw.get("attn_temperature_tuning") is not False:
            given = {"attn_scale": 0.1, "floor_scale": 8192}
            given |= {key: raw[key] for key in given if raw.get(key) is not None}
            for key, value in given.items():
                if type(value) not in (int, float) or not 0 < value < 1e30:
                    raise ValueError(f"{key!r} is {str(value)[:60]}, not a positive number")
            found["query_scaling"] = QueryScaling(given["attn_scale"], given["floor_scale"], 1.0)
        return found

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with RoPE, with chunks and with experts.

        Raises:
            ValueError: a setting is of the wrong type.
            UnsupportedModelError: ``layer_types`` names another kind of layer.
        """
        count, chunk = layers_of(raw), raw.get("attention_chunk_size")
        rotates = rotates_of(raw)
        slides = [one and chunk is not None for one in kinds_of(raw, _CHUNKED, rotates)]
        listed, step = raw.get("moe_layers"), count_of(raw, "interleave_moe_layer_step", 1)
        listed = list(range(step - 1, count, step)) if listed is None else listed
        if not isinstance(listed, list) or not all(type(i) is int for i in listed):
            raise ValueError("'moe_layers' is not a list of integers")
        return {
            "rotates": rotates, **windowed(slides, chunk),
            "sparse": tuple(i in set(listed) for i in range(count)), "mlp_bias": False,
        }  # fmt: skip


class Llama4Attention(DecoderAttention):
    """Attention in chunks, with normalised queries and keys."""

    chunked = True

    def __init__(self, config: Llama4Config, slides: bool, dtype: DType):
        super().__init__(config, slides, dtype)
        self.magnitude = config.rope.magnitude
        epsilon = config.rms_norm_eps / self.magnitude**2
        self.epsilon: float | None = epsilon if config.qk_norm_l2 else None

    def heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        """Normalises queries and keys before RoPE, and divides out the magnitude by which YaRN scales them."""
        q, k, v = super().heads(q, k, v)
        if self.epsilon is None or self.rope == "none":
            return [q, k, v]
        q, k = (_divided(x, self.epsilon) for x in (q, k))
        if self.magnitude != 1:
            q, k = (x * jnp.asarray(1 / self.magnitude, x.dtype) for x in (q, k))
        return [q, k, v]


def _divided(x: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return unit_rms(wide, epsilon).astype(x.dtype)


class Llama4MLP(SparseMLP):
    """Experts whose inputs are multiplied by sigmoids, and an MLP that every token goes through."""

    router_name: ClassVar[str] = "router"
    route: ClassVar[Mapping[str, Any]] = {"shares": "sigmoid", "on_inputs": True}


class Llama4Layer(MoELayer):
    """A layer of a Llama 4, whose files call the MLP ``feed_forward``."""

    attention_class: ClassVar[Any] = Llama4Attention
    sparse_class: ClassVar[Any] = Llama4MLP
    mlp = alias("feed_forward")

    def __init__(self, config: Llama4Config, number: int, dtype: DType):
        super().__init__(config, number, dtype)
        rotates = not config.rotates or config.rotates[number]
        self.self_attn.scales_queries = not rotates and config.query_scaling is not None

    def make_mlp(self, config: Any, number: int, dtype: DType) -> Any:
        """The mixture of experts, or an MLP with ``dense_size`` inner features."""
        if config.sparse[number]:
            return super().make_mlp(config, number, dtype)
        return MLP(
            dtype, None, config.hidden_size, config.dense_size, [DeviceRef.CPU()],
            activation_function=config.hidden_act,
        )  # fmt: skip


class Llama4(Decoder):
    """A Llama 4 language model.

    Example:
        >>> config = Llama4Config(100, 8, 16, num_hidden_layers=4, num_attention_heads=2, head_dim=4)
        >>> [name for name in Llama4(config).raw_state_dict() if "3.feed_forward.router" in name]
        ['model.layers.3.feed_forward.router.weight']
    """

    layer_class: ClassVar[Any] = Llama4Layer


LLAMA4 = Llama4.family = Family.of(
    Llama4,
    Llama4Config,
    "Llama4ForCausalLM",
    "Llama4TextModel",
    names=Names(
        FusedExperts(
            "feed_forward.experts.#.*.weight",
            gate_up=("feed_forward.experts.gate_up_proj",),
            down=("feed_forward.experts.down_proj",),
            transposed=True,
            written=True,
        ),
        *MULTIMODAL,
        *DECODER,
    ),
    gguf=LLAMA4_GGUF,
)
