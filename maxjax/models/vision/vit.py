"""ViT, the vision transformer, and DeiT, which has a second token that learned from a teacher.

::

    x = cls_token, patches + position_embeddings          patches: projection of p × p pixels each
    in each layer:
        h = layernorm_before(x)
        x = x + dense(softmax(query(h) key(h)ᵀ / √D) value(h))     for each head, over all patches
        x = x + dense(gelu(dense(layernorm_after(x))))
    x = layernorm(x)
    pooled = tanh(pooler(x[cls]))                         in files with a pooler
    labels: logits = classifier(x[cls])
    DeiT: x begins with cls_token, distillation_token;
        with its teacher: logits = (cls_classifier(x[cls]) + distillation_classifier(x[distillation])) / 2

Sources: ViT arXiv:2010.11929; DeiT arXiv:2012.12877.

Shapes: N images of C × H × W, P patches of p × p pixels, T tokens (P and those before them), H heads of width D,
hidden size E, F inner features.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Self

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
    split_heads,
    split_heads_over_mesh,
    with_head,
)


@dataclass(frozen=True)
class ViTConfig(VisionConfig):
    """The settings of a ViT, with transformers' defaults.

    Attributes:
        qkv_bias: whether queries, keys and values have biases.
        pooler_output_size: length of the pooled vector; ``hidden_size`` by default.
        pooler_act: name of the pooler's activation function.
    """

    model_type = "vit"

    hidden_size: int = size(768)
    intermediate_size: int = size(3072)
    num_hidden_layers: int = layers(12)
    num_attention_heads: int = size(12)
    num_channels: int = size(3)
    image_size: int = config_field(224, minimum=1, maximum=MAX_PIXELS)
    patch_size: int = size(16)
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    qkv_bias: bool = True
    pooler_output_size: int = size(None)
    pooler_act: str = "tanh"

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.pooler_output_size is None:
            self._set("pooler_output_size", self.hidden_size)


class ViTPatchEmbeddings(Module):
    """The patches of an image: ``projection`` in the files."""

    def __init__(self, config: ViTConfig, dtypes: Dtypes):
        super().__init__()
        self.projection = PatchEmbedding(
            config.num_channels, config.patch_size, config.hidden_size, dtypes.dtype
        )

    def __call__(self, pixels: jax.Array) -> jax.Array:
        return self.projection(pixels)  # [N, P, E]


class ViTEmbeddings(Module):
    """The tokens before the patches, and the patches, with their positions."""

    def __init__(self, config: ViTConfig, dtypes: Dtypes, tokens: tuple[str, ...]):
        super().__init__()
        E, dtype, cpu = config.hidden_size, dtypes.dtype, DeviceRef.CPU()
        self.config, self.tokens = config, tokens
        for name in tokens:
            setattr(self, name, Weight(name, dtype, (1, 1, E), cpu))
        count = len(tokens) + config.num_patches
        self.position_embeddings = Weight("position_embeddings", dtype, (1, count, E), cpu)
        self.patch_embeddings = ViTPatchEmbeddings(config, dtypes)

    @automatic_rows(3)
    def __call__(self, pixels: jax.Array, interpolate: bool) -> jax.Array:
        x = self.patch_embeddings(pixels)  # [N, P, E]
        first, table = jnp.split(jnp.asarray(self.position_embeddings), [len(self.tokens)], axis=1)
        x = x + position_table(table[0], pixels, self.config, interpolate)[None]
        tokens = [jnp.asarray(getattr(self, name)) for name in self.tokens]  # [1, 1, E]
        return prepend(jnp.concatenate(tokens, axis=1) + first, x)  # [N, T, E]


class ViTSelfAttention(Module):
    """Self-attention: each patch attends to all."""

    def __init__(self, config: ViTConfig, dtypes: Dtypes):
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


class ViTDense(Module):
    """A linear layer, with an activation function after it or without: ``dense`` in the files."""

    def __init__(self, inputs: int, outputs: int, dtypes: Dtypes, act: str | None = None):
        super().__init__()
        self.act = act
        self.dense = Linear(inputs, outputs, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.dense(x).astype(x.dtype)
        return y if self.act is None else activation(self.act)(y)


class ViTAttention(Module):
    """Self-attention and its output."""

    def __init__(self, config: ViTConfig, dtypes: Dtypes):
        super().__init__()
        self.attention = ViTSelfAttention(config, dtypes)
        self.output = ViTDense(config.hidden_size, config.hidden_size, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.output(self.attention(x))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the output's inputs as the heads are split."""
        heads = {"output.dense": self.attention.heads}
        return split_heads_over_mesh({}, heads, self.attention.head_dim)


