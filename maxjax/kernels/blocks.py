"""Dequantisation in jnp: ggml's blocks of quantised weights → float32.

The layouts are ggml's (``ggml-common.h`` of https://github.com/ggml-org/llama.cpp); all numbers
of a block are little-endian. ``storage.blocks`` decodes these and more encodings in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..storage.blocks.layout import LAYOUTS


class BlockDecoder(NamedTuple):
    """One kind of block: its number of weights, its size in bytes, and how it is decoded."""

    elements: int
    nbytes: int
    # [..., nbytes] uint8 -> [..., elements] float32
    decode: Callable[[jax.Array], jax.Array]


def decode(encoding: str, blocks: Any) -> jax.Array:
    """Dequantise rows of blocks.

    Args:
        encoding: one of :data:`DECODERS`: "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q4_1",
            "Q5_0", "Q5_1", "IQ4_NL" or "IQ4_XS".
        blocks: uint8 ``[..., n * bytes of a block]``.

    Returns:
        The weights, float32 ``[..., n * elements of a block]``.

    Raises:
        NotImplementedError: the encoding is none of these.
        ValueError: ``blocks`` is not uint8, or its last axis ends inside a block.

    Example:
        >>> import numpy as np
        >>> one = np.zeros(34, np.uint8)
        >>> one[:2], one[2:4] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8), [3, 255]
        >>> decode("Q8_0", one)[:3].tolist()
        [1.5, -0.5, 0.0]
    """
    decoder = decoder_of(encoding)
    blocks = jnp.asarray(blocks)
    count, rest = divmod(blocks.shape[-1], decoder.nbytes)
    if blocks.dtype != np.uint8 or rest:
        raise ValueError(
            f"blocks of {encoding} must be uint8, with a last axis that is a multiple of {decoder.nbytes} bytes, not "
            f"{blocks.dtype} of length {blocks.shape[-1]}"
        )
    lead = blocks.shape[:-1]
    values = decoder.decode(blocks.reshape(*lead, count, decoder.nbytes))
    return values.reshape(*lead, count * decoder.elements)


def decoder_of(encoding: str) -> BlockDecoder:
    """The decoder of an encoding, by its name.

    Raises:
        NotImplementedError: weights of this encoding cannot stay quantised in memory.
    """
    if encoding not in DECODERS:
        raise NotImplementedError(
            f"weights in {encoding} cannot stay quantised in memory; those in "
            f"{', '.join(DECODERS)} can: load the others as floats"
        )
    return DECODERS[encoding]


def _half(pair: jax.Array) -> jax.Array:
    """Two bytes ``[..., 2]`` read as a float16, as float32 ``[..., 1]``."""
    return jax.lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)[..., None]


def _nibbles(packed: jax.Array) -> jax.Array:
    """The low four bits of all bytes, then the high ones: ``[..., n]`` → ``[..., 2, n]``."""
    return jnp.stack([packed & 15, packed >> 4], -2)


def _shifted(packed: jax.Array, by: Iterable[int]) -> jax.Array:
    """Bytes ``[..., n]`` shifted right by each of ``by`` bits: ``[..., len(by), n]``."""
    return jnp.stack([packed >> bits for bits in by], -2)


def _joined(parts: jax.Array, axes: int) -> jax.Array:
    """The array with its last ``axes`` axes merged into one."""
    lead = parts.shape[: parts.ndim - axes]
    return parts.reshape(*lead, math.prod(parts.shape[parts.ndim - axes :]))


def _q4_0(b: jax.Array) -> jax.Array:
    # scale float16; 16 bytes: weight i low in byte i, weight 16 + i high
    q = _joined(_nibbles(b[..., 2:]), 2).astype(jnp.int8) - 8
    return _half(b[..., :2]) * q.astype(jnp.float32)


def _q4_1(b: jax.Array) -> jax.Array:
    # scale, minimum float16; 16 bytes as in Q4_0
    q = _joined(_nibbles(b[..., 4:]), 2)
    return _half(b[..., :2]) * q.astype(jnp.float32) + _half(b[..., 2:4])


def _five_bits(high: jax.Array, low: jax.Array) -> jax.Array:
    """Codes of five bits: the nibbles of 16 bytes, and bit j of the 4 bytes ``high`` for weight j."""
    bits = jnp.stack([high >> i & 1 for i in range(8)], -1)
    return _joined(_nibbles(low), 2) | _joined(bits, 2) << 4


def _q5_0(b: jax.Array) -> jax.Array:
    # scale float16; 4 bytes of fifth bits; 16 bytes as in Q4_0
    q = _five_bits(b[..., 2:6], b[..., 6:]).astype(jnp.int8) - 16
    return _half(b[..., :2]) * q.astype(jnp.float32)


def _q5_1(b: jax.Array) -> jax.Array:
    # scale, minimum float16; 4 bytes of fifth bits; 16 bytes as in Q4_0
    q = _five_bits(b[..., 4:8], b[..., 8:])
    return _half(b[..., :2]) * q.astype(jnp.float32) + _half(b[..., 2:4])


def _q8_0(b: jax.Array) -> jax.Array:
    # scale float16; 32 int8
    q = jax.lax.bitcast_convert_type(b[..., 2:], jnp.int8)
    return _half(b[..., :2]) * q.astype(jnp.float32)


def _scales_and_minima(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The 8 scales and 8 minima of a Q4_K or Q5_K block, ``[..., 8, 1]`` each.

    They have six bits each, in 12 bytes. The low six bits of bytes 0-3 are the first four scales,
    those of bytes 4-7 the first four minima. The last four of each have their low four bits in
    the nibbles of bytes 8-11, and their high two bits on top of bytes 0-7.
    """
    a, b, c = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = jnp.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], -1)
    minima = jnp.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], -1)
    return scales.astype(jnp.float32)[..., None], minima.astype(jnp.float32)[..., None]


