"""Algorithms for a mixture of experts; ``experts.py`` chooses among them by platform and sizes.

==================  ===============================================================================
few choices         for each choice, a matmul with its own expert, read from the stack in place
all at once         every expert over all tokens, in one matmul for each projection
blocks of rows      tokens sorted by expert, in blocks with a single expert, read in place
a grouped matmul    tokens sorted by expert, in one grouped matmul (``jax.lax.ragged_dot``)
one by one          every expert over all tokens: for derivatives on CPUs, and experts of any class
==================  ===============================================================================

No algorithm drops a token, and no token depends on another. A chosen index of X or more means no expert,
and adds 0; on a mesh, such an index is that of an expert on another device. Biases of the down projections
are not added here but by ``mixture``: where devices split the inner features, only one of them adds them.

Sources: GShard (arXiv:2006.16668), MegaBlocks (arXiv:2211.15841) for blocks without dropped tokens.

Shapes: N tokens, E features, X experts with F inner features, k experts for each token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...dtype import DType, promote
from ...kernels import QuantArray, QuantTensors, StackSlice, matmul
from ...kernels.block_matmul import block_matmul
from ...kernels.format_product import format_block_matmul
from ...kernels.grouped import grouped_matmul
from ...kernels.operation import same_varying, varying_with
from ...kernels.packed_product import packed_block_matmul
from ...kernels.stack_slice import places_of, slice_of
from ..activation import activation
from ..linear import gated

# The smallest and largest number of rows in a block. On CPUs, larger blocks are not faster and waste rows.
CPU_ROWS = (1, 64)
# A Triton program needs 16 rows or more; with more than 128 it runs out of registers.
GPU_ROWS = (16, 128)
# A register of a TPU has 8 rows.
TPU_ROWS = (8, 128)
# Up to this number of choices are unrolled; more are computed in a loop, which keeps the program short.
_WRITTEN_OUT = 8


# The activation of an expert: the name of an activation, for ``activation(gate) · up``, or ``activation(up)``
# of experts without a gate; or a hashable function ``(gate, up)``.
Kind = str | Callable[..., jax.Array]


# Quantised weights.
PACKED = (QuantArray, QuantTensors)


class ExpertWeights(NamedTuple):
    """The weights of one expert, as ``kernels.matmul`` takes them, or of all experts stacked.

    Each is an array, a StackSlice, or a QuantArray or QuantTensors of either.

    Attributes:
        gate, up: ``[F, E]``, or ``[X, F, E]``; gate is None for experts without one.
        down: ``[E, F]``, or ``[X, E, F]``.
        biases: biases ``[F]``, ``[F]`` and ``[E]`` of gate, up and down, or with a leading axis X; or None.
            The bias of the gate is None for experts without a gate.
    """

    gate: Any
    up: Any
    down: Any
    biases: tuple[Any, Any, Any] | None = None

    @classmethod
    def of(cls, matrices: Sequence[Any], biases: Sequence[Any] = ()) -> ExpertWeights:
        """The weights of experts whose projections are gate, up and down, or up and down."""
        gate = () if len(matrices) == 3 else (None,)
        return cls(*gate, *matrices, (*gate, *biases) if biases else None)  # type: ignore[arg-type]

    @property
    def inputs(self) -> list[Any]:
        """The weights that multiply a token: of gate and up, or of up alone."""
        return [self.up] if self.gate is None else [self.gate, self.up]

    @property
    def matrices(self) -> list[Any]:
        """The weights of all projections, the down projection last."""
        return [*self.inputs, self.down]

    def each(self, run: Callable[[Any], Any]) -> ExpertWeights:
        """Applies a function to each weight and each bias."""
        biases = [run(bias) for bias in self.biases or () if bias is not None]
        return ExpertWeights.of([*map(run, self.matrices)], biases)

    def at(self, index: Any) -> ExpertWeights:
        """One of the stacked experts, without a copy."""
        return self.each(lambda w: _at(w, index))

    @property
    def is_packed(self) -> bool:
        """Whether any weight is quantised."""
        return any(isinstance(w, PACKED) for w in self.matrices)


# The weights of all experts: stacked, or separate.
AllExperts = ExpertWeights | Sequence[ExpertWeights]


def _at(w: Any, index: Any) -> Any:
    if isinstance(w, PACKED):
        return w.each(lambda a: slice_of(a, index))
    return slice_of(w, index)


def count_of(experts: AllExperts) -> int:
    """The number X of experts."""
    return experts.down.shape[0] if isinstance(experts, ExpertWeights) else len(experts)


def has_tensors(experts: AllExperts) -> bool:
    """Whether experts are stacked, and quantised in a format of several tensors."""
    return isinstance(experts, ExpertWeights) and any(
        isinstance(w, QuantTensors) for w in experts.matrices
    )


def stacked(experts: AllExperts) -> ExpertWeights:
    """The experts as one stacked :class:`ExpertWeights`; separate experts are copied into arrays.

    Separate experts that are quantised are dequantised.
    """
    if isinstance(experts, ExpertWeights):
        return experts
    joined = lambda weights: _stack([jnp.asarray(w) for w in weights])
    matrices = map(joined, zip(*(expert.matrices for expert in experts), strict=True))
    biases = [[bias for bias in expert.biases or () if bias is not None] for expert in experts]
    return ExpertWeights.of([*matrices], [*map(joined, zip(*biases, strict=True))])


def down_bias(experts: AllExperts) -> jax.Array | None:
    """The biases of the down projections, ``[X, E]``; None if there are none."""
    if isinstance(experts, ExpertWeights):
        return None if experts.biases is None else jnp.asarray(experts.biases[2])
    found = [jnp.asarray(expert.biases[2]) for expert in experts if expert.biases is not None]
    return _stack(found) if found else None


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
    dtype = DType.of(arrays[0].dtype)
    for other in arrays[1:]:
        dtype = promote(dtype, other.dtype)
    return jnp.stack([array.astype(dtype.np) for array in arrays])


def between(kind: Kind, *given: jax.Array) -> jax.Array:
    """The input of an expert's down projection, from the results of gate and up, or of up alone."""
    if len(given) == 1 and isinstance(kind, str):
        return activation(kind)(*given)
    wide = functools.reduce(promote, (DType.of(y.dtype) for y in given)).np
    given = tuple(y.astype(wide) for y in given)
    return gated(given[0], given[1], kind, 0.0) if isinstance(kind, str) else kind(*given)


