"""The gated delta rule, a linear attention with a state of constant size.

For each head the state S ``[Dk, Dv]`` maps keys to values. At each token it decays by the factor ``exp(g)``. Then
the value that it gives for the token's key is moved towards the token's value by the share ``beta``:

    S ← exp(g) S;  S ← S + k ⊗ beta (v - Sᵀ k);  y = Sᵀ q

The decay is one number for each head, or one for each feature of the keys, which are the rows of S.

Sources: S. Yang et al., arXiv:2412.06464; in chunks arXiv:2406.06484, as transformers'
``torch_chunk_gated_delta_rule``; with decays of features Kimi Linear, arXiv:2510.26692.

Shapes: B sequences, T tokens, H heads, key width Dk, value width Dv, n chunks of C tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ...kernels import delta_token
from ...kernels.delta_token import Delta
from ...kernels.operation import varying_with
from ..kv_cache.recurrent import Recurrent
from .convolution import causal_conv
from .gated_norm import gated_norm
from .segments import chunked, in_chunks, joined, segment_sums

CHUNK = 64
"""Number C of tokens whose corrections are found by one triangular solve; a multiple of _BLOCK."""
_BLOCK = 16
# C where features have decays of their own: the products of keys are then sums, not matmuls, in time linear in C.
_BY_FEATURE = _BLOCK


def delta_step(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each sequence.

    Args:
        q, k: scaled queries and normalised keys, ``[B, H, Dk]``.
        v: values ``[B, H, Dv]``.
        g: logarithm of the decay, ``[B, H]``, or ``[B, H, Dk]`` for one of each feature; at most 0.
        beta: share of the correction, ``[B, H]``.
        state: state ``[B, H, Dk, Dv]``.

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
    if g.ndim == k.ndim:
        return _step_by_feature(q, k, v, jnp.exp(g), beta, state)
    kept = jnp.exp(g)[..., None]
    # One read of the state serves key and query: the result for the query before the correction is enough.
    both = jnp.einsum("bhjk,bhkv->bhjv", jnp.stack([k, q], -2), state, precision="highest")
    known, found = kept * both[..., 0, :], kept * both[..., 1, :]  # [B, H, Dv]
    change = (v - known) * beta[..., None]
    state = state * kept[..., None] + k[..., None] * change[..., None, :]
    return found + jnp.sum(q * k, axis=-1, keepdims=True) * change, state


def _step_by_feature(
    q: jax.Array, k: jax.Array, v: jax.Array, kept: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """:func:`delta_step` with decays ``kept [B, H, Dk]`` of the features."""
    both = jnp.stack([k * kept, q * kept], -2)
    both = jnp.einsum("bhjk,bhkv->bhjv", both, state, precision="highest")
    change = (v - both[..., 0, :]) * beta[..., None]
    state = state * kept[..., None] + k[..., None] * change[..., None, :]
    return both[..., 1, :] + jnp.sum(q * k, axis=-1, keepdims=True) * change, state


def delta_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """:func:`delta_step` for T tokens, in time and memory linear in T.

    Args:
        q, k: scaled queries and normalised keys, ``[B, T, H, Dk]``.
        v: values ``[B, T, H, Dv]``.
        g, beta: decays and shares, ``[B, T, H]``; decays may be ``[B, T, H, Dk]``. A token for which both are 0
            does not change the state.
        state: state before the tokens, ``[B, H, Dk, Dv]``.

    Returns:
        The results ``[B, T, H, Dv]`` and the last state, in float32.

    Example:
        >>> x = jnp.ones((1, 5, 2, 4)) / 2
        >>> y, state = delta_chunks(x, x, x, -x[..., 0], x[..., 0], jnp.zeros((1, 2, 4, 4)))
        >>> y.shape, state.shape
        ((1, 5, 2, 4), (1, 2, 4, 4))
    """
    length, by_feature = q.shape[1], g.ndim == k.ndim
    chunks = chunked(length, _BY_FEATURE if by_feature else CHUNK, _BLOCK)
    g = g if by_feature else g[..., None]
    # [n, B, H, C, ...]
    q, k, v, g, beta = (in_chunks(a, *chunks) for a in (q, k, v, g, beta[..., None]))
    since = jnp.exp(jnp.cumsum(g, axis=-2))  # decay since the chunk began, [n, B, H, C, 1 or Dk]
    if by_feature:
        after = jnp.cumsum(g[..., :0:-1, :], axis=-2)[..., ::-1, :]
        until = jnp.exp(jnp.pad(after, ((0, 0),) * 3 + ((0, 1), (0, 0))))  # until the chunk ends
        shared, within = _decayed_products(q, k, g)
        shared = shared * beta
    else:
        decay = jnp.exp(segment_sums(g[..., 0]))  # [n, B, H, C, C]
        until = decay[..., -1, :, None]
        shared = jnp.einsum("...id,...jd->...ij", k, k) * beta * decay
        within = jnp.einsum("...id,...jd->...ij", q, k) * decay
    # Each correction depends on the earlier ones of its chunk: a unit lower triangular system.
    system = jnp.tril(shared, -1)
    wanted = jnp.concatenate([v * beta, k * beta * since], axis=-1)
    solved = _solved(system, wanted)
    values, reads = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]

    def chunk(state: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        values, reads, within, queries, keys, decayed = at
        new = values - reads @ state
        y = queries @ state + within @ new
        return state * decayed + keys.swapaxes(-1, -2) @ new, y

    each = (values, reads, within, q * since, k * until, since[..., -1, :, None])
    state, y = jax.lax.scan(chunk, varying_with(state.astype(jnp.float32), each), each)
    return joined(y, length), state


def _decayed_products(q: jax.Array, k: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """At i, j the sums of ``k[i] k[j]`` and of ``q[i] k[j]`` over features, decayed by ``g[j + 1 … i]``; 0 where j > i.

    Each is ``[n, B, H, C, C]``. Products of ``exp(sums)`` and ``exp(-sums)`` would overflow, so that each pair has
    its own decay, of one chunk after the other.
    """

    def chunk(at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, g = at  # [B, H, C, Dk]
        decay = jnp.exp(jnp.moveaxis(segment_sums(g.swapaxes(-1, -2)), -3, -1))  # [B, H, C, C, Dk]
        decayed = decay * k[..., None, :, :]
        return tuple(jnp.einsum("bhid,bhijd->bhij", a, decayed) for a in (k, q))  # type: ignore

    return jax.lax.map(chunk, (q, k, g))


def _solved(system: jax.Array, wanted: jax.Array) -> jax.Array:
    """Solves ``(1 + system) X = wanted`` for X ``[..., C, D]``; ``system [..., C, C]`` is strictly lower
    triangular.

    The blocks on the diagonal are inverted row by row, all of them at once; the rest are matmuls. (LAPACK's
    solver is slower, and jaxlib's batched calls of it wait for each other if several devices share one CPU.)
    """
    count = system.shape[-1] // _BLOCK
    at = [slice(i * _BLOCK, (i + 1) * _BLOCK) for i in range(count)]
    blocks = jnp.stack([system[..., i, i] for i in at], axis=-3)  # [..., C / 16, 16, 16]

    def row(i: jax.Array, inverse: jax.Array) -> jax.Array:
        own = jax.lax.dynamic_slice_in_dim(blocks, i, 1, axis=-2)
        before = jax.lax.dynamic_slice_in_dim(inverse, i, 1, axis=-2)
        new = before - own @ inverse
        return jax.lax.dynamic_update_slice_in_dim(inverse, new, i, axis=-2)

    ones = jnp.broadcast_to(jnp.eye(_BLOCK, dtype=system.dtype), blocks.shape)
    inverses = jax.lax.fori_loop(1, _BLOCK, row, varying_with(ones, system))
    found = inverses[..., 0, :, :] @ wanted[..., at[0], :]
    for i in range(1, count):
        left = wanted[..., at[i], :] - system[..., at[i], : at[i].start] @ found
        found = jnp.concatenate([found, inverses[..., i, :, :] @ left], axis=-2)
    return found


def unit(x: jax.Array) -> jax.Array:
    """Return ``x`` with its vectors along the last axis scaled to length 1.

    Example:
        >>> unit(jnp.array([3.0, 4.0])).round(3).tolist()
        [0.6..., 0.8...]
    """
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def delta_net_in_place(operands: Sequence[jax.Array], static: Delta) -> list[jax.Array]:
    """Compute one token of a gated DeltaNet by one kernel, from its projections to its gated norm.

    Args:
        operands: as ``kernels.delta_token.operation`` lists them; among them the states of all layers, which
            are updated in place where they are donated.
        static: number of key heads, and epsilon of the norm.

    Returns:
        The results ``[B, H, Dv]``, zeros for rows without a token; the last inputs of the convolution; and the
        states of the delta rule, both of all layers.
    """
    return _IN_PLACE(operands, static)


def delta_net_in_stack(static: Delta, *operands: jax.Array) -> list[jax.Array]:
    """The definition in jnp that the kernel of :func:`delta_net_in_place` follows."""
    mixed, gate, share, decay, taps, rate, offset, weight, conv, delta, layer, used = operands
    states = Recurrent({"conv": conv, "delta": delta})
    before, (batch, heads, _) = states.at(layer), gate.shape
    y, last = causal_conv(mixed[:, None], taps, None, before["conv"], used)
    keys = static.key_heads * delta.shape[-2]
    q, k, v = jnp.split(jax.nn.silu(y[:, 0]), (keys, 2 * keys), axis=-1)
    q, k = (unit(a.reshape(batch, static.key_heads, -1)) for a in (q, k))
    q, k = (jnp.repeat(a, heads // static.key_heads, axis=1) for a in (q, k))
    rate, offset = (w.astype(jnp.float32)[None] for w in (rate, offset))
    g = -jnp.exp(rate) * jax.nn.softplus(decay.astype(jnp.float32) + offset)
    beta, v = jax.nn.sigmoid(share.astype(jnp.float32)), v.reshape(batch, heads, -1)
    y, after = delta_step(q * q.shape[-1] ** -0.5, k, v, g, beta, before["delta"])
    y = gated_norm(y, gate, weight, static.epsilon).astype(mixed.dtype)
    states = states.replaced(layer, {"conv": last, "delta": after}, used > 0)
    return [jnp.where((used > 0)[:, None, None], y, 0), *states.arrays.values()]


_IN_PLACE = delta_token.operation(delta_net_in_stack)
