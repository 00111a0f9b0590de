"""The vision part of Qwen3-VL, with and without experts, and of Qwen 3.5.

::

    x = patch_embed(patches) + pos_embed, which is interpolated for the size of the picture
    in each layer:
        q, k, v = qkv(norm1(x)),  q and k turned by the row and the column of the patch
        x = x + proj(softmax(q kᵀ / √D) v)           over the patches of the frame
        x = x + linear_fc2(gelu(linear_fc1(norm2(x))))
        deepstack = deepstack_merger(x)              after some layers: added in the first layers of the language model
    features = merger(x)                             of 2 × 2 patches: linear_fc2(gelu(linear_fc1(norm(x), joined)))

Source: arXiv:2511.21631; DeepStack: arXiv:2406.04334.

Shapes: F frames, P patches of a frame, H heads of width D, N features of a patch, E of a token of the language model,
m × m patches of a token, n layers with deepstack features.
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
from ...nn.embedding import Embedding
from ...nn.layer import LayerList, Module
from ...nn.linear import Linear
from ...nn.norm import LayerNorm
from ..gguf.config.read import rows_of
from ..gguf.metadata import Settings
from ..gguf.mmproj import QWEN_NAMES, MmprojTable, qwen_config, qwen_processor, with_frames
from ..parts import (
    Angles,
    config_field,
    layers,
    merge_heads,
    replicate_over_mesh,
    rope,
    run_and_keep,
    size,
    split_features_over_mesh,
    split_heads,
)
from ..parts.config import ArchitectureConfig
from .part import Frames, PackedVision, PatchProjection, PictureFeatures, angles_of


@dataclass(frozen=True)
class Qwen3VisionConfig(ArchitectureConfig):
    """The settings of the tower: ``vision_config`` of its ``config.json``, with transformers' defaults.

    Attributes:
        hidden_size: N.
        out_hidden_size: E.
        num_position_embeddings: the number of learned positions, which form a square.
        deepstack_visual_indexes: the layers after which features are taken for the first layers of the language model.
    """

    model_type = "qwen3_vl"

    depth: int = layers(27)
    hidden_size: int = size(1152)
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: int = size(4304)
    num_heads: int = size(16)
    in_channels: int = size(3)
    patch_size: int = size(16)
    spatial_merge_size: int = size(2)
    temporal_patch_size: int = size(2)
    out_hidden_size: int = size(3584)
    num_position_embeddings: int = size(2304)
    deepstack_visual_indexes: tuple[int, ...] = config_field((8, 16, 24), maximum=1000)


class Qwen3VisionAttention(Module):
    """Attention of patches, before and after, turned by rows and columns."""

    def __init__(self, config: Qwen3VisionConfig, dtype: DType):
        super().__init__()
        N = config.hidden_size
        self.head_dim = N // config.num_heads
        self.qkv = Linear(N, 3 * N, dtype, has_bias=True)
        self.proj = Linear(N, N, dtype, has_bias=True)

    def __call__(self, x: jax.Array, angles: Angles, real: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(x).astype(x.dtype), 3, axis=-1)  # [F, P, N]
        q, k, v = (split_heads(a, self.head_dim) for a in (q, k, v))  # [F, P, H, D]
        y = both_ways(rope(q, angles), rope(k, angles), v, real)  # [F, P, H, D]
        return self.proj(merge_heads(y)).astype(x.dtype)  # [F, P, N]


class Qwen3VisionMLP(Module):
    """``linear_fc2(gelu(linear_fc1(x)))``."""

    def __init__(self, config: Qwen3VisionConfig, dtype: DType):
        super().__init__()
        N, inner = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.linear_fc1 = Linear(N, inner, dtype, has_bias=True)
        self.linear_fc2 = Linear(inner, N, dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.linear_fc1(x).astype(x.dtype))
        return self.linear_fc2(y).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["linear_fc1"], ["linear_fc2"])


class Qwen3VisionBlock(Module):
    """Attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: Qwen3VisionConfig, dtype: DType):
        super().__init__()
        N = config.hidden_size
        self.norm1 = LayerNorm(N, eps=1e-6, dtype=dtype)
        self.norm2 = LayerNorm(N, eps=1e-6, dtype=dtype)
        self.attn = Qwen3VisionAttention(config, dtype)
        self.mlp = Qwen3VisionMLP(config, dtype)

    def __call__(self, x: jax.Array, angles: Angles, real: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x).astype(x.dtype), angles, real)
        return x + self.mlp(self.norm2(x).astype(x.dtype))


