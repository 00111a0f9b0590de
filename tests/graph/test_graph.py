"""Graph: both forms, weights by name, every way out of the block, running it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.graph import DeviceRef, Dim, Graph, Model, TensorType, TensorValue, Weight, ops
from maxjax.nn import LayerList, Module
from tests.foreign import Foreign

CPU = DeviceRef.CPU()
F23 = TensorType("float32", (2, 3), CPU)
ONES = np.ones((2, 3), np.float32)


def weight(name="w", shape=(3,), value=None):
    w = Weight(name, "float32", shape, CPU)
    if value is not None:
        w.value = jnp.full(shape, value, jnp.float32)
    return w


class Lin(Module):
    def __init__(self, n=3):
        super().__init__()
        self.weight = Weight("weight", "float32", (n, n), CPU)

    def __call__(self, x):
        return x @ self.weight.T


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layers = LayerList(Lin() for _ in range(2))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def fill(model, seed=0):
    rng = np.random.default_rng(seed)
    return {
        n: rng.standard_normal([int(d) for d in w.shape]).astype(np.float32)
        for n, w in model.raw_state_dict().items()
    }


# -- writing


def test_block_form():
    w = weight()
    with Graph("g", input_types=[F23]) as g:
        assert Graph.current is g and isinstance(g.inputs[0], TensorValue)
        assert g.inputs[0].tensor.type == F23
        g.output(g.inputs[0].tensor * g.add_weight(w) + w, g.inputs[0])
    assert [t.shape for t in g.output_types] == [[2, 3], [2, 3]]
    first, second = Model(g, {"w": np.arange(3, dtype=np.float32)}).execute(ONES)
    np.testing.assert_array_equal(first, [[0, 2, 4]] * 2)
    np.testing.assert_array_equal(second.to_numpy(), ONES)
    assert "mul" in str(g) and "Graph g" in repr(g)


@pytest.mark.parametrize(
    "forward, count",
    [
        (lambda x: x + 1, 1),
        (lambda x: (x + 1, x.tensor * 2), 2),
        (lambda x: [x], 1),
        (lambda x: jnp.sin(x), 1),
        (lambda x: None, 0),
    ],
)
def test_function_form(forward, count):
    g = Graph("g", forward, [F23])
    assert len(g.output_types) == count == len(Model(g)(ONES))


def test_function_form_with_other_arguments():
    g = Graph("g", lambda x, k, scale: (x + k) * scale, [F23], None, 1.0, scale=3.0)
    np.testing.assert_array_equal(Model(g)(ONES)[0], ONES * 6)


def _leave_by_return():
    with Graph("g", input_types=[F23]) as g:
        return g.inputs[0] + 1


def _leave_by_break():
    for _ in range(2):
        with Graph("g", input_types=[F23]) as g:
            jnp.sin(g.inputs[0])
            break


def _leave_by_exception():
    with pytest.raises(KeyError, match="boom"):
        with Graph("g", input_types=[F23]):
            raise KeyError("boom")


def _leave_without_output():
    with Graph("g", input_types=[F23]) as g:
        g.inputs[0] + 1
    assert g.jaxpr is None
    with pytest.raises(ValueError, match="no output"):
        Model(g)


def _leave_a_function_without_output():
    assert Graph("g", lambda x: None, [F23]).output_types == []


def _leave_with_output():
    with Graph("g", input_types=[F23]) as g:
        g.output(g.inputs[0])


def _leave_a_nested_one():
    with pytest.raises(ZeroDivisionError):
        with Graph("outer", input_types=[F23]) as outer:
            with Graph("inner", input_types=[F23]) as inner:
                assert Graph.current is inner
                inner.output(inner.inputs[0])
            assert Graph.current is outer
            1 / 0


def _leave_a_generator():
    def block():
        with Graph("g", input_types=[F23]) as g:
            yield g

    started = block()
    next(started)
    started.close()


def _leave_by_an_error_in_a_function():
    with pytest.raises(ZeroDivisionError):
        Graph("g", lambda x: 1 / 0, [F23])


WAYS = [f for name, f in list(globals().items()) if name.startswith("_leave")]


@pytest.mark.parametrize("way", WAYS)
def test_no_trace_stays_behind(way):
    way()
    assert not isinstance(jnp.ones(2), jax.core.Tracer)
    with pytest.raises(LookupError):
        Graph.current
    np.testing.assert_array_equal(Model(Graph("next", lambda x: x * 2, [F23]))(ONES)[0], 2 * ONES)
    assert float(jax.jit(lambda x: x + 1)(1.0)) == 2


def test_nested_blocks():
    with Graph("outer", input_types=[F23]) as outer:
        with Graph("inner", input_types=[F23]) as inner:
            inner.output(inner.inputs[0] * 2)
        outer.output(outer.inputs[0] + 1)
    np.testing.assert_array_equal(Model(inner)(ONES)[0], 2 * ONES)
    np.testing.assert_array_equal(Model(outer)(ONES)[0], 2 * ONES)


def test_wrong_use():
    with pytest.raises(TypeError, match="TensorType"):
        Graph("g", input_types=[ONES])
    with Graph("g", input_types=[F23]) as g:
        with pytest.raises(TypeError, match="str"):
            g.output("x")
        g.output(g.inputs[0])
        with pytest.raises(ValueError, match="already"):
            g.output(g.inputs[0])
    with pytest.raises(ValueError, match="inside"):
        Graph("g").output(1)
    with pytest.raises(ValueError, match="another"):
        g.__enter__()
    with pytest.raises(NotImplementedError, match="custom_extensions"):
        Graph("g", custom_extensions=["x"])


# -- weights


def test_two_weights_of_one_name():
    with Graph("g") as g:
        g.add_weight(weight())
        with pytest.raises(ValueError, match="Weight 'w' already exists in Graph 'g'"):
            g.add_weight(weight())


def test_a_weight_and_a_module_enter_any_number_of_graphs():
    model = Net()
    values = fill(model)
    for _ in range(3):
        compiled = Model(model.trace(F23), values)
        want = ONES @ values["layers.0.weight"].T @ values["layers.1.weight"].T
        np.testing.assert_allclose(compiled(ONES)[0], want, rtol=1e-4, atol=1e-5)
    assert model.layers[0].weight.value is None
    assert model.trace(F23).name == "Net" and model.trace(F23, name="n").name == "n"


def test_children_called_alone_have_the_names_of_the_state_dict():
    """As in MAX: a registry for the model also decides for a Graph that calls its layers one by one."""
    model, other = Net(), fill(Net(), seed=1)
    model.load_state_dict(fill(model))
    graph = Graph("g", lambda x: model.layers[1](model.layers[0](x)), [F23])
    assert [entry.names for entry in graph.entries] == [["layers.0.weight"], ["layers.1.weight"]]
    want = ONES @ other["layers.0.weight"].T @ other["layers.1.weight"].T
    np.testing.assert_allclose(Model(graph, other)(ONES)[0], want, rtol=1e-4, atol=1e-5)
    # The child's own state dict has the short names.
    graph = Graph("g", model.layers[0], [F23])
    value = np.full((3, 3), 2, np.float32)
    np.testing.assert_array_equal(Model(graph, {"weight": value})(ONES)[0], ONES * 6)


def test_a_renamed_weight_has_its_new_name_in_a_graph():
    layers = [Lin(), Lin()]
    for i, layer in enumerate(layers):
        layer.weight.name = f"w{i}"
    graph = Graph("g", lambda x: layers[1](layers[0](x)), [F23])
    registry = {f"w{i}": np.full((3, 3), i + 1, np.float32) for i in range(2)}
    np.testing.assert_array_equal(Model(graph, registry)(ONES)[0], ONES * 18)
    assert list(layers[0].raw_state_dict()) == ["weight"]
    layers[0].state_dict()
    assert layers[0].weight.name == "weight"


def test_a_registry_may_have_the_own_names_of_weights():
    """As in MAX before the first state dict: a Weight that a checkpoint allocated is named after its tensor."""
    model = Net()
    for i, layer in enumerate(model.layers):
        layer.weight = Weight(f"model.{i}.w", "float32", (3, 3), CPU)
    graph = Graph("g", model, [F23])
    registry = {f"model.{i}.w": np.full((3, 3), i + 1, np.float32) for i in range(2)}
    np.testing.assert_array_equal(Model(graph, registry)(ONES)[0], ONES * 18)


def test_inputs_and_output_types_that_are_not_there_yet():
    graph = Graph("g", input_types=[F23])
    with pytest.raises(ValueError, match="inputs exist inside the with block"):
        _ = graph.inputs
    with graph:
        with pytest.raises(TypeError, match="not yet terminated by a call to output"):
            _ = graph.output_types
        graph.output(graph.inputs[0])
    assert len(graph.inputs) == 1 and graph.output_types == [F23]


def test_modules_are_compiled_before_and_after_they_are_loaded():
    model = Net()
    values = fill(model)
    with pytest.raises(ValueError, match="Weight 'layers.0.weight' is not in the weights registry"):
        model.compile(F23, weights={})
    program = model.compile(F23)
    with pytest.raises(ValueError, match="weight 'layers.0.weight' has no value"):
        program(ONES)
    model.load_state_dict(values)
    np.testing.assert_allclose(program(ONES)[0], model(ONES), rtol=1e-5)
    np.testing.assert_allclose(model.compile(F23)(ONES)[0], model(ONES), rtol=1e-5)
    doubled = model.compile(
        F23, weights={"layers.0.weight": 2 * values["layers.0.weight"], "extra": 1}
    )
    np.testing.assert_allclose(doubled(ONES)[0], 2 * model(ONES), rtol=1e-5)


def test_loaded_weights_are_arguments_not_constants():
    model = Net()
    model.load_state_dict(fill(model))
    text = str(Graph("g", model, [F23]).jaxpr)
    assert "lambda ; a:f32[3,3] b:f32[3,3] c:f32[2,3]. let" in text


def test_the_value_of_a_weight_is_an_argument_too():
    w = weight(value=5)
    program = Model(
        Graph("g", lambda x: jax.lax.mul(x.value, w.value), [TensorType("float32", (3,), CPU)])
    )
    w.value = jnp.ones(3)
    np.testing.assert_array_equal(program(np.full(3, 2, np.float32))[0], [2, 2, 2])


def test_weights_without_axes_and_in_every_corner():
    w, s = weight(shape=(3, 3), value=2.0), weight("s", ())

    def forward(x):
        x = jax.jit(lambda y: y.value @ jnp.asarray(w) * jnp.asarray(s))(x)
        x = jax.lax.scan(lambda c, _: (c + jnp.asarray(s), None), x, None, length=2)[0]
        x = jax.vmap(lambda r: r @ w.T)(x)
        return jax.lax.cond(x.sum() > 0, lambda y: y * jnp.asarray(s), lambda y: y, x)

    g = Graph("g", forward, [F23])
    got = Model(g, {"s": np.array(3.0, np.float32)})(ONES)[0]
    want = ((ONES @ np.full((3, 3), 2.0) * 3 + 6) @ np.full((3, 3), 2.0)) * 3
    np.testing.assert_allclose(got, want)
    assert sorted(e.names[0] for e in g.entries) == ["s", "w"]


def test_a_large_weight_takes_no_memory_while_tracing():
    w = Weight("w", "float32", (200_000, 100_000), CPU)  # 80 GB
    g = Graph("g", lambda x: x.value @ w, [TensorType("float32", (1, 200_000), CPU)])
    assert g.output_types[0].shape == [1, 100_000]


def test_registry_values_that_do_not_fit():
    g = Graph("g", lambda x: x * weight(), [F23])
    for value in (np.ones(4, np.float32), np.ones(3, np.int32)):
        with pytest.raises(ValueError, match="Weight 'w' in the weights registry"):
            Model(g, {"w": value})


def test_two_weights_alike_by_name_need_values_of_their_own():
    a, b = weight(value=2.0), weight(value=3.0)
    g = Graph("g", lambda x: x * a + b, [F23])
    np.testing.assert_array_equal(Model(g)(ONES)[0], ONES * 5)
    with pytest.raises(ValueError, match="several weights named 'w'"):
        Model(g, {"w": np.ones(3, np.float32)})


def test_weights_of_a_graph():
    weights = Graph("my_model").weights()
    w = weights.layers[0].attention.weight.allocate("float32", (3,))
    assert w.name == "layers.0.attention.weight" and weights.layers[0].attention.weight.exists()
    assert [n for n, _ in weights.layers.items()] == ["layers.0.attention.weight"]
    assert not weights.layers[1].mlp.weight.exists()
    with pytest.raises(ValueError, match="dtype and a shape"):
        weights.x.allocate()
    with pytest.raises(KeyError):
        w2 = weights.layers[0].attention.weight.data()
        del w2
    with Graph("g", input_types=[F23]) as g:
        g.output(g.inputs[0] + g.add_weight(w))
    np.testing.assert_array_equal(Model(g, {w.name: np.ones(3, np.float32)})(ONES)[0], ONES * 2)


# -- symbolic dimensions


def test_named_dimensions():
    batch = TensorType("float32", ("batch", 3), CPU)
    w = weight("w", (4, 3))

    def forward(x, y):
        assert [str(d) for d in x.shape] == ["batch", "3"]
        flat = x.reshape((x.shape[0] * 3,))
        assert flat.shape == [x.shape[0] * 3]
        return (
            flat.reshape((x.shape[0], 3)) @ w.T,
            (x + y).max(axis=0),
            x.broadcast_to((2, "batch", 3)),
        )

    model = Model(Graph("g", forward, [batch, batch]), {"w": np.ones((4, 3), np.float32)})
    for n in (1, 2, 5):
        x = np.arange(3 * n, dtype=np.float32).reshape(n, 3)
        product, largest, wide = model(x, x)
        np.testing.assert_array_equal(product, x.sum(1, keepdims=True).repeat(4, 1))
        np.testing.assert_array_equal(largest, (2 * x).max(0, keepdims=True))
        assert wide.to_numpy().shape == (2, n, 3)
    with pytest.raises(ValueError, match=r"position 1.*'batch': 2"):
        model(np.ones((2, 3), np.float32), np.ones((3, 3), np.float32))


def test_inputs_of_any_size_meet_a_weight_on_a_mesh():
    mesh = jax.make_mesh((8,), ("model",))
    w = weight("w", (8, 3))
    w.value = jax.device_put(jnp.ones((8, 3)), jax.NamedSharding(mesh, jax.P("model", None)))
    kinds = [TensorType("float32", ("batch", 3), CPU), TensorType("float32", (3,), CPU)]
    model = Model(Graph("g", lambda x, y: (x + y) @ w.T, kinds))
    # Five rows are not divided by eight devices, and a vector has no second axis.
    x, y = (jax.device_put(jnp.ones(shape), jax.devices()[1]) for shape in ((5, 3), (3,)))
    (found,) = model.execute(x, y)
    np.testing.assert_array_equal(found.to_numpy(), np.full((5, 8), 6.0))


def test_a_program_of_named_sizes_cannot_print():
    graph = Graph("shown", lambda x: ops.print(x) or x, [TensorType("float32", ("n",), CPU)])
    with pytest.raises(NotImplementedError, match="named sizes cannot print"):
        Model(graph)


def test_a_branch_on_a_symbolic_size_names_the_dimension():
    def forward(x):
        return x if int(x.shape[0]) > 3 else x + 1

    with pytest.raises(TypeError, match="batch"):
        Graph("g", forward, [TensorType("float32", ("batch",), CPU)])


def test_an_unknown_name():
    with pytest.raises(ValueError, match="'seq'"):
        Graph("g", lambda x: x.reshape(("seq", 3)), [F23])


# -- weights with symbolic dimensions


def rows(n, seed=0):
    return np.random.default_rng(seed).standard_normal((n, 3)).astype(np.float32)


def test_a_weight_with_a_name_of_its_own_has_the_size_of_its_value():
    w = Weight("w", "float32", ("n", 3), CPU)
    with Graph("g", input_types=[F23]) as g:
        value = g.add_weight(w)
        assert value.shape == w.shape == ["n", 3]
        g.output(g.inputs[0].tensor @ w.T, ops.shape_to_tensor(value.shape), value.reshape([-1]))
    assert [t.shape for t in g.output_types] == [[2, "n"], [2], [Dim("n") * 3]]
    with pytest.raises(ValueError, match="Weight 'w' is not in the weights registry"):
        Model(g, {})
    for n in (1, 4):
        product, sizes, flat = Model(g, {"w": rows(n)})(ONES)
        np.testing.assert_allclose(product, ONES @ rows(n).T, rtol=1e-6)
        assert sizes.to_numpy().tolist() == [n, 3] and flat.shape == [3 * n]
    # The same program for each value of the Weight.
    program = Model(g)
    with pytest.raises(ValueError, match="weight 'w' has no value"):
        program(ONES)
    for n in (3, 5):
        w.value = jnp.asarray(rows(n))
        np.testing.assert_allclose(program(ONES)[0], ONES @ rows(n).T, rtol=1e-6)
    assert Graph("loaded", lambda x: x @ w.T, [F23]).output_types[0].shape == [2, "n"]


def test_a_weight_with_the_name_of_an_inputs_size():
    w, b = Weight("w", "float32", ("n", 3), CPU), Weight("b", "float32", ("n",), CPU)
    kind = TensorType("float32", ("n", 3), CPU)
    program = Model(
        Graph("g", lambda x: x * w + ops.unsqueeze(b, -1), [kind]),
        {"w": rows(4), "b": np.ones(4, np.float32)},
    )
    np.testing.assert_allclose(program(rows(4, 1))[0], rows(4) * rows(4, 1) + 1, rtol=1e-6)
    with pytest.raises(ValueError, match=r"position 0: .* \(2, 3\) .* with {'n': 4}"):
        program(ONES)
    other = Model(program_graph := Graph("g", lambda x: x * w + ops.unsqueeze(b, -1), [kind]))
    w.value, b.value = jnp.asarray(rows(4)), jnp.ones(2)
    with pytest.raises(ValueError, match="'b' is \\[2\\], .* and n is 4 in another weight"):
        other(rows(4))
    b.value = jnp.ones(4)
    np.testing.assert_allclose(other(rows(4))[0], rows(4) ** 2 + 1, rtol=1e-6)
    assert program_graph.output_types[0].shape == ["n", 3]


def test_arithmetic_over_names_in_a_weights_shape():
    w = Weight("w", "float32", (Dim("n") * 2, 3), CPU)
    g = Graph("g", lambda x: (w.reshape(["n", 2, 3]), x.broadcast_to(["n", 2, 3])), [F23])
    one, two = Model(g, {"w": rows(4)})(ONES)
    np.testing.assert_array_equal(one, rows(4).reshape(2, 2, 3))
    assert two.shape == (2, 2, 3)
    with pytest.raises(ValueError, match="has the size 3 where its type has n \\* 2|divisible|2"):
        Model(g, {"w": rows(3)})(ONES)
    product = Weight("w", "float32", (Dim("n") * Dim("m"), 3), CPU)
    with pytest.raises(ValueError, match="do not determine m, n: declare a dimension that is"):
        Model(Graph("g", lambda x: x @ product.T, [F23]), {"w": rows(4)})


@pytest.mark.parametrize("value", [np.ones(3), np.ones((3, 4)), np.ones((3, 3), np.int32)])
def test_values_that_do_not_fit_a_weight_with_symbolic_dimensions(value):
    g = Graph("g", lambda x: x @ Weight("w", "float32", ("n", 3), CPU).T, [F23])
    value = value.astype(np.float32) if value.dtype == np.float64 else value
    with pytest.raises(
        ValueError, match=r"'w' in the weights registry .* expects float32 \(n, 3\)"
    ):
        Model(g, {"w": value})


def test_weights_with_symbolic_dimensions_in_branches_and_loops():
    """First met in a branch, a loop, a jitted function and a mapped one."""
    w, v, u, t = (Weight(name, "float32", ("n", 3), CPU) for name in "wvut")

    def forward(x):
        total = lambda weight: weight.value.sum(0, keepdims=True)
        x = jax.lax.cond(x.value.sum() > 0, lambda y: y + total(w), lambda y: y, x.value)
        x = jax.lax.scan(lambda c, _: (c * total(v), None), x, None, length=2)[0]
        x = jax.jit(lambda y: y - total(u))(x)
        return jax.vmap(lambda row: t.value @ row)(x)

    values = {name: rows(4, i) for i, name in enumerate("wvut")}
    (found,) = Model(Graph("g", forward, [F23]), values)(ONES)
    w, v, u, t = values.values()
    want = ((ONES + w.sum(0)) * v.sum(0) ** 2 - u.sum(0)) @ t.T
    np.testing.assert_allclose(found, want, rtol=1e-4)


class Table(Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = Weight("weight", "float32", shape, CPU)

    def __call__(self, ids):
        return ops.gather(self.weight, ids, axis=0)


def test_a_module_with_a_table_of_any_length():
    kind = TensorType("int32", ("tokens",), CPU)
    table, ids = Table("rows", 3), np.int32([2, 0])
    program = table.compile(kind)
    for n in (3, 7):
        table.load_state_dict({"weight": rows(n)})
        np.testing.assert_array_equal(program(ids)[0].to_numpy(), rows(n)[ids])
        np.testing.assert_array_equal(Model(table.trace(kind))(ids)[0].to_numpy(), rows(n)[ids])
        np.testing.assert_array_equal(table(jnp.asarray(ids)), rows(n)[ids])


def test_layers_with_tables_of_one_length_as_a_subgraph():
    class Two(Module):
        def __init__(self):
            super().__init__()
            self.layers = LayerList(Table("rows", 3) for _ in range(2))

        def __call__(self, ids):
            graph = self.layers[0].build_subgraph("table", [ids], "layers.0.")
            return sum(ops.call(graph, ids, prefix=f"layers.{i}.")[0] for i in range(2))

    model, ids = Two(), np.int32([1, 1, 0])
    graph = Graph("g", model, [TensorType("int32", ("tokens",), CPU)])
    registry = {f"layers.{i}.weight": rows(4, i) for i in range(2)}
    want = rows(4)[ids] + rows(4, 1)[ids]
    np.testing.assert_array_equal(Model(graph, registry)(ids)[0].to_numpy(), want)


def test_a_nested_graph_with_a_weight_with_symbolic_dimensions():
    w = Weight("w", "float32", ("n", 3), CPU)
    kind = TensorType("float32", ("batch", 3), CPU)
    with Graph("outer", input_types=[kind]) as outer:
        with Graph("inner", input_types=[kind]) as inner:
            inner.output(inner.inputs[0].tensor @ w.T)
        outer.output(*ops.call(inner, outer.inputs[0]), w.sum(0))
    product, total = Model(outer, {"w": rows(4)})(ONES)
    np.testing.assert_allclose(product, ONES @ rows(4).T, rtol=1e-6)
    np.testing.assert_allclose(total, rows(4).sum(0), rtol=1e-5)


# -- running


@pytest.mark.parametrize(
    "args, message",
    [
        ((), r"\(0\).*\(1\)"),
        ((ONES, ONES), r"\(2\).*\(1\)"),
        ((ONES[:, :2],), r"position 0.*\(2, 2\)"),
        ((ONES.astype(np.float64),), "float64.*float32"),
        ((ONES[0],), r"\(3,\)"),
    ],
)
def test_wrong_inputs(args, message):
    with pytest.raises(ValueError, match=message):
        Model(Graph("g", lambda x: x, [F23]))(*args)


def test_integers_of_64_bits_go_in():
    model = Model(Graph("g", lambda x: x + 1, [TensorType("int64", (2,), CPU)]))
    assert model(np.array([1, 2]))[0].to_numpy().tolist() == [2, 3]


def test_inputs_and_weights_of_another_library_in_bfloat16():
    w = Weight("w", "bfloat16", (2,), CPU)
    graph = Graph("scaled", lambda x: x * w, [TensorType("bfloat16", (2,), CPU)])
    theirs = Foreign(jnp.array([1.5, -2.0], jnp.bfloat16), dtype="torch.bfloat16")
    assert Model(graph, {"w": theirs})(theirs)[0].value.tolist() == [2.25, 4]


def test_hooks_fire_once_while_tracing():
    from maxjax.nn.layer import add_layer_hook

    seen = []
    model = Net()
    model.load_state_dict(fill(model))
    add_layer_hook(lambda layer, args, kwargs, outputs: seen.append(type(layer).__name__))
    compiled = model.compile(F23)
    compiled(ONES), compiled(ONES)
    assert seen == ["Lin", "Lin", "Net"]


def test_a_jitted_function_that_keeps_a_weight_of_a_graph_is_an_error():
    # JAX keeps what a jitted function closes over when it is traced: a Weight is an argument.
    w = weight(shape=(2, 3), value=2.0)
    closed, given = jax.jit(lambda x: x * jnp.asarray(w)), jax.jit(lambda w, x: x * jnp.asarray(w))
    g = Graph("g", lambda x: (closed(x.value), given(w, x.value)), [F23])
    for result in Model(g)(ONES):
        np.testing.assert_array_equal(result, 2 * ONES)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        closed(jnp.asarray(ONES))
    with pytest.raises(ValueError, match="closed over when it was traced in an earlier Graph"):
        Graph("again", lambda x: closed(x.value), [F23])
    np.testing.assert_array_equal(given(w, jnp.asarray(ONES)), 2 * ONES)
    assert float(jax.jit(lambda x: x + 1)(1.0)) == 2


def test_weights_of_every_dtype_of_floats():
    for dtype in DType:
        if dtype.is_float():
            Graph("g", lambda x, d=dtype: x + Weight("v", d, (2, 3), CPU).cast("float32"), [F23])


# -- weights that JAX takes as pytrees


class Scaled(Module):
    """A layer that gives JAX its weight, and layers of its own, as pytrees."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.log = weight("log", (3,))
        self.inner = Inner()

    def __call__(self, x):
        array = getattr(x, "value", x)
        if self.kind == "weight":
            return array * jnp.exp(self.log)
        if self.kind == "jit":
            return jax.jit(lambda inner, x: inner(x))(self.inner, array)
        if self.kind == "scan":
            return jax.lax.scan(lambda h, _: (self.inner(h), None), array, length=1)[0]
        return array * sum(jax.tree.leaves(jax.tree.map(lambda v: 2 * v, self.inner)))


