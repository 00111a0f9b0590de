"""Quantises a weight's array on its devices, each shard by itself.

An accelerator encodes its shard with ``kernels.encode``. On a CPU the compiled encoders are used, which
read the shard's memory without a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UserInputError
from ...kernels.blocks import decode as decode_blocks
from ...kernels.encode import encode as encode_on_device
from ...storage.blocks import LAYOUTS, decode, encode

# Values that are converted to float32 at a time on a CPU.
_PIECE = 1 << 22


class Encoded(NamedTuple):
    """A quantised array, and for each row the sums of squared errors and of squared values.

    Both sums are float64 ``[..., out]`` on the host.
    """

    blocks: jax.Array
    errors: np.ndarray
    squares: np.ndarray


def encode_array(
    names: Sequence[str], array: Any, kind: str, importance: np.ndarray | None
) -> Encoded:
    """Quantises floats ``[..., out, in]`` to blocks ``[..., out, bytes]`` with the same sharding.

    Args:
        names: names of the weights, one for each index of the first axis, or of the only one; for messages.
        array: array whose shards are all on devices of this process.
        kind: type of the blocks.
        importance: float32 ``[..., in]``, of which the leading axes may have size 1, or None.

    Raises:
        UserInputError: a shard's last axis cannot be divided into complete blocks, or a value is
            not finite.
    """
    array = jnp.asarray(array)
    layout = LAYOUTS[kind]
    shape = (*array.shape[:-1], array.shape[-1] // layout.elements * layout.nbytes)
    if importance is not None:
        importance = np.broadcast_to(importance, (*array.shape[:-2], array.shape[-1]))
    errors, squares = (np.zeros(array.shape[:-1], np.float64) for _ in range(2))
    found: dict[Any, Any] = {}
    parts = []
    for shard in array.addressable_shards:
        if shard.data.shape[-1] % layout.elements:
            raise UserInputError(
                f"weight '{names[0]}' is split into rows of {shard.data.shape[-1]} values, which are not complete "
                f"blocks of {kind} ({layout.elements} values): quantise before model.to(mesh), or to a type "
                "of smaller blocks, such as q8_0"
            )
        place = tuple(one.indices(size) for one, size in zip(shard.index, array.shape, strict=True))
        if place not in found:
            weights = None
            if importance is not None:
                weights = np.array(importance[(*shard.index[:-2], shard.index[-1])], np.float32)
            found[place], wrong, norm = _encode_part(shard.data, kind, weights)
            errors[shard.index[:-1]] += wrong
            squares[shard.index[:-1]] += norm
        parts.append(found[place])
    if not np.isfinite(errors).all():
        row = np.argwhere(~np.isfinite(errors))[0].tolist()
        number = row.pop(0) if len(names) > 1 else 0
        raise UserInputError(
            f"weight '{names[number]}' has values that are not finite, or too large for {kind}: "
            f"in row {row}"
        )
    return Encoded(_placed_like(array, shape, parts), errors, squares)


def _placed_like(array: jax.Array, shape: tuple[int, ...], parts: list[Any]) -> jax.Array:
    """The parts as an array with the sharding of ``array``; uncommitted if ``array`` is."""
    if not array.committed:
        with jax.default_device(next(iter(array.devices()))):
            return jax.device_put(parts[0])
    placed = [
        jax.device_put(part, shard.data.sharding)
        for part, shard in zip(parts, array.addressable_shards, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(shape, array.sharding, placed)


def _encode_part(
    part: jax.Array, kind: str, weights: np.ndarray | None
) -> tuple[Any, np.ndarray, np.ndarray]:
    """The blocks of one shard, and the sums of squares of its rows' errors and values."""
    if next(iter(part.devices())).platform == "cpu":
        return _encode_on_host(np.asarray(part), kind, weights)
    importance = None if weights is None else jnp.asarray(weights)[..., None, :]
    blocks, errors, squares = _encode_there(part, importance, kind)
    return blocks, np.asarray(errors, np.float64), np.asarray(squares, np.float64)


def _encode_on_host(
    values: np.ndarray, kind: str, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    layout = LAYOUTS[kind]
    *lead, out, size = values.shape
    blocks = np.zeros((*lead, out, size // layout.elements * layout.nbytes), np.uint8)
    errors, squares = (np.zeros(values.shape[:-1], np.float64) for _ in range(2))
    step = max(1, _PIECE // max(size, 1))
    for matrix in np.ndindex(*lead):
        importance = None if weights is None else weights[matrix]
        for start in range(0, out, step):
            rows = (*matrix, slice(start, start + step))
            piece = values[rows].astype(np.float32)
            try:
                blocks[rows] = encode(kind, piece, importance=importance)
            except ValueError:  # not finite, or too large
                errors[rows] = np.nan
                continue
            wrong = decode(kind, blocks[rows]) - piece
            errors[rows] = np.einsum("ij,ij->i", wrong, wrong)
            squares[rows] = np.einsum("ij,ij->i", piece, piece)
    return blocks, errors, squares


@functools.partial(jax.jit, static_argnames="kind")
def _encode_there(part: Any, importance: Any, kind: str) -> tuple[Any, Any, Any]:
    blocks = encode_on_device(kind, part, importance)
    values = part.astype(jnp.float32)
    # A scale that does not fit float16 gives values that are not finite.
    wrong = decode_blocks(kind, blocks) - values
    return blocks, jnp.sum(wrong * wrong, axis=-1), jnp.sum(values * values, axis=-1)
