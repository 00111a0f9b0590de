"""The sum over chosen experts, in every way of computing it, against a loop in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels import QuantArray, StackSlice
from maxjax.kernels.blocks import DECODERS
from maxjax.nn.moe import algorithms as module
from maxjax.nn.moe.algorithms import ExpertWeights
from maxjax.nn.moe.experts import mixture
from maxjax.storage.blocks import encode

E, F = 6, 10


def sorted_apart(kind, x, chosen, shares, experts):
    """The grouped matmul of experts that are apart."""
    return module.sorted_mixture(kind, x, chosen, shares, module.stacked(experts))


def experts_of(count, seed=0, e=E, f=F):
    rng = np.random.default_rng(seed)
    make = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return [ExpertWeights(make(f, e), make(f, e), make(e, f)) for _ in range(count)]


def tokens_of(n, count, k, seed=1, e=E):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, e)).astype(np.float32)
    chosen = np.stack([rng.permutation(count)[:k] for _ in range(n)]).astype(np.int32)
    return x, chosen, rng.uniform(size=(n, k)).astype(np.float32)


def in_float64(x, chosen, shares, experts):
    out = np.zeros(x.shape)
    for i, token in enumerate(x.astype(np.float64)):
        for number, share in zip(chosen[i], shares[i], strict=True):
            gate, up, down = (np.asarray(w, np.float64) for w in experts[number].matrices)
            g = gate @ token
            out[i] += share * (down @ (g / (1 + np.exp(-g)) * (up @ token)))
    return out


@pytest.mark.sampled
@pytest.mark.parametrize(
    "run", [module.in_blocks, sorted_apart, module.all_experts], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(("n", "count", "k"), [(1, 5, 2), (7, 3, 3), (40, 4, 2)])
def test_three_ways_to_the_same_sum(run, n, count, k):
    given, experts = tokens_of(n, count, k), experts_of(count)
    found = jax.jit(functools.partial(run, "silu"))(*given, experts)
    np.testing.assert_allclose(found, in_float64(*given, experts), rtol=1e-4, atol=1e-4)


# Every way to compute a mixture of experts that are stacked.
WAYS = {
    "blocks": module.in_blocks,
    "blocks for a kernel": functools.partial(module.in_blocks, rows=(16, 128), by_kernel=True),
    "some blocks at a time": functools.partial(
        module.in_blocks, rows=(1, 4), by_kernel=True, parts=4
    ),
    "grouped": module.sorted_mixture,
    "at once": module.all_at_once,
    "each": functools.partial(module.few_choices, by_rows=False, some=True),
    "each by rows": functools.partial(module.few_choices, by_rows=True, some=True),
    "one by one": module.all_experts,
}


def together(experts):
    return ExpertWeights(
        *(np.stack(weights) for weights in zip(*(e.matrices for e in experts), strict=True))
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [3, 9])
@pytest.mark.parametrize("way", WAYS)
def test_ways_for_stacked_experts_some_of_which_are_elsewhere(way, n):
    x, chosen, shares = tokens_of(n, 6, 2)
    experts = experts_of(6)
    own = together(experts[:4])  # numbers 4 and 5 stand for none of them
    expected = in_float64(x, chosen, np.where(chosen < 4, shares, 0), experts)
    layers = ExpertWeights(*(np.stack([w * np.nan, w, w * np.nan]) for w in own.matrices))

    def in_a_stack(x, chosen, shares, layers, i):
        sliced = ExpertWeights(*(StackSlice(w, i) for w in layers.matrices))
        return WAYS[way]("silu", x, chosen, shares, sliced)

    found = jax.jit(functools.partial(WAYS[way], "silu"))(x, chosen, shares, own)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    if way != "grouped":  # on CPUs XLA multiplies by the matrices of all groups
        found = jax.jit(in_a_stack)(x, chosen, shares, layers, 1)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    layers = ExpertWeights(*(np.stack([w * 2, w, w * 3]) for w in own.matrices))
    found = jax.jit(in_a_stack)(x, chosen, shares, layers, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [2, 40])
def test_blocks_that_are_not_enough_are_computed_in_turns(n):
    """All tokens choose experts of one of eight parts, so that there are several times the usual blocks."""
    x, chosen, shares = tokens_of(n, 3, 2)
    run = functools.partial(module.in_blocks, "silu", rows=(8, 16), by_kernel=True, parts=8)
    found = jax.jit(run)(x, chosen, shares, together(experts_of(3)))
    expected = in_float64(x, chosen, shares, experts_of(3))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
def test_experts_without_a_gate(way):
    x, chosen, shares = tokens_of(9, 4, 2)
    rng = np.random.default_rng(6)
    each = [
        ExpertWeights.of(
            [rng.normal(size=shape).astype(np.float32) for shape in ((F, E), (E, F))],
            [rng.normal(size=n).astype(np.float32) for n in (F, E)],
        )
        for _ in range(4)
    ]
    expected, of_down = np.zeros(x.shape), np.zeros(x.shape)
    for i, token in enumerate(x.astype(np.float64)):
        for number, share in zip(chosen[i], shares[i], strict=True):
            (up, down), (_, inner, bias) = each[number].matrices, each[number].biases
            expected[i] += share * (down @ np.maximum(up @ token + inner, 0) ** 2)
            of_down[i] += share * bias
    own = module.stacked(each)
    assert own.gate is None and own.biases[0] is None
    found = jax.jit(functools.partial(WAYS[way], "relu2"))(x, chosen, shares, own)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    if way == "blocks":  # the way of this platform; the mixture adds the last biases
        for given in (own, each):
            found = jax.jit(functools.partial(mixture, kind="relu2"))(x, chosen, shares, given)
            np.testing.assert_allclose(found, expected + of_down, rtol=1e-4, atol=1e-4)


def with_a_limit(gate, up):
    """Another function between the projections than an activation times the other."""
    return jnp.minimum(gate, 1.0) * (up + 1.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_biases_and_a_function_of_both_projections(way):
    x, chosen, shares = tokens_of(9, 4, 2)
    rng, experts = np.random.default_rng(5), experts_of(4)
    biases = [tuple(rng.normal(size=n).astype(np.float32) for n in (F, F, E)) for _ in experts]
    own = together(experts)._replace(biases=tuple(map(np.stack, zip(*biases, strict=True))))
    expected = np.zeros(x.shape)
    for i, token in enumerate(x.astype(np.float64)):
        for number, share in zip(chosen[i], shares[i], strict=True):
            (g, u, d), (bg, bu, bd) = experts[number].matrices, biases[number]
            h = np.minimum(g @ token + bg, 1.0) * (u @ token + bu + 1.0)
            expected[i] += share * (d @ h + bd)
    of_down = sum(
        shares[:, j, None] * np.stack([biases[c][2] for c in chosen[:, j]]) for j in range(2)
    )
    found = jax.jit(functools.partial(WAYS[way], with_a_limit))(x, chosen, shares, own)
    np.testing.assert_allclose(found + of_down, expected, rtol=1e-4, atol=1e-4)
    if way == "blocks":  # the way of this platform; the mixture adds the last biases
        apart = [e._replace(biases=b) for e, b in zip(experts, biases, strict=True)]
        for given in (own, apart):
            found = jax.jit(functools.partial(mixture, kind=with_a_limit))(x, chosen, shares, given)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def program(platform, n, dtype=jnp.bfloat16, count=8, e=128, f=256):
    """The program of a mixture for a platform that is not here."""
    shape = lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct(sizes, dtype)
    experts = ExpertWeights(shape(count, f, e), shape(count, f, e), shape(count, e, f))
    given = shape(n, e), shape(n, 2, dtype=jnp.int32), shape(n, 2, dtype=jnp.float32)
    run = jax.jit(functools.partial(mixture, kind="silu")).trace(*given, experts)
    return run.lower(lowering_platforms=(platform,)).as_text()


def test_which_way_a_program_contains():
    for platform in ("cuda", "tpu"):
        text = program(platform, 4)  # 8 choices of 8 experts, written out
        assert "while" not in text and "maxjax_block" not in text and "ragged" not in text
        assert "tensor<1x256x128xbf16>" in text and "gather" not in text.replace("all_gather", "")
    assert "while" in program("tpu", 20, count=64)
    assert "maxjax_block_matmul" in program("cuda", 5)
    assert "ragged" not in program("tpu", 128) and "while" not in program("tpu", 128)
    assert "ragged" in program("tpu", 129)
    assert "ragged" not in program("tpu", 129, f=192)


@pytest.mark.parametrize("n", [2, 6, 33, 300])
def test_blocks_of_every_size_and_experts_that_have_all_or_nothing(n):
    experts, (x, chosen, shares) = experts_of(4), tokens_of(n, 4, 2)
    run = jax.jit(functools.partial(mixture, kind="silu"))
    for numbers in (chosen, np.full_like(chosen, 0), np.full_like(chosen, 3)):
        found = run(x, numbers, shares, experts)
        expected = in_float64(x, numbers, shares, experts)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_of_a_block():
    assert [module.block_rows(rows, 8, 1, 64) for rows in (1, 8, 9, 16, 128, 10_000)] == [
        1,
        1,
        2,
        4,
        32,
        64,
    ]


@pytest.mark.parametrize("n", [1, 50])
def test_experts_that_nobody_chose_are_not_run(n):
    given, experts = tokens_of(n, 3, 2), experts_of(3)
    broken = [np.full_like(w, np.nan) for w in experts[0].matrices]
    found = mixture(*given, [*experts, ExpertWeights(*broken)], "silu")
    np.testing.assert_allclose(found, in_float64(*given, experts), rtol=1e-4, atol=1e-4)


def test_a_token_does_not_depend_on_the_others():
    experts, (x, chosen, shares) = experts_of(4), tokens_of(50, 4, 2)
    found = mixture(x, chosen, shares, experts, "silu")
    x[20:], chosen[20:] = np.nan, 1
    again = mixture(x, chosen, shares, experts, "silu")
    np.testing.assert_allclose(again[:20], found[:20], rtol=1e-6, atol=1e-6)
    assert np.isnan(again[20:]).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [2, 40])
def test_derivatives_are_those_of_all_experts_over_all_tokens(n):
    x, chosen, shares = tokens_of(n, 4, 2)
    experts = experts_of(4)
    loss = lambda run: lambda x, s, e: jnp.sum(jnp.sin(run("silu", x, chosen, s, e)))
    named = lambda kind, *given: mixture(*given, kind)
    found, expected, other = (
        jax.tree.leaves(jax.jit(jax.grad(loss(run), (0, 1, 2)))(x, shares, experts))
        for run in (named, module.all_experts, sorted_apart)
    )
    assert len(found) == 14
    for a, b, c in zip(found, expected, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(a, c, rtol=1e-3, atol=1e-4)
    along = jax.jit(lambda x: named("silu", x, chosen, shares, experts))
    _, tangent = jax.jit(lambda x: jax.jvp(along, (x,), (jnp.ones_like(x),)))(x)
    step = (np.asarray(along(x + 1e-2)) - np.asarray(along(x - 1e-2))) / 2e-2
    np.testing.assert_allclose(tangent, step, rtol=0.02, atol=0.02)


def test_vmap():
    given, experts = [np.stack([a, a[::-1]]) for a in tokens_of(9, 4, 2)], experts_of(4)
    found = jax.vmap(lambda *a: mixture(*a, experts, "silu"))(*given)
    for i in range(2):
        expected = in_float64(*(a[i] for a in given), experts)
        np.testing.assert_allclose(found[i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stacked", [True, False])
def test_vmap_of_a_jitted_function_and_of_its_gradient(stacked):
    given, experts = [np.stack([a, a[::-1]]) for a in tokens_of(9, 4, 2)], experts_of(4)
    kept = together(experts) if stacked else experts
    run = lambda *a: mixture(*a, "silu")
    loss = jax.grad(lambda *a: jnp.sum(jnp.sin(run(*a))), (0, 2, 3))
    for f in (run, loss):
        found = jax.jit(jax.vmap(jax.jit(f), (0, 0, 0, None)))(*given, kept)
        each = [jax.jit(f)(*(a[i] for a in given), kept) for i in range(2)]
        expected = jax.tree.map(lambda *a: np.stack(a), *each)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected
        )


def test_vmap_over_experts_and_in_vmap():
    given, experts = [np.stack([a, a[::-1]]) for a in tokens_of(3, 4, 2)], together(experts_of(4))
    two = ExpertWeights(*(np.stack([w, w * 2]) for w in experts.matrices))
    run = lambda *a: mixture(*a, "silu")
    found = jax.jit(jax.vmap(run))(*given, two)
    inner = jax.vmap(run, (0, 0, 0, None))
    again = jax.jit(jax.vmap(inner, (0, 0, 0, None)))(*(a[None] for a in given), experts)
    for i in range(2):
        for got, factor in ((found[i], i + 1), (again[0, i], 1)):
            each = [ExpertWeights(*(w * factor for w in e.matrices)) for e in experts_of(4)]
            expected = in_float64(*(a[i] for a in given), each)
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)


def test_slices_of_stacks_and_packed_weights():
    x, chosen, shares = tokens_of(9, 2, 1, e=32)
    experts = experts_of(2, e=32, f=64)
    stacked = [
        ExpertWeights(*(StackSlice(jnp.stack([w, w * 0]), 0) for w in e.matrices)) for e in experts
    ]
    expected = in_float64(x, chosen, shares, experts)
    run = jax.jit(functools.partial(mixture, kind="silu"))
    found = run(x, chosen, shares, stacked)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    packed = [
        ExpertWeights(*(QuantArray(encode("Q8_0", w), "Q8_0") for w in e.matrices)) for e in experts
    ]
    decoded = [e.each(jnp.asarray) for e in packed]
    found, same = (run(x, chosen, shares, e) for e in (packed, decoded))
    np.testing.assert_allclose(found, same, rtol=1e-5, atol=1e-4)


def packed_in(encoding, e=256, f=512, count=4):
    """Experts in ggml's blocks, and each of them dequantised."""
    rng = np.random.default_rng(0)
    shapes = ((count, f, e), (count, f, e), (count, e, f))
    packed = [
        QuantArray(encode(encoding, rng.normal(0, 0.1, shape).astype(np.float32)), encoding)
        for shape in shapes
    ]
    dense = [np.asarray(w) for w in packed]
    return packed, [ExpertWeights(*(w[i] for w in dense)) for i in range(count)]


