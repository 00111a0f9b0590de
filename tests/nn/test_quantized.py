"""Formats of quantised weights, and the linear layer that has one; the oracle is NumPy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import maxjax
from maxjax.dtype import DType
from maxjax.graph import DeviceRef, ShardingStrategy
from maxjax.kernels.formats import FORMATS, floats, spread, unpacked
from maxjax.models.quantized import Quantization
from maxjax.nn.layer import LayerList
from maxjax.nn.quantized import Exactly, QuantizedLinear, QuantLayout, QuantState, QuantTensor
from tests.models.quantized_goldens import goldens
from tests.models.quantizers import CASES, compressed_scaled, gptq

OUT, IN = 48, 96  # neither is a multiple of a block of 64


def made(case, seed=0, shape=(OUT, IN), bias=False):
    """(the loaded layer, its tensors, the weight that they stand for)."""
    rng = np.random.default_rng(seed)
    found, values = case.quantise(rng.normal(0, 1, shape), rng)
    found = {name: np.asarray(value) for name, value in found.items()}
    if bias:
        found["bias"] = rng.normal(size=shape[0]).astype(np.float32)
    return layer_of(case.config, found, shape), found, values


def layer_of(config, tensors, shape):
    """The layer of a configuration with these tensors."""
    kinds = {name: (DType.of(value.dtype), value.shape) for name, value in tensors.items()}
    quantization = Quantization.of({"quantization_config": config})
    layout = quantization.layout_for("model.layers.0.mlp.up_proj")(*shape, kinds)
    layer = QuantizedLinear(layout, DeviceRef.CPU(), has_bias="bias" in tensors)
    layer.load_state_dict(tensors)
    return layer


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_weight_is_dequantised(case):
    layer, found, values = made(case)
    weight = np.asarray(layer.weight)
    assert weight.dtype == np.float32 and layer.weight.shape == weight.shape == (OUT, IN)
    np.testing.assert_array_equal(layer.weight.T, weight.T)
    np.testing.assert_allclose(weight, values, rtol=2e-6, atol=2e-6 * np.abs(values).max())
    state = layer.state_dict()
    assert state.keys() == found.keys()
    for name, array in state.items():
        # JAX holds integers of 64 bits in 32.
        kept = np.asarray(array).astype(found[name].dtype)
        assert kept.shape == found[name].shape and kept.tobytes() == found[name].tobytes()


GOLDEN = goldens()


@pytest.mark.parametrize("name", GOLDEN)
def test_the_libraries_of_the_formats_dequantise_alike(name):
    """Files of bitsandbytes, compressed-tensors, transformers, AutoGPTQ and AutoAWQ."""
    tensors, values = GOLDEN[name]
    config = gptq(8, desc_act=True).config if name == "gptq 8" else CASES[name].config
    layer = layer_of(config, tensors, values.shape)
    weight = np.asarray(layer.dequantise())
    if name == "awq":  # AutoAWQ computes in float16
        weight = weight.astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(weight, values, rtol=1e-6, atol=1e-6 * np.abs(values).max())
    for key, array in layer.state_dict().items():
        assert np.asarray(array).astype(tensors[key].dtype).tobytes() == tensors[key].tobytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["fp8 blocks", "gptq 4 order", "awq", "bitsandbytes nf4"])
def test_the_layer_is_linear(name):
    layer, found, values = made(CASES[name], bias=True)
    x = np.random.default_rng(1).normal(size=(3, 5, IN)).astype(np.float32)
    expected = x.astype(np.float64) @ values.T + found["bias"]
    run = jax.jit(lambda layer, x: layer(x))
    np.testing.assert_allclose(run(layer, x), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(layer(x), run(layer, x), rtol=0, atol=1e-5)
    both = jax.jit(lambda layer, x: (jax.vmap(layer)(x), jax.grad(lambda x: layer(x).sum())(x)))
    mapped, gradient = both(layer, x)
    np.testing.assert_allclose(mapped, run(layer, x), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="cannot multiply"):
        layer(x[..., 1:])
    # Gradients reach the input.
    expected = np.broadcast_to(values.sum(0), x.shape)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    # Results have the dtype of the input.
    low = run(layer, jnp.asarray(x, jnp.bfloat16))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), run(layer, x), rtol=0.02, atol=0.2)


def near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["fp8 blocks", "pack-quantized 4 order", "bitsandbytes nf4"])
def test_equal_layers_are_stacked(name):
    layers = [made(CASES[name], seed, (IN, IN))[0] for seed in range(3)]
    values = [np.asarray(layer.dequantise()) for layer in layers]
    states = [layer.state_dict() for layer in layers]
    stack = LayerList(layers).stack()
    assert len(jax.tree.leaves(stack)) == len(states[0])
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, IN)).astype(np.float32))
    found = jax.jit(lambda stack, x: stack(x))(stack, x)
    expected = np.asarray(x)
    for weight in values:
        expected = expected @ weight.T
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    whole = stack.state_dict()
    for i, state in enumerate(states):
        for key, array in state.items():
            assert np.asarray(whole[f"{i}.{key}"]).tobytes() == np.asarray(array).tobytes()


def test_mxfp4_of_gpt_oss():
    """Blocks of 32, two numbers in a byte; scales are powers of two, also the smallest and largest."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 4, 2, 16)).astype(np.uint8)
    scales = rng.integers(90, 160, (3, 4, 2)).astype(np.uint8)
    scales[0, 0] = [2, 250]  # below, numbers are subnormal, which XLA may flush
    weight = FORMATS["mxfp4"](
        {"blocks": jnp.asarray(blocks), "scales": jnp.asarray(scales)}, (4, 64)
    )
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    levels = np.array(levels + [-a for a in levels])
    expected = np.zeros((3, 4, 2, 32))
    expected[..., 0::2], expected[..., 1::2] = levels[blocks & 15], levels[blocks >> 4]
    expected *= 2.0 ** (scales[..., None].astype(np.float64) - 127)
    np.testing.assert_array_equal(weight, expected.reshape(3, 4, 64).astype(np.float32))
    one = FORMATS["mxfp4"]({"blocks": blocks[1], "scales": scales[1]}, (4, 64))
    np.testing.assert_array_equal(one, weight[1])


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8])
def test_every_number_of_8_bits(dtype):
    values = np.arange(256, dtype=np.uint8).view(dtype)
    expected = values.astype(np.float32)
    np.testing.assert_array_equal(floats(jnp.asarray(values)), expected)
    np.testing.assert_array_equal(jax.jit(floats)(jnp.asarray(values)), expected)


