"""DINOv2: features of images that were learned without labels; also with registers, tokens for what no patch holds.

::

    x = cls_token, patches + position_embeddings          patches: projection of p × p pixels each
    x = x[cls], register_tokens, x[patches]               with registers
    in each layer:
        h = norm1(x)
        x = x + layer_scale1 · dense(softmax(query(h) key(h)ᵀ / √D) value(h))      for each head, over all
        x = x + layer_scale2 · fc2(gelu(fc1(norm2(x))))
            or, in the giant one, layer_scale2 · weights_out(silu(a) · b), a, b = weights_in(norm2(x))
    x = layernorm(x)
    labels: logits = classifier(x[cls], mean of x[patches])

Positions are interpolated for images of another size. Sources: arXiv:2304.07193; registers arXiv:2309.16588.

Shapes: N images of C × H × W, P patches of p × p pixels, R registers, T = 1 + R + P tokens, H heads of width D,
hidden size E, F inner features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.weight.weight import Weight
from ...nn.activation import activation
from ...nn.attention.both_ways import both_ways
from ...nn.layer import LayerList, Module
from ...nn.linear import Linear, linears
from ..family import Family
from ..names import Body, Drop, Names
from ..parts import (
    MAX_PIXELS,
    Dtypes,
    ImageClassifier,
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
    position_table,
    prepend,
    run_until,
    size,
    split_features_over_mesh,
    split_fused_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_head,
)


@dataclass(frozen=True)
class Dinov2Config(VisionConfig):
    """The settings of a DINOv2, with transformers' defaults.

    Attributes:
        mlp_ratio: F / E.
        qkv_bias: whether queries, keys and values have biases.
        use_swiglu_ffn: whether the MLP is gated.
    """

    model_type = "dinov2"

    hidden_size: int = size(768)
    num_hidden_layers: int = layers(12)
    num_attention_heads: int = size(12)
    mlp_ratio: int = config_field(4, minimum=1, maximum=1000)
    num_channels: int = size(3)
    image_size: int = config_field(224, minimum=1, maximum=MAX_PIXELS)
    patch_size: int = size(14)
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True
    use_swiglu_ffn: bool = False

    @property
    def num_register_tokens(self) -> int:
        """R."""
        return 0


class Dinov2PatchEmbeddings(Module):
    """The patches of an image: ``projection`` in the files."""

    def __init__(self, config: Dinov2Config, dtypes: Dtypes):
        super().__init__()
        self.projection = PatchEmbedding(
            config.num_channels, config.patch_size, config.hidden_size, dtypes.dtype
        )

    def __call__(self, pixels: jax.Array) -> jax.Array:
        return self.projection(pixels)  # [N, P, E]


class Dinov2Embeddings(Module):
    """The class token, registers, and the patches with their positions."""

    def __init__(self, config: Dinov2Config, dtypes: Dtypes):
        super().__init__()
        E, R, cpu = config.hidden_size, config.num_register_tokens, DeviceRef.CPU()
        self.config, count = config, 1 + config.num_patches
        self.cls_token = Weight("cls_token", dtypes.dtype, (1, 1, E), cpu)
        self.register_tokens = (
            Weight("register_tokens", dtypes.dtype, (1, R, E), cpu) if R else None
        )
        self.position_embeddings = Weight("position_embeddings", dtypes.dtype, (1, count, E), cpu)
        self.patch_embeddings = Dinov2PatchEmbeddings(config, dtypes)

    @automatic_rows(3)
    def __call__(self, pixels: jax.Array) -> jax.Array:
        x = self.patch_embeddings(pixels)  # [N, P, E]
        first, table = jnp.split(jnp.asarray(self.position_embeddings), [1], axis=1)
        # transformers smooths what it makes smaller in models with registers only.
        smooth = self.register_tokens is not None
        x = x + position_table(table[0], pixels, self.config, True, antialias=smooth)[None]
        if self.register_tokens is not None:
            x = prepend(jnp.asarray(self.register_tokens), x)
        return prepend(jnp.asarray(self.cls_token) + first, x)  # [N, T, E]


class Dinov2SelfAttention(Module):
    """Self-attention: each token attends to all."""

    def __init__(self, config: Dinov2Config, dtypes: Dtypes):
        super().__init__()
        E, dtype, bias = config.hidden_size, dtypes.dtype, config.qkv_bias
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.query = Linear(E, E, dtype, has_bias=bias)
        self.key = Linear(E, E, dtype, has_bias=bias)
        self.value = Linear(E, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = linears([self.query, self.key, self.value], x)  # [N, T, E]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [N, T, H, D]
        return merge_heads(both_ways(q, k, v, softmax_dtype=self.softmax_dtype))  # [N, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between heads."""
        outputs = {"query": self.heads, "key": self.heads, "value": self.heads}
        return split_heads_over_mesh(outputs, {}, self.head_dim)


