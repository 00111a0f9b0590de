"""The vision part of Qwen2-VL.

::

    x = patch_embed(patches)
    in each layer:
        q, k, v = qkv(norm1(x)),  q and k turned by the row and the column of the patch
        x = x + proj(softmax(q kᵀ / √D) v)           over the patches of the frame
        x = x + fc2(quick_gelu(fc1(norm2(x))))
    features = merger(x)                             of 2 × 2 patches: mlp(ln_q(x), joined)

Source: arXiv:2409.12191.

Shapes: F frames, P patches of a frame, H heads of width D, N features of a patch, E of a token of the language model,
m × m patches of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...nn.activation import activation
from ...nn.attention.both_ways import both_ways
from ...nn.layer import LayerList, Module
from ...nn.linear import Linear
from ...nn.norm import LayerNorm
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
)
from ..parts.config import ArchitectureConfig
from .part import Frames, Gelu, PackedVision, PatchProjection, PictureFeatures, angles_of


@dataclass(frozen=True)
class Qwen2VisionConfig(ArchitectureConfig):
    """The settings of the tower: ``vision_config`` of its ``config.json``, with transformers' defaults.

    Attributes:
        embed_dim: N.
        hidden_size: E.
        mlp_ratio: inner features of the MLP, as a multiple of N.
    """

    model_type = "qwen2_vl"

    depth: int = layers(32)
    embed_dim: int = size(1280)
    hidden_size: int = size(3584)
    hidden_act: str = "quick_gelu"
    mlp_ratio: float = config_field(4.0, minimum=1e-3)
    num_heads: int = size(16)
    in_channels: int = size(3)
    patch_size: int = size(14)
    spatial_merge_size: int = size(2)
    temporal_patch_size: int = size(2)


class Qwen2VisionAttention(Module):
    """Attention of patches, before and after, turned by rows and columns."""

    def __init__(self, config: Qwen2VisionConfig, dtype: DType):
        super().__init__()
        N = config.embed_dim
        self.head_dim = N // config.num_heads
        self.qkv = Linear(N, 3 * N, dtype, has_bias=True)
        self.proj = Linear(N, N, dtype, has_bias=True)

    def __call__(self, x: jax.Array, angles: Angles, real: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(x).astype(x.dtype), 3, axis=-1)  # [F, P, N]
        q, k, v = (split_heads(a, self.head_dim) for a in (q, k, v))  # [F, P, H, D]
        y = both_ways(rope(q, angles), rope(k, angles), v, real)  # [F, P, H, D]
        return self.proj(merge_heads(y)).astype(x.dtype)  # [F, P, N]


class Qwen2VisionMLP(Module):
    """``fc2(quick_gelu(fc1(x)))``."""

    def __init__(self, config: Qwen2VisionConfig, dtype: DType):
        super().__init__()
        N, inner = config.embed_dim, int(config.embed_dim * config.mlp_ratio)
        self.act = config.hidden_act
        self.fc1 = Linear(N, inner, dtype, has_bias=True)
        self.fc2 = Linear(inner, N, dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.fc1(x).astype(x.dtype))
        return self.fc2(y).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["fc1"], ["fc2"])


class Qwen2VisionBlock(Module):
    """Attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: Qwen2VisionConfig, dtype: DType):
        super().__init__()
        N = config.embed_dim
        self.norm1 = LayerNorm(N, eps=1e-6, dtype=dtype)
        self.norm2 = LayerNorm(N, eps=1e-6, dtype=dtype)
        self.attn = Qwen2VisionAttention(config, dtype)
        self.mlp = Qwen2VisionMLP(config, dtype)

    def __call__(self, x: jax.Array, angles: Angles, real: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x).astype(x.dtype), angles, real)
        return x + self.mlp(self.norm2(x).astype(x.dtype))


class Qwen2Merger(Module):
    """The patches of a token, normalised and joined, through an MLP."""

    def __init__(self, config: Qwen2VisionConfig, dtype: DType):
        super().__init__()
        joined = config.embed_dim * config.spatial_merge_size**2
        self.ln_q = LayerNorm(config.embed_dim, eps=1e-6, dtype=dtype)
        self.mlp = (
            Linear(joined, joined, dtype, has_bias=True),
            Gelu(),
            Linear(joined, config.hidden_size, dtype, has_bias=True),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        first, gelu, last = self.mlp
        x = self.ln_q(x).astype(x.dtype)
        x = x.reshape(x.shape[0], -1, first.weight.shape[1])  # [F, P / m², m² N]
        return last(gelu(first(x).astype(x.dtype))).astype(x.dtype)  # [F, P / m², E]


class Qwen2VisionTower(Module):
    """Patches of frames → features of tokens."""

    def __init__(self, config: Qwen2VisionConfig, dtype: DType):
        super().__init__()
        self.config, p = config, config.patch_size
        shape = (config.embed_dim, config.in_channels, config.temporal_patch_size, p, p)
        self.patch_embed = PatchProjection(shape, dtype)
        self.blocks = LayerList(Qwen2VisionBlock(config, dtype) for _ in range(config.depth))
        self.merger = Qwen2Merger(config, dtype)

    def __call__(self, patches: jax.Array, places: jax.Array, real: jax.Array) -> jax.Array:
        """Patches ``[F, P, C t p p]``, padded → features ``[F, P / m², E]``."""
        x = self.patch_embed(patches)  # [F, P, N]
        angles = angles_of(places, self.config.embed_dim // self.config.num_heads)
        rows = jnp.broadcast_to(real[None], x.shape[:2])
        return self.merger(run_until(self.blocks, x, self.config.depth, angles, rows))


class Qwen2Vision(PackedVision):
    """The vision part of a Qwen2-VL."""

    def __init__(self, raw: Mapping[str, Any], config: Any, dtype: DType):
        super().__init__(raw, config, dtype)
        self.visual = Qwen2VisionTower(Qwen2VisionConfig.from_dict(raw["vision_config"]), dtype)

    def encode(self, inputs: Any, run: Callable[..., Any]) -> PictureFeatures:
        """See :class:`VisionPart`."""
        merge = self.visual.config.spatial_merge_size
        frames = Frames.of(inputs, merge)
        found = run(self, frames.patches, frames.places, frames.real)
        return PictureFeatures(frames.tokens(found, merge))
