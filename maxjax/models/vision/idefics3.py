"""The vision part of Idefics 3 and SmolVLM: the tower of a SigLIP over tiles, and patches joined in squares.

::

    x = vision_model(tiles)                                    [N, P, F], after the last norm
    features = modality_projection(of s × s patches, joined)   [N, P / s², E]

Source: arXiv:2408.12637, arXiv:2504.05299.

Shapes: N tiles, P patches, F features of the tower, E of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from ...dtype import DType
from ...nn.layer import Module
from ...nn.linear import Linear
from ..gguf.metadata import Settings
from ..gguf.mmproj import MmprojTable, tower_config, tower_names
from ..parts import replicate_over_mesh
from .part import VisionPart
from .siglip import SiglipVision, SiglipVisionConfig


class Idefics3Projection(Module):
    """A linear layer without a bias."""

    def __init__(self, inputs: int, outputs: int, dtype: DType):
        super().__init__()
        self.proj = Linear(inputs, outputs, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.proj(x).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Every device holds the connector completely."""
        return replicate_over_mesh("proj")


class Idefics3Connector(Module):
    """Joins the features of ``scale × scale`` patches (pixel shuffle), and projects them."""

    def __init__(self, features: int, scale: int, outputs: int, dtype: DType):
        super().__init__()
        self.scale = scale
        self.modality_projection = Idefics3Projection(features * scale**2, outputs, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        (count, patches, features), s = x.shape, self.scale
        side = round(patches**0.5) // s
        x = x.reshape(count, side, s, side, s, features).swapaxes(2, 3)
        return self.modality_projection(
            x.reshape(count, side**2, features * s**2)
        )  # [N, P / s², E]


def _read(given: Settings, shapes: Any) -> dict[str, Any]:
    """The settings in an ``mmproj`` file."""
    return {
        "vision_config": tower_config(given),
        "scale_factor": given.count("projector.scale_factor"),
    }


def _processor(given: Settings, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the image processor, which divides a picture into tiles."""
    tile = config["vision_config"]["image_size"]
    side = tile // config["vision_config"]["patch_size"] // config["scale_factor"]
    longest = given.count("preproc_image_size", tile)
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile},
    }, {"processor_class": "Idefics3Processor", "image_seq_len": side**2}  # fmt: skip


_GGUF = MmprojTable(
    {
        **tower_names("model.vision_model."),
        "mm.model.fc": "model.connector.modality_projection.proj",
    },
    _read,
    ("<image>",),
    _processor,
)


class Idefics3Vision(VisionPart):
    """The vision part of an Idefics 3 or a SmolVLM."""

    gguf: ClassVar[MmprojTable | None] = _GGUF
    names: ClassVar[tuple[str, ...]] = ("vision_model", "connector")
    text_names: ClassVar[str] = "model.text_model."

    def __init__(self, raw: Mapping[str, Any], config: Any, dtype: DType):
        super().__init__({"image_token_id": 128_257, **raw}, config, dtype)
        given = {
            "hidden_size": 1152,
            "num_attention_heads": 16,
            "patch_size": 32,
            **raw["vision_config"],
        }
        settings = SiglipVisionConfig.from_dict({**given, "vision_use_head": False})
        self.vision_model = SiglipVision(settings, dtype)
        scale = raw.get("scale_factor", 2)
        self.connector = Idefics3Connector(settings.hidden_size, scale, config.hidden_size, dtype)

    def __call__(self, pixels: Any) -> jax.Array:
        """Tiles ``[N, 3, H, W]`` → features ``[N, P / s², E]``."""
        return self.connector(self.vision_model(pixels).last_hidden_state)