class ViTLayer(Module):
    """Attention, then the MLP, each with a norm before it and added to the hidden states."""

    def __init__(self, config: ViTConfig, dtypes: Dtypes):
        super().__init__()
        E, F, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.attention = ViTAttention(config, dtypes)
        self.intermediate = ViTDense(E, F, dtypes, config.hidden_act)
        self.output = ViTDense(F, E, dtypes)
        self.layernorm_before = layer_norm(E, eps, dtypes)
        self.layernorm_after = layer_norm(E, eps, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.layernorm_before(x).astype(x.dtype))
        return x + self.output(self.intermediate(self.layernorm_after(x).astype(x.dtype)))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features of the MLP."""
        return split_features_over_mesh(["intermediate.dense"], ["output.dense"])


class ViTEncoder(Module):
    """The layers."""

    def __init__(self, config: ViTConfig, dtypes: Dtypes):
        super().__init__()
        self.layer: Any = LayerList(
            ViTLayer(config, dtypes) for _ in range(config.num_hidden_layers)
        )


class ViTModel(VisionModel):
    """A ViT without a head.

    Args:
        config: settings of the model.
        dtype: dtype of weights and activations.
        reduce_dtype: dtype in which norms and softmax are computed.
        pooler: whether the model has a pooler.

    Attributes:
        tokens: the names of the tokens before the patches.

    Example:
        >>> config = ViTConfig(8, 16, 2, 2, image_size=6, patch_size=2)
        >>> out = jax.eval_shape(lambda m, x: m(x), ViTModel(config), jnp.zeros((5, 3, 6, 6)))
        >>> out.last_hidden_state.shape, out.pooler_output.shape
        ((5, 10, 8), (5, 8))
    """

    tokens: ClassVar[tuple[str, ...]] = ("cls_token",)

    def __init__(
        self,
        config: Any,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
        pooler: bool = True,
    ):
        super().__init__()
        dtypes = Dtypes.of(dtype, reduce_dtype)
        self.config, self.reduce_dtype = config, dtypes.reduce
        E, wide = config.hidden_size, config.pooler_output_size
        self.embeddings = ViTEmbeddings(config, dtypes, self.tokens)
        self.encoder = ViTEncoder(config, dtypes)
        self.layernorm = layer_norm(E, config.layer_norm_eps, dtypes)
        self.pooler = ViTDense(E, wide, dtypes, config.pooler_act) if pooler else None

    @classmethod
    def of_checkpoint(
        cls, config: Any, names: Collection[str], dtype: DType, reduce_dtype: DType
    ) -> Self:
        """A lazy model for a checkpoint, with a pooler if the checkpoint has it."""
        pooler = any(name.startswith("pooler.") for name in names)
        return cls(config, dtype, reduce_dtype=reduce_dtype, pooler=pooler)

    def hidden_states(
        self, pixels: Any, layer: int = -1, *, interpolate_pos_encoding: bool = False
    ) -> jax.Array:
        """Images ``[N, C, H, W]`` → hidden states ``[N, T, E]`` after a layer, without the norm after the last one.

        Args:
            pixels: the images.
            layer: number of the hidden states as in transformers: 0 are the embeddings, -1 those after the last layer.
            interpolate_pos_encoding: whether images may have another size than the model's.

        Raises:
            UserInputError: the images are of another shape or size, or there are fewer layers.
        """
        x = self.embeddings(jnp.asarray(pixels), interpolate_pos_encoding)  # [N, T, E]
        return run_until(self.encoder.layer, x, layer_number(self.encoder.layer, layer))

    def logits(self, x: jax.Array) -> jax.Array | None:
        """Hidden states ``[N, T, E]`` → logits ``[N, labels]``; None: a model without a head has none."""
        return None

    def __call__(self, pixels: Any, *, interpolate_pos_encoding: bool = False) -> VisionOutput:
        """Images ``[N, C, H, W]`` → hidden states ``[N, T, E]`` after the last norm, and logits of the head.

        Raises:
            UserInputError: the images are of another shape or size.
        """
        x = self.hidden_states(pixels, interpolate_pos_encoding=interpolate_pos_encoding)
        x = self.layernorm(x).astype(x.dtype)
        return VisionOutput(
            x, None if self.pooler is None else self.pooler(x[:, 0]), self.logits(x)
        )

    def image_features(self, pixels: Any) -> jax.Array:
        """Images ``[N, C, H, W]`` → the class token's state, after the pooler if there is one ``[N, d]``."""
        out = self(pixels)
        return out.last_hidden_state[:, 0] if out.pooler_output is None else out.pooler_output


