"""Gemma 3n (text): several hidden states (AltUp, arXiv:2301.13310), learned residuals (LAuReL,
arXiv:2411.07501), per-layer embeddings, and layers that share keys and values.

Shapes: A hidden states of B sequences with T tokens and hidden size E, of which a layer computes one.

Source: transformers' ``modeling_gemma3n``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..nn.layer import LayerList
from ..nn.linear import Linear
from .config import setting
from .decoder.altup import AltUp, Laurel, sized
from .decoder.attention import Cached, Step
from .decoder.block import TopMLP
from .decoder.config import own
from .decoder.model import DecoderFamily
from .gemma_sharing import (
    BARE_OF_LAYERS,
    SharingConfig,
    SharingDecoder,
    SharingLayer,
    SharingModel,
)  # fmt: skip
from .gguf.architectures.gemma import GEMMA3N_GGUF
from .multimodal import SIGHT


@dataclass(frozen=True)
class Gemma3nConfig(SharingConfig):
    """The settings of a Gemma 3n's text model.

    Attributes:
        altup_num_inputs, altup_active_idx: A, and the index of the hidden state that layers compute.
        altup_correct_scale: whether that state is multiplied by weights before it gates the per-layer input.
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
        sizes = self.sizes or (self.intermediate_size,) * self.num_hidden_layers
        # transformers' default: the first ten layers of models that have more.
        few = 10 if self.num_hidden_layers > 10 else 0
        sparsity = self.sparsity or (0.95,) * few + (0.0,) * (self.num_hidden_layers - few)
        for key, name, values in (
            ("intermediate_size", "sizes", sizes),
            ("activation_sparsity_pattern", "sparsity", sparsity),
        ):
            if len(values) != self.num_hidden_layers:
                raise ValueError(
                    f"{key!r} has {len(values)} entries for {self.num_hidden_layers} layers"
                )
            object.__setattr__(self, name, tuple(values))
        if not 0 <= self.altup_active_idx < self.altup_num_inputs:
            raise ValueError(
                f"'altup_active_idx' {self.altup_active_idx} is none of {self.altup_num_inputs} states"
            )

    def of_layer(self, number: int) -> Self:
        """The settings of layer ``number``, with the inner size of its MLP."""
        return dataclasses.replace(super().of_layer(number), intermediate_size=self.sizes[number])

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The inner sizes and sparsities of single layers."""
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


class Gemma3nLayer(SharingLayer):
    """A layer that computes one of A hidden states, and predicts and corrects the others."""

    def __init__(self, config: Any, number: int, dtype: DType):
        super().__init__(config, number, dtype)
        self.altup, self.laurel = AltUp(config, dtype), Laurel(config, dtype)

    def make_mlp(self, config: Any, number: int, dtype: DType) -> Any:
        """The layer's MLP; in layers with a sparsity, one that keeps only the largest inner features."""
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
            from the first one, and that map them back.
    """

    def __init__(self, config: Any, dtype: DType, layer_class: Any):
        super().__init__(config, dtype, layer_class)
        size, others = config.hidden_size, range(config.altup_num_inputs - 1)
        made = lambda: LayerList(Linear(size, size, dtype, DeviceRef.CPU()) for _ in others)
        self.altup_projections, self.altup_unembed_projections = made(), made()

    def run_layers(self, x: jax.Array, step: Step, cached: Cached) -> tuple[jax.Array, Cached]:
        """Expands the hidden state to A states, runs all layers, and averages the states to one."""
        states = jnp.stack([x, *(sized(p(x), x) for p in self.altup_projections)])
        states, cached = super().run_layers(states, step, cached)
        first, *rest = states
        back = zip(self.altup_unembed_projections, rest, strict=True)
        found = jnp.stack([first, *(sized(p(one), first) for p, one in back)])
        return jnp.mean(found, axis=0), cached


class Gemma3n(SharingDecoder):
    """The text model of a Gemma 3n.

    Example:
        >>> config = Gemma3nConfig(100, 8, 16, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
        ...     head_dim=4, hidden_size_per_layer_input=4, vocab_size_per_layer_input=100, laurel_rank=2,
        ...     num_kv_shared_layers=2, slides=(True, True, False) * 2, sliding_window=8)
        >>> Gemma3n(config).cache(batch=1, capacity=16).more["shared"].layers
        1
    """

    layer_class: ClassVar[Any] = Gemma3nLayer
    model_class: ClassVar[Any] = Gemma3nModel


GEMMA3N = Gemma3n.family = DecoderFamily.of(
    Gemma3n, Gemma3nConfig, "Gemma3nForCausalLM", "Gemma3nTextModel", sight=SIGHT, gguf=GEMMA3N_GGUF,
    bare=BARE_OF_LAYERS,
)  # fmt: skip
