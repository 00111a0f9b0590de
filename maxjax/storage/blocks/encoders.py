"""Encoding of float32 to ggml's quantised blocks, in pieces that fit the CPU cache.

The blocks equal those of ggml's reference quantisers (``quantize_row_*_ref``, with an importance matrix
``quantize_row_*_impl``) bit for bit. The compiled encoders (``encode_native``) are used where the
native library was built, else those in NumPy, which define the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from ..files import share_work
from . import encode_k, encode_simple
from .encode_native import encode_native, level
from .encode_simple import Fields, ValueImportance
from .layout import LAYOUTS, BlockLayout
from .search import NUMPY, Arrays

# (module and loop, values float32 [n, elements], importance) → fields of the blocks in their order.
# The values are finite.
Encoder = Callable[[Arrays, np.ndarray, ValueImportance | None], Fields]

# Values per piece; NumPy has about ten float32 arrays of this size in use at a time. Two threads are
# slower with smaller pieces, because they then spend more time waiting for the GIL than computing.
PIECE = 1 << 18
# For fewer values a second thread costs more than it saves.
PARALLEL = 1 << 19

ENCODERS: dict[str, Encoder] = {
    "Q4_0": encode_simple.q4_0,
    "Q4_1": encode_simple.q4_1,
    "Q5_0": encode_simple.q5_0,
    "Q5_1": encode_simple.q5_1,
    "Q8_0": encode_simple.q8_0,
    "MXFP4": encode_simple.mxfp4,
    "Q2_K": encode_k.q2_k,
    "Q3_K": encode_k.q3_k,
    "Q4_K": encode_k.q4_k,
    "Q5_K": encode_k.q5_k,
    "Q6_K": encode_k.q6_k,
}
"""The block types that can be written, by ggml's name."""


def encode(
    encoding: str,
    values: np.ndarray,
    *,
    importance: np.ndarray | None = None,
    threads: int | None = None,
) -> np.ndarray:
    """Values as quantised blocks: float32 ``[..., n * elements]`` → uint8 ``[..., n * nbytes]``.

    Deterministic: without ``importance`` a block depends only on its own values. As in ggml, values that
    are much smaller than the largest of their block become zero, and so does a block whose scale is
    below the smallest float16 (about 3e-8).

    Args:
        encoding: ggml's name of the type, a key of ``ENCODERS``.
        values: values; the last axis holds complete blocks. A non-contiguous array is slower.
        importance: weights of the squared errors, not negative, such as the mean squares of the inputs of a
            linear layer: ``[in]`` for all rows, or ``[experts, in]`` for values ``[experts, ..., in]``.
            Q8_0 and MXFP4 do not use it.
        threads: number of threads for large arrays; by default one for each processor with the
            compiled encoders, and 2 with NumPy.

    Raises:
        NotImplementedError: the type is unknown, or has no encoder here.
        TypeError: ``values`` are not float32.
        ValueError: the last axis does not consist of complete blocks; the importance has another shape, or
            is negative or not finite; a value is NaN or infinite, or so large that the scale of its
            block does not fit float16 (the message has its index).

    Example:
        >>> encode("Q8_0", np.arange(32, dtype=np.float32) - 15)[:6].view(np.int8)
        array([   8,   48, -119, -111, -103,  -95], dtype=int8)
    """
    layout = encoder_layout(encoding)
    if values.dtype != np.float32:
        raise TypeError(f"values to encode as {encoding} must be float32, got {values.dtype}")
    if not values.shape or values.shape[-1] % layout.elements:
        raise ValueError(
            f"the last axis of values to encode as {encoding} must be a multiple of "
            f"{layout.elements}, got shape {values.shape}"
        )
    count = values.shape[-1] // layout.elements
    blocks = np.empty((*values.shape[:-1], count * layout.nbytes), np.uint8)
    if importance is None or not values.size:
        invalid = _run(layout, values, None, blocks.reshape(-1, layout.nbytes), threads)
    else:
        importance = _checked(importance, values)
        invalid = []
        groups = zip(
            values.reshape(len(importance), -1, values.shape[-1]),
            importance,
            blocks.reshape(len(importance), -1, layout.nbytes),
            strict=True,
        )
        for number, (part, weights, into) in enumerate(groups):
            first = number * part.size
            found = _run(layout, part, weights, into, threads)
            invalid += [(first + position, why) for position, why in found]
    if invalid:
        position, why = min(invalid)
        index = tuple(map(int, np.unravel_index(position, values.shape)))
        raise ValueError(f"values{list(index)} is {values[index]}: {why}")
    return blocks


