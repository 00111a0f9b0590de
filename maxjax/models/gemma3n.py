"""Gemma 3n (text): several hidden states side by side (AltUp), learned residuals (LAuReL), embeddings
of each layer, and keys and values that layers share.

Shapes: A hidden states of B sequences with T tokens and hidden size E, of which a layer computes one.

Sources: AltUp, arXiv:2301.13310; LAuReL, arXiv:2411.07501; transformers' ``modeling_gemma3n``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.specs import Split
from ..graph.placement.strategy import ShardingStrategy
from ..graph.weight.weight import Weight
from ..nn.activation import activation
from ..nn.layer import LayerList, Module
from ..nn.linear import MLP, Linear, linears
from .config import setting
from .decoder.attention import Cached, Step
from .decoder.config import own
from .decoder.model import DecoderFamily
from .decoder.norm import norm
from .gemma_sharing import SharingConfig, SharingDecoder, SharingLayer, SharingModel
from .gguf.architectures.gemma import GEMMA3N_GGUF
from .multimodal import SIGHT

# The least mean square of a hidden state that is brought to the size of another.
_LEAST = 1e-5


@dataclass(frozen=True)
class Gemma3nConfig(SharingConfig):
    """The settings of a Gemma 3n's text model.

    Attributes:
        altup_num_inputs, altup_active_idx: A, and the number of the hidden state that layers compute.
        altup_correct_scale: whether that state is multiplied by weights before it meets the layer's input.
        laurel_rank: rank of the learned residual.
        sizes: inner size of each layer's MLP; by default all have ``intermediate_size``.
        sparsity: share of the inner features of each layer's MLP that are set to zero.
    """

    model_type = "gemma3n_text"
    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2}
    may_see_both_ways: ClassVar[bool] = False

    use_bidirectional_attention: bool = own(False)
    max_position_embeddings: int = setting(default=32_768, minimum=1)
    sliding_window: int | None = setting(default=512, minimum=1)
    sliding_window_pattern: int = own(5)
    num_kv_shared_layers: int = setting(default=15, held="layers")
    logit_soft_cap: float | None = setting("final_logit_softcapping", default=30.0, minimum=1e-3)
    altup_num_inputs: int = setting(default=4, minimum=1, held="axis")
    altup_active_idx: int = setting(default=0, held="axis")
    altup_correct_scale: bool = setting(default=True)
    laurel_rank: int = setting(default=64, minimum=1, held="axis")
    sizes: tuple = own(())
    sparsity: tuple = own(())

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.sizes or (self.intermediate_size,) * self.num_layers
        # transformers' default: ten layers of larger models.
        few = 10 if self.num_layers > 10 else 0
        sparsity = self.sparsity or (0.95,) * few + (0.0,) * (self.num_layers - few)
        for key, name, values in (
            ("intermediate_size", "sizes", sizes),
            ("activation_sparsity_pattern", "sparsity", sparsity),
        ):
            if len(values) != self.num_layers:
                raise ValueError(f"{key!r} has {len(values)} entries for {self.num_layers} layers")
            object.__setattr__(self, name, tuple(values))
        if not 0 <= self.altup_active_idx < self.altup_num_inputs:
            raise ValueError(
                f"'altup_active_idx' {self.altup_active_idx} is none of {self.altup_num_inputs} states"
            )

    def of_layer(self, number: int) -> Self:
        """The settings of a layer: the inner size of its MLP."""
        return dataclasses.replace(super().of_layer(number), intermediate_size=self.sizes[number])

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes of single layers."""
        found = super().derived(raw)
        sizes, sparsity = raw.get("intermediate_size"), raw.get("activation_sparsity_pattern")
        if isinstance(sizes, list):
            if not sizes or not all(type(n) is int and 0 < n < 2**31 for n in sizes):
                raise ValueError("'intermediate_size' is not a list of positive integers")
            found |= {"intermediate_size": sizes[0], "sizes": tuple(sizes)}
        if isinstance(sparsity, list):
            if not all(type(n) in (int, float) and 0 <= n < 1 for n in sparsity):
                raise ValueError("'activation_sparsity_pattern' is not a list of shares")
            found["sparsity"] = tuple(map(float, sparsity))
        elif sparsity is not None:
            raise ValueError("'activation_sparsity_pattern' is not a list of shares")
        return found


