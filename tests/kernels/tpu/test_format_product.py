"""Products with quantised weights as the TPU kernel computes them, on a CPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels.blocks import decode
from maxjax.kernels.format_product import in_blocks
from maxjax.kernels.packed_product import block_layout
from maxjax.kernels.tpu import format_product as tpu
from tests.kernels.gpu.test_format_product import made
from tests.kernels.packed_operands import blocks
from tests.models.quantizers import CASES

SIZES = [(48, 192), (384, 2048)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "tokens"),
    [  # by default every other format has one token, and the rest many
        pytest.param(case, tokens, id=f"{name}-{tokens}",
                     marks=[pytest.mark.extra] if number % 2 != is_many else [])
        for number, (name, case) in enumerate(CASES.items())
        for is_many, tokens in enumerate((1, 37))
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", SIZES)
def test_the_kernel(case, shape, tokens):
    layout, stacks, values = made(case, 2, shape)
    x = jnp.asarray(np.random.default_rng(9).normal(size=(tokens, shape[1])), jnp.bfloat16)
    if why := tpu.lacks(layout, x, stacks):
        assert "weights are in" in why, why
        return
    found = in_blocks(tpu, layout, jnp.float32, x, stacks, jnp.int32(1), interpret=True)
    expected = np.asarray(x, np.float64) @ values[1].T
    # Weights are rounded to bfloat16.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-8 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["gptq 4 order", "bitsandbytes fp4", "modelopt nvfp4"])
def test_devices_with_a_half_of_the_columns_each(name):
    layout, stacks, values = made(CASES[name], 1, (48, 256))
    x = jnp.asarray(np.random.default_rng(9).normal(size=(5, 256)), jnp.float32)
    total = 0
    for half in (slice(0, 128), slice(128, 256)):
        part = {}
        for one in layout.tensors:
            sizes = zip(one.axes, one.shape, strict=True)
            at = [slice(half.start * n // 256, half.stop * n // 256) if along == 1 else slice(None)
                  for along, n in sizes]  # fmt: skip
            part[one.name] = stacks[one.name][(slice(None), *at)]
        assert not tpu.lacks(layout, x[:, half], part)
        total += in_blocks(tpu, layout, jnp.float32, x[:, half], part, jnp.int32(0), interpret=True)
    expected = np.asarray(x, np.float64) @ values[0].T
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("bitsandbytes nf4", (48, 96), "a weight of 48 x 96 has incomplete words or groups"),
        ("pack-quantized 4", (48, 36), "a weight of 48 x 36 has incomplete words or groups"),
        ("bitsandbytes fp4", (1, 64), "a weight of 1 x 64 has one row of words"),
        ("awq", (8, 64), "a weight of 8 x 64 has one row of words"),
    ],
)
def test_weights_that_the_kernel_refuses(name, shape, why):
    layout, stacks, _ = made(CASES[name], 1, shape)
    x = jnp.zeros((1, shape[1]), jnp.bfloat16)
    assert tpu.lacks(layout, x, stacks) == why


@pytest.mark.parametrize(
    "name",
    [
        "fp8 blocks", "gptq 4", "awq", "pack-quantized 4 zero points", "mlx 4", "bitsandbytes nf4",
        "bitsandbytes fp4", "modelopt nvfp4", "compressed nvfp4", "gptq 4 order", "pack-quantized 4 order",
    ],
)  # fmt: skip
def test_exact_in_float32(name):
    layout, stacks, values = made(CASES[name], 3, (384, 2048))
    x = jnp.asarray(np.random.default_rng(9).normal(size=(4, 16, 2048)), jnp.float32)
    owner = jnp.asarray([2, 0, -1, 2], jnp.int32)
    assert not tpu.lacks(layout, x, stacks)
    found = tpu.kernel(layout, jnp.float32, x, stacks, owner, interpret=True)
    for i in (0, 1, 3):
        expected = np.asarray(x[i], np.float64) @ values[owner[i]].T
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "shape",
    [
        (8, 32),
        (96, 2880),  # gpt-oss: registers do not end where blocks end
        (384, 8192),  # several tiles of columns
        (1536, 32),  # with the rows last in memory
        (40, 6144),  # one tile of 192 blocks
    ],
)
def test_blocks_of_mxfp4(shape):
    stacks = np.stack([blocks("MXFP4", *shape, seed=i) for i in range(3)])
    stacks[:, 0, ::17] = 252  # the largest scales for which the weights are finite in float32
    layout, tensors = block_layout("MXFP4", stacks), {"blocks": jnp.asarray(stacks)}
    values = np.asarray(decode("MXFP4", stacks), np.float64)
    x = jnp.asarray(np.random.default_rng(9).normal(size=(4, 16, shape[1])), jnp.float32) * 2.0**-9
    owner = jnp.asarray([2, 0, -1, 2], jnp.int32)
    assert not tpu.lacks(layout, x, tensors)
    found = np.asarray(tpu.kernel(layout, jnp.float32, x, tensors, owner, interpret=True))
    for i in (0, 1, 3):
        expected = np.asarray(x[i], np.float64) @ values[owner[i]].T
        for rows in (slice(0, 1), slice(1, None)):
            most = 1e-5 * np.abs(expected[:, rows]).max()
            np.testing.assert_allclose(found[i][:, rows], expected[:, rows], rtol=0, atol=most)


def test_blocks_of_other_encodings_are_refused():
    stacks = np.zeros((1, 8, 34), np.uint8)
    x = jnp.zeros((1, 32))
    assert "Q8_0" in tpu.lacks(block_layout("Q8_0", stacks), x, {"blocks": stacks})
