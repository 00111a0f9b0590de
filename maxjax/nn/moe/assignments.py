"""MAX's kernels for experts: sorting tokens by expert, grouped matmuls, and the weighted sum of results."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ...dtype import DType
from ...graph.kind import on_arrays
from ...kernels.grouped import grouped_matmul


@on_arrays
def moe_create_indices(
    topk_ids: Any, num_local_experts: int, *, needs_scales_offset: bool = False
) -> tuple[Any, ...]:
    """Sorts the assignments of tokens to experts by expert.

    Args:
        topk_ids: index of the expert of each assignment, ``[N]``. Those out of range mean no expert and are last.
        num_local_experts: number E of experts.
        needs_scales_offset: whether to return offsets of scales for quantised experts; not supported.

    Returns:
        The assignments sorted by expert ``[N]``; the offsets of the experts in that order ``[E + 1]``; the position of
        each assignment in it ``[N]``; the indices 0 … E - 1; and the most assignments of an expert, and E ``[2]``.

    Raises:
        NotImplementedError: ``needs_scales_offset`` is set.

    Example:
        >>> [x.tolist() for x in moe_create_indices(jnp.array([2, 0, 2]), 3)]
        [[1, 0, 2], [0, 1, 1, 3], [1, 0, 2], [0, 1, 2], [2, 3]]
    """
    if needs_scales_offset:
        raise NotImplementedError("needs_scales_offset is for MAX's quantised experts; use nn.MoE")
    ids = topk_ids.astype(jnp.int32)
    ids = jnp.where(ids < 0, num_local_experts, ids)  # no expert
    order = jnp.argsort(ids, stable=True)
    counts = jnp.zeros(num_local_experts, jnp.int32).at[ids].add(1)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)])
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    stats = jnp.stack([counts.max(), jnp.int32(num_local_experts)])
    as_indices = lambda x: x.astype(jnp.uint32)
    return (as_indices(order), as_indices(starts), as_indices(back),
            jnp.arange(num_local_experts, dtype=jnp.int32), as_indices(stats))  # fmt: skip


@on_arrays
def grouped_matmul_ragged(
    hidden_states: Any,
    weight: Any,
    expert_start_indices: Any,
    expert_ids: Any,
    expert_usage_stats: Any,
) -> Any:
    """Multiplies each group of rows by the weight of its expert: ``group @ weight[expert].T``.

    Args:
        hidden_states: rows ``[N, in]``, sorted by group.
        weight: weights of the experts, ``[experts, out, in]``.
        expert_start_indices: offsets of the groups, ``[groups + 1]``.
        expert_ids: index of the expert of each group, ``[groups]``, without repetition.
        expert_usage_stats: ignored.

    Returns:
        ``[N, out]``; rows after the last offset are undefined.
    """
    sizes = jnp.diff(expert_start_indices.astype(jnp.int32))
    ids = jnp.clip(expert_ids.astype(jnp.int32), 0, weight.shape[0] - 1)
    return grouped_matmul(hidden_states, weight[ids], sizes)


@on_arrays
def moe_finalize(
    down_projs: Any, restore_token_order: Any, router_weight: Any, out_type: Any
) -> Any:
    """The weighted sum of the experts' results for each token.

    Args:
        down_projs: results sorted by expert, ``[N k, E]``.
        restore_token_order: positions of each token's k results in that order, ``[N k]``.
        router_weight: factors of the results, ``[N, k]``.
        out_type: dtype of the result.

    Returns:
        ``[N, E]``, summed in float32.

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
