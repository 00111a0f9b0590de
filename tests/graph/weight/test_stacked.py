"""StackedWeight and its Weights; stacks in Graphs, sessions and compiled programs."""

import dataclasses
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import init
from maxjax.dtype import DType
from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, Graph, TensorType, TensorValue, Weight
from maxjax.graph.weight.spec import Span
from maxjax.graph.weight.stacked import StackedWeight
from maxjax.nn import LayerList, Module
from tests.nn.layer.stack.test_layer_stack import values

CPU = DeviceRef.CPU()
ALL = Span("*", 0, 1, 3)
X = np.arange(4, dtype=np.float32) / 4
KIND = TensorType("float32", (4,), CPU)
SPEC = jax.ShapeDtypeStruct((4,), jnp.float32)


def weight(value=None, shape=(2,), dtype="float32"):
    made = Weight("w", dtype, shape, CPU)
    if value is not None:
        made.value = jnp.full(shape, value, dtype)
    return made


def stack(held, span=ALL, **options):
    """A stack of Weights with these held, and the Weights."""
    weights = [weight(value, **options) for value in held]
    made = StackedWeight.of(weights, span)
    made.adopt(weights)
    return made, weights


# -- names


@pytest.mark.parametrize(
    "span, full, index, want",
    [
        (ALL, "layers.*.w", 2, "layers.2.w"),
        (ALL, "*.w", 0, "0.w"),
        (ALL, "w", 1, "w"),
        (ALL, "a.*.b.*.w", 1, "a.1.b.*.w"),
        (Span("1:25:6", 1, 6, 4), "m.layers.1:25:6.w", 3, "m.layers.19.w"),
        (Span("2:5", 2, 1, 3), "2:5", 2, "4"),
    ],
)
def test_the_name_of_one(span, full, index, want):
    assert span.name(full, index) == want


# -- held


def test_of_weights_with_values():
    s, weights = stack([1, 2, 3])
    assert not s.is_lazy and s.leaf.shape == (3, 2)
    np.testing.assert_array_equal(jnp.asarray(s), [[1, 1], [2, 2], [3, 3]])
    for i, w in enumerate(weights):
        assert s.view(i) is w and (w.value == i + 1).all() and w.shape == [2] and w.rank == 1
        assert w.dtype is DType.float32 and (w + 1 == i + 2).all()
    assert "3 x Weight" in repr(s)


def test_of_weights_without():
    s, weights = stack([None] * 3)
    assert s.is_lazy and s.leaf == jax.ShapeDtypeStruct((3, 2), jnp.float32)
    assert [w.value for w in weights] == [None] * 3
    with pytest.raises(ValueError, match="'w' has no value"):
        s.__jax_array__()


def test_of_some_with_values():
    s, weights = stack([1, None, 3])
    assert s.is_lazy and isinstance(s.leaf, jax.ShapeDtypeStruct)
    assert [w.value is None for w in weights] == [False, True, False]
    weights[1].value = jnp.full(2, 2.0)
    assert not s.is_lazy
    np.testing.assert_array_equal(s.__jax_array__()[:, 0], [1, 2, 3])


def test_one_is_changed_emptied_and_filled():
    s, weights = stack([1, 2, 3])
    weights[1].value = jnp.full(2, 7.0)
    np.testing.assert_array_equal(s.leaf[:, 0], [1, 7, 3])
    weights[0].value = None
    assert s.is_lazy and [w.value is None for w in weights] == [True, False, False]
    np.testing.assert_array_equal(weights[1].value, [7, 7])
    weights[0].value = np.full(2, 9, np.float32)
    np.testing.assert_array_equal(s.leaf[:, 0], [9, 7, 3])


def test_dissolved_each_has_its_own():
    for held in ([1, 2, 3], [1, None, 3], [None] * 3):
        s, weights = stack(held)
        s.dissolve()
        for w, value in zip(weights, held, strict=True):
            assert w.home is None
            assert w.value is None if value is None else (w.value == value).all()
        weights[0].value = jnp.full(2, 8.0)
        assert weights[1].value is None or (weights[1].value != 8).all()


def test_the_weights_are_the_only_ones():
    s, weights = stack([1, 2, 3])
    other = s.like(s.leaf, "layers.*.w")
    views = [other.view(i) for i in range(3)]
    assert views == [other.view(i) for i in range(3)] and views[0] is not weights[0]
    assert [v.name for v in views] == [f"layers.{i}.w" for i in range(3)]
    views[1].value = jnp.zeros(2)
    assert (weights[1].value == 2).all() and (views[1].value == 0).all()


