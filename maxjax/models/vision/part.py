"""VisionPart: what turns pictures into features of a language model's tokens, the tower and the connector.

Shapes: N images or tiles, P features of each, E features of a token of the language model, T tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...dtype import DType
from ...errors import UnsupportedModelError, shown
from ...graph.device import DeviceRef
from ...graph.placement.split import REPLICATED
from ...graph.weight.weight import Weight
from ...nn.activation import activation
from ...nn.layer import Module
from ..gguf.mmproj import MmprojTable
from ..names import Names
from ..parts.rotary import Angles
from ..parts.vision import patch_product

# The largest number of tiles that the tower gets at once.
_AT_ONCE = 8


class PictureFeatures(NamedTuple):
    """The features of a picture.

    Attributes:
        rows: ``[tokens, E]``.
        deepstack: features ``[n, tokens, E]`` that are added after each of the first n layers; None: none are.
    """

    rows: np.ndarray
    deepstack: np.ndarray | None = None


class VisionPart(Module):
    """Base class of the vision parts of vision-language models, ``model.vision``.

    A subclass makes the tower and the connector in ``__init__(raw, config, dtype)``, as attributes that are named as in
    files, and its call takes pixels and returns features ``[N, P, E]``.

    Args:
        raw: content of the ``config.json`` of the vision-language model.
        config: settings of its language model.
        dtype: dtype of weights and activations.

    Attributes:
        names: the first parts of the names of its tensors in files, which are its attributes.
        text_names: how the names of the language model begin in files, in place of "model.".
        sees_whole: whether a token of a picture attends to all tokens of the picture, later ones too.
        sees_prompt: whether all tokens of a prompt with pictures attend to all of it.
        image_token: id of the token that features stand in place of.
        gguf: how ``mmproj`` files name its tensors and settings; None: they are not supported.
    """

    gguf: ClassVar[MmprojTable | None] = None
    names: ClassVar[tuple[str, ...]] = ("vision_tower", "multi_modal_projector")
    text_names: ClassVar[str] = "model.language_model."
    sees_whole: ClassVar[bool] = False
    sees_prompt: ClassVar[bool] = False

    def __init__(self, raw: Mapping[str, Any], config: Any, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.image_token = image_token(raw)

    @classmethod
    def names_with(cls, names: Names) -> Names:
        """The names of the tensors of the whole model, in files and in maxjax; ``names`` are the language model's."""
        return names.with_vision(cls.names, cls.text_names)

    def blocks(self, at: Any) -> Any:
        """Return the number of the block of each token, of a prompt with pictures; None: tokens see no later ones.

        Args:
            at: the row of features of each token, int32 ``[..., T]``; -1 for a token of text.

        Returns:
            int32 ``[..., T]``: the tokens of a run of the same number attend to each other; -1 for none.
        """
        if self.sees_prompt:
            return 0 * at
        return (at >= 0).astype(at.dtype) - 1 if self.sees_whole else None

    def encode(self, inputs: Any, run: Callable[..., Any]) -> PictureFeatures:
        """Return the features of the tokens of one picture.

        Args:
            inputs: what the image processor makes of the picture (``ImageInputs``).
            run: calls this module, compiled, and returns NumPy arrays.
        """
        return PictureFeatures(
            self.of_tiles(inputs.pixels, run).reshape(-1, self.config.hidden_size)
        )

    def of_tiles(self, pixels: np.ndarray, run: Callable[..., Any]) -> np.ndarray:
        """Return the features ``[N, P, E]`` of tiles of equal size; few programs are compiled for any number."""
        found = []
        for start in range(0, len(pixels), _AT_ONCE):
            some = pixels[start : start + _AT_ONCE]
            size = 1 << (len(some) - 1).bit_length()
            padded = np.zeros((size, *some.shape[1:]), some.dtype)
            padded[: len(some)] = some
            found.append(run(self, padded)[: len(some)])
        return np.concatenate(found)

    def positions(self, ids: np.ndarray, pictures: list[Any]) -> np.ndarray | None:
        """Return the positions of a prompt's tokens for RoPE, integers ``[T, 3]``; None: they are numbered.

        Args:
            ids: token ids of the prompt ``[T]``.
            pictures: the ``ImageInputs`` of each of its pictures.
        """
        return None


