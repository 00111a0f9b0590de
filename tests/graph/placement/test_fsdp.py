"""Tables and heads that are split over fsdp: the same results, and no gather of a table for few tokens."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import maxjax
from maxjax import nn
from maxjax.graph import DeviceRef
from maxjax.graph.placement.fsdp import can_be_in_place
from maxjax.graph.placement.specs import batch_axes

CPU = DeviceRef.CPU()
V, E = 512, 128
COLLECTIVE = re.compile(
    r"= \(?(\w+)\[([\d,]*)\].* (all-gather|all-reduce|all-to-all|reduce-scatter)"
)
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
MESHES = [
    {"fsdp": 8},
    {"data": 2, "fsdp": 4},
    {"fsdp": 2, "model": 4},
    {"data": 2, "fsdp": 2, "model": 2},
]
ON_MESHES = pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "-".join(sizes))
RUN = jax.jit(lambda m, ids: m(ids))
GRADIENT = jax.jit(jax.grad(lambda m, ids: jnp.square(m(ids)).mean()))


class Language(nn.Module):
    """Token ids to logits, with nothing in between."""

    def __init__(self, tied, dtype="float32"):
        super().__init__()
        self.table = nn.Embedding(V, E, dtype, CPU)
        self.head = nn.ColumnParallelLinear(E, V, dtype, [CPU], self.table.weight if tied else None)

    def __call__(self, ids):
        return self.head(self.table(ids))


def ids_of(batch, length=None):
    shape = (batch,) if length is None else (batch, length)
    return np.random.default_rng(0).integers(0, V, shape).astype(np.int32)


def placed(mesh, ids):
    return jax.device_put(
        ids, NamedSharding(mesh, PartitionSpec(batch_axes(mesh, len(ids)) or None))
    )


def elements(model, ids):
    """The number of elements of the result of each collective in the compiled program."""
    found = COLLECTIVE.findall(RUN.lower(model, ids).compile().as_text())
    return [int(np.prod([int(n) for n in dims.split(",") if n])) for _, dims, _ in found]


@pytest.mark.sampled
@KINDS
@ON_MESHES
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shape", [(1,), (8,), (8, 2), (3,)], ids=str)
def test_results_and_gradients(kind, sizes, tied, shape):
    model, ids = maxjax.init(Language(tied), jax.random.key(0)), ids_of(*shape)
    want, gradients = RUN(model, ids), GRADIENT(model, ids).raw_state_dict()
    mesh = maxjax.make_mesh(axis_types=kind, **sizes)
    model.to(mesh)
    there = placed(mesh, ids)
    np.testing.assert_allclose(np.asarray(RUN(model, there)), want, rtol=0, atol=1e-6)
    found = GRADIENT(model, there).raw_state_dict()
    for name, gradient in gradients.items():
        scale = float(jnp.abs(gradient.value).max())
        got = np.asarray(found[name].value)
        np.testing.assert_allclose(got, gradient.value, rtol=0, atol=1e-5 * scale)
        assert found[name].value.sharding.is_equivalent_to(
            model.raw_state_dict()[name].value.sharding, 2
        )


@pytest.mark.sampled
@KINDS
@ON_MESHES
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("batch", [1, 8])
def test_few_tokens_gather_neither_table_nor_head(kind, sizes, tied, batch):
    mesh = maxjax.make_mesh(axis_types=kind, **sizes)
    model = maxjax.init(Language(tied), jax.random.key(0)).to(mesh)
    ids = placed(mesh, ids_of(batch))
    # The most that moves are the logits.
    assert max(elements(model, ids), default=0) <= batch * V < V * E // sizes["fsdp"]


@KINDS
def test_many_tokens_gather_the_head(kind):
    """Their activations are more than the weights."""
    mesh = maxjax.make_mesh(fsdp=8, axis_types=kind)
    model = maxjax.init(Language(False), jax.random.key(0)).to(mesh)
    found = elements(model, placed(mesh, ids_of(8, 32)))
    assert V * E in found and max(found) == V * E


def test_tables_are_split_by_columns():
    mesh = maxjax.make_mesh(fsdp=4)
    split = lambda shape: tuple(nn.Embedding(*shape, "float32", CPU).to(mesh).weight.sharding.spec)
    assert split((64, 16)) == (None, "fsdp")
    assert split((64, 10)) == ("fsdp", None)  # ten columns do not divide
    head = nn.ColumnParallelLinear(16, 64, "float32", [CPU]).to(mesh)
    assert tuple(head.weight.sharding.spec) == ("fsdp", None)


@pytest.mark.sampled(2)
@KINDS
@pytest.mark.parametrize("rows", [64, 66])
@pytest.mark.parametrize(
    "indices", [np.int32(5), ids_of(1) % 60, ids_of(8) % 60, ids_of(8, 3) % 60]
)
def test_tables_of_any_split(kind, rows, indices):
    """By rows, because ten columns do not divide, or whole; of no, one and several axes of indices."""
    table = maxjax.init(nn.Embedding(rows, 10, "float32", CPU), jax.random.key(0))
    want = np.asarray(table(indices))
    table.to(maxjax.make_mesh(fsdp=4, axis_types=kind))
    np.testing.assert_array_equal(np.asarray(RUN(table, indices)), want)
    np.testing.assert_array_equal(np.asarray(table(indices)), want)


@KINDS
def test_packed_tables(kind):
    encoding = maxjax.graph.quantization.QuantizationEncoding.Q8_0
    table = nn.Embedding(64, 256, "float32", CPU, encoding)
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 60, tuple(map(int, table.weight.shape))).astype(np.uint8)
    table.load_state_dict({"weight": blocks})
    ids = ids_of(8) % 64
    want = np.asarray(RUN(table, ids))
    mesh = maxjax.make_mesh(fsdp=4, axis_types=kind)
    table.to(mesh)
    assert tuple(table.weight.sharding.spec) == (None, "fsdp")
    np.testing.assert_array_equal(np.asarray(RUN(table, placed(mesh, ids))), want)


def test_when_it_is_not_used():
    """Without fsdp, outside of a trace, and inside shard_map."""
    ids, seen = jnp.asarray(ids_of(8)), []
    table = maxjax.init(nn.Embedding(V, E, "float32", CPU), jax.random.key(0))

    def check(table, ids):
        seen.append(can_be_in_place(table.weight, ids))
        return table(ids)

    want = np.asarray(jax.jit(check)(table, ids))
    table.to(maxjax.make_mesh(model=4))
    jax.jit(check)(table, ids)
    mesh = maxjax.make_mesh(fsdp=4)
    table.to(mesh)
    check(table, ids)
    spec = jax.tree.map(lambda leaf: leaf.sharding.spec, table)
    mapped = jax.shard_map(
        check, mesh=mesh, in_specs=(spec, PartitionSpec("fsdp")), out_specs=PartitionSpec("fsdp")
    )
    np.testing.assert_array_equal(np.asarray(jax.jit(mapped)(table, ids)), want)
    assert seen == [False] * 4
    jax.jit(check)(table, ids)
    assert seen[4:] == [True]


@KINDS
def test_under_vmap(kind):
    mesh = maxjax.make_mesh(fsdp=4, axis_types=kind)
    model = maxjax.init(Language(False), jax.random.key(0))
    ids = ids_of(3, 4)
    want = np.asarray(model(ids))
    found = jax.jit(jax.vmap(lambda m, i: m(i), in_axes=(None, 0)))(model.to(mesh), ids)
    np.testing.assert_allclose(np.asarray(found), want, rtol=0, atol=1e-6)
