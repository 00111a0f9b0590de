"""MAX's kernels that normalise rows: of queries and keys together, of a draft's two inputs, and of groups."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..graph.ops import rms_norm
from ..graph.ops.lift import lift


def _check_pair(op: str, q: Any, k: Any) -> None:
    """Checks that queries and keys are rows of one dtype.

    Raises:
        ValueError: they are not.
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
        q: ``[M, Nq]``.
        k: ``[M, Nk]``, of the same dtype.

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
    """Queries and keys, normalised by means of squares that are known.

    Args:
        q: ``[M, Nq]``.
        k: ``[M, Nk]``, of the same dtype.
        qk_var: ``[M, 2]``, of :func:`row_mean_of_squares_qk`.
        gamma_q: ``[Nq]``, factors.
        gamma_k: ``[Nk]``.
        epsilon: added to the means.

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
    """What a layer that predicts a token further takes: normalised embeddings, and behind them normalised states.

    Args:
        embed: ``[tokens, E]``.
        prev_hidden: ``[tokens, E]``, of the same dtype.
        enorm_weight, hnorm_weight: ``[E]``, the weights of the two RMSNorms (as in Llama).
        epsilon: added to the means of squares.
        block_threads: of MAX's kernel; ignored.

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
        y, gate: ``[N, F]``.
        norm_weight: ``[F]``.
        eps: added to the means of squares.
        group_size: number of features of a group, which divides F.

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
