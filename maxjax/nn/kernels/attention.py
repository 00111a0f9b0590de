"""MAX's kernels for attention without a cache, and RoPE of ragged batches."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ...dtype import DType
from ...graph.ops.lift import lift
from ...kernels.attention import attention
from ..attention.mask_config import MHAMaskVariant
from .ragged import axes_interleaved, frequencies, rotated, seen, sequences


@lift
def flash_attention_gpu(
    q: Any,
    k: Any,
    v: Any,
    mask_variant: MHAMaskVariant,
    scale: float,
    local_window_size: int = -1,
    valid_length: Any = None,
) -> Any:
    """Attention of a batch of sequences of equal length, on any device.

    Args:
        q: queries ``[B, T, H, D]``.
        k, v: keys and values ``[B, S, K, D]``; H is a multiple of K.
        mask_variant: mask of the keys; the first query and the first key both have position 0.
        scale: factor of the scores.
        local_window_size: number of positions in a window or chunk.
        valid_length: number of valid tokens of each sequence, ``[B]``; later keys are masked.

    Returns:
        ``[B, T, H, D]``.

    Raises:
        ValueError: the shapes do not match, or the mask needs a window.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> flash_attention_gpu(x, x, x, MHAMaskVariant.CAUSAL_MASK, 0.5).shape
        (1, 3, 2, 4)
    """
    keys = jnp.arange(k.shape[1])
    mask = seen(mask_variant, jnp.arange(q.shape[1]), keys, local_window_size)
    mask = None if mask is None else mask[None, None]
    if valid_length is not None:
        there = (keys[None] < valid_length.astype(jnp.int32)[:, None])[:, None, None]
        mask = there if mask is None else mask & there
    if mask is not None:
        mask = jnp.broadcast_to(mask, (q.shape[0], *mask.shape[1:]))
    return attention(q, k, v, mask, scale=scale)


@lift
def masked_flash_attention_gpu(q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
    """Attention with a bias that is added to the scores.

    Args:
        q, k, v: queries, keys and values as for :func:`flash_attention_gpu`.
        mask: bias ``[B, T, S]`` or ``[B, H, T, S]``; ``-inf`` where a query does not attend.
        scale: factor of the scores.

    Raises:
        ValueError: the shapes do not match.
    """
    bias = mask if mask.ndim == 4 else mask[:, None]
    return attention(
        q, k, v, scale=scale, bias=jnp.maximum(bias.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    )


@lift
def flash_attention_ragged_gpu(
    q: Any,
    k: Any,
    v: Any,
    input_row_offsets: Any,
    max_seq_len: Any,
    mask_variant: MHAMaskVariant,
    scale: float,
    local_window_size: int = -1,
) -> Any:
    """Attention within each sequence of a ragged batch, without a cache.

    Args:
        q: queries ``[tokens, H, D]``.
        k, v: keys and values ``[tokens, K, D]``; H is a multiple of K.
        input_row_offsets: offsets of the sequences ``[B + 1]``.
        max_seq_len: ignored.
        mask_variant, scale, local_window_size: as for :func:`flash_attention_gpu`.

    Memory grows with the square of the number of tokens in the batch.
    """
    rows, places = sequences(input_row_offsets, q.shape[0])
    mask = rows[:, None] == rows[None]
    shown = seen(mask_variant, places, places, local_window_size)
    mask = mask if shown is None else mask & shown
    return attention(q[None], k[None], v[None], mask[None], scale=scale)[0]


@lift
def rope_ragged(
    input: Any,
    input_row_offsets: Any,
    start_pos: Any,
    freqs_cis: Any,
    *,
    interleaved: bool = True,
    rope_first: bool = False,
    output_dtype: Any = None,
) -> Any:
    """RoPE of a ragged batch.

    Args:
        input: queries or keys ``[tokens, H, D]``.
        input_row_offsets: offsets of the sequences ``[B + 1]``.
        start_pos: position of the first token of each sequence, ``[B]``.
        freqs_cis: table ``[positions, W]`` of a RotaryEmbedding; if W is less than D, only W elements of each head
            are rotated. Tokens beyond the table give NaN.
        interleaved: whether pairs are neighbouring elements; otherwise element i is paired with i + W/2.
        rope_first: whether the first W elements of a head are rotated; otherwise the last W are.
        output_dtype: dtype of the result; that of the input by default.
    """
    rows, places = sequences(input_row_offsets, input.shape[0])
    positions = places + start_pos.astype(jnp.int32)[rows]
    found = rotated(input, frequencies(freqs_cis, positions), interleaved, rope_first)
    return found if output_dtype is None else found.astype(DType.of(output_dtype).np)


@lift
def rope_ragged_with_position_ids(
    input: Any,
    freqs_cis: Any,
    position_ids: Any,
    *,
    mrope_section: Any = None,
    interleaved: bool = True,
) -> Any:
    """RoPE of tokens at given positions.

    Args:
        input: queries or keys ``[tokens, H, D]``.
        freqs_cis: table ``[positions, W]`` of a RotaryEmbedding.
        position_ids: positions ``[tokens]`` or ``[1, tokens]``, or with ``mrope_section`` ``[3, tokens]``.
        mrope_section: number of pairs of features that use the positions along each axis (M-RoPE); those of the
            second and third axis are every third pair, from the second and third on.
        interleaved: whether pairs are neighbouring elements; otherwise element i is paired with i + W/2.

    Raises:
        ValueError: ``mrope_section`` does not fit the positions or the table, or several axes have no sections.
    """
    axes = None
    if mrope_section is not None:
        axes = axes_interleaved(mrope_section, position_ids, freqs_cis.shape[-1] // 2)
    table = frequencies(freqs_cis, position_ids, axes)
    return rotated(input, table, interleaved, False)
