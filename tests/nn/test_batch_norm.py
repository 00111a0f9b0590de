"""BatchNorm against torch, in training and after it; what is trained, and how statistics are kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import nn
from tests.nn.layers import random
from tests.oracles.recorded import recorded, torch

CASES = {
    "1d": (nn.BatchNorm1d, "BatchNorm1d", (6, 4), {}),
    "2d": (nn.BatchNorm2d, "BatchNorm2d", (2, 4, 3, 5), {"momentum": None}),
    "3d": (nn.BatchNorm3d, "BatchNorm3d", (2, 4, 1, 2, 3), {"affine": False, "eps": 0.1}),
}


def of_torch(kind, options, weights, batches):
    layer = getattr(torch.nn, kind)(4, **options)
    layer.load_state_dict({n: torch.tensor(v) for n, v in weights.items()})
    found = [layer(torch.tensor(x)).detach().numpy() for x in batches]
    found.append(layer.eval()(torch.tensor(batches[0])).detach().numpy())
    return found, {n: v.numpy() for n, v in layer.state_dict().items()}


@pytest.mark.parametrize("name", CASES)
def test_as_torch(name):
    kind, other, shape, options = CASES[name]
    rng = np.random.default_rng(0)
    layer = kind(4, **options)
    weights = {
        n: np.abs(rng.normal(1, 0.3, tuple(map(int, w.shape)))).astype(np.float32)
        for n, w in layer.raw_state_dict().items()
    }
    weights["num_batches_tracked"] = np.array(3)
    layer.load_state_dict(weights)
    batches = [rng.normal(2, 3, shape).astype(np.float32) for _ in range(2)]
    expected, state = recorded(lambda: of_torch(other, options, weights, batches))
    for x, y in zip(batches, expected, strict=False):
        found, statistics = layer.update(x)
        np.testing.assert_allclose(found, y, atol=1e-5)
        layer = layer.with_statistics(statistics)
    np.testing.assert_allclose(layer(batches[0]), expected[-1], atol=1e-5)
    for n, value in layer.state_dict().items():
        np.testing.assert_allclose(value, state[n], rtol=1e-5)
    with pytest.raises(ValueError, match="takes"):
        layer(np.ones((2, 3, *shape[2:]), np.float32))
    with pytest.raises(ValueError, match="more than one value"):
        layer.update(np.ones((1, 4, *[1] * (len(shape) - 2)), np.float32))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 4), nn.BatchNorm(4), nn.Linear(4, 1)

    def __call__(self, x, is_training=False):
        h, statistics = (
            self.norm.update(self.up(x)) if is_training else (self.norm(self.up(x)), None)
        )
        return self.down(jax.nn.relu(h)), statistics


def test_a_step_of_training_returns_the_model_with_new_statistics():
    net = maxjax.init(Net(), jax.random.key(0))
    x = random(8, 3)
    trained, rest = maxjax.partition(net)
    names = [jax.tree_util.keystr(p, simple=True) for p, _ in jax.tree.leaves_with_path(rest)]
    assert names == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]

    @jax.jit
    def step(trained, rest, x):
        def loss(trained):
            y, statistics = maxjax.merge(trained, rest)(x, is_training=True)
            return (y**2).mean(), statistics

        gradient, statistics = jax.grad(loss, has_aux=True)(trained)
        trained = jax.tree.map(lambda w, g: w - 0.1 * g, trained, gradient)
        model = maxjax.merge(trained, rest)
        for name, value in statistics.items():
            getattr(model.norm, name).value = value
        return model

    new = step(trained, rest, x)
    assert jax.tree.structure(new) == jax.tree.structure(net)
    assert int(new.norm.num_batches_tracked.value) == 1
    np.testing.assert_allclose(
        new.norm.running_mean.value, 0.1 * np.asarray(net.up(x)).mean(0), atol=1e-6
    )
    assert float(jnp.abs(new.up.weight.value - net.up.weight.value).max()) > 0
    # No gradient reaches running statistics.
    grads = jax.jit(jax.grad(lambda m: m(x)[0].sum(), allow_int=True))(net)
    assert float(jnp.abs(grads.norm.running_var.value).max()) == 0


def test_a_state_dict_is_loaded_again():
    layer = maxjax.init(nn.BatchNorm(3), jax.random.key(0))
    state = layer.state_dict()
    layer.load_state_dict(state)
    np.testing.assert_array_equal(layer.num_batches_tracked.value, state["num_batches_tracked"])
