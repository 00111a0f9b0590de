"""MLP against float64 in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import init, nn
from maxjax.graph import ShardingStrategy, TensorValue
from tests.contracts.references import mlp, silu
from tests.nn.layers import CPU, call, filled, random, same_everywhere


def test_names_in_max_order():
    layer = nn.MLP("float32", None, 6, 8, [CPU], nn.Linear, True)
    names = ["gate_proj", "down_proj", "up_proj"]
    assert list(layer.raw_state_dict()) == [f"{n}.{w}" for n in names for w in ("weight", "bias")]


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("relu", lambda v: np.maximum(v, 0)),
        ("tanh", np.tanh),
        ("sigmoid", lambda v: 1 / (1 + np.exp(-v))),
        ("gelu_tanh", lambda v: v / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (v + 0.044715 * v**3)))),
    ],
)
def test_activations(name, act):
    layer, w = filled(nn.MLP("float32", None, 6, 8, [CPU], activation_function=name))
    x = random(4, 6)
    np.testing.assert_allclose(call(layer, x), mlp(w, x, act), rtol=1e-5, atol=1e-5)


def test_unknown_activation_is_named():
    with pytest.raises(ValueError, match="nope"):
        nn.MLP("float32", None, 6, 8, [CPU], activation_function="nope")


def test_a_limit_cuts_off():
    layer, w = filled(nn.MLP("float32", None, 6, 8, [CPU], swiglu_limit=0.3), scale=2.0)
    x = random(4, 6)
    gate, up = (x @ w[f"{n}.weight"].T for n in ("gate_proj", "up_proj"))
    h = np.minimum(silu(gate), 0.3) * np.clip(up, -0.3, 0.3)
    expected = h @ w["down_proj.weight"].T
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-5)


def test_maps_of_another_class_get_what_the_mlp_got():
    seen = []

    class Spy(nn.Linear):
        def __call__(self, x):
            seen.append(type(x))
            return super().__call__(x)

    layer, _ = filled(nn.MLP("float32", None, 6, 8, [CPU], functools.partial(Spy, clip_weight=1.0)))
    layer(TensorValue(jnp.ones((2, 6))))
    assert seen == [TensorValue] * 3
    assert layer.up_proj.clip_weight == 1.0


def test_narrow_weights():
    layer, w = filled(nn.MLP("bfloat16", None, 6, 8, [CPU]))
    x = random(4, 6)
    y = same_everywhere(layer, jnp.asarray(x, jnp.bfloat16), rtol=0.1, atol=0.1)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float64), mlp(w, x), rtol=0.1, atol=0.1)


def test_for_its_parts_it_creates_no_linear_layers():
    layer = nn.MLP("float32", None, 6, 8, [CPU], is_sharding=True)
    assert not layer.raw_state_dict() and (layer.hidden_dim, layer.feed_forward_length) == (6, 8)
    layer.gate_proj = nn.Linear(6, 8)
    assert list(layer.raw_state_dict()) == ["gate_proj.weight"]


def test_results_of_shards_sum_to_the_result_with_its_bias_once():
    layer = init(nn.MLP("float32", None, 3, 8, [CPU], has_bias=True), jax.random.key(0))
    layer.down_proj.bias.value = jnp.array([1.0, 10.0, 100.0])
    x = jnp.ones((2, 3))
    want = layer(x)
    layer.sharding_strategy = ShardingStrategy.tensor_parallel(2)
    first, second = layer.shard([CPU, CPU])
    np.testing.assert_allclose(first(x) + second(x), want, rtol=1e-5)
    assert first.down_proj.bias is not None and second.down_proj.bias is None
