"""Falcon-H1: attention and Mamba 2 beside each other in every layer, with factors throughout.

Source: arXiv:2507.22448; transformers' ``modeling_falcon_h1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType
from ..graph.device import DeviceRef
from ..nn.kv_cache.kinds import KeysValues, Shared, States
from ..nn.linear import MLP, gated, linears
from .config import setting
from .decoder.attention import Cached, DecoderAttention, Step
from .decoder.block import DecoderLayer
from .decoder.config import DecoderConfig, factors_of, own
from .decoder.mamba2 import Mamba2Mixer, Mamba2Parts, Mamba2Settings, head_dim_of, limits_of
from .decoder.model import Decoder, DecoderFamily, DecoderModel
from .decoder.norm import norm
from .gguf.architectures.mamba2 import FALCON_H1_GGUF
from .parts.aliases import alias


@dataclass(frozen=True)
class FalconH1Config(Mamba2Parts):
    """The settings of a Falcon-H1.

    Attributes:
        key_multiplier, attention_in_multiplier, attention_out_multiplier: factors of the keys, and of
            the inputs and results of attention.
        ssm_in_multiplier, ssm_out_multiplier: factors of the inputs and results of Mamba 2.
        ssm_multipliers: factors of Mamba 2's gates, inputs, b, c and time steps.
        mlp_multipliers: factors of the MLP's gates and results.
    """

    model_type = "falcon_h1"
    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8}

    rms_norm_eps: float = setting(default=1e-5)
    max_position_embeddings: int = setting(default=8192, minimum=1)
    embedding_scale: float = setting("embedding_multiplier", default=1.0)
    logit_scale: float = setting("lm_head_multiplier", default=1.0)
    key_multiplier: float = setting(default=1.0)
    attention_in_multiplier: float = setting(default=1.0)
    attention_out_multiplier: float = setting(default=1.0)
    ssm_in_multiplier: float = setting(default=1.0)
    ssm_out_multiplier: float = setting(default=1.0)
    mamba_d_head: int = setting(default=8, minimum=1, held="axis")
    mamba_rms_norm: bool = setting(default=False)
    mamba_norm_before_gate: bool = setting(default=True)
    projectors_bias: bool = setting(default=False)
    ssm_multipliers: tuple = own((1.0,) * 5)
    mlp_multipliers: tuple = own((1.0,) * 2)

    def make_mamba(self) -> Mamba2Settings:
        """The settings of the mixer, whose norm and output bias have settings of their own."""
        place = "before" if self.mamba_norm_before_gate else "after"
        place = place if self.mamba_rms_norm else "none"
        return replace(super().make_mamba(), norm=place, out_bias=self.projectors_bias)

    def states(self, number: int) -> Mapping[str, KeysValues | States | Shared]:
        """The keys and values of attention, and the states of Mamba 2."""
        return {**super().states(number), Mamba2Mixer.group: Mamba2Mixer.kept(self)}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The heads of Mamba 2, and the lists of factors."""
        inner = raw.get("mamba_d_ssm", 1024)
        if inner is not None and (type(inner) is not int or inner < 1):
            raise ValueError("'mamba_d_ssm' is not a positive integer")
        return {
            "mamba_d_head": head_dim_of(raw, 128, inner), "time_steps": limits_of(raw),
            "ssm_multipliers": factors_of(raw, "ssm_multipliers", 5),
            "mlp_multipliers": factors_of(raw, "mlp_multipliers", 2), "sliding_window": None,
        }  # fmt: skip


class FalconH1Mixer(Mamba2Mixer):
    """Mamba 2 with a factor for each part of the input projection's result."""

    def __init__(self, config: FalconH1Config, dtype: DType):
        super().__init__(config, dtype)
        self.factor, self.factors = config.ssm_in_multiplier, config.ssm_multipliers

    def project(self, x: jax.Array) -> jax.Array:
        """As :meth:`Mamba2Mixer.project`, times the factors."""
        of = self.settings
        group = of.groups * of.state_size
        counts = (of.inner, of.inner, group, group, of.heads)
        factors = np.repeat(np.array(self.factors, np.float32), counts)[None, None]
        y = super().project(x * jnp.asarray(self.factor, x.dtype))
        return y * jnp.asarray(factors, y.dtype)


class FalconH1Attention(DecoderAttention):
    """Attention whose keys are multiplied by a factor."""

    def __init__(self, config: FalconH1Config, slides: bool, dtype: DType):
        super().__init__(config, slides, dtype)
        self.factor = config.key_multiplier

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """As :meth:`DecoderAttention.project`, with the factor of the keys."""
        q, k, v = super().project(x)
        return [q, k * jnp.asarray(self.factor, k.dtype), v]


class FalconH1MLP(MLP):
    """An MLP whose gates and results are multiplied by factors."""

    def __init__(self, config: FalconH1Config, dtype: DType):
        super().__init__(
            dtype, None, config.hidden_size, config.intermediate_size, [DeviceRef.CPU()],
            has_bias=config.mlp_bias, activation_function=config.hidden_act,
        )  # fmt: skip
        self.factors = config.mlp_multipliers

    def __call__(self, x: Any) -> Any:
        """``[..., E]`` → the same shape."""
        gate, up = linears([self.gate_proj, self.up_proj], x)
        h = gated(gate * self.factors[0], up, self.activation_function, 0.0)
        return self.down_proj(h) * self.factors[1]


class FalconH1Layer(DecoderLayer):
    """``h = x + mamba(norm(x)) + attention(norm(x))``, then ``h + mlp(norm(h))``, with factors."""

    attention_class: ClassVar[Any] = FalconH1Attention
    mlp = alias("feed_forward")

    def make_mixer(self, config: Any, number: int, dtype: DType) -> None:
        """Makes attention and Mamba 2."""
        super().make_mixer(config, number, dtype)
        self.mamba = FalconH1Mixer(config, dtype)
        self.factors = (
            config.attention_in_multiplier, config.attention_out_multiplier,
            config.ssm_out_multiplier,
        )  # fmt: skip

    def make_mlp(self, config: Any, number: int, dtype: DType) -> FalconH1MLP:
        """The MLP."""
        return FalconH1MLP(config, dtype)

    def make_norms(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes the norm before attention and Mamba 2, and the norm before the MLP."""
        self.input_layernorm, self.pre_ff_layernorm = norm(config, dtype), norm(config, dtype)

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = carry
        h = self.input_layernorm(x)
        before, after, factor = (jnp.asarray(one, x.dtype) for one in self.factors)
        y, cached = self.mamba(h, step, cached, layer)
        z, cached = self.self_attn(h * before, step, cached, layer)
        x = self.added(x, y * factor + z * after)
        return self.added(x, self.mlp(self.pre_ff_layernorm(x))), cached


class FalconH1Model(DecoderModel):
    """The model without its head, whose files call the last norm ``final_layernorm``."""

    norm = alias("final_layernorm")


class FalconH1(Decoder):
    """A Falcon-H1 language model.

    Example:
        >>> config = FalconH1Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, mamba_n_heads=4,
        ...     mamba_d_head=4, mamba_d_state=6)
        >>> cache = FalconH1(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, cache.more["mamba"].arrays["ssm"].shape
        (2, (2, 1, 4, 4, 6))
    """

    layer_class: ClassVar[Any] = FalconH1Layer
    model_class: ClassVar[Any] = FalconH1Model


FALCON_H1 = FalconH1.family = DecoderFamily.of(
    FalconH1, FalconH1Config,
    bare=("model.", ("embed_tokens.", "layers.", "final_layernorm.")),
    gguf=FALCON_H1_GGUF,
)  # fmt: skip
