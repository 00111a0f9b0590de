"""Quantisation in jnp: float weights → ggml's blocks, on the device that holds them.

The algorithms are those of ``storage.blocks``, which are written for NumPy and ``jax.numpy``. XLA adds in
another order and fuses operations, so that a few blocks differ from ggml's, with errors of the same size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..storage.blocks import ENCODERS
from ..storage.blocks.encode_simple import ValueImportance
from ..storage.blocks.encoders import encoder_layout
from ..storage.blocks.search import Arrays

_JAX = Arrays(jnp, jax.lax.fori_loop)
# Values that are encoded at a time: about twenty float32 arrays of this size are in use.
_CHUNK = 1 << 20


def encode(encoding: str, values: Any, importance: Any = None) -> jax.Array:
    """Quantise rows of floats; works under ``jit`` and, on whole blocks, in ``shard_map``.

    Values are not checked: NaN, infinities, and scales that do not fit float16 give blocks of NaN or
    zeros.

    Args:
        encoding: ggml's name of the encoding, a key of ``storage.blocks.ENCODERS``.
        values: floats ``[..., n * elements of a block]``.
        importance: weights of the squared errors, float32 of a shape that broadcasts to that of
            ``values``; Q8_0 and MXFP4 do not use it.

    Returns:
        Blocks, uint8 ``[..., n * bytes of a block]``.

    Raises:
        NotImplementedError: the encoding has no encoder.
        ValueError: the last axis does not consist of complete blocks.

    Example:
        >>> encode("Q8_0", jnp.arange(32.0) - 15)[:6].view(jnp.int8)
        Array([   8,   48, -119, -111, -103,  -95], dtype=int8)
    """
    layout = encoder_layout(encoding)
    values = jnp.asarray(values)
    if not values.ndim or values.shape[-1] % layout.elements:
        raise ValueError(
            f"the last axis of an array of shape {values.shape} must be a multiple of {layout.elements}, the number of "
            f"values in a block of {encoding}"
        )
    lead, row = values.shape[:-1], values.shape[-1] // layout.elements
    if not values.size:
        return jnp.zeros((*lead, row * layout.nbytes), jnp.uint8)
    operands: tuple[Any, ...] = (values.reshape(-1, layout.elements),)
    if importance is not None:
        mean_square = jnp.mean(jnp.square(values.astype(jnp.float32)), axis=-1, keepdims=True)
        weights = jnp.broadcast_to(jnp.asarray(importance, jnp.float32), values.shape)
        operands += (
            weights.reshape(-1, layout.elements),
            jnp.broadcast_to(mean_square, (*lead, row)).reshape(-1),
        )

    def encode_blocks(operands: tuple[Any, ...]) -> jax.Array:
        values, *rest = operands
        fields = ENCODERS[encoding](
            _JAX, values.astype(jnp.float32), ValueImportance(*rest) if rest else None
        )
        return jnp.concatenate([_bytes(field) for field in fields], axis=1)

    blocks = _in_chunks(encode_blocks, operands, _CHUNK // layout.elements)
    return blocks.reshape(*lead, row * layout.nbytes)


def _in_chunks(run: Any, operands: tuple[jax.Array, ...], size: int) -> jax.Array:
    """``run`` on ``size`` blocks at a time, so that its temporary arrays stay small."""
    count = operands[0].shape[0]
    if count <= size:
        return run(operands)
    whole = count // size * size
    chunks = tuple(a[:whole].reshape(-1, size, *a.shape[1:]) for a in operands)
    blocks = jax.lax.map(run, chunks)
    blocks = blocks.reshape(whole, blocks.shape[-1])
    if whole == count:
        return blocks
    return jnp.concatenate([blocks, run(tuple(a[whole:] for a in operands))], axis=0)


def _bytes(field: Any) -> jax.Array:
    """A field of blocks, ``[n]`` or ``[n, count]``, as uint8 ``[n, bytes]``."""
    field = field if field.ndim == 2 else field[:, None]
    if field.dtype == np.uint8:
        return field
    return jax.lax.bitcast_convert_type(field, jnp.uint8).reshape(field.shape[0], -1)
