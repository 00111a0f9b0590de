"""Static attributes of Modules as JAX sees them, and values that are assigned while a Module runs."""

import collections
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.graph import DeviceRef, Dim, Weight
from maxjax.graph.dim import StaticDim
from maxjax.nn import Module


class Held(Module):
    def __init__(self):
        super().__init__()
        self.betas, self.options = [0.5, 2.0], {"b": 3.0, "a": [4.0]}
        self.mean = Weight("mean", "float32", (2,), DeviceRef.CPU())

    def __call__(self, x):
        self.mean.value = 0.5 * self.mean.value + x
        return x


def test_lists_and_dicts_of_a_module_are_pytrees():
    held = Held()
    assert jax.tree.map(lambda v: 2 * v, held.betas) == [1.0, 4.0]
    assert jax.tree.map(lambda v: 2 * v, held.options) == {"b": 6.0, "a": [8.0]}
    assert float(jax.jit(lambda options: options["b"] + options["a"][0])(held.options)) == 7
    assert float(jax.jit(lambda betas: betas[0] + betas[1])(held.betas)) == 2.5
    assert len(jax.tree.leaves(held)) == 1  # they are no leaves of the Module


def test_dicts_with_a_default_keep_it():
    held = Held()
    held.counts, held.lists = collections.Counter("aab"), collections.defaultdict(list, a=[1])
    for module in (held, jax.tree.map(lambda leaf: leaf, held), pickle.loads(pickle.dumps(held))):
        assert (module.counts["a"], module.counts["z"], module.lists["z"]) == (2, 0, [])
        assert "z" not in module.counts and jax.tree.structure(module) == jax.tree.structure(held)
        with pytest.raises(TypeError, match="cannot be changed in place"):
            module.lists["z"].append(1)
        with pytest.raises(KeyError, match="'z'"):
            module.options["z"]


def test_a_value_that_a_running_module_loses_is_told():
    held = Held()
    held.mean.value = jnp.zeros(2)
    held(jnp.ones(2))
    np.testing.assert_array_equal(held.mean.value, [1, 1])
    with pytest.warns(UserWarning, match="weight 'mean' gets a value while its module runs"):
        jax.jit(lambda held, x: held(x))(held, jnp.ones(2))


def test_a_dim_is_a_static_attribute():
    class Sized(Module):
        def __init__(self, size):
            super().__init__()
            self.size = size

        def __call__(self, x):
            return x

    module = Sized(Dim(2))
    assert module.size == 2 and isinstance(module.size, StaticDim)
    same, other = (jax.tree.structure(Sized(Dim(size))) for size in (2, "a"))
    assert jax.tree.structure(module) == same != other


@dataclasses.dataclass(frozen=True)
class Settings:
    size: int
    source: str = dataclasses.field(default="", compare=False)


def test_a_field_that_is_not_compared():
    model = Held()
    model.settings = Settings(3, "a")
    assert model.settings == Settings(3, "b") and Settings(3, "b") == model.settings
    assert model.settings != Settings(4, "a")