def _checked(importance: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The importance as C-contiguous float32 ``[groups, in]``."""
    shape, size = importance.shape, values.shape[-1]
    if shape != (size,) and (len(shape) != 2 or values.ndim < 2 or shape != (len(values), size)):
        raise ValueError(
            f"the importance of values {list(values.shape)} must be [{size}], or [experts, {size}] for "
            f"values [experts, ..., {size}]; got {list(shape)}"
        )
    wide = np.ascontiguousarray(importance, np.float32).reshape(-1, size)
    if not (wide >= 0).all() or not np.isfinite(wide).all():
        raise ValueError("the importance has negative values, or values that are not finite")
    return wide


def encoder_layout(encoding: str) -> BlockLayout:
    """The layout of a block type that can be written.

    Raises:
        NotImplementedError: it cannot.
    """
    if encoding not in ENCODERS:
        raise NotImplementedError(
            f"cannot encode blocks of type {encoding!r}; supported are {', '.join(ENCODERS)}"
        )
    return LAYOUTS[encoding]


def _run(
    layout: BlockLayout,
    values: np.ndarray,
    importance: np.ndarray | None,
    blocks: np.ndarray,
    threads: int | None,
) -> list[tuple[int, str]]:
    """Fills the blocks piece by piece, each thread taking the next one, up to an invalid value.

    With an importance, pieces are complete rows. Returns the first invalid value of each thread. Pieces
    are taken in order and each one taken is finished, so the smallest of these positions is the first
    invalid value of all.
    """
    row = 1 if importance is None else values.shape[-1] // layout.elements
    step = max(1, PIECE // layout.elements // row) * row
    starts = iter(range(0, len(blocks), step))
    invalid: list[tuple[int, str]] = []

    def work() -> None:
        # `flat` of a non-contiguous array copies one piece at a time; each thread needs its own.
        flat = values.reshape(-1) if values.flags.c_contiguous else values.flat
        while not invalid:
            start = next(starts, None)
            if start is None:
                return
            first = start * layout.elements
            piece = flat[first : first + step * layout.elements].reshape(-1, layout.elements)
            problem = _piece(layout, piece, importance, blocks[start : start + step])
            if problem:
                invalid.append((first + problem[0], problem[1]))

    if threads is None:
        most = 2 if level() == "numpy" else 64
        threads = min(most, os.cpu_count() or 1)
    threads = min(threads, -(-len(blocks) // step)) if values.size >= PARALLEL else 1
    share_work(work, threads, "maxjax-encode")
    return invalid


def _piece(
    layout: BlockLayout, values: np.ndarray, importance: np.ndarray | None, blocks: np.ndarray
) -> tuple[int, str] | None:
    """Encodes some blocks; returns the index of the first invalid value and the reason, or None."""
    if encode_native(layout.name, values, importance, blocks):
        return None
    finite = np.isfinite(values)
    if not finite.all():
        return int(finite.argmin()), f"{layout.name} blocks can only hold finite values"
    encode_with_numpy(layout, values, importance, blocks)
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


def encode_with_numpy(
    layout: BlockLayout, values: np.ndarray, importance: np.ndarray | None, blocks: np.ndarray
) -> None:
    """Fills blocks uint8 ``[n, nbytes]`` from float32 ``[n, elements]``; see ``encode_native``."""
    count = len(values)
    weights = None
    if importance is not None:
        rows = values.reshape(-1, importance.size)
        # A cumulative sum adds one value after the other, as ggml does.
        squares = np.cumsum(rows * rows, axis=1, dtype=np.float32)[:, -1]
        means = np.repeat(squares / np.float32(importance.size), count // len(rows))
        tiled = np.broadcast_to(importance, rows.shape).reshape(values.shape)
        weights = ValueImportance(tiled, means)
    if count == 1:
        # Sums over an axis are in ggml's order if another axis is longer than 1.
        values = np.repeat(values, 2, axis=0)
        if weights is not None:
            weights = ValueImportance(*(np.repeat(one, 2, axis=0) for one in weights))
    # Scales of tiny and huge values may overflow meanwhile; the result is checked.
    with np.errstate(all="ignore"):
        fields = ENCODERS[layout.name](NUMPY, values, weights)
    for into, field in zip(layout.split(blocks), fields, strict=True):
        into[...] = field[:count]
