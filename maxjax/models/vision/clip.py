"""CLIP: an image encoder and a text encoder with vectors in one space; also OpenCLIP's weights in this form.

::

    image:  x = class_embedding, patch_embedding(patches) + position_embedding   a class token before the patches
            x = layers(pre_layrnorm(x)), over all patches
            vector = visual_projection(post_layernorm(x[class token]))
    text:   x = token_embedding[ids] + position_embedding
            x = final_layer_norm(layers(x)), over tokens up to its own
            vector = text_projection(x[first end-of-text token])
    in each layer, of both:
            h = layer_norm1(x)
            x = x + out_proj(softmax(q_proj(h) k_proj(h)ᵀ / √D) v_proj(h))       for each head
            x = x + fc2(quick_gelu(fc1(layer_norm2(x))))
    logits = exp(logit_scale) · cos(image vector, text vector)
    probabilities of the texts for an image = softmax(its logits)

Sources: arXiv:2103.00020; OpenCLIP arXiv:2212.07143, whose files may have gelu in place of quick_gelu. The name
"pre_layrnorm" is that of files.

Shapes: N images of C × H × W, P patches of p × p pixels, B texts of T tokens, H heads of width D, hidden size E,
F inner features, length of vectors d.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.weight.weight import Weight
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
    prepend,
    replicate_over_mesh,
    run_encoder,
    run_until,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)
from ..unread import ReadTracker


@dataclass(frozen=True)
class CLIPVisionConfig(VisionConfig):
    """The settings of the image encoder, with transformers' defaults.

    Attributes:
        projection_dim: d, of the image encoder in a file of its own.
    """

    model_type = "clip_vision_model"

    hidden_size: int = size(768)
    intermediate_size: int = size(3072)
    num_hidden_layers: int = layers(12)
    num_attention_heads: int = size(12)
    num_channels: int = size(3)
    image_size: int = config_field(224, minimum=1, maximum=MAX_PIXELS)
    patch_size: int = size(32)
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    projection_dim: int = config_field(512, minimum=1)


@dataclass(frozen=True)
class CLIPTextConfig(LabelledConfig):
    """The settings of the text encoder, with transformers' defaults.

    Attributes:
        projection_dim: d, of the text encoder in a file of its own.
        eos_token_id: the token whose state is a text's vector. 2, in the first files, is a mistake and stands for the
            token with the largest id in the text.
    """

    model_type = "clip_text_model"

    vocab_size: int = size(49_408)
    hidden_size: int = size(512)
    intermediate_size: int = size(2048)
    num_hidden_layers: int = layers(12)
    num_attention_heads: int = size(8)
    max_position_embeddings: int = size(77)
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    projection_dim: int = config_field(512, minimum=1)
    eos_token_id: int = 49_407


@dataclass(frozen=True)
class CLIPConfig(LabelledConfig):
    """The settings of both encoders.

    Attributes:
        projection_dim: d.
    """

    model_type = "clip"

    text_config: CLIPTextConfig = CLIPTextConfig()
    vision_config: CLIPVisionConfig = CLIPVisionConfig()
    projection_dim: int = size(512)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file; in old ones "text_config_dict", if not null, stands for "text_config"."""
        for key in ("text_config", "vision_config"):
            if raw.get(f"{key}_dict") is not None:
                raw = ReadTracker.of(raw).replaced({key: raw[f"{key}_dict"]})
        return super().from_hf(raw, **values)


