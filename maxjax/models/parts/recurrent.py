"""Recurrent states as architectures write them: :func:`convolve`, and the recurrences over tokens.

:func:`selective_scan` is that of Mamba 1, :func:`ssd` that of Mamba 2, :func:`gated_delta` the gated delta rule.

Their states are in the cache by the name of a group and of the state, as ``config.states(layer)`` lists them;
without a cache they are zeros. Padding and rows without a token do not change them.

Shapes: B sequences, T tokens, C channels, H heads of width P, G groups of heads, N features of the state. One token
per sequence has no axis T.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...graph.placement.arrays import is_manual, on_mesh
from ...graph.placement.specs import axis_of, batch_axes, spec_of
from ...kernels import delta_token, explicit, ssd_token
from ...kernels.explicit import parts_over
from ...nn.layer import hooks
from ...nn.ssm.convolution import CausalConv
from ...nn.ssm.delta import delta_chunks, delta_net_in_place, delta_step
from ...nn.ssm.gated_norm import GatedNorm
from ...nn.ssm.selective import selective_chunks, selective_step
from ...nn.ssm.ssd import ssd_chunks, ssd_step, ssd_step_in_place
from .cache import LayerCache

C = TypeVar("C", bound=LayerCache)


def convolve(
    conv: Callable[..., tuple[jax.Array, jax.Array]], x: jax.Array, cache: C, group: str
) -> tuple[jax.Array, C]:
    """Compute ``y[t] = bias + Σ_k weight[:, k] · x[t - K + 1 + k]``, over the tokens and the K - 1 before them.

    Args:
        conv: the convolution, whose K taps multiply the token (the last tap) and those just before it: a
            CausalConv, or a function with its arguments.
        x: inputs ``[B, T, C]``.
        cache: the layer's cache, with the last inputs ``[B, K - 1, C]`` as the state "conv".
        group: name of the group in the cache.

    Returns:
        The results ``[B, T, C]`` in float32, and the cache with the last inputs.

    Example:
        >>> import maxjax
        >>> from maxjax.models.parts.cache import no_cache
        >>> conv = maxjax.init(CausalConv(2, 4), jax.random.key(0))
        >>> y, _ = convolve(conv, jnp.ones((1, 3, 2)), no_cache(3), "mamba")
        >>> y.shape
        (1, 3, 2)
    """
    before = cache.read(group)
    y, last = conv(
        x[:, None] if cache.context.is_step else x,
        None if before is None else before["conv"],
        cache.context.counts,
    )
    cache = cache.replace(group, {"conv": last})
    return (y[:, 0] if cache.context.is_step else y), cache


def ssd(
    x: jax.Array, g: jax.Array, b: jax.Array, c: jax.Array, cache: C, group: str
) -> tuple[jax.Array, C]:
    """Run the recurrence of Mamba 2 for each head: ``S ← exp(g) S + x ⊗ b``, then ``y = S c``.

    The state S ``[P, N]`` of each head is the state "ssm" of the cache. Several tokens are computed in chunks
    ("state space duality", arXiv:2405.21060), in time linear in T. On a mesh each device has its own heads.

    Args:
        x: inputs, multiplied by the length of their time step, ``[B, T, H, P]``.
        g: logarithms of the decays, ``[B, T, H]``, at most 0.
        b, c: input and output vectors of the state, ``[B, T, G, N]``; H/G neighbouring heads share them.
        cache: the layer's cache.
        group: name of the group in the cache.

    Returns:
        The results ``[B, T, H, P]`` in float32, and the cache with the state after the tokens.

    Example:
        >>> from maxjax.models.parts.cache import no_cache
        >>> x, b = jnp.ones((1, 3, 4, 2)), jnp.ones((1, 3, 1, 5))
        >>> y, _ = ssd(x, -x[..., 0], b, b, no_cache(3), "mamba")
        >>> y.shape
        (1, 3, 4, 2)
    """
    (batch, heads, width), (groups, size) = (x.shape[0], *x.shape[-2:]), b.shape[-2:]
    x, g = (zero_padding(a, cache) for a in (x, g))
    mesh, over = _split(cache.context.mesh, batch, heads)
    if groups % parts_over(mesh, over):  # a group is split between devices
        b, c = (jnp.repeat(a, heads // groups, axis=-2) for a in (b, c))
    if mesh is None and cache.context.is_step and cache.states:
        states, layer = cache.in_place(group)
        if ssd_token.has_kernel(states["ssm"]):
            x, g, b, c = (a.astype(jnp.float32) for a in (x, g, b, c))
            used = rows_used(batch, cache)
            number = jnp.asarray(layer, jnp.int32)
            y, after = ssd_step_in_place(x, g, b, c, states["ssm"], number, used)
            return y, cache.with_states(group, {**states, "ssm": after})
    before = cache.read(group)
    state = jnp.zeros((batch, heads, width, size), jnp.float32)
    state = state if before is None else before["ssm"]
    y, state = recurrence(ssd_step, ssd_chunks, (x, g, b, c), state, cache)
    return y, cache.replace(group, {"ssm": state})


def selective_scan(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, cache: C, group: str
) -> tuple[jax.Array, C]:
    """Run the recurrence of Mamba 1 for each channel: ``s ← exp(dt a) s + dt x b``, then ``y = s · c``.

    The states s ``[N]`` of all channels are the state "ssm" of the cache. Several tokens are computed in chunks, by
    an associative scan (arXiv:2312.00752), in time linear in T. On a mesh each device has its own channels.

    Args:
        x: inputs ``[B, T, C]``.
        dt: lengths of the time steps, ``[B, T, C]``.
        a: rates of the decay, ``[C, N]``, at most 0.
        b, c: input and output vectors of the states, ``[B, T, N]``, which all channels share.
        cache: the layer's cache.
        group: name of the group in the cache.

    Returns:
        The results ``[B, T, C]`` in float32, and the cache with the state after the tokens.

    Example:
        >>> from maxjax.models.parts.cache import no_cache
        >>> x, b = jnp.ones((1, 3, 4)), jnp.ones((1, 3, 5))
        >>> y, _ = selective_scan(x, x, -jnp.ones((4, 5)), b, b, no_cache(3), "mamba")
        >>> y.shape
        (1, 3, 4)
    """
    dt, is_step, before = zero_padding(dt, cache), cache.context.is_step, cache.read(group)
    a = jnp.broadcast_to(a[None], (x.shape[0], *a.shape))  # of each sequence, as a mesh splits them
    state = jnp.zeros(a.shape, jnp.float32) if before is None else before["ssm"]
    if is_step or x.shape[1] == 1:
        x, dt, b, c = (v if is_step else v[:, 0] for v in (x, dt, b, c))
        axes, out = (1, 1, 1, 0, 0, 1), [(2, 1), (3, 1)]
        y, state = _by_heads(selective_step, (x, dt, a, b, c, state), axes, out, cache.context.mesh)
        y = y if is_step else y[:, None]
    else:
        axes, out = (2, 2, 1, 0, 0, 1), [(3, 2), (3, 1)]
        y, state = _by_heads(
            selective_chunks, (x, dt, a, b, c, state), axes, out, cache.context.mesh
        )
    return y, cache.replace(group, {"ssm": state})


def gated_delta(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, cache: C, group: str
) -> tuple[jax.Array, C]:
    """Run the gated delta rule for each head: ``S ← exp(g) S``, ``S ← S + k ⊗ beta (v - Sᵀ k)``, then ``y = Sᵀ q``.

    The decay is one number for each head, or one for each feature of the keys (arXiv:2510.26692). The state S
    ``[Dk, Dv]`` of each head is the state "delta" of the cache. Several tokens are computed in chunks
    (arXiv:2412.06464), in time linear in T. On a mesh each device has its own heads.

    Args:
        q, k: scaled queries and normalised keys, ``[B, T, H, Dk]``.
        v: values ``[B, T, H, Dv]``.
        g: logarithms of the decays, ``[B, T, H]`` or ``[B, T, H, Dk]``, at most 0.
        beta: shares of the corrections, ``[B, T, H]``.
        cache: the layer's cache.
        group: name of the group in the cache.

    Returns:
        The results ``[B, T, H, Dv]`` in float32, and the cache with the state after the tokens.

    Example:
        >>> from maxjax.models.parts.cache import no_cache
        >>> x = jnp.ones((1, 3, 2, 4)) / 2
        >>> y, _ = gated_delta(x, x, x, -x[..., 0], x[..., 0], no_cache(3), "linear")
        >>> y.shape
        (1, 3, 2, 4)
    """
    g, beta = zero_padding(g, cache), zero_padding(beta, cache)
    before, (*_, heads, width) = cache.read(group), k.shape
    state = jnp.zeros((k.shape[0], heads, width, v.shape[-1]), jnp.float32)
    state = state if before is None else before["delta"]
    y, state = recurrence(delta_step, delta_chunks, (q, k, v, g, beta), state, cache)
    return y, cache.replace(group, {"delta": state})


def delta_net_step(
    projected: Sequence[jax.Array], conv: CausalConv, A_log: Any, dt_bias: Any, norm: GatedNorm,
    key_heads: int, cache: C, group: str,
) -> tuple[jax.Array, C] | None:  # fmt: skip
    """Compute one token of a gated DeltaNet by one kernel, from its projections to its gated norm.

    The kernel computes what :func:`convolve`, silu, :func:`gated_delta` and the norm compute one after the other,
    and updates the states in place.

    Args:
        projected: queries, keys and values ``[B, C]``, gates ``[B, H, Dv]``, and logits of the shares and of
            the decays, ``[B, H]`` each.
        conv: the convolution of queries, keys and values.
        A_log, dt_bias: Weights ``[H]`` of the decay.
        norm: the norm of each head.
        key_heads: number of heads of queries and keys.
        cache: the layer's cache.
        group: name of the group in the cache.

    Returns:
        The results ``[B, H, Dv]``, and the cache with the token. None where there is no kernel: for several
        tokens, without a cache, on a mesh, for other dtypes, and where a hook asks for the separate steps.
    """
    batch, heads = projected[1].shape[0], projected[1].shape[-2]
    mesh, _ = _split(cache.context.mesh, batch, heads)
    if not cache.context.is_step or not cache.states or mesh is not None or not hooks.is_plain():
        return None
    states, layer = cache.in_place(group)
    stacks = [states["conv"], states["delta"]]
    taps, *weights = map(jnp.asarray, (conv.weight, A_log, dt_bias, norm.weight))
    if not delta_token.has_kernel([projected[0], taps, *weights], stacks):
        return None
    number = jnp.asarray(layer, jnp.int32)
    operands = [*projected, taps[:, 0], *weights, *stacks, number, rows_used(batch, cache)]
    static = delta_token.Delta(key_heads, norm.epsilon)
    y, last, delta = delta_net_in_place(operands, static)
    return y, cache.with_states(group, {"conv": last, "delta": delta})


def recurrence(
    step: Callable[..., Any], chunks: Callable[..., Any], operands: Sequence[jax.Array],
    state: jax.Array, cache: LayerCache,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Run a recurrence over tokens: results ``[B, T, H, ...]``, and the state ``[B, H, ...]`` after them.

    On a mesh each device runs it for its own sequences and heads: if XLA sharded a recurrence itself, it would
    exchange shards at every step.

    Args:
        step: the recurrence for one token: operands ``[B, H, ...]`` and the state → result and state.
        chunks: the recurrence for several tokens: operands ``[B, T, H, ...]`` and the state → results and state.
        operands: inputs ``[B, T, H, ...]``, or ``[B, H, ...]`` for one token per sequence.
        state: state before the tokens, ``[B, H, ...]``.
        cache: the layer's cache, for the mesh.
    """
    mesh, is_step, count = cache.context.mesh, cache.context.is_step, len(operands)
    if not is_step and operands[0].shape[1] != 1:
        return _by_heads(chunks, (*operands, state), [2] * count + [1], [(4, 2), (4, 1)], mesh)
    operands = operands if is_step else [a[:, 0] for a in operands]
    y, state = _by_heads(step, (*operands, state), [1] * (count + 1), [(3, 1), (4, 1)], mesh)
    return (y if is_step else y[:, None]), state


