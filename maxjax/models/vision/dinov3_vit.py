"""DINOv3, the vision transformers: features of images of any size, with rotary positions.

::

    x = cls_token, register_tokens, patches               patches: a linear layer over p × p pixels each
    in each layer:
        h = norm1(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)             rope turns patches only
        x = x + layer_scale1 · o_proj(softmax(q kᵀ / √D) v)              for each head, over all
        x = x + layer_scale2 · down_proj(gelu(up_proj(norm2(x))))
            or, gated, layer_scale2 · down_proj(silu(gate_proj(h)) · up_proj(h)), h = norm2(x)
    x = norm(x)

A patch is at (y, x), its centre, where an image reaches from -1 to 1. A head's D/2 pairs of features, i and i + D/2,
turn by 2π y θ^(-4i/D) for the first half of i, and by 2π x θ^(-4i/D) with i from 0 again for the second. Source:
arXiv:2508.10104.

Shapes: N images of C × H × W, P patches of p × p pixels, R registers, T = 1 + R + P tokens, H heads of width D,
hidden size E, F inner features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.weight.weight import Weight
from ...nn.activation import activation
from ...nn.attention.both_ways import both_ways
from ...nn.layer import LayerList, Module
from ...nn.linear import Linear, linears
from ..family import Family
from ..names import Drop, Names, Prefix
from ..parts import (
    MAX_PIXELS,
    Angles,
    Dtypes,
    PatchEmbedding,
    VisionConfig,
    VisionModel,
    VisionOutput,
    automatic_rows,
    config_field,
    layer_norm,
    layer_number,
    layers,
    merge_heads,
    prepend,
    rope,
    run_until,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)


@dataclass(frozen=True)
class DINOv3ViTConfig(VisionConfig):
    """The settings of a DINOv3, with transformers' defaults.

    Attributes:
        rope_theta: θ, the base of the rotary positions.
        query_bias, key_bias, value_bias, proj_bias, mlp_bias: which linear layers have biases.
        use_gated_mlp: whether the MLP is gated.
        num_register_tokens: R.
    """

    model_type = "dinov3_vit"

    hidden_size: int = size(384)
    intermediate_size: int = size(1536)
    num_hidden_layers: int = layers(12)
    num_attention_heads: int = size(6)
    num_channels: int = size(3)
    image_size: int = config_field(224, minimum=1, maximum=MAX_PIXELS)
    patch_size: int = size(16)
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    rope_theta: float = 100.0
    query_bias: bool = True
    key_bias: bool = False
    value_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    use_gated_mlp: bool = False
    num_register_tokens: int = size(0, minimum=0)


class DINOv3Embeddings(Module):
    """The class token, registers and the patches."""

    def __init__(self, config: DINOv3ViTConfig, dtypes: Dtypes):
        super().__init__()
        E, R, dtype, cpu = (
            config.hidden_size, config.num_register_tokens, dtypes.dtype, DeviceRef.CPU()
        )  # fmt: skip
        self.cls_token = Weight("cls_token", dtype, (1, 1, E), cpu)
        self.register_tokens = Weight("register_tokens", dtype, (1, R, E), cpu)
        self.patch_embeddings = PatchEmbedding(config.num_channels, config.patch_size, E, dtype)

    @automatic_rows(3)
    def __call__(self, pixels: jax.Array) -> jax.Array:
        x = prepend(jnp.asarray(self.register_tokens), self.patch_embeddings(pixels))
        return prepend(jnp.asarray(self.cls_token), x)  # [N, T, E]


def patch_angles(rows: int, columns: int, first: int, config: DINOv3ViTConfig) -> Angles:
    """Return the angles ``[1, T, D/2]`` of the tokens: 0 for the first ones, then those of the patches.

    Args:
        rows, columns: numbers of patches.
        first: number of the tokens before the patches.
        config: settings of the model.
    """
    y, x = ((2 * np.arange(n) + 1) / n - 1 for n in (rows, columns))  # centres, from -1 to 1
    places = np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1).reshape(-1, 2)  # [P, 2]
    frequencies = config.rope_theta ** -np.arange(0, 1, 4 / config.head_dim)  # [D/4]
    angles = 2 * np.pi * places[:, :, None] * frequencies  # [P, 2, D/4]
    angles = np.concatenate(
        [np.zeros((first, config.head_dim // 2)), angles.reshape(len(places), -1)]
    )
    cos, sin = (jnp.asarray(f(angles)[None], jnp.float32) for f in (np.cos, np.sin))
    return Angles(cos, sin, interleaved=False)


class DINOv3Attention(Module):
    """Self-attention: each token attends to all."""

    def __init__(self, config: DINOv3ViTConfig, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.k_proj = Linear(E, E, dtype, has_bias=config.key_bias)
        self.v_proj = Linear(E, E, dtype, has_bias=config.value_bias)
        self.q_proj = Linear(E, E, dtype, has_bias=config.query_bias)
        self.o_proj = Linear(E, E, dtype, has_bias=config.proj_bias)

    def __call__(self, x: jax.Array, angles: Angles) -> jax.Array:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [N, T, E]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [N, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y = both_ways(q, k, v, softmax_dtype=self.softmax_dtype)  # [N, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype)  # [N, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.heads, "v_proj": self.heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class DINOv3LayerScale(Module):
    """A learned factor for each feature (arXiv:2103.17239)."""

    def __init__(self, config: DINOv3ViTConfig, dtypes: Dtypes):
        super().__init__()
        self.lambda1 = Weight("lambda1", dtypes.dtype, (config.hidden_size,), DeviceRef.CPU())

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jnp.asarray(self.lambda1)[None, None]


class DINOv3MLP(Module):
    """``down_proj(gelu(up_proj(x)))``, or gated."""

    def __init__(self, config: DINOv3ViTConfig, dtypes: Dtypes):
        super().__init__()
        E, F, dtype, bias = (
            config.hidden_size, config.intermediate_size, dtypes.dtype, config.mlp_bias
        )  # fmt: skip
        self.act = config.hidden_act
        self.gate_proj = Linear(E, F, dtype, has_bias=bias) if config.use_gated_mlp else None
        self.up_proj = Linear(E, F, dtype, has_bias=bias)
        self.down_proj = Linear(F, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        up = self.up_proj(x).astype(x.dtype)  # [N, T, F]
        if self.gate_proj is None:
            y = activation(self.act)(up)
        else:
            y = activation(self.act)(self.gate_proj(x).astype(x.dtype)) * up
        return self.down_proj(y).astype(x.dtype)  # [N, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        outputs = ["up_proj"] if self.gate_proj is None else ["gate_proj", "up_proj"]
        return split_features_over_mesh(outputs, ["down_proj"])


class DINOv3Layer(Module):
    """Attention, then the MLP, each with a norm before it, scaled and added to the hidden states."""

    def __init__(self, config: DINOv3ViTConfig, dtypes: Dtypes):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_eps
        self.norm1 = layer_norm(E, eps, dtypes)
        self.attention = DINOv3Attention(config, dtypes)
        self.layer_scale1 = DINOv3LayerScale(config, dtypes)
        self.norm2 = layer_norm(E, eps, dtypes)
        self.mlp = DINOv3MLP(config, dtypes)
        self.layer_scale2 = DINOv3LayerScale(config, dtypes)

    def __call__(self, x: jax.Array, angles: Angles) -> jax.Array:
        x = x + self.layer_scale1(self.attention(self.norm1(x).astype(x.dtype), angles))
        return x + self.layer_scale2(self.mlp(self.norm2(x).astype(x.dtype)))


class DINOv3ViTModel(VisionModel):
    """A DINOv3.

    Args:
        config: settings of the model.
        dtype: dtype of weights and activations.
        reduce_dtype: dtype in which norms and softmax are computed.

    Example:
        >>> config = DINOv3ViTConfig(8, 16, 2, 2, patch_size=2, num_register_tokens=4)
        >>> out = jax.eval_shape(lambda m, x: m(x), DINOv3ViTModel(config), jnp.zeros((5, 3, 6, 8)))
        >>> out.last_hidden_state.shape, out.pooler_output.shape
        ((5, 17, 8), (5, 8))
    """

    def __init__(
        self, config: Any, dtype: Any = DType.float32, *, reduce_dtype: Any = DType.float32
    ):
        super().__init__()
        dtypes = Dtypes.of(dtype, reduce_dtype)
        self.config, self.reduce_dtype = config, dtypes.reduce
        self.embeddings = DINOv3Embeddings(config, dtypes)
        self.layer: Any = LayerList(
            DINOv3Layer(config, dtypes) for _ in range(config.num_hidden_layers)
        )
        self.norm = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)

    def hidden_states(self, pixels: Any, layer: int = -1) -> jax.Array:
        """Images ``[N, C, H, W]`` → hidden states ``[N, T, E]`` after a layer, without the norm after the last one.

        Args:
            pixels: the images, of any size.
            layer: number of the hidden states as in transformers: 0 are the embeddings, -1 those after the last layer.

        Raises:
            UserInputError: the images are of another shape or smaller than a patch, or there are fewer layers.
        """
        config, pixels = self.config, jnp.asarray(pixels)
        x = self.embeddings(pixels)  # [N, T, E]
        rows, columns = (length // config.patch_size for length in pixels.shape[2:])
        angles = patch_angles(rows, columns, 1 + config.num_register_tokens, config)
        return run_until(self.layer, x, layer_number(self.layer, layer), angles)

    def __call__(self, pixels: Any) -> VisionOutput:
        """Images ``[N, C, H, W]`` → hidden states ``[N, T, E]`` after the last norm, and the class tokens'.

        Raises:
            UserInputError: the images are of another shape, or smaller than a patch.
        """
        x = self.hidden_states(pixels)
        x = self.norm(x).astype(x.dtype)
        return VisionOutput(x, x[:, 0])

    def image_features(self, pixels: Any) -> jax.Array:
        """Images ``[N, C, H, W]`` → the class token's state ``[N, E]``."""
        return self(pixels).last_hidden_state[:, 0]


DINOV3 = DINOv3ViTModel.family = Family.of(
    DINOv3ViTModel,
    DINOv3ViTConfig,
    "DINOv3ViTModel",
    "DINOv3ViTBackbone",
    names=Names(Prefix({"model.layer.": "layer."}), Drop("embeddings.mask_token", kept=True)),
)
