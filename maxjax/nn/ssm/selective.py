"""The selective state space model of Mamba 1, a recurrence in which each channel and feature has its own decay.

For each channel the state s ``[N]`` decays by the factors ``exp(dt a)``, and a token adds its input:

    s ← exp(dt a) s + dt x b;  y = s · c

The length ``dt`` of the time step is that of the channel, and all channels share b and c. A sequence is computed in
chunks, within which an associative scan finds the states of all tokens: only those of one chunk are in memory.

Source: A. Gu and T. Dao, arXiv:2312.00752.

Shapes: B sequences, T tokens, I channels, N features of the state, n chunks of C tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...kernels.operation import varying_with
from .segments import chunked

CHUNK = 32
"""Number C of tokens in a chunk."""


def selective_step(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each sequence.

    Args:
        x: inputs ``[B, I]``.
        dt: lengths of the time steps, ``[B, I]``. A sequence for which they are 0 keeps its state.
        a: rates of the decay, ``[B, I, N]``, at most 0.
        b, c: input and output vectors of the state, ``[B, N]``.
        state: state ``[B, I, N]``.

    Returns:
        The result ``[B, I]`` and the next state, in float32.

    Example:
        >>> one = jnp.ones((1, 1))
        >>> y, state = selective_step(3 * one, one, 0 * one[None], 2 * one, one, one[None])
        >>> y.item(), state.item()
        (7.0, 7.0)
    """
    x, dt, a, b, c, state = (y.astype(jnp.float32) for y in (x, dt, a, b, c, state))
    state = jnp.exp(dt[..., None] * a) * state + (dt * x)[..., None] * b[:, None]
    return jnp.sum(state * c[:, None], axis=-1), state


def selective_chunks(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """:func:`selective_step` for T tokens, in time linear in T.

    Args:
        x, dt: inputs and lengths of the time steps, ``[B, T, I]``. A token for which ``dt`` is 0 does not change
            the state.
        a: rates of the decay, ``[B, I, N]``.
        b, c: input and output vectors, ``[B, T, N]``.
        state: state before the tokens, ``[B, I, N]``.

    Returns:
        The results ``[B, T, I]`` and the last state, in float32.

    Example:
        >>> x, b = jnp.ones((1, 20, 3)), jnp.ones((1, 20, 5))
        >>> y, state = selective_chunks(x, x, -jnp.ones((1, 3, 5)), b, b, jnp.zeros((1, 3, 5)))
        >>> y.shape, state.shape
        ((1, 20, 3), (1, 3, 5))
    """
    batch, length, channels = x.shape
    count, size = chunked(length, CHUNK)

    def in_chunks(y: jax.Array) -> jax.Array:  # [B, T, ...] → [n, B, C, ...]
        y = jnp.pad(y.astype(jnp.float32), ((0, 0), (0, count * size - length), (0, 0)))
        return y.reshape(batch, count, size, y.shape[-1]).swapaxes(0, 1)

    a = a.astype(jnp.float32)

    def chunk(state: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = at
        decay = jnp.exp(dt[..., None] * a[:, None])  # [B, C, I, N]
        new = (dt * x)[..., None] * b[:, :, None]  # [B, C, I, N]
        since, states = jax.lax.associative_scan(_after, (decay, new), axis=1)
        states = states + since * state[:, None]
        return states[:, -1], jnp.einsum("btin,btn->bti", states, c)

    each = tuple(map(in_chunks, (x, dt, b, c)))
    state, y = jax.lax.scan(chunk, varying_with(state.astype(jnp.float32), *each, a), each)
    return y.swapaxes(0, 1).reshape(batch, count * size, channels)[:, :length], state


def _after(
    before: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The decay and the addition of two spans of tokens, one after the other."""
    return before[0] * then[0], then[0] * before[1] + then[1]
