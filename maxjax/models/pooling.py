"""Pooling: combines the hidden states of a text's tokens into one embedding of the text.

The settings come from the files of sentence-transformers (``sentence_files``), or from a GGUF file's metadata.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserInputError, one_of, shown
from ..nn.activation import ACTIVATIONS


@dataclass(frozen=True)
class Dense:
    """A linear layer and an activation function that are applied to a pooled embedding.

    Its values are bytes, so that a Dense is a static, hashable part of the model and compares by content.

    Attributes:
        in_features, out_features: lengths of the embedding before and after.
        activation: name in ``maxjax.nn.activation.ACTIVATIONS``; "linear" for none.
        weight, bias: float32 values ``[out_features, in_features]`` and ``[out_features]``; b"" without a bias.
        checksum: CRC-32 of the values.

    Example:
        >>> Dense.of(np.ones((2, 3), np.float32), None).matrix.shape
        (2, 3)
    """

    in_features: int
    out_features: int
    activation: str = "linear"
    weight: bytes = field(default=b"", repr=False)
    bias: bytes = field(default=b"", repr=False)
    checksum: int = 0

    @classmethod
    def of(cls, weight: np.ndarray, bias: np.ndarray | None, activation: str = "linear") -> Dense:
        """Makes a Dense of a weight ``[out, in]`` and a bias ``[out]``."""
        values = np.ascontiguousarray(weight, np.float32).tobytes()
        added = b"" if bias is None else np.ascontiguousarray(bias, np.float32).tobytes()
        out_features, in_features = weight.shape
        sum_ = zlib.crc32(added, zlib.crc32(values))
        return cls(in_features, out_features, activation, values, added, sum_)

    @property
    def matrix(self) -> np.ndarray:
        """The weight as an array."""
        return np.frombuffer(self.weight, np.float32).reshape(self.out_features, self.in_features)

    @property
    def vector(self) -> np.ndarray | None:
        """The bias as an array, or None."""
        return np.frombuffer(self.bias, np.float32) if self.bias else None


def densified(pooled: jax.Array, dense: Any, activations: tuple[str, ...]) -> jax.Array:
    """Applies several Dense, one after another, to embeddings ``[B, E]``.

    Args:
        pooled: embeddings ``[B, E]``.
        dense: (matrix, vector) of each Dense.
        activations: name of each one's activation function.
    """
    for (matrix, vector), activation in zip(dense, activations, strict=True):
        pooled = jnp.einsum("be,oe->bo", pooled, matrix.astype(pooled.dtype))
        if vector is not None:
            pooled = pooled + vector.astype(pooled.dtype)[None]
        if activation != "linear":
            pooled = ACTIVATIONS[activation](pooled)
    return pooled


@dataclass(frozen=True)
class Pooling:
    """How token states become an embedding.

    Attributes:
        modes: names in :data:`POOLINGS`; their results are concatenated.
        normalize: whether embeddings are scaled to length 1.
        max_length: maximum number of tokens in a text, or None.
        lower_case: whether texts are lowercased first.
        unsupported: name of a step of the model that maxjax does not have, or None. With such a step
            the token states are correct, but no embedding can be computed from them.
        prompts: (name, text) of each prompt that may be put before a text.
        prompt: name of the default prompt, or None.
        include_prompt: whether the prompt's tokens are pooled with those of the text.
        dense: layers that are applied to the pooled states, before ``normalize``.
        similarity: how embeddings are compared: a name in :data:`SIMILARITIES`.
        truncate_dim: how many of the first numbers of an embedding are kept, or None for all.
        activation: torch's class of the function that turns the output of a head into a score, or None.
    """

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = False
    max_length: int | None = None
    lower_case: bool = False
    unsupported: str | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    prompt: str | None = None
    include_prompt: bool = True
    dense: tuple[Dense, ...] = ()
    similarity: str = "cosine"
    truncate_dim: int | None = None
    activation: str | None = None

    def before(self, name: str | None) -> str:
        """The text to put before a text: the prompt of this name, by default the default prompt; "" if there is none.

        As in sentence-transformers, each model has prompts "query" and "document", which are "" if its files have none.

        Raises:
            UserInputError: the model has no prompt of that name.

        Example:
            >>> Pooling(prompts=(("query", "Find: "),)).before("query")
            'Find: '
        """
        name = self.prompt if name is None else name
        found = {"query": "", "document": "", **dict(self.prompts)}
        if name is not None and name not in found:
            known = ", ".join(map(repr, found))
            raise UserInputError(f"the model has no prompt {shown(name)}: it has {known}")
        return found[name] if name is not None else ""

    def cased(self, text: str) -> str:
        """The text as the tokenizer gets it: lowercased if the files say so."""
        return text.lower() if self.lower_case else text


# --- the arithmetic: states [B, T, E] and mask [B, T] of the same dtype → [B, E] ------------
# `starts` int32 [B, 1] is the index of each text's first token.


def _mean(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    return _sum(states, mask) / _count(mask)


def _mean_sqrt_len(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    return _sum(states, mask) / jnp.sqrt(_count(mask))


def _weighted_mean(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    """Later tokens weigh more: 1, 2, 3, …"""
    places = jnp.arange(1, mask.shape[1] + 1, dtype=jnp.int32)[None, :] - starts
    return _mean(states, mask * places.astype(mask.dtype), starts)


def _max(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    lowest = jnp.finfo(states.dtype).min
    return jnp.max(jnp.where(mask[..., None] > 0, states, lowest), axis=1)


def _first(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    # The first token that is pooled: if the prompt is not pooled, the first after it, as in sentence-transformers 6.
    first = jnp.argmax(mask > 0, axis=1, keepdims=True).astype(jnp.int32)
    return _at(states, jnp.where(jnp.any(mask > 0, axis=1, keepdims=True), first, starts))


def _last(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    # The mask is not summed: 16-bit floats count exactly only to 256 (bfloat16) or 2048 (float16).
    positions = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :]
    return _at(states, jnp.max(jnp.where(mask > 0, positions, 0), axis=1, keepdims=True))


def _at(states: jax.Array, places: jax.Array) -> jax.Array:
    """The state at one place ``[B, 1]`` of each row."""
    return jnp.take_along_axis(states, places[:, :, None], axis=1)[:, 0]


def _sum(states: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.einsum("bte,bt->be", states, mask)


def _count(mask: jax.Array) -> jax.Array:
    return _above(jnp.sum(mask, axis=1, keepdims=True), 1e-9)  # [B, 1]


def _above(x: jax.Array, least: float) -> jax.Array:
    """``x``, at least ``least``, to divide by; float16 has no number as small as 1e-9."""
    return jnp.maximum(x, max(least, float(jnp.finfo(x.dtype).tiny)))


# In the order in which sentence-transformers concatenates the results.
POOLINGS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}


def pool(
    states: Any,
    mask: Any,
    modes: tuple[str, ...] = ("mean",),
    *,
    normalize: bool = False,
    starts: Any = None,
) -> jax.Array:
    """Token states → one embedding for each text.

    Args:
        states: hidden states ``[B, T, E]``, in whose dtype everything is computed.
        mask: ``[B, T]``, nonzero for the tokens that are pooled.
        modes: names in :data:`POOLINGS`.
        normalize: whether to scale embeddings to length 1.
        starts: index of the first token of each text, integers ``[B]``; 0 by default, where padding
            is on the right.

    Returns:
        Embeddings ``[B, E · len(modes)]``.

    Example:
        >>> print(pool(jnp.array([[[1.0, 3.0], [3.0, 5.0], [9.0, 9.0]]]), jnp.array([[1, 1, 0]])))
        [[2. 4.]]
    """
    states = jnp.asarray(states)
    mask = jnp.asarray(mask).astype(bool).astype(states.dtype)
    first = jnp.zeros(mask.shape[0], jnp.int32) if starts is None else jnp.asarray(starts)
    pooled = [POOLINGS[mode](states, mask, first.astype(jnp.int32)[:, None]) for mode in modes]
    pooled = jnp.concatenate(pooled, axis=-1)
    return normalized(pooled) if normalize else pooled


def normalized(pooled: jax.Array) -> jax.Array:
    """Embeddings ``[..., E]``, scaled to length 1."""
    length = jnp.sqrt(jnp.sum(jnp.square(pooled), axis=-1, keepdims=True))
    return pooled / _above(length, 1e-12)


def unit(a: np.ndarray) -> np.ndarray:
    """NumPy arrays ``[..., E]``, scaled to length 1."""
    return a / np.maximum(np.linalg.norm(a, axis=-1, keepdims=True), 1e-12)


SIMILARITIES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cosine": lambda a, b: unit(a) @ unit(b).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": lambda a, b: -np.sqrt(np.square(a[:, None] - b[None]).sum(-1)),
    "manhattan": lambda a, b: -np.abs(a[:, None] - b[None]).sum(-1),
}
"""Names of ``similarity_fn_name`` → functions of embeddings ``[n, E]`` and ``[m, E]``, to ``[n, m]``."""


def similarity(a: Any, b: Any, pooling: Pooling | str | None = None) -> np.ndarray:
    """The similarity of each embedding in ``a`` to each one in ``b``, by the measure of the model's files.

    Args:
        a, b: embeddings ``[n, E]`` and ``[m, E]``.
        pooling: ``model.pooling``, or a name in :data:`SIMILARITIES`; None is "cosine".

    Returns:
        float32 ``[n, m]``; larger means more similar.

    Raises:
        UserInputError: the name is unknown, or the shapes do not fit.

    Example:
        >>> similarity([[1.0, 0.0]], [[2.0, 0.0], [0.0, 1.0]]).tolist()
        [[1.0, 0.0]]
    """
    name = (
        pooling if isinstance(pooling, str) else "cosine" if pooling is None else pooling.similarity
    )
    one_of("the similarity", name, SIMILARITIES)
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise UserInputError(f"embeddings are [n, E] and [m, E], not {a.shape} and {b.shape}")
    return SIMILARITIES[name](a, b)


# llama.cpp's pooling types, and their names here.
_GGUF_MODES = {"mean": "mean", "cls": "cls", "last": "lasttoken"}


def gguf_pooling(
    metadata: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
) -> Pooling | None:
    """The Pooling in a GGUF file's metadata; None if the metadata has none, or the file is of a reranker.

    Embeddings are scaled to length 1, which is llama.cpp's default.

    Raises:
        CheckpointFormatError: the pooling type is unknown.
    """
    from .gguf import pooling

    mode = _GGUF_MODES.get(pooling(metadata, path=path) or "")
    return None if mode is None else Pooling((mode,), normalize=True)


def gguf_mode(pooling: Pooling) -> str | None:
    """llama.cpp's name of the pooling type; None if llama.cpp does not have it."""
    names = {mode: name for name, mode in _GGUF_MODES.items()}
    return names.get(pooling.modes[0]) if len(pooling.modes) == 1 else None
