"""Linear against float64, torch and the facts recorded from MAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.graph import DeviceRef, TensorValue, Weight
from maxjax.nn.linear import MLP, ColumnParallelLinear, FusedMLP, Linear, add_bias
from maxjax.nn.product import linear
from maxjax.nn.stacked_linear import StackedLinear
from tests.nn.layers import call
from tests.oracles.recorded import recorded, torch

CPU = DeviceRef.CPU()


def loaded(seed=0, in_dim=6, out_dim=4, dtype="float32", **options):
    rng = np.random.default_rng(seed)
    layer = Linear(in_dim, out_dim, dtype, CPU, **options)
    values = {
        name: jnp.asarray(rng.standard_normal([int(d) for d in w.shape]), w.dtype.np)
        for name, w in layer.raw_state_dict().items()
    }
    layer.load_state_dict(values)
    return layer, {name: np.asarray(value, np.float64) for name, value in values.items()}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (0, 6)])
def test_is_x_wt_plus_bias(has_bias, shape):
    layer, values = loaded(has_bias=has_bias)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    expected = x.astype(np.float64) @ values["weight"].T + values.get("bias", 0.0)
    found = layer(jnp.asarray(x))
    assert found.shape == (*shape[:-1], 4) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_as_torch_has_it():
    x = np.random.default_rng(2).standard_normal((5, 6)).astype(np.float32)

    def theirs():
        torch.manual_seed(0)
        oracle = torch.nn.Linear(6, 4)
        state = {k: v.detach().numpy() for k, v in oracle.state_dict().items()}
        return state, oracle(torch.tensor(x)).detach().numpy()

    state, expected = recorded(theirs)
    layer = Linear(6, 4, "float32", CPU, has_bias=True)
    layer.load_state_dict(state)
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-5)


def test_names_are_those_of_max():
    def names(**options):
        return list(Linear(3, 2, "float32", CPU, **options).raw_state_dict())

    assert names() == ["weight"]
    assert names(has_bias=True) == ["weight", "bias"]
    assert names(has_bias=True, name="foo") == ["foo.weight", "foo.bias"]
    assert names(name="foo.bar") == ["foo.bar.weight"]
    assert names(has_bias=True, is_sharding=True) == []


def test_scales_are_none_as_of_a_layer_of_max_without_them():
    layer = Linear(3, 2)
    assert (layer.input_scale, layer.weight_scale, layer.weight_scale_2) == (None, None, None)
    layer.weight_scale = Weight("weight_scale", "float32", (), CPU)  # MAX's files assign one
    assert list(layer.raw_state_dict()) == ["weight", "weight_scale"]


def test_arguments_are_in_the_order_of_max():
    layer = Linear(3, 2, DType.bfloat16, CPU, True, None, None, "n", 0.5, False)
    assert layer.bias.name == "n.bias" and layer.clip_weight == 0.5
    assert [tuple(w.shape) for w in (layer.weight, layer.bias)] == [(2, 3), (2,)]
    assert {w.dtype for w in (layer.weight, layer.bias)} == {DType.bfloat16}
    assert Linear(3, 2, "float32", CPU).bias is None


def test_clip_weight_leaves_the_bias_alone():
    # Recorded from MAX 26.7.
    layer = Linear(3, 2, "float32", CPU, clip_weight=1.0, has_bias=True)
    layer.load_state_dict(
        {
            "weight": np.array([[1, -2, 3], [0.5, 0.1, -9]], np.float32),
            "bias": np.array([10, -10], np.float32),
        }
    )
    found = layer(jnp.eye(3))
    np.testing.assert_allclose(found, [[11, -9.5], [9, -9.9], [11, -11]], rtol=1e-6)
    assert float(layer.state_dict()["weight"].max()) == 3.0  # clipped where it is used


@pytest.mark.parametrize(
    "weight, x, result",
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "bfloat16", "float32"),
    ],
)
def test_the_wider_float_wins(weight, x, result):
    layer, values = loaded(dtype=weight, has_bias=True)
    found = layer(jnp.ones((2, 6), DType.of(x).np))
    assert DType.of(found.dtype) is DType.of(result)
    expected = values["weight"].sum(1) + values["bias"]
    np.testing.assert_allclose(found[0].astype(jnp.float32), expected, rtol=2e-2, atol=2e-2)


def test_a_tensor_value_of_integers_meets_no_float():
    layer, _ = loaded()
    for one in (
        layer,
        MLP("float32", None, 6, 4, [CPU]),
        FusedMLP("float32", 6, 4, [CPU]),
        StackedLinear(6, [2, 1], ["a", "b"], "float32", CPU),
        StackedLinear(6, [2, 1], ["a", "b"], "float32", CPU, stacked=True),
        lambda x: linear(x, layer.weight),
    ):
        with pytest.raises(ValueError, match="unsafe cast: int32 and float32"):
            one(TensorValue(jnp.ones((2, 6), jnp.int32)))


def test_a_wider_bias_is_rounded_once_and_at_the_end():
    y = jnp.asarray([[1.0, 256.0]], jnp.bfloat16)
    bias = jnp.asarray([2**-9 + 2**-10, 0.5 + 2**-9], jnp.float32)
    found = add_bias(y, bias)
    assert found.dtype == jnp.bfloat16
    exact = np.asarray(y, np.float32) + np.asarray(bias)
    np.testing.assert_array_equal(np.asarray(found), exact.astype(jnp.bfloat16))


def test_lazy_layers_have_shapes():
    layer = Linear(6, 4, "float32", CPU, has_bias=True)
    out = jax.eval_shape(lambda m, x: m(x), layer, jnp.zeros((2, 6)))
    assert out.shape == (2, 4)
    with pytest.raises(ValueError, match="has no value"):
        layer(jnp.zeros((2, 6)))


def test_refusals():
    layer, _ = loaded()
    with pytest.raises(ValueError, match=r"5.*6|6.*5"):
        layer(jnp.ones((2, 5)))
    with pytest.raises(NotImplementedError, match="quant_config"):
        Linear(3, 2, "float32", CPU, quant_config=object())


def test_initializers():
    layer = Linear(400, 300, "float32", CPU, has_bias=True)
    key = jax.random.key(0)
    weight = layer.initializer("weight")(key, (300, 400), jnp.float32)
    assert abs(float(weight.std()) - 400**-0.5) < 0.002  # fan-in is the last axis
    assert not layer.initializer("bias")(key, (300,), jnp.float32).any()
    assert not layer.initializer("foo.bias")(key, (300,), jnp.float32).any()


@pytest.mark.parametrize("count", [1, 2])
def test_a_head_of_several_devices_gives_each_of_them_all_results(count):
    head = ColumnParallelLinear(3, 5, "float32", [CPU] * count)
    weight = np.arange(15.0, dtype=np.float32).reshape(5, 3)
    head.load_state_dict({"weight": weight})
    x = np.eye(3, dtype=np.float32)[:2]
    found = head([TensorValue(jnp.asarray(x))] * count, [None] * count)
    assert len(found) == count
    for one in found:
        np.testing.assert_array_equal(one.value, x @ weight.T)
    with pytest.raises(ValueError, match="devices"):
        head([x] * 3, [None] * 3)
