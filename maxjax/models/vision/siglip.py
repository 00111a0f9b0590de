"""SigLIP, and SigLIP 2 for images of one size: an image encoder and a text encoder with vectors in one space.

::

    image:  x = patch_embedding(patches) + position_embedding             for each patch of p × p pixels
            x = layers(x), x = post_layernorm(x)
            y = attention of a learned vector, the probe, to all of x
            vector = y + mlp(layernorm(y))
    text:   x = token_embedding[ids] + position_embedding
            x = layers(x), x = final_layer_norm(x)
            vector = head(x[last token])                                   of the padded text: it may be padding
    in each layer, of both:
            h = layer_norm1(x)
            x = x + out_proj(softmax(q_proj(h) k_proj(h)ᵀ / √D) v_proj(h)) for each head, over all patches or tokens
            x = x + fc2(gelu(fc1(layer_norm2(x))))
    logits = exp(logit_scale) · cos(image vector, text vector) + logit_bias
    probability that a text fits an image = sigmoid(logit)

Sources: SigLIP arXiv:2303.15343; SigLIP 2 arXiv:2502.14786. Files of SigLIP 2 for images of any shape (NaFlex,
``model_type`` "siglip2") are of another architecture.

Shapes: N images of C × H × W, P patches of p × p pixels, B texts of T tokens, H heads of width D, hidden size E,
F inner features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...errors import UserInputError
from ...graph.device import DeviceRef
from ...graph.weight.weight import Weight
from ...kernels import matmul
from ...nn.activation import activation
from ...nn.attention.both_ways import both_ways
from ...nn.embedding import Embedding
from ...nn.layer import LayerList, Module
from ...nn.linear import Linear, linears
from ..family import Family
from ..names import Body, Drop, Names
from ..parts import (
    MAX_PIXELS,
    Dtypes,
    EncoderOutput,
    ImageClassifier,
    ImageTextModel,
    LabelledConfig,
    PatchEmbedding,
    VisionConfig,
    VisionModel,
    VisionOutput,
    automatic_rows,
    checked_ids,
    config_field,
    layer_norm,
    layer_number,
    layers,
    merge_heads,
    position_table,
    replicate_over_mesh,
    run_encoder,
    run_until,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)


@dataclass(frozen=True)
class SiglipVisionConfig(VisionConfig):
    """The settings of the image encoder, with transformers' defaults.

    Attributes:
        vision_use_head: whether the encoder has the layers that compute one vector of an image.
    """

    model_type = "siglip_vision_model"

    hidden_size: int = size(768)
    intermediate_size: int = size(3072)
    num_hidden_layers: int = layers(12)
    num_attention_heads: int = size(12)
    num_channels: int = size(3)
    image_size: int = config_field(224, minimum=1, maximum=MAX_PIXELS)
    patch_size: int = size(16)
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    vision_use_head: bool = True


@dataclass(frozen=True)
class SiglipTextConfig(LabelledConfig):
    """The settings of the text encoder, with transformers' defaults.

    Attributes:
        projection_size: length of a text's vector; ``hidden_size`` by default.
    """

    model_type = "siglip_text_model"

    vocab_size: int = size(32_000)
    hidden_size: int = size(768)
    intermediate_size: int = size(3072)
    num_hidden_layers: int = layers(12)
    num_attention_heads: int = size(12)
    max_position_embeddings: int = size(64)
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    projection_size: int = size(None)

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.projection_size is None:
            self._set("projection_size", self.hidden_size)


@dataclass(frozen=True)
class SiglipConfig(LabelledConfig):
    """The settings of both encoders."""

    model_type = "siglip"

    text_config: SiglipTextConfig = SiglipTextConfig()
    vision_config: SiglipVisionConfig = SiglipVisionConfig()


class SiglipAttention(Module):
    """Self-attention: each patch or token attends to all."""

    def __init__(self, config: Any, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.q_proj = Linear(E, E, dtype, has_bias=True)
        self.k_proj = Linear(E, E, dtype, has_bias=True)
        self.v_proj = Linear(E, E, dtype, has_bias=True)
        self.out_proj = Linear(E, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [N, P, E]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [N, P, H, D]
        y = both_ways(q, k, v, mask, softmax_dtype=self.softmax_dtype)  # [N, P, H, D]
        return self.out_proj(merge_heads(y)).astype(x.dtype)  # [N, P, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.heads, "v_proj": self.heads}
        return split_heads_over_mesh(outputs, {"out_proj": self.heads}, self.head_dim)


class SiglipMLP(Module):
    """``fc2(gelu(fc1(x)))``."""

    def __init__(self, config: Any, dtypes: Dtypes):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.fc1 = Linear(E, F, dtypes.dtype, has_bias=True)
        self.fc2 = Linear(F, E, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.fc1(x).astype(x.dtype))  # [N, P, F]
        return self.fc2(y).astype(x.dtype)  # [N, P, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["fc1"], ["fc2"])


class SiglipLayer(Module):
    """Attention, then the MLP, each with a norm before it and added to the hidden states."""

    def __init__(self, config: Any, dtypes: Dtypes):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm1 = layer_norm(E, eps, dtypes)
        self.self_attn = SiglipAttention(config, dtypes)
        self.layer_norm2 = layer_norm(E, eps, dtypes)
        self.mlp = SiglipMLP(config, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = x + self.self_attn(self.layer_norm1(x).astype(x.dtype), mask)
        return x + self.mlp(self.layer_norm2(x).astype(x.dtype))


class SiglipEncoder(Module):
    """The layers."""

    def __init__(self, config: Any, dtypes: Dtypes):
        super().__init__()
        self.layers: Any = LayerList(
            SiglipLayer(config, dtypes) for _ in range(config.num_hidden_layers)
        )


class SiglipVisionEmbeddings(Module):
    """The patches of an image, with their positions."""

    def __init__(self, config: SiglipVisionConfig, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.config = config
        self.patch_embedding = PatchEmbedding(config.num_channels, config.patch_size, E, dtype)
        self.position_embedding = Embedding(config.num_patches, E, dtype)

    @automatic_rows(3)
    def __call__(self, pixels: jax.Array, interpolate: bool) -> jax.Array:
        x = self.patch_embedding(pixels)  # [N, P, E]
        positions = jnp.arange(self.config.num_patches, dtype=jnp.int32)
        table = self.position_embedding(positions).astype(x.dtype)  # [P, E]
        return x + position_table(table, pixels, self.config, interpolate)[None]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table of positions."""
        return replicate_over_mesh("position_embedding")