def _affine(b: jax.Array, q: jax.Array) -> jax.Array:
    """Weights of a Q4_K or Q5_K block: d * scale * q - dmin * minimum, for q ``[..., 8, 32]``.

    Each product is exact in float32, so the order in which XLA multiplies does not matter.
    """
    scales, minima = _scales_and_minima(b[..., 4:16])
    d, least = _half(b[..., :2])[..., None], _half(b[..., 2:4])[..., None]
    return _joined(d * scales * q.astype(jnp.float32) - least * minima, 2)


def _q4_k(b: jax.Array) -> jax.Array:
    # d, dmin float16; 12 bytes of scales and minima; 4 x 32 bytes, low nibbles then high ones
    groups = b[..., 16:].reshape(*b.shape[:-1], 4, 32)
    return _affine(b, _nibbles(groups).reshape(*b.shape[:-1], 8, 32))


def _q5_k(b: jax.Array) -> jax.Array:
    # as Q4_K, with 32 bytes before the nibbles: bit j of byte i is the fifth bit of weight i of
    # group j
    groups = b[..., 48:].reshape(*b.shape[:-1], 4, 32)
    low = _nibbles(groups).reshape(*b.shape[:-1], 8, 32)
    high = _shifted(b[..., 16:48], range(8)) & 1
    return _affine(b, low | high << 4)


def _q6_k(b: jax.Array) -> jax.Array:
    # two halves: 64 bytes of low nibbles, 32 bytes of high pairs; then 16 int8 scales; d float16
    lead = b.shape[:-1]
    low = b[..., :128].reshape(*lead, 2, 2, 32)
    low = jnp.concatenate([low & 15, low >> 4], -2)  # four parts of 32 in each half
    high = _shifted(b[..., 128:192].reshape(*lead, 2, 32), (0, 2, 4, 6)) & 3
    q = (low | high << 4).astype(jnp.int8) - 32
    scales = jax.lax.bitcast_convert_type(b[..., 192:208], jnp.int8).astype(jnp.float32)
    values = _half(b[..., 208:210])[..., None] * scales[..., None]
    return _joined(values * q.reshape(*lead, 16, 16).astype(jnp.float32), 2)


# Twice the values of E2M1, so that they are integers.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _mxfp4(b: jax.Array) -> jax.Array:
    # E8M0 exponent; 16 bytes as in Q4_0 (OCP Microscaling Formats 1.0)
    q = _joined(_nibbles(b[..., 1:]), 2)
    values = jnp.take(jnp.asarray(_E2M1), q.astype(jnp.int32), axis=0)
    # 2^(e - 128) as two factors, neither of which is subnormal.
    e = b[..., :1]
    return values * _power(e >> 1) * _power(e - (e >> 1))


def _power(e: jax.Array) -> jax.Array:
    """2^(e - 64) for bytes up to 128, made from the bits of a float32."""
    return jax.lax.bitcast_convert_type((e.astype(jnp.uint32) + 63) << 23, jnp.float32)


# The values of the codes of IQ4_NL and IQ4_XS.
IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


def _iq4(packed: jax.Array) -> jax.Array:
    """The table's values for the nibbles of ``[..., 16]`` bytes, in the order of Q4_0: ``[..., 32]``."""
    return jnp.take(jnp.asarray(IQ4), _joined(_nibbles(packed), 2).astype(jnp.int32), axis=0)


def _iq4_nl(b: jax.Array) -> jax.Array:
    # scale float16; 16 bytes of nibbles as in Q4_0, each an index in a table
    return _half(b[..., :2]) * _iq4(b[..., 2:])


def _iq4_xs(b: jax.Array) -> jax.Array:
    # d float16; 2 bytes with the high two bits of 8 scales, 4 bytes with their low four; 8 x 16 bytes as in IQ4_NL
    lead = b.shape[:-1]
    high = (
        jnp.concatenate([_shifted(b[..., i : i + 1], (0, 2, 4, 6))[..., 0] for i in (2, 3)], -1) & 3
    )
    low = jnp.swapaxes(_nibbles(b[..., 4:8]), -1, -2).reshape(*lead, 8)
    steps = (low | high << 4).astype(jnp.float32) - 32
    scales = _half(b[..., :2]) * steps
    return _joined(scales[..., None] * _iq4(b[..., 8:].reshape(*lead, 8, 16)), 2)


DECODERS = {
    name: BlockDecoder(LAYOUTS[name].elements, LAYOUTS[name].nbytes, decode)
    for name, decode in {
        "Q4_0": _q4_0, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4, "Q4_1": _q4_1,
        "Q5_0": _q5_0, "Q5_1": _q5_1, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
    }.items()
}  # fmt: skip
