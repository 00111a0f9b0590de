"""Weights that stay packed: decoded in jnp as the gguf package does, and products with them."""

import contextlib

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import maxjax
from maxjax import nn
from maxjax.errors import UserInputError
from maxjax.graph import DeviceRef, ShardingStrategy, Weight, ops
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.kernels import QuantArray, StackSlice, embed, explicit, matmul, packed_product
from maxjax.kernels.blocks import DECODERS, decode
from maxjax.kernels.packed_product import PackedOperand
from scripts.sharding_product import collectives
from tests.kernels.packed_operands import blocks, close

CPU = DeviceRef.CPU()
ENCODINGS = list(DECODERS)
every = pytest.mark.parametrize("name", ENCODINGS)


def reference(name: str, raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])


def packed(name: str, rows: int, columns: int, seed: int = 0) -> tuple[QuantArray, np.ndarray]:
    raw = blocks(name, rows, columns, seed)
    return QuantArray(jnp.asarray(raw), name), reference(name, raw).astype(np.float64)


# --- decoding -----------------------------------------------------------------------------


@pytest.mark.sampled(7)
@every
@pytest.mark.parametrize("compiled", [False, True])
def test_bit_for_bit_as_the_gguf_package(name, compiled):
    raw = blocks(name, 40, 512)
    got = (jax.jit(decode, static_argnums=0) if compiled else decode)(name, raw)
    np.testing.assert_array_equal(
        np.asarray(got).view(np.int32), reference(name, raw).view(np.int32)
    )


@every
def test_any_bits(name):
    """NaN and infinite scales too; what is subnormal XLA's threads may take as zero."""
    raw = np.random.default_rng(3).integers(0, 256, (300, DECODERS[name].nbytes), np.uint8)
    with np.errstate(all="ignore"):
        want = reference(name, raw)
    got = np.array(jax.jit(decode, static_argnums=0)(name, raw))
    small = np.abs(want) < 2.0**-126
    assert (np.abs(got[small]) < 2.0**-126).all()
    np.testing.assert_array_equal(got[~small], want[~small])


def test_what_is_no_blocks():
    with pytest.raises(ValueError, match="multiple of 18 bytes"):
        decode("Q4_0", np.zeros(17, np.uint8))
    with pytest.raises(ValueError, match="int8"):
        decode("Q4_0", np.zeros(18, np.int8))
    with pytest.raises(NotImplementedError, match="IQ2_XS cannot stay quantised"):
        QuantArray(np.zeros(18, np.uint8), "IQ2_XS")


@pytest.mark.sampled(3)
@every
def test_ops(name):
    raw, encoding = blocks(name, 3, 256), QuantizationEncoding(name)
    np.testing.assert_array_equal(ops.dequantize(encoding, raw), reference(name, raw))
    x = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    close(ops.qmatmul(encoding, None, x, raw), x, reference(name, raw).astype(np.float64))
    with pytest.raises(NotImplementedError, match="one weight"):
        ops.qmatmul(encoding, None, x, raw, raw)


# --- products -----------------------------------------------------------------------------


@pytest.mark.sampled(6)
@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products(name, dtype):
    w, exact = packed(name, 24, 512)
    for shape in [(512,), (1, 512), (2, 3, 512), (0, 512)]:
        x = np.random.default_rng(1).standard_normal(shape).astype(jnp.dtype(dtype))
        got = jax.jit(matmul)(x, w)
        assert got.dtype == dtype and got.shape == (*shape[:-1], 24)
        if got.size:
            close(got, x, exact, unit=2.0**-20 if dtype == "float32" else 2.0**-8)


def test_several_weights_of_different_encodings():
    a, exact = packed("Q4_K", 8, 256)
    b = jnp.ones((5, 256))
    x = np.random.default_rng(1).standard_normal((2, 256)).astype(np.float32)
    got = matmul(x, [a, b])
    close(got[0], x, exact)
    close(got[1], x, np.ones((5, 256)))


@pytest.mark.sampled(5)
@every
def test_a_layer_of_a_stack(name):
    raw = np.stack([blocks(name, 8, 256, seed) for seed in range(3)])
    x = np.random.default_rng(1).standard_normal((2, 256)).astype(np.float32)

    def run(stack, x):
        return jax.lax.map(
            lambda i: matmul(x, QuantArray(StackSlice(stack, i), name)), jnp.arange(3)
        )

    for got, one in zip(jax.jit(run)(raw, x), raw, strict=True):
        close(got, x, reference(name, one).astype(np.float64))


def test_gradients_reach_the_activations():
    w, exact = packed("Q4_K", 8, 256)
    x = np.random.default_rng(1).standard_normal((2, 256)).astype(np.float32)
    slope = jax.grad(lambda x: (matmul(x, w) ** 2).sum())
    got = jax.jit(slope)(x)
    np.testing.assert_allclose(got, 2 * (x @ exact.T) @ exact, rtol=1e-4, atol=0.1)
    batched = jax.jit(jax.vmap(slope))(x[:, None])
    np.testing.assert_allclose(batched[:, 0], got, rtol=1e-5, atol=0.1)  # sums of up to 1e5