class PackedVision(VisionPart):
    """Base class of the vision parts of Qwen's models: patches of pictures of any size, and positions of three axes.

    Attributes:
        visual: the tower with the merger, which a call runs; its settings ``config`` have ``spatial_merge_size``.
    """

    names: ClassVar[tuple[str, ...]] = ("visual",)
    visual: Any

    def __call__(self, *frames: Any) -> Any:
        """Patches of frames → features ``[F, P / m², E]``, and those for deepstack if the tower has any."""
        return self.visual(*frames)

    def positions(self, ids: np.ndarray, pictures: list[Any]) -> np.ndarray:
        """See :class:`VisionPart`."""
        grids = [one.grids[0] for one in pictures]
        return axes_of(ids, self.image_token, grids, self.visual.config.spatial_merge_size)


def image_token(raw: Mapping[str, Any]) -> int:
    """The id of the token that features of images stand in place of, in the ``config.json`` of a model.

    Example:
        >>> image_token({"image_token_index": 32000})
        32000
    """
    found = next((raw[key] for key in ("image_token_id", "image_token_index") if key in raw), None)
    if type(found) is not int:
        raise ValueError(f"'image_token_id' must be an integer, not {shown(found)}")
    return found


def tower_of(raw: Any, dtype: DType) -> Any:
    """The image encoder that a ``vision_config`` describes: of a CLIP or a SigLIP.

    Raises:
        UnsupportedModelError: it is of another kind.
        CheckpointFormatError: a setting is missing or wrong.
    """
    from .clip import CLIPVision, CLIPVisionConfig
    from .siglip import SiglipVision, SiglipVisionConfig

    kind = raw.get("model_type") if isinstance(raw, Mapping) else None
    if kind in ("clip_vision_model", None):
        return CLIPVision(CLIPVisionConfig.from_dict(raw or {}), dtype)
    if kind == "siglip_vision_model":
        return SiglipVision(SiglipVisionConfig.from_dict(raw), dtype)
    raise UnsupportedModelError(f"a vision tower of type {shown(kind)} is not supported")


# --- patches of pictures of any size, with the rules of Qwen's models


class PatchProjection(Module):
    """A linear layer over the pixels of each patch, which files hold as a convolution over frames, rows and columns.

    Args:
        shape: shape ``[E, C, t, p, p]`` of its weight.
        dtype: dtype of the weight.
        has_bias: whether there is a bias.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DType, *, has_bias: bool = False):
        super().__init__()
        self.proj = PatchConvolution(shape, dtype, has_bias)

    def __call__(self, patches: jax.Array) -> jax.Array:
        """Patches ``[F, P, C t p p]`` → ``[F, P, E]``."""
        return self.proj(patches)


class PatchConvolution(Module):
    """The weights of :class:`PatchProjection`."""

    def __init__(self, shape: tuple[int, ...], dtype: DType, has_bias: bool):
        super().__init__()
        self.weight = Weight("weight", dtype, shape, DeviceRef.CPU())
        self.bias = Weight("bias", dtype, shape[:1], DeviceRef.CPU()) if has_bias else None

    def __call__(self, patches: jax.Array) -> jax.Array:
        return patch_product(patches, self.weight, self.bias)

    def sharding_rules(self) -> dict[str, Any]:
        """Every device holds the layer completely: it is small."""
        return {"weight": REPLICATED, "bias": REPLICATED}


class Gelu(Module):
    """The activation between the linear layers of a merger, which files number."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return activation("gelu")(x)


