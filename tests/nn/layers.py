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


@jax.jit
def call(model, *inputs):
    """The layer's result, compiled: one program instead of one for each operation."""
    return model(*inputs)


def same_everywhere(model, x, **tolerance):
    """The layer's result for ``x``: eager, from a TensorValue, compiled with its gradients."""
    x = jnp.asarray(x)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} | tolerance
    y = model(x)
    assert type(y) is not TensorValue and isinstance(y, jax.Array)

    @jax.jit
    def compiled(m, x):
        def loss(m, x):
            y = m(x)
            return jnp.sum(jnp.square(y)), y

        grads, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(m, x)
        return y, grads

    again, grads = compiled(model, x)
    np.testing.assert_allclose(again, y, **tolerance)
    wrapped = model(TensorValue(x))
    assert type(wrapped) is TensorValue
    np.testing.assert_array_equal(np.asarray(wrapped), np.asarray(y))
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(grads))
    assert all(np.abs(np.asarray(leaf, np.float32)).max() > 0 for leaf in jax.tree.leaves(grads))
    return np.asarray(y)