class Inner(Module):
    def __init__(self):
        super().__init__()
        self.w, self.never = weight("w", (3,)), weight("never", (3,))

    def __call__(self, x):
        return getattr(x, "value", x) * jnp.square(self.w)


@pytest.mark.parametrize("kind", ["weight", "jit", "scan", "tree"])
@pytest.mark.parametrize("loaded", [True, False])
def test_programs_read_weights_that_jax_takes_as_pytrees(kind, loaded):
    model = Scaled(kind)
    values = lambda n: {name: jnp.full(3, float(n)) for name in ("log", "inner.w", "inner.never")}
    if loaded:
        model.load_state_dict(values(0.5))
    program = model.compile(TensorType("float32", (3,), CPU))
    for n in (1, 2):
        model.load_state_dict(values(n))
        [found] = program(jnp.ones(3))
        expected = {"weight": np.exp(n), "jit": n * n, "scan": n * n, "tree": 4 * n}[kind]
        np.testing.assert_allclose(found.to_numpy(), np.full(3, expected), rtol=1e-6)


class Looped(Module):
    """A loop over a function of ``jax.jit``, which closes over a weight or gets it."""

    def __init__(self, closes):
        super().__init__()
        self.closes, self.w = closes, weight("w", (3,))

    def __call__(self, x):
        array, run = getattr(x, "value", x), jax.jit(lambda w, h: h * getattr(w, "value", w))
        if self.closes:
            run = jax.jit(lambda _, h: jnp.asarray(h * jnp.asarray(self.w)))
        step = lambda h, _: (run(self.w, h), None)
        return jax.lax.scan(step, array, length=2)[0]


