"""Encoding of float32 to ggml's quantised blocks with NumPy, in pieces that fit the cache.

The blocks are bit for bit those of ggml's reference quantisers (``quantize_row_*_ref``, without an
importance matrix).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from . import encode_k, encode_simple
from .layout import LAYOUTS, Layout
from .scratch import Scratch, scratch_of_thread

# (values float32 [n, elements], blocks uint8 [n, nbytes] to be filled, scratch); both are
# C-contiguous, the values are finite.
Encoder = Callable[[np.ndarray, np.ndarray, Scratch], None]

# Values of a piece; some six arrays of as many float32 are in use at a time. Smaller ones are
# slower in two threads, which then wait for the interpreter more than they compute.
PIECE = 1 << 18
# Below this a second thread costs more than it saves.
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
"""The types of blocks that can be written, by ggml's name."""


def encode(encoding: str, values: np.ndarray, *, threads: int | None = None) -> np.ndarray:
    """Values as quantised blocks: float32 ``[..., n * elements]`` → uint8 ``[..., n * nbytes]``.

    Deterministic: a block depends on its own values alone. Values that are small beside the
    largest of their block become zero; so does a whole block whose scale is below the numbers of
    float16 (about 3e-8), as in ggml.

    Args:
        encoding: ggml's name of the type, a key of ``ENCODERS``.
        values: whole blocks along the last axis. An array that is not contiguous is slower.
        threads: number of threads for large arrays, by default 2.

    Raises:
        NotImplementedError: the type is unknown, or has no encoder here.
        TypeError: ``values`` are not float32.
        ValueError: the last axis does not consist of whole blocks; a value is NaN or infinite,
            or so large that the scale of its block does not fit float16 (both name the place).

    Example:
        >>> encode("Q8_0", np.arange(32, dtype=np.float32) - 15)[:6].view(np.int8)
        array([   8,   48, -119, -111, -103,  -95], dtype=int8)
    """
    layout = _layout(encoding)
    if values.dtype != np.float32:
        raise TypeError(f"wanted float32 values to encode as {encoding}, got {values.dtype}")
    if not values.shape or values.shape[-1] % layout.elements:
        raise ValueError(
            f"the last axis of values to encode as {encoding} must be a multiple of "
            f"{layout.elements}, got shape {values.shape}"
        )
    count = values.shape[-1] // layout.elements
    blocks = np.empty((*values.shape[:-1], count * layout.nbytes), np.uint8)
    wrong = _run(layout, values, blocks.reshape(-1, layout.nbytes), threads)
    if wrong:
        position, why = min(wrong)
        index = tuple(map(int, np.unravel_index(position, values.shape)))
        raise ValueError(f"values{list(index)} is {values[index]}: {why}")
    return blocks


def _layout(encoding: str) -> Layout:
    if encoding not in ENCODERS:
        known = ", ".join(sorted(ENCODERS))
        raise NotImplementedError(f"blocks of type {encoding!r} cannot be encoded, only {known}")
    return LAYOUTS[encoding]


def _run(
    layout: Layout, values: np.ndarray, blocks: np.ndarray, threads: int | None
) -> list[tuple[int, str]]:
    """Fills the blocks piece by piece, each thread taking the next one, up to a wrong value.

    Gives the first wrong value of each thread. A piece that was taken is also looked at, and
    those before a wrong one have all been taken: the first of these values is the first there is.
    """
    step = PIECE // layout.elements
    starts = iter(range(0, len(blocks), step))
    wrong: list[tuple[int, str]] = []

    def work() -> None:
        scratch = scratch_of_thread()
        # An iterator over memory with gaps copies a piece at a time; it serves one thread.
        flat = values.reshape(-1) if values.flags.c_contiguous else values.flat
        # Scales of tiny and of huge values leave the range on the way; what comes of it is checked.
        with np.errstate(all="ignore"):
            while not wrong:
                start = next(starts, None)
                if start is None:
                    return
                first = start * layout.elements
                some = flat[first : first + step * layout.elements].reshape(-1, layout.elements)
                found = _piece(layout, some, blocks[start : start + step], scratch)
                if found:
                    wrong.append((first + found[0], found[1]))

    if threads is None:
        threads = min(2, os.cpu_count() or 1)
    if threads <= 1 or values.size < PARALLEL:
        work()
        return wrong
    with ThreadPoolExecutor(threads - 1, "maxjax-encode") as pool:
        others = [pool.submit(work) for _ in range(threads - 1)]
        work()
        for other in others:
            other.result()
    return wrong


def _piece(
    layout: Layout, values: np.ndarray, blocks: np.ndarray, scratch: Scratch
) -> tuple[int, str] | None:
    """Encodes some blocks; the number of the first value that cannot be, and why, or None."""
    finite = np.isfinite(values, out=scratch.array("finite", values.shape, "?"))
    if not finite.all():
        return int(finite.argmin()), f"{layout.name} blocks have finite values only"
    ENCODERS[layout.name](values, blocks, scratch)
    records = blocks.view(layout.record)[:, 0]
    fits = np.ones(len(blocks), bool)
    for field in layout.fields:
        if field.code == "f2":
            fits &= np.isfinite(records[field.name])
    if not fits.all():
        block = int(fits.argmin())
        largest = int(np.abs(values[block]).argmax())
        why = f"too large for {layout.name}, the scale of its block does not fit float16"
        return block * layout.elements + largest, why
    return None
