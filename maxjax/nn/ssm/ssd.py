"""The state space model of Mamba 2, a recurrence whose decay is one number for each head and token.

For each head the state S ``[P, N]`` decays by the factor ``exp(g)``, and a token adds its input:

    S ← exp(g) S + x ⊗ b;  y = S c

Several heads share b and c. A sequence is computed in chunks: within a chunk as attention with decays in place of
a softmax, and between chunks by the state ("state space duality").

Source: T. Dao and A. Gu, arXiv:2405.21060.

Shapes: B sequences, T tokens, H heads of P features, G groups of heads, N features of the state, n chunks of
C tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...kernels import ssd_token
from ...kernels.operation import varying_with
from ...kernels.stack_slice import layer_of
from .segments import chunked, in_chunks, joined, segment_sums

CHUNK = 64
"""Number C of tokens in a chunk."""


def ssd_step(
    x: jax.Array, g: jax.Array, b: jax.Array, c: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each sequence.

    Args:
        x: inputs, multiplied by the length of their time step, ``[B, H, P]``.
        g: logarithm of the decay, ``[B, H]``, at most 0.
        b, c: input and output vectors of the state, ``[B, G, N]``.
        state: state ``[B, H, P, N]``.

    Returns:
        The result ``[B, H, P]`` and the next state, in float32.

    Example:
        >>> one = jnp.ones((1, 1, 1))
        >>> y, state = ssd_step(3 * one, 0 * one[0], 2 * one, one, jnp.ones((1, 1, 1, 1)))
        >>> y.item(), state.item()
        (7.0, 7.0)
    """
    x, g, b, c, state = (a.astype(jnp.float32) for a in (x, g, b, c, state))
    each = x.shape[1] // b.shape[1]
    b, c = (jnp.repeat(a, each, axis=1)[:, :, None] for a in (b, c))  # [B, H, 1, N]
    state = state * jnp.exp(g)[..., None, None] + x[..., None] * b
    return jnp.sum(state * c, axis=-1), state


def ssd_chunks(
    x: jax.Array, g: jax.Array, b: jax.Array, c: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """:func:`ssd_step` for T tokens, in time and memory linear in T.

    Args:
        x: inputs ``[B, T, H, P]``. A token for which ``x`` and ``g`` are 0 does not change the state.
        g: logarithms of the decays, ``[B, T, H]``.
        b, c: input and output vectors, ``[B, T, G, N]``.
        state: state before the tokens, ``[B, H, P, N]``.

    Returns:
        The results ``[B, T, H, P]`` and the last state, in float32.

    Example:
        >>> x, b = jnp.ones((1, 5, 4, 3)), jnp.ones((1, 5, 2, 6))
        >>> y, state = ssd_chunks(x, -x[..., 0], b, b, jnp.zeros((1, 4, 3, 6)))
        >>> y.shape, state.shape
        ((1, 5, 4, 3), (1, 4, 3, 6))
    """
    batch, length, heads, width = x.shape
    groups, chunks = b.shape[2], chunked(length, CHUNK)
    each = heads // groups
    x, g, b, c = (in_chunks(a, *chunks) for a in (x, g[..., None], b, c))  # b, c: [n, B, G, C, N]
    # [n, B, G, H / G, C, ...]
    x, g = (a.reshape(*a.shape[:2], groups, each, *a.shape[3:]) for a in (x, g))

    def chunk(state: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, g, b, c = at
        decay = jnp.exp(segment_sums(g[..., 0]))  # [B, G, H / G, C, C]
        since = jnp.exp(jnp.cumsum(g, axis=-2))  # [B, G, H / G, C, 1]
        until = decay[..., -1, :, None]
        scores = jnp.einsum("bgin,bgjn->bgij", c, b)[:, :, None] * decay
        y = scores @ x + jnp.einsum("bgin,bghpn->bghip", c, state) * since
        new = jnp.einsum("bgjn,bghjp->bghpn", b, x * until)
        return state * since[..., -1:, :] + new, y

    state = state.astype(jnp.float32).reshape(batch, groups, each, width, b.shape[-1])
    state, y = jax.lax.scan(chunk, varying_with(state, x, g, b, c), (x, g, b, c))
    y = joined(y.reshape(*y.shape[:2], heads, *y.shape[4:]), length)
    return y, state.reshape(batch, heads, width, b.shape[-1])


def ssd_step_in_place(
    x: jax.Array, g: jax.Array, b: jax.Array, c: jax.Array, states: jax.Array, layer: Any, used: Any
) -> tuple[jax.Array, jax.Array]:
    """:func:`ssd_step` for one layer, by a kernel that updates the states of all layers in place.

    Args:
        x, g, b, c: as for :func:`ssd_step`, in float32.
        states: states of all layers, float32 ``[L, B, H, P, N]``; donate them.
        layer: index of the layer, an int32 scalar.
        used: whether each sequence has a token, int32 ``[B]``; those without one keep their state.

    Returns:
        The result ``[B, H, P]``, zeros for sequences without a token, and the states of all layers.
    """
    y, states = _IN_PLACE([x, g, b, c, states, layer, used], None)
    return y, states


def step_in_stack(_: None, *operands: jax.Array) -> list[jax.Array]:
    """The definition in jnp that the kernel of :func:`ssd_step_in_place` follows."""
    x, g, b, c, states, layer, used = operands
    before, rows = layer_of(states, layer), used > 0
    y, after = ssd_step(x, g, b, c, before)
    after = jnp.where(rows[:, None, None, None], after, before)
    start = (layer, *(jnp.int32(0),) * 4)
    states = jax.lax.dynamic_update_slice(states, after[None], start, allow_negative_indices=False)
    return [jnp.where(rows[:, None, None], y, 0), states]


_IN_PLACE = ssd_token.operation(step_in_stack)
