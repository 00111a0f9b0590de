"""build_subgraph and ops.call: seed 003, prefix binding, traced once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import init
from maxjax.graph import DeviceRef, Graph, Model, TensorType, TensorValue, Weight
from maxjax.graph.subgraph import call
from maxjax.nn import LayerList, Module

CPU = DeviceRef.CPU()
traces = []


class Block(Module):
    def __init__(self, n=3):
        super().__init__()
        self.weight = Weight("weight", "float32", (n, n), CPU)

    def __call__(self, pair, z):
        traces.append(1)
        a, b = pair
        return a @ self.weight.T + b * z, a


class Net(Module):
    def __init__(self, n=4):
        super().__init__()
        self.layers = LayerList(Block() for _ in range(n))
        self.form = "values"

    def __call__(self, x):
        inputs = {
            "values": [[x, x], x],
            "types": [[TensorValue(x).type] * 2, TensorValue(x).type],
            "structs": [
                [jax.ShapeDtypeStruct(x.shape, jnp.float32)] * 2,
                TensorType("float32", (2, 3), CPU),
            ],
        }[self.form]
        block = self.layers[0].build_subgraph("block", inputs, weight_prefix="layers.0.")
        h = x
        for i in range(len(self.layers)):
            h, last = call(block, [h, x], x, prefix=f"layers.{i}.")
        return h, last


def reference(model, x):
    h = last = np.asarray(x, np.float64)
    for layer in model.layers:
        h, last = (
            h @ np.asarray(layer.weight.value, np.float64).T + np.asarray(x, np.float64) ** 2,
            h,
        )
    return h, last


@pytest.fixture
def net():
    return init(Net(), jax.random.key(0))


X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["values", "types", "structs"])
@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: m(x),
        lambda m, x: jax.jit(lambda m, x: m(x))(m, x),
        lambda m, x: m.compile(TensorType("float32", (2, 3), CPU))(x),
        lambda m, x: jax.vmap(lambda m, x: m(x), (None, 0))(m, x[None].repeat(2, 0)),
    ],
    ids=["eager", "jit", "compile", "vmap"],
)
def test_every_way_gives_the_plain_loop(net, form, run):
    if run(net, X) is None:
        pytest.fail("nothing came back")
    net.form = form if form != "structs" else "values"
    h, last = run(net, jnp.asarray(X))
    h, last = (np.asarray(v)[-1] if np.ndim(v) == 3 else np.asarray(v) for v in (h, last))
    want_h, want_last = reference(net, X)
    np.testing.assert_allclose(h, want_h, atol=1e-5)
    np.testing.assert_allclose(last, want_last, atol=1e-5)


def test_the_layer_is_traced_once():
    class Other(Block):  # its own structure, so that no earlier trace is found
        pass

    model = Net()
    model.layers = LayerList(Other() for _ in range(6))
    init(model, jax.random.key(1))
    traces.clear()
    jax.jit(lambda m, x: m(x))(model, jnp.asarray(X))
    assert len(traces) == 1
    model(jnp.asarray(X))
    assert len(traces) == 1  # the same structure and types
    model(jnp.ones((5, 3)))
    assert len(traces) == 2  # other types


def test_gradients_reach_every_layer(net):
    grads = jax.grad(lambda m: m(jnp.asarray(X))[0].sum())(net)
    plain = jax.grad(lambda m: _plain(m, jnp.asarray(X)).sum())(net)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def _plain(m, x):
    h = x
    for layer in m.layers:
        h = layer((h, x), x)[0]
    return h


def test_the_layer_is_left_as_it_was(net):
    before = (net.layers[0].weight.name, jax.tree.structure(net), list(net.raw_state_dict()))
    net(jnp.asarray(X))
    net.layers[0].build_subgraph("b", [[X, X], X], weight_prefix="layers.0.")
    assert before == (
        net.layers[0].weight.name,
        jax.tree.structure(net),
        list(net.raw_state_dict()),
    )


def test_weights_outside_the_prefix_are_shared():
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.gain = Weight("gain", "float32", (3,), CPU)
            for layer in self.layers:
                layer.set_shared_weight("gain", self.gain)
                layer.__class__ = Gained

    class Gained(Block):
        def __call__(self, pair, z):
            h, a = super().__call__(pair, z)
            return h * self.gain[None], a

    model = init(Tied(), jax.random.key(0))
    model.gain.value = jnp.array([1.0, 2.0, 3.0])
    got = np.asarray(model(jnp.asarray(X))[0])
    h = X
    for layer in model.layers:
        h = (h @ np.asarray(layer.weight.value).T + X * X) * [1, 2, 3]
    np.testing.assert_allclose(got, h, atol=1e-4)


def test_in_a_graph_the_registry_decides():
    block = Block()
    block.load_state_dict({"weight": np.eye(3, dtype=np.float32)})
    block.weight.name = "layers.0.weight"
    with Graph("g", input_types=[TensorType("float32", (2, 3), CPU)]) as g:
        x = g.inputs[0].tensor
        sub = block.build_subgraph("b", [[x, x], x], weight_prefix="layers.0.")
        h = x
        for i in range(3):
            h = call(sub, h, x, x, prefix=f"layers.{i}.")[0].tensor
        g.output(h)
    registry = {f"layers.{i}.weight": np.full((3, 3), i, np.float32) for i in range(3)}
    h = X
    for value in registry.values():
        h = h @ value.T + X * X
    np.testing.assert_allclose(Model(g, registry)(X)[0], h, atol=1e-5)
    with pytest.raises(ValueError, match="layers.2.weight"):
        Model(
            g,
            {
                "layers.1.weight": np.ones((3, 3), np.float32),
                "layers.0.weight": np.ones((3, 3), np.float32),
            },
        )


def test_graph_subgraphs_of_functions():
    w = Weight("w", "float32", (3,), CPU)
    with Graph("g", input_types=[TensorType("float32", (3,), CPU)]) as g:
        sub = g.add_subgraph(
            "s", lambda x: (x.tensor * w, x + 1), [TensorType("float32", (3,), CPU)]
        )
        a, b = call(sub, g.inputs[0])
        g.output(a, *call(sub, b))
    outs = Model(g, {"w": np.arange(3, dtype=np.float32)})(np.ones(3, np.float32))
    assert [o.to_numpy().tolist() for o in outs] == [[0, 1, 2], [0, 2, 4], [3, 3, 3]]
    with pytest.raises(NotImplementedError, match=r"add_subgraph\(path="):
        g.add_subgraph("s", lambda x: x, path="graph.mlir")
    with pytest.raises(TypeError, match="'inputs'"):
        g.add_subgraph("s", lambda x: x, inputs=[])


def test_a_subgraph_written_as_a_block():
    """As in the example of MAX's add_subgraph; here it has a Weight of its own too."""
    kind, w = TensorType("float32", ["n", 3], CPU), Weight("w", "float32", (3,), CPU)
    with Graph("main", input_types=[kind]) as g:
        with g.add_subgraph("add_w", input_types=[kind]) as sub:
            x = sub.inputs[0].tensor
            sub.output(x + w, x)
        first, same = call(sub, g.inputs[0])
        g.output(*call(sub, first), same)
    assert g.output_types[0].shape == ["n", 3]
    outs = Model(g, {"w": np.arange(3, dtype=np.float32)})(np.ones((2, 3), np.float32))
    assert [o.to_numpy()[0].tolist() for o in outs] == [[1, 3, 5], [1, 2, 3], [1, 1, 1]]
    with pytest.raises(ValueError, match=r"built for DType.float32 \[Dim\('n'\), Dim\(3\)\]"):
        call(sub, jnp.ones((2, 4)))
    with Graph("main", input_types=[kind]) as g:
        sub = g.add_subgraph("s", input_types=[kind])
        with pytest.raises(ValueError, match="'s' is not finished"):
            call(sub, g.inputs[0])
        g.output(g.inputs[0])


