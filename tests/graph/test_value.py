"""TensorValue: methods against NumPy, promotion, pytree, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.graph import DeviceRef, Dim, Shape, TensorType, TensorValue, Weight, ops

A = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
X = TensorValue(jnp.asarray(A))
I = TensorValue(jnp.arange(4))  # noqa: E741

METHODS = {
    "cast": (lambda x: x.cast("int32"), A.astype(np.int32)),
    "reshape": (lambda x: x.reshape((4, -1)), A.reshape(4, 6)),
    "reshape with Dims": (lambda x: x.reshape([x.shape[0] * x.shape[1], Dim(4)]), A.reshape(6, 4)),
    "reshape with arguments": (lambda x: x.reshape(6, 4), A.reshape(6, 4)),
    "permute": (lambda x: x.permute([2, 0, 1]), A.transpose(2, 0, 1)),
    "transpose": (lambda x: x.transpose(0, -1), A.swapaxes(0, 2)),
    "T": (lambda x: x.T, A.swapaxes(1, 2)),
    "broadcast_to": (lambda x: x.broadcast_to((5, 2, 3, 4)), np.broadcast_to(A, (5, 2, 3, 4))),
    "unsqueeze": (lambda x: x.unsqueeze(-1), A[..., None]),
    "squeeze": (lambda x: x[:1].squeeze(0), A[0]),
    "flatten": (lambda x: x.flatten(), A.ravel()),
    "flatten from": (lambda x: x.flatten(1), A.reshape(2, 12)),
    "flatten to": (lambda x: x.flatten(0, -2), A.reshape(6, 4)),
    "rebind": (lambda x: x.rebind(("a", 3, Dim("c"))), A),
    "to": (lambda x: x.to(DeviceRef.CPU()), A),
    "tensor": (lambda x: x.tensor, A),
    "max": (lambda x: x.max(), A.max(-1, keepdims=True)),
    "min": (lambda x: x.min(axis=0), A.min(0, keepdims=True)),
    "mean": (lambda x: x.mean(1), A.mean(1, keepdims=True)),
    "var": (lambda x: x.var(), A.var(-1, keepdims=True)),
    "stdev": (lambda x: x.stdev(), A.std(-1, keepdims=True)),
    "argmax": (lambda x: x.argmax(), A.argmax(-1, keepdims=True)),
    "index": (lambda x: x[1, ..., -1], A[1, ..., -1]),
    "slice": (lambda x: x[:, 1:3, None], A[:, 1:3, None]),
    "slice with a name": (lambda x: x[(slice(0, 1), "one"), :], A[:1]),
    "index by a tensor": (lambda x: x[TensorValue(jnp.array(1))], A[1]),
    "astype": (lambda x: x.astype("float16"), A.astype(np.float16)),
    "neg": (lambda x: -x, -A),
    "abs": (lambda x: abs(-x), A),
    "round": (lambda x: round(x / 4), np.round(A / 4)),
    "round to a digit": (lambda x: round(x / 4, 1), np.round(A / 4, 1)),
    "invert": (lambda x: ~(x > 3), ~(A > 3)),
    "matmul": (lambda x: x @ x.T, A @ A.swapaxes(1, 2)),
    "matmul of ranks": (lambda x: x @ TensorValue(jnp.ones((4, 5))), A @ np.ones((4, 5))),
    "row": (lambda x: x + np.arange(4, dtype=np.float32), A + np.arange(4)),
    "numpy left": (lambda x: np.arange(4, dtype=np.float32) + x, A + np.arange(4)),
    "number": (lambda x: 2 * x - 1.5, 2 * A - 1.5),
    "dim": (lambda x: x * x.shape[2], A * 4),
    "power": (lambda x: x**2, A**2),
    "compare": (lambda x: (x >= 3) & (x != 5), (A >= 3) & (A != 5)),
    "modulo": (lambda x: x.cast("int32") % 3 // 2, A.astype(int) % 3 // 2),
}


@pytest.mark.sampled
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_methods(name, jit):
    fn, want = METHODS[name]
    got = jax.jit(fn)(X) if jit else fn(X)
    assert isinstance(got, TensorValue)
    np.testing.assert_allclose(got.to_numpy(), want, rtol=1e-6)


def test_what_it_is():
    assert X.type == TensorType("float32", (2, 3, 4), DeviceRef.CPU())
    assert (X.dtype, X.rank, X.ndim, X.size) == (DType.float32, 3, 3, 24)
    assert X.shape == [2, 3, 4] and isinstance(X.shape, Shape) and X.device == DeviceRef.CPU()
    assert "0.,  1.,  2." in repr(X) and "shape=[Dim(2), Dim(3), Dim(4)]" in repr(X)
    assert float(TensorValue(jnp.array(2.5))) == 2.5 and TensorValue(jnp.array(3)).item() == 3
    assert TensorValue(X).value is X.value
    assert TensorValue(Shape((1, 2))).to_numpy().tolist() == [1, 2]
    with pytest.raises(TypeError):
        hash(X)
    with pytest.raises(TypeError):
        iter(X)


@pytest.mark.parametrize("value", [3, 2.0, [1, 2], "x", None])
def test_what_it_is_not(value):
    with pytest.raises(TypeError, match=type(value).__name__):
        TensorValue(value)


def test_float_widths_promote_and_integers_do_not_meet_floats():
    half, brain = X.cast("float16"), X.cast("bfloat16")
    assert (X + half).dtype is DType.float32 and (half * 2.5).dtype is DType.float16
    assert (X @ half.T).dtype is DType.float32
    halves = (lambda: brain + half, lambda: half @ brain.T, lambda: half == brain)
    for wrong in (lambda: I + X[0, 0], lambda: I + 1.5, *halves):
        with pytest.raises(ValueError, match="(?i)unsafe cast"):
            wrong()
    assert (X * np.float64(2)).dtype is DType.float32
    assert (I * np.int64(2)).dtype is DType.int32
    assert (I + 1).dtype is DType.int32 and (I / 2).to_numpy().tolist() == [0, 0.5, 1, 1.5]
    assert (I.cast("int8") / (I + 1).cast("uint8")).to_numpy()[
        1
    ] == 0.5  # which have no common type


@pytest.mark.parametrize(
    "wrong, error",
    [
        (lambda x: x.transpose(0, 3), IndexError), (lambda x: x.flatten(2, 1), ValueError),
        (lambda x: x.flatten(0, 5), IndexError), (lambda x: x.squeeze(0), ValueError),
        (lambda x: x.rebind((2, 3)), ValueError), (lambda x: x.rebind((2, 3, 5)), ValueError),
        (lambda x: x.reshape((5, 5)), ValueError), (lambda x: x.permute([0, 0, 1]), ValueError),
        (lambda x: x.permute([0, 1, 5]), IndexError), (lambda x: x.squeeze(5), IndexError),
        (lambda x: x.reshape(("n", 3)), ValueError),
        (lambda x: x + np.ones(3, np.float32), ValueError),
    ],
)  # fmt: skip
def test_what_is_refused(wrong, error):
    with pytest.raises(error):
        wrong(X)


def test_jnp_functions_take_it():
    np.testing.assert_array_equal(jnp.sin(X), np.asarray(jnp.sin(A)))
    np.testing.assert_array_equal(jnp.concatenate([X, X]), np.concatenate([A, A]))
    assert isinstance(jnp.add(A, X), jax.Array) and isinstance(X.sum(), jax.Array)


def test_it_is_a_pytree():
    assert isinstance(jax.tree.map(lambda a: a + 1, X), TensorValue)
    grad = jax.grad(lambda x: (x * x).value.sum())(X)
    np.testing.assert_allclose(grad.to_numpy(), 2 * A)
    assert jax.tree.leaves(jax.tree.map(lambda _: None, X)) == []
    assert jax.vmap(lambda x: x.transpose(0, 1))(X).shape == [2, 4, 3]


def test_with_weights():
    w = Weight("w", "float32", (5, 4), DeviceRef.CPU())
    w.value = jnp.ones((5, 4))
    assert isinstance(X @ w.T, TensorValue) and (X @ w.T).shape == [2, 3, 5]
    assert isinstance(X * w[0], TensorValue) and isinstance(w * X[0, :1], TensorValue)
    assert isinstance(jnp.asarray(A) @ w.T, jax.Array) and isinstance(w + 1, jax.Array)
    assert isinstance(w.cast("bfloat16"), TensorValue) and isinstance(
        w.permute([1, 0]), TensorValue
    )


def test_print(capsys):
    TensorValue(jnp.array([1.0, 2.0])).print("x")
    jax.jit(lambda x: x.print("y"))(TensorValue(jnp.array([3.0])))
    jax.effects_barrier()
    out = capsys.readouterr().out
    assert "x = tensor([1. 2.], dtype=float32, shape=['2'])" in out and "y = tensor([3.]" in out


def test_under_tracing_it_shows_its_type():
    shown = []
    jax.jit(lambda x: shown.append(repr(x)))(X)
    assert shown == ["TensorValue(dtype=float32, shape=[Dim(2), Dim(3), Dim(4)], device=cpu:0)"]


def test_a_size_beside_0_cannot_be_inferred():
    with pytest.raises(ValueError, match="reshape"):
        TensorValue(A).reshape((0, -1))


def test_integers_divided_by_integers_with_64_bits():
    with jax.enable_x64(True):
        x = TensorValue(jnp.array([1, 2], jnp.int32))
        for found in (x / x, x / 3, x / x.cast("int8"), ops.div(x, x)):
            assert found.dtype is DType.float64
        third = TensorValue(jnp.array([1], jnp.int8)) / TensorValue(jnp.array([3], jnp.int8))
        assert third.to_numpy()[0] == 1 / 3
