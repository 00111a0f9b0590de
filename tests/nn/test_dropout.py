"""Dropout: the identity without a key, the mean with one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import nn


def test_a_key_drops_and_keeps_the_mean():
    layer, x = nn.Dropout(0.25), jnp.full((100, 100), 3, jnp.bfloat16)
    assert layer(x) is x
    y = np.asarray(jax.jit(lambda m, x, key: m(x, key))(layer, x, jax.random.key(0)), np.float32)
    assert set(np.unique(y)) == {0.0, 4.0}
    assert abs((y == 0).mean() - 0.25) < 0.02
    assert not np.array_equal(y, np.asarray(layer(x, jax.random.key(1)), np.float32))
    assert float(nn.Dropout(1.0)(x, jax.random.key(0)).max()) == 0
    assert nn.Dropout(0.0)(x, jax.random.key(0)) is x


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_no_probability(p):
    with pytest.raises(ValueError, match="probability"):
        nn.Dropout(p)


def test_integers_are_refused():
    with pytest.raises(ValueError, match="takes floats, not int32"):
        nn.Dropout(0.3)(jnp.arange(3), jax.random.key(0))