@pytest.mark.parametrize("encoding", ["MXFP4", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("rows", [(1, 128), module.GPU_ROWS])
@pytest.mark.parametrize("n", [1, 20])
def test_packed_experts_as_gpus_run_them(encoding, rows, n):
    """All blocks of rows in one operation, whose definition runs on a CPU; choices of 3 mean no expert."""
    packed, experts = packed_in(encoding)
    x, chosen, shares = tokens_of(n, 4, 2, e=256)
    chosen[0, 0] = 3
    expected = in_float64(x, chosen, np.where(chosen < 3, shares, 0), experts)
    first_three = ExpertWeights(*(w.each(lambda a: a[:3]) for w in packed))
    run = functools.partial(module.in_blocks, "silu", rows=rows, by_kernel=True)
    for wrap in (jnp.asarray, lambda a: StackSlice(jnp.stack([a * 0, a]), 1)):
        given = ExpertWeights(*(w.each(wrap) for w in first_three.matrices))
        found = jax.jit(run)(x, chosen, shares, given)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.skipif(jax.__version__ >= "0.11", reason="it lowers Triton only for devices it knows")
@pytest.mark.parametrize(("n", "encoding"), [(2, "Q4_K"), (2, "IQ4_XS"), (40, "MXFP4")])
def test_packed_experts_have_one_kernel_for_each_projection(n, encoding):
    decoder = DECODERS[encoding]
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    blocks = lambda out, depth: QuantArray(
        shape(np.uint8, 8, out, depth // decoder.elements * decoder.nbytes), encoding
    )
    experts = ExpertWeights(blocks(512, 256), blocks(512, 256), blocks(256, 512))
    given = shape(jnp.bfloat16, n, 256), shape(np.int32, n, 2), shape(np.float32, n, 2)
    run = jax.jit(functools.partial(mixture, kind="silu")).trace(*given, experts)
    text = run.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 3 and "stablehlo.while" not in text


def test_weights_of_different_types():
    x, chosen, shares = tokens_of(5, 2, 1)
    half = [ExpertWeights(e.gate.astype(jnp.bfloat16), e.up, e.down) for e in experts_of(2)]
    expected = in_float64(x, chosen, shares, half)
    for run in (module.in_blocks, sorted_apart):
        found = jax.jit(run, static_argnums=0)("silu", x, chosen, shares, half)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
