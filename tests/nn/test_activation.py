"""Activation functions against transformers' own table and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from maxjax.nn.activation import ACTIVATIONS, activation
from tests.oracles.recorded import recorded, torch, transformers

X = np.concatenate([np.linspace(-12, 12, 4001), [-1e4, -40.0, 0.0, 40.0, 1e4]]).astype(np.float32)


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"gelu_tanh", "gelu_quick"}))
def test_as_transformers_has_it(name):
    def theirs():
        function = transformers.activations.ACT2FN[name]
        return function(torch.tensor(X, dtype=torch.float64)).numpy()

    expected = recorded(theirs)
    found = np.asarray(activation(name)(jnp.asarray(X)))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


def test_the_other_spellings():
    assert activation("gelu_tanh") is activation("gelu_new")
    assert activation("gelu_quick") is activation("quick_gelu")
    assert activation("swish") is activation("silu")


def test_gelu_is_exact_and_the_others_are_not():
    x = X.astype(np.float64)
    exact = x * 0.5 * (1 + erf(x / np.sqrt(2)))
    np.testing.assert_allclose(activation("gelu")(jnp.asarray(X)), exact, atol=1e-6, rtol=1e-6)
    assert 1e-4 < np.abs(np.asarray(activation("gelu_new")(jnp.asarray(X))) - exact).max() < 1e-3
    assert 1e-2 < np.abs(np.asarray(activation("quick_gelu")(jnp.asarray(X))) - exact).max() < 3e-2


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits_are_rounded_once(name, dtype):
    x = jnp.asarray(X[:4001]).astype(dtype)
    found = activation(name)(x)
    assert found.dtype == dtype
    expected = activation(name)(x.astype(jnp.float32)).astype(dtype)
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.float32))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gradients_are_finite(name):
    gradient = jax.grad(lambda x: jnp.sum(activation(name)(x)))(jnp.asarray(X))
    assert bool(jnp.all(jnp.isfinite(gradient)))


@pytest.mark.parametrize("name", ["glu", "", "GELU", None, 3, ["gelu"]])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="unknown activation function") as caught:
        activation(name)
    assert repr(name) in str(caught.value)
    assert "quick_gelu" in str(caught.value)
