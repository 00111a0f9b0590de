"""Gemma 4 (text): wider heads in layers with full attention, per-layer embeddings, shared keys and values,
and in some sizes experts beside the MLP.

Source: transformers' ``modeling_gemma4``.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from .config import setting
from .decoder.attention import Cached, Step
from .decoder.config import layers_of, own
from .decoder.expert_files import MoEFamily, Together
from .decoder.layer_sizes import first_sizes, sizes_of_full
from .decoder.norm import norm
from .decoder.scaled_experts import ExpertsBeside, ScaledExperts
from .gemma_sharing import BARE_OF_LAYERS, SharingConfig, SharingDecoder, SharingLayer
from .gguf.architectures.gemma import GEMMA4_GGUF
from .multimodal import SIGHT
from .names import Rename, Row
from .parts.rotary import both_ropes

# Keys of sizes of layers with full attention: in ``per_layer_config`` → at the top level of older files.
_OWN_SIZES = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


@dataclass(frozen=True)
class Gemma4Config(SharingConfig, ExpertsBeside):
    """The settings of a Gemma 4's text model.

    Attributes:
        global_head_dim, num_global_kv_heads: width and number of the KV heads of layers with full
            attention.
        attention_k_eq_v: whether the values of those layers are their keys before norm and RoPE.
        use_double_wide_mlp: whether MLPs are twice as wide in layers that read another's keys and values.
    """

    model_type = "gemma4_text"
    has_layer_sizes = True
    unsaid: ClassVar[Mapping[str, Any]] = {
        **SharingConfig.unsaid, "vocab_size": 262_144, "num_hidden_layers": 30
    }  # fmt: skip

    sliding_window: int | None = setting(default=512, minimum=1)
    global_head_dim: int = setting(default=512, minimum=1, held="axis")
    num_global_kv_heads: int | None = setting(
        "num_global_key_value_heads", default=None, minimum=1, held="axis"
    )
    attention_k_eq_v: bool = setting(default=False)
    use_double_wide_mlp: bool = setting(default=False)
    may_see_both_ways: ClassVar[bool] = True
    use_bidirectional_attention: bool = own(False)

    @property
    def rope_widths(self) -> tuple[int, int]:
        """The widths of heads in layers with full attention, and in sliding layers."""
        return self.global_head_dim, self.width

    def of_layer(self, number: int) -> Self:
        """The settings of layer ``number``, with its heads and the inner size of its MLP."""
        one = super().of_layer(number)
        if one.shares and self.use_double_wide_mlp:
            one = dataclasses.replace(one, intermediate_size=2 * self.intermediate_size)
        if self.slides[number]:
            return one
        heads = self.num_global_kv_heads if self.attention_k_eq_v else None
        return dataclasses.replace(
            one, head_dim=self.global_head_dim, num_key_value_heads=heads or self.kv_heads
        )

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """The RoPE of each kind of layer."""
        default = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
            },
        }  # fmt: skip
        given = {"rope_parameters": raw.get("rope_parameters") or default}
        return both_ropes(ChainMap(given, raw), context, 1e6, 1e4)  # type: ignore[arg-type]

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes of single layers, as transformers writes them; the last layer has full attention."""
        if raw.get("use_bidirectional_attention") == "all":
            raise UnsupportedModelError("'use_bidirectional_attention' of a gemma4_text")
        found = super().derived(raw)
        slides = found.get("slides") or tuple(bool((i + 1) % 6) for i in range(layers_of(raw)))
        if slides:
            found["slides"] = (*slides[:-1], False)
        return found | sizes_of_full(raw, found.get("slides") or (), _OWN_SIZES)

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """:meth:`ModelConfig.bounded_sizes`, with the sizes of layers with full attention from ``per_layer_config``."""
        raw = super().bounded_sizes(raw)
        return {**raw, **first_sizes(raw, _OWN_SIZES)}


class Gemma4Layer(SharingLayer):
    """A layer of a Gemma 4, whose result is multiplied by a learned number."""

    def __init__(self, config: Any, number: int, dtype: DType):
        super().__init__(config, number, dtype)
        self.layer_scalar = Weight("layer_scalar", dtype, (1,), DeviceRef.CPU())
        self.has_experts = config.has_experts
        if config.has_experts:
            self.moe = ScaledExperts(config, dtype)
            self.post_feedforward_layernorm_1 = norm(config, dtype)
            self.post_feedforward_layernorm_2 = norm(config, dtype)
            self.pre_feedforward_layernorm_2 = norm(config, dtype)

    def fed(self, x: jax.Array) -> jax.Array:
        """The result of the MLP, plus that of the experts beside it, if there are any."""
        y = super().fed(x)
        if not self.has_experts:
            return y
        chosen = self.moe(self.pre_feedforward_layernorm_2(x), scored=x)
        return self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(chosen)

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = super().__call__(carry, step._replace(inputs=None), layer)
        if self.has_input:
            x = x + self.own_input(x, step, layer)
        return x * jnp.asarray(self.layer_scalar).astype(x.dtype)[0], cached


class Gemma4(SharingDecoder):
    """The text model of a Gemma 4.

    Example:
        >>> config = Gemma4Config(100, 8, 16, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
        ...     head_dim=4, global_head_dim=6, hidden_size_per_layer_input=4, vocab_size_per_layer_input=100,
        ...     num_kv_shared_layers=2, slides=(True, True, False) * 2, sliding_window=8)
        >>> cache = Gemma4(config).cache(batch=1, capacity=16)
        >>> [(name, one.keys.shape) for name, one in sorted(cache.states.items())]
        [('full', (1, 1, 1, 16, 6)), ('shared', (1, 1, 1, 16, 4)), ('sliding', (2, 1, 1, 8, 4))]
    """

    layer_class: ClassVar[Any] = Gemma4Layer


# In files, the router and the experts are attributes of the layer itself.
_ROUTER = ("router.proj.weight", "router.scale", "router.per_expert_scale")


class Gemma4Family(MoEFamily):
    """The family of Gemma 4, whose files have the router and the experts in the layer, not in one module."""

    def rows(self) -> list[Row]:
        """See :class:`Family`."""
        router = {f".{name}": f".moe.{name}" for name in _ROUTER}
        return [*super().rows(), Rename(router, written=True)]


GEMMA4 = Gemma4.family = Gemma4Family.of(
    Gemma4, Gemma4Config, "Gemma4ForCausalLM", "Gemma4TextModel",
    experts="moe.experts.#.*.weight",
    bare=BARE_OF_LAYERS,
    together=Together(("experts.gate_up_proj",), ("experts.down_proj",), written=True),
    sight=SIGHT,
    gguf=GEMMA4_GGUF,
)  # fmt: skip