class CLIPAttention(Module):
    """Self-attention: each patch or token attends to every one that the mask allows."""

    def __init__(self, config: Any, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.k_proj = Linear(E, E, dtype, has_bias=True)
        self.v_proj = Linear(E, E, dtype, has_bias=True)
        self.q_proj = Linear(E, E, dtype, has_bias=True)
        self.out_proj = Linear(E, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [N, T, E]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [N, T, H, D]
        y = both_ways(q, k, v, mask, softmax_dtype=self.softmax_dtype)  # [N, T, H, D]
        return self.out_proj(merge_heads(y)).astype(x.dtype)  # [N, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.heads, "v_proj": self.heads}
        return split_heads_over_mesh(outputs, {"out_proj": self.heads}, self.head_dim)


class CLIPMLP(Module):
    """``fc2(quick_gelu(fc1(x)))``."""

    def __init__(self, config: Any, dtypes: Dtypes):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.fc1 = Linear(E, F, dtypes.dtype, has_bias=True)
        self.fc2 = Linear(F, E, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.fc1(x).astype(x.dtype))  # [N, T, F]
        return self.fc2(y).astype(x.dtype)  # [N, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["fc1"], ["fc2"])


class CLIPLayer(Module):
    """Attention, then the MLP, each with a norm before it and added to the hidden states."""

    def __init__(self, config: Any, dtypes: Dtypes):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_eps
        self.self_attn = CLIPAttention(config, dtypes)
        self.layer_norm1 = layer_norm(E, eps, dtypes)
        self.mlp = CLIPMLP(config, dtypes)
        self.layer_norm2 = layer_norm(E, eps, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = x + self.self_attn(self.layer_norm1(x).astype(x.dtype), mask)
        return x + self.mlp(self.layer_norm2(x).astype(x.dtype))


class CLIPEncoder(Module):
    """The layers."""

    def __init__(self, config: Any, dtypes: Dtypes):
        super().__init__()
        self.layers: Any = LayerList(
            CLIPLayer(config, dtypes) for _ in range(config.num_hidden_layers)
        )


class CLIPVisionEmbeddings(Module):
    """The class token and the patches of an image, with their positions."""

    def __init__(self, config: CLIPVisionConfig, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.config = config
        self.class_embedding = Weight("class_embedding", dtype, (E,), DeviceRef.CPU())
        self.patch_embedding = PatchEmbedding(
            config.num_channels, config.patch_size, E, dtype, has_bias=False
        )
        self.position_embedding = Embedding(1 + config.num_patches, E, dtype)

    @automatic_rows(3)
    def __call__(self, pixels: jax.Array, interpolate: bool) -> jax.Array:
        x = self.patch_embedding(pixels)  # [N, P, E]
        positions = jnp.arange(1 + self.config.num_patches, dtype=jnp.int32)
        table = self.position_embedding(positions).astype(x.dtype)  # [1 + P, E]
        x = x + position_table(table[1:], pixels, self.config, interpolate)[None]
        return prepend(
            (jnp.asarray(self.class_embedding) + table[0])[None, None], x
        )  # [N, 1 + P, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table of positions."""
        return replicate_over_mesh("position_embedding")


class CLIPVision(Module):
    """The image encoder: pixels → hidden states of the class token and the patches, and one vector of each image.

    Vision-language models have it as a part. Its names are those in files, without their prefix.

    Args:
        config: settings of the encoder.
        dtype: dtype of weights and activations.
        reduce_dtype: dtype in which norms and softmax are computed.

    Example:
        >>> config = CLIPVisionConfig(8, 16, 2, 2, image_size=6, patch_size=2)
        >>> out = jax.eval_shape(lambda m, x: m(x), CLIPVision(config), jnp.zeros((5, 3, 6, 6)))
        >>> out.last_hidden_state.shape, out.pooler_output.shape
        ((5, 10, 8), (5, 8))
    """

    def __init__(
        self,
        config: CLIPVisionConfig,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
    ):
        super().__init__()
        dtypes = Dtypes.of(dtype, reduce_dtype)
        self.config, self.reduce_dtype = config, dtypes.reduce
        self.embeddings = CLIPVisionEmbeddings(config, dtypes)
        self.pre_layrnorm = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)
        self.encoder = CLIPEncoder(config, dtypes)
        self.post_layernorm = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)

    def hidden_states(
        self, pixels: Any, layer: int = -1, *, interpolate_pos_encoding: bool = False
    ) -> jax.Array:
        """Images ``[N, C, H, W]`` → hidden states ``[N, 1 + P, E]`` after a layer; the first is the class token's.

        Args:
            pixels: the images.
            layer: number of the hidden states as in transformers: 0 are the embeddings, -1 those after the last
                layer, -2 those after the last but one ("vision_feature_layer" of vision-language models).
            interpolate_pos_encoding: whether images may have another size than the model's.

        Raises:
            UserInputError: the images are of another shape or size, or there are fewer layers.
        """
        x = self.embeddings(jnp.asarray(pixels), interpolate_pos_encoding)  # [N, 1 + P, E]
        x = self.pre_layrnorm(x).astype(x.dtype)
        return run_until(self.encoder.layers, x, layer_number(self.encoder.layers, layer), None)

    def __call__(self, pixels: Any, *, interpolate_pos_encoding: bool = False) -> VisionOutput:
        """Images ``[N, C, H, W]`` → hidden states ``[N, 1 + P, E]``, and the class tokens' after the last norm.

        Raises:
            UserInputError: the images are of another shape or size.
        """
        x = self.hidden_states(pixels, interpolate_pos_encoding=interpolate_pos_encoding)
        return VisionOutput(x, self.post_layernorm(x[:, 0]).astype(x.dtype))


class CLIPTextEmbeddings(Module):
    """The embeddings of tokens, with their positions."""

    def __init__(self, config: CLIPTextConfig, dtypes: Dtypes):
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


class CLIPText(Module):
    """The text encoder: token ids → hidden states, and the state of the end of each text."""

    def __init__(
        self,
        config: CLIPTextConfig,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
    ):
        super().__init__()
        dtypes = Dtypes.of(dtype, reduce_dtype)
        self.config, self.reduce_dtype = config, dtypes.reduce
        self.embeddings = CLIPTextEmbeddings(config, dtypes)
        self.encoder = CLIPEncoder(config, dtypes)
        self.final_layer_norm = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)

    def __call__(self, input_ids: Any, attention_mask: Any = None) -> EncoderOutput:
        """Token ids ``[B, T]`` → hidden states ``[B, T, E]``, and the end-of-text tokens' ``[B, E]``.

        Args:
            input_ids: token ids.
            attention_mask: ``[B, T]``, nonzero for real tokens; only the states of padding depend on it.

        Raises:
            UserInputError: the texts are too long.
        """
        ids, real = checked_ids(input_ids, attention_mask, self.config.max_position_embeddings)
        causal = jnp.tril(jnp.ones((1, ids.shape[1], ids.shape[1]), bool))
        mask = causal if real is None else causal & real[:, None, :]  # [B or 1, T, T]
        mask = jnp.broadcast_to(mask, (len(ids), *mask.shape[1:]))
        x = run_encoder(self.encoder.layers, self.embeddings(ids), mask)  # [B, T, E]
        x = self.final_layer_norm(x).astype(x.dtype)
        is_wrong = self.config.eos_token_id == 2  # then the end is the largest id
        end = jnp.argmax(ids if is_wrong else ids == self.config.eos_token_id, axis=1)  # [B]
        return EncoderOutput(x, jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0])


