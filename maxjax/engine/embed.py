"""``embed``: one vector for each text, or for each image and text of a model of images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..dtype import DType
from ..elsewhere import unknown_argument
from ..errors import (
    UnsupportedModelError,
    UserInputError,
    checked_integer,
    one_of,
    releasing,
)
from ..graph.placement.arrays import with_sharding
from ..graph.placement.specs import mesh_of
from ..images import ImageProcessor
from ..lockstep import Lockstep
from ..models import LanguageModel
from ..models.parts.vision import VisionModel
from ..models.pooling import POOLINGS, Pooling, densified, normalized, pool, unit
from ..models.weights import check_loaded, shardings_of
from ..nn.layer.observe.programs import tapped
from ..nn.layer.walk import check_module
from ..text.tokenizer.arguments import check_is_tokenizer, checked_texts
from ..text.tokenizer.tokenizer import Encoding, Tokenizer
from .images import embed_items
from .isolation import isolated
from .packing import PackedTokens, places
from .rows import MIN_LENGTH, check_lengths, encoder_output, run_rows, text_limit


def embed(
    model: Any,
    tokenizer: Tokenizer | ImageProcessor | None,
    texts: Iterable[Any],
    *,
    batch_size: int = 32,
    truncate: bool = False,
    normalize: bool | None = None,
    pooling: Pooling | str | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    truncate_dim: int | None = None,
    **unknown: Any,
) -> np.ndarray:
    """Computes one vector per text, pooled as the checkpoint's sentence-transformers files say.

    A model of images and texts (CLIP, SigLIP) gives items of both vectors in one space, of length 1; a model of images
    (DINOv2, ViT) vectors of images.

    Several processes that share the model's mesh make the call together, with the same arguments,
    and all get the vectors. Without such files (``model.pooling``), an encoder uses the mean over
    the tokens of a text; a decoder needs ``pooling``, usually ``"lasttoken"`` or ``"mean"``.

    Args:
        model: a text encoder, a decoder, or a model of images, as returned by ``maxjax.load``.
        tokenizer: the model's tokenizer, or its image processor: what ``maxjax.load`` returned beside the model.
        texts: the texts; an empty text is allowed. For a model of images, images too: a Path, an image of Pillow, an
            array ``uint8[H, W, 3]``, or ``{"type": "image", "image": …}`` with one of these or a path as a str.
        batch_size: the maximum number of rows in one batch. A row holds one text, or several short
            texts of an encoder.
        truncate: whether to truncate texts longer than the model's limit; otherwise they are an
            error.
        normalize: whether to scale each vector to length 1; None follows the files, and means True for a model of
            images.
        pooling: the pooling to use instead of that of the files: ``"lasttoken"``, ``"mean"``,
            another name in ``maxjax.models.pooling.POOLINGS``, or a ``Pooling``.
        prompt: a text to put before every text.
        prompt_name: the name of a prompt in the files, used as ``prompt``. Without either, the
            files' default prompt is used if they have one.
        truncate_dim: how many of the first numbers of each vector are kept, for a model that was trained
            for it (A. Kusupati et al., Matryoshka representation learning, arXiv:2205.13147). As in
            sentence-transformers, only ``normalize=True`` gives the rest length 1 again. By default the number of
            the model's files, or all.

    Returns:
        The vectors, float32 ``[len(texts), d]``, in the order of the texts; d is ``truncate_dim`` if it
        is given.

    Raises:
        TypeError: a text or the prompt is not a str; or an argument is unknown, and the message suggests the right
            name if it can.
        UserInputError: there is no tokenizer; a text is too long; the model's weights are not
            loaded, or it is neither an encoder nor a decoder; the pooling of a decoder is not
            known; the files do not have the named prompt; ``truncate_dim`` is not between 1 and d; an image
            cannot be decoded, or the model does not take it, or takes no pooling or prompt.
        UnsupportedModelError: the files configure a module that maxjax does not support.
        ProgramMismatchError: the model, a text or an option is not the same in all processes.
        PeerFailedError, PeerLostError: another process raised an error in this call, or has ended.
    """
    for name in unknown:
        raise unknown_argument(embed, name)
    truncate_dim = None if truncate_dim is None else checked_integer("truncate_dim", truncate_dim)
    with Lockstep("embed", shardings_of(model)) as together, releasing():
        if isinstance(model, VisionModel):
            refused = {"pooling": pooling, "prompt": prompt, "prompt_name": prompt_name}
            for name in (one for one, value in refused.items() if value is not None):
                raise UserInputError(
                    f"{name}= is for models of texts, not for {type(model).__name__}"
                )
            found = embed_items(
                model, tokenizer, texts, together, truncate=truncate,
                batch_size=checked_integer("batch_size", batch_size), normalize=normalize is not False,
            )  # fmt: skip
            together.finish()
            return found if truncate_dim is None else _truncated(found, truncate_dim, normalize)
        found = _embed(
            model, tokenizer, texts, together,
            batch_size=batch_size, truncate=truncate, normalize=normalize, pooling=pooling,
            prompt=prompt, prompt_name=prompt_name, truncate_dim=truncate_dim,
        )  # fmt: skip
        together.finish()
    if truncate_dim is None:
        given = pooling if isinstance(pooling, Pooling) else getattr(model, "pooling", None)
        truncate_dim = None if given is None else given.truncate_dim
    return found if truncate_dim is None else _truncated(found, truncate_dim, normalize)


def _truncated(vectors: np.ndarray, count: int, normalize: bool | None) -> np.ndarray:
    width = vectors.shape[1]
    if count > width:
        raise UserInputError(f"truncate_dim={count} must be from 1 to {width}")
    vectors = np.ascontiguousarray(vectors[:, :count])
    return unit(vectors) if normalize else vectors


def _embed(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    together: Lockstep,
    *,
    batch_size: int,
    truncate: bool,
    normalize: bool | None,
    pooling: Pooling | str | None,
    prompt: str | None,
    prompt_name: str | None,
    truncate_dim: int | None,
) -> np.ndarray:
    check_module(model, "embed")
    check_is_tokenizer(tokenizer)
    if tokenizer is None:
        raise UserInputError(
            "texts cannot be embedded without a tokenizer: "
            "the model's directory has no tokenizer.json. Put it there"
        )
    pooling, batch_size = _pooling(model, pooling), checked_integer("batch_size", batch_size)
    if prompt is not None and not isinstance(prompt, str):
        raise TypeError(f"prompt is a {type(prompt).__name__}, not a str")
    if prompt is None:
        prompt = pooling.before(prompt_name)
    elif prompt_name is not None:
        raise UserInputError("prompt= and prompt_name= are both given: pass one of them")
    normalize = pooling.normalize if normalize is None else bool(normalize)
    limit = text_limit(model, tokenizer, pooling)
    rows = _rows(tokenizer, texts, pooling, limit, truncate, prompt)
    skipped = 0 if pooling.include_prompt else _tokens_of(tokenizer, pooling, prompt)
    return pooled_rows(
        model, tokenizer, rows, together, ("embedding {:,} texts", " texts"), batch_size=batch_size, limit=limit,
        pooling=replace(pooling, normalize=normalize), skipped=skipped, facts={"truncate_dim": truncate_dim},
    )  # fmt: skip


@isolated()
def pooled_rows(
    model: Any,
    tokenizer: Tokenizer,
    rows: list[Encoding],
    together: Lockstep,
    shown_as: tuple[str, str],
    *,
    batch_size: int,
    limit: int,
    pooling: Pooling,
    skipped: int = 0,
    head: bool = False,
    answers: tuple[int, int] | None = None,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> np.ndarray:
    """The pooled state of each row of tokens, float32 ``[rows, d]``, or the output of the model's head for it.

    Args:
        model, tokenizer, rows, together, shown_as, batch_size, limit: as for ``run_rows``.
        pooling: modes, dense layers and normalisation.
        skipped: number of first tokens that are not pooled.
        head: whether the model's classification head is applied to the pooled states.
        answers: two token ids; a decoder's result is the logit of the first minus that of the second.
        facts: further options, which must be the same in all processes.
    """
    settings: dict[str, Any] = {
        "modes": pooling.modes,
        "normalize": pooling.normalize,
        "skipped": skipped,
    }
    if pooling.dense:
        settings["activations"] = tuple(dense.activation for dense in pooling.dense)
        settings["dense"] = [(dense.matrix, dense.vector) for dense in pooling.dense]
        if not together.is_shared and mesh_of(list(shardings_of(model))) is None:
            settings["dense"] = jax.device_put(settings["dense"])
    if head:
        settings["head"], settings["answers"] = True, answers
    facts = {
        "pooling": str(pooling), "normalize": pooling.normalize, "skipped": skipped, **facts,
    }  # fmt: skip
    found = run_rows(
        model, tokenizer, rows, together, shown_as, _encode,
        batch_size=batch_size, limit=limit, facts=facts, **settings,
    )  # fmt: skip
    if not found:
        vectors, _ = jax.eval_shape(
            partial(_encode, **settings), model, tokenizer.pad([], MIN_LENGTH, 1)
        )
        return np.zeros((0, vectors.shape[1]), np.float32)
    result = np.empty((len(rows), found[0][1].shape[1]), np.float32)
    for batch, vectors in found:
        result[batch.members] = vectors[batch.slots]
    return result


@partial(
    jax.jit,
    static_argnames=("modes", "normalize", "skipped", "gathered", "activations", "head", "answers"),
)
def _encode(
    model: Any,
    batch: Any,
    *,
    modes: tuple[str, ...],
    normalize: bool,
    skipped: int = 0,
    gathered: NamedSharding | None = None,
    activations: tuple[str, ...] = (),
    dense: Any = (),
    head: bool = False,
    answers: tuple[int, int] | None = None,
    patches: Any = (),
) -> Any:
    """The vectors, and what captures of the model have recorded."""
    dtype = DType.of(getattr(model, "reduce_dtype", DType.float32)).np
    if isinstance(batch, PackedTokens):
        output, taps = encoder_output(model, batch, patches)
        states = output.last_hidden_state.astype(dtype)
        pooled = _pooled(states, batch, modes, normalize and not dense, skipped)
    else:
        if isinstance(model, LanguageModel):
            lengths = jnp.sum(batch.attention_mask, axis=1)  # padding is at the right
            run = lambda: model.states(batch.input_ids, lengths=lengths)
            states, taps = tapped(model, patches, run)  # [B, T, E]
        else:
            output, taps = encoder_output(model, batch, patches)
            states = output.last_hidden_state
        mask = batch.attention_mask
        if skipped:  # the tokens of the prompt do not count
            at = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :]
            mask = jnp.where(at >= skipped, mask, 0)
        pooled = pool(states.astype(dtype), mask, modes, normalize=normalize and not dense)
        # Without special tokens an empty text has no token: its row is padding alone.
        has_tokens = jnp.any(batch.attention_mask > 0, axis=1, keepdims=True)
        pooled = jnp.where(has_tokens, pooled, 0)
    if dense:
        pooled = densified(pooled, dense, activations)
        pooled = normalized(pooled) if normalize else pooled
    if head and answers is None:
        pooled = model.scores(pooled)  # type: ignore[union-attr]
    elif answers is not None:
        logits = model.logits(pooled.astype(states.dtype))  # [B, V]
        pooled = (logits[:, answers[0]] - logits[:, answers[1]])[:, None]
    pooled = pooled.astype(jnp.float32)  # [B, d]
    pooled = pooled if gathered is None else with_sharding(pooled, gathered)
    return pooled, taps


def _pooled(
    states: jax.Array, batch: PackedTokens, modes: tuple[str, ...], normalize: bool, skipped: int
) -> jax.Array:
    """The vectors of the texts in packed rows, ``[B · K, d]``; zeros for slots without a text."""
    count, length, _ = states.shape
    numbers = jnp.arange(1, places(length) + 1, dtype=jnp.int32)
    masks = batch.numbers[:, None, :] == numbers[None, :, None]  # [B, K, T]
    starts = jnp.argmax(masks, axis=2).astype(jnp.int32)  # [B, K]
    taken = jnp.any(masks, axis=2)
    if skipped:
        masks = masks & (batch.positions >= skipped)[:, None, :]

    def of_text(mask: jax.Array, starts: jax.Array) -> jax.Array:
        return pool(states, mask, modes, normalize=normalize, starts=starts)

    pooled = jax.vmap(of_text, in_axes=1, out_axes=1)(masks, starts)  # [B, K, d]
    return jnp.where(taken[..., None], pooled, 0).reshape(count * places(length), -1)


# --- checks ---------------------------------------------------------------------------------


def _pooling(model: Any, given: Any) -> Pooling:
    if not hasattr(model, "family") or not hasattr(model, "max_length"):
        raise UserInputError(
            f"{type(model).__name__} is neither a text encoder nor a decoder: it cannot embed texts. "
            "Pass a model of maxjax.load"
        )
    check_loaded(model)
    default = getattr(model, "pooling", None)
    if isinstance(given, str):
        one_of("pooling", given, POOLINGS)
        given = replace(default or Pooling(), modes=(given,), unsupported=None)
    elif given is not None and not isinstance(given, Pooling):
        raise UserInputError(f"pooling must be a name or a Pooling, not {type(given).__name__}")
    pooling = given or default
    if pooling is None and isinstance(model, LanguageModel):
        raise UserInputError(
            f"{type(model).__name__} is a decoder, and its files do not say how its token states are "
            "pooled: pass pooling='lasttoken' or pooling='mean', whichever it was trained with, or "
            "put the modules.json and 1_Pooling/config.json of sentence-transformers beside it"
        )
    pooling = pooling or Pooling()
    if pooling.unsupported:
        raise UnsupportedModelError(
            f"the model's embeddings need {pooling.unsupported}, which is not supported yet"
        )
    return pooling


def _tokens_of(tokenizer: Tokenizer, pooling: Pooling, prompt: str) -> int:
    """The number of tokens of a prompt before a text, as sentence-transformers counts them."""
    if not prompt:
        return 0
    prompt = pooling.cased(prompt)
    [row] = tokenizer.tokens([prompt])
    plain = tokenizer.encode(prompt, special=False)
    # Special tokens at the end come after the text, so they are not part of the prompt.
    return len(row.ids) - int(len(row.ids) > len(plain) and row.ids[-1:] != plain[-1:])


def _rows(
    tokenizer: Tokenizer, texts: Iterable[str], pooling: Pooling, limit: int, truncate: bool,
    prompt: str,
) -> list[Encoding]:  # fmt: skip
    if prompt or pooling.lower_case:
        texts = [pooling.cased(prompt + text) for text in checked_texts(texts)]
    rows = tokenizer.tokens(texts, max_length=limit if truncate else None)
    check_lengths(rows, limit, "shorten it, or pass truncate=True")
    return rows