def test_specs_of_different_stacks_differ():
    kinds = [
        stack([1, 2, 3])[0],
        stack([1, 2, 3], span=Span("0:3", 0, 1, 3))[0],
        stack([1, 2, 3], shape=(3,))[0],
        stack([1, 2, 3], dtype="bfloat16")[0],
    ]
    assert len({s.spec for s in kinds}) == len(kinds)
    assert kinds[0].spec == stack([None] * 3)[0].spec
    assert hash(kinds[0].spec) == hash(stack([4, 5, 6])[0].spec)


@pytest.mark.parametrize("held", [[1, 2, 3], [1, None, 3], [None] * 3])
def test_placed(held):
    s, weights = stack(held)
    device = jax.devices()[2]
    sharding = jax.sharding.SingleDeviceSharding(device)
    moved = s.moved(dataclasses.replace(s.spec, sharding=sharding), "w")
    s.change(sharding=sharding)
    s.put(moved)
    for w in weights:
        assert w.value is None or w.value.devices() == {device}
        w.value = jax.device_put(jnp.zeros(2), sharding)
    assert s.leaf.devices() == {device}


def test_pickled_together_they_stay_together():
    s, weights = pickle.loads(pickle.dumps(stack([1, 2, 3])))
    weights[1].value = jnp.zeros(2)
    np.testing.assert_array_equal(s.leaf[:, 0], [1, 0, 3])


def test_a_weight_of_a_stack_is_a_tree_of_its_slice():
    _, (_, w, _) = stack([1, 2, 3])
    doubled = jax.tree.map(lambda leaf: leaf * 2 if jnp.ndim(leaf) else leaf, w)
    assert isinstance(doubled, Weight) and (doubled.value == 4).all()
    assert jax.jit(lambda w: w * 2)(w).shape == (2,)


def test_the_old_stack_is_let_go():
    s, weights = stack([1, 2, 3])
    old = weakref.ref(s.leaf)
    weights[1].value = jnp.zeros(2)
    gc.collect()
    assert old() is None


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda w: setattr(w, "value", jax.ShapeDtypeStruct((2,), jnp.float32)), "shape or dtype"),
        (lambda w: setattr(w, "value", jnp.ones(2, jnp.bfloat16)), "another dtype"),
        (lambda w: setattr(w, "value", jnp.ones(3)), r"must have shape \(2,\)"),
    ],
)
def test_one_of_a_stack_keeps_its_type(change, says):
    _, (w, *_) = stack([1, 2, 3])
    with pytest.raises(ValueError, match=says):
        change(w)
    assert (w.value == 1).all()


# -- in graphs


class Layer(Module):
    def __init__(self, bias=True):
        super().__init__()
        self.weight = Weight("weight", "float32", (4, 4), CPU)
        if bias:
            self.bias = Weight("bias", "float32", (4,), CPU)

    def __call__(self, h):
        y = h + jnp.tanh(h @ self.weight.T)
        return y + self.bias if hasattr(self, "bias") else y


class Net(Module):
    def __init__(self, stacked=True, n=3, tied=False, **how):
        super().__init__()
        layers = (
            LayerList(Layer(bias=i % 2 == 0) for i in range(n))
            if how
            else LayerList(Layer() for _ in range(n))
        )
        self.layers = layers.stack(**how) if stacked else layers
        self.head = Layer(bias=False)
        if tied:
            self.head.weight = self.layers[1].weight

    def __call__(self, h):
        return self.head(self.layers(h))


NETS = {
    "plain": {},
    "tied": {"tied": True},
    "pattern": {"n": 5, "period": 2},
}
every_net = pytest.mark.parametrize("net", NETS)


def nets(net, seed=0):
    """(the model as a list, the same stacked), loaded alike."""
    models = Net(False, **NETS[net]), Net(True, **NETS[net])
    given = values(models[0], seed)
    for model in models:
        model.load_state_dict(given)
    return models


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6)


@every_net
def test_a_graph_of_a_model(net):
    plain, model = nets(net)
    graph = Graph("g", model, [KIND])
    close(InferenceSession().load(graph)(X)[0], plain(jnp.asarray(X)))
    names = sorted(name for entry in graph.entries for name in entry.names)
    listed = Graph("g", plain, [KIND])
    others = {name for entry in listed.entries for name in entry.names}
    assert others <= set(names) and not any("*" in name or ":" in name for name in names)


@every_net
def test_a_graph_of_a_lazy_model_and_a_registry(net):
    plain, _ = nets(net)
    lazy = Net(True, **NETS[net])
    lazy.raw_state_dict()
    graph = Graph("g", lazy, [KIND])
    program = InferenceSession().load(graph, weights_registry=plain.state_dict())
    close(program(X)[0], plain(jnp.asarray(X)))
    assert all(w.value is None for w in lazy.raw_state_dict().values())