class Frames(NamedTuple):
    """The patches of a picture, or of the frames of a video, of which each is encoded by itself.

    Patches are in the order of the tokens of the language model: those that become one token follow one another.

    Attributes:
        patches: pixels ``[F, P, C t p p]``, with padding.
        places: row and column of each patch, int32 ``[P, 2]``.
        real: which patches are not padding, bools ``[P]``.
        count: number of real patches.
    """

    patches: np.ndarray
    places: np.ndarray
    real: np.ndarray
    count: int

    @staticmethod
    def of(inputs: Any, merge: int, least: int = 64) -> Frames:
        """The frames of one picture (``ImageInputs``), padded to a power of two of tokens.

        Args:
            inputs: the picture.
            merge: so many rows and columns of patches become one token.
            least: the smallest number of patches of a frame.
        """
        frames, rows, columns = map(int, inputs.grids[0])
        patches = inputs.pixels.reshape(frames, rows * columns, -1)
        return Frames.padded(patches, places_of(rows, columns, merge), merge, least)

    @staticmethod
    def padded(patches: np.ndarray, places: np.ndarray, merge: int, least: int = 64) -> Frames:
        """Patches ``[F, count, C t p p]`` at these places ``[count, 2]``, padded to a power of two of tokens."""
        count, unit = len(places), merge**2
        size = max(least // unit, 1 << (count // unit - 1).bit_length()) * unit
        pixels = np.zeros((len(patches), size, patches.shape[-1]), np.float32)
        at = np.zeros((size, 2), np.int32)
        pixels[:, :count], at[:count] = patches, places
        return Frames(pixels, at, np.arange(size) < count, count)

    def tokens(self, features: np.ndarray, merge: int) -> np.ndarray:
        """Features ``[F, P / merge², E]`` of all frames, one after the other, without padding: ``[tokens, E]``."""
        real = features[:, : self.count // merge**2]
        return real.reshape(-1, real.shape[-1])


def places_of(rows: int, columns: int, merge: int) -> np.ndarray:
    """The row and the column of each patch, int32 ``[rows · columns, 2]``, block by block of ``merge × merge``.

    Example:
        >>> places_of(2, 4, 2).tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    """
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    grid = grid.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2)
    return grid.reshape(-1, 2).astype(np.int32)


def angles_of(places: jax.Array, head_dim: int, theta: float = 10_000.0) -> Angles:
    """The angles of RoPE for patches: half of the pairs of features turn by the row, the others by the column.

    Args:
        places: row and column of each patch, integers ``[P, 2]``.
        head_dim: width D of a head.
        theta: base of the frequencies.

    Returns:
        Angles ``[1, P, D / 2]``.
    """
    half = head_dim // 2
    freqs = 1.0 / theta ** (np.arange(0, half, 2, dtype=np.float32) / np.float32(half))
    angles = (places.astype(jnp.float32)[..., None] * freqs[None, None]).reshape(1, -1, half)
    return Angles(jnp.cos(angles), jnp.sin(angles), False)


def axes_of(ids: np.ndarray, token: int, grids: list[Any], merge: int) -> np.ndarray:
    """The positions of a prompt's tokens for M-RoPE: a time, a row and a column, int32 ``[T, 3]``.

    The tokens of a picture have the same time, and their rows and columns in it; the text goes on after the largest of
    these positions (arXiv:2409.12191).

    Args:
        ids: token ids of the prompt ``[T]``.
        token: id of the placeholders of pictures.
        grids: frames, rows and columns of patches of each picture.
        merge: so many rows and columns of patches are one token.

    Example:
        >>> axes_of(np.array([5, 9, 9, 6]), 9, [(1, 2, 4)], 2).tolist()
        [[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3]]
    """
    found, at, position = np.zeros((len(ids), 3), np.int32), 0, 0
    left = list(grids)
    while at < len(ids):
        if ids[at] != token:
            found[at] = position
            at, position = at + 1, position + 1
            continue
        frames, rows, columns = (int(n) for n in left.pop(0))
        rows, columns = rows // merge, columns // merge
        each = np.meshgrid(*map(np.arange, (frames, rows, columns)), indexing="ij")
        places = np.stack(each, axis=-1).reshape(-1, 3)
        found[at : at + len(places)] = places + position
        at, position = at + len(places), position + max(rows, columns)
    return found
