"""MAX's kernels for experts: the order of the tokens by expert, grouped products, and the sum of results."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ...dtype import DType
from ...graph.ops.lift import lift
from ...kernels.grouped import grouped_matmul


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
    return grouped_matmul(hidden_states, weight[ids], sizes)


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