@pytest.mark.sampled(5)
@every
def test_lookups(name):
    table, exact = packed(name, 6, 256)
    got = jax.jit(embed)(table, jnp.array([[0, 5], [-1, 6]]))
    assert got.dtype == np.float32 and got.shape == (2, 2, 256)
    np.testing.assert_array_equal(got[0], exact[[0, 5]])
    np.testing.assert_array_equal(got[1, 0], exact[-1])
    assert np.isnan(got[1, 1]).all()


# --- weights and layers -------------------------------------------------------------------


def weight(name: str, rows: int, columns: int) -> tuple[Weight, np.ndarray]:
    raw = blocks(name, rows, columns)
    w = Weight("w", "uint8", raw.shape, CPU, QuantizationEncoding(name))
    w.value = jnp.asarray(raw)
    return w, reference(name, raw).astype(np.float64)


@pytest.mark.sampled(4)
@every
def test_a_weight_shows_its_bytes_and_multiplies_as_weights(name):
    w, exact = weight(name, 8, 512)
    assert w.logical_shape == [8, 512] and w.shape == list(blocks(name, 8, 512).shape)
    np.testing.assert_array_equal(np.asarray(w), blocks(name, 8, 512))
    x = np.random.default_rng(1).standard_normal((2, 512)).astype(np.float32)
    close(x @ w.T, x, exact)
    close(jax.jit(lambda w, x: x @ w.T)(w, x), x, exact)
    leaves, definition = jax.tree.flatten(w)
    assert len(leaves) == 1 and leaves[0].dtype == np.uint8
    close(matmul(x, jax.tree.unflatten(definition, leaves)), x, exact)


class Layer(nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.up = nn.Linear(256, 512, "float32", CPU, True, encoding)
        self.down = nn.Linear(512, 256, "uint8", CPU, False, encoding)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, encoding, count=3):
        super().__init__()
        self.embed = nn.Embedding(16, 256, "float32", CPU, encoding)
        self.layers = nn.LayerList([Layer(encoding) for _ in range(count)])
        self.head = nn.Linear(256, 16, "float32", CPU, False, encoding)

    def __call__(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def filled(name: str, model: nn.Module) -> dict[str, np.ndarray]:
    state = {}
    for i, (key, w) in enumerate(model.raw_state_dict().items()):
        rows = int(w.shape[0])
        state[key] = (
            blocks(name, rows, int(w.logical_shape[1]), i) if w.quantization_encoding
            else np.random.default_rng(i).standard_normal(rows).astype(np.float32)
        )  # fmt: skip
    return state


def decoded(name: str, state: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """The model in float64."""
    w = {k: reference(name, v).astype(np.float64) if v.ndim == 2 else v for k, v in state.items()}
    x = w["embed.weight"][ids]
    for i in range(3):
        up = np.tanh(x @ w[f"layers.{i}.up.weight"].T + w[f"layers.{i}.up.bias"])
        x = x + up @ w[f"layers.{i}.down.weight"].T
    return x @ w["head.weight"].T


IDS = np.array([[1, 2, 15], [0, 3, 4]])
call = jax.jit(lambda model, ids: model(ids))


@pytest.mark.sampled(7)
@every
@pytest.mark.parametrize("stacked", [False, True])
def test_a_model(name, stacked):
    model = Model(QuantizationEncoding(name))
    state = filled(name, model)
    if stacked:
        model.layers = model.layers.stack()
    lowered = call.lower(model, IDS).compile()  # before there are values
    model.load_state_dict(state)
    got = lowered(model, IDS)
    want = decoded(name, state, IDS)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())
    saved = model.state_dict()
    assert saved.keys() == state.keys()
    for key, value in saved.items():
        np.testing.assert_array_equal(value, state[key])


def test_rows_that_are_no_blocks():
    with pytest.raises(ValueError, match="Q4_K packs 256 weights"):
        nn.Linear(100, 8, "float32", CPU, False, QuantizationEncoding.Q4_K)


def test_clipped():
    layer = nn.Linear(256, 8, "float32", CPU, False, QuantizationEncoding.Q4_K, clip_weight=0.5)
    layer.load_state_dict({"weight": blocks("Q4_K", 8, 256)})
    x = np.random.default_rng(1).standard_normal((2, 256)).astype(np.float32)
    close(
        layer(x),
        x,
        np.clip(reference("Q4_K", blocks("Q4_K", 8, 256)), -0.5, 0.5).astype(np.float64),
    )


# --- on meshes ----------------------------------------------------------------------------


def mesh_of(axes: dict[str, int], explicit: bool):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


@pytest.mark.sampled
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P()])
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_split_products(name, spec, explicit):
    mesh = mesh_of({"model": 4}, explicit)
    w, exact = packed(name, 16, 1024)
    w = QuantArray(jax.device_put(w.blocks, NamedSharding(mesh, spec)), name)
    x = np.random.default_rng(1).standard_normal((2, 1024)).astype(np.float32)
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        on = jax.device_put(x, NamedSharding(mesh, P(None, *spec[1:2])))
        compiled = jax.jit(matmul).lower(on, w).compile()
        close(compiled(on, w), x, exact)
        # The bytes stay where they are: only results move.
        assert "u8[16" not in "".join(
            line for line in compiled.as_text().splitlines() if "all-gather" in line
        )


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [("model", None, []), (None, "model", ["all-reduce"]), ("data", "model", ["all-reduce"]), (None, None, [])],
)  # fmt: skip
def test_parts_as_tpus_multiply_by_them(name, stacked, rows, columns, expected, monkeypatch):
    """The form of TPUs on CPUs: a part of several chunks, and tokens that another axis may split."""
    monkeypatch.setattr(packed_product, "MOST_WEIGHTS", 2048)
    mesh, spec = mesh_of({"model": 4, "data": 2}, False), P(rows, columns)
    w, exact = packed(name, 48, 1024)
    raw = jnp.stack([w.blocks * 0, w.blocks]) if stacked else w.blocks
    raw = jax.device_put(raw, NamedSharding(mesh, P(None, *spec) if stacked else spec))
    x = np.random.default_rng(1).standard_normal((4, 1024)).astype(np.float32)
    tokens = None if rows == "data" else "data"
    on = jax.device_put(x, NamedSharding(mesh, P(tokens, columns)))
    entries = [(axis,) if axis else () for axis in spec]
    division = explicit.Division.of(mesh, entries)
    static = PackedOperand((name,), (np.dtype("float32"),), False, (division,))
    run = jax.jit(lambda x, raw: packed_product._on_tpu(static, 8, x, raw, jnp.int32(1))[0])
    program = run.lower(on, raw).compile()
    close(program(on, raw), x, exact)
    assert [one.kind for one in collectives(program.as_text())] == expected


