"""The norms against float64 and torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.graph import DeviceRef, ops
from maxjax.nn.norm import ConstantLayerNorm, GroupNorm, LayerNorm, RMSNorm
from tests.nn.layers import call
from tests.oracles.recorded import recorded, torch, transformers

CPU = DeviceRef.CPU()


def filled(layer, seed=0):
    rng = np.random.default_rng(seed)
    values = {
        name: (rng.standard_normal([int(d) for d in w.shape]) + 1).astype(w.dtype.np)
        for name, w in layer.raw_state_dict().items()
    }
    layer.load_state_dict(values)
    return {name: value.astype(np.float64) for name, value in values.items()}


def layer_norm(x, weight, bias=0.0, eps=1e-5):
    x = np.asarray(x, np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def rms_norm(x, weight, eps=1e-6):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


# --- LayerNorm ------------------------------------------------------------------------------


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 1e-12, 0.1])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 8)])
def test_layer_norm(use_bias, eps, shape):
    layer = LayerNorm(8, [CPU], "float32", eps, use_bias)
    values = filled(layer)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32) * 3 + 1
    expected = layer_norm(x, values["weight"], values.get("bias", 0.0), eps)
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-5)


def test_layer_norm_as_torch_has_it():
    layer = LayerNorm(64, devices=[CPU], dtype="float32", eps=1e-12)
    values = filled(layer)
    x = np.random.default_rng(2).standard_normal((5, 64)).astype(np.float32)

    def theirs():
        parts = (torch.tensor(values[n], dtype=torch.float32) for n in ("weight", "bias"))
        return torch.nn.functional.layer_norm(torch.tensor(x), (64,), *parts, eps=1e-12).numpy()

    np.testing.assert_allclose(call(layer, x), recorded(theirs), rtol=1e-5, atol=1e-5)


def test_a_large_mean_does_not_cancel():
    layer = LayerNorm(256, [CPU], "float32", use_bias=False)
    values = filled(layer)
    x = (np.random.default_rng(3).standard_normal((4, 256)) + 1000).astype(np.float32)
    # E[x²] - E[x]² would be off by more than 1 per cent here.
    np.testing.assert_allclose(
        call(layer, x), layer_norm(x, values["weight"]), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [lambda d: LayerNorm(64, [CPU], d), lambda d: RMSNorm(64, d)])
def test_computed_in_float32_and_given_back_as_it_came(weights, make):
    layer = make(weights)
    values = filled(layer)
    x = jnp.asarray(np.random.default_rng(4).standard_normal((6, 64)) * 5, jnp.bfloat16)
    found = layer(x)
    assert found.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    oracle = layer_norm(wide, **values) if "bias" in values else rms_norm(wide, **values)
    # One rounding to 8 bits, not several.
    np.testing.assert_allclose(np.asarray(found, np.float64), oracle, rtol=2**-8, atol=1e-6)


def test_compute_dtype_is_used():
    x = jnp.asarray(np.random.default_rng(5).standard_normal((6, 64)), jnp.bfloat16)
    exact, narrow = (
        LayerNorm(64, [CPU], "bfloat16"),
        LayerNorm(64, [CPU], "bfloat16", compute_dtype="bfloat16"),
    )
    values = filled(exact)
    filled(narrow)
    oracle = layer_norm(np.asarray(x, np.float64), **values)
    error = [np.abs(np.asarray(layer(x), np.float64) - oracle).mean() for layer in (exact, narrow)]
    assert error[0] < error[1]


def test_layer_norm_names_and_attributes_are_those_of_max():
    layer = LayerNorm(4, [CPU], DType.bfloat16)
    assert {n: tuple(w.shape) for n, w in layer.raw_state_dict().items()} == {
        "weight": (4,),
        "bias": (4,),
    }
    assert (layer.dim, layer.eps, layer.dtype, list(layer.devices)) == (
        4,
        1e-5,
        DType.bfloat16,
        [CPU],
    )
    without = LayerNorm(4, [CPU], DType.float32, use_bias=False)
    assert without.bias is None and list(without.raw_state_dict()) == ["weight"]


# --- RMSNorm --------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(8,), (2, 3, 8)])
def test_rms_norm(offset, shape):
    layer = RMSNorm(8, "float32", 1e-5, offset)
    values = filled(layer)
    x = np.random.default_rng(6).standard_normal(shape).astype(np.float32) * 3
    expected = rms_norm(x, values["weight"] + offset, 1e-5)
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm_multiplies_before_or_after_rounding():
    x = np.random.default_rng(7).standard_normal((16, 64)).astype(np.float32)
    after = RMSNorm(64, "bfloat16", eps=1e-6, multiply_before_cast=False)
    values = filled(after)

    def theirs():
        oracle = transformers.models.llama.modeling_llama.LlamaRMSNorm(64, eps=1e-6)
        oracle = oracle.to(torch.bfloat16)
        oracle.weight.data = torch.tensor(values["weight"]).to(torch.bfloat16)
        return oracle(torch.tensor(x).to(torch.bfloat16)).float().detach().numpy()

    expected = recorded(theirs)
    found = after(jnp.asarray(x, jnp.bfloat16)).astype(jnp.float32)
    assert np.mean(np.asarray(found) == expected) > 0.99  # the sums may differ in the last bit
    np.testing.assert_allclose(found, expected, rtol=2**-6)
    before = RMSNorm(64, "bfloat16", eps=1e-6)
    filled(before)
    assert np.any(np.asarray(before(jnp.asarray(x, jnp.bfloat16)).astype(jnp.float32)) != expected)


def test_rms_norm_weight_is_on_the_cpu():
    assert RMSNorm(4, "float32").weight.device == CPU


# --- both -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [LayerNorm(4, [CPU], "float32"), RMSNorm(4, "float32")])
@pytest.mark.parametrize("shape", [(3, 5), (), (4, 1)])
def test_another_last_axis_is_refused_with_both_sizes(layer, shape):
    with pytest.raises(ValueError, match="4") as caught:
        layer(jnp.ones(shape))
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize(
    "layer", [LayerNorm(8, [CPU], "float32"), RMSNorm(8, "float32", weight_offset=1.0)]
)
def test_initialised_to_the_identity_of_normal_input(layer):
    key = jax.random.key(0)
    layer.load_state_dict(
        {n: layer.initializer(n)(key, (8,), jnp.float32) for n in layer.raw_state_dict()}
    )
    x = np.array([1.0, -1.0] * 4, np.float32)
    np.testing.assert_allclose(call(layer, x), x, rtol=1e-4)


# --- ConstantLayerNorm and GroupNorm --------------------------------------------------------


@pytest.mark.parametrize(("dims", "shape"), [(8, (3, 8)), ((2, 4), (3, 2, 4)), ((8,), (8,))])
def test_constant_layer_norm(dims, shape):
    x = np.random.default_rng(8).standard_normal(shape).astype(np.float32) * 3 + 1
    axes = (dims,) if isinstance(dims, int) else dims
    expected = recorded(
        lambda: torch.nn.functional.layer_norm(torch.tensor(x), axes, eps=1e-3).numpy()
    )
    layer = ConstantLayerNorm(dims, CPU, "float32", 1e-3)
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-5)
    assert not layer.raw_state_dict()
    assert layer(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.sampled
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 5), (2, 6, 4, 3), (0, 6, 4)])
def test_group_norm(shape, groups, affine):
    layer = GroupNorm(groups, 6, 1e-3, affine, CPU)
    values = filled(layer)
    assert list(values) == (["weight", "bias"] if affine else [])
    x = np.random.default_rng(9).standard_normal(shape).astype(np.float32) * 3 + 1

    def theirs():
        parts = (torch.tensor(values[n], dtype=torch.float32) for n in values)
        return torch.nn.functional.group_norm(torch.tensor(x), groups, *parts, eps=1e-3).numpy()

    expected = recorded(theirs)
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-4, atol=1e-5)


def test_group_norm_refuses():
    for groups in (3, 0):
        with pytest.raises(ValueError, match=f"4 is not a multiple of num_groups {groups}"):
            GroupNorm(groups, 4)
    with pytest.raises(ValueError, match="0 groups do not divide"):
        ops.group_norm(jnp.ones((1, 4)), jnp.ones(4), jnp.ones(4), 0, 1e-5)
    with pytest.raises(ValueError, match="4 channels"):
        GroupNorm(2, 4)(jnp.ones((2, 7, 4)))
    with pytest.raises(ValueError, match=r"\(8,\)"):
        ConstantLayerNorm(8, CPU, "float32")(jnp.ones((2, 7)))
