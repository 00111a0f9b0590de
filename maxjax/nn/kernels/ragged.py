"""Ragged batches: the sequence and position of each token, attention masks, and RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..attention.mask_config import MHAMaskVariant
from ..rotary_embedding import rotate


def seen(variant: MHAMaskVariant, queries: Any, keys: Any, window: int) -> Any:
    """The mask ``[..., T, S]`` (True = attend) for positions ``[..., T]`` and ``[..., S]``; None is no mask."""
    if variant == MHAMaskVariant.NULL_MASK:
        return None
    behind = queries[..., :, None] - keys[..., None, :]
    causal = behind >= 0
    if variant == MHAMaskVariant.CAUSAL_MASK:
        return causal
    if variant == MHAMaskVariant.SLIDING_WINDOW_NONCAUSAL_MASK:
        raise NotImplementedError(
            "SLIDING_WINDOW_NONCAUSAL_MASK is not supported: give the mask to jax.nn.dot_product_attention"
        )
    if window < 1:
        raise ValueError(f"{variant.name} needs a local_window_size, not {window}")
    if variant == MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK:
        return causal & (behind < window)
    return causal & (queries[..., :, None] // window == keys[..., None, :] // window)


def sequences(offsets: Any, count: int) -> tuple[Any, Any]:
    """For each of ``count`` tokens of a ragged batch, the index of its sequence and its position in the sequence."""
    offsets = offsets.astype(jnp.int32)
    tokens = jnp.arange(count)
    # The index is a count of offsets, because jnp.searchsorted does not accept symbolic sizes.
    rows = (offsets[1:, None] <= tokens[None]).sum(axis=0, dtype=jnp.int32)
    return rows, tokens - offsets[rows]


def frequencies(freqs_cis: Any, positions: Any, axes: np.ndarray | None = None) -> Any:
    """The rows ``[tokens, W]`` of a RotaryEmbedding's table; NaN beyond the table.

    Args:
        freqs_cis: table ``[positions, W]``.
        positions: positions ``[tokens]`` or ``[1, tokens]``; with ``axes``, those along several axes, ``[S, tokens]``.
        axes: for each of the W/2 pairs of features, the axis whose positions it uses.

    Raises:
        ValueError: there are positions along several axes, and no ``axes``.
    """
    if axes is None:
        if positions.ndim != 1 and positions.shape[0] != 1:
            raise ValueError(
                f"positions {list(positions.shape)} along several axes need mrope_section"
            )
        positions = positions.reshape(-1)
        return jnp.take(freqs_cis, positions.astype(jnp.int32), axis=0, mode="fill")
    width = freqs_cis.shape[-1]
    pairs = freqs_cis.reshape(freqs_cis.shape[0], width // 2, 2)
    rows = jnp.take(pairs, positions.astype(jnp.int32), axis=0, mode="fill")  # [S, tokens, W/2, 2]
    found = rows[axes, :, np.arange(width // 2)]  # [W/2, tokens, 2]
    return found.swapaxes(0, 1).reshape(positions.shape[1], width)


def _checked(sections: Sequence[int], positions: Any, pairs: int) -> None:
    """Raises ValueError: there is not a section for each axis of the positions, or they are not of all pairs."""
    if positions.ndim != 2 or positions.shape[0] != len(sections):
        raise ValueError(
            f"mrope_section {list(sections)} takes position_ids [{len(sections)}, tokens], not {list(positions.shape)}"
        )
    if sum(sections) != pairs:
        raise ValueError(
            f"mrope_section {list(sections)} does not add up to the {pairs} pairs of features"
        )


def axes_in_turn(sections: Sequence[int], positions: Any, pairs: int) -> np.ndarray:
    """The axis of each pair of features if those of an axis are neighbours (M-RoPE, arXiv:2409.12191).

    Example:
        >>> axes_in_turn([2, 1, 1], np.zeros((3, 5)), 4).tolist()
        [0, 0, 1, 2]
    """
    _checked(sections, positions, pairs)
    return np.repeat(np.arange(len(sections)), sections)


def axes_interleaved(sections: Sequence[int], positions: Any, pairs: int) -> np.ndarray:
    """The axis of each pair of features if every third is of the second axis, and every third of the third one.

    Example:
        >>> axes_interleaved([2, 1, 1], np.zeros((3, 5)), 4).tolist()
        [0, 1, 2, 0]
    """
    _checked(sections, positions, pairs)
    axes = np.zeros(pairs, int)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = axis
    return axes


def rotated(x: Any, freqs: Any, interleaved: bool, rope_first: bool) -> Any:
    """``x [tokens, H, D]`` rotated by ``freqs [tokens, W]``, alternating cosines and sines; W may be less than D."""
    width = freqs.shape[-1]
    table = freqs.reshape(freqs.shape[0], width // 2, 2)
    start = 0 if rope_first else x.shape[-1] - width
    part = jax.lax.slice_in_dim(x, start, start + width, axis=-1)
    part = rotate(part, table[..., 0], table[..., 1], interleaved=interleaved).astype(x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=-1)