@pytest.mark.parametrize("closes", [False, True])
def test_a_jitted_function_in_a_loop_that_closes_over_a_weight(closes):
    spec = TensorType("float32", (3,), CPU)
    model = Looped(closes)
    model.load_state_dict({"w": np.float32([1, 2, 3])})
    program = model.compile(spec)
    np.testing.assert_array_equal(program(jnp.ones(3))[0].to_numpy(), [1, 4, 9])
    model.load_state_dict({"w": np.float32([1, 2, 4])})
    np.testing.assert_array_equal(program(jnp.ones(3))[0].to_numpy(), [1, 4, 16])
    np.testing.assert_array_equal(model(jnp.ones(3)), [1, 4, 16])


@pytest.mark.parametrize("name", ["in", "max", "True"])
def test_names_of_sizes_may_be_words_of_python(name):
    def double(x, y):
        both = ops.concat([x, ops.rebind(y, [name, 3])], 0)
        return both, ops.reshape(both, [-1])

    types = [TensorType("float32", (size, 3), DeviceRef.CPU()) for size in (name, "n")]
    graph = Graph("double", double, types)
    assert [one.shape[0] for one in graph.output_types] == [Dim(name) * 2, Dim(name) * 6]
    program, x = Model(graph), np.ones((2, 3), np.float32)
    assert [y.shape[0] for y in program(x, x)] == [4, 12]
    with pytest.raises(ValueError, match=f"rebound to {name} = 2, and is n = 1"):
        program(x, x[:1])
