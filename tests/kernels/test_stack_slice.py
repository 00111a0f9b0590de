"""StackSlice: one layer's part of a stack wherever an array is wanted."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import maxjax
from maxjax.kernels import StackSlice, matmul, stack_slice

STACK = np.arange(1, 13, dtype=np.float32).reshape(3, 2, 2)
PLAIN = jnp.asarray(STACK[1])


def one(index=1, dtype=jnp.float32):
    return StackSlice(jnp.asarray(STACK, dtype), index)


INDICES = [1, -2, np.int64(1), np.int64(-2), np.int32(1), jnp.int32(1), jnp.uint8(1)]


@pytest.mark.parametrize("index", INDICES, ids=[type(i).__name__ + str(i) for i in INDICES])
def test_any_integer_is_an_index(index):
    np.testing.assert_array_equal(np.asarray(one(index)), STACK[1])
    np.testing.assert_array_equal(jnp.asarray(one(index)), STACK[1])
    np.testing.assert_array_equal(matmul(jnp.eye(2), one(index)), STACK[1].T)


def test_what_it_is():
    s = one()
    assert s.shape == (2, 2) and s.dtype == jnp.float32 and s.ndim == 2 and s.size == 4
    assert repr(s) == "StackSlice(float32[2, 2], 1 of 3)"
    assert StackSlice(jnp.zeros(3), 0).shape == () and StackSlice(jnp.zeros((3, 0)), 0).size == 0
    assert hash(s) != hash(one()) and len({s, s}) == 1
    with pytest.raises(AttributeError):
        s.nothing
    for index in (3, np.int64(3), -4):
        with pytest.raises(IndexError):
            np.asarray(one(index))


BINARY = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.matmul, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
]  # fmt: skip
OTHERS = {
    "number": 2.0,
    "array": jnp.full((2, 2), 3.0),
    "numpy": np.full((2, 2), 3.0, np.float32),
    "scalar": np.float32(3),
    "slice": one(2),
}


def on_both_sides(op, other):
    plain = jnp.asarray(STACK[2]) if isinstance(other, StackSlice) else other
    for got, want in ((op(one(), other), op(PLAIN, plain)), (op(other, one()), op(plain, PLAIN))):
        assert isinstance(got, jax.Array) and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_operators_on_both_sides(op):
    on_both_sides(op, OTHERS["array"])


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("op", [operator.sub, operator.lt, operator.eq, operator.matmul])
def test_operands_of_every_kind(op, kind):
    if op is operator.matmul and kind in ("number", "scalar"):
        with pytest.raises((TypeError, ValueError)):
            on_both_sides(op, OTHERS[kind])
    else:
        on_both_sides(op, OTHERS[kind])


@pytest.mark.parametrize(
    "op", [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]
)
def test_operators_on_bits(op):
    s, plain = one(dtype=jnp.int32), jnp.asarray(STACK[1], jnp.int32)
    np.testing.assert_array_equal(op(s, 2), op(plain, 2))
    np.testing.assert_array_equal(op(2, s), op(2, plain))
    np.testing.assert_array_equal(~s, ~plain)


@pytest.mark.parametrize("op", [operator.neg, operator.pos, abs])
def test_signs(op):
    np.testing.assert_array_equal(op(one()), op(PLAIN))


def test_in_place_it_becomes_an_array():
    s = one()
    s += 1
    assert isinstance(s, jax.Array)
    np.testing.assert_array_equal(s, STACK[1] + 1)


@pytest.mark.parametrize(
    "function",
    [
        jnp.sum, jnp.tanh, jnp.linalg.norm, jnp.transpose, jnp.ravel, jnp.argmax, jnp.shape, jnp.result_type,
        lambda a: jnp.einsum("ij,kj->ik", a, a), lambda a: jnp.concatenate([a, a]), lambda a: jnp.where(a > 5, a, 0),
        lambda a: jnp.stack([a, a]), lambda a: jnp.dot(a, a), lambda a: jnp.astype(a, jnp.int32), jax.nn.softmax,
    ],
)  # fmt: skip
def test_functions_of_jnp(function):
    got, want = function(one()), function(PLAIN)
    if isinstance(want, jax.Array):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    else:
        assert got == want


@pytest.mark.parametrize(
    "use",
    [
        lambda a: a[0], lambda a: a[:, 1:], lambda a: a[..., None], lambda a: a[jnp.array([1, 0])], lambda a: a[a > 6],
        lambda a: a.T, lambda a: a.sum(axis=0), lambda a: a.reshape(4), lambda a: a.astype(jnp.bfloat16),
        lambda a: a.at[0].set(0.0), lambda a: a.mean(), lambda a: a.flatten(),
    ],
)  # fmt: skip
def test_methods_and_indexing(use):
    got, want = use(one()), use(PLAIN)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_as_a_numpy_array():
    assert type(np.asarray(one())) is np.ndarray
    assert np.asarray(one(), dtype=np.float64).dtype == np.float64
    assert float(np.sum(one())) == STACK[1].sum()
    np.testing.assert_array_equal(np.asarray(StackSlice(STACK, 2)), STACK[2])
    assert one().tolist() == STACK[1].tolist() and one()[1, 1].item() == 8


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_])
def test_dtypes(dtype):
    s = one(dtype=dtype)
    assert s.dtype == dtype and jnp.asarray(s).dtype == dtype
    np.testing.assert_array_equal(jnp.asarray(s), jnp.asarray(STACK[1], dtype))


def test_products():
    x = jnp.asarray([[1.0, 2.0]])
    np.testing.assert_allclose(matmul(x, one()), x @ STACK[1].T)
    np.testing.assert_allclose(x @ one().T, x @ STACK[1].T)
    with pytest.raises(ValueError, match=r"weight of shape \(2, 2\)"):
        matmul(jnp.ones(3), one())
    with pytest.raises(ValueError, match=r"\(2,\)"):
        matmul(jnp.ones(2), StackSlice(jnp.ones((3, 2)), 0))


# -- as a tree, and traced


def test_it_is_a_tree_of_stack_and_index():
    s = StackSlice(jnp.asarray(STACK), jnp.int32(1))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(s)]
    assert paths == [".stack", ".index"]
    again = jax.tree.unflatten(jax.tree.structure(s), jax.tree.leaves(s))
    assert type(again) is StackSlice and again.stack is s.stack
    assert jax.tree.structure(s) == jax.tree.structure(one(2))
    assert jax.tree.structure(jax.tree.map(lambda leaf: None, s)).num_leaves == 0
    shapes = jax.eval_shape(lambda s: jnp.asarray(s), s)
    assert shapes.shape == (2, 2)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies(how):
    other = how(one())
    assert type(other) is StackSlice and other.index == 1
    np.testing.assert_array_equal(np.asarray(other), STACK[1])


def test_one_program_for_every_index():
    traces = []

    @jax.jit
    def run(s, x):
        traces.append(s.shape)
        return matmul(x, s) + s.sum() + s[0]

    x = jnp.ones(2)
    for i in range(3):
        want = x @ STACK[i].T + STACK[i].sum() + STACK[i][0]
        np.testing.assert_allclose(run(StackSlice(jnp.asarray(STACK), jnp.int32(i)), x), want)
    assert traces == [(2, 2)]


def place(kind):
    mesh = maxjax.make_mesh(model=4, data=2)
    return {
        "uncommitted": None,
        "device": jax.devices()[3],
        "split": NamedSharding(mesh, P(None, None, "model")),
        "first axis split": NamedSharding(mesh, P("data")),
    }[kind]


@pytest.mark.parametrize("kind", ["uncommitted", "device", "split", "first axis split"])
def test_each_slice_lies_where_the_stack_does(kind):
    values = np.arange(96.0, dtype=np.float32).reshape(2, 3, 4, 4)
    stack = jax.device_put(values, place(kind))
    before = stack_slice._one_program._cache_size()
    is_split = kind == "first axis split"  # JAX puts the indices of these there by itself
    with jax.transfer_guard("allow" if is_split else "disallow"):
        found = [StackSlice(stack, i).__jax_array__() for i in range(2)]
        found += [StackSlice(stack, (i, j)).__jax_array__() for i in range(2) for j in range(-3, 0)]
    want = [stack[i] for i in range(2)] + [stack[i, j] for i in range(2) for j in range(-3, 0)]
    for one, other in zip(found, want, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.committed == other.committed == (kind != "uncommitted")
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    assert stack_slice._one_program._cache_size() - before == (0 if is_split else 2)


def test_an_array_in_a_program_is_cut_by_a_constant():
    stack = jnp.asarray(STACK)
    jaxpr = str(jax.make_jaxpr(lambda x: x + StackSlice(stack, 1))(jnp.ones((2, 2))))
    assert " slice[" in jaxpr and "dynamic_slice" not in jaxpr


def test_with_a_traced_index():
    stack = jnp.asarray(STACK)
    pick = lambda i: StackSlice(stack, i) * 2
    np.testing.assert_array_equal(jax.jit(pick)(2), STACK[2] * 2)
    np.testing.assert_array_equal(jax.vmap(pick)(jnp.arange(3)), STACK * 2)
    _, each = jax.lax.scan(lambda c, i: (c, pick(i)), 0, jnp.arange(3))
    np.testing.assert_array_equal(each, STACK * 2)


def test_gradients_are_those_of_the_slice():
    grad = jax.grad(lambda stack: jnp.sum(StackSlice(stack, 1) ** 2))(jnp.asarray(STACK))
    want = np.zeros_like(STACK)
    want[1] = 2 * STACK[1]
    np.testing.assert_array_equal(grad, want)
    traced = jax.jit(jax.grad(lambda stack, i: jnp.sum(StackSlice(stack, i) ** 2)))
    np.testing.assert_array_equal(traced(jnp.asarray(STACK), 1), want)
    ours = jax.grad(lambda s: jnp.sum(s * s), allow_int=True)(one(jnp.int32(1)))
    assert type(ours) is StackSlice
    np.testing.assert_array_equal(ours.stack, want)
