"""The vision part of Qwen2.5-VL.

::

    x = patch_embed(patches)
    in each layer:
        q, k, v = qkv(norm1(x)),  q and k turned by the row and the column of the patch
        x = x + proj(softmax(q kᵀ / √D) v)     over the patches of a window; in some layers over those of the frame
        x = x + mlp(norm2(x))
    features = merger(x)                       of 2 × 2 patches: mlp(ln_q(x), joined)

    mlp(h) = down_proj(silu(gate_proj(h)) · up_proj(h))

Source: arXiv:2502.13923.

Shapes: F frames, W windows of S patches each, P = W S patches of a frame, H heads of width D, N features of a patch, E
of a token of the language model, m × m patches of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...dtype import DType
from ...nn.activation import activation
from ...nn.attention.both_ways import both_ways
from ...nn.layer import LayerList, Module
from ...nn.linear import Linear, linears
from ...nn.norm import RMSNorm
from ..gguf.metadata import Settings
from ..gguf.mmproj import (
    QWEN_NAMES,
    MmprojTable,
    qwen_config,
    qwen_processor,
    with_frames,
    with_one_map,
)
from ..parts import (
    Angles,
    config_field,
    layers,
    rope,
    run_until,
    size,
    split_features_over_mesh,
    split_heads,
)
from ..parts.config import ArchitectureConfig
from .part import Frames, Gelu, PackedVision, PatchProjection, PictureFeatures, angles_of


@dataclass(frozen=True)
class Qwen25VisionConfig(ArchitectureConfig):
    """The settings of the tower: ``vision_config`` of its ``config.json``, with transformers' defaults.

    Attributes:
        hidden_size: N.
        window_size: pixels of a side of a window.
        out_hidden_size: E.
        fullatt_block_indexes: layers in which a patch attends to all patches of its frame.
    """

    model_type = "qwen2_5_vl"

    depth: int = layers(32)
    hidden_size: int = size(3584)
    hidden_act: str = "silu"
    intermediate_size: int = size(3420)
    num_heads: int = size(16)
    in_channels: int = size(3, aliases=("in_chans",))
    patch_size: int = size(14)
    spatial_merge_size: int = size(2)
    temporal_patch_size: int = size(2)
    window_size: int = size(112)
    out_hidden_size: int = size(3584)
    fullatt_block_indexes: tuple[int, ...] = config_field((7, 15, 23, 31), maximum=1000)

    @property
    def window(self) -> int:
        """S, the number of patches of a window."""
        return (self.window_size // self.patch_size) ** 2


class Qwen25VisionAttention(Module):
    """Attention of patches, before and after, turned by rows and columns: within windows, or over the frame."""

    def __init__(self, config: Qwen25VisionConfig, is_full: bool, dtype: DType):
        super().__init__()
        N = config.hidden_size
        self.head_dim = N // config.num_heads
        self.window = None if is_full else config.window
        self.qkv = Linear(N, 3 * N, dtype, has_bias=True)
        self.proj = Linear(N, N, dtype, has_bias=True)

    def __call__(self, x: jax.Array, angles: Angles, real: jax.Array) -> jax.Array:
        frames, patches, features = x.shape
        q, k, v = jnp.split(self.qkv(x).astype(x.dtype), 3, axis=-1)  # [F, P, N]
        q, k, v = (split_heads(a, self.head_dim) for a in (q, k, v))  # [F, P, H, D]
        q, k = rope(q, angles), rope(k, angles)
        if self.window is not None:  # [F W, S, H, D]
            q, k, v = (a.reshape(-1, self.window, *a.shape[2:]) for a in (q, k, v))
            real = jnp.tile(real.reshape(-1, self.window), (frames, 1))
        else:
            real = jnp.broadcast_to(real[None], (frames, patches))
        y = both_ways(q, k, v, real).reshape(frames, patches, features)
        return self.proj(y).astype(x.dtype)


class Qwen25VisionMLP(Module):
    """The gated MLP."""

    def __init__(self, config: Qwen25VisionConfig, dtype: DType):
        super().__init__()
        N, inner = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.gate_proj = Linear(N, inner, dtype, has_bias=True)
        self.up_proj = Linear(N, inner, dtype, has_bias=True)
        self.down_proj = Linear(inner, N, dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)
        return self.down_proj((activation(self.act)(gate) * up).astype(x.dtype)).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class Qwen25VisionBlock(Module):
    """Attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: Qwen25VisionConfig, is_full: bool, dtype: DType):
        super().__init__()
        N = config.hidden_size
        self.norm1 = RMSNorm(N, dtype, 1e-6, multiply_before_cast=False)
        self.norm2 = RMSNorm(N, dtype, 1e-6, multiply_before_cast=False)
        self.attn = Qwen25VisionAttention(config, is_full, dtype)
        self.mlp = Qwen25VisionMLP(config, dtype)

    def __call__(self, x: jax.Array, angles: Angles, real: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x), angles, real)
        return x + self.mlp(self.norm2(x))