class Laurel(Module):
    """A learned residual of low rank: ``x + norm(right(left(x)))``."""

    def __init__(self, config: Any, dtype: DType):
        super().__init__()
        size, rank, cpu = config.hidden_size, config.laurel_rank, DeviceRef.CPU()
        self.linear_left = Linear(size, rank, dtype, cpu)
        self.linear_right = Linear(rank, size, dtype, cpu)
        self.post_laurel_norm = norm(config, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        y = self.linear_right(self.linear_left(x).astype(x.dtype)).astype(x.dtype)
        return x + self.post_laurel_norm(y)


class AltUp(Module):
    """Alternating updates: all hidden states are predicted from each other, and then corrected by
    the difference between the one that a layer has computed and its prediction."""

    def __init__(self, config: Any, dtype: DType):
        super().__init__()
        self.count, self.active = config.altup_num_inputs, config.altup_active_idx
        size, cpu = config.hidden_size, DeviceRef.CPU()
        self.scales, self.size = config.altup_correct_scale, size
        self.correct_output_scale = Weight("correct_output_scale", dtype, (size,), cpu)
        self.correction_coefs = Linear(self.count, self.count, dtype, cpu)
        self.prediction_coefs = Linear(self.count, self.count**2, dtype, cpu)
        self.modality_router = Linear(size, self.count, dtype, cpu)
        self.router_norm = norm(config, dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the weights, which are small."""
        whole = Split(ShardingStrategy.replicate(1))
        names = ("correction_coefs", "prediction_coefs", "modality_router")
        return dict.fromkeys(("correct_output_scale", *(f"{n}.weight" for n in names)), whole)

    def _modalities(self, x: jax.Array) -> jax.Array:
        routed = self.modality_router(self.router_norm(x) * jnp.asarray(1 / self.size, x.dtype))
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)  # [..., A]

    def __call__(self, states: jax.Array) -> jax.Array:
        """``[A, ..., E]`` → predictions of the same shape."""
        found = self.prediction_coefs(self._modalities(states[self.active])).astype(states.dtype)
        found = found.reshape(*found.shape[:-1], self.count, self.count)
        return states + jnp.einsum("i...e,...ji->j...e", states, found).astype(states.dtype)

    def correct(self, predictions: jax.Array, computed: jax.Array) -> jax.Array:
        """Predictions ``[A, ..., E]`` and what the layer has computed ``[..., E]`` → hidden states."""
        change = computed - predictions[self.active]
        shares = self.correction_coefs(self._modalities(computed)).astype(computed.dtype) + 1
        return predictions + jnp.moveaxis(shares, -1, 0)[..., None] * change[None]

    def scaled(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` times weights, if the model has them."""
        if not self.scales:
            return x
        weight = jnp.asarray(self.correct_output_scale).astype(x.dtype)
        return x * weight.reshape((1,) * (x.ndim - 1) + (-1,))


class TopMLP(MLP):
    """A gated MLP of which only the largest inner features count, those beyond a normal distribution's share.

    Attributes:
        deviations: how many standard deviations above the mean a feature must be.
    """

    def __init__(self, config: Any, share: float, dtype: DType):
        super().__init__(
            dtype, None, config.hidden_size, config.intermediate_size, [DeviceRef.CPU()],
            activation_function=config.hidden_act,
        )  # fmt: skip
        self.deviations, self.act = statistics.NormalDist().inv_cdf(share), config.hidden_act

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        gate, up = (y.astype(x.dtype) for y in linears([self.gate_proj, self.up_proj], x))
        mean = jnp.mean(gate, axis=-1, keepdims=True)
        deviation = jnp.std(gate, axis=-1, keepdims=True)
        gate = jax.nn.relu(gate - (mean + deviation * jnp.asarray(self.deviations, gate.dtype)))
        return self.down_proj(activation(self.act)(gate) * up)


class Gemma3nLayer(SharingLayer):
    """A layer that computes one of A hidden states, and predicts and corrects the others."""

    def __init__(self, config: Any, number: int, dtype: DType):
        super().__init__(config, number, dtype)
        self.altup, self.laurel = AltUp(config, dtype), Laurel(config, dtype)

    def make_mlp(self, config: Any, number: int, dtype: DType) -> Any:
        """An MLP, of which some layers use the largest inner features only."""
        share = config.sparsity[number]
        return TopMLP(config, share, dtype) if share else super().make_mlp(config, number, dtype)

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[A, B, T, E]`` or ``[A, B, E]``, the cache) → the same."""
        states, cached = carry
        predictions = self.altup(states)
        x = predictions[self.altup.active]
        h = self.input_layernorm(x)
        y, cached = self.mixed(h, step._replace(inputs=None), cached, layer)
        x = x + self.post_attention_layernorm(y)
        x = (x + self.laurel(h)) * jnp.asarray(2**-0.5, x.dtype)
        y = self.post_feedforward_layernorm(self.fed(x))
        states = self.altup.correct(predictions, x + y)
        y = self.own_input(self.altup.scaled(states[self.altup.active]), step, layer)
        others = jnp.arange(states.shape[0]) > 0
        others = others.reshape(-1, *(1,) * (states.ndim - 1))
        return states + jnp.where(others, y[None], 0).astype(states.dtype), cached


class Gemma3nModel(SharingModel):
    """Embeddings, layers over A hidden states, and the norm of their mean.

    Attributes:
        altup_projections, altup_unembed_projections: linear layers that make the other hidden states
            from the first, and bring them back.
    """

    def __init__(self, config: Any, dtype: DType, layer_class: Any):
        super().__init__(config, dtype, layer_class)
        size, others = config.hidden_size, range(config.altup_num_inputs - 1)
        made = lambda: LayerList(Linear(size, size, dtype, DeviceRef.CPU()) for _ in others)
        self.altup_projections, self.altup_unembed_projections = made(), made()

    def run_layers(self, x: jax.Array, step: Step, cached: Cached) -> tuple[jax.Array, Cached]:
        """All layers, over hidden states that are made from one and become one."""
        states = jnp.stack([x, *(_sized(p(x), x) for p in self.altup_projections)])
        states, cached = super().run_layers(states, step, cached)
        first, *rest = states
        back = zip(self.altup_unembed_projections, rest, strict=True)
        found = jnp.stack([first, *(_sized(p(one), first) for p, one in back)])
        return jnp.mean(found, axis=0), cached


def _sized(x: jax.Array, like: jax.Array) -> jax.Array:
    """Vectors ``[..., E]`` with the root mean square of others."""
    x = x.astype(like.dtype)
    wanted = jnp.sqrt(jnp.mean(like**2, axis=-1, keepdims=True))
    return x * wanted / jnp.sqrt(jnp.maximum(jnp.mean(x**2, axis=-1, keepdims=True), _LEAST))


class Gemma3n(SharingDecoder):
    """The text model of a Gemma 3n.

    Example:
        >>> config = Gemma3nConfig(100, 8, 16, num_layers=6, num_heads=2, num_kv_heads=1, head_dim=4,
        ...     hidden_size_per_layer_input=4, vocab_size_per_layer_input=100, laurel_rank=2,
        ...     num_kv_shared_layers=2, slides=(True, True, False) * 2, sliding_window=8)
        >>> Gemma3n(config).cache(batch=1, capacity=16).more["shared"].layers
        1
    """

    layer_class: ClassVar[Any] = Gemma3nLayer
    model_class: ClassVar[Any] = Gemma3nModel


GEMMA3N = Gemma3n.family = DecoderFamily.of(
    Gemma3n, Gemma3nConfig, "Gemma3nForCausalLM", "Gemma3nTextModel", sight=SIGHT, gguf=GEMMA3N_GGUF
)
