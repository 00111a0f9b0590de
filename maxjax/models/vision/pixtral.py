"""The vision part of Pixtral, and of Mistral Small 3 and Mistral 3, whose tower it is.

::

    x = ln_pre(patch_conv(patches))                       of a picture of any size
    in each layer:
        h = attention_norm(x)
        q, k, v = q_proj(h), k_proj(h), v_proj(h),  q and k turned by the row and the column of the patch
        x = x + o_proj(softmax(q kᵀ / √D) v)              over the patches of the picture
        h = ffn_norm(x)
        x = x + down_proj(gelu(gate_proj(h)) · up_proj(h))
    Mistral 3: x = merging_layer(norm(x), of 2 × 2 patches)
    features = linear_2(gelu(linear_1(x)))

Source: arXiv:2410.07073.

Shapes: P patches, H heads of width D, F features of a patch, E of a token of the language model, m × m patches of a
token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...dtype import DType
from ...nn.activation import activation
from ...nn.attention.both_ways import both_ways
from ...nn.layer import LayerList, Module
from ...nn.linear import Linear, linears
from ...nn.norm import RMSNorm
from ..parts import (
    Angles,
    config_field,
    layers,
    merge_heads,
    rope,
    run_until,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)
from ..parts.config import ArchitectureConfig
from ..parts.vision import patches
from .llava import LlavaProjector
from .part import Frames, PatchConvolution, PictureFeatures, VisionPart, places_of


@dataclass(frozen=True)
class PixtralVisionConfig(ArchitectureConfig):
    """The settings of the tower: ``vision_config`` of its ``config.json``, with transformers' defaults."""

    model_type = "pixtral"

    hidden_size: int = size(1024)
    intermediate_size: int = size(4096)
    num_hidden_layers: int = layers(24)
    num_attention_heads: int = size(16)
    head_dim: int = size(None)
    num_channels: int = size(3)
    image_size: int = config_field(1024, minimum=1)
    patch_size: int = size(16)
    hidden_act: str = "gelu"
    rope_theta: float = 10_000.0

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.head_dim is None:
            self._set("head_dim", self.hidden_size // self.num_attention_heads)


class PixtralAttention(Module):
    """Attention of patches, before and after, turned by rows and columns."""

    def __init__(self, config: PixtralVisionConfig, dtype: DType):
        super().__init__()
        F, width = config.hidden_size, config.num_attention_heads * config.head_dim
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.q_proj = Linear(F, width, dtype)
        self.k_proj = Linear(F, width, dtype)
        self.v_proj = Linear(F, width, dtype)
        self.o_proj = Linear(width, F, dtype)

    def __call__(self, x: jax.Array, angles: Angles, real: jax.Array) -> jax.Array:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [1, P, H, D]
        y = both_ways(rope(q, angles), rope(k, angles), v, real)
        return self.o_proj(merge_heads(y)).astype(x.dtype)  # [1, P, F]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = dict.fromkeys(["q_proj", "k_proj", "v_proj"], self.heads)
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class PixtralMLP(Module):
    """The gated MLP."""

    def __init__(self, config: PixtralVisionConfig, dtype: DType):
        super().__init__()
        F, inner = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.gate_proj = Linear(F, inner, dtype)
        self.up_proj = Linear(F, inner, dtype)
        self.down_proj = Linear(inner, F, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)
        return self.down_proj((activation(self.act)(gate) * up).astype(x.dtype)).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class PixtralLayer(Module):
    """Attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: PixtralVisionConfig, dtype: DType):
        super().__init__()
        F = config.hidden_size
        self.attention_norm = RMSNorm(F, dtype, 1e-5, multiply_before_cast=False)
        self.attention = PixtralAttention(config, dtype)
        self.ffn_norm = RMSNorm(F, dtype, 1e-5, multiply_before_cast=False)
        self.feed_forward = PixtralMLP(config, dtype)

    def __call__(self, x: jax.Array, angles: Angles, real: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), angles, real)
        return x + self.feed_forward(self.ffn_norm(x))


class PixtralLayers(Module):
    """The layers."""

    def __init__(self, config: PixtralVisionConfig, dtype: DType):
        super().__init__()
        self.layers = LayerList(
            PixtralLayer(config, dtype) for _ in range(config.num_hidden_layers)
        )


class PixtralTower(Module):
    """Patches of a picture of any size → hidden states."""

    def __init__(self, config: PixtralVisionConfig, dtype: DType):
        super().__init__()
        self.config, F, p = config, config.hidden_size, config.patch_size
        self.patch_conv = PatchConvolution((F, config.num_channels, p, p), dtype, has_bias=False)
        self.ln_pre = RMSNorm(F, dtype, 1e-5, multiply_before_cast=False)
        self.transformer = PixtralLayers(config, dtype)

    def __call__(
        self, patches: jax.Array, places: jax.Array, real: jax.Array, count: int
    ) -> jax.Array:
        """Patches ``[1, P, C p p]``, padded → hidden states ``[1, P, F]`` after ``count`` layers."""
        x = self.ln_pre(self.patch_conv(patches))
        angles = pixtral_angles(places, self.config.head_dim, self.config.rope_theta)
        return run_until(self.transformer.layers, x, count, angles, real[None])


def pixtral_angles(places: jax.Array, head_dim: int, theta: float) -> Angles:
    """The angles of RoPE for patches ``[1, P, D / 2]``: every second frequency is for rows, the others for columns.

    Args:
        places: row and column of each patch, integers ``[P, 2]``.
        head_dim: width D of a head.
        theta: base of the frequencies.
    """
    freqs = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    at = places.astype(jnp.float32)
    angles = jnp.concatenate(
        [at[:, :1] * freqs[None, 0::2], at[:, 1:] * freqs[None, 1::2]], axis=1
    )[None]
    return Angles(jnp.cos(angles), jnp.sin(angles), False)


class PixtralVision(VisionPart):
    """The vision part of a Pixtral 12B, in transformers' form: that of a LLaVA with this tower."""

    # Rows and columns of patches that become one token.
    merge: int = 1

    def __init__(self, raw: Mapping[str, Any], config: Any, dtype: DType):
        super().__init__(raw, config, dtype)
        given = dict(raw["vision_config"])
        theta = (given.get("rope_parameters") or {}).get("rope_theta")
        settings = PixtralVisionConfig.from_dict(
            {**given, **({"rope_theta": theta} if theta else {})}
        )
        layer = raw.get("vision_feature_layer", -1)
        count = settings.num_hidden_layers
        if type(layer) is not int or not -count - 1 <= layer <= count:
            raise ValueError(f"'vision_feature_layer' {layer!r} is not supported for this tower")
        self.count = layer if layer >= 0 else count + 1 + layer
        self.vision_tower = PixtralTower(settings, dtype)
        self.multi_modal_projector = self.make_projector(raw, dtype)

    def make_projector(self, raw: Mapping[str, Any], dtype: DType) -> Module:
        """Makes the connector."""
        return LlavaProjector(
            raw, self.vision_tower.config.hidden_size, self.config.hidden_size, dtype
        )

    def __call__(self, patches: Any, places: Any, real: Any) -> jax.Array:
        """Patches of a picture → features ``[1, P / m², E]``."""
        return self.multi_modal_projector(self.vision_tower(patches, places, real, self.count))

    def encode(self, inputs: Any, run: Callable[..., Any]) -> PictureFeatures:
        """See :class:`VisionPart`."""
        p, merge = self.vision_tower.config.patch_size, self.merge
        height, width = map(int, inputs.sizes[0])
        rows, columns = height // p, width // p
        cut: Any = patches(inputs.pixels[:1, :, :height, :width], p)  # row by row
        places = places_of(rows, columns, merge)
        frames = Frames.padded(cut[:, places[:, 0] * columns + places[:, 1]], places, merge)
        found = run(self, frames.patches, frames.places, frames.real)
        return PictureFeatures(frames.tokens(found, merge))


class Mistral3Merger(Module):
    """Joins the patches of a token in a linear layer."""

    def __init__(self, features: int, merge: int, dtype: DType):
        super().__init__()
        self.patches = merge**2
        self.merging_layer = Linear(features * merge**2, features, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(1, -1, self.patches, x.shape[-1]).swapaxes(2, 3)  # [1, P / m², F, m²]
        return self.merging_layer(x.reshape(1, x.shape[1], -1)).astype(x.dtype)


class Mistral3Projector(LlavaProjector):
    """The norm, the patches of a token in one, and the MLP."""

    def __init__(
        self, raw: Mapping[str, Any], features: int, config: Any, dtype: DType, merge: int
    ):
        super().__init__(raw, features, config.hidden_size, dtype)
        self.norm = RMSNorm(features, dtype, config.rms_norm_eps, multiply_before_cast=False)
        self.patch_merger = Mistral3Merger(features, merge, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.patch_merger(self.norm(x)))


class Mistral3Vision(PixtralVision):
    """The vision part of a Mistral Small 3.1, 3.2 or a Mistral 3."""

    def make_projector(self, raw: Mapping[str, Any], dtype: DType) -> Module:
        """Makes the connector."""
        raw = {"multimodal_projector_bias": False, **raw}
        self.merge = raw.get("spatial_merge_size", 2)
        features = self.vision_tower.config.hidden_size
        return Mistral3Projector(raw, features, self.config, dtype, self.merge)