def test_a_registry_of_some_layers():
    plain, model = nets("plain")
    other = values(Net(False), 5)
    some = {name: other[name] for name in ("layers.1.weight", "layers.0.bias")}
    program = InferenceSession().load(Graph("g", model, [KIND]), weights_registry=some)
    plain.load_state_dict({**plain.state_dict(), **some})
    close(program(X)[0], plain(jnp.asarray(X)))


def test_layers_without_values_are_named():
    model = Net()
    given = values(Net(False))
    del given["layers.2.bias"]
    program = model.compile(SPEC)
    model.load_state_dict(given, strict=False)
    with pytest.raises(ValueError, match=r"'layers\.2\.bias' has no value"):
        program(X)
    for registry in ({}, None):
        with pytest.raises(ValueError, match=r"Weight 'layers\.2\.bias' is not in the weights"):
            InferenceSession().load(Graph("g", model, [KIND]), weights_registry=registry)


def test_values_of_another_type_in_the_registry():
    _, model = nets("plain")
    wrong = {"layers.1.bias": np.ones(5, np.float32)}
    with pytest.raises(ValueError, match=r"'layers\.1\.bias' .* \(5,\), but the graph expects"):
        InferenceSession().load(Graph("g", model, [KIND]), weights_registry=wrong)


@pytest.mark.parametrize(
    "net, loaded",
    [(net, how) for net in NETS for how in ("before", "after")]
    + [("pattern", "layer by layer"), ("plain", "by init")],
)
def test_compiled_and_loaded(net, loaded):
    plain, _ = nets(net)
    model = Net(True, **NETS[net])
    given = plain.state_dict()
    if loaded == "before":
        model.load_state_dict(given)
    program = model.compile(SPEC)
    if loaded == "after":
        model.load_state_dict(given)
    elif loaded == "layer by layer":
        for name, value in given.items():
            model.load_state_dict({name: value}, strict=False)
    elif loaded == "by init":
        init(model, jax.random.key(4))
        plain.load_state_dict(model.state_dict())
    close(program(X), plain(jnp.asarray(X)))
    model.layers[1].weight.value = jnp.zeros((4, 4))
    plain.layers[1].weight.value = jnp.zeros((4, 4))
    close(program(X), plain(jnp.asarray(X)))


@every_net
def test_a_with_block(net):
    plain, model = nets(net)
    for one in (model, Net(True, **NETS[net])):
        with Graph("g", input_types=[KIND]) as graph:
            (x,) = graph.inputs
            y = one(x.tensor)
            assert isinstance(y, TensorValue)
            graph.output(y)
        program = InferenceSession().load(graph, weights_registry=plain.state_dict())
        close(program(X)[0], plain(jnp.asarray(X)))


@pytest.mark.parametrize("stacked", [True, False])
def test_layers_one_by_one_in_a_graph(stacked):
    class Some(Net):
        def __call__(self, h):
            return self.layers[2](self.layers[0](h)) * self.layers[1].bias

    model = Some(stacked)
    program = model.compile(SPEC)
    model.load_state_dict(values(Net(False)))
    close(program(X), model(jnp.asarray(X)))


def test_a_graph_has_one_entry_for_a_stack():
    _, model = nets("tied")
    graph = Graph("g", model, [KIND])
    assert [len(entry.names) for entry in graph.entries] == [3, 3]
    found = {name: entry.find(name) for entry in graph.entries for name in entry.names}
    assert found["layers.2.bias"] is model.layers[2].bias and "layers.7.bias" not in found


def test_named_sizes():
    _, model = nets("plain")
    program = model.compile(TensorType("float32", ("rows", 4), CPU))
    for rows in (1, 3):
        x = np.ones((rows, 4), np.float32)
        close(program(x)[0], jax.vmap(model)(jnp.asarray(x)))


def test_gradients_inside_a_graph():
    class Slope(Net):
        def __call__(self, h):
            return jax.grad(lambda h: jnp.sum(self.layers(h) ** 2))(h)

    given, results = values(Net(False)), []
    for stacked in (False, True):
        model = Slope(stacked)
        program = model.compile(SPEC)
        model.load_state_dict(given)
        results.append(program(X))
    close(*results)


def test_a_program_lets_old_values_go():
    _, model = nets("plain")
    old = weakref.ref(jax.tree.leaves(model.layers)[0])
    program = model.compile(SPEC)
    program(X)
    model.load_state_dict(values(Net(False), 1))
    program(X)
    gc.collect()
    assert old() is None