class ViTForImageClassification(ImageClassifier, ViTModel):
    """A ViT with a head for labels."""

    def __init__(self, config: Any, dtype: Any = DType.float32, **options: Any):
        super().__init__(config, dtype, **{"pooler": False, **options})
        self.classifier = Linear(
            config.hidden_size, config.num_labels, DType.of(dtype), has_bias=True
        )

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[N, T, E]`` → logits ``[N, labels]``."""
        return self.classifier(x[:, 0]).astype(jnp.float32)


VIT = ViTModel.family = Family.of(
    ViTModel,
    ViTConfig,
    "ViTModel",
    "ViTForMaskedImageModeling",
    names=Names(
        Body("vit."),
        Drop("classifier.*", "decoder.*", head=True),
        Drop("embeddings.mask_token", kept=True),
    ),
)
ViTForImageClassification.family = with_head(VIT, ViTForImageClassification, "classifier.*")

# --- DeiT: a token that learned from a teacher ----------------------------------------------------------------


@dataclass(frozen=True)
class DeiTConfig(ViTConfig):
    """The settings of a DeiT, with transformers' defaults."""

    model_type = "deit"


class DeiTModel(ViTModel):
    """A DeiT without a head."""

    tokens: ClassVar[tuple[str, ...]] = ("cls_token", "distillation_token")


class DeiTForImageClassification(ViTForImageClassification, DeiTModel):
    """A DeiT with a head for labels, over the class token."""


class DeiTForImageClassificationWithTeacher(ImageClassifier, DeiTModel):
    """A DeiT with two heads for labels, over the class token and over the one that learned from a teacher."""

    def __init__(self, config: Any, dtype: Any = DType.float32, **options: Any):
        super().__init__(config, dtype, **{"pooler": False, **options})
        E, labels, of_head = config.hidden_size, config.num_labels, DType.of(dtype)
        self.cls_classifier = Linear(E, labels, of_head, has_bias=True)
        self.distillation_classifier = Linear(E, labels, of_head, has_bias=True)

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[N, T, E]`` → the mean of the logits of both heads ``[N, labels]``."""
        student, teacher = self.cls_classifier(x[:, 0]), self.distillation_classifier(x[:, 1])
        return (student.astype(jnp.float32) + teacher.astype(jnp.float32)) / 2


DEIT = DeiTModel.family = VIT.like(
    DeiTModel,
    DeiTConfig,
    "DeiTModel",
    "DeiTForMaskedImageModeling",
    names=Names(
        Body("deit."),
        Drop("classifier.*", "*_classifier.*", "decoder.*", head=True),
        Drop("embeddings.mask_token", kept=True),
    ),
)
DeiTForImageClassification.family = with_head(DEIT, DeiTForImageClassification, "classifier.*")
DeiTForImageClassificationWithTeacher.family = with_head(
    DEIT, DeiTForImageClassificationWithTeacher, "*_classifier.*"
)
