"""Decoding of ggml's quantised blocks to float32 with NumPy, in pieces that fit the CPU cache.

The values equal those of ggml's ``dequantize_row_*`` bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np

from ..files import share_work
from . import codebooks, iq_quants, k_quants, simple
from .layout import block_shape, layout_of
from .scratch import Scratch, scratch_of_thread

# (blocks uint8 [n, nbytes], out float32 [n, elements], scratch); both are C-contiguous.
Decoder = Callable[[np.ndarray, np.ndarray, Scratch], None]

# Values per piece, which must fit the cache. Two threads are slower with smaller pieces, because they
# then spend more time waiting for the GIL than computing.
PIECE = 1 << 19
# For fewer values a second thread costs more than it saves.
PARALLEL = 1 << 21

DECODERS: dict[str, Decoder] = {
    "Q1_0": simple.q1_0,
    "Q2_0": simple.q2_0,
    "Q4_0": simple.q4_0,
    "Q4_1": simple.q4_1,
    "Q5_0": simple.q5_0,
    "Q5_1": simple.q5_1,
    "Q8_0": simple.q8_0,
    "Q8_1": simple.q8_1,
    "Q2_K": k_quants.q2_k,
    "Q3_K": k_quants.q3_k,
    "Q4_K": k_quants.q4_k,
    "Q5_K": k_quants.q5_k,
    "Q6_K": k_quants.q6_k,
    "Q8_K": k_quants.q8_k,
    "IQ1_S": iq_quants.iq1_s,
    "IQ1_M": iq_quants.iq1_m,
    "IQ2_XXS": iq_quants.iq2_xxs,
    "IQ2_XS": iq_quants.iq2_xs,
    "IQ2_S": iq_quants.iq2_s,
    "IQ3_XXS": iq_quants.iq3_xxs,
    "IQ3_S": iq_quants.iq3_s,
    "IQ4_NL": codebooks.iq4_nl,
    "IQ4_XS": codebooks.iq4_xs,
    "TQ1_0": codebooks.tq1_0,
    "TQ2_0": codebooks.tq2_0,
    "MXFP4": codebooks.mxfp4,
    "NVFP4": codebooks.nvfp4,
}
"""The block types that can be decoded, by ggml's name."""


def decode(name: str, blocks: np.ndarray, *, threads: int | None = None) -> np.ndarray:
    """The values of quantised blocks: uint8 ``[..., n * nbytes]`` → float32 ``[..., n * elements]``.

    Args:
        name: ggml's name of the type, a key of ``DECODERS``.
        blocks: bytes of the blocks; the last axis holds complete blocks.
        threads: number of threads for large arrays, by default 2.

    Raises:
        NotImplementedError: the type is unknown.
        ValueError: the last axis does not consist of complete blocks.
        TypeError: ``blocks`` is not uint8.

    Example:
        >>> block = np.zeros(34, np.uint8)
        >>> block[:2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
        >>> block[2:5] = 1, 2, 255
        >>> decode("Q8_0", block)[:4]
        array([ 0.5,  1. , -0.5,  0. ], dtype=float32)
    """
    out = np.empty(block_shape(layout_of(name), blocks.shape), np.float32)
    decode_into(name, blocks, out, threads=threads)
    return out


def decode_into(
    name: str, blocks: np.ndarray, out: np.ndarray, *, threads: int | None = None
) -> None:
    """Like ``decode``, but into an existing float32 array, which need not be contiguous.

    Raises:
        NotImplementedError, ValueError, TypeError: as for ``decode``; or ``out`` does not fit.

    Example:
        >>> out = np.ones((2, 64), np.float32)
        >>> decode_into("Q8_0", np.zeros((2, 34), np.uint8), out[:, :32])
        >>> out.sum(axis=1)
        array([32., 32.], dtype=float32)
    """
    layout = layout_of(name)
    shape = block_shape(layout, blocks.shape)
    if blocks.dtype != np.uint8 or out.dtype != np.float32:
        raise TypeError(f"expected uint8 blocks and float32 out, got {blocks.dtype}, {out.dtype}")
    if out.shape != shape:
        raise ValueError(
            f"blocks {blocks.shape} decode to shape {shape}, but the output has {out.shape}"
        )
    if not out.size:
        return
    if blocks.flags.c_contiguous and out.flags.c_contiguous:
        rows = blocks.reshape(-1, layout.nbytes)
        _run(DECODERS[name], rows, out.reshape(-1, layout.elements), threads)
    elif out.size > max(PIECE, layout.elements):
        for part, values in _halves(blocks, out, layout.nbytes):
            decode_into(name, part, values, threads=threads)
    else:
        values = np.empty(shape, np.float32)
        decode_into(name, np.ascontiguousarray(blocks), values, threads=threads)
        out[...] = values


def _halves(
    blocks: np.ndarray, out: np.ndarray, nbytes: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both arrays cut in half along the first axis longer than 1; the last axis is cut between blocks."""
    axis = next((k for k, size in enumerate(out.shape[:-1]) if size > 1), out.ndim - 1)
    blocks, out = np.moveaxis(blocks, axis, 0), np.moveaxis(out, axis, 0)
    unit = nbytes if axis == out.ndim - 1 else 1
    middle = len(blocks) // unit // 2
    at = middle * unit, middle * unit * len(out) // len(blocks)
    for part in (slice(None, at[0]), slice(None, at[1])), (slice(at[0], None), slice(at[1], None)):
        yield np.moveaxis(blocks[part[0]], 0, axis), np.moveaxis(out[part[1]], 0, axis)


def _run(decoder: Decoder, blocks: np.ndarray, out: np.ndarray, threads: int | None) -> None:
    """Decodes blocks ``[n, nbytes]`` piece by piece; each thread takes the next piece."""
    step = PIECE // out.shape[1]
    starts = iter(range(0, len(blocks), step))

    def work() -> None:
        scratch = scratch_of_thread()
        # NaN and infinity in a file are decoded as such, without warnings.
        with np.errstate(all="ignore"):
            for start in starts:
                decoder(blocks[start : start + step], out[start : start + step], scratch)

    if threads is None:
        threads = min(2, os.cpu_count() or 1)
    share_work(work, threads if out.size >= PARALLEL else 1, "maxjax-decode")
