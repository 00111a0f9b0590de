"""graph.ops against torch."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.graph import DeviceRef, Weight, ops

torch = pytest.importorskip("torch")
X = np.linspace(-4, 4, 33, dtype=np.float32)
TORCH = {
    "relu": torch.relu, "silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_activations(name):
    want = TORCH[name](torch.tensor(X)).numpy()
    np.testing.assert_allclose(getattr(ops, name)(X), want, atol=1e-6)
    w = Weight("w", "float32", X.shape, DeviceRef.CPU())
    w.value = jnp.asarray(X)
    np.testing.assert_allclose(getattr(ops, name)(w), want, atol=1e-6)


def test_gelu_forms():
    want = torch.nn.functional.gelu(torch.tensor(X), approximate="tanh").numpy()
    np.testing.assert_allclose(ops.gelu(X, "tanh"), want, atol=1e-6)
    np.testing.assert_allclose(ops.gelu(X, "quick"), X / (1 + np.exp(-1.702 * X)), atol=1e-6)
    with pytest.raises(ValueError, match="'fast'"):
        ops.gelu(X, "fast")
