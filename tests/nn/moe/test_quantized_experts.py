"""Mixtures whose experts are quantised, on meshes; the reference is NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from maxjax.dtype import DType
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.kernels.blocks import decode
from maxjax.nn.moe.algorithms import GPU_ROWS, TPU_ROWS, in_blocks
from maxjax.nn.moe.expert_list import Experts
from tests.kernels.packed_operands import blocks
from tests.models.quantizers import CASES
from tests.nn.test_quantized import layer_of

SIZE, INNER, COUNT, CHOSEN = 128, 256, 8, 3
# Three blocks of MXFP4, which no mesh axis divides: experts are distributed whole over ``model``.
INNER_MXFP4 = 96
NAMES = ("gate_proj", "up_proj", "down_proj")
FORMATS = [
    "fp8 blocks", "pack-quantized 4 order", "gptq 4 order", "awq", "bitsandbytes nf4", "bitsandbytes int8",
    "mlx 4", "compressed nvfp4", "MXFP4",
]  # fmt: skip
MESHES = [
    {},
    {"model": 2},
    {"expert": 8},
    {"expert": 4, "model": 2},
    {"fsdp": 8},
    {"data": 2, "expert": 2},
    {"model": 8},  # parts of which blocks and groups have to be divided
]


def quantised_experts(name):
    """(experts of a format, their weights ``[experts][projection]`` in float64)."""
    if name == "MXFP4":
        return experts_in_blocks()
    rng = np.random.default_rng(0)
    experts = Experts(SIZE, INNER, COUNT, DType.float32, NAMES).unstack()
    shapes = [(INNER, SIZE), (INNER, SIZE), (SIZE, INNER)]
    state, values = {}, []
    for i in range(COUNT):
        values.append([])
        for projection, shape in zip(NAMES, shapes, strict=True):
            tensors, value = CASES[name].quantise(rng.normal(0, 0.1, shape), rng)
            tensors = {key: np.asarray(tensor) for key, tensor in tensors.items()}
            values[-1].append(np.asarray(value, np.float64))
            state |= {f"{i}.{projection}.{key}": tensor for key, tensor in tensors.items()}
            if i == 0:
                setattr(experts[0], projection, layer_of(CASES[name].config, tensors, shape))
    experts.restack()
    experts.load_state_dict(state)
    return experts, values


def experts_in_blocks():
    experts = Experts(SIZE, INNER_MXFP4, COUNT, DType.float32, NAMES)
    for holder in experts._mx_definition()[1]:
        dims = tuple(int(size) for size in holder.spec.dims)
        encoding = QuantizationEncoding.MXFP4
        holder.redeclare(DType.uint8, encoding.packed_shape(dims), encoding)
    state, values = {}, []
    for i in range(COUNT):
        values.append([])
        for k, projection in enumerate(NAMES):
            shape = (SIZE, INNER_MXFP4) if projection == NAMES[-1] else (INNER_MXFP4, SIZE)
            state[f"{i}.{projection}.weight"] = found = blocks("MXFP4", *shape, seed=3 * i + k) - 0
            # Scales of 2^-6 to 2^-3, so that results are neither large nor small.
            found[:, ::17] = 122 + found[:, ::17] % 4
            values[-1].append(np.asarray(decode("MXFP4", found), np.float64))
    experts.load_state_dict(state)
    return experts, values


def reference(values, x, chosen, shares):
    y = np.zeros(x.shape)
    for n, k in np.ndindex(chosen.shape):
        gate, up, down = values[chosen[n, k]]
        g = gate @ x[n]
        y[n] += shares[n, k] * (down @ (g / (1 + np.exp(-g)) * (up @ x[n])))
    return y


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_gives_the_same(name, sizes, kind):
    experts, values = quantised_experts(name)
    rng = np.random.default_rng(1)
    for tokens in (1, 8, 40):
        x = rng.normal(size=(tokens, SIZE)).astype(np.float32)
        chosen = np.stack([rng.permutation(COUNT)[:CHOSEN] for _ in range(tokens)])
        shares = rng.uniform(0.1, 1, chosen.shape).astype(np.float32)
        expected = reference(values, x.astype(np.float64), chosen, shares)
        if sizes:
            kinds = (getattr(AxisType, kind),) * len(sizes)
            experts = experts.to(
                jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
            )
        found = jax.jit(lambda experts, *a: experts(*a))(
            experts, x, chosen.astype(np.int32), shares
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [GPU_ROWS, TPU_ROWS])
def test_as_accelerators_do(name, rows):
    """Blocks of rows of all experts in one operation, whose definition runs on a CPU."""
    experts, values = quantised_experts(name)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20, SIZE)).astype(np.float32)
    chosen = np.stack([rng.permutation(COUNT)[:CHOSEN] for _ in range(20)]).astype(np.int32)
    shares = rng.uniform(0.1, 1, chosen.shape).astype(np.float32)
    weights = jax.tree.map(jnp.asarray, experts._weights())
    found = in_blocks("silu", x, jnp.asarray(chosen), shares, weights, rows=rows, by_kernel=True)
    expected = reference(values, x.astype(np.float64), chosen, shares)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_experts_whose_blocks_do_not_divide_are_distributed_whole():
    experts, _ = quantised_experts("MXFP4")
    for sizes in ({"model": 4}, {"expert": 2, "model": 2}):
        placed = experts.to(jax.make_mesh(tuple(sizes.values()), tuple(sizes)))
        for leaf in jax.tree.leaves(placed):
            assert leaf.addressable_shards[0].data.shape == (COUNT // 4, *leaf.shape[1:])


def test_gradients_reach_the_tokens():
    experts, values = quantised_experts("fp8 blocks")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, SIZE)).astype(np.float32)
    chosen = jnp.asarray(
        rng.permuted(np.tile(np.arange(COUNT), (6, 1)), axis=1)[:, :CHOSEN], jnp.int32
    )
    shares = jnp.asarray(rng.uniform(0.1, 1, chosen.shape), jnp.float32)
    loss = lambda experts, x: jnp.sum(experts(x, chosen, shares) ** 2)
    gradient = np.asarray(jax.jit(jax.grad(loss, 1))(experts, x))
    step = 1e-4
    along = rng.normal(size=x.shape)
    wide = [
        reference(values, x + s * step * along, np.asarray(chosen), np.asarray(shares))
        for s in (1, -1)
    ]
    slope = (np.sum(wide[0] ** 2) - np.sum(wide[1] ** 2)) / (2 * step)
    np.testing.assert_allclose(np.sum(gradient * along), slope, rtol=1e-3)


def test_only_the_experts_of_a_device_are_read():
    """No program gathers an expert of another device."""
    experts, _ = quantised_experts("fp8 blocks")
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    experts = experts.to(mesh)
    x = jnp.ones((16, SIZE), jnp.float32)
    chosen, shares = jnp.zeros((16, CHOSEN), jnp.int32), jnp.ones((16, CHOSEN), jnp.float32)
    text = (
        jax.jit(lambda experts, *a: experts(*a))
        .lower(experts, x, chosen, shares)
        .compile()
        .as_text()
    )
    gathered = [
        line for line in text.splitlines() if " all-gather(" in line or " all-to-all(" in line
    ]
    assert gathered and not any("u8[" in line for line in gathered)
