"""What a Weight's operators give: TensorValues among MAX's values, plain arrays in plain JAX code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, Graph, ShardingStrategy, TensorType, TensorValue, Weight, ops
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.nn import LayerList, Module

CPU = DeviceRef.CPU()
A = np.arange(6, dtype=np.float32).reshape(2, 3)
PLAIN = jnp.asarray(A)
X = TensorType("float32", (2, 3), CPU)

OPERATIONS = {
    "add": lambda w, a: w + a, "radd": lambda w, a: a + w,
    "sub": lambda w, a: w - a, "rsub": lambda w, a: a - w,
    "mul": lambda w, a: w * a, "rmul": lambda w, a: a * w,
    "div": lambda w, a: w / (a + 1), "rdiv": lambda w, a: a / (w + 1),
    "floordiv": lambda w, a: w // (a + 1), "mod": lambda w, a: w % (a + 1), "pow": lambda w, a: w**2,
    "rpow": lambda w, a: 2**w, "less": lambda w, a: w < a, "greater": lambda w, a: a > w,
    "equal": lambda w, a: w == a, "requal": lambda w, a: a == w, "unequal": lambda w, a: a != w,
    "neg": lambda w, a: -w, "abs": lambda w, a: abs(w), "number": lambda w, a: 1 - w,
    "matmul": lambda w, a: w @ a.T, "rmatmul": lambda w, a: a @ w.T, "own T": lambda w, a: w @ w.T,
    "T left": lambda w, a: w.T @ a, "T": lambda w, a: w.T + 0, "index": lambda w, a: w[0],
    "slice": lambda w, a: w[:, 1:], "reshape": lambda w, a: w.reshape((3, 2)),
    "astype": lambda w, a: w.astype("float16"), "numpy left": lambda w, a: A + w,
}  # fmt: skip


# Operators of jax.Array, which is on the left: they give arrays.
OF_ARRAYS = {"radd", "rsub", "rmul", "rdiv", "greater", "requal", "unequal", "rmatmul"}


def weight(value=A, **options) -> Weight:
    w = Weight("w", value.dtype, value.shape, CPU, **options)
    w.value = jnp.asarray(value)
    return w


def in_graph(function, *types):
    with Graph("g", input_types=types) as g:
        result = function(*[value.tensor for value in g.inputs])
        g.output(*(result if isinstance(result, (list, tuple)) else [result]))
    return g


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_gives_the_kind_of_where_it_is(name):
    w, kinds = weight(), []

    def run(w, a):
        result = OPERATIONS[name](w, a)
        kinds.append(isinstance(result, TensorValue))
        return jnp.asarray(result)

    want = np.asarray(run(w, PLAIN))
    jaxpr = str(jax.make_jaxpr(run)(w, PLAIN))
    assert kinds == [False, False]
    kinds.clear()
    graph = in_graph(lambda x: run(w, x.value), X)
    assert kinds == [name not in OF_ARRAYS]
    got = InferenceSession().load(graph)(A)[0].to_numpy()
    np.testing.assert_allclose(got, want, rtol=1e-6)
    kinds.clear()
    again = str(jax.make_jaxpr(lambda w, a: run(w, a))(w, PLAIN))
    assert again == jaxpr and kinds == [False]


@pytest.mark.parametrize(
    "name", list(OPERATIONS)[:10] + ["less", "equal", "requal", "matmul", "rmatmul", "T left"]
)
def test_beside_a_tensor_value_it_gives_one(name):
    assert isinstance(OPERATIONS[name](weight(), TensorValue(PLAIN)), TensorValue)


BOTH = {
    "max": ((), ()), "min": ((0,), (3,)), "mean": ((), ()), "var": ((-1,), (2,)), "argmax": ((1,), (2,)),
    "squeeze": ((), (2, 3)), "flatten": ((), (6,)), "transpose": ((), (3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOTH)
def test_methods_of_both_are_those_of_jax_in_plain_code(name):
    args, shape = BOTH[name]
    found = getattr(weight(), name)(*args)
    assert isinstance(found, jax.Array) and found.shape == shape
    np.testing.assert_allclose(found, getattr(A, name)(*args), rtol=1e-6)
    if name in ("max", "min", "mean", "var", "argmax"):
        kept = []
        w = weight()
        in_graph(lambda x: kept.append(getattr(w, name)(*args).shape) or x, X)
        assert kept == [[1 if i == (args or (-1,))[0] % 2 else n for i, n in enumerate((2, 3))]]


def test_two_axes_are_swapped_as_in_max():
    assert weight().transpose(0, 1).shape == (3, 2)
    assert weight().transpose((0, 1)).shape == (2, 3)


def test_what_max_model_code_does_with_a_weight():
    w = Weight("w", "float32", (2, 3), CPU)
    shapes = []

    def forward(x):
        shapes.extend(y.shape for y in ((w + 1).mean(axis=-1), w[0].cast("float16"), w.T.cast("int32"),
                                        w.reshape((3, 2)).cast("int32"), w.T.reshape((6,)), w.T.T))  # fmt: skip
        return (w + 1).mean(axis=-1) + x

    in_graph(forward, X)
    assert shapes == [[2, 1], [3], [3, 2], [3, 2], [6], [2, 3]]


@pytest.mark.parametrize("kind", ["stacked", "shard", "packed", "lazy"])
def test_weights_of_other_forms(kind):
    kinds = []

    def look(w):
        kinds.extend(type(y) for y in (w + 1, w[0], w.T + 0, w.T, w.reshape((-1,))))
        return w + 1

    if kind == "stacked":
        layers = LayerList(Scale(3) for _ in range(3))
        layers.load_state_dict({f"{i}.gain": A[0] + i for i in range(3)})
        w = layers.stack().layers[1].gain
        look = lambda w: (kinds.extend([type(w + 1), type(w[0]), type(w.reshape((3, 1)))]), w + 1)[
            1
        ]
        want = A[0] + 2
    elif kind == "shard":
        w = weight(sharding_strategy=ShardingStrategy.columnwise(2)).shard([CPU, CPU])[1]
        want = A[:, 2:] + 1
    elif kind == "packed":
        w = weight(
            np.arange(36, dtype=np.uint8).reshape(2, 18),
            quantization_encoding=QuantizationEncoding.Q4_0,
        )
        want = np.arange(36).reshape(2, 18) + 1
    else:
        w, want = Weight("w", "float32", (2, 3), CPU), None
    if want is not None:
        np.testing.assert_allclose(np.asarray(look(w)), want)
        assert not any(issubclass(k, TensorValue) for k in kinds)
        kinds.clear()
    model = in_graph(lambda x: look(w), X)
    assert kinds and all(issubclass(k, TensorValue) for k in kinds)
    if want is not None:
        np.testing.assert_allclose(InferenceSession().load(model)(A)[0].to_numpy(), want)


def test_a_packed_weight_on_the_right_of_a_product():
    encoded = np.random.default_rng(0).integers(0, 255, (4, 18), np.uint8)
    encoded[:, 1] = 0  # a scale of moderate size
    w = weight(encoded, quantization_encoding=QuantizationEncoding.Q4_0)
    x = np.ones((2, 32), np.float32)
    want = np.asarray(jnp.asarray(x) @ w.T)
    model = InferenceSession().load(
        in_graph(lambda x: x @ w.T, TensorType("float32", (2, 32), CPU))
    )
    np.testing.assert_allclose(model(x)[0].to_numpy(), want, rtol=1e-6)
    with pytest.raises(ValueError, match=r"\(2, 31\) and \(32, 4\)"):
        in_graph(lambda x: x @ w.T, TensorType("float32", (2, 31), CPU))


def test_the_fast_product_makes_no_transpose():
    w = weight()
    program = in_graph(lambda x: x @ w.T, X)
    assert "transpose" not in str(program.jaxpr)
    assert "transpose" not in str(in_graph(lambda x: ops.matmul(x, w.T), X).jaxpr)


class Scale(Module):
    """Notes what an operation on its weight gives."""

    seen: list = []

    def __init__(self, n):
        super().__init__()
        self.gain = Weight("gain", "float32", (n,), CPU)

    def __call__(self, x):
        y = self.gain + 1
        Scale.seen.append(type(y))
        # The mean of a TensorValue keeps its axis: another result, had it the wrong kind.
        return y.mean(axis=-1) * x


class Repeated(Module):
    """Its layers by subgraphs, as a stack, or one by one."""

    def __init__(self, how):
        super().__init__()
        layers = LayerList(Scale(3) for _ in range(2))
        self.layers = layers.stack() if how == "scan" else layers
        self.how = how

    def __call__(self, x):
        if self.how == "scan":
            return self.layers(x)
        if self.how == "call":
            block = self.layers[0].build_subgraph("block", [x], weight_prefix="layers.0.")
            for i in range(2):
                x = ops.call(block, x, prefix=f"layers.{i}.")[0]
            return x
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("how", ["call", "scan", "one by one"])
def test_the_kind_is_part_of_the_key_of_every_trace(how):
    model = maxjax.init(Repeated(how), jax.random.key(0))
    model.load_state_dict({f"layers.{i}.gain": A[i] for i in range(2)})
    want = A * (A[0] + 1).mean() * (A[1] + 1).mean()
    plain = jax.jit(lambda m, x: jnp.asarray(m(x)))

    def kinds(run):
        Scale.seen.clear()
        np.testing.assert_allclose(np.asarray(run()), want, rtol=1e-5)
        found = {kind is TensorValue for kind in Scale.seen}
        return found

    graph = lambda: InferenceSession().load(in_graph(model, X))(A)[0].to_numpy()
    assert kinds(graph) == {True}
    assert kinds(lambda: plain(model, PLAIN)) == {False}
    kinds(graph)
    assert kinds(lambda: model(TensorValue(PLAIN)).to_numpy()) <= {True}
    assert kinds(lambda: model(PLAIN)) <= {False}
    assert kinds(lambda: jax.jit(lambda m, x: m(TensorValue(x)).value)(model, PLAIN)) <= {True}
    assert kinds(lambda: model.compile(jax.ShapeDtypeStruct((2, 3), jnp.float32))(PLAIN)) <= {False}


def test_a_jitted_function_of_a_weight_or_a_module_is_traced_for_each_kind():
    model = Scale(3)
    model.load_state_dict({"gain": A[0]})
    of_module = jax.jit(lambda m: (m.gain + 1).mean(-1))
    of_weight = jax.jit(lambda w: (w + 1).mean(-1))
    shapes = lambda: [tuple(map(int, y.shape)) for y in (of_module(model), of_weight(model.gain))]
    assert shapes() == [(), ()]
    found = []
    in_graph(lambda x: (found.extend(shapes()), x)[1], X)
    assert found == [(1,), (1,)] and shapes() == [(), ()]


def test_the_kind_is_of_the_outermost_call_and_of_this_thread():
    class Inner(Module):
        def __init__(self):
            super().__init__()
            self.scale = Scale(3)

        def __call__(self, tree):
            return self.scale(jnp.asarray(tree["x"][0]))

    model = maxjax.init(Inner(), jax.random.key(0))
    for x, values in ((TensorValue(PLAIN), True), (PLAIN, False)):
        Scale.seen.clear()
        model({"x": [x]})
        assert [kind is TensorValue for kind in Scale.seen] == [values]
    with pytest.raises(AttributeError):
        model({"x": [TensorValue(PLAIN), model.nothing]})
    assert not isinstance(model.scale.gain + 1, TensorValue)


def test_gradients_of_a_module_called_with_tensor_values():
    model = Scale(3)
    model.load_state_dict({"gain": A[0]})
    loss = lambda m, x: jnp.sum(jnp.asarray(m(x)))
    plain = jax.grad(loss)(model, PLAIN)
    valued = jax.grad(lambda m, x: loss(m, TensorValue(x)))(model, PLAIN)
    np.testing.assert_allclose(valued.gain.value, plain.gain.value)
    assert jax.tree.structure(valued) == jax.tree.structure(plain) == jax.tree.structure(model)


def test_two_weights_of_one_name_are_told_apart():
    def plus(a, b):
        return in_graph(lambda x: x + a + b, X)

    lazy = lambda: Weight("w", "float32", (2, 3), CPU)
    # With values of their own they need no names.
    np.testing.assert_array_equal(
        InferenceSession().load(plus(weight(), weight()))(A)[0].to_numpy(), 3 * A
    )
    for a, b in ((lazy(), lazy()), (weight(), lazy()), (lazy(), weight())):
        graph = plus(a, b)
        with pytest.raises(
            ValueError, match="several weights named 'w', so the weights registry is ambiguous"
        ):
            InferenceSession().load(graph, weights_registry={"w": A})
        a.value = b.value = A
        np.testing.assert_array_equal(InferenceSession().load(graph)(A)[0].to_numpy(), 3 * A)
