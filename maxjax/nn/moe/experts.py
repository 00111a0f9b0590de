"""Mixtures of experts: for each token, the weighted sum of the few feed-forward networks chosen for it.

The platform that a program is compiled for and the number of tokens decide which algorithm of
``algorithms.py`` the program contains:

===============  ==============================  ================================================
platform         N k ≤ X choices                 more
===============  ==============================  ================================================
CPU              blocks of one row               blocks of rows
NVIDIA GPU       each choice, multiply and sum   blocks of rows in one Triton kernel
TPU and others   each choice, a matmul           up to 128 tokens all experts at once, then a
                                                 grouped matmul
===============  ==============================  ================================================

Quantised experts are multiplied by the kernel of their format in blocks of rows, on accelerators in one call for
all blocks; on NVIDIA GPUs these have one row if there are few choices and weights are in ggml's blocks.

Shapes: N tokens, E features, X experts with F inner features, k experts for each token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ...graph.placement.arrays import on_mesh, specs_within
from ...graph.placement.specs import batch_axes, parts_over, used_split
from ...kernels import QuantArray, QuantTensors
from .algorithms import (
    CPU_ROWS,
    GPU_ROWS,
    TPU_ROWS,
    AllExperts,
    ExpertWeights,
    Kind,
    all_at_once,
    all_experts,
    by_expert,
    count_of,
    down_bias,
    few_choices,
    has_tensors,
    in_blocks,
    sorted_mixture,
    stacked,
)

# With more than _AT_ONCE tokens, a TPU takes longer to multiply than to read the weights. _LANES is the width of
# its registers: for axes that are not a multiple of it, the grouped matmul copies the whole stack.
_AT_ONCE, _LANES = 128, 128
# The least number of rows for which CPUs dequantise an expert of several tensors, if there are as many.
_DEQUANTISED_FOR = 8
# The maximum number of rows that are sorted at a time on a mesh: memory holds a token once for
# each of its chosen experts, and a device may have gathered the tokens of others.
_MOST_ROWS = 1 << 14


class _Options(NamedTuple):
    """The static settings of a mixture.

    Attributes:
        kind: gated activation of the experts (``algorithms.Kind``).
        parts: number of equal parts of the experts, of which these are one.
    """

    kind: Kind
    parts: int = 1


def mixture(
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    experts: AllExperts,
    kind: Kind,
    *,
    parts: int = 1,
) -> jax.Array:
    """``Σ share · down(activation(gate(x)) · up(x))`` over a token's experts, in float32.

    Experts without a gate are ``down(activation(up(x)))``.
    The projections add their biases, if there are any.

    No token is dropped, however many choose the same expert, and no token depends on another.

    Args:
        x: tokens ``[N, E]``.
        chosen, shares: indices of experts, and the factors of their results, ``[N, k]`` each.
        experts: weights of the X experts, stacked or separate.
        kind: gated activation of the experts (``algorithms.Kind``).
        parts: number of equal parts of the mixture's experts, of which these are one. With several, ``chosen`` may
            have indices of X or more, which mean no expert.

    Returns:
        ``[N, E]``.

    Example:
        >>> all_of_them = ExpertWeights(jnp.ones((5, 3, 2)), jnp.ones((5, 3, 2)), jnp.ones((5, 2, 3)))
        >>> x, chosen, shares = jnp.ones((4, 2)), jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1))
        >>> mixture(x, chosen, shares, all_of_them, "relu")[0]
        Array([12., 12.], dtype=float32)
    """
    experts = experts if isinstance(experts, ExpertWeights) else list(experts)
    y = _sum(_Options(kind, parts), x, chosen, shares, experts)
    bias = down_bias(experts)
    if bias is None:
        return y
    return y + by_expert(chosen, shares, len(bias)) @ bias.astype(jnp.float32)


def _sum(
    options: _Options, x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: AllExperts
) -> jax.Array:
    """:func:`mixture` without the biases of the down projections."""
    # The size of a block depends on the number of tokens, which must not be symbolic.
    if not isinstance(x.shape[0], int) or not x.shape[0]:
        return sorted_mixture(options.kind, x, chosen, shares, _dense(experts))
    run: Any = _mixture
    return run(options, x, chosen, shares, experts)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mixture(options: _Options, *operands: Any) -> jax.Array:
    return _batched(options)(*operands)


@_mixture.defjvp
def _(options: _Options, primals: Any, tangents: Any) -> Any:
    # Otherwise each block would have a cotangent as large as all experts, from selecting its expert.
    return jax.jvp(partial(_differentiable, options), primals, tangents)


def _differentiable(options: _Options, *operands: Any) -> jax.Array:
    return jax.lax.platform_dependent(
        *operands,
        cpu=partial(all_experts, options.kind),
        default=partial(_differentiable_elsewhere, options.kind),
    )


def _differentiable_elsewhere(kind: Kind, x: Any, chosen: Any, shares: Any, experts: Any) -> Any:
    if has_tensors(experts):
        # One expert is dequantised at a time.
        return all_experts(kind, x, chosen, shares, experts)
    return sorted_mixture(kind, x, chosen, shares, _dense(experts))


def _dense(experts: AllExperts) -> ExpertWeights:
    """The experts stacked in arrays, dequantised."""
    return stacked(experts).each(jnp.asarray)


@functools.cache
def _batched(options: _Options) -> Any:
    """The mixture with a rule for ``vmap``, which treats a batch as more tokens."""

    @jax.custom_batching.custom_vmap
    def run(*operands: Any) -> jax.Array:
        return _by_platform(options, *operands)

    @run.def_vmap
    def _(size: int, batched: Sequence[Any], *operands: Any) -> tuple[jax.Array, bool]:
        *tokens, experts = operands
        if any(jax.tree.leaves(batched[3])):
            return _one_after_the_other(run, batched, operands), True
        tokens = [
            a if is_batched else jnp.broadcast_to(a, (size, *a.shape))
            for a, is_batched in zip(tokens, batched[:3], strict=True)
        ]
        count = tokens[0].shape[1]
        y = run(*(a.reshape(size * count, *a.shape[2:]) for a in tokens), experts)
        return y.reshape(size, count, *y.shape[1:]), True

    return run


def _one_after_the_other(run: Any, batched: Sequence[Any], operands: Sequence[Any]) -> jax.Array:
    leaves, tree = jax.tree.flatten(operands)
    flags = jax.tree.leaves(tuple(batched))

    def one(mine: Sequence[Any]) -> jax.Array:
        own = iter(mine)
        given = [next(own) if flag else a for a, flag in zip(leaves, flags, strict=True)]
        return run(*jax.tree.unflatten(tree, given))

    return jax.lax.map(one, [a for a, flag in zip(leaves, flags, strict=True) if flag])


def _by_platform(options: _Options, *operands: Any) -> jax.Array:
    return jax.lax.platform_dependent(
        *operands,
        cpu=partial(_on_cpu, options),
        cuda=partial(_on_gpu, options),
        default=partial(_elsewhere, options),
    )


def _is_few(chosen: jax.Array, experts: ExpertWeights) -> bool:
    """Whether the choices are fewer than the experts."""
    return chosen.size <= count_of(experts)


def _on_cpu(options: _Options, x: Any, chosen: Any, shares: Any, experts: AllExperts) -> jax.Array:
    rows = CPU_ROWS
    if has_tensors(experts):
        # Dequantising an expert takes longer than multiplying some rows: each expert is in as few blocks as possible.
        rows = min(_DEQUANTISED_FOR, x.shape[0]), rows[1]
    return in_blocks(options.kind, x, chosen, shares, experts, rows=rows)


def _on_gpu(options: _Options, x: Any, chosen: Any, shares: Any, experts: AllExperts) -> jax.Array:
    found, kind = stacked(experts), options.kind
    is_few = _is_few(chosen, found)
    if is_few and not found.is_packed:
        return few_choices(kind, x, chosen, shares, found, by_rows=True, some=options.parts > 1)
    # For single rows, weights in ggml's blocks have a faster kernel.
    is_single = is_few and all(isinstance(w, QuantArray) for w in found.matrices)
    rows = (1 if is_single else GPU_ROWS[0], GPU_ROWS[1])
    return in_blocks(kind, x, chosen, shares, found, rows=rows, by_kernel=True)


def _elsewhere(
    options: _Options, x: Any, chosen: Any, shares: Any, experts: AllExperts
) -> jax.Array:
    found, kind = stacked(experts), options.kind
    if found.is_packed:
        rows, parts = TPU_ROWS, options.parts
        return in_blocks(kind, x, chosen, shares, found, rows=rows, by_kernel=True, parts=parts)
    if _is_few(chosen, found):
        return few_choices(kind, x, chosen, shares, found, by_rows=False, some=options.parts > 1)
    if x.shape[0] <= _AT_ONCE:
        return all_at_once(kind, x, chosen, shares, found)
    if any(w.shape[-1] % _LANES for w in found.matrices):
        return in_blocks(kind, x, chosen, shares, found, rows=GPU_ROWS)
    return sorted_mixture(kind, x, chosen, shares, found)


# --- on a mesh ----------------------------------------------------------------------------------


class ExpertSplit(NamedTuple):
    """How the experts are split over a mesh.

    Attributes:
        inner: mesh axes that split the F inner features of every expert.
        whole: mesh axes over which complete experts are distributed, in the order of their indices.
    """

    inner: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


def mixture_on_mesh(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: AllExperts, kind: Kind, mesh: Any,
    split: ExpertSplit,
) -> jax.Array:  # fmt: skip
    """:func:`mixture` for experts that are split over a mesh.

    Each device computes its shard of its experts. If tokens are split over a mesh axis that also splits
    experts, the devices along it first gather all of their tokens, and a reduce-scatter returns the sums.
    """
    rows = batch_axes(mesh, x.shape[0], ("data", "fsdp", "expert", "seq"))
    given: ExpertWeights = jax.tree.map(jnp.asarray, stacked(experts))  # indices of layers too
    parts = parts_over(mesh, split.inner)
    found = _by_axis(lambda w, along: w.undivided(along, parts), given)

    def local(x: Any, chosen: Any, shares: Any, experts: Any) -> jax.Array:
        if split.inner:
            number = jax.lax.axis_index(split.inner)
            own = lambda w, of, along: QuantTensors(of.layout, w.tensors).part(along, parts, number)
            experts = _by_axis(own, experts, given)
        return local_mixture(x, chosen, shares, experts, kind, split, rows)

    inner, whole = split.inner or None, split.whole or None
    each = [P(whole, inner) for _ in found.inputs]
    biases = [] if found.biases is None else [*each, P(whole)]
    rules = ExpertWeights.of([*each, P(whole, None, inner)], biases)
    is_spec = lambda a: isinstance(a, P)
    places = jax.tree.map(lambda rule, w: specs_within(w, rule), rules, found, is_leaf=is_spec)
    wanted = (P(rows), P(rows), P(rows), places)
    return on_mesh(local, mesh, wanted, P(rows))(x, chosen, shares, found)


def _by_axis(run: Any, *experts: ExpertWeights) -> ExpertWeights:
    """``run(w, …, along)`` for each weight of several tensors; ``along`` is its axis of the inner features."""
    first, axes = experts[0], [0] * len(experts[0].inputs) + [1]
    each = zip(*(one.matrices for one in experts), axes, strict=True)
    matrices = [run(*of) if isinstance(of[0], QuantTensors) else of[0] for of in each]
    return ExpertWeights.of(matrices, [bias for bias in first.biases or () if bias is not None])


def local_mixture(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: ExpertWeights, kind: Kind,
    split: ExpertSplit, rows: tuple[str, ...],
) -> jax.Array:  # fmt: skip
    """The computation of one device in :func:`mixture_on_mesh`, inside ``shard_map``; returns its tokens' results.

    Args:
        experts: shard of the experts on this device.
        rows: mesh axes that the tokens are split over.
    """
    if experts.biases is not None and split.inner:
        # Of the devices that share an expert, only the first adds the bias of its down projection.
        *inner, down = experts.biases
        is_first = jax.lax.axis_index(split.inner) == 0
        experts = experts._replace(biases=(*inner, jnp.where(is_first, jnp.asarray(down), 0)))
    both = (*split.whole, *split.inner)
    exchanged = tuple(name for name in rows if name in both)
    summed = tuple(name for name in both if name not in exchanged)
    sizes = [jax.lax.axis_size(name) for name in exchanged]
    count, k = chosen.shape
    most = max(1, _MOST_ROWS // (k * math.prod(sizes)))

    def run(tokens: Any) -> jax.Array:
        x, chosen, shares = tokens
        if exchanged:
            x, chosen, shares = (
                jax.lax.all_gather(a, exchanged, tiled=True) for a in (x, chosen, shares)
            )
        if split.whole:
            many = count_of(experts)
            own = chosen - jax.lax.axis_index(split.whole).astype(chosen.dtype) * many
            chosen = jnp.where((own >= 0) & (own < many), own, many)
        parts = math.prod(map(jax.lax.axis_size, split.whole))
        y = mixture(x, chosen, shares, experts, kind, parts=parts)
        return _sums(y, x.dtype, summed, exchanged)

    if count <= most:
        return run((x, chosen, shares))
    parts = -(-count // most)
    size = -(-count // parts)

    def divided(array: jax.Array) -> jax.Array:
        padded = jnp.pad(
            array, ((0, parts * size - count), (0, 0))
        )  # results of padding are dropped below
        return padded.reshape(parts, size, -1)

    y = jax.lax.map(run, tuple(map(divided, (x, chosen, shares))))
    return y.reshape(parts * size, -1)[:count]


def _sums(
    y: jax.Array, dtype: Any, summed: tuple[str, ...], exchanged: tuple[str, ...]
) -> jax.Array:
    """Sums results over devices; along the axes ``exchanged``, each device keeps the sums of its own tokens.

    Accelerators exchange numbers in the dtype of the activations, CPUs in float32.
    """

    def run(y: jax.Array) -> jax.Array:
        y = jax.lax.psum_scatter(y, exchanged, tiled=True) if exchanged else y
        return jax.lax.psum(y, summed) if summed else y

    narrow = lambda y: run(y.astype(dtype)).astype(jnp.float32)
    return jax.lax.platform_dependent(y, cpu=run, default=narrow)


# The numbers of a weight ``[out, in]``, and for each of their axes the axis of the weight that it runs along, or None.
Part = tuple[Any, tuple[int | None, ...]]


def split_of(experts: Iterable[Sequence[Part]]) -> ExpertSplit | None:
    """How experts are split over a mesh; None if they are not all split in the same way.

    Args:
        experts: for each expert, or for all stacked experts, the numbers of its projections, Weights or
            StackedWeights, the down projection last.
    """
    found = set()
    for *inputs, down in experts:
        for (numbers, axes), along in (*((w, 0) for w in inputs), (down, 1)):
            inner = used_split(numbers, axes.index(along)) if along in axes else ()
            found.add(ExpertSplit(inner, numbers.spec.split))
    return found.pop() if len(found) == 1 else None