class Qwen25Merger(Module):
    """The patches of a token, normalised and joined, through an MLP."""

    def __init__(self, config: Qwen25VisionConfig, dtype: DType):
        super().__init__()
        joined = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = RMSNorm(config.hidden_size, dtype, 1e-6, multiply_before_cast=False)
        self.mlp = (
            Linear(joined, joined, dtype, has_bias=True),
            Gelu(),
            Linear(joined, config.out_hidden_size, dtype, has_bias=True),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        first, gelu, last = self.mlp
        x = self.ln_q(x).reshape(x.shape[0], -1, first.weight.shape[1])  # [F, P / m², m² N]
        return last(gelu(first(x).astype(x.dtype))).astype(x.dtype)  # [F, P / m², E]


class Qwen25VisionTower(Module):
    """Patches of frames → features of tokens."""

    def __init__(self, config: Qwen25VisionConfig, dtype: DType):
        super().__init__()
        self.config = config
        p, shape = config.patch_size, (config.hidden_size, config.in_channels)
        self.patch_embed = PatchProjection((*shape, config.temporal_patch_size, p, p), dtype)
        self.blocks = LayerList(
            Qwen25VisionBlock(config, number in config.fullatt_block_indexes, dtype)
            for number in range(config.depth)
        )
        self.merger = Qwen25Merger(config, dtype)

    def __call__(self, patches: jax.Array, places: jax.Array, real: jax.Array) -> jax.Array:
        """Patches ``[F, P, C t p p]``, window by window, padded → features ``[F, P / m², E]``."""
        config = self.config
        x = self.patch_embed(patches)  # [F, P, N]
        angles = angles_of(places, config.hidden_size // config.num_heads)
        return self.merger(run_until(self.blocks, x, config.depth, angles, real))


def _read(given: Settings, shapes: Any) -> dict[str, Any]:
    """The settings in an ``mmproj`` file: of n layers, the last one attends to the whole frame."""
    tower, period = qwen_config(given), given.count("n_wa_pattern")
    full = list(range(period - 1, tower["depth"], period))
    window = given.count("window_size", 112)
    return {"vision_config": {**tower, "window_size": window, "fullatt_block_indexes": full}}


_GGUF = MmprojTable(
    {
        **QWEN_NAMES,
        "v.blk.*.attn_q": "visual.blocks.*.attn.q",
        "v.blk.*.attn_k": "visual.blocks.*.attn.k",
        "v.blk.*.attn_v": "visual.blocks.*.attn.v",
        "v.blk.*.ffn_gate": "visual.blocks.*.mlp.gate_proj",
        "v.blk.*.ffn_up": "visual.blocks.*.mlp.up_proj",
        "v.blk.*.ffn_down": "visual.blocks.*.mlp.down_proj",
        "v.post_ln": "visual.merger.ln_q",
        "mm.*": "visual.merger.mlp.*",
    },
    _read,
    ("<|image_pad|>",),
    # The bounds of pixels are those of the published models.
    partial(qwen_processor, "Qwen2_5_VLProcessor", (3136, 12_845_056)),
    join=lambda given, found: with_frames(with_one_map(found)),
)


class Qwen25Vision(PackedVision):
    """The vision part of a Qwen2.5-VL."""

    gguf: ClassVar[MmprojTable | None] = _GGUF

    def __init__(self, raw: Mapping[str, Any], config: Any, dtype: DType):
        super().__init__(raw, config, dtype)
        self.visual = Qwen25VisionTower(Qwen25VisionConfig.from_dict(raw["vision_config"]), dtype)

    def encode(self, inputs: Any, run: Callable[..., Any]) -> PictureFeatures:
        """See :class:`VisionPart`."""
        of = self.visual.config
        merge, window = of.spatial_merge_size, of.window
        frames = Frames.of(inputs, merge, least=1)
        order = windows_of(frames.places[: frames.count], of.window_size // of.patch_size, merge)
        count = 1 << (len(order) // window - 1).bit_length()
        source = np.full(count * window, -1)
        source[: len(order)] = order
        found = run(self, frames.patches[:, source], frames.places[source], source >= 0)
        rows = found.reshape(len(found), -1, found.shape[-1])
        tokens = source.reshape(-1, merge**2)[:, 0] // merge**2  # the number of each row's token
        is_real = source.reshape(-1, merge**2)[:, 0] >= 0
        back = np.argsort(tokens[is_real])
        return PictureFeatures(rows[:, is_real][:, back].reshape(-1, rows.shape[-1]))


def windows_of(places: np.ndarray, side: int, merge: int) -> np.ndarray:
    """The number of the patch in each place of each window, integers ``[windows · side²]``; -1 for padding.

    Args:
        places: row and column of each patch ``[P, 2]``, block by block of ``merge × merge``.
        side: number of patches of a side of a window.
        merge: the patches of a block stay together.

    Example:
        >>> windows_of(np.array([[0, 0], [0, 1], [0, 2]]), 2, 1).tolist()
        [0, 1, -1, -1, 2, -1, -1, -1]
    """
    unit = merge**2
    of_token = places[::unit] // merge  # row and column of each token
    side //= merge
    window = of_token // side
    key = window[:, 0] * (window[:, 1].max() + 1) + window[:, 1]
    numbers, place = np.unique(key, return_inverse=True)
    found = np.full((len(numbers), side * side), -1)
    for number in range(len(numbers)):
        tokens = np.flatnonzero(place == number)
        found[number, : len(tokens)] = tokens
    found = np.where(found[..., None] >= 0, found[..., None] * unit + np.arange(unit), -1)
    return found.reshape(-1)