class SiglipAttentionPooling(Module):
    """One vector of an image: attention of the probe to the patches, and an MLP.

    The weights of queries, keys and values are one tensor, as in PyTorch's ``MultiheadAttention``.
    """

    def __init__(self, config: SiglipVisionConfig, dtypes: Dtypes):
        super().__init__()
        E = config.hidden_size
        self.probe = Weight("probe", dtypes.dtype, (1, 1, E), DeviceRef.CPU())
        self.attention = SiglipProbeAttention(config, dtypes)
        self.layernorm = layer_norm(E, config.layer_norm_eps, dtypes)
        self.mlp = SiglipMLP(config, dtypes)

    @automatic_rows(2)
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.attention(jnp.asarray(self.probe).astype(x.dtype), x)  # [N, 1, E]
        y = y + self.mlp(self.layernorm(y).astype(x.dtype))
        return y[:, 0]  # [N, E]


class SiglipProbeAttention(Module):
    """Attention of one query to the patches."""

    def __init__(self, config: SiglipVisionConfig, dtypes: Dtypes):
        super().__init__()
        E, dtype, cpu = config.hidden_size, dtypes.dtype, DeviceRef.CPU()
        self.head_dim, self.softmax_dtype = config.head_dim, dtypes.reduce
        self.in_proj_weight = Weight("in_proj_weight", dtype, (3 * E, E), cpu)
        self.in_proj_bias = Weight("in_proj_bias", dtype, (3 * E,), cpu)
        self.out_proj = Linear(E, E, dtype, has_bias=True)

    def __call__(self, probe: jax.Array, x: jax.Array) -> jax.Array:
        weights = jnp.split(jnp.asarray(self.in_proj_weight), 3)  # 3 × [E, E]
        biases = jnp.split(jnp.asarray(self.in_proj_bias), 3)
        q, k, v = (
            split_heads((matmul(a, w) + b[None, None]).astype(x.dtype), self.head_dim)
            for a, w, b in zip((probe, x, x), weights, biases, strict=True)
        )  # [1, 1, H, D], [N, P, H, D]
        q = jnp.broadcast_to(q, (len(x), *q.shape[1:]))
        y = both_ways(q, k, v, softmax_dtype=self.softmax_dtype)  # [N, 1, H, D]
        return self.out_proj(merge_heads(y)).astype(x.dtype)  # [N, 1, E]


