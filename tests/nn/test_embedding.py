"""Embedding: rows of a table, and what becomes of indices outside it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from maxjax import make_mesh
from maxjax.graph import DeviceRef, TensorValue
from maxjax.nn.embedding import Embedding, VocabParallelEmbedding
from tests.oracles.recorded import recorded, torch

CPU = DeviceRef.CPU()


def loaded(rows=5, width=3, dtype="float32"):
    layer = Embedding(rows, width, dtype, CPU)
    table = np.random.default_rng(0).standard_normal((rows, width)).astype(layer.weight.dtype.np)
    layer.load_state_dict({"weight": table})
    return layer, table


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("index_dtype", [np.int32, np.uint8, np.int8])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)])
def test_rows_by_number(dtype, index_dtype, shape):
    layer, table = loaded(dtype=dtype)
    indices = np.random.default_rng(1).integers(0, 5, shape).astype(index_dtype)
    found = layer(indices)
    assert found.shape == (*shape, 3) and found.dtype == table.dtype
    np.testing.assert_array_equal(found, table[indices])


def test_as_torch_has_it():
    layer, table = loaded()
    indices = np.array([[0, 4], [2, 2]])
    expected = recorded(
        lambda: torch.nn.functional.embedding(torch.tensor(indices), torch.tensor(table)).numpy()
    )
    np.testing.assert_array_equal(layer(indices.astype(np.int32)), expected)


@pytest.mark.parametrize("run", [lambda m, i: m(i), jax.jit(lambda m, i: m(i))])
def test_minus_one_is_the_last_row_and_outside_is_nan(run):
    layer, table = loaded()
    found = run(layer, jnp.array([-1, 5, -6, 4]))
    np.testing.assert_array_equal(found[jnp.array([0, 3])], table[[4, 4]])
    assert bool(jnp.isnan(found[1:3]).all())


def test_names_are_those_of_max():
    assert list(Embedding(5, 3, "float32", CPU).raw_state_dict()) == ["weight"]
    assert list(Embedding(5, 3, "float32", CPU, None, "table").raw_state_dict()) == ["table"]
    assert tuple(Embedding(5, 3, "float32", CPU).weight.shape) == (5, 3)


@pytest.mark.parametrize("indices", [np.ones(3, np.float32), np.ones(3, bool)])
def test_only_integers(indices):
    with pytest.raises(ValueError, match="integers"):
        loaded()[0](indices)


def test_initializer():
    values = Embedding(5, 3, "float32", CPU).initializer("weight")(
        jax.random.key(0), (500, 100), jnp.float32
    )
    assert abs(float(values.std()) - 0.02) < 0.001


ON_MESHES = pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (AxisType.Auto, {"model": 4}),
        (AxisType.Explicit, {"model": 4}),
        (AxisType.Auto, {"data": 2, "model": 4}),
        (AxisType.Explicit, {"data": 2, "model": 4}),
    ],
    ids=lambda v: v.name if isinstance(v, AxisType) else ",".join(v),
)


@pytest.mark.sampled
@ON_MESHES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_row_of_a_split_table(kind, sizes, dtype):
    layer, table = loaded(rows=8, width=6, dtype=dtype)
    layer.to(make_mesh(axis_types=kind, **sizes))
    assert layer.weight.sharding.spec[0] == "model"
    run, gradient = jax.jit(lambda m, i: m(i)), jax.jit(jax.grad(lambda m, i: (m(i) ** 2).sum()))
    for shape in ((), (1,), (1, 1)):
        for row in (0, 5, 7, -1, 8):
            found = run(layer, np.full(shape, row, np.int32))
            want = np.full((6,), np.nan, table.dtype) if row == 8 else table[row]
            assert found.shape == (*shape, 6) and found.dtype == table.dtype
            found, want = (np.asarray(a, np.float32).reshape(6) for a in (found, want))
            np.testing.assert_array_equal(found, want)
    found = np.asarray(gradient(layer, np.array([5], np.int32)).weight.value)
    want = np.where(np.arange(8)[:, None] == 5, 2 * table, 0).astype(table.dtype)
    np.testing.assert_array_equal(found, want)


@ON_MESHES
def test_the_lookup_of_one_row_is_not_a_slice(kind, sizes):
    """On a GPU, XLA makes a slice of a lookup of one row, and gathers a split table for it."""
    layer = Embedding(8, 6, "float32", CPU)
    run = jax.jit(lambda m, i: m(i))
    rows = jax.ShapeDtypeStruct((1,), np.int32)
    pattern = r'"stablehlo.gather".* -> tensor<(\S+)xf32>'
    assert re.findall(pattern, run.lower(layer, rows).as_text()) == ["1x6"]
    layer.to(make_mesh(axis_types=kind, **sizes))
    assert re.findall(pattern, run.lower(layer, rows).as_text()) == ["2x1x6"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_table_of_several_devices_gives_each_of_them_all_rows(count):
    table = VocabParallelEmbedding(5, 3, "float32", [CPU] * count)
    rows = np.arange(15.0, dtype=np.float32).reshape(5, 3)
    table.load_state_dict({"weight": rows})
    found = table(TensorValue(jnp.array([0, 2, 3, 4])), [None] * count)
    assert len(found) == count
    for one in found:
        np.testing.assert_array_equal(one.value, rows[[0, 2, 3, 4]])
    with pytest.raises(ValueError, match="signal buffers"):
        table(jnp.array([0]), [None] * 3)


@pytest.mark.parametrize("count", [1, 2])
def test_unusual_indices_into_a_table_of_several_devices(count):
    table = VocabParallelEmbedding(400, 2, "float32", [CPU] * count)
    rows = np.arange(800.0, dtype=np.float32).reshape(400, 2)
    table.load_state_dict({"weight": rows})
    for dtype in ("int8", "uint8", "uint32"):
        (found, *_) = table(TensorValue(jnp.array([3, 100], dtype)), [None] * count)
        np.testing.assert_array_equal(found.value, rows[[3, 100]])
    (found, *_) = table(TensorValue(jnp.array([-1, 400, -401, 199])), [None] * count)
    nan = [np.nan] * 2
    np.testing.assert_array_equal(found.value, [rows[399], nan, nan, rows[199]])
