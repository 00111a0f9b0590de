"""ops.call with arrays gives arrays, so that a Module that uses it is an ordinary function under JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import nn
from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, Graph, TensorType, TensorValue, ops

CPU = DeviceRef.CPU()
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
KIND = TensorType("float32", (2, 3), CPU)


class Block(nn.Module):
    seen = []

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(3, 3, "float32", CPU, has_bias=True)

    def __call__(self, h):
        Block.seen.append(type(h) is TensorValue)
        return ops.tanh(self.proj(h)) + h


class Net(nn.Module):
    """Blocks that are called one by one, or by way of one subgraph."""

    def __init__(self, n=3, by_call=True, stacked=False):
        super().__init__()
        layers = nn.LayerList(Block() for _ in range(n))
        self.layers = layers.stack() if stacked else layers
        self.by_call = by_call

    def __call__(self, h):
        if not self.by_call:
            for layer in self.layers:
                h = layer(h)
            return h
        block = self.layers[0].build_subgraph("block", [h], weight_prefix="layers.0.")
        for i in range(len(self.layers)):
            h = ops.call(block, h, prefix=f"layers.{i}.")[0]
        return h


def pair(make=Net):
    """The same model with subgraphs and without."""
    models = [maxjax.init(make(by_call=by_call), jax.random.key(0)) for by_call in (True, False)]
    for a, b in zip(*map(jax.tree.leaves, models), strict=True):
        np.testing.assert_array_equal(a, b)
    return models


def scanned(model, x):
    return jax.lax.scan(lambda h, _: (model(h), h), x, None, length=3)


RUNS = {
    "eager": lambda m, x: m(x),
    "jit": lambda m, x: jax.jit(lambda m, x: m(x))(m, x),
    "grad": lambda m, x: jax.tree.leaves(jax.grad(lambda m: (m(x) ** 2).sum())(m)),
    "grad of jit": lambda m, x: jax.grad(lambda x: jax.jit(lambda m, x: m(x))(m, x).sum())(x),
    "vmap": lambda m, x: jax.vmap(m)(jnp.stack([x, 2 * x])),
    "scan": jax.jit(scanned),
    "grad of scan": lambda m, x: jax.tree.leaves(jax.grad(lambda m: scanned(m, x)[0].sum())(m)),
    "compile": lambda m, x: m.compile(KIND)(x),
    "checkpoint": lambda m, x: jax.grad(lambda x: jax.checkpoint(lambda m, x: m(x))(m, x).sum())(x),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_arrays_in_give_arrays_out(run):
    got, want = (run(model, jnp.asarray(X)) for model in pair())
    leaves = jax.tree.leaves(got)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    for a, b in zip(leaves, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


class Tower(nn.Module):
    """A stack whose layers each call subgraphs of their own layers."""

    def __init__(self, by_call=True):
        super().__init__()
        self.nets = nn.LayerList(Net(2, by_call) for _ in range(3)).stack()

    def __call__(self, h):
        return self.nets.scan(h)


@pytest.mark.parametrize("run", ["eager", "jit", "grad", "compile"])
def test_the_layers_of_a_stack_call_subgraphs(run):
    got, want = (RUNS[run](model, jnp.asarray(X)) for model in pair(Tower))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_prefix_may_start_at_the_module_that_calls():
    """Otherwise the layers of a child would all have the weights of the first."""

    class Parent(nn.Module):
        def __init__(self, by_call):
            super().__init__()
            self.net = Net(by_call=by_call)

        def __call__(self, h):
            return self.net(h)

    got, want = (model(jnp.asarray(X)) for model in pair(Parent))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_in_a_graph_they_are_tensor_values(stacked):
    model = maxjax.init(Net(stacked=stacked), jax.random.key(0))
    x = np.ones((19 + stacked, 3), np.float32)  # a size that no other test has traced
    Block.seen.clear()
    with Graph("g", input_types=[TensorType("float32", x.shape, CPU)]) as graph:
        found = model(graph.inputs[0].tensor)
        assert type(found) is TensorValue
        # Of an array, too: code in a Graph computes with TensorValues.
        double = graph.add_subgraph("double", lambda x: x * 2, [KIND])
        assert type(ops.call(double, jnp.asarray(X))[0]) is TensorValue
        graph.output(found)
    assert set(Block.seen) == {True}
    got = InferenceSession().load(graph, weights_registry=model.state_dict())(x)[0]
    np.testing.assert_allclose(got, model(jnp.asarray(x)), rtol=2e-5, atol=1e-6)


def test_tensor_values_in_give_tensor_values_out():
    model = maxjax.init(Net(), jax.random.key(0))
    sub = model.layers[0].build_subgraph("block", [KIND])
    Block.seen.clear()
    for x, kind in ((jnp.asarray(X), False), (X, False), (TensorValue(jnp.asarray(X)), True)):
        (y,) = ops.call(sub, x)
        assert isinstance(y, TensorValue if kind else jax.Array)
        np.testing.assert_allclose(np.asarray(y), model.layers[0](jnp.asarray(X)), rtol=2e-5)
    assert (
        Block.seen.count(True) == 1
    )  # traced once for TensorValues; arrays have a trace from before


def test_a_function_of_tensor_values_is_called_with_arrays():
    with Graph("g", input_types=[KIND]) as graph:
        double = graph.add_subgraph("double", lambda x: x.tensor * 2, [KIND])
        with graph.add_subgraph("half", input_types=[KIND]) as half:
            half.output(half.inputs[0].tensor / 2)
        graph.output(graph.inputs[0])
    for sub, factor in ((double, 2), (half, 0.5)):
        (y,) = ops.call(sub, jnp.asarray(X))
        assert isinstance(y, jax.Array)
        np.testing.assert_array_equal(y, X * factor)
        assert type(ops.call(sub, TensorValue(jnp.asarray(X)))[0]) is TensorValue
        last, _ = jax.lax.scan(lambda h, _, s=sub: (ops.call(s, h)[0], None), X, None, length=2)
        np.testing.assert_allclose(last, X * factor**2)


@pytest.mark.parametrize("stacked", [False, True])
def test_under_jit_the_calls_are_calls_of_one_function(stacked):
    model = maxjax.init(Net(5, stacked=stacked), jax.random.key(0))
    x = jnp.ones((17 + stacked, 3))  # a size that no other test has traced
    Block.seen.clear()
    text = jax.jit(lambda m, x: m(x)).lower(model, x).as_text()
    assert len(Block.seen) == 1
    assert text.count("func.func private @_call") == 1 and text.count(" call @_call") == 5
    assert len({str(equation.params["jaxpr"]) for equation in calls(model, x)}) == 1


def calls(model, x):
    jaxpr = jax.make_jaxpr(lambda m, x: m(x))(model, x)
    found = [one for one in jaxpr.eqns if one.params.get("name") == "_call"]
    assert len(found) == 5
    return found