class SiglipVision(Module):
    """The image encoder: pixels → hidden states of patches, and one vector of each image.

    Vision-language models have it as a part. Its names are those in files, without their prefix.

    Args:
        config: settings of the encoder.
        dtype: dtype of weights and activations.
        reduce_dtype: dtype in which norms and softmax are computed.

    Example:
        >>> config = SiglipVisionConfig(8, 16, 2, 2, image_size=6, patch_size=2)
        >>> out = jax.eval_shape(lambda m, x: m(x), SiglipVision(config), jnp.zeros((5, 3, 6, 6)))
        >>> out.last_hidden_state.shape, out.pooler_output.shape
        ((5, 9, 8), (5, 8))
    """

    def __init__(
        self,
        config: SiglipVisionConfig,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
    ):
        super().__init__()
        dtypes = Dtypes.of(dtype, reduce_dtype)
        self.config, self.reduce_dtype = config, dtypes.reduce
        self.embeddings = SiglipVisionEmbeddings(config, dtypes)
        self.encoder = SiglipEncoder(config, dtypes)
        self.post_layernorm = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)
        self.head = SiglipAttentionPooling(config, dtypes) if config.vision_use_head else None

    def hidden_states(
        self, pixels: Any, layer: int = -1, *, interpolate_pos_encoding: bool = False
    ) -> jax.Array:
        """Images ``[N, C, H, W]`` → hidden states ``[N, P, E]`` after a layer, without the norm after the last one.

        Args:
            pixels: the images.
            layer: number of the hidden states as in transformers: 0 are the embeddings, -1 those after the last
                layer, -2 those after the last but one ("vision_feature_layer" of vision-language models).
            interpolate_pos_encoding: whether images may have another size than the model's.

        Raises:
            UserInputError: the images are of another shape or size, or there are fewer layers.
        """
        x = self.embeddings(jnp.asarray(pixels), interpolate_pos_encoding)  # [N, P, E]
        return run_until(self.encoder.layers, x, layer_number(self.encoder.layers, layer), None)

    def __call__(self, pixels: Any, *, interpolate_pos_encoding: bool = False) -> VisionOutput:
        """Images ``[N, C, H, W]`` → hidden states ``[N, P, E]`` after the last norm, and one vector of each.

        Raises:
            UserInputError: the images are of another shape or size.
        """
        x = self.hidden_states(pixels, interpolate_pos_encoding=interpolate_pos_encoding)
        x = self.post_layernorm(x).astype(x.dtype)
        return VisionOutput(x, None if self.head is None else self.head(x))

    def image_features(self, pixels: Any) -> jax.Array:
        """Images ``[N, C, H, W]`` → one vector for each ``[N, E]``, not normalised.

        Raises:
            UserInputError: the encoder has no layers for one vector of an image.
        """
        pooled = self(pixels).pooler_output
        if pooled is None:
            raise UserInputError("this image encoder has no head: 'vision_use_head' is false")
        return pooled


