"""The vision part of PaliGemma and PaliGemma 2: the tower of a SigLIP, and a linear layer into the language model.

::

    features = linear(tower(pixels))            [N, P, E], after the tower's last norm

The tokens of a prompt, its pictures and its text, attend to all of the prompt; those of the answer to what is before
them (a prefix language model).

Sources: arXiv:2407.07726, arXiv:2412.03555.

Shapes: N images, P patches, F features of the tower, E of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from ...dtype import DType
from ...nn.layer import Module
from ...nn.linear import Linear
from ..parts import replicate_over_mesh
from .part import VisionPart, tower_of


class PaliGemmaProjector(Module):
    """A linear layer from the tower's features to those of tokens."""

    def __init__(self, inputs: int, outputs: int, dtype: DType):
        super().__init__()
        self.linear = Linear(inputs, outputs, dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x).astype(x.dtype)  # [N, P, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Every device holds the connector completely."""
        return replicate_over_mesh("linear")


class PaliGemmaVision(VisionPart):
    """The vision part of a PaliGemma or a PaliGemma 2."""

    sees_prompt: ClassVar[bool] = True

    def __init__(self, raw: Mapping[str, Any], config: Any, dtype: DType):
        super().__init__({"image_token_index": 256_000, **raw}, config, dtype)
        tower = {"model_type": "siglip_vision_model", **raw["vision_config"]}
        self.vision_tower = tower_of({**tower, "vision_use_head": False}, dtype)
        width, E = raw.get("projection_dim", 2048), config.hidden_size
        if width != E:
            raise ValueError(f"'projection_dim' must be the text model's {E}, not {width!r}")
        self.multi_modal_projector = PaliGemmaProjector(
            self.vision_tower.config.hidden_size, E, dtype
        )

    def __call__(self, pixels: Any) -> jax.Array:
        """Images ``[N, 3, H, W]`` → features ``[N, P, E]``."""
        return self.multi_modal_projector(self.vision_tower(pixels).last_hidden_state)
