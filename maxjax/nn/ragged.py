"""Ragged batches: the sequence and position of each token, attention masks, and RoPE."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .attention.mask_config import MHAMaskVariant
from .rotary_embedding import rotate


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


def frequencies(freqs_cis: Any, positions: Any, mrope_section: Any = None) -> Any:
    """The rows ``[tokens, W]`` of a RotaryEmbedding's table for positions ``[tokens]``; NaN beyond the table.

    Raises:
        NotImplementedError: positions have several directions.
    """
    if mrope_section is not None or positions.ndim != 1:
        raise NotImplementedError("positions in several directions (mrope_section) are not supported; maxjax.models "
                                  "has the families that use them")  # fmt: skip
    return jnp.take(freqs_cis, positions.astype(jnp.int32), axis=0, mode="fill")


def rotated(x: Any, freqs: Any, interleaved: bool, rope_first: bool) -> Any:
    """``x [tokens, H, D]`` rotated by ``freqs [tokens, W]``, alternating cosines and sines; W may be less than D."""
    width = freqs.shape[-1]
    table = freqs.reshape(freqs.shape[0], width // 2, 2)
    start = 0 if rope_first else x.shape[-1] - width
    part = jax.lax.slice_in_dim(x, start, start + width, axis=-1)
    part = rotate(part, table[..., 0], table[..., 1], interleaved=interleaved).astype(x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=-1)
