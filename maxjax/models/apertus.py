"""Apertus: an MLP without a gate, with the learned activation function xIELU; norms of queries and keys.

Sources: arXiv:2509.14233, for xIELU arXiv:2411.13010; transformers' ``modeling_apertus``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from ..nn.layer import Module
from .config import setting
from .decoder.block import DecoderLayer, PlainMLP
from .decoder.config import DecoderConfig, own
from .decoder.model import Decoder
from .family import Family
from .gguf.architectures.apertus import APERTUS_GGUF
from .names import DECODER, Names
from .parts.aliases import alias
from .parts.rotary import Rope

# The learned numbers of xIELU: shapes and initial values.
_NUMBERS = {
    "alpha_p": ((1,), math.log(math.expm1(0.8))), "alpha_n": ((1,), math.log(math.expm1(0.3))),
    "beta": ((), 0.5), "eps": ((), -1e-6),
}  # fmt: skip


@dataclass(frozen=True)
class ApertusConfig(DecoderConfig):
    """The settings of an Apertus."""

    model_type = "apertus"
    unsaid_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip

    max_position_embeddings: int = setting(default=65536, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)
    hidden_act: str = own("linear")  # xIELU has its own layer
    mlp_bias: bool = own(False)
    sliding_window: int | None = own(None)
    qk_norm: bool | str = own(True)
    rope: Rope = own(Rope(12e6))

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Checks the settings; no value is derived.

        Raises:
            UnsupportedModelError: the activation function is not xIELU, or the norms are elsewhere.
        """
        if raw.get("qk_norm") is False or raw.get("post_norm"):
            raise UnsupportedModelError("'qk_norm' false, or 'post_norm' true, of an Apertus")
        if (given := raw.get("hidden_act", "xielu")) != "xielu":
            raise UnsupportedModelError(f"'hidden_act' {str(given)[:60]!r} of an Apertus")
        return {}


class XIELU(Module):
    """``α₊ x² + β x`` where x is positive, ``α₋ (exp(min(x, ε)) - 1 - x) + β x`` elsewhere.

    ``α₊ = softplus(alpha_p)`` and ``α₋ = β + softplus(alpha_n)``.

    Attributes:
        alpha_p, alpha_n: Weights ``[1]``.
        beta, eps: Weights ``[]``.

    Example:
        >>> act = XIELU(DType.float32)
        >>> values = {"alpha_p": [1.0], "alpha_n": [0.0], "beta": 0.5, "eps": -1e-6}
        >>> _ = act.load_state_dict({name: jnp.asarray(value) for name, value in values.items()})
        >>> print(act(jnp.array([-1.0, 2.0])))
        [-0.06106567  6.253047  ]
    """

    def __init__(self, dtype: DType):
        super().__init__()
        for name, (shape, _) in _NUMBERS.items():
            setattr(self, name, Weight(name, dtype, shape, DeviceRef.CPU()))

    def initializer(self, name: str) -> Any:
        """Initialises a number to its value in a new model."""
        return jax.nn.initializers.constant(_NUMBERS[name][1])

    def __call__(self, x: jax.Array) -> jax.Array:
        """An array of any shape → the same shape and dtype; computed in float32."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        each = (jnp.asarray(getattr(self, name)).reshape(()) for name in _NUMBERS)
        p, n, beta, eps = (number.astype(wide.dtype) for number in each)
        above = jax.nn.softplus(p) * wide * wide
        below = (jnp.expm1(jnp.minimum(wide, eps)) - wide) * (beta + jax.nn.softplus(n))
        return (jnp.where(wide > 0, above, below) + beta * wide).astype(x.dtype)


class ApertusMLP(PlainMLP):
    """``down_proj(xielu(up_proj(x)))``."""

    def __init__(self, config: DecoderConfig, dtype: DType):
        names = ("up_proj", "down_proj")
        super().__init__(names, config.hidden_size, config.intermediate_size, dtype)
        self.act_fn = XIELU(dtype)

    def activated(self, x: jax.Array) -> jax.Array:
        """Applies xIELU."""
        return self.act_fn(x)


class ApertusLayer(DecoderLayer):
    """A layer whose norms are named after what follows them: attention and feed-forward."""

    input_layernorm = alias("attention_layernorm")
    post_attention_layernorm = alias("feedforward_layernorm")

    def make_mlp(self, config: DecoderConfig, number: int, dtype: DType) -> ApertusMLP:
        """The layer's MLP."""
        return ApertusMLP(config, dtype)


class Apertus(Decoder):
    """An Apertus language model.

    Example:
        >>> model = Apertus(ApertusConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "act_fn" in name][:2]
        ['model.layers.0.mlp.act_fn.alpha_p', 'model.layers.0.mlp.act_fn.alpha_n']
    """

    layer_class: ClassVar[Any] = ApertusLayer


APERTUS = Apertus.family = Family.of(
    Apertus, ApertusConfig, names=Names(*DECODER), gguf=APERTUS_GGUF
)