@pytest.mark.parametrize("is_explicit", [False, True])
@pytest.mark.parametrize("columnwise", [False, True])
def test_programs_for_tpus_multiply_by_parts(is_explicit, columnwise):
    layer = nn.Linear(1024, 16, "float32", CPU, False, QuantizationEncoding.Q4_K)
    strategy = ShardingStrategy.columnwise if columnwise else ShardingStrategy.rowwise
    layer.sharding_strategy = strategy(1)
    mesh = mesh_of({"model": 4}, is_explicit)
    layer.to(mesh)
    layer.load_state_dict({"weight": packed("Q4_K", 16, 1024)[0].blocks})
    with jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext():
        run = jax.jit(lambda layer, x: layer(x)).trace(layer, jnp.ones((3, 1024)))
        text = run.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("sdy.manual_computation") == 1
    assert text.count('"stablehlo.all_reduce"') == columnwise
    # A device's part alone is dequantised.
    assert f"tensor<{'16x256' if columnwise else '4x1024'}xf32>" in text
    assert "tensor<16x1024xf32>" not in text


@pytest.mark.sampled
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("axes", [{"model": 2}, {"model": 8}, {"data": 2, "model": 4}, {"fsdp": 4}])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_model_on_a_mesh(axes, stacked, explicit):
    name = "Q4_0"
    model = Model(QuantizationEncoding(name))
    state = filled(name, model)
    for layer in model.layers:
        layer.up.sharding_strategy = ShardingStrategy.rowwise(1)
        layer.down.sharding_strategy = ShardingStrategy.columnwise(1)
    if stacked:
        model.layers = model.layers.stack()
    mesh = mesh_of(axes, explicit)
    model.to(mesh)
    model.load_state_dict(state)
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        got = np.asarray(call(model, IDS))
    want = decoded(name, state, IDS)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, state[key])


def test_columns_are_split_between_blocks():
    """512 columns are two blocks of Q4_K: two devices take one each, four cannot."""
    layer = nn.Linear(512, 16, "float32", CPU, False, QuantizationEncoding.Q4_K)
    layer.sharding_strategy = ShardingStrategy.columnwise(1)
    layer.to(mesh_of({"model": 2}, False))
    assert tuple(layer.weight.sharding.spec) == (None, "model")
    layer.to(mesh_of({"model": 4}, False))
    assert layer.weight.sharding.is_fully_replicated
    assert "2 blocks of axis 1 do not divide by model=4" in str(maxjax.plan(layer))
    with pytest.raises(UserInputError, match="512 in blocks of 256 does not divide by 4"):
        layer.to(mesh_of({"model": 4}, False), rules={"*": P(None, "model")})
