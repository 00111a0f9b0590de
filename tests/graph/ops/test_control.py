"""Branches, loops, printing and placement: eagerly, under jit and with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.graph import DeviceRef, TensorType, TensorValue, ops

X = TensorValue(jnp.arange(3.0))
CPU = DeviceRef.CPU()


def halved_or_squared(x):
    x = TensorValue(x)
    return ops.cond(x[0] > 1.0, [x.type], lambda: x * 0.5, lambda: [x * x])[0].value


@pytest.mark.parametrize("start", [[2.0, 3.0], [1.0, 3.0]])
def test_cond(start):
    x = np.float32(start)
    want, slope = (x / 2, [0.5, 0.5]) if x[0] > 1 else (x**2, 2 * x)
    for function in (halved_or_squared, jax.jit(halved_or_squared)):
        np.testing.assert_allclose(function(x), want)
        np.testing.assert_allclose(jax.grad(lambda x, f=function: f(x).sum())(x), slope)


def test_cond_gives_a_list_of_values():
    got = ops.cond(jnp.array(True), [X.type, X.type], lambda: (X, X), lambda: (X, X))
    assert isinstance(got, list) and all(isinstance(x, TensorValue) for x in got)
    assert ops.cond(jnp.array(False), None, lambda: None, lambda: None) == []


def test_what_cond_refuses():
    wrong = TensorType(DType.float32, [4], CPU)
    with pytest.raises(TypeError, match=r"Dim\(3\).*Dim\(4\)"):
        ops.cond(jnp.array(True), [wrong], lambda: X, lambda: X)
    with pytest.raises(TypeError, match="should be"):
        ops.cond(jnp.array(True), None, lambda: X, lambda: X)
    with pytest.raises(TypeError, match="float16|int32"):
        jax.jit(lambda p: ops.cond(p, [X.type], lambda: X, lambda: X.cast("int32"))[0].value)(True)
    with pytest.raises(ValueError, match="int32"):
        ops.cond(jnp.array(1), [X.type], lambda: X, lambda: X)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        ops.cond(X > 0, [X.type], lambda: X, lambda: X)


def doubled(x, times):
    i = ops.constant(0, "int32", CPU)
    values = ops.while_loop(
        (i, TensorValue(x)), lambda i, y: i < times, lambda i, y: [i + 1, y * 2.0]
    )
    return values[1].value


def test_while_loop():
    x = np.float32([1, -2])
    np.testing.assert_array_equal(doubled(x, 3), x * 8)
    np.testing.assert_array_equal(doubled(x, 0), x)
    np.testing.assert_array_equal(jax.jit(doubled)(x, 5), x * 32)
    assert "while" in str(jax.make_jaxpr(doubled)(x, 5))
    np.testing.assert_array_equal(jax.grad(lambda x: doubled(x, 3).sum())(x), [8, 8])
    _, tangent = jax.jvp(jax.jit(lambda x: doubled(x, 3)), (x,), (np.ones(2, np.float32),))
    np.testing.assert_array_equal(tangent, [8, 8])


def test_while_loop_of_one_value():
    got = ops.while_loop(ops.constant(1, "int32", CPU), lambda n: n < 100, lambda n: n * 3)
    assert isinstance(got, list) and isinstance(got[0], TensorValue)
    assert int(got[0]) == 243


def test_what_while_loop_refuses():
    with pytest.raises(ValueError, match="at least one"):
        ops.while_loop((), lambda: True, list)
    for run in (lambda f: f(), lambda f: jax.jit(f)()):
        with pytest.raises(TypeError, match="int32"):
            run(lambda: ops.while_loop(X, lambda x: x[0] < 1.0, lambda x: x.cast("int32"))[0].value)
        with pytest.raises(TypeError, match="should be"):
            run(lambda: ops.while_loop((X, X), lambda x, y: x[0] < 1.0, lambda x, y: [x])[0].value)
        with pytest.raises(ValueError, match="one boolean"):
            run(lambda: ops.while_loop(X, lambda x: x < 1.0, lambda x: x)[0].value)


def test_print(capsys):
    ops.print("a text {}")
    ops.print(X, "label")
    ops.print(jnp.arange(2), "plain")
    jax.jit(lambda x: ops.print(x, "inside") or ops.print("text {") or x)(
        jnp.arange(2.0)
    ).block_until_ready()
    jax.effects_barrier()
    out = capsys.readouterr().out
    for text in (
        "a text {}\n",
        "label = tensor([0. 1. 2.]",
        "plain = ",
        "inside = tensor([0. 1.]",
        "text {\n",
    ):
        assert text in out


def test_transfer_to():
    far = DeviceRef.from_jax(jax.devices()[1])
    moved = ops.transfer_to(X, far)
    assert isinstance(moved, TensorValue) and moved.device == far
    plain = ops.transfer_to(X.value, far)
    assert not isinstance(plain, TensorValue) and plain.devices() == {jax.devices()[1]}
    np.testing.assert_array_equal(jax.jit(lambda x: ops.transfer_to(x, far))(X.value), X.value)
    ops.assert_same_device(X, X)
    with pytest.raises(ValueError, match="there on"):
        ops.assert_same_device(X, there=moved)


def test_a_loop_whose_later_values_are_traced():
    run = lambda w: ops.while_loop(jnp.ones(()), lambda v: v < 100.0, lambda v: v * w)[0].value
    np.testing.assert_array_equal(jax.vmap(run)(jnp.array([2.0, 3.0])), [128, 243])
