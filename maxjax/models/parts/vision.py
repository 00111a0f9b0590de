"""What image encoders share: patches, positions for other sizes of images, and the base classes of their models.

Shapes: N images of H × W pixels in C channels, P patches of p × p pixels, hidden size E.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from ...dtype import DType
from ...errors import UserInputError
from ...graph.device import DeviceRef
from ...graph.placement.split import REPLICATED
from ...graph.weight.weight import Weight
from ...kernels import explicit, matmul
from ...nn.layer import LayerStack, Module
from ..family import PretrainedModel
from .config import LabelledConfig
from .heads import CLASSIFY
from .layer_loop import is_faster_separate, stack_layers, unstack_layers

# The largest height and width of images that a model may be made for: no tensor of a file says them.
MAX_PIXELS = 1 << 14


class VisionConfig(LabelledConfig):
    """Base class of the configurations of image encoders, which have ``image_size`` and ``patch_size``."""

    image_size: int
    patch_size: int

    def _check(self) -> None:
        """Raise ValueError if fields contradict each other."""
        if self.image_size < self.patch_size:
            raise ValueError(
                f"'image_size' {self.image_size} is smaller than 'patch_size' {self.patch_size}"
            )
        super()._check()

    @property
    def num_patches(self) -> int:
        """The number of patches of an image of ``image_size``; pixels that do not fill a patch are left out."""
        return (self.image_size // self.patch_size) ** 2


class VisionOutput(NamedTuple):
    """The result of an image encoder. Logits are float32.

    Attributes:
        last_hidden_state: hidden states ``[N, T, E]``, of class and register tokens first, if there are any, and
            then of the patches, row by row.
        pooler_output: one vector for each image ``[N, E]``; None if the model has no pooling.
        logits: of the labels ``[N, labels]``; None without a head.
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array | None = None
    logits: jax.Array | None = None


# --- patches and positions


def patches(pixels: jax.Array, patch_size: int) -> jax.Array:
    """Cut images into patches, row by row; pixels at the right and at the bottom that do not fill one are left out.

    Args:
        pixels: ``[N, C, H, W]``.
        patch_size: p.

    Returns:
        ``[N, P, C p p]``, in the order of the axes of a convolution's weight.

    Example:
        >>> patches(jnp.arange(16.0).reshape(1, 1, 4, 4), 2)[0, 1].tolist()
        [2.0, 3.0, 6.0, 7.0]
    """
    n, c, h, w = pixels.shape
    rows, columns, p = h // patch_size, w // patch_size, patch_size
    x = pixels[:, :, : rows * p, : columns * p].reshape(n, c, rows, p, columns, p)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(n, rows * columns, c * p * p)


class PatchEmbedding(Module):
    """A linear layer over the pixels of each patch; files hold it as a convolution with the stride of its kernel."""

    def __init__(
        self, channels: int, patch_size: int, size: int, dtype: DType, has_bias: bool = True
    ):
        super().__init__()
        self.channels, self.patch_size = channels, patch_size
        shape, cpu = (size, channels, patch_size, patch_size), DeviceRef.CPU()
        self.weight = Weight("weight", dtype, shape, cpu)
        self.bias = Weight("bias", dtype, (size,), cpu) if has_bias else None

    def __call__(self, pixels: jax.Array) -> jax.Array:
        if pixels.ndim != 4 or pixels.shape[1] != self.channels:
            raise UserInputError(
                f"pixels must be [N, {self.channels}, H, W], not of shape {tuple(pixels.shape)}"
            )
        if min(pixels.shape[2:]) < self.patch_size:
            raise UserInputError(
                f"an image of {pixels.shape[2]} × {pixels.shape[3]} pixels is smaller than a patch "
                f"of {self.patch_size} × {self.patch_size}"
            )
        return patch_product(patches(pixels, self.patch_size), self.weight, self.bias)  # [N, P, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Every device holds the layer completely: it is small."""
        return {"weight": REPLICATED, "bias": REPLICATED}


def patch_product(x: jax.Array, weight: Any, bias: Any = None) -> jax.Array:
    """Patches ``[N, P, …]`` times a weight that is held as a convolution's, in its dtype: ``[N, P, E]``."""
    kernel = jnp.asarray(weight)
    y = matmul(x.astype(kernel.dtype), kernel.reshape(kernel.shape[0], -1))
    return y if bias is None else y + jnp.asarray(bias)[None, None]