class Dinov2AttentionOutput(Module):
    """The output of attention: ``dense`` in the files."""

    def __init__(self, config: Dinov2Config, dtypes: Dtypes):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x).astype(x.dtype)


class Dinov2Attention(Module):
    """Self-attention and its output."""

    def __init__(self, config: Dinov2Config, dtypes: Dtypes):
        super().__init__()
        self.attention = Dinov2SelfAttention(config, dtypes)
        self.output = Dinov2AttentionOutput(config, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.output(self.attention(x))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the output's inputs as the heads are split."""
        heads = {"output.dense": self.attention.heads}
        return split_heads_over_mesh({}, heads, self.attention.head_dim)


class Dinov2LayerScale(Module):
    """A learned factor for each feature (arXiv:2103.17239)."""

    def __init__(self, config: Dinov2Config, dtypes: Dtypes):
        super().__init__()
        self.lambda1 = Weight("lambda1", dtypes.dtype, (config.hidden_size,), DeviceRef.CPU())

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jnp.asarray(self.lambda1)[None, None]


class Dinov2MLP(Module):
    """``fc2(gelu(fc1(x)))``."""

    def __init__(self, config: Dinov2Config, dtypes: Dtypes):
        super().__init__()
        E, F = config.hidden_size, config.hidden_size * config.mlp_ratio
        self.act = config.hidden_act
        self.fc1 = Linear(E, F, dtypes.dtype, has_bias=True)
        self.fc2 = Linear(F, E, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.fc1(x).astype(x.dtype))  # [N, T, F]
        return self.fc2(y).astype(x.dtype)  # [N, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["fc1"], ["fc2"])


class Dinov2SwiGLU(Module):
    """The gated MLP, with one linear layer for both inputs of the product."""

    def __init__(self, config: Dinov2Config, dtypes: Dtypes):
        super().__init__()
        E = config.hidden_size
        # Two thirds of the usual features, rounded up to a multiple of 8.
        self.features = (int(E * config.mlp_ratio * 2 / 3) + 7) // 8 * 8
        self.weights_in = Linear(E, 2 * self.features, dtypes.dtype, has_bias=True)
        self.weights_out = Linear(self.features, E, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.weights_in(x).astype(x.dtype), 2, axis=-1)  # [N, T, F]
        return self.weights_out(activation("silu")(gate) * up).astype(x.dtype)  # [N, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        outputs = split_fused_features_over_mesh("weights_in", self.features)
        return outputs | split_features_over_mesh([], ["weights_out"])


class Dinov2Layer(Module):
    """Attention, then the MLP, each with a norm before it, scaled and added to the hidden states."""

    def __init__(self, config: Dinov2Config, dtypes: Dtypes):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_eps
        self.norm1 = layer_norm(E, eps, dtypes)
        self.attention = Dinov2Attention(config, dtypes)
        self.layer_scale1 = Dinov2LayerScale(config, dtypes)
        self.norm2 = layer_norm(E, eps, dtypes)
        self.mlp = (Dinov2SwiGLU if config.use_swiglu_ffn else Dinov2MLP)(config, dtypes)
        self.layer_scale2 = Dinov2LayerScale(config, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.layer_scale1(self.attention(self.norm1(x).astype(x.dtype)))
        return x + self.layer_scale2(self.mlp(self.norm2(x).astype(x.dtype)))


class Dinov2Encoder(Module):
    """The layers."""

    def __init__(self, config: Dinov2Config, dtypes: Dtypes):
        super().__init__()
        self.layer: Any = LayerList(
            Dinov2Layer(config, dtypes) for _ in range(config.num_hidden_layers)
        )


class Dinov2Model(VisionModel):
    """A DINOv2 without a head.

    Args:
        config: settings of the model.
        dtype: dtype of weights and activations.
        reduce_dtype: dtype in which norms and softmax are computed.

    Example:
        >>> config = Dinov2Config(8, 2, 2, image_size=6, patch_size=2)
        >>> out = jax.eval_shape(lambda m, x: m(x), Dinov2Model(config), jnp.zeros((5, 3, 6, 8)))
        >>> out.last_hidden_state.shape, out.pooler_output.shape
        ((5, 13, 8), (5, 8))
    """

    def __init__(
        self, config: Any, dtype: Any = DType.float32, *, reduce_dtype: Any = DType.float32
    ):
        super().__init__()
        dtypes = Dtypes.of(dtype, reduce_dtype)
        self.config, self.reduce_dtype = config, dtypes.reduce
        self.embeddings = Dinov2Embeddings(config, dtypes)
        self.encoder = Dinov2Encoder(config, dtypes)
        self.layernorm = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)

    def hidden_states(self, pixels: Any, layer: int = -1) -> jax.Array:
        """Images ``[N, C, H, W]`` → hidden states ``[N, T, E]`` after a layer, without the norm after the last one.

        Args:
            pixels: the images, of any size.
            layer: number of the hidden states as in transformers: 0 are the embeddings, -1 those after the last layer.

        Raises:
            UserInputError: the images are of another shape or smaller than a patch, or there are fewer layers.
        """
        x = self.embeddings(jnp.asarray(pixels))  # [N, T, E]
        return run_until(self.encoder.layer, x, layer_number(self.encoder.layer, layer))

    def logits(self, x: jax.Array) -> jax.Array | None:
        """Hidden states ``[N, T, E]`` → logits ``[N, labels]``; None: a model without a head has none."""
        return None

    def __call__(self, pixels: Any) -> VisionOutput:
        """Images ``[N, C, H, W]`` → hidden states ``[N, T, E]`` after the last norm, and logits of the head.

        Raises:
            UserInputError: the images are of another shape, or smaller than a patch.
        """
        x = self.hidden_states(pixels)
        x = self.layernorm(x).astype(x.dtype)
        return VisionOutput(x, x[:, 0], self.logits(x))

    def image_features(self, pixels: Any) -> jax.Array:
        """Images ``[N, C, H, W]`` → the class token's state ``[N, E]``."""
        return self(pixels).last_hidden_state[:, 0]


class Dinov2ForImageClassification(ImageClassifier, Dinov2Model):
    """A DINOv2 with a head for labels, over the class token and the mean of the patches."""

    def __init__(self, config: Any, dtype: Any = DType.float32, **options: Any):
        super().__init__(config, dtype, **options)
        self.classifier = Linear(
            2 * config.hidden_size, config.num_labels, DType.of(dtype), has_bias=True
        )

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[N, T, E]`` → logits ``[N, labels]``."""
        of_patches = x[:, 1 + self.config.num_register_tokens :].astype(self.reduce_dtype.np)
        pooled = jnp.concatenate([x[:, 0], of_patches.mean(1).astype(x.dtype)], axis=1)  # [N, 2 E]
        return self.classifier(pooled).astype(jnp.float32)


DINOV2 = Dinov2Model.family = Family.of(
    Dinov2Model,
    Dinov2Config,
    "Dinov2Model",
    "Dinov2Backbone",
    names=Names(
        Body("dinov2."),
        Drop("classifier.*", head=True),
        Drop("embeddings.mask_token", kept=True),
    ),
)
Dinov2ForImageClassification.family = with_head(
    DINOV2, Dinov2ForImageClassification, "classifier.*"
)

# --- with registers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dinov2WithRegistersConfig(Dinov2Config):
    """The settings of a DINOv2 with registers, with transformers' defaults.

    Attributes:
        num_register_tokens: R.
    """

    model_type = "dinov2_with_registers"

    patch_size: int = size(16)
    num_register_tokens: int = size(4, minimum=0)  # type: ignore[misc]


class Dinov2WithRegistersModel(Dinov2Model):
    """A DINOv2 with registers, without a head."""


class Dinov2WithRegistersForImageClassification(
    Dinov2ForImageClassification, Dinov2WithRegistersModel
):
    """A DINOv2 with registers, with a head for labels."""


REGISTERS = Dinov2WithRegistersModel.family = DINOV2.like(
    Dinov2WithRegistersModel,
    Dinov2WithRegistersConfig,
    "Dinov2WithRegistersModel",
    "Dinov2WithRegistersBackbone",
    names=Names(
        Body("dinov2_with_registers."),
        Drop("classifier.*", head=True),
        Drop("embeddings.mask_token", kept=True),
    ),
)
Dinov2WithRegistersForImageClassification.family = with_head(
    REGISTERS, Dinov2WithRegistersForImageClassification, "classifier.*"
)