class CLIPModel(ImageTextModel):
    """A CLIP: an image encoder and a text encoder, with a projection of each.

    Example:
        >>> parts = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> config = CLIPConfig.from_dict({"text_config": {**parts, "vocab_size": 99}, "vision_config": parts})
        >>> ids, pixels = jnp.zeros((3, 7), int), jnp.zeros((2, 3, 224, 224))
        >>> jax.eval_shape(lambda m, *x: m(*x), CLIPModel(config), ids, pixels).logits_per_image.shape
        (2, 3)
    """

    def __init__(
        self, config: CLIPConfig, dtype: Any = DType.float32, *, reduce_dtype: Any = DType.float32
    ):
        super().__init__()
        dtypes = Dtypes.of(dtype, reduce_dtype)
        self.config, self.reduce_dtype = config, dtypes.reduce
        text, vision, d = config.text_config, config.vision_config, config.projection_dim
        options = {"dtype": dtypes.dtype, "reduce_dtype": dtypes.reduce}
        self.text_model = CLIPText(text, **options)
        self.vision_model = CLIPVision(vision, **options)
        self.visual_projection = Linear(vision.hidden_size, d, dtypes.dtype)
        self.text_projection = Linear(text.hidden_size, d, dtypes.dtype)
        self.logit_scale = Weight("logit_scale", dtypes.dtype, (), DeviceRef.CPU())

    def image_features(self, pixels: Any) -> jax.Array:
        """Images ``[N, C, H, W]`` → one vector for each ``[N, d]``, not normalised."""
        return self.visual_projection(self.vision_model(pixels).pooler_output)

    def text_features(self, input_ids: Any, attention_mask: Any = None) -> jax.Array:
        """Token ids ``[B, T]`` → one vector for each text ``[B, d]``, not normalised."""
        return self.text_projection(self.text_model(input_ids, attention_mask).pooler_output)

    def logits_of(self, similarity: jax.Array) -> jax.Array:
        """Cosines of images and texts, float32 ``[N, B]`` → logits: ``exp(logit_scale) · cosine``."""
        return similarity * jnp.exp(jnp.asarray(self.logit_scale).astype(jnp.float32))


class CLIPVisionModel(CLIPVision, VisionModel):
    """The image encoder of a CLIP alone."""

    def image_features(self, pixels: Any) -> jax.Array:
        """Images ``[N, C, H, W]`` → one vector for each ``[N, E]``, not normalised."""
        return self(pixels).pooler_output  # type: ignore[return-value]


class CLIPTextModel(CLIPText, VisionModel):
    """The text encoder of a CLIP alone."""

    takes: ClassVar[tuple[str, ...]] = ("text",)

    def text_features(self, input_ids: Any, attention_mask: Any = None) -> jax.Array:
        """Token ids ``[B, T]`` → one vector for each text ``[B, E]``, not normalised."""
        return self(input_ids, attention_mask).pooler_output  # type: ignore[return-value]


