"""Products with weights in Hugging Face's formats as the GPU kernel computes them, on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels.format_product import in_blocks
from maxjax.kernels.gpu import format_product as gpu
from maxjax.kernels.tpu import format_product as tpu
from tests.models.quantizers import CASES
from tests.nn.test_quantized import layer_of

# Sizes that neither tiles nor groups divide.
OUT, IN = 48, 96
NOT_BY_ELEMENT = ["bitnet online"]  # each weight depends on all of them


def made(case, count, shape=(OUT, IN)):
    """(the layout, stacks of the tensors of ``count`` weights, the weights)."""
    layers, values = [], []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        found, value = case.quantise(rng.normal(0, 1, shape), rng)
        layers.append(layer_of(case.config, {k: np.asarray(v) for k, v in found.items()}, shape))
        values.append(value)
    operands = [layer.operand().each(jnp.asarray).tensors for layer in layers]
    return layers[0].layout, jax.tree.map(lambda *a: jnp.stack(a), *operands), np.stack(values)


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("tokens", [1, 37])
def test_the_kernel(case, tokens):
    layout, stacks, values = made(case, 2)
    x = jnp.asarray(np.random.default_rng(9).normal(size=(tokens, IN)), jnp.bfloat16)
    if why := gpu.lacks(layout, x, stacks):
        assert layout.format == "ternary" or layout.format == "mxfp4" or "bits" in why
        return
    found = in_blocks(gpu, layout, jnp.float32, x, stacks, jnp.int32(1), interpret=True)
    expected = np.asarray(x, np.float64) @ values[1].T
    # Weights are rounded to bfloat16.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-8 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq 4 order", "bitsandbytes nf4"])
def test_a_weight_alone(name):
    """It gives what it gives in a stack."""
    layout, stacks, _ = made(CASES[name], 2)
    x = jnp.asarray(np.random.default_rng(9).normal(size=(5, IN)), jnp.bfloat16)
    found = in_blocks(gpu, layout, jnp.float32, x, stacks, jnp.int32(1), interpret=True)
    alone = {name: a[1] for name, a in stacks.items()}
    again = in_blocks(gpu, layout, jnp.float32, x, alone, jnp.int32(0), interpret=True)
    np.testing.assert_array_equal(found, again)


@pytest.mark.parametrize("name", ["bitsandbytes nf4", "bitsandbytes fp4"])
def test_blocks_of_bitsandbytes_within_rows(name):
    layout, stacks, values = made(CASES[name], 2, (48, 192))
    assert layout.tensors[0].shape == (48, 96)
    x = jnp.asarray(np.random.default_rng(9).normal(size=(5, 192)), jnp.float32)
    found = in_blocks(gpu, layout, jnp.float32, x, stacks, jnp.int32(1), interpret=True)
    expected = np.asarray(x, np.float64) @ values[1].T
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq 4 order", "awq", "bitsandbytes nf4"])
def test_exact_in_float32(name):
    layout, stacks, values = made(CASES[name], 3)
    x = jnp.asarray(np.random.default_rng(9).normal(size=(4, 16, IN)), jnp.float32)
    owner = jnp.asarray([2, 0, -1, 2], jnp.int32)
    found = gpu.kernel(layout, jnp.float32, x, stacks, owner, interpret=True)
    for i in (0, 1, 3):
        expected = np.asarray(x[i], np.float64) @ values[owner[i]].T
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kernel", [gpu.kernel, tpu.kernel])
def test_tensors_at_different_places_of_their_stacks(kernel):
    """As the finer blocks of one layer's experts beside the numbers of all layers' experts."""
    layout, stacks, values = made(CASES["fp8 blocks"], 3, (128, 256))
    first, *small = (one.name for one in layout.tensors)
    x = jnp.asarray(np.random.default_rng(9).normal(size=(2, 16, 256)), jnp.float32)
    tensors = {first: stacks[first], **{name: stacks[name][1:] for name in small}}
    places = jnp.asarray([1, *(0 for _ in small)], jnp.int32)
    owner = jnp.asarray([1, 0], jnp.int32)
    found = kernel(layout, jnp.float32, x, tensors, owner, interpret=True, places=places)
    for i in range(2):
        expected = np.asarray(x[i], np.float64) @ values[1 + owner[i]].T
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
