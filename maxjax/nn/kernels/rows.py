"""MAX's kernels for rows and ragged batches: joining, scattering, choosing, and norms of queries and keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...graph.operands import ends
from ...graph.ops import rms_norm, top_k
from ...graph.ops.lift import integers, lift
from ...graph.rebinding import sized_as
from ...graph.value import TensorValue
from .ragged import sequences


@lift
def merge_ragged_tensors(a: Any, a_row_offsets: Any, b: Any, b_row_offsets: Any) -> tuple[Any, Any]:
    """Joins two ragged batches sequence by sequence: the tokens of ``a``, followed by those of ``b``.

    Args:
        a, b: ragged batches ``[tokens, …]`` of the same B sequences.
        a_row_offsets, b_row_offsets: their offsets ``[B + 1]``.

    Returns:
        The joined batch and its offsets.

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
    """``ops.scatter_nd``, except that updates with an index out of bounds are dropped.

    Args:
        input: array ``[…]``.
        updates: N slices ``[N, …]`` of the input.
        indices: indices ``[N, k]`` along the first k axes; negative ones count from the end.

    Raises:
        ValueError: the indices are not integers, or the shape of the updates does not fit.
    """
    depth, indices = indices.shape[-1], integers(indices, "scatter_nd_skip_oob_indices")
    sizes = jnp.broadcast_to(jnp.array(input.shape[:depth], indices.dtype), indices.shape)
    inside = indices < sizes
    if jnp.issubdtype(indices.dtype, jnp.signedinteger):  # -sizes of an unsigned dtype would wrap
        inside = inside & (indices >= -sizes)
        indices = jnp.where(indices < 0, indices + sizes, indices)
    there = jnp.where(jnp.all(inside, axis=-1, keepdims=True), indices, sizes)
    wanted = (*indices.shape[:-1], *input.shape[depth:])
    updates = sized_as(updates, wanted, f"scatter_nd_skip_oob_indices: the updates have shape {list(updates.shape)}, "
                       f"not {list(wanted)}")  # fmt: skip
    return input.at[tuple(there[..., i] for i in range(depth))].set(updates, mode="drop")


@lift
def argmax_with_bias(logits: Any, bias: Any, *, position: int) -> Any:
    """The token with the largest biased logit at one position: ``argmax(logits[:, position] + bias)``.

    Args:
        logits: logits ``[B, positions, V]``.
        bias: bias ``[B, V]``.
        position: index along the second axis of the logits.

    Returns:
        Integers ``[B]``.

    Raises:
        ValueError: the position is out of range.
    """
    if not 0 <= position < logits.shape[1]:
        raise ValueError(f"position {position} is not among the {logits.shape[1]} of the logits")
    total = logits[:, position].astype(jnp.float32) + bias.astype(jnp.float32)
    return jnp.argmax(total, axis=-1).astype(jax.dtypes.canonicalize_dtype(jnp.int64))


def top_k_per_row(input: Any, k: Any, max_k: int) -> tuple[Any, Any]:
    """``ops.top_k`` with another k for each row.

    Args:
        input: rows ``[B, N]``.
        k: number of elements that are wanted of each row, ``[B]``.
        max_k: width of the results.

    Returns:
        Values and indices ``[B, max_k]``, descending; after the first k of a row, the dtype's lowest number and -1.
    """
    found, places = top_k(TensorValue(input), max_k, axis=-1)
    there = jnp.arange(max_k)[None] < TensorValue(k).value.astype(jnp.int32)[:, None]
    values = found.value
    return (TensorValue(jnp.where(there, values, ends(values.dtype)[0])),
            TensorValue(jnp.where(there, places.value, -1)))  # fmt: skip


def _check_pair(op: str, q: Any, k: Any) -> None:
    """Checks that queries and keys are matrices with equal numbers of rows and equal dtypes.

    Raises:
        ValueError: the shapes or dtypes do not fit.
    """
    if q.ndim != 2 or k.ndim != 2 or q.shape[0] != k.shape[0] or q.dtype != k.dtype:
        raise ValueError(
            f"{op} takes as many rows of queries as of keys, in one dtype, not {q.dtype}{list(q.shape)} and "
            f"{k.dtype}{list(k.shape)}"
        )


@lift
def row_mean_of_squares_qk(q: Any, k: Any) -> Any:
    """The mean of the squares of each row of queries, and of keys.

    Args:
        q: queries ``[M, Nq]``.
        k: keys ``[M, Nk]`` of the same dtype.

    Returns:
        ``[M, 2]`` in float32, computed in float32.

    Raises:
        ValueError: the shapes or dtypes do not fit.

    Example:
        >>> row_mean_of_squares_qk(jnp.array([[1.0, 3.0]]), jnp.array([[2.0]])).tolist()
        [[5.0, 4.0]]
    """
    _check_pair("row_mean_of_squares_qk", q, k)
    return jnp.stack(
        [jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1) for x in (q, k)], axis=-1
    )


