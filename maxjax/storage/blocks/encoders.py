"""Encoding of float32 to ggml's quantised blocks with NumPy, in pieces that fit the CPU cache.

The blocks equal those of ggml's reference quantisers (``quantize_row_*_ref``, without an importance
matrix) bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from . import encode_k, encode_simple
from .layout import LAYOUTS, BlockLayout
from .scratch import Scratch, scratch_of_thread

# (values float32 [n, elements], blocks uint8 [n, nbytes] to be filled, scratch); both are
# C-contiguous, the values are finite.
Encoder = Callable[[np.ndarray, np.ndarray, Scratch], None]

# Values per piece; about six float32 arrays of this size are in use at a time. Two threads are slower
# with smaller pieces, because they then spend more time waiting for the GIL than computing.
PIECE = 1 << 18
# For fewer values a second thread costs more than it saves.
PARALLEL = 1 << 19

ENCODERS: dict[str, Encoder] = {
    "Q4_0": encode_simple.q4_0,
    "Q4_1": encode_simple.q4_1,
    "Q5_0": encode_simple.q5_0,
    "Q5_1": encode_simple.q5_1,
    "Q8_0": encode_simple.q8_0,
    "Q4_K": encode_k.q4_k,
    "Q5_K": encode_k.q5_k,
    "Q6_K": encode_k.q6_k,
}
"""The block types that can be written, by ggml's name."""


def encode(encoding: str, values: np.ndarray, *, threads: int | None = None) -> np.ndarray:
    """Values as quantised blocks: float32 ``[..., n * elements]`` → uint8 ``[..., n * nbytes]``.

    Deterministic: a block depends only on its own values. As in ggml, values that are much smaller
    than the largest of their block become zero, and so does a block whose scale is below the smallest
    float16 (about 3e-8).

    Args:
        encoding: ggml's name of the type, a key of ``ENCODERS``.
        values: values; the last axis holds complete blocks. A non-contiguous array is slower.
        threads: number of threads for large arrays, by default 2.

    Raises:
        NotImplementedError: the type is unknown, or has no encoder here.
        TypeError: ``values`` are not float32.
        ValueError: the last axis does not consist of complete blocks; a value is NaN or infinite,
            or so large that the scale of its block does not fit float16 (the message has its index).

    Example:
        >>> encode("Q8_0", np.arange(32, dtype=np.float32) - 15)[:6].view(np.int8)
        array([   8,   48, -119, -111, -103,  -95], dtype=int8)
    """
    layout = _layout(encoding)
    if values.dtype != np.float32:
        raise TypeError(f"values to encode as {encoding} must be float32, got {values.dtype}")
    if not values.shape or values.shape[-1] % layout.elements:
        raise ValueError(
            f"the last axis of values to encode as {encoding} must be a multiple of "
            f"{layout.elements}, got shape {values.shape}"
        )
    count = values.shape[-1] // layout.elements
    blocks = np.empty((*values.shape[:-1], count * layout.nbytes), np.uint8)
    invalid = _run(layout, values, blocks.reshape(-1, layout.nbytes), threads)
    if invalid:
        position, why = min(invalid)
        index = tuple(map(int, np.unravel_index(position, values.shape)))
        raise ValueError(f"values{list(index)} is {values[index]}: {why}")
    return blocks


def _layout(encoding: str) -> BlockLayout:
    if encoding not in ENCODERS:
        known = ", ".join(sorted(ENCODERS))
        raise NotImplementedError(
            f"cannot encode blocks of type {encoding!r}; supported are {known}"
        )
    return LAYOUTS[encoding]


def _run(
    layout: BlockLayout, values: np.ndarray, blocks: np.ndarray, threads: int | None
) -> list[tuple[int, str]]:
    """Fills the blocks piece by piece, each thread taking the next one, up to an invalid value.

    Returns the first invalid value of each thread. Pieces are taken in order and each one taken is
    finished, so the smallest of these positions is the first invalid value of all.
    """
    step = PIECE // layout.elements
    starts = iter(range(0, len(blocks), step))
    invalid: list[tuple[int, str]] = []

    def work() -> None:
        scratch = scratch_of_thread()
        # `flat` of a non-contiguous array copies one piece at a time; each thread needs its own.
        flat = values.reshape(-1) if values.flags.c_contiguous else values.flat
        # Scales of tiny and huge values may overflow meanwhile; the result is checked.
        with np.errstate(all="ignore"):
            while not invalid:
                start = next(starts, None)
                if start is None:
                    return
                first = start * layout.elements
                piece = flat[first : first + step * layout.elements].reshape(-1, layout.elements)
                problem = _piece(layout, piece, blocks[start : start + step], scratch)
                if problem:
                    invalid.append((first + problem[0], problem[1]))

    if threads is None:
        threads = min(2, os.cpu_count() or 1)
    if threads <= 1 or values.size < PARALLEL:
        work()
        return invalid
    with ThreadPoolExecutor(threads - 1, "maxjax-encode") as pool:
        others = [pool.submit(work) for _ in range(threads - 1)]
        work()
        for other in others:
            other.result()
    return invalid


def _piece(
    layout: BlockLayout, values: np.ndarray, blocks: np.ndarray, scratch: Scratch
) -> tuple[int, str] | None:
    """Encodes some blocks; returns the index of the first invalid value and the reason, or None."""
    finite = np.isfinite(values, out=scratch.array("finite", values.shape, "?"))
    if not finite.all():
        return int(finite.argmin()), f"{layout.name} blocks can only hold finite values"
    ENCODERS[layout.name](values, blocks, scratch)
    records = blocks.view(layout.record)[:, 0]
    fits = np.ones(len(blocks), bool)
    for field in layout.fields:
        if field.code == "f2":
            fits &= np.isfinite(records[field.name])
    if not fits.all():
        block = int(fits.argmin())
        largest = int(np.abs(values[block]).argmax())
        why = f"too large for {layout.name}, as the scale of its block does not fit float16"
        return block * layout.elements + largest, why
    return None
