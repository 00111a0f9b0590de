"""Vectors and labels of images, and vectors of texts that a model embeds in the same space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import UserInputError
from ..graph.placement.arrays import put, with_sharding
from ..graph.placement.specs import batch_axes, mesh_of
from ..images import ImageProcessor, is_image
from ..lockstep import Lockstep
from ..models.parts.vision import VisionModel
from ..models.pooling import unit
from ..models.weights import check_loaded, model_facts, shardings_of
from ..nn.layer.observe.programs import ProgramObserver
from ..progress import compiling, task
from ..text.tokenizer.arguments import items_of
from ..text.tokenizer.tokenizer import Tokenizer
from .isolation import isolated
from .rows import check_lengths, padded_count


def embed_items(
    model: VisionModel,
    processor: Any,
    items: Iterable[Any],
    together: Lockstep,
    *,
    batch_size: int,
    truncate: bool,
    normalize: bool,
) -> np.ndarray:
    """The vectors of images and texts, float32 ``[items, d]``, in their order.

    Args:
        model: a model of images, or of images and texts.
        processor: what ``maxjax.load`` returned beside the model: its tokenizer, or its image processor.
        items: texts (a str) and images (what :func:`maxjax.images.decode` takes).
        together: the processes that make the call.
        batch_size: the maximum number of items in one batch.
        truncate: whether to truncate texts longer than the model's limit; otherwise they are an error.
        normalize: whether to scale each vector to length 1.

    Raises:
        TypeError: ``items`` is a single one, or an item is neither a text nor an image.
        UserInputError: the model or the processor does not take such items; an image cannot be decoded; a text is too
            long.
    """
    check_loaded(model)
    if is_image(items):
        raise TypeError("items must be a list: put a single image in brackets, [image]")
    listed = [_item(one, i, model) for i, one in enumerate(items_of(items, "items", "a list"))]
    numbers = {kind: [i for i, one in enumerate(listed) if one[0] == kind] for kind in model.takes}
    found: list[Any] = [None] * len(listed)
    for kind, members in numbers.items():
        given = [listed[i][1] for i in members]
        if not members:
            continue
        if kind == "image":
            program, arrays = _image_features, _pixels_of(processor, given)
        else:
            program, arrays = _text_features, _ids_of(model, processor, given, truncate)
        shown_as = f"embedding {{:,}} {kind}s", f" {kind}s"
        vectors = _run(model, together, program, len(members), arrays, batch_size, shown_as)
        for i, vector in zip(members, vectors, strict=True):
            found[i] = vector
    result = np.stack(found) if found else np.zeros((0, _width(model)), np.float32)
    return unit(result) if normalize else result


def image_logits(
    model: VisionModel,
    processor: Any,
    images: list[Any],
    together: Lockstep,
    *,
    batch_size: int,
) -> np.ndarray:
    """The logits of the labels of images, float32 ``[images, labels]``.

    Args:
        model: a model with a head for labels of images.
        processor, images, together, batch_size: as for :func:`embed_items`.

    Raises:
        UserInputError: the processor does not take images, or an image cannot be decoded.
    """
    check_loaded(model)
    pixels = _pixels_of(processor, images)
    return _run(
        model, together, _image_logits, len(images), pixels, batch_size,
        ("classifying {:,} images", " images"),
    )  # fmt: skip


def _item(item: Any, number: int, model: VisionModel) -> tuple[str, Any]:
    """What an item is, "text" or "image", and the text, or what ``decode`` takes.

    A str is a text, and for a model that takes images alone the path of one.
    """
    if isinstance(item, Mapping) and item.get("type") == "text":
        item = item.get("text")
    is_text = isinstance(item, str) and not is_image(item) and "text" in model.takes
    if not (isinstance(item, str) or is_image(item)):
        raise TypeError(
            f"items[{number}] is a {type(item).__name__}, neither a text nor an image: an image is a Path, "
            'an image of Pillow, an array uint8[H, W, 3], or {"type": "image", "image": …}'
        )
    kind = "text" if is_text else "image"
    if kind not in model.takes:
        raise UserInputError(
            f"items[{number}] is an image, and {type(model).__name__} embeds texts alone"
        )
    return kind, item


def _pixels_of(processor: Any, images: list[Any]) -> Callable[[int, int], np.ndarray]:
    """A function from the numbers of the first image and of the one after the last to pixels ``[N, C, H, W]``."""
    found = (
        processor if isinstance(processor, ImageProcessor) else getattr(processor, "images", None)
    )
    if not isinstance(found, ImageProcessor):
        raise UserInputError(
            "images need the model's image processor: the model's directory has no preprocessor_config.json. "
            "Put it there, and pass what maxjax.load returns beside the model"
        )
    return lambda start, stop: found(images[start:stop]).pixels


def _ids_of(
    model: VisionModel, processor: Any, texts: list[str], truncate: bool
) -> Callable[[int, int], np.ndarray]:
    """A function as of :func:`_pixels_of` to token ids ``[B, T]``, padded to the model's maximum length."""
    if not isinstance(processor, Tokenizer):
        raise UserInputError(
            "texts cannot be embedded without a tokenizer: "
            "the model's directory has no tokenizer.json. Put it there"
        )
    limit = model.max_length
    rows = processor.tokens(texts, max_length=limit if truncate else None)
    check_lengths(rows, limit, "shorten it, or pass truncate=True")
    ids = np.full((len(rows), limit), processor.pad_id, np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
    config = getattr(model.config, "text_config", model.config)
    if ids.size and ids.max() >= config.vocab_size:
        raise UserInputError(
            f"the tokenizer gives the token id {ids.max()}, but the vocabulary of the model has "
            f"{config.vocab_size} tokens: the tokenizer belongs to another model"
        )
    return lambda start, stop: ids[start:stop]


def _width(model: VisionModel) -> int:
    """The length of the model's vectors."""
    if "text" in model.takes:
        ids = jax.ShapeDtypeStruct((1, model.max_length), jnp.int32)
        return jax.eval_shape(lambda m, x: m.text_features(x), model, ids).shape[1]
    side = model.config.image_size
    pixels = jax.ShapeDtypeStruct((1, model.config.num_channels, side, side), jnp.float32)
    return jax.eval_shape(lambda m, x: m.image_features(x), model, pixels).shape[1]


@isolated()
def _run(
    model: VisionModel,
    together: Lockstep,
    program: Any,
    count: int,
    arrays_of: Callable[[int, int], np.ndarray],
    batch_size: int,
    shown_as: tuple[str, str],
) -> np.ndarray:
    """The results of a program for ``count`` items, in batches of few shapes."""
    if ProgramObserver(model).is_observed:
        raise UserInputError(
            "capture and patch observe calls of a model of images, model(pixels), not maxjax.embed and maxjax.classify"
        )
    if together.is_shared:
        together.agree(count=count, batch_size=batch_size, **model_facts(model))
    mesh = mesh_of(list(shardings_of(model)))
    gathered = NamedSharding(mesh, PartitionSpec()) if together.is_shared and mesh else None
    found = []
    with task(shown_as[0].format(count), count, unit=shown_as[1]) as shown:
        for start in range(0, count, batch_size):
            arrays = arrays_of(start, min(start + batch_size, count))
            real = len(arrays)
            rows = padded_count(real, batch_size)
            arrays: Any = np.concatenate([arrays, np.repeat(arrays[-1:], rows - real, axis=0)])
            if mesh is not None:  # shard the batch over the data axes
                arrays = put(
                    arrays, where=NamedSharding(mesh, PartitionSpec(batch_axes(mesh, rows)))
                )
            if together.is_shared:
                together.decide()  # a barrier: every process has this batch
            with compiling(together.call):
                output = together.run(program, model, arrays, gathered=gathered)
            output = together.fetch(output) if together.is_shared else output
            found.append((output, real))
            shown.add(real)
        # Waiting begins only here: the devices compute while the host decodes images.
        return np.concatenate([np.asarray(output)[:real] for output, real in found])


def _result(x: jax.Array, gathered: NamedSharding | None) -> jax.Array:
    x = x.astype(jnp.float32)
    return x if gathered is None else with_sharding(x, gathered)


@partial(jax.jit, static_argnames="gathered")
def _image_features(model: Any, pixels: Any, *, gathered: Any = None) -> jax.Array:
    return _result(model.image_features(pixels), gathered)


@partial(jax.jit, static_argnames="gathered")
def _text_features(model: Any, ids: Any, *, gathered: Any = None) -> jax.Array:
    return _result(model.text_features(ids), gathered)


@partial(jax.jit, static_argnames="gathered")
def _image_logits(model: Any, pixels: Any, *, gathered: Any = None) -> jax.Array:
    return _result(model(pixels).logits, gathered)
