"""What every layer's tests ask of it: to be filled, and to do the same however it is run."""

import jax
import jax.numpy as jnp
import numpy as np

from maxjax.graph import DeviceRef, TensorValue

CPU = DeviceRef.CPU()


def filled(model, seed=0, scale=0.5):
    """The model with random weights, and those weights in float64 by name."""
    rng = np.random.default_rng(seed)
    values = {
        name: (rng.standard_normal([int(d) for d in w.shape]) * scale).astype(w.dtype.np)
        for name, w in model.raw_state_dict().items()
    }
    model.load_state_dict(values)
    return model, {name: value.astype(np.float64) for name, value in values.items()}


def random(*shape, seed=1, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same_everywhere(model, x, **tolerance):
    """The layer's result for ``x``: eager, compiled, from a TensorValue; and it has gradients."""
    x = jnp.asarray(x)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} | tolerance
    y = model(x)
    assert type(y) is not TensorValue and isinstance(y, jax.Array)
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(model, x), y, **tolerance)
    wrapped = model(TensorValue(x))
    assert type(wrapped) is TensorValue
    np.testing.assert_array_equal(np.asarray(wrapped), np.asarray(y))
    grads = jax.grad(lambda m, x: jnp.sum(jnp.square(m(x))), argnums=(0, 1))(model, x)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(grads))
    assert all(np.abs(np.asarray(leaf, np.float32)).max() > 0 for leaf in jax.tree.leaves(grads))
    return np.asarray(y)
