"""Mixtures of experts: for each token, the weighted sum of the few feed-forward networks chosen for it.

On a CPU tokens go through their experts in blocks of rows, each of which reads the weights of one
expert in place, so one token costs exactly k experts. On accelerators there is one grouped matmul
over tokens sorted by expert (``jax.lax.ragged_dot``).

Sources: GShard (arXiv:2006.16668), MegaBlocks (arXiv:2211.15841) for blocks without dropped tokens.

Shapes: N tokens, E features, X experts with F inner features, k experts for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ...dtype import DType, promote
from ...graph.placement.arrays import on_mesh
from ...graph.placement.specs import axis_of, batch_axes, split_over
from ...graph.weight.weight import Weight
from ...kernels import QuantArray, matmul
from ...kernels.stack_slice import slice_of
from ..linear import gated

# Larger blocks are not faster, and have more unused rows.
_MOST_ROWS = 64


class ExpertWeights(NamedTuple):
    """The weights of one expert, as ``kernels.matmul`` takes them, or of all experts stacked.

    Each is an array, a StackSlice, or a QuantArray of either.

    Attributes:
        gate, up: ``[F, E]``, or ``[X, F, E]``.
        down: ``[E, F]``, or ``[X, E, F]``.
    """

    gate: Any
    up: Any
    down: Any

    def at(self, index: Any) -> ExpertWeights:
        """One of the stacked experts, where it lies."""
        return ExpertWeights(*(_at(w, index) for w in self))


# All experts stacked, or each by itself.
Experts = ExpertWeights | Sequence[ExpertWeights]


def _at(w: Any, index: Any) -> Any:
    if isinstance(w, QuantArray):
        return QuantArray(slice_of(w.blocks, index), w.encoding)
    return slice_of(w, index)


def count_of(experts: Experts) -> int:
    """X, the number of experts."""
    return experts.gate.shape[0] if isinstance(experts, ExpertWeights) else len(experts)


def mixture(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: Experts, kind: str
) -> jax.Array:
    """``Σ share · down(activation(gate(x)) · up(x))`` over a token's experts, in float32.

    No token is dropped, however many choose the same expert, and no token depends on another.

    Args:
        x: ``[N, E]``.
        chosen, shares: indices of experts, and the factors of their results, ``[N, k]`` each.
        experts: weights of the X experts: stacked, or each by itself.
        kind: name of the activation function.

    Returns:
        ``[N, E]``.

    Example:
        >>> one = ExpertWeights(jnp.ones((3, 2)), jnp.ones((3, 2)), jnp.ones((2, 3)))
        >>> x, chosen, shares = jnp.ones((4, 2)), jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1))
        >>> mixture(x, chosen, shares, [one] * 5, "relu")[0]
        Array([12., 12.], dtype=float32)
    """
    experts = experts if isinstance(experts, ExpertWeights) else list(experts)
    run = partial(jax.lax.platform_dependent, x, chosen, shares, experts)
    # The size of a block depends on the number of tokens, which must be known.
    if not isinstance(x.shape[0], int) or not x.shape[0]:
        return _sorted(kind, x, chosen, shares, experts)
    return run(cpu=partial(_in_blocks, kind), default=partial(_sorted, kind))


def mixture_on_mesh(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: Experts,
    kind: str, mesh: Any, axes: tuple[str, ...],
) -> jax.Array:  # fmt: skip
    """:func:`mixture` for experts whose F inner features are split over ``axes`` of a mesh.

    Each device computes its part of every expert, so the load is balanced whatever is chosen
    and however many experts there are; the parts are summed once.
    """

    stacked = _stacked(experts)

    def local(x: Any, chosen: Any, shares: Any, stacked: Any) -> jax.Array:
        y = sorted_mixture(x, chosen, shares, stacked, kind)
        return jax.lax.psum(y, axes) if axes else y

    rows = P(batch_axes(mesh, x.shape[0], ("data", "fsdp", "seq")))
    inner = ExpertWeights(P(None, axes), P(None, axes), P(None, None, axes))
    return on_mesh(local, mesh, (rows, rows, rows, inner), rows)(x, chosen, shares, stacked)


def inner_axes(experts: Iterable[Sequence[Weight]], mesh: Any) -> set[tuple[str, ...]]:
    """The sets of mesh axes that split the F inner features; one entry if all experts agree.

    Args:
        experts: Weights of the gate, up and down projections of each expert, or their stacks.
        mesh: mesh that they are sharded over.
    """
    fsdp = axis_of(mesh, "fsdp")  # weights are gathered over this axis
    return {
        tuple(name for name in split_over(weight, axis) if name != fsdp)
        for weights in experts
        for weight, axis in zip(weights, (0, 0, 1), strict=True)
    }


def sorted_mixture(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: ExpertWeights, kind: str
) -> jax.Array:
    """:func:`mixture` for experts stacked in arrays: ``[N, E]`` → ``[N, E]`` in float32.

    Args:
        chosen, shares: ``[N, k]``.
        experts: weights of all experts.
        kind: name of the activation function.
    """
    count, k = chosen.shape
    order = jnp.argsort(chosen.reshape(-1))  # [N k], stable
    sizes = jnp.bincount(chosen.reshape(-1), length=count_of(experts)).astype(jnp.int32)
    rows = x[order // k]  # [N k, E]
    gate, up = (_ragged_matmul(rows, w, sizes) for w in experts[:2])  # [N k, F]
    wide = promote(DType.of(gate.dtype), DType.of(up.dtype)).np
    h = gated(gate.astype(wide), up.astype(wide), kind, 0.0)
    y = _ragged_matmul(h, experts.down, sizes)  # [N k, E]
    # A gather restores the order of the tokens, so that every device sums in the same order.
    y = y[jnp.argsort(order)].reshape(count, k, y.shape[-1]).astype(jnp.float32)
    return jnp.sum(y * shares[..., None], axis=1)


def _ragged_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """``x[rows of group i] @ w[i].T``: ``[M, in]`` and ``[X, out, in]`` → ``[M, out]``."""
    dtype = promote(DType.of(x.dtype), DType.of(w.dtype)).np
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    y = jax.lax.ragged_dot_general(
        x.astype(dtype), w.astype(dtype), sizes, dimensions,
        preferred_element_type=jnp.float32 if dtype.itemsize < 4 else dtype,
    )  # fmt: skip
    return y.astype(dtype)


def one_by_one(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: Sequence[Callable[[Any], Any]]
) -> jax.Array:
    """As :func:`mixture`, for experts of any kind on any device: runs all experts on every token.

    An expert has share 0 where it was not chosen.
    """
    total = jnp.zeros(x.shape, jnp.float32)
    for i, expert in enumerate(experts):
        share = jnp.sum(jnp.where(chosen == i, shares, 0.0), axis=-1, keepdims=True)  # [N, 1]
        total = total + expert(x).astype(jnp.float32) * share.astype(jnp.float32)
    return total


def _sorted(
    kind: str, x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: Any
) -> jax.Array:
    return sorted_mixture(x, chosen, shares, _stacked(experts), kind)


def _stacked(experts: Experts) -> ExpertWeights:
    """The experts stacked in arrays; quantised ones are dequantised."""
    if isinstance(experts, ExpertWeights):
        return ExpertWeights(*map(jnp.asarray, experts))
    return ExpertWeights(
        *(_stack([jnp.asarray(w) for w in each]) for each in zip(*experts, strict=True))
    )


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
    dtype = DType.of(arrays[0].dtype)
    for other in arrays[1:]:
        dtype = promote(dtype, DType.of(other.dtype))
    return jnp.stack([array.astype(dtype.np) for array in arrays])


# --- on a CPU -----------------------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _in_blocks(
    kind: str, x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: Any
) -> jax.Array:
    (count, k), width = chosen.shape, x.shape[1]
    total, owners, many = count * k, chosen.reshape(-1), count_of(experts)
    size = _block_rows(total, many)
    if size == 1:
        y = _apply(kind, owners, jnp.repeat(x, k, axis=0)[:, None], experts)
        y = y.reshape(count, k, width)
    else:
        blocks = min(total, (total + many * (size - 1)) // size)
        order = jnp.argsort(owners)  # stable
        sizes = jnp.bincount(owners, length=many).astype(jnp.int32)
        before = jnp.cumsum(sizes) - sizes  # rows of the experts before each
        ends = jnp.cumsum(-(-sizes // size))  # blocks up to the end of each expert
        first = ends - -(-sizes // size)
        numbers = jnp.arange(blocks, dtype=jnp.int32)
        owner = jnp.sum(numbers[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
        # Row i of block b. Rows after an expert's last hold an arbitrary token and are ignored.
        mine = jnp.minimum(owner, many - 1)
        start = before[mine] + (numbers - first[mine]) * size
        places = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
        rows = x[order[jnp.clip(places, 0, total - 1)] // k]  # [blocks, size, E]
        y = _apply(kind, owner, rows, experts).reshape(blocks * size, width)
        y = y[first[owners] * size + jnp.argsort(order) - before[owners]]
        y = y.reshape(count, k, width)
    return jnp.sum(y * shares[..., None].astype(jnp.float32), axis=1)


@_in_blocks.defjvp
def _(kind: str, primals: Any, tangents: Any) -> Any:
    # The cotangent of selecting one expert would be as large as all experts, in every block.
    return jax.jvp(partial(_one_by_one, kind), primals, tangents)


def _one_by_one(
    kind: str, x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: Any
) -> jax.Array:
    if not isinstance(experts, ExpertWeights):
        each = [lambda x, weights=weights: _expert(kind, x, weights) for weights in experts]
        return one_by_one(x, chosen, shares, each)

    def add(total: jax.Array, at: Any) -> Any:
        number, weights = at
        share = jnp.sum(jnp.where(chosen == number, shares, 0.0), axis=-1, keepdims=True)  # [N, 1]
        return total + _expert(kind, x, weights) * share.astype(jnp.float32), None

    # Scanned, so that gradients of the weights are written expert by expert.
    each = jnp.arange(count_of(experts), dtype=chosen.dtype), ExpertWeights(*map(_array, experts))
    return jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), each)[0]


def _array(w: Any) -> Any:
    """The weights of all experts as an array, or a QuantArray of one."""
    if isinstance(w, QuantArray):
        return QuantArray(jnp.asarray(w.blocks), w.encoding)
    return jnp.asarray(w)


def _block_rows(rows: int, experts: int) -> int:
    """The number of rows in a block: about twice the mean number of rows of an expert."""
    return 1 if rows <= experts else min(_MOST_ROWS, 1 << (rows // experts).bit_length())


def _apply(kind: str, owner: jax.Array, rows: jax.Array, experts: Any) -> jax.Array:
    """Runs each block ``[blocks, rows, E]`` through its expert; blocks with owner X are empty and give 0."""
    if isinstance(experts, ExpertWeights):
        many = count_of(experts)

        def run(owner: jax.Array, rows: jax.Array) -> jax.Array:
            return _expert(kind, rows, experts.at(jnp.minimum(owner, many - 1)))

        def one(block: Any) -> jax.Array:
            empty = jnp.zeros(rows.shape[1:], jnp.float32)
            return jax.lax.cond(block[0] < many, run, lambda *_: empty, *block)

        return jax.lax.map(one, (owner, rows))

    def branch(weights: ExpertWeights) -> Any:
        return lambda rows: _expert(kind, rows, weights)

    def skip(rows: jax.Array) -> jax.Array:
        y = _expert(kind, rows, experts[0])  # for its type; XLA removes it
        return jnp.where(False, y, jnp.zeros_like(y))

    branches = [*map(branch, experts), skip]
    return jax.lax.map(lambda block: jax.lax.switch(block[0], branches, block[1]), (owner, rows))


def _expert(kind: str, x: jax.Array, weights: ExpertWeights) -> jax.Array:
    """``[N, E]`` → ``[N, E]`` in float32."""
    gate, up = matmul(x, [weights.gate, weights.up])
    wide = promote(DType.of(gate.dtype), DType.of(up.dtype)).np
    h = gated(gate.astype(wide), up.astype(wide), kind, 0.0)
    return matmul(h, weights.down).astype(jnp.float32)