def test_words_of_every_width():
    rng = np.random.default_rng(0)
    for bits in (2, 3, 4, 5, 8):
        each = 32 // bits
        numbers = rng.integers(0, 2**bits, (3, 2 * each))
        words = np.zeros((3, 2), np.uint64)
        for i in range(each):
            words |= numbers.reshape(3, 2, each)[..., i].astype(np.uint64) << np.uint64(bits * i)
        words = words.astype(np.uint32).view(np.int32)
        run = jax.jit(unpacked, static_argnums=(1, 2, 3))
        np.testing.assert_array_equal(run(words, bits, -1, 2 * each - 1), numbers[:, :-1])
        np.testing.assert_array_equal(run(words.T, bits, 0, 2 * each), numbers.T)


def test_values_of_blocks_are_spread():
    assert spread(jnp.float32(3), (5, 7)).shape == (1, 1)
    assert spread(jnp.ones(5), (5, 7)).shape == (5, 1)
    blocks = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    found = spread(blocks, (5, 7), (3, 3))
    expected = np.repeat(np.repeat(blocks, 3, 0), 3, 1)[:5, :7]
    np.testing.assert_array_equal(found, expected)


def test_a_weight_with_more_bytes_of_scales_than_of_numbers():
    layer, _, values = made(compressed_scaled("int", "group", (1, 2)), shape=(4, 6))
    x = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    np.testing.assert_allclose(layer(jnp.asarray(x)), x @ values.T, rtol=0, atol=1e-5)
    assert layer(jnp.zeros((0, 6))).shape == (0, 4)