def automatic_rows(axes: int) -> Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]:
    """Return a decorator of ``__call__(self, x, …)``, in which XLA chooses shardings, also where axes are Explicit.

    Args:
        axes: number of axes of the result; its first axis is sharded as that of ``x``, the others are not.
    """

    def decorate(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        @functools.wraps(call)
        def run(self: Any, x: jax.Array, *args: Any) -> jax.Array:
            mesh = explicit.mesh_of(x, *jax.tree.leaves(self))
            if mesh is None:
                return call(self, x, *args)
            wanted = [explicit.entries(x)[0], *[()] * (axes - 1)]
            return explicit.automatic(lambda m, a: call(m, a, *args), mesh, wanted)(self, x)

        return run

    return decorate


def prepend(tokens: jax.Array, x: jax.Array) -> jax.Array:
    """Return hidden states ``[N, k + T, E]``: learned tokens ``[1, k, E]``, and then ``x`` ``[N, T, E]``."""
    tokens = jnp.broadcast_to(tokens, (len(x), *tokens.shape[1:]))
    return jnp.concatenate([tokens.astype(x.dtype), x], axis=1)


def position_table(
    table: jax.Array,
    pixels: jax.Array,
    config: VisionConfig,
    interpolate: bool,
    **options: bool,
) -> jax.Array:
    """Return the positions of the patches of images: the table itself, or interpolated for images of another size.

    Args:
        table: the positions ``[P', E]`` of the patches of an image of ``config.image_size``.
        pixels: the images ``[N, C, H, W]``.
        config: settings of the model.
        interpolate: whether images may have another size.
        options: as for :func:`interpolated`.

    Raises:
        UserInputError: the images have another size, and ``interpolate`` is false.
    """
    height, width = pixels.shape[2:]
    if (height, width) == (config.image_size, config.image_size):
        return table
    if not interpolate:
        raise UserInputError(
            f"an image has {height} × {width} pixels, and the model takes {config.image_size} × "
            f"{config.image_size}: resize it, or pass interpolate_pos_encoding=True"
        )
    return interpolated(table, height // config.patch_size, width // config.patch_size, **options)


def interpolated(
    table: jax.Array, rows: int, columns: int, *, antialias: bool = False
) -> jax.Array:
    """Interpolate a square table of positions for images with other numbers of patches, bicubically.

    Args:
        table: the positions ``[n · n, E]``, row by row.
        rows, columns: numbers of patches of the images.
        antialias: whether to smooth what is made smaller, as in PyTorch's ``interpolate(antialias=True)``.

    Returns:
        ``[rows · columns, E]`` in the dtype of the table, computed in float32.

    Example:
        >>> interpolated(jnp.ones((9, 4)), 2, 5).shape
        (10, 4)
    """
    side = round(len(table) ** 0.5)
    if (rows, columns) == (side, side):
        return table
    grid = table.astype(jnp.float32).reshape(side, side, -1)
    down = cubic_weights(side, rows, antialias=antialias)  # [rows, n]
    across = cubic_weights(side, columns, antialias=antialias)  # [columns, n]
    grid = jnp.einsum("hi,ije->hje", down, grid, precision="highest")
    grid = jnp.einsum("wj,hje->hwe", across, grid, precision="highest")
    return grid.reshape(rows * columns, -1).astype(table.dtype)


@functools.cache
def cubic_weights(size: int, new: int, *, antialias: bool = False) -> np.ndarray:
    """Return the matrix ``[new, size]`` that resizes an axis bicubically, with the rules of PyTorch's ``interpolate``.

    Centres of pixels are at halves (``align_corners=False``). Without ``antialias`` the cubic has -3/4 as its
    coefficient, and pixels beyond an end are those at the end; with it it has -1/2, is as wide as the reduction, and
    leaves out what is beyond an end.

    Example:
        >>> cubic_weights(2, 4).sum(1).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    found, scale = np.zeros((new, size)), size / new
    for i in range(new):
        centre = (i + 0.5) * scale
        if antialias:
            stretch = max(scale, 1.0)
            start = max(int(centre - 2 * stretch + 0.5), 0)
            end = min(int(centre + 2 * stretch + 0.5), size)
            at = np.arange(start, end)
            weights = _cubic((at - centre + 0.5) / stretch, -0.5)
            found[i, at] = weights / weights.sum()
        else:
            at = np.floor(centre - 0.5).astype(int) + np.arange(-1, 3)
            np.add.at(found[i], np.clip(at, 0, size - 1), _cubic(at - centre + 0.5, -0.75))
    return found.astype(np.float32)


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel (R. Keys, 1981) with the coefficient ``a``."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


# --- layers


def run_until(layers: Any, x: jax.Array, count: int, *args: Any) -> jax.Array:
    """Run the first ``count`` layers in order: ``x = layer(x, *args)`` for each; a LayerStack as one loop.

    Args:
        layers: a LayerList or a LayerStack.
        x: hidden states ``[N, T, E]``.
        count: number of layers. A loop runs all, and keeps the states after that number.
        args: further arguments of every layer.
    """
    if not isinstance(layers, LayerStack):
        layers = layers[:count]
    return run_and_keep(layers, x, (count - 1,), *args)[1][0]


def run_and_keep(
    layers: Any, x: jax.Array, kept: Sequence[int], *args: Any
) -> tuple[jax.Array, list[jax.Array]]:
    """Run all layers in order, ``x = layer(x, *args)`` for each; a LayerStack as one loop.

    Args:
        layers: a LayerList or a LayerStack.
        x: hidden states ``[N, T, E]``.
        kept: numbers of layers.
        args: further arguments of every layer.

    Returns:
        The hidden states after the last layer, and those after each of the layers ``kept``; ``x`` for -1.
    """
    carry = x, [x] * len(kept)
    if isinstance(layers, LayerStack):
        return layers.scan(carry, index="number", call=_run_layer, kept=tuple(kept), args=args)
    for number, layer in enumerate(layers):
        carry = _run_layer(layer, carry, number, kept, args)
    return carry


def _run_layer(layer: Any, carry: Any, number: Any, kept: Sequence[int], args: Any) -> Any:
    x, found = carry
    x = layer(x, *args)
    return x, [jnp.where(number == one, x, old) for one, old in zip(kept, found, strict=True)]


def layer_number(layers: Any, layer: int) -> int:
    """Return after how many layers the hidden states with a number are: 0 are the embeddings, -1 those after the last.

    The numbers are those of ``hidden_states`` in transformers, and of "vision_feature_layer" in files.

    Raises:
        UserInputError: there are fewer layers.

    Example:
        >>> layer_number(range(24), -2), layer_number(range(24), 24)
        (23, 24)
    """
    count = len(layers)
    if not -count - 1 <= layer <= count:
        raise UserInputError(f"there are no hidden states {layer}: the model has {count} layers")
    return layer if layer >= 0 else count + 1 + layer


class VisionModel(PretrainedModel):
    """Base class of image encoders, with a head or without, and of models of images and texts.

    An architecture makes its parts in ``__init__(config, dtype, *, reduce_dtype)``, sets ``config`` and
    ``reduce_dtype``, and defines its call and the features of what it takes.

    Attributes:
        config: settings of the model.
        reduce_dtype: dtype in which norms, softmax and pooling are computed.
        takes: what the model embeds: "image", "text".
        pads_texts: whether texts are padded to the maximum length, and padding is seen.
    """

    config: Any
    reduce_dtype: DType
    takes: ClassVar[tuple[str, ...]] = ("image",)
    pads_texts: ClassVar[bool] = False

    @classmethod
    def of_checkpoint(
        cls, config: Any, names: Collection[str], dtype: DType, reduce_dtype: DType
    ) -> Self:
        """:meth:`PretrainedModel.of_checkpoint`."""
        make: Any = cls
        return make(config, dtype, reduce_dtype=reduce_dtype)

    @property
    def id2label(self) -> dict[int, str]:
        """The names of the labels of the model's head, by number."""
        return self.config.id2label

    @property
    def problem_type(self) -> str | None:
        """What the labels of an image are, as ``config.json`` says; None if it does not say."""
        return self.config.problem_type

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a text."""
        config = getattr(self.config, "text_config", self.config)
        return config.max_position_embeddings

    def stack(self) -> Self:
        """Stack the layers of each encoder in a LayerStack, in place: equal layers are compiled once."""
        stack_layers(self)
        return self

    def unstack(self) -> Self:
        """Give each layer its own weights again, in place, with the same values bit for bit."""
        unstack_layers(self)
        return self

    def stack_for(self, place: Any = None) -> Self:
        """Stack the layers or separate them, in place, whichever is faster on the devices.

        Args:
            place: mesh, Sharding or device that the model is for; None for the default device.
        """
        return self.unstack() if is_faster_separate(place) else self.stack()

    def image_features(self, pixels: Any) -> jax.Array:
        """Images ``[N, C, H, W]`` → one vector for each ``[N, d]``, not normalised.

        Raises:
            UserInputError: the model does not take images, or has no layers for one vector of an image.
        """
        raise UserInputError(f"{type(self).__name__} does not embed images")

    def text_features(self, input_ids: Any, attention_mask: Any = None) -> jax.Array:
        """Token ids ``[B, T]`` → one vector for each text ``[B, d]``, not normalised.

        Raises:
            UserInputError: the model does not take texts, or a text is too long.
        """
        raise UserInputError(f"{type(self).__name__} does not embed texts")


class ImageClassifier:
    """Mixin of image encoders with a head for labels; each class with one defines its call, with logits."""

    task: ClassVar[str | None] = CLASSIFY


def checked_ids(
    input_ids: Any, attention_mask: Any, limit: int
) -> tuple[jax.Array, jax.Array | None]:
    """Return the token ids ``[B, T]`` and the mask, as bools, of a text encoder's call.

    Raises:
        UserInputError: the ids are not ``[B, T]``, or there are more than ``limit`` tokens.
    """
    ids = jnp.asarray(input_ids)
    if ids.ndim != 2 or not ids.shape[1]:
        raise UserInputError(f"input_ids must be [B, T], not of shape {ids.shape}")
    if ids.shape[1] > limit:
        raise UserInputError(
            f"the sequence has {ids.shape[1]} tokens and the model takes {limit}: shorten it"
        )
    return ids, None if attention_mask is None else jnp.asarray(attention_mask).astype(bool)


class ImageTextOutput(NamedTuple):
    """The result of a model of images and texts. Logits are float32.

    Attributes:
        logits_per_image: how well each text fits each image ``[images, texts]``.
        logits_per_text: the same, transposed.
        text_embeds, image_embeds: unit vectors of the texts and of the images ``[…, d]``.
    """

    logits_per_image: jax.Array
    logits_per_text: jax.Array
    text_embeds: jax.Array
    image_embeds: jax.Array


class ImageTextModel(VisionModel):
    """Base class of models that embed images and texts in one space, as CLIP does.

    An architecture defines :meth:`image_features`, :meth:`text_features` and :meth:`logits_of`.

    Attributes:
        probabilities: the function from logits to probabilities that the model was trained with: "softmax", over
            the texts, or "sigmoid", for each pair of an image and a text.
    """

    takes: ClassVar[tuple[str, ...]] = ("image", "text")
    probabilities: ClassVar[str] = "softmax"

    def logits_of(self, similarity: jax.Array) -> jax.Array:
        """Cosines of the angles between images and texts, float32 → logits."""
        raise NotImplementedError

    def __call__(
        self, input_ids: Any, pixel_values: Any, attention_mask: Any = None
    ) -> ImageTextOutput:
        """Token ids ``[B, T]`` and images ``[N, C, H, W]`` → vectors, and a logit for each pair.

        Raises:
            UserInputError: the images are of another size than the model's, or the texts are too long.
        """
        texts = normalized(self.text_features(jnp.asarray(input_ids), attention_mask))
        images = normalized(self.image_features(jnp.asarray(pixel_values)))
        product = partial(jnp.einsum, "nd,bd->nb", precision="highest")
        wanted = [explicit.entries(images)[0], ()]
        cosines = explicit.automatic(product, explicit.mesh_of(images), wanted)(images, texts)
        logits = self.logits_of(cosines)  # [N, B]
        return ImageTextOutput(logits, logits.T, texts, images)


def normalized(x: jax.Array) -> jax.Array:
    """Vectors ``[…, d]`` divided by their lengths, in float32."""
    x = x.astype(jnp.float32)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
