"""MAX's kernels as functions of JAX arrays: attention, RoPE and experts of ragged batches.

A ragged batch has the tokens of all its sequences one after another, ``[tokens, …]``, and offsets ``[B + 1]`` that say
where each begins. Those kernels that write to a paged cache are refused (``maxjax.max_names``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..absent import absent as _absent
from ..dtype import DType
from ..graph.ops import top_k
from ..graph.ops.lift import lift
from ..graph.value import TensorValue
from ..kernels.attention import attention
from .attention.mask_config import MHAMaskVariant as MHAMaskVariant
from .paged_attention import flash_attention_ragged as flash_attention_ragged
from .paged_attention import fused_qk_ragged_rope as fused_qk_ragged_rope
from .paged_attention import fused_qkv_ragged_matmul as fused_qkv_ragged_matmul
from .paged_attention import matmul_kv_cache_ragged as matmul_kv_cache_ragged
from .paged_attention import rms_norm_key_cache as rms_norm_key_cache
from .paged_attention import rope_split_store_ragged as rope_split_store_ragged
from .paged_attention import store_k_cache_ragged as store_k_cache_ragged
from .paged_attention import store_v_cache_ragged as store_v_cache_ragged
from .ragged import rotated, seen, sequences


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
    """Attention of rows of equal length, on any device.

    Args:
        q: ``[B, T, H, D]``.
        k, v: ``[B, S, K, D]``; H is a multiple of K.
        mask_variant: which keys a query attends to; the first ones are at the same position.
        scale: factor of the scores.
        local_window_size: positions of a window or chunk.
        valid_length: ``[B]``, tokens of each row; the keys behind them are not attended to.

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
    """Attention with numbers that are added to the scores.

    Args:
        q, k, v: as for :func:`flash_attention_gpu`.
        mask: ``[B, T, S]`` or ``[B, H, T, S]``; ``-inf`` where a query does not attend.
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
        q: ``[tokens, H, D]``.
        k, v: ``[tokens, K, D]``; H is a multiple of K.
        input_row_offsets: ``[B + 1]``.
        max_seq_len: ignored.
        mask_variant, scale, local_window_size: as for :func:`flash_attention_gpu`.

    Memory grows with the square of the number of tokens.
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
        input: ``[tokens, H, D]``.
        input_row_offsets: ``[B + 1]``.
        start_pos: ``[B]``, position of the first token of each sequence.
        freqs_cis: ``[positions, W]``, of a RotaryEmbedding; where W is less than D, W elements of each head are
            rotated.
        interleaved: whether neighbours are rotated, or halves.
        rope_first: whether the first W elements are rotated, or the last.
        output_dtype: dtype of the result; that of the input by default.
    """
    rows, places = sequences(input_row_offsets, input.shape[0])
    positions = places + start_pos.astype(jnp.int32)[rows]
    found = rotated(input, freqs_cis[positions], interleaved, rope_first)
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
        input: ``[tokens, H, D]``.
        freqs_cis: ``[positions, W]``, of a RotaryEmbedding.
        position_ids: ``[tokens]``.
        mrope_section: sections of positions in several directions.
        interleaved: whether neighbours are rotated, or halves.

    Raises:
        NotImplementedError: there are positions in several directions.
    """
    if mrope_section is not None or position_ids.ndim != 1:
        raise NotImplementedError("positions in several directions (mrope_section) are not supported; maxjax.models "
                                  "has the families that use them")  # fmt: skip
    return rotated(input, freqs_cis[position_ids.astype(jnp.int32)], interleaved, False)


@lift
def moe_create_indices(
    topk_ids: Any, num_local_experts: int, *, needs_scales_offset: bool = False
) -> tuple[Any, ...]:
    """The order that brings the tokens of each expert together.

    Args:
        topk_ids: ``[N]``, the expert of each assignment of a token.
        num_local_experts: number of experts, E.
        needs_scales_offset: for quantised experts; not supported.

    Returns:
        The assignments ordered by experts ``[N]``, where each expert begins ``[E + 1]``, the places of the assignments
        in that order ``[N]``, the numbers of the experts ``[E]``, and the largest number of assignments and E ``[2]``.

    Raises:
        NotImplementedError: ``needs_scales_offset`` is set.

    Example:
        >>> [x.tolist() for x in moe_create_indices(jnp.array([2, 0, 2]), 3)]
        [[1, 0, 2], [0, 1, 1, 3], [1, 0, 2], [0, 1, 2], [2, 3]]
    """
    if needs_scales_offset:
        raise NotImplementedError("needs_scales_offset is for MAX's quantised experts; use nn.MoE")
    ids = topk_ids.astype(jnp.int32)
    order = jnp.argsort(ids, stable=True)
    counts = jnp.zeros(num_local_experts, jnp.int32).at[ids].add(1)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)])
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    stats = jnp.stack([counts.max(), jnp.int32(num_local_experts)])
    as_indices = lambda x: x.astype(jnp.uint32)
    return (as_indices(order), as_indices(starts), as_indices(back),
            jnp.arange(num_local_experts, dtype=jnp.int32), as_indices(stats))  # fmt: skip


@lift
def grouped_matmul_ragged(
    hidden_states: Any,
    weight: Any,
    expert_start_indices: Any,
    expert_ids: Any,
    expert_usage_stats: Any,
) -> Any:
    """Each group of rows times the weight of its expert: ``group @ weight[expert].T``.

    Args:
        hidden_states: ``[N, in]``, rows of each group together.
        weight: ``[experts, out, in]``.
        expert_start_indices: ``[groups + 1]``, where each group begins.
        expert_ids: ``[groups]``, the expert of each; no expert has two.
        expert_usage_stats: ignored.

    Returns:
        ``[N, out]``.
    """
    sizes = jnp.diff(expert_start_indices.astype(jnp.int32))
    ids = jnp.clip(expert_ids.astype(jnp.int32), 0, weight.shape[0] - 1)
    return jax.lax.ragged_dot(hidden_states, weight[ids].swapaxes(1, 2), sizes)


@lift
def moe_finalize(
    down_projs: Any, restore_token_order: Any, router_weight: Any, out_type: Any
) -> Any:
    """The results of the experts of each token, multiplied by their shares and summed.

    Args:
        down_projs: ``[N k, E]``, results in the order of the experts.
        restore_token_order: ``[N k]``, the places of each token's results in that order.
        router_weight: ``[N, k]``, shares.
        out_type: dtype of the result.

    Returns:
        ``[N, E]``; summed in float32.

    Example:
        >>> rows = jnp.array([[1.0], [2.0], [3.0], [4.0]])
        >>> shares = jnp.array([[1.0, 2.0], [1.0, 10.0]])
        >>> moe_finalize(rows, jnp.array([0, 2, 1, 3]), shares, "float32").tolist()
        [[7.0], [42.0]]
    """
    shares = router_weight.astype(jnp.float32)
    each = down_projs[restore_token_order.astype(jnp.int32)].astype(jnp.float32)
    each = each.reshape(*shares.shape, down_projs.shape[-1])
    return (each * shares[..., None]).sum(axis=1).astype(DType.of(out_type).np)


@lift
def merge_ragged_tensors(a: Any, a_row_offsets: Any, b: Any, b_row_offsets: Any) -> tuple[Any, Any]:
    """Two ragged batches as one: of each sequence the tokens of the first, then those of the second.

    Args:
        a, b: ``[tokens, …]``.
        a_row_offsets, b_row_offsets: ``[B + 1]``.

    Returns:
        The tokens, and the offsets.

    Example:
        >>> a, b = jnp.array([1, 2, 3, 4, 5, 6]), jnp.array([7, 8, 9, 10])
        >>> [x.tolist() for x in merge_ragged_tensors(a, jnp.array([0, 2, 6]), b, jnp.array([0, 3, 4]))]
        [[1, 2, 7, 8, 9, 3, 4, 5, 6, 10], [0, 5, 10]]
    """
    (first, of_a), (second, of_b) = (
        sequences(o, x.shape[0]) for x, o in ((a, a_row_offsets), (b, b_row_offsets))
    )
    offsets = a_row_offsets + b_row_offsets
    starts = offsets.astype(jnp.int32)
    lengths = jnp.diff(a_row_offsets.astype(jnp.int32))
    whole = jnp.zeros((a.shape[0] + b.shape[0], *a.shape[1:]), a.dtype)
    whole = whole.at[starts[first] + of_a].set(a)
    return whole.at[starts[second] + lengths[second] + of_b].set(b), offsets


@lift
def scatter_nd_skip_oob_indices(input: Any, updates: Any, indices: Any) -> Any:
    """``ops.scatter_nd`` that leaves out updates whose index is outside.

    Args:
        input: ``[…]``.
        updates: ``[N, …]``.
        indices: ``[N, k]``, the first k axes of each place; negative ones count from the end.
    """
    depth = indices.shape[-1]
    sizes = jnp.broadcast_to(jnp.array(input.shape[:depth], indices.dtype), indices.shape)
    inside = jnp.all((indices >= -sizes) & (indices < sizes), axis=-1, keepdims=True)
    there = jnp.where(inside, jnp.where(indices < 0, indices + sizes, indices), sizes)
    return input.at[tuple(there[..., i] for i in range(depth))].set(updates, mode="drop")


@lift
def argmax_with_bias(logits: Any, bias: Any, *, position: int) -> Any:
    """The largest of the logits at one position and a bias: ``argmax(logits[:, position] + bias)``.

    Args:
        logits: ``[B, positions, V]``.
        bias: ``[B, V]``.
        position: the position.

    Returns:
        ``[B]``, integers.

    Raises:
        ValueError: there is no such position.
    """
    if not 0 <= position < logits.shape[1]:
        raise ValueError(f"position {position} is not among the {logits.shape[1]} of the logits")
    total = logits[:, position].astype(jnp.float32) + bias.astype(jnp.float32)
    return jnp.argmax(total, axis=-1).astype(jax.dtypes.canonicalize_dtype(jnp.int64))


def top_k_per_row(input: Any, k: Any, max_k: int) -> tuple[Any, Any]:
    """``ops.top_k`` with a number of its own for each row.

    Args:
        input: ``[B, N]``.
        k: ``[B]``, how many of each row.
        max_k: width of the results.

    Returns:
        Values and indices ``[B, max_k]``, descending; behind the first ``k`` of a row the lowest number and -1.
    """
    found, places = top_k(TensorValue(input), max_k, axis=-1)
    there = jnp.arange(max_k)[None] < TensorValue(k).value.astype(jnp.int32)[:, None]
    values = found.value
    floats = jnp.issubdtype(values.dtype, jnp.floating)
    lowest = -jnp.inf if floats else jnp.iinfo(values.dtype).min
    return (TensorValue(jnp.where(there, values, jnp.asarray(lowest, values.dtype))),
            TensorValue(jnp.where(there, places.value, -1)))  # fmt: skip


__getattr__ = _absent(__name__)