class SiglipTextEmbeddings(Module):
    """The embeddings of tokens, with their positions."""

    def __init__(self, config: SiglipTextConfig, dtypes: Dtypes):
        super().__init__()
        self.token_embedding = Embedding(config.vocab_size, config.hidden_size, dtypes.dtype)
        rows = config.max_position_embeddings
        self.position_embedding = Embedding(rows, config.hidden_size, dtypes.dtype)

    def __call__(self, ids: jax.Array) -> jax.Array:
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        return self.token_embedding(ids) + self.position_embedding(positions)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table of positions."""
        return replicate_over_mesh("position_embedding")


class SiglipText(Module):
    """The text encoder: token ids → hidden states, and one vector of each text."""

    def __init__(
        self,
        config: SiglipTextConfig,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
    ):
        super().__init__()
        dtypes = Dtypes.of(dtype, reduce_dtype)
        self.config, self.reduce_dtype = config, dtypes.reduce
        self.embeddings = SiglipTextEmbeddings(config, dtypes)
        self.encoder = SiglipEncoder(config, dtypes)
        self.final_layer_norm = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)
        self.head = Linear(config.hidden_size, config.projection_size, dtypes.dtype, has_bias=True)

    def __call__(self, input_ids: Any, attention_mask: Any = None) -> EncoderOutput:
        """Token ids ``[B, T]`` → hidden states ``[B, T, E]``, and the vectors of the last tokens ``[B, d]``.

        The model was trained with texts that are padded to the maximum length, and without a mask.

        Raises:
            UserInputError: the texts are too long.
        """
        ids, mask = checked_ids(input_ids, attention_mask, self.config.max_position_embeddings)
        x = run_encoder(self.encoder.layers, self.embeddings(ids), mask)  # [B, T, E]
        x = self.final_layer_norm(x).astype(x.dtype)
        return EncoderOutput(x, self.head(x[:, -1]).astype(x.dtype))

    def text_features(self, input_ids: Any, attention_mask: Any = None) -> jax.Array:
        """Token ids ``[B, T]`` → one vector for each text ``[B, d]``, not normalised."""
        return self(input_ids, attention_mask).pooler_output  # type: ignore[return-value]


class SiglipModel(ImageTextModel):
    """A SigLIP: an image encoder and a text encoder.

    Example:
        >>> parts = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> config = SiglipConfig.from_dict({"text_config": {**parts, "vocab_size": 99}, "vision_config": parts})
        >>> ids, pixels = jnp.zeros((3, 64), int), jnp.zeros((2, 3, 224, 224))
        >>> jax.eval_shape(lambda m, *x: m(*x), SiglipModel(config), ids, pixels).logits_per_image.shape
        (2, 3)
    """

    probabilities: ClassVar[str] = "sigmoid"
    pads_texts: ClassVar[bool] = True

    def __init__(
        self,
        config: SiglipConfig,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
    ):
        super().__init__()
        dtypes = Dtypes.of(dtype, reduce_dtype)
        self.config, self.reduce_dtype = config, dtypes.reduce
        options = {"dtype": dtypes.dtype, "reduce_dtype": dtypes.reduce}
        self.text_model = SiglipText(config.text_config, **options)
        self.vision_model = SiglipVision(config.vision_config, **options)
        self.logit_scale = Weight("logit_scale", dtypes.dtype, (1,), DeviceRef.CPU())
        self.logit_bias = Weight("logit_bias", dtypes.dtype, (1,), DeviceRef.CPU())

    def image_features(self, pixels: Any) -> jax.Array:
        """Images ``[N, C, H, W]`` → one vector for each ``[N, d]``, not normalised."""
        return self.vision_model.image_features(pixels)

    def text_features(self, input_ids: Any, attention_mask: Any = None) -> jax.Array:
        """Token ids ``[B, T]``, padded to the maximum length → one vector for each text ``[B, d]``, not normalised."""
        return self.text_model.text_features(input_ids, attention_mask)

    def logits_of(self, similarity: jax.Array) -> jax.Array:
        """Cosines of images and texts, float32 ``[N, B]`` → logits: ``exp(logit_scale) · cosine + logit_bias``."""
        scale = jnp.exp(jnp.asarray(self.logit_scale).astype(jnp.float32))  # [1]
        return similarity * scale[None] + jnp.asarray(self.logit_bias).astype(jnp.float32)[None]


class SiglipVisionModel(SiglipVision, VisionModel):
    """The image encoder of a SigLIP alone."""


class SiglipTextModel(SiglipText, VisionModel):
    """The text encoder of a SigLIP alone."""

    takes: ClassVar[tuple[str, ...]] = ("text",)
    pads_texts: ClassVar[bool] = True


class SiglipForImageClassification(ImageClassifier, VisionModel):
    """The image encoder of a SigLIP with a head for labels, over the mean of the patches."""

    def __init__(
        self,
        config: SiglipConfig,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
    ):
        super().__init__()
        self.config, self.reduce_dtype = config, DType.of(reduce_dtype)
        vision = config.vision_config
        self.vision_model = SiglipVision(vision, dtype, reduce_dtype=reduce_dtype)
        self.classifier = Linear(
            vision.hidden_size, config.num_labels, DType.of(dtype), has_bias=True
        )

    def __call__(self, pixels: Any, *, interpolate_pos_encoding: bool = False) -> VisionOutput:
        """Images ``[N, C, H, W]`` → the output of the image encoder, and logits ``[N, labels]``."""
        out = self.vision_model(pixels, interpolate_pos_encoding=interpolate_pos_encoding)
        x = out.last_hidden_state.astype(self.reduce_dtype.np).mean(1)  # [N, E]
        x = x.astype(out.last_hidden_state.dtype)
        return out._replace(logits=self.classifier(x).astype(jnp.float32))

    def image_features(self, pixels: Any) -> jax.Array:
        """Images ``[N, C, H, W]`` → one vector for each ``[N, E]``, not normalised."""
        return self.vision_model.image_features(pixels)


# Numbers that old files hold and that are counted here.
_POSITIONS = Drop("*.position_ids", "position_ids")

SIGLIP = SiglipModel.family = Family.of(
    SiglipModel, SiglipConfig, "SiglipModel", names=Names(_POSITIONS)
)
SiglipForImageClassification.family = SIGLIP.like(
    SiglipForImageClassification, SiglipConfig, "SiglipForImageClassification"
)
SiglipVisionModel.family = SIGLIP.like(
    SiglipVisionModel,
    SiglipVisionConfig,
    "SiglipVisionModel",
    names=Names(Body("vision_model."), _POSITIONS),
)
SiglipTextModel.family = SIGLIP.like(
    SiglipTextModel,
    SiglipTextConfig,
    "SiglipTextModel",
    names=Names(Body("text_model."), _POSITIONS),
)
