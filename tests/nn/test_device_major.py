"""A stacked projection on a mesh: stored in the order of the devices, seen in logical order."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import maxjax
from maxjax import nn
from maxjax.graph import DeviceRef, Graph, TensorType
from maxjax.graph.placement.device_major import DeviceMajor
from maxjax.nn.attention import AttentionWithRope
from tests.nn.layers import filled
from tests.xla import EXACT

CPU = DeviceRef.CPU()
X = np.random.default_rng(0).standard_normal((4, 5, 16)).astype(np.float32)


class Net(nn.Module):
    """Attention layers whose queries, keys and values are one weight, with biases."""

    def __init__(self, stacked):
        super().__init__()
        rope = nn.RotaryEmbedding(dim=16, n_heads=8, theta=1e4, max_seq_len=8)
        layers = nn.LayerList(
            AttentionWithRope(
                rope=rope, num_attention_heads=8, num_key_value_heads=4, hidden_size=16,
                stacked_qkv=True, has_bias=True,
            )
            for _ in range(2)
        )  # fmt: skip
        self.layers = layers.stack() if stacked else layers

    def __call__(self, x):
        return self.layers(x)


def call(model, x):
    return model(x)


def initialized(stacked=False):
    net = Net(stacked)
    net.load_state_dict(values())
    return net


@functools.cache
def wanted():
    return np.asarray(jax.jit(call)(initialized(), X))


@functools.cache
def values():
    return {n: v.astype(np.float32) for n, v in filled(Net(False), scale=0.25)[1].items()}


QKV = "layers.1.qkv_proj.weight"


def placed(stacked, **sizes):
    kind = sizes.pop("kind", AxisType.Auto)
    return initialized(stacked).to(maxjax.make_mesh(**sizes, axis_types=kind))


def qkv(model):
    return model.raw_state_dict()[QKV]


def test_rows_and_shapes():
    layout = DeviceMajor(4, (8, 4, 4))
    assert layout.rows(1) == [(2, 4), (9, 10), (13, 14)]
    for array in (np.arange(32).reshape(16, 2), jnp.arange(16)):
        stored = layout.arrange(array)
        assert stored.shape == layout.shape(array.shape) and type(stored) is not list
        np.testing.assert_array_equal(layout.restore(stored), array)
        mine = np.concatenate([array[a:b] for a, b in layout.rows(2)])
        np.testing.assert_array_equal(stored[2], mine)
    columns = DeviceMajor(2, (8, 4, 4), 1)
    for array in (np.arange(32).reshape(2, 16), jnp.arange(96).reshape(2, 16, 3)):
        stored = columns.arrange(array)
        assert stored.shape == columns.shape(array.shape) == (2, 2, 8, *array.shape[2:])
        np.testing.assert_array_equal(columns.restore(stored), array)
        mine = np.concatenate([array[:, a:b] for a, b in columns.rows(1)], axis=1)
        np.testing.assert_array_equal(stored[:, 1], mine)
    for part, (start, stop) in zip(
        columns.parts(stored[0, :, :, 0].reshape(16)), [(0, 8), (8, 12), (12, 16)], strict=True
    ):
        np.testing.assert_array_equal(part, array[0, start:stop, 0])


MESHES = (
    {"model": 4},
    {"model": 2},
    {"model": 8},
    {"data": 2, "model": 4},
    {"fsdp": 2, "model": 2},
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", MESHES, ids=repr)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("stacked", [False, True])
def test_results_and_values_are_those_of_one_device(stacked, sizes, kind):
    model = placed(stacked, **sizes, kind=kind)
    layout = qkv(model).spec.layout
    assert layout == (None if sizes["model"] == 8 else DeviceMajor(sizes["model"], (16, 8, 8)))
    run = lambda m: (m(X), jnp.asarray(qkv(m)) + 0, X @ qkv(m).T)
    result, rows, product = jax.jit(run)(model)
    np.testing.assert_allclose(result, wanted(), atol=1e-5)
    if sizes["model"] == 4:
        np.testing.assert_allclose(model(X), wanted(), atol=1e-5)
    weight = qkv(model)
    assert tuple(weight.shape) == (32, 16) and weight.rank == 2
    if kind is AxisType.Auto:  # of an explicitly placed array JAX cuts no such rows
        np.testing.assert_array_equal(weight[3:5], values()[QKV][3:5])
    np.testing.assert_array_equal(rows, values()[QKV])
    np.testing.assert_allclose(product, X @ values()[QKV].T, atol=1e-5)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, values()[name])


@pytest.mark.sampled
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("sizes", [{"model": 4}, {"fsdp": 2, "model": 2, "data": 2}])
def test_loading(tmp_path, stacked, cast, sizes):
    dtype = ml_dtypes.bfloat16 if cast else np.float32
    path = tmp_path / "model.safetensors"
    save_file({name: value.astype(dtype) for name, value in values().items()}, path)
    mesh = maxjax.make_mesh(**sizes)
    from_file, from_arrays = Net(stacked).to(mesh), Net(stacked).to(mesh)
    with maxjax.load_weights(path) as weights:
        from_file.load_state_dict(weights, cast=cast)
    from_arrays.load_state_dict(
        {n: v.astype(dtype).astype(np.float32) for n, v in values().items()}
    )
    first = jax.tree.leaves(from_file)
    for one, other in zip(first, jax.tree.leaves(from_arrays), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.sharding == other.sharding
    for name, value in from_file.state_dict().items():
        np.testing.assert_array_equal(value, values()[name].astype(dtype).astype(np.float32))


def test_one_device_holds_its_heads():
    weight = qkv(placed(False, model=4))
    stored = weight.leaf
    (mine,) = {s.device.id: s.data for s in stored.addressable_shards}[2]
    rows = [r for a, b in weight.spec.layout.rows(2) for r in range(a, b)]
    np.testing.assert_array_equal(mine, values()[QKV][rows])


def test_drawn_on_the_mesh_it_is_the_same():
    alone = maxjax.init(Net(False), jax.random.key(0)).state_dict()[QKV]
    for stacked in (False, True):
        model = maxjax.init(Net(stacked).to(maxjax.make_mesh(model=4)), jax.random.key(0))
        np.testing.assert_allclose(model.state_dict()[QKV], alone, **EXACT)


@pytest.mark.extra
def test_moved_assigned_copied():
    model, run = placed(False, model=4), jax.jit(call)
    for sizes in ({"model": 2}, {"data": 2}, {"model": 4}):
        model.to(maxjax.make_mesh(**sizes))
        np.testing.assert_array_equal(qkv(model).value, values()[QKV])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_allclose(run(again, X), wanted(), atol=1e-5)
    assert qkv(copy.deepcopy(model)).sharding == qkv(model).sharding
    assert qkv(pickle.loads(pickle.dumps(model))).sharding is None
    qkv(model).value = 2 * values()[QKV]
    np.testing.assert_array_equal(qkv(model).value, 2 * values()[QKV])
    model.to(CPU)
    assert qkv(model).spec.layout is None and tuple(jax.tree.leaves(model)[2].shape) != (4, 8, 16)
    np.testing.assert_array_equal(qkv(model).value, 2 * values()[QKV])
    stack = placed(True, model=4)
    for again in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        np.testing.assert_allclose(run(again, X), wanted(), atol=1e-5)
    lazy = pickle.loads(pickle.dumps(Net(True).to(maxjax.make_mesh(model=4))))
    lazy.load_state_dict(values())
    np.testing.assert_allclose(run(lazy, X), wanted(), atol=1e-5)
    stack.to(maxjax.make_mesh(model=2)).to(CPU)
    np.testing.assert_array_equal(qkv(stack).value, values()[QKV])
    assert "qkv_proj.weight" in stack.layers.unstack()[1].raw_state_dict()


def test_gradients():
    def loss(model, x):
        return (model(x) ** 2).sum()

    want = jax.jit(jax.grad(loss))(initialized(), X)
    for stacked in (False, True):
        got = jax.jit(jax.grad(loss))(placed(stacked, model=4), X)
        np.testing.assert_allclose(qkv(got).value, qkv(want).value, rtol=1e-4, atol=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stacked", [False, True])
def test_compiled_before_it_is_loaded(stacked):
    model = Net(stacked).to(maxjax.make_mesh(model=4))
    program = model.compile(jax.ShapeDtypeStruct(X.shape, jnp.float32))
    model.load_state_dict(values())
    np.testing.assert_allclose(program(X), wanted(), atol=1e-5)
    fixed = model.compile(jax.ShapeDtypeStruct(X.shape, jnp.float32), weights=values())
    np.testing.assert_allclose(fixed(X), wanted(), atol=1e-5)


def test_in_a_graph():
    model = placed(False, model=4)
    with Graph("g", input_types=[TensorType("float32", (16,), CPU)]) as graph:
        graph.output(qkv(model) @ graph.inputs[0])
    from maxjax.engine import InferenceSession

    (got,) = InferenceSession().load(graph, weights_registry=values())(X[0, 0])
    np.testing.assert_allclose(got, values()[QKV] @ X[0, 0], atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stacked", [False, True])
def test_in_shard_map(stacked):
    mesh = maxjax.make_mesh(data=2, model=4)
    model = initialized(stacked).to(mesh)
    specs = jax.tree.map(lambda a: a.sharding.spec, model)
    run = jax.shard_map(call, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))
    np.testing.assert_allclose(jax.jit(run)(model, X), wanted(), atol=1e-5)