def test_the_inputs_of_a_subgraph_have_types(net):
    block = net.layers[0].build_subgraph("block", [[X, X], X])
    assert [(i.dtype.name, i.shape) for i in block.inputs] == [("float32", [2, 3])] * 3


# -- what is refused


def build(net, **options):
    with Graph("g", input_types=[]):
        return net.layers[0].build_subgraph("block", [[X, X], X], **options)


def test_wrong_calls(net):
    sub = net.layers[0].build_subgraph("block", [[X, X], X])
    with pytest.raises(ValueError, match="Expected 3 args to call to block, got 2"):
        call(sub, X, X)
    with pytest.raises(ValueError, match=r"argument 1.*Dim\(4\).*Dim\(3\)"):
        call(sub, X, np.ones((2, 4), np.float32), X)
    with pytest.raises(ValueError, match="int32.*float32"):
        call(sub, X, X, X.astype(np.int32))
    with pytest.raises(TypeError, match="Block"):
        call(net.layers[0], X)
    assert len(call(sub, [X, X], X)) == 2  # without a prefix the weights are the layer's own


def test_names_that_are_nowhere(net):
    class Wrong(Net):
        def __call__(self, x):
            block = self.layers[0].build_subgraph("block", [[x, x], x], weight_prefix="layers.0.")
            return call(block, x, x, x, prefix="layers.9.")

    model = init(Wrong(), jax.random.key(0))
    with pytest.raises(ValueError, match=r"layers\.9\.weight"):
        model(jnp.asarray(X))
    with pytest.raises(ValueError, match=r"layers\.9\.weight"):
        model.compile(TensorType("float32", (2, 3), CPU))


def test_layers_that_differ(net):
    class Differ(Net):
        def __init__(self):
            super().__init__()
            self.layers[2] = Block(5)

    with pytest.raises(ValueError, match=r"'layers.2.weight'.*Dim\(5\).*Dim\(3\)"):
        init(Differ(), jax.random.key(0))(jnp.asarray(X))


@pytest.mark.parametrize("result", [None, {"a": X}, [[X]]])
def test_results_that_are_no_tensors(result):
    class Odd(Module):
        def __call__(self, x):
            return result if result is None or isinstance(result, dict) else [[x]]

    with pytest.raises(TypeError, match="flat list"):
        Odd().build_subgraph("b", [X])


def test_inputs_that_are_no_tensors(net):
    with pytest.raises(TypeError, match="int"):
        net.layers[0].build_subgraph("b", [[X, X], 3])
    with pytest.raises(TypeError, match="inputs"):
        net.layers[0].build_subgraph("b")


class Outer(Module):
    def __init__(self):
        super().__init__()
        self.net = LayerList([Stacked()])

    def __call__(self, x):
        return self.net(x)


class Stacked(Module):
    """Its prefixes are those of the whole model, as MAX writes them."""

    def __init__(self):
        super().__init__()
        self.layers = LayerList(Block() for _ in range(2))

    def __call__(self, x):
        sub = self.layers[0].build_subgraph("b", [[x, x], x], weight_prefix="net.0.layers.0.")
        for i in range(2):
            x = call(sub, [x, x], x, prefix=f"net.0.layers.{i}.")[0]
        return x


def test_a_child_called_alone_finds_prefixes_of_the_whole_model():
    model = init(Outer(), jax.random.key(0))
    want = np.asarray(model(jnp.asarray(X)))
    model.state_dict()
    np.testing.assert_allclose(np.asarray(model.net[0](jnp.asarray(X))), want, atol=1e-5)
