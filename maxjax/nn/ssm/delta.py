"""The gated delta rule, a linear attention with a state that does not grow.

For each head the state S ``[Dk, Dv]`` maps keys to values. A token lets it decay by ``exp(g)``, and then
corrects what it gives for the token's key towards the token's value, by the share ``beta``:

    S ← exp(g) S;  S ← S + k ⊗ beta (v - Sᵀ k);  y = Sᵀ q

Source: S. Yang et al., arXiv:2412.06464; in chunks arXiv:2406.06484, as transformers'
``torch_chunk_gated_delta_rule``.

Shapes: B sequences, T tokens, H heads, key width Dk, value width Dv, n chunks of C tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 64
"""Number of tokens whose corrections are solved for at once."""


def delta_step(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each sequence.

    Args:
        q, k: scaled queries and normalised keys, ``[B, H, Dk]``.
        v: values ``[B, H, Dv]``.
        g: logarithm of the decay, ``[B, H]``, not positive.
        beta: share of the correction, ``[B, H]``.
        state: ``[B, H, Dk, Dv]``.

    Returns:
        The result ``[B, H, Dv]`` and the next state, in float32.

    Example:
        >>> k = jnp.array([[[1.0, 0.0]]])
        >>> v, one = jnp.array([[[3.0]]]), jnp.ones((1, 1))
        >>> y, state = delta_step(k, k, v, 0 * one, one, jnp.ones((1, 1, 2, 1)))
        >>> y.item(), state[0, 0, :, 0].tolist()
        (3.0, [3.0, 1.0])
    """
    q, k, v, g, beta, state = (a.astype(jnp.float32) for a in (q, k, v, g, beta, state))
    state = state * jnp.exp(g)[..., None, None]
    known = jnp.sum(state * k[..., None], axis=-2)  # [B, H, Dv]
    change = (v - known) * beta[..., None]
    state = state + k[..., None] * change[..., None, :]
    return jnp.sum(state * q[..., None], axis=-2), state


def delta_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """:func:`delta_step` for T tokens, in time and memory linear in T.

    Args:
        q, k: ``[B, T, H, Dk]``.
        v: ``[B, T, H, Dv]``.
        g, beta: ``[B, T, H]``. A token with 0 in both does not change the state.
        state: ``[B, H, Dk, Dv]``.

    Returns:
        The results ``[B, T, H, Dv]`` and the last state, in float32.

    Example:
        >>> x = jnp.ones((1, 5, 2, 4)) / 2
        >>> y, state = delta_chunks(x, x, x, -x[..., 0], x[..., 0], jnp.zeros((1, 2, 4, 4)))
        >>> y.shape, state.shape
        ((1, 5, 2, 4), (1, 2, 4, 4))
    """
    batch, length, heads, _ = q.shape
    size = min(CHUNK, length)
    pad = -length % size
    # Heads first, then n chunks of C tokens: [n, B, H, C, ...].
    chunks = []
    for a in (q, k, v, g[..., None], beta[..., None]):
        a = jnp.pad(a.astype(jnp.float32), ((0, 0), (0, pad), (0, 0), (0, 0)))
        a = a.reshape(batch, -1, size, heads, a.shape[-1])
        chunks.append(a.transpose(1, 0, 3, 2, 4))
    q, k, v, g, beta = chunks
    total = jnp.cumsum(g, axis=-2)  # [n, B, H, C, 1]
    lower = jnp.tril(jnp.ones((size, size), bool))
    # Decay between two tokens of a chunk; masked before exp, where it would overflow.
    decay = jnp.exp(jnp.where(lower, total - total.swapaxes(-1, -2), -jnp.inf))
    shared = jnp.einsum("...id,...jd->...ij", k, k) * beta
    # Each correction depends on the earlier ones of its chunk: a triangular system, of ones on the diagonal.
    system = jnp.where(jnp.tril(lower, -1), shared * decay, 0)
    wanted = jnp.concatenate([v * beta, k * beta * jnp.exp(total)], axis=-1)
    solved = jax.lax.linalg.triangular_solve(
        system, wanted, left_side=True, lower=True, unit_diagonal=True
    )
    values, reads = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    within = jnp.einsum("...id,...jd->...ij", q, k) * decay
    last = total[..., -1:, :]  # [n, B, H, 1, 1]

    def chunk(state: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        values, reads, within, queries, keys, decayed = at
        new = values - reads @ state
        y = queries @ state + within @ new
        return state * decayed + keys.swapaxes(-1, -2) @ new, y

    each = (values, reads, within, q * jnp.exp(total), k * jnp.exp(last - total), jnp.exp(last))
    state, y = jax.lax.scan(chunk, state.astype(jnp.float32), each)
    y = y.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, y.shape[-1])
    return y[:, :length], state
