"""The causal convolution against NumPy's, cut anywhere, and its state after ragged rows."""

import jax
import jax.numpy as jnp
import numpy as np

from maxjax.nn.ssm.convolution import causal_conv

B, T, C, K = 3, 9, 5, 4


def inputs():
    rng = np.random.default_rng(0)
    shapes = (B, T, C), (C, K), (C,), (B, K - 1, C)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def of_numpy(x, weight, bias, state):
    padded = np.concatenate([state, x], 1)
    y = np.stack(
        [
            [np.convolve(padded[b, :, c], weight[c, ::-1], "valid") for c in range(C)]
            for b in range(B)
        ]
    )
    return y.swapaxes(1, 2) + bias


def test_as_numpy_and_cut_in_two():
    x, weight, bias, state = inputs()
    run = jax.jit(causal_conv)
    expected = of_numpy(x, weight, bias, state)
    y, after = run(x, weight, bias, state)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(after, x[:, -(K - 1) :])
    first, middle = run(x[:, :2], weight, bias, state)
    rest, again = run(x[:, 2:], weight, bias, middle)
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(again, after)
    y, _ = causal_conv(x, weight, None, None)
    np.testing.assert_allclose(y, of_numpy(x, weight, 0 * bias, 0 * state), rtol=0, atol=1e-5)


def test_the_state_is_that_after_the_real_tokens():
    x, weight, bias, state = inputs()
    counts = np.array([9, 2, 0], np.int32)
    _, found = causal_conv(x, weight, bias, state, jnp.asarray(counts))
    padded = np.concatenate([state, x], 1)
    for row, count in enumerate(counts):
        np.testing.assert_array_equal(found[row], padded[row, count : count + K - 1])
