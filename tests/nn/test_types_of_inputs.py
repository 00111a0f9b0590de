"""Layers and the types of their inputs: integers are refused where results would be rounded to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import nn
from maxjax.graph import DeviceRef, ShardingStrategy
from maxjax.nn.norm.batch_norm import BatchNorm1d
from tests.nn.layers import call, filled, random

CPU = DeviceRef.CPU()


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LayerNorm(4, [CPU], "float32"),
        lambda: nn.RMSNorm(4, "float32"),
        lambda: nn.ConstantLayerNorm(4),
        lambda: nn.GroupNorm(2, 4),
        lambda: BatchNorm1d(4),
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "int32", "bool"])
def test_norms_take_floats(layer, dtype):
    model = maxjax.init(layer(), jax.random.key(0))
    with pytest.raises(ValueError, match=f"takes floats, not {dtype}: cast the input"):
        model(jnp.ones((2, 4), dtype))
    assert model(jnp.ones((2, 4), jnp.bfloat16)).dtype == jnp.bfloat16


def test_rope_takes_floats():
    rope = nn.RotaryEmbedding(8, 2, 1e4, 8)
    with pytest.raises(ValueError, match="rope takes floats, not int32"):
        rope(jnp.ones((1, 3, 2, 4), jnp.int32))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_states_have_the_wider_type(kind, dtype):
    layer, _ = filled(kind(3, 4))
    x = random(2, 5, 3).astype(dtype)
    found, _ = call(layer, x)
    expected, _ = call(layer, x.astype("float32"))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=2e-2 if dtype == "bfloat16" else 2e-3)


def test_parts_of_a_stacked_layer_know_their_rows():
    """Three heads do not divide evenly between two devices."""
    layer = nn.StackedLinear(4, [6, 6, 6], ["q", "k", "v"], "float32", CPU, stacked=True)
    layer.load_state_dict({"weight": np.arange(72, dtype=np.float32).reshape(18, 4)})
    layer.sharding_strategy = ShardingStrategy.stacked_qkv(2, 3, 2)
    parts = layer.shard([CPU, DeviceRef.CPU(1)])
    x = jnp.ones((1, 4))
    together = [
        jnp.concatenate([part.split_projections(x)[i] for part in parts], -1) for i in range(3)
    ]
    for found, expected in zip(together, layer.split_projections(x), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert [part.out_dims for part in parts] == [(4, 4, 4), (2, 2, 2)]
