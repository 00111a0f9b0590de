"""rebind: names, numbers and expressions for sizes, taken at once and checked when the program runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, ops
from maxjax.nn import Module, kernels

CPU = DeviceRef.CPU()


def kind(*shape):
    return TensorType("float32", shape, CPU)


def compiled(function, *types):
    with Graph("g", input_types=types) as g:
        result = function(*[value.tensor for value in g.inputs])
        g.output(*(result if isinstance(result, tuple) else (result,)))
    return InferenceSession().load(g)


def one(*shape):
    return np.ones(shape, np.float32)


# What is bound; types; what the result has; sizes that go, and that do not, with what is said.
CASES = {
    "another name": (lambda x, y: x + ops.rebind(y, ["a"]), ["a", "b"], ["a"], (3, 3), (3, 4),
                     "axis 0 was rebound to a = 3, and is b = 4"),
    "a number": (lambda x: ops.rebind(x, [3]), ["a"], [3], (3,), (4,), "rebound to 3, and is a = 4"),
    "a number by a name": (lambda x, y: x + y.rebind(["a"]), ["a", 3], ["a"], (3, 3), (4, 3), "a = 4, and is 3"),
    "a name in arithmetic": (lambda x, y: x.rebind(["a"]) + y, [Dim("b") * 2, "a"], ["a"], (4, 4), (4, 5),
                             r"rebound to a = 5, and is 2\*b = 4"),
    "a new name": (lambda x, y: ops.rebind(x, ["n"]) * 2 + ops.rebind(y, ["n"]), ["a", "b"], ["a"], (3, 3), (4, 3),
                   "rebound to a = 4, and is b = 3"),
    "an expression": (lambda x, y: x.rebind([Dim("b") * 2]) + ops.concat([y, y]), ["a", "b"], [Dim("b") * 2], (6, 3),
                      (5, 3), r"rebound to 2\*b = 6, and is a = 5"),
    "an expression of a new name": (lambda x, y: (x.rebind([Dim("n") * 2]), y.rebind(["n"]))[0], ["a", "b"], ["a"],
                                    (6, 3), (6, 2), "rebound to n . 2 = 4, and is a = 6"),
    "its own name": (lambda x: x.rebind(["a"]), ["a"], ["a"], (3,), None, ""),
    "a slice": (lambda x: x[((slice(0, 4), 4),)], ["a"], [4], (9,), (3,), "is min"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_in_a_graph(name):
    function, sizes, shape, good, bad, says = CASES[name]
    model = compiled(function, *map(kind, sizes))
    assert model.output_types[0].shape == shape
    (result, *_) = model.execute(*map(one, good))
    eager = function(*[TensorValue(jnp.ones(n)) for n in good])
    np.testing.assert_array_equal(result.to_numpy(), np.asarray(eager))
    if bad is not None:
        for _ in range(2):
            with pytest.raises(ValueError, match=says):
                model.execute(*map(one, bad))
        model.execute(*map(one, good))


def test_every_dtype_and_gradient_goes_through():
    for dtype in ("bool", "int8", "bfloat16", "float32"):
        with Graph(
            "g", input_types=[TensorType(dtype, ["a"], CPU), TensorType(dtype, ["b"], CPU)]
        ) as g:
            g.output(g.inputs[1].tensor.rebind(["a"]))
        ones = jnp.ones(3, g.output_types[0].dtype.np)
        assert InferenceSession().load(g)(ones, ones)[0].value.all()


@pytest.mark.parametrize(
    ("function", "sizes", "says"),
    [
        (lambda x: x.rebind([Dim("a") + 1]), ["a"], "axis 0 is a, not a . 1"),
        (lambda x, y: (x.rebind(["n"]), y.rebind(["n"])), [3, 4], "axis 0 is 4, not n"),
        (lambda x: ops.rebind(x, [4], "my words"), [3], "my words: .* axis 0 is 3, not 4"),
        (lambda x: x.rebind(["a", "b"]), ["a"], "2 axes"),
    ],
)  # fmt: skip
def test_what_is_known_to_differ_is_refused_at_once(function, sizes, says):
    with pytest.raises(ValueError, match=says):
        compiled(function, *map(kind, sizes))


def test_in_a_subgraph_and_a_compiled_module():
    class Add(Module):
        def __call__(self, x, y):
            return x + ops.rebind(y, ["a"])

    module = Add()

    def forward(x, y):
        block = module.build_subgraph("add", [x, y])
        return ops.call(block, x, y)[0]

    for model in (compiled(forward, kind("a"), kind("b")), module.compile(kind("a"), kind("b")),
                  compiled(module, kind("a"), kind("b"))):  # fmt: skip
        assert model.execute(one(2), one(2))[0].to_numpy().tolist() == [2, 2]
        with pytest.raises(ValueError, match="b = 3"):
            model.execute(one(2), one(3))


def test_outside_of_a_graph_a_name_goes_with_any_size():
    x = TensorValue(jnp.ones((2, 3)))
    assert x.rebind(["n", "n"]).shape == [2, 3] == x.rebind([Dim("k") * 7, 3]).shape
    assert jax.jit(lambda x: x.rebind(["n", 3]))(x).shape == [2, 3]
    with pytest.raises(ValueError, match="axis 1 is 3, not 4"):
        x.rebind(["n", 4])


def test_an_exported_program_checks_nothing_and_says_so():
    from jax import export

    (size,) = export.symbolic_shape("n")
    with pytest.raises(ValueError, match="only a Graph's is checked"):
        export.export(jax.jit(lambda x: ops.rebind(x, [3])))(
            jax.ShapeDtypeStruct((size,), jnp.float32)
        )


@pytest.mark.parametrize("take", [lambda x, *i: x[i], lambda x, *i: ops.slice_tensor(x, list(i))])
def test_slices_whose_bounds_only_a_program_knows(take):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    number = TensorType("int32", [], CPU)
    types = [TensorType("float32", ["a", 4], CPU), TensorType("float32", ["n"], CPU), number]
    with Graph("g", input_types=types) as g:
        values, named, at = (value.tensor for value in g.inputs)
        g.output(
            take(values, ..., (slice(at, at + 2), 2)),
            take(values, (slice(at, None), "n"), slice(1, 3)) + named[:, None],
        )
        for wrong in [(slice(at, None), "new"), slice(0, at), (slice(0, at, 2), 1)]:
            with pytest.raises(NotImplementedError, match="bounds are tensors of a program"):
                take(values, wrong)
    first, second = InferenceSession().load(g).execute(x, np.zeros(2, np.float32), np.int32(1))
    np.testing.assert_array_equal(first.to_numpy(), x[:, 1:3])
    np.testing.assert_array_equal(second.to_numpy(), x[1:, 1:3])


@pytest.mark.parametrize(
    "take",
    [
        lambda x: x[:2],
        lambda x: x[1:3],
        lambda x: x[-2:],
        lambda x: x[-3:-1][None, ...][0],
        lambda x: x[..., None][:2][..., 0],
        lambda x: x[: x.shape[0] // 3],
        lambda x: x[2:].rebind(["two"]),
        lambda x: ops.top_k(x, 2)[0],
        lambda x: ops.bottom_k(x, 2)[1],
        lambda x: ops.concat([ops.outer(x, x).reshape((-1,))] * 2 + [x]),
    ],
)
def test_slices_of_a_named_axis_have_sizes(take):
    model = compiled(take, kind("a"))
    x = np.float32([3, 1, 2, 5, 4, 0])
    (result,) = model.execute(x)
    np.testing.assert_array_equal(result.to_numpy(), np.asarray(take(TensorValue(x))))


def test_what_a_named_axis_may_not_hold():
    with pytest.raises(ValueError, match="axis 0 was rebound to 2, and is"):
        compiled(lambda x: x[:2], kind("a")).execute(one(1))
    with pytest.raises(NotImplementedError, match="rebind the tensor to a new dimension name"):
        compiled(lambda x: x[2:], kind("a"))
    for function in (lambda x: x.reshape(["a", 2]), lambda x: ops.reshape(x, [2, -1])):
        with pytest.raises(ValueError, match=r"are not always 3\*a; rebind"):
            compiled(function, kind("a", 3))
    with pytest.raises(ValueError, match="known only when the program runs"):
        compiled(lambda x: x[x.shape[0] - 2 :], kind("a"))


@pytest.mark.parametrize(
    ("types", "sizes", "message"),
    [
        (["a"], [0], "the dimension 'a' is 0"),
        ([Dim("a") * 2], [0], "the dimension 'a' is 0"),
        (
            ["a", Dim("a") * 2],
            [2, 5],
            r"the size 5 where its type has a \* 2, which is 4 \(with a = 2\)",
        ),
        (
            [Dim("a") * 2 + Dim("b"), Dim("b") + 1],
            [4, 4],
            r"the size 4 where its type has .* \(with b = 3\)",
        ),
    ],
)
def test_inputs_whose_sizes_do_not_fit_their_names(types, sizes, message):
    model = compiled(lambda x, *_: x + 1, *map(kind, types))
    with pytest.raises(ValueError, match=message):
        model.execute(*map(one, sizes))


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ([Dim("n") // 2], "n"),
        ([Dim("b") * "c", "b"], "c"),
        ([Dim("b") + "c"], "b, c"),
        ([Dim("n") * "n"], "n"),
    ],
)
def test_sizes_that_do_not_determine_a_name(sizes, names):
    with pytest.raises(ValueError, match=f"Graph 'g': .* do not determine {names}: declare"):
        compiled(lambda *inputs: inputs[0] * 2.0, *(kind(size) for size in sizes))


@pytest.mark.parametrize("op", [ops.scatter_nd, kernels.scatter_nd_skip_oob_indices])
def test_updates_may_have_another_name_than_their_indices(op):
    cpu = DeviceRef.CPU()
    kinds = [TensorType("float32", ("n", 2), cpu), TensorType("float32", ("updates", 2), cpu),
             TensorType("int32", ("indices", 1), cpu)]  # fmt: skip
    model = InferenceSession().load(Graph("scatter", op, kinds))
    x, new = np.zeros((4, 2), np.float32), np.ones((2, 2), np.float32)
    got = model.execute(x, new, np.array([[2], [0]], np.int32))[0]
    np.testing.assert_array_equal(got.to_numpy()[:, 0], [1, 0, 1, 0])
    with pytest.raises(ValueError, match=r"updates.* = 2"):
        model.execute(x, new, np.array([[2], [0], [1]], np.int32))
    with pytest.raises(ValueError, match="updates"):
        op(x, new, np.array([[2], [0], [1]], np.int32))


def test_a_module_keeps_a_tensor_in_an_attribute_while_a_graph_is_built():
    class Doubled(Module):
        kept = None

        def __init__(self):
            super().__init__()
            self.table = None

        def __call__(self, x):
            if self.kept is None:
                self.kept = self.table = x + 1.0
            return self.kept + self.table

    layer = Doubled()
    for _ in range(2):
        model = compiled(layer, kind("n"))
        np.testing.assert_array_equal(model.execute(one(3))[0].to_numpy(), 2 * (one(3) + 1))
        assert layer.kept is None and layer.table is None
