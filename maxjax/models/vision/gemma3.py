"""The vision part of Gemma 3: the tower of a SigLIP, and 16 tokens a side for each picture.

::

    x = tower(pixels)                                     [N, P, F], after the last norm
    x = mean of each k × k patches                        [N, 256, F]
    features = mm_soft_emb_norm(x) · mm_input_projection_weight

The tokens of a picture attend to all tokens of the same picture.

Source: arXiv:2503.19786.

Shapes: N images, P patches, F features of the tower, E of the language model, k patches of a side of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.weight.weight import Weight
from ...kernels import matmul
from ...nn.layer import Module
from ...nn.norm import RMSNorm
from ..gguf.layouts import Plus
from ..gguf.metadata import Settings
from ..gguf.mmproj import MmprojTable, tower_config, tower_names
from ..gguf.names import Rule
from ..parts import replicate_over_mesh
from .part import VisionPart, tower_of


class Gemma3Projector(Module):
    """Pools the patches, normalises them, and projects them to the features of tokens."""

    def __init__(self, tower: Any, tokens: int, size: int, dtype: DType):
        super().__init__()
        self.side = round(tokens**0.5)  # tokens of a side
        self.patches = tower.image_size // tower.patch_size  # patches of a side
        if self.side**2 != tokens or self.patches % self.side:
            raise ValueError(f"'mm_tokens_per_image' {tokens} does not fit {self.patches}² patches")
        F, cpu = tower.hidden_size, DeviceRef.CPU()
        self.mm_input_projection_weight = Weight(
            "mm_input_projection_weight", dtype, (F, size), cpu
        )
        # Gemma's norm: its weight is added to 1.
        self.mm_soft_emb_norm = RMSNorm(F, dtype, tower.layer_norm_eps, weight_offset=1.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        count, k = len(x), self.patches // self.side
        x = x.reshape(count, self.side, k, self.side, k, -1).mean((2, 4)).astype(x.dtype)
        x = self.mm_soft_emb_norm(x.reshape(count, self.side**2, -1))  # [N, tokens, F]
        weight = jnp.asarray(self.mm_input_projection_weight)
        return matmul(x.astype(weight.dtype), weight.T).astype(x.dtype)  # [N, tokens, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Every device holds the connector completely."""
        return replicate_over_mesh("mm_input_projection_weight", "mm_soft_emb_norm")


def _read(given: Settings, shapes: Any) -> dict[str, Any]:
    """The settings in an ``mmproj`` file; pictures are squares of patches, of which each token has a square."""
    tower = tower_config(given)
    side = tower["image_size"] // tower["patch_size"] // given.count("projector.scale_factor", 4)
    return {
        "vision_config": {**tower, "vision_use_head": False}, "mm_tokens_per_image": side**2,
    }  # fmt: skip


def _processor(given: Settings, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the image processor."""
    side = config["vision_config"]["image_size"]
    size = {"height": side, "width": side}
    return {"image_processor_type": "Gemma3ImageProcessor", "size": size}, {
        "processor_class": "Gemma3Processor", "image_seq_length": config["mm_tokens_per_image"],
    }  # fmt: skip


_GGUF = MmprojTable(
    {
        **tower_names("vision_tower.vision_model."),
        "mm.input_projection": Rule(
            "multi_modal_projector.mm_input_projection_weight", only="weight"
        ),
        # Gemma's norm: files have 1 plus the weight.
        "mm.soft_emb_norm": Rule("multi_modal_projector.mm_soft_emb_norm", Plus(-1.0)),
    },
    _read,
    # Some files of text models end before the token for pictures; the other one is in no text either.
    ("<image_soft_token>", "[multimodal]"),
    _processor,
)


class Gemma3Vision(VisionPart):
    """The vision part of a Gemma 3."""

    gguf: ClassVar[MmprojTable | None] = _GGUF
    sees_whole: ClassVar[bool] = True

    def __init__(self, raw: Mapping[str, Any], config: Any, dtype: DType):
        super().__init__(raw, config, dtype)
        self.vision_tower = tower_of(
            {"model_type": "siglip_vision_model", **raw["vision_config"]}, dtype
        )
        tokens = raw.get("mm_tokens_per_image", 256)
        tower = self.vision_tower.config
        self.multi_modal_projector = Gemma3Projector(tower, tokens, config.hidden_size, dtype)

    def __call__(self, pixels: Any) -> jax.Array:
        """Images ``[N, 3, H, W]`` → features ``[N, tokens, E]``."""
        return self.multi_modal_projector(self.vision_tower(pixels).last_hidden_state)