class CLIPVisionModelWithProjection(VisionModel):
    """The image encoder of a CLIP with its projection."""

    def __init__(
        self,
        config: CLIPVisionConfig,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
    ):
        super().__init__()
        self.config, self.reduce_dtype = config, DType.of(reduce_dtype)
        self.vision_model = CLIPVision(config, dtype, reduce_dtype=reduce_dtype)
        self.visual_projection = Linear(config.hidden_size, config.projection_dim, DType.of(dtype))

    def __call__(self, pixels: Any, *, interpolate_pos_encoding: bool = False) -> VisionOutput:
        """Images ``[N, C, H, W]`` → hidden states, and in place of the pooled state the image's vector ``[N, d]``."""
        out = self.vision_model(pixels, interpolate_pos_encoding=interpolate_pos_encoding)
        return out._replace(pooler_output=self.visual_projection(out.pooler_output))

    def image_features(self, pixels: Any) -> jax.Array:
        """Images ``[N, C, H, W]`` → one vector for each ``[N, d]``, not normalised."""
        return self(pixels).pooler_output  # type: ignore[return-value]


class CLIPTextModelWithProjection(VisionModel):
    """The text encoder of a CLIP with its projection."""

    takes: ClassVar[tuple[str, ...]] = ("text",)

    def __init__(
        self,
        config: CLIPTextConfig,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
    ):
        super().__init__()
        self.config, self.reduce_dtype = config, DType.of(reduce_dtype)
        self.text_model = CLIPText(config, dtype, reduce_dtype=reduce_dtype)
        self.text_projection = Linear(config.hidden_size, config.projection_dim, DType.of(dtype))

    def __call__(self, input_ids: Any, attention_mask: Any = None) -> EncoderOutput:
        """Token ids ``[B, T]`` → hidden states, and in place of the pooled state the text's vector ``[B, d]``."""
        out = self.text_model(input_ids, attention_mask)
        return out._replace(pooler_output=self.text_projection(out.pooler_output))

    def text_features(self, input_ids: Any, attention_mask: Any = None) -> jax.Array:
        """Token ids ``[B, T]`` → one vector for each text ``[B, d]``, not normalised."""
        return self(input_ids, attention_mask).pooler_output  # type: ignore[return-value]


class CLIPForImageClassification(ImageClassifier, VisionModel):
    """The image encoder of a CLIP with a head for labels, over the mean of the patches."""

    def __init__(
        self, config: CLIPConfig, dtype: Any = DType.float32, *, reduce_dtype: Any = DType.float32
    ):
        super().__init__()
        self.config, self.reduce_dtype = config, DType.of(reduce_dtype)
        vision = config.vision_config
        self.vision_model = CLIPVision(vision, dtype, reduce_dtype=reduce_dtype)
        self.classifier = Linear(
            vision.hidden_size, config.num_labels, DType.of(dtype), has_bias=True
        )

    def __call__(self, pixels: Any, *, interpolate_pos_encoding: bool = False) -> VisionOutput:
        """Images ``[N, C, H, W]`` → the output of the image encoder, and logits ``[N, labels]``."""
        out = self.vision_model(pixels, interpolate_pos_encoding=interpolate_pos_encoding)
        x = out.last_hidden_state
        mean = x[:, 1:].astype(self.reduce_dtype.np).mean(1).astype(x.dtype)  # [N, E]
        return out._replace(logits=self.classifier(mean).astype(jnp.float32))

    def image_features(self, pixels: Any) -> jax.Array:
        """Images ``[N, C, H, W]`` → one vector for each ``[N, E]``, not normalised."""
        return self.vision_model(pixels).pooler_output  # type: ignore[return-value]


# Numbers that old files hold and that are counted here.
_POSITIONS = Drop("*.position_ids", "position_ids")

CLIP = CLIPModel.family = Family.of(CLIPModel, CLIPConfig, "CLIPModel", names=Names(_POSITIONS))
CLIPForImageClassification.family = CLIP.like(
    CLIPForImageClassification, CLIPConfig, "CLIPForImageClassification"
)
CLIPVisionModelWithProjection.family = CLIP.like(
    CLIPVisionModelWithProjection, CLIPVisionConfig, "CLIPVisionModelWithProjection"
)
CLIPTextModelWithProjection.family = CLIP.like(
    CLIPTextModelWithProjection, CLIPTextConfig, "CLIPTextModelWithProjection"
)
CLIPVisionModel.family = CLIP.like(
    CLIPVisionModel,
    CLIPVisionConfig,
    "CLIPVisionModel",
    names=Names(Body("vision_model."), _POSITIONS),
)
CLIPTextModel.family = CLIP.like(
    CLIPTextModel, CLIPTextConfig, "CLIPTextModel", names=Names(Body("text_model."), _POSITIONS)
)