def zero_padding(x: jax.Array, cache: LayerCache) -> jax.Array:
    """Return ``[B, (T,) ...]`` with zeros in place of what belongs to padding, so that it changes no state."""
    real = cache.context.real  # [B, T]
    if real is None:
        return x
    real = real[:, 0] if cache.context.is_step else real
    return jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - real.ndim)), x, 0)


def rows_used(batch: int, cache: LayerCache) -> jax.Array:
    """Return whether each of ``batch`` sequences has a token, int32 ``[B]``."""
    counts = cache.context.counts
    return jnp.ones(batch, jnp.int32) if counts is None else counts.astype(jnp.int32)


def per_feature(weight: Any, x: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Return a weight ``[C]`` as ``[..., C]``, with as many axes as ``x``.

    Example:
        >>> per_feature(jnp.ones(3), jnp.ones((2, 5, 3))).shape
        (1, 1, 3)
    """
    return jnp.asarray(weight).astype(dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def automatic_axes(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``__call__(self, x, cache)`` of a layer, in which XLA shall choose how arrays are sharded.

    XLA does so on a mesh with Auto axes. On one with Explicit axes, where every operation would have to say it,
    the decorated function leaves it to XLA as well; the results are then sharded as ``x`` and the cache are.
    """

    @functools.wraps(call)
    def run(self: Any, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        mesh = explicit.mesh_of(x, *jax.tree.leaves(self))
        if mesh is None:
            return call(self, x, cache)

        def flat(*given: Any) -> list[jax.Array]:
            y, after = call(*given)
            return [y, *jax.tree.leaves(after.states)]

        states, structure = jax.tree.flatten(cache.states)
        wanted = [explicit.entries(a) for a in (x, *states)]
        y, *states = explicit.automatic(flat, mesh, wanted)(self, x, cache)
        return y, cache.at(cache.layer, jax.tree.unflatten(structure, states))

    return run


def _by_heads(
    run: Callable[..., Any], operands: Sequence[jax.Array], axes: Sequence[int],
    out: Sequence[tuple[int, int]], mesh: Any,
) -> Any:  # fmt: skip
    """Call ``run`` with the operands; on a mesh, each device calls it for its own sequences and heads.

    Args:
        run: a function of arrays whose sequences and heads do not depend on each other.
        operands: arrays ``[B, ...]``.
        axes: index of the axis of heads in each operand; 0: all heads share it.
        out: (number of axes, index of the axis of heads) of each result.
        mesh: the mesh, or None.
    """
    batch, heads = operands[0].shape[0], operands[0].shape[axes[0]]
    mesh, over = _split(mesh, batch, heads)
    if mesh is None:
        return run(*operands)
    rows = batch_axes(mesh, batch)

    def spec(rank: int, axis: int) -> PartitionSpec:
        return spec_of([rows, *(over if i == axis else () for i in range(1, rank))])

    specs = [spec(a.ndim, axis) for a, axis in zip(operands, axes, strict=True)]
    found = tuple(spec(*one) for one in out)
    return on_mesh(run, mesh, specs, found, check_vma=False)(*operands)


def _split(mesh: Any, batch: int, heads: int) -> tuple[Any, tuple[str, ...]]:
    """Return the mesh that a recurrence runs on (or None), and the mesh axes that split the heads."""
    if mesh is None or any(map(is_manual, mesh.axis_names)):
        return None, ()
    model = axis_of(mesh, "model")
    if model is None or model in batch_axes(mesh, batch) or heads % mesh.shape[model]:
        return mesh, ()
    return mesh, (model,)
