"""The vision part of LLaVA 1.5: the tower of a CLIP or a SigLIP, and an MLP into the language model.

::

    x = hidden states of the tower after layer -2, without the class token     [N, P, F]
    features = linear_2(gelu(linear_1(x)))                                     [N, P, E]

Source: arXiv:2310.03744.

Shapes: N images, P patches, F features of the tower, E of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...nn.activation import activation
from ...nn.layer import Module
from ...nn.linear import Linear
from ..parts import replicate_over_mesh
from .part import VisionPart, tower_of


class LlavaProjector(Module):
    """The MLP from the tower's features to those of tokens."""

    def __init__(self, raw: Mapping[str, Any], inputs: int, outputs: int, dtype: DType):
        super().__init__()
        has_bias = raw.get("multimodal_projector_bias", True)
        self.act = raw.get("projector_hidden_act", "gelu")
        self.linear_1 = Linear(inputs, outputs, dtype, has_bias=has_bias)
        self.linear_2 = Linear(outputs, outputs, dtype, has_bias=has_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.linear_1(x).astype(x.dtype))  # [N, P, E]
        return self.linear_2(y).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Every device holds the connector completely."""
        return replicate_over_mesh("linear_1", "linear_2")


class LlavaVision(VisionPart):
    """The vision part of a LLaVA, also of BakLLaVA and of others with this class.

    Its settings are the keys ``vision_feature_layer`` (one number, or several whose features are joined) and
    ``vision_feature_select_strategy`` ("default" leaves the class token out, "full" does not) of ``config.json``.
    """

    def __init__(self, raw: Mapping[str, Any], config: Any, dtype: DType):
        super().__init__(raw, config, dtype)
        layers = raw.get("vision_feature_layer", -2)
        self.layers = tuple(layers) if isinstance(layers, list) else (layers,)
        strategy = raw.get("vision_feature_select_strategy", "default")
        if strategy not in ("default", "full"):
            raise ValueError(f"'vision_feature_select_strategy' {strategy!r} is not supported")
        self.first = 1 if strategy == "default" else 0
        self.vision_tower = tower_of(raw["vision_config"], dtype)
        width = self.vision_tower.config.hidden_size * len(self.layers)
        self.multi_modal_projector = LlavaProjector(raw, width, config.hidden_size, dtype)

    def __call__(self, pixels: Any) -> jax.Array:
        """Images ``[N, 3, H, W]`` → features ``[N, P, E]``."""
        x = [
            self.vision_tower.hidden_states(pixels, layer)[:, self.first :] for layer in self.layers
        ]
        return self.multi_modal_projector(jnp.concatenate(x, axis=-1))