def _biased(y: jax.Array, bias: Any) -> jax.Array:
    """``y + bias``, of shapes that broadcast, in the dtype of ``y``."""
    bias = jnp.asarray(bias)
    bias = bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)


def _inner(
    kind: Kind, given: Sequence[jax.Array], weights: ExpertWeights, place: Any = None
) -> jax.Array:
    """:func:`between`, after the biases are added to the results of the gate and up projections.

    Args:
        given: products of the tokens with ``weights.inputs``.
        place: function that selects the biases of the rows from those of all experts.
    """
    if weights.biases is not None:
        place = place or (lambda bias: bias)
        biases = [bias for bias in weights.biases[:2] if bias is not None]
        given = [_biased(y, place(bias)) for y, bias in zip(given, biases, strict=True)]
    return between(kind, *given)


def _expert(kind: Kind, x: jax.Array, weights: ExpertWeights) -> jax.Array:
    """``[N, E]`` → ``[N, E]`` in float32."""
    given = matmul(x, weights.inputs)
    return matmul(_inner(kind, given, weights), weights.down).astype(jnp.float32)


# --- few choices --------------------------------------------------------------------------------


def few_choices(
    kind: Kind, x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: ExpertWeights,
    *, by_rows: bool, some: bool,
) -> jax.Array:  # fmt: skip
    """Runs the expert of each of the N k choices: only the weights of chosen experts are read.

    Args:
        by_rows: whether to multiply and sum instead of calling a matmul, for weights that are not quantised. XLA
            for GPUs fuses this with the slice of the expert from the stack, which it otherwise copies; XLA
            for TPUs fuses the matmul with the slice.
        some: whether some indices may mean no expert; for these, no weights are read.
    """
    count, k = chosen.shape
    many, owners = count_of(experts), chosen.reshape(-1)
    run = partial(_expert_by_rows if by_rows else _expert, kind)

    def one(i: Any) -> jax.Array:
        owner = owners[i]

        def compute(row: jax.Array) -> jax.Array:
            return run(row, experts.at(jnp.minimum(owner, many - 1)))

        row = jax.lax.dynamic_slice_in_dim(x, i // k, 1)  # [1, E]
        if not some:
            return compute(row)[0]
        return jax.lax.cond(owner < many, compute, partial(_nothing, compute), row)[0]

    total = count * k
    if total <= _WRITTEN_OUT:
        y = jnp.stack([one(i) for i in range(total)])
    else:
        y = jax.lax.map(one, jnp.arange(total, dtype=jnp.int32))
    return jnp.sum(y.reshape(count, k, -1) * shares[..., None].astype(jnp.float32), axis=1)


def _nothing(compute: Callable[[Any], jax.Array], row: jax.Array) -> jax.Array:
    """Zeros with the type of the result, also inside ``shard_map``; XLA removes the computation."""
    return jnp.where(False, compute(row), 0.0)


def _expert_by_rows(kind: Kind, x: jax.Array, weights: ExpertWeights) -> jax.Array:
    given = [_row_product(x, w) for w in weights.inputs]
    return _row_product(_inner(kind, given, weights), weights.down).astype(jnp.float32)


def _row_product(x: jax.Array, w: Any) -> jax.Array:
    """``kernels.matmul`` of one row ``[1, in]``, as multiplication and sum."""
    dtype = promote(x.dtype, w.dtype).np
    wide = jnp.float32 if dtype.itemsize < 4 else dtype
    matrix = jnp.asarray(w).astype(dtype).astype(wide)
    return jnp.sum(matrix * x.astype(dtype).astype(wide), axis=-1)[None].astype(dtype)


def all_at_once(
    kind: Kind, x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: ExpertWeights
) -> jax.Array:
    """Runs all experts over all tokens, with one matmul for each projection, which reads the weights once.

    It is for few tokens: reading the weights then takes longer than multiplying, so that the matmuls with
    experts that a token did not choose cost no time.
    """
    share = by_expert(chosen, shares, count_of(experts))[..., None]  # [N, X, 1]
    given = [_product(x, w, (1,), (2,)) for w in experts.inputs]  # [N, X, F]
    h = _inner(kind, given, experts, lambda bias: jnp.asarray(bias)[None])
    y = _product(h, experts.down, (2,), (2,), batch=True)  # [X, N, E]
    y = jnp.moveaxis(y, 0, 1).astype(jnp.float32)
    return jnp.sum(jnp.where(share != 0, y * share, 0.0), axis=1)


def by_expert(chosen: jax.Array, shares: jax.Array, many: int) -> jax.Array:
    """The share of each expert for each token, ``[N, X]`` in float32; 0 where it was not chosen."""
    numbers = jnp.arange(many, dtype=chosen.dtype)
    mine = chosen[..., None] == numbers[None, None]
    return jnp.sum(jnp.where(mine, shares[..., None].astype(jnp.float32), 0.0), axis=1)


def _product(x: jax.Array, w: Any, own: Any, others: Any, batch: bool = False) -> jax.Array:
    """Contracts axes ``own`` of ``x`` with axes ``others`` of ``w``; ``batch`` makes the experts a batch axis."""
    w = jnp.asarray(w)
    dtype = promote(x.dtype, w.dtype).np
    wide = jnp.float32 if dtype.itemsize < 4 else None
    dimensions = ((own, others), ((1,), (0,)) if batch else ((), ()))
    y = jax.lax.dot_general(
        x.astype(dtype), w.astype(dtype), dimensions, preferred_element_type=wide
    )
    return y.astype(dtype)


# --- many, sorted by expert ---------------------------------------------------------------------


def sorted_mixture(
    kind: Kind, x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: ExpertWeights
) -> jax.Array:
    """Runs one grouped matmul for each projection: ``[N, E]`` → ``[N, E]`` in float32."""
    count, k = chosen.shape
    owners, many = chosen.reshape(-1), count_of(experts)
    order = jnp.argsort(owners)  # [N k], stable
    rows = x[order // k]  # [N k, E]
    given = [_grouped(rows, w, owners, many) for w in experts.inputs]  # [N k, F]
    mine = lambda bias: jnp.asarray(bias)[jnp.minimum(owners[order], many - 1)]
    h = _inner(kind, given, experts, mine)
    y = _grouped(h, experts.down, owners, many)  # [N k, E]
    # A gather restores the order of the tokens, so that every device sums in the same order.
    y = y[jnp.argsort(order)].reshape(count, k, y.shape[-1]).astype(jnp.float32)
    return _weighed(y, chosen, shares, many)


def _grouped(x: jax.Array, w: Any, owners: jax.Array, many: int) -> jax.Array:
    """The matmuls of sorted rows with the weights of their experts, which may be a slice of stacked layers."""
    # The experts of all layers are groups, most of them without rows, so that no layer is copied out of the stack.
    w, first = _all_layers(w)
    # Indices that mean no expert are sorted last and are in no group.
    places = jnp.where(owners < many, owners + first, w.shape[0])
    sizes = jnp.zeros(w.shape[0], jnp.int32).at[places].add(1, mode="drop")
    return grouped_matmul(x, w, sizes)


def _all_layers(w: Any) -> tuple[jax.Array, Any]:
    """The stack ``[n, out, in]`` with the weights of the experts of all layers, and the index of the first expert."""
    if not isinstance(w, StackSlice):
        return jnp.asarray(w), 0
    first = w.inner(0)
    return first.flat, first.place


def _weighed(y: jax.Array, chosen: jax.Array, shares: jax.Array, many: int) -> jax.Array:
    """``Σ share · y`` over the experts of each token: ``[N, k, E]`` → ``[N, E]``, in float32."""
    y = jnp.where((chosen < many)[..., None], y, 0.0)
    return jnp.sum(y * shares[..., None].astype(jnp.float32), axis=1)


def in_blocks(
    kind: Kind, x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: AllExperts,
    *, rows: tuple[int, int] = CPU_ROWS, by_kernel: bool = False, parts: int = 1,
) -> jax.Array:  # fmt: skip
    """Runs blocks of rows that have the same expert, whose weights are read in place: ``[N, E]`` → ``[N, E]``.

    Args:
        rows: smallest and largest number of rows in a block.
        by_kernel: whether to run all blocks in one kernel, instead of one after the other.
        parts: number of equal parts of the mixture's experts, of which these are one. With several, a loop computes
            as many blocks at a time as there are if tokens choose all parts evenly, and repeats if there are more.
    """
    (count, k), width = chosen.shape, x.shape[1]
    total, owners, many = count * k, chosen.reshape(-1), count_of(experts)
    apply = _apply_kernel if by_kernel else _apply
    size = block_rows(total, many * parts, *rows)
    if size == 1:
        y = apply(kind, owners, jnp.repeat(x, k, axis=0)[:, None], experts)
        y = y.reshape(count, k, width)
        return _weighed(y.astype(jnp.float32), chosen, shares, many)
    blocks = min(total, (total + many * (size - 1)) // size)
    if parts > 1:
        blocks = min(blocks, -(-total // (parts * size)) + many)
    order = jnp.argsort(owners)  # stable
    sizes = jnp.bincount(owners, length=many).astype(jnp.int32)
    before = jnp.cumsum(sizes) - sizes  # number of rows before those of each expert
    ends = jnp.cumsum(-(-sizes // size))  # blocks up to the end of each expert
    first = ends - -(-sizes // size)
    # The row of each choice, if all blocks were computed at a time.
    places = first[owners] * size + jnp.argsort(order) - before[owners]

    def run(one: Any) -> jax.Array:
        """The sums over the rows of the blocks from the number ``one``."""
        numbers = one + jnp.arange(blocks, dtype=jnp.int32)
        owner = jnp.sum(numbers[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
        # Row i of block b. Rows after an expert's last hold an arbitrary token and are ignored.
        mine = jnp.minimum(owner, many - 1)
        start = before[mine] + (numbers - first[mine]) * size
        rows = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
        found = x[order[jnp.clip(rows, 0, total - 1)] // k]  # [blocks, size, E]
        y = apply(kind, owner, found, experts).reshape(blocks * size, width)
        place = places - one * size
        y = y[place].reshape(count, k, width).astype(jnp.float32)
        if parts == 1:
            return _weighed(y, chosen, shares, many)
        is_here = ((place >= 0) & (place < blocks * size)).reshape(count, k)
        return _weighed(y, jnp.where(is_here, chosen, many), shares, many)

    if parts == 1:
        return run(0)
    add = lambda i, sums: sums + run(i * blocks)
    zeros = jnp.zeros((count, width), jnp.float32)
    zeros = varying_with(zeros, x, chosen, shares, *jax.tree.leaves(experts))
    return jax.lax.fori_loop(0, -(-ends[-1] // blocks), add, zeros)


def block_rows(rows: int, experts: int, least: int, most: int) -> int:
    """The number of rows in a block: about twice the mean number of rows of an expert.

    Example:
        >>> [block_rows(rows, 8, 1, 64) for rows in (8, 9, 128, 10_000)]
        [1, 2, 32, 64]
    """
    mean = 1 if rows <= experts else 1 << (rows // experts).bit_length()
    return max(least, min(most, mean))


def _apply(kind: Kind, owner: jax.Array, rows: jax.Array, experts: AllExperts) -> jax.Array:
    """Runs each block of ``[blocks, rows, E]`` through its expert; blocks with owner X are empty and give 0."""
    many = count_of(experts)
    if isinstance(experts, ExpertWeights):
        all_of_them = experts  # for the type checker

        def one(block: Any) -> jax.Array:
            def compute(rows: jax.Array) -> jax.Array:
                return _expert(kind, rows, all_of_them.at(jnp.minimum(block[0], many - 1)))

            return jax.lax.cond(block[0] < many, compute, partial(_nothing, compute), block[1])

        return jax.lax.map(one, (owner, rows))

    def branch(weights: ExpertWeights) -> Any:
        return lambda rows: _expert(kind, rows, weights)

    branches = [*map(branch, experts), partial(_nothing, branch(experts[0]))]
    return jax.lax.map(lambda block: jax.lax.switch(block[0], branches, block[1]), (owner, rows))


def _apply_kernel(kind: Kind, owner: jax.Array, rows: jax.Array, experts: AllExperts) -> jax.Array:
    found, many = stacked(experts), count_of(experts)

    def product(x: jax.Array, w: Any) -> jax.Array:
        firsts: list[Any] = []

        def whole(leaf: Any) -> jax.Array:
            stack, first = _all_layers(leaf)
            firsts.append(first)
            return stack

        w = w.each(whole) if isinstance(w, PACKED) else whole(w)
        if isinstance(w, QuantTensors):
            own = jnp.where(owner < many, owner, -1)
            return format_block_matmul(x, w.layout, w.tensors, places_of(firsts), own)
        places = jnp.where(owner < many, owner + firsts[0], -1)
        if isinstance(w, QuantArray):
            return packed_block_matmul(x, w.blocks, places, w.encoding)
        dtype = promote(x.dtype, w.dtype).np
        return block_matmul(x.astype(dtype), w.astype(dtype), places)

    given = [product(rows, w) for w in found.inputs]
    mine = lambda bias: jnp.asarray(bias)[jnp.minimum(owner, many - 1)][:, None]
    return product(_inner(kind, given, found, mine), found.down)


# --- one by one ---------------------------------------------------------------------------------


def one_by_one(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: Sequence[Callable[[Any], Any]]
) -> jax.Array:
    """Runs all experts on every token, for experts of any class, with the same result as ``mixture``.

    The share of an expert is 0 for tokens that did not choose it.
    """
    total = jnp.zeros(x.shape, jnp.float32)
    for i, expert in enumerate(experts):
        total = total + expert(x).astype(jnp.float32) * _share(chosen, shares, i)
    return total


def all_experts(
    kind: Kind, x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: AllExperts
) -> jax.Array:
    """:func:`one_by_one` for experts that are given as weights."""
    if not isinstance(experts, ExpertWeights):
        each = [lambda x, weights=weights: _expert(kind, x, weights) for weights in experts]
        return one_by_one(x, chosen, shares, each)
    leaves, tree = jax.tree.flatten(experts.each(_array))
    *operands, zeros = same_varying([x, chosen, shares, *leaves, jnp.zeros(x.shape, jnp.float32)])
    x, chosen, shares, *leaves = operands

    def add(total: jax.Array, at: Any) -> Any:
        number, weights = at
        return total + _expert(kind, x, weights) * _share(chosen, shares, number), None

    # A scan writes the gradients of the weights expert by expert.
    numbers = jnp.arange(count_of(experts), dtype=chosen.dtype)
    return jax.lax.scan(add, zeros, (numbers, jax.tree.unflatten(tree, leaves)))[0]


def _share(chosen: jax.Array, shares: jax.Array, number: Any) -> jax.Array:
    """The share of an expert for each token, ``[N, 1]``."""
    found = jnp.sum(jnp.where(chosen == number, shares, 0.0), axis=-1, keepdims=True)
    return found.astype(jnp.float32)


def _array(w: Any) -> Any:
    """The weights of all experts in arrays, quantised if they are."""
    return w.each(jnp.asarray) if isinstance(w, PACKED) else jnp.asarray(w)
