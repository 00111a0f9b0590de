"""Products of rows with the matrices of groups, and of blocks with matrices chosen by number."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels.block_matmul import block_matmul, kernel, lacks
from maxjax.kernels.gpu import triton
from maxjax.kernels.grouped import grouped_matmul

SIZES = np.array([3, 0, 4], np.int32)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def in_float64(x, w, sizes=SIZES):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    rows = zip(x.astype(np.float64), groups, strict=True)
    return np.stack([w[group].astype(np.float64) @ row for row, group in rows])


def test_each_row_meets_the_matrix_of_its_group():
    x, w = normal(7, 5), normal(3, 4, 5, seed=1)
    np.testing.assert_allclose(grouped_matmul(x, w, SIZES), in_float64(x, w), rtol=1e-5, atol=1e-5)
    half = grouped_matmul(x.astype(jnp.bfloat16), w, SIZES)
    assert half.dtype == jnp.float32
    assert (
        grouped_matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), SIZES).dtype == jnp.bfloat16
    )


def one_by_one(x, w, sizes):
    ends = jnp.cumsum(sizes)
    group = jnp.sum(jnp.arange(x.shape[0])[:, None] >= ends[None], axis=1)
    return jnp.einsum("mi,moi->mo", x, w[group])


def test_derivatives_of_first_and_second_order():
    x, w = normal(7, 5), normal(3, 4, 5, seed=1)
    loss = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w, SIZES)))
    both = (grouped_matmul, one_by_one)
    found, expected = (jax.jit(jax.grad(loss(f), (0, 1)))(x, w) for f in both)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)

    def second(f):
        inner = lambda x, w: sum(jnp.sum(jnp.cos(g)) for g in jax.grad(loss(f), (0, 1))(x, w))
        return jax.jit(jax.grad(inner, (0, 1)))(x, w)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        second(grouped_matmul), second(one_by_one),
    )  # fmt: skip
    along = lambda f: jax.jvp(lambda x, w: f(x, w, SIZES), (x, w), (x + 1, w - 1))[1]
    np.testing.assert_allclose(along(grouped_matmul), along(one_by_one), atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "axes", [a for a in itertools.product((0, None), repeat=3) if any(b == 0 for b in a)]
)
def test_vmap_of_values_and_derivatives(axes):
    both = normal(2, 7, 5), normal(2, 3, 4, 5, seed=1), np.stack([SIZES, SIZES[::-1]])
    given = [a if axis == 0 else a[0] for a, axis in zip(both, axes, strict=True)]
    value = lambda x, w, sizes: grouped_matmul(x, w, sizes)
    grads = jax.grad(lambda x, w, sizes: jnp.sum(jnp.sin(value(x, w, sizes))), (0, 1))
    for run in (value, grads):
        found = jax.jit(jax.vmap(run, axes))(*given)
        each = [
            run(*(a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True)))
            for i in range(2)
        ]
        expected = jax.tree.map(lambda *a: jnp.stack(a), *each)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def blocks(rows=16, out=48, depth=96, dtype=jnp.bfloat16):
    x, w = (
        jnp.asarray(normal(5, rows, depth), dtype),
        jnp.asarray(normal(4, out, depth, seed=1), dtype),
    )
    return x, w, jnp.array([3, 0, -1, 2, 0], jnp.int32)


def expected_of(x, w, owner):
    chosen = np.asarray(w, np.float64)[np.maximum(owner, 0)]
    return np.einsum("brk,bok->bro", np.asarray(x, np.float64), chosen)


@pytest.mark.parametrize("how", ["definition", "kernel"])
def test_blocks_meet_the_matrices_of_their_numbers(how):
    x, w, owner = blocks()
    run = block_matmul if how == "definition" else lambda *a: kernel(*a, interpret=True)
    found, expected = jax.jit(run)(x, w, owner), expected_of(x, w, owner)
    used = np.asarray(owner) >= 0
    np.testing.assert_allclose(
        np.asarray(found, np.float64)[used], expected[used], rtol=1e-2, atol=1e-1
    )


def test_blocks_of_other_types_and_sizes():
    x, w, owner = blocks(3, 7, 5, jnp.float32)
    np.testing.assert_allclose(
        jax.jit(block_matmul)(x, w, owner)[:2], expected_of(x, w, owner)[:2], rtol=1e-4, atol=1e-5
    )
    assert "float32" in lacks(x, w) and "3 rows" in lacks(*(a.astype(jnp.float16) for a in (x, w)))
    x, w, _ = blocks(32, 40, 128)
    assert "40 x 128" in lacks(x, w)
    assert not lacks(*blocks()[:2])


def test_programs_for_nvidia_gpus_contain_the_kernel():
    x, w, owner = blocks()
    text = jax.jit(block_matmul).trace(x, w, owner).lower(lowering_platforms=("cuda",)).as_text()
    assert "maxjax_block_matmul" in text
    others = [a.astype(jnp.float32) for a in (x, w)]
    text = jax.jit(block_matmul).trace(*others, owner).lower(lowering_platforms=("cuda",)).as_text()
    assert "maxjax_block_matmul" not in text and "while" in text


def test_the_first_question_for_a_kernel_may_come_from_a_shard_map():
    x, w, owner = blocks()
    mesh = jax.make_mesh(
        (2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    P = jax.sharding.PartitionSpec
    run = jax.shard_map(
        block_matmul,
        mesh=mesh,
        in_specs=(P(), P(None, "model"), P()),
        out_specs=P(None, None, "model"),
    )
    w = jnp.concatenate([w, w], 1)[:, :64]
    triton.unavailable.cache_clear()
    text = jax.jit(run).trace(x, w, owner).lower(lowering_platforms=("cuda",)).as_text()
    assert "maxjax_block_matmul" in text


def test_the_matmul_precision_is_that_of_the_call():
    def run(x, w):
        with jax.default_matmul_precision("highest"):
            return grouped_matmul(x, w, SIZES)

    x, w = normal(7, 5), normal(3, 4, 5, seed=1)
    for f in (run, jax.grad(lambda x, w: run(x, w).sum(), (0, 1))):
        lowered = jax.jit(f).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
        assert "precision HIGHEST" in lowered and "precision DEFAULT" not in lowered
