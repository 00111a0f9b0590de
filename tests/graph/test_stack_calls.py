"""ops.call on the layers of a LayerStack: one loop in a Graph, n calls of one trace elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import init, nn
from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, Graph, TensorType, ops

CPU = DeviceRef.CPU()
X = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
KIND = TensorType("float32", (2, 4), CPU)


class Block(nn.Module):
    traces = 0

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4, "float32", CPU, has_bias=True)

    def __call__(self, h, rope):
        Block.traces += 1
        return ops.tanh(self.proj(h)) * rope + h


class Net(nn.Module):
    """As in MAX: a subgraph of the first layer, called with each layer's weights."""

    def __init__(self, n, stacked, order=None, between=False):
        super().__init__()
        layers = nn.LayerList(Block() for _ in range(n))
        self.layers = layers.stack() if stacked else layers
        self.order, self.between = order or list(range(n)), between

    def __call__(self, h):
        rope = h * 0.5
        block = self.layers[0].build_subgraph("block", [h, rope], weight_prefix="layers.0.")
        states = []
        for i in self.order:
            h = ops.call(block, h, rope, prefix=f"layers.{i}.")[0]
            states.append(h)
            if self.between:
                h = h * 2
        return h, states[1]


def nets(n, **options):
    plain = init(Net(n, False, **options), jax.random.key(0))
    stacked = init(Net(n, True, **options), jax.random.key(0))
    return plain, stacked


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{}, {"order": [2, 3, 0, 1]}, {"order": [1, 1, 1]}, {"between": True}]
)
def test_stacked_and_not_are_the_same(options):
    plain, stacked = nets(4, **options)
    want = [np.asarray(y) for y in plain(jnp.asarray(X))]
    for got in (
        stacked(jnp.asarray(X)),
        jax.jit(lambda m, x: m(x))(stacked, X),
        stacked.compile(KIND)(X),
        stacked.compile(X)(X),
        stacked.compile(TensorType("float32", ("batch", 4), CPU))(X),
    ):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stacked, loops", [(True, 1), (False, 0)])
def test_one_loop_in_a_graph(stacked, loops):
    texts = [str(Graph("g", nets(n)[stacked], [KIND]).jaxpr) for n in (4, 12)]
    assert all(text.count("scan[") == loops for text in texts)
    assert (len(texts[1]) < 1.05 * len(texts[0])) == stacked


def test_traced_once_outside_of_a_graph():
    _, model = nets(5)
    x = np.ones((7, 4), np.float32)  # a size that no other test has traced
    Block.traces = 0
    jax.jit(lambda m, x: m(x))(model, x)
    jax.jit(lambda m, x: m(x)[::-1])(model, x)
    assert Block.traces == 1


def test_the_registry_has_the_names_of_the_layers():
    plain, stacked = nets(3)
    graph = Graph("g", stacked, [KIND])
    other = init(Net(3, False), jax.random.key(1))
    program = InferenceSession().load(graph, weights_registry=other.state_dict())
    np.testing.assert_allclose(program(X)[0], other(jnp.asarray(X))[0], rtol=1e-5, atol=1e-6)
    some = {"layers.1.proj.bias": np.ones(4, np.float32)}
    program = InferenceSession().load(graph, weights_registry=some)
    plain.layers[1].proj.bias.value = jnp.ones(4)
    np.testing.assert_allclose(program(X)[0], plain(jnp.asarray(X))[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"Weight 'layers\.2\.proj\.bias'"):
        InferenceSession().load(
            graph, weights_registry={"layers.2.proj.bias": np.ones(3, np.float32)}
        )


def test_lazy_layers_are_named():
    graph = Graph("g", Net(3, True), [KIND])
    with pytest.raises(ValueError, match=r"'layers\.0\.proj\.weight'"):
        InferenceSession().load(graph)


def test_in_a_with_block():
    _, model = nets(3)
    with Graph("g", input_types=[KIND]) as graph:
        (h,) = graph.inputs
        graph.output(*model(h))
    for a, b in zip(InferenceSession().load(graph)(X), model(jnp.asarray(X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