def test_values_that_a_file_must_have():
    tensors = (
        QuantTensor("weight", DType.int8, (2, 3), (0, 1)),
        QuantTensor("weight_scale", DType.float32, (2, 1), (0, None)),
        QuantTensor("shape", DType.int64, (2,), (None,), Exactly((2, 3))),
    )
    layer = QuantizedLinear(QuantLayout("scaled", 2, 3, tensors), DeviceRef.CPU())
    state = {"weight": np.ones((2, 3), np.int8), "weight_scale": np.ones((2, 1), np.float32)}
    layer.load_state_dict({**state, "shape": np.array([2, 3])})
    with pytest.raises(ValueError, match=r"'shape' must be \[2, 3\], not \[3, 2\]"):
        layer.load_state_dict({**state, "shape": np.array([3, 2])})
    with pytest.raises(ValueError, match="shape"):
        layer.load_state_dict({**state, "shape": np.array([2, 3, 1])})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"{", "not a JSON object"), (b"[1]", "not a JSON object"), (b"\xff", "not a JSON object"),
        (b'{"quant_type": "fp4"}', "quant_type 'nf4', not 'fp4'"),
        (b'{"quant_type": "nf4", "nested_offset": "a"}', "nested_offset 'a'"),
        (b'{"quant_type": "nf4", "nested_offset": NaN}', "nested_offset nan"),
        (b"[" * 200, "not a JSON object"),
    ],
)  # fmt: skip
def test_settings_of_bitsandbytes_that_are_wrong(text, what):
    form = QuantState((("quant_type", "nf4"),))
    with pytest.raises(ValueError, match=what):
        form.to_stored("state", np.frombuffer(text, np.uint8))
    assert not form.fits(DType.uint8, (253,)) and not form.fits(DType.int32, (9,))


@pytest.mark.parametrize("sizes", [{"model": 2}, {"fsdp": 2, "model": 2}])
def test_a_mesh_splits_each_tensor_as_the_weight(sizes):
    layer, _, values = made(CASES["gptq 4"], shape=(64, 128))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 128)).astype(np.float32))
    expected = np.asarray(x) @ values.T
    outer = Outer(layer)
    outer.to(maxjax.make_mesh(**sizes))
    layer = outer.inner
    assert layer.weight.split_over(1) == ("model",)
    assert layer.scales.sharding.spec[0] == layer.qweight.sharding.spec[0] == "model"
    assert layer.weight.sharding.spec[1] == "model"
    found = jax.jit(lambda outer, x: outer(x))(outer, x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(layer.dequantise(), values, rtol=1e-5, atol=1e-6)


class Outer(maxjax.nn.Module):
    """A Module with a sharding rule for the weight of the layer that it holds."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)

    def sharding_rules(self):
        return {"inner.weight": ShardingStrategy.columnwise(1)}


def test_8_bit_scales_that_are_powers_of_two():
    tensors = (
        QuantTensor("weight", DType.float8_e4m3fn, (2, 4), (0, 1)),
        QuantTensor("weight_scale_inv", DType.float8_e8m0fnu, (1, 2), (0, 1)),
    )
    options = (("scale", "weight_scale_inv"), ("block", (2, 2)))
    layer = QuantizedLinear(QuantLayout("scaled", 2, 4, tensors, options), DeviceRef.CPU())
    weight = np.ones((2, 4), ml_dtypes.float8_e4m3fn)
    scales = np.array([[0.25, 8]], np.float32).astype(ml_dtypes.float8_e8m0fnu)
    layer.load_state_dict({"weight": weight, "weight_scale_inv": scales})
    np.testing.assert_array_equal(layer.dequantise()[0], [0.25, 0.25, 8, 8])
    # Its own state dict, which has the floats of the file, is a registry of weights.
    program = layer.compile(jax.ShapeDtypeStruct((1, 4), jnp.float32), weights=layer.state_dict())
    np.testing.assert_array_equal(program(jnp.ones((1, 4))), layer(jnp.ones((1, 4))))