class Qwen3Merger(Module):
    """The patches of a token, normalised and joined, through an MLP.

    Args:
        config: settings of the tower.
        dtype: dtype of the weights.
        joins_first: whether patches are joined before they are normalised.
    """

    def __init__(self, config: Qwen3VisionConfig, dtype: DType, *, joins_first: bool = False):
        super().__init__()
        joined = config.hidden_size * config.spatial_merge_size**2
        self.joined, self.joins_first = joined, joins_first
        self.norm = LayerNorm(joined if joins_first else config.hidden_size, eps=1e-6, dtype=dtype)
        self.linear_fc1 = Linear(joined, joined, dtype, has_bias=True)
        self.linear_fc2 = Linear(joined, config.out_hidden_size, dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        join = lambda a: a.reshape(a.shape[0], -1, self.joined)  # [F, P / m², m² N]
        x = self.norm(join(x)) if self.joins_first else join(self.norm(x))
        y = activation("gelu")(self.linear_fc1(x).astype(x.dtype))
        return self.linear_fc2(y).astype(x.dtype)  # [F, P / m², E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["linear_fc1"], ["linear_fc2"])


class Qwen3VisionTower(Module):
    """Patches of frames → features of tokens."""

    def __init__(self, config: Qwen3VisionConfig, dtype: DType):
        super().__init__()
        self.config, N, p = config, config.hidden_size, config.patch_size
        shape = (N, config.in_channels, config.temporal_patch_size, p, p)
        self.patch_embed = PatchProjection(shape, dtype, has_bias=True)
        self.pos_embed = Embedding(config.num_position_embeddings, N, dtype)
        self.blocks = LayerList(Qwen3VisionBlock(config, dtype) for _ in range(config.depth))
        self.merger = Qwen3Merger(config, dtype)
        if config.deepstack_visual_indexes:  # Qwen 3.5 has none
            self.deepstack_merger_list = tuple(
                Qwen3Merger(config, dtype, joins_first=True)
                for _ in config.deepstack_visual_indexes
            )

    def __call__(
        self, patches: jax.Array, places: jax.Array, real: jax.Array, near: jax.Array, shares: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:  # fmt: skip
        """Patches ``[F, P, C t p p]`` → features ``[F, P / m², E]``, and n of them for deepstack.

        Args:
            patches: pixels of patches, with padding.
            places: row and column of each patch ``[P, 2]``.
            real: which patches are not padding, bools ``[P]``.
            near: the four learned positions next to each patch, integers ``[P, 4]``.
            shares: their shares, floats ``[P, 4]``.
        """
        config = self.config
        table = jnp.asarray(self.pos_embed.weight)
        learned = (table[near].astype(jnp.float32) * shares[..., None]).sum(1)  # [P, N]
        x = self.patch_embed(patches)  # [F, P, N]
        x = x + learned.astype(x.dtype)[None]
        angles = angles_of(places, config.hidden_size // config.num_heads)
        rows = jnp.broadcast_to(real[None], x.shape[:2])
        x, deep = run_and_keep(self.blocks, x, config.deepstack_visual_indexes, angles, rows)
        mergers = self.deepstack_merger_list if deep else ()
        return self.merger(x), [merger(y) for merger, y in zip(mergers, deep, strict=True)]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table of positions."""
        return replicate_over_mesh("pos_embed")


def _deepstack(given: Settings) -> list[int]:
    """The layers after which an ``mmproj`` file has features for the first layers of the language model."""
    flags = given.items("is_deepstack_layers", bool, [])
    return [number for number, is_one in enumerate(flags) if is_one]


def _read(given: Settings, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in an ``mmproj`` file."""
    more = {
        "num_position_embeddings": rows_of("v.position_embd.weight", shapes, given.path),
        "deepstack_visual_indexes": _deepstack(given),
    }
    return {"vision_config": {**qwen_config(given), **more}}


def _join(given: Settings, found: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of an ``mmproj`` file, whose mergers for deepstack have the numbers of their layers."""
    names = {
        "visual.merger.mlp.0.": "visual.merger.linear_fc1.",
        "visual.merger.mlp.2.": "visual.merger.linear_fc2.",
    }
    for place, layer in enumerate(_deepstack(given)):
        names[f"{_DEEPSTACK}layer.{layer}."] = f"{_DEEPSTACK}{place}."
    renamed = {}
    for name, data in found.items():
        old = next((one for one in names if name.startswith(one)), "")
        renamed[names.get(old, "") + name.removeprefix(old)] = data
    return with_frames(renamed)


_DEEPSTACK = "visual.deepstack_merger_list."
_GGUF = MmprojTable(
    {
        **QWEN_NAMES,
        "v.position_embd": "visual.pos_embed",
        "v.blk.*.ffn_up": "visual.blocks.*.mlp.linear_fc1",
        "v.blk.*.ffn_down": "visual.blocks.*.mlp.linear_fc2",
        "v.post_ln": "visual.merger.norm",
        "mm.*": "visual.merger.mlp.*",
        "v.deepstack.*.norm": f"{_DEEPSTACK}layer.*.norm",
        "v.deepstack.*.fc1": f"{_DEEPSTACK}layer.*.linear_fc1",
        "v.deepstack.*.fc2": f"{_DEEPSTACK}layer.*.linear_fc2",
    },
    _read,
    ("<|image_pad|>",),
    # The bounds of pixels are those of the published models.
    partial(qwen_processor, "Qwen3VLProcessor", (65_536, 16_777_216)),
    {"mrope_interleaved": True},
    _join,
)


class Qwen3Vision(PackedVision):
    """The vision part of a Qwen3-VL or a Qwen 3.5."""

    gguf: ClassVar[MmprojTable | None] = _GGUF

    def __init__(self, raw: Mapping[str, Any], config: Any, dtype: DType):
        super().__init__(raw, config, dtype)
        defaults = {} if "vl" in raw.get("model_type", "") else {"deepstack_visual_indexes": []}
        settings = Qwen3VisionConfig.from_dict({**defaults, **raw["vision_config"]})
        self.visual = Qwen3VisionTower(settings, dtype)

    def encode(self, inputs: Any, run: Callable[..., Any]) -> PictureFeatures:
        """See :class:`VisionPart`."""
        of = self.visual.config
        frames, side = (
            Frames.of(inputs, of.spatial_merge_size),
            round(of.num_position_embeddings**0.5),
        )
        near, shares = between(frames.places, inputs.grids[0][1:], side)
        found, deep = run(self, frames.patches, frames.places, frames.real, near, shares)
        found, *deep = (frames.tokens(one, of.spatial_merge_size) for one in (found, *deep))
        return PictureFeatures(found, np.stack(deep) if deep else None)


def between(places: np.ndarray, shape: Any, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The four cells of a square of learned positions next to each patch, and their shares (bilinear interpolation).

    The first and last rows and columns of the picture are those of the square.

    Args:
        places: row and column of each patch, integers ``[P, 2]``.
        shape: numbers of rows and columns of the picture.
        side: number of rows, and of columns, of the square.

    Returns:
        Numbers of cells, int32 ``[P, 4]``, and shares, float32 ``[P, 4]``.

    Example:
        >>> cells, shares = between(np.array([[0, 0], [0, 1]]), (1, 2), 4)
        >>> cells[:, 0].tolist(), shares[:, 0].tolist()
        ([0, 3], [1.0, 1.0])
    """
    steps = np.maximum(np.asarray(shape) - 1, 1)
    at = places.astype(np.float32) * np.float32(side - 1) / steps.astype(np.float32)  # [P, 2]
    first = np.clip(np.floor(at), 0, side - 1).astype(np.int32)
    last, share = np.minimum(first + 1, side - 1), (at - first).astype(np.float32)
    cells, shares = [], []
    for row, of_row in ((first[:, 0], 1 - share[:, 0]), (last[:, 0], share[:, 0])):
        for column, of_column in ((first[:, 1], 1 - share[:, 1]), (last[:, 1], share[:, 1])):
            cells.append(row * side + column)
            shares.append(of_row * of_column)
    return np.stack(cells, axis=1), np.stack(shares, axis=1)