@lift
def apply_qk_rms_norm(
    q: Any, k: Any, qk_var: Any, gamma_q: Any, gamma_k: Any, epsilon: float
) -> tuple[Any, Any]:
    """The RMS norms of queries and keys, from means of squares that were computed before.

    Args:
        q: queries ``[M, Nq]``.
        k: keys ``[M, Nk]`` of the same dtype.
        qk_var: means ``[M, 2]`` from :func:`row_mean_of_squares_qk`.
        gamma_q: factors ``[Nq]`` of the queries.
        gamma_k: factors ``[Nk]`` of the keys.
        epsilon: number added to the means.

    Returns:
        Two arrays of the shapes and dtype of ``q`` and ``k``, computed in float32 and rounded once.

    Raises:
        ValueError: the shapes or dtypes do not fit.

    Example:
        >>> q, k = jnp.array([[1.0, 7.0]]), jnp.array([[2.0]])
        >>> seen = row_mean_of_squares_qk(q, k)
        >>> [x.tolist() for x in apply_qk_rms_norm(q, k, seen, jnp.array([5.0, 5.0]), jnp.ones(1), 0.0)]
        [[[1.0, 7.0]], [[1.0]]]
    """
    _check_pair("apply_qk_rms_norm", q, k)
    if qk_var.shape != (q.shape[0], 2):
        raise ValueError(
            f"apply_qk_rms_norm takes qk_var of shape {[q.shape[0], 2]}, not {list(qk_var.shape)}"
        )
    found = []
    for i, (x, gamma) in enumerate(((q, gamma_q), (k, gamma_k))):
        if gamma.shape != x.shape[1:]:
            raise ValueError(
                f"apply_qk_rms_norm takes {x.shape[1]} factors for {list(x.shape)}, not {list(gamma.shape)}"
            )
        wide = x.astype(jnp.float32) * jax.lax.rsqrt(qk_var[:, i : i + 1] + epsilon)
        found.append((wide * gamma.astype(jnp.float32)[None]).astype(x.dtype))
    return found[0], found[1]


@lift
def mtp_eh_norm(
    embed: Any,
    prev_hidden: Any,
    enorm_weight: Any,
    hnorm_weight: Any,
    epsilon: float,
    block_threads: int = 256,
) -> Any:
    """The input of a multi-token prediction (MTP) layer: RMS norms of embeddings and of hidden states, concatenated.

    Args:
        embed: embeddings ``[tokens, E]``.
        prev_hidden: hidden states ``[tokens, E]`` of the same dtype.
        enorm_weight, hnorm_weight: weights ``[E]`` of the RMS norms of the embeddings and of the states.
        epsilon: number added to the means of squares.
        block_threads: argument of MAX's kernel; ignored.

    Returns:
        ``[tokens, 2 E]``.

    Raises:
        ValueError: the shapes or dtypes do not fit.

    Example:
        >>> one = jnp.ones(2)
        >>> mtp_eh_norm(jnp.array([[3.0, 3.0]]), jnp.array([[-2.0, 2.0]]), one, one, 0.0).tolist()
        [[1.0, 1.0, -1.0, 1.0]]
    """
    if embed.shape != prev_hidden.shape or embed.dtype != prev_hidden.dtype:
        raise ValueError(
            f"mtp_eh_norm takes embeddings and states alike, not {embed.dtype}{list(embed.shape)} and "
            f"{prev_hidden.dtype}{list(prev_hidden.shape)}"
        )
    return jnp.concatenate(
        [rms_norm(embed, enorm_weight, epsilon), rms_norm(prev_hidden, hnorm_weight, epsilon)],
        axis=-1,
    )


@lift
def gated_group_rmsnorm(y: Any, gate: Any, norm_weight: Any, eps: float, group_size: int) -> Any:
    """``RMSNorm(y · silu(gate)) · norm_weight`` over each group of neighbouring features (Mamba 2).

    Args:
        y, gate: arrays ``[N, F]``.
        norm_weight: factors ``[F]``.
        eps: number added to the means of squares.
        group_size: number of features in a group; it divides F.

    Returns:
        ``[N, F]`` in the dtype of ``y``, computed in float32 and rounded once.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> y, gate = jnp.array([[3.0, -3.0, 0.5, 0.5]]), jnp.full((1, 4), 2.0)
        >>> gated_group_rmsnorm(y, gate, jnp.ones(4), 0.0, 2).round(3).tolist()
        [[1.0, -1.0, 1.0, 1.0]]
    """
    if y.shape != gate.shape or y.ndim != 2 or y.shape[1] % group_size:
        raise ValueError(
            f"gated_group_rmsnorm takes y and gate alike, [N, F] with groups of {group_size}, not "
            f"{list(y.shape)} and {list(gate.shape)}"
        )
    wide = y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
    groups = wide.reshape(y.shape[0], -1, group_size)
    mean = jnp.mean(jnp.square(groups), axis=-1, keepdims=True)
    normed = (groups * jax.lax.rsqrt(mean + eps)).reshape(y.shape)
    return (normed * norm_weight.astype(jnp.float32)[None]).astype(y.dtype)
