"""What MAX refuses and JAX lets pass: indices past the end, numbers that wrap, shapes that do not fit."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from maxjax.graph import DeviceRef, Graph, Model, TensorType, TensorValue, Weight, ops
from maxjax.graph.weights import load_weights

CPU = DeviceRef.CPU()
F = jnp.ones((6, 5))
U = jnp.ones(3, jnp.uint8)
I = jnp.ones((2, 2), jnp.int32)  # noqa: E741

INDICES = {
    "row": lambda x, u, i: x[7], "last but one": lambda x, u, i: x[6], "from the end": lambda x, u, i: x[-7],
    "column": lambda x, u, i: x[0, 5], "after a gap": lambda x, u, i: x[..., -6],
    "after an axis": lambda x, u, i: x[None, 6], "numpy": lambda x, u, i: x[np.int64(7)],
    "numpy array": lambda x, u, i: x[np.array([0, -7])], "Dim": lambda x, u, i: x[x.shape[0]],
    "slice and number": lambda x, u, i: x[1:3, 5], "too many": lambda x, u, i: x[0, 0, 0],
    "two gaps": lambda x, u, i: x[..., ...], "said size": lambda x, u, i: x[((slice(0, 2), 3),)],
    "gather": lambda x, u, i: ops.gather(x, [7], axis=0), "gather one": lambda x, u, i: ops.gather(x, -6, axis=1),
    "gather array": lambda x, u, i: ops.gather(x, np.array([[0, 6]]), 0),
    "gather_nd": lambda x, u, i: ops.gather_nd(x, [[0, 5]]),
    "gather_nd by name": lambda x, u, i: ops.gather_nd(input=x, indices=np.array([[6, 0]])),
    "scatter": lambda x, u, i: ops.scatter(i, i, [[0, 2], [0, 1]]),
    "scatter_add": lambda x, u, i: ops.scatter_add(i, i, indices=np.array([[0, -3], [0, 1]]), axis=0),
    "scatter_nd": lambda x, u, i: ops.scatter_nd(i, i[0], [[0, 2], [0, 1]]),
    "slice_tensor": lambda x, u, i: ops.slice_tensor(x, [7]), "top_k": lambda x, u, i: ops.top_k(x, 6),
}  # fmt: skip
AXES = {
    "argmax": lambda x, u, i: x.argmax(2), "max": lambda x, u, i: x.max(-3), "mean": lambda x, u, i: x.mean(5),
    "var": lambda x, u, i: x.var(2), "stdev": lambda x, u, i: x.stdev(2), "unsqueeze": lambda x, u, i: x.unsqueeze(4),
    "squeeze": lambda x, u, i: x.squeeze(4), "flatten": lambda x, u, i: x.flatten(3),
    "transpose": lambda x, u, i: x.transpose(0, 2), "permute": lambda x, u, i: x.permute([0, 2]),
    "ops.argmax": lambda x, u, i: ops.argmax(x, 2), "split": lambda x, u, i: ops.split(x, [3, 3], axis=2),
    "chunk": lambda x, u, i: ops.chunk(x, 2, axis=2), "stack": lambda x, u, i: ops.stack([x], axis=3),
    "concat": lambda x, u, i: ops.concat([x], axis=2), "cumsum": lambda x, u, i: ops.cumsum(x, 2),
    "softmax": lambda x, u, i: ops.softmax(x, 2), "repeat": lambda x, u, i: ops.repeat_interleave(x, 2, 3),
    "split sizes": lambda x, u, i: ops.split(x, [3, 2]), "tile": lambda x, u, i: ops.tile(x, [2]),
}  # fmt: skip
NUMBERS = {
    "times": lambda x, u, i: u * 300, "left times": lambda x, u, i: 300 * u, "plus": lambda x, u, i: u + (-1),
    "minus": lambda x, u, i: -1 - u, "float": lambda x, u, i: u + 1.5, "left float": lambda x, u, i: 1.5 - u,
    "equal": lambda x, u, i: u == 300, "less": lambda x, u, i: u < -1, "power": lambda x, u, i: u**300,
    "of power": lambda x, u, i: 300**u, "modulo": lambda x, u, i: u % 300, "floor": lambda x, u, i: u // 300,
    "divided": lambda x, u, i: u / 300, "shift": lambda x, u, i: u << 300, "and": lambda x, u, i: u & 300,
    "numpy number": lambda x, u, i: u * np.int64(300), "numpy array": lambda x, u, i: i + np.array([2**40]),
    "too large for int32": lambda x, u, i: i + 2**31, "rounded in float32": lambda x, u, i: x * (2**24 + 1),
    "rounded in float16": lambda x, u, i: x.cast("float16") * 4097,
    "rounded in bfloat16": lambda x, u, i: x.cast("bfloat16") * 257,
    "rounded in float8": lambda x, u, i: x.cast("float8_e4m3fn") == 17,
    "too large for float32": lambda x, u, i: x * 10**400,
    "ops.add": lambda x, u, i: ops.add(u, 300), "ops.equal": lambda x, u, i: ops.equal(-1, u),
    "ops.pow": lambda x, u, i: ops.pow(u, 300), "ops.max": lambda x, u, i: ops.max(u, 300),
    "ops.min": lambda x, u, i: ops.min(-1, u), "where": lambda x, u, i: ops.where(u == 1, u, 300),
    "where left": lambda x, u, i: ops.where(u == 1, -1, u), "where float": lambda x, u, i: ops.where(u == 1, u, 0.5),
    "pad": lambda x, u, i: ops.pad(u, [1, 1], value=300), "pad float": lambda x, u, i: ops.pad(u, [1, 1], value=0.5),
    "range of floats": lambda x, u, i: ops.range(0.5, 3.0, 1, dtype="int32", device=CPU),
    "range to a float": lambda x, u, i: ops.range(0, 3.0, 1, dtype="int32", device=CPU),
    "range too far": lambda x, u, i: ops.range(0, 300, 1, dtype="uint8", device=CPU),
    "range below": lambda x, u, i: ops.range(-1, 3, 1, dtype="uint8", device=CPU),
    "range of 64 bits": lambda x, u, i: ops.range(0, 2**40, 2**39, dtype="int64", device=CPU),
    "constant": lambda x, u, i: ops.constant(300, "uint8", CPU),
    "boolean": lambda x, u, i: ops.constant(2, "bool", CPU),
    "constant of 64 bits": lambda x, u, i: ops.constant(2**40, "int64", CPU),
    "array of 64 bits": lambda x, u, i: ops.constant(np.array([2**40])),
}  # fmt: skip
SHAPES = {
    "matmul": lambda x, u, i: x @ x, "matmul of an array": lambda x, u, i: x @ F,
    "ops.matmul": lambda x, u, i: ops.matmul(x, x),
    "number": lambda x, u, i: x @ 2, "vector": lambda x, u, i: x @ x[:, 0],
    "add": lambda x, u, i: x + i, "where": lambda x, u, i: ops.where(x > 0, x, x[:3]),
    "broadcast": lambda x, u, i: x.broadcast_to((3, 5)), "reshape": lambda x, u, i: x.reshape((4, 4)),
}  # fmt: skip
WRONG = {"index": INDICES, "axis": AXES, "unsafe cast": NUMBERS, "shape": SHAPES}


@pytest.mark.parametrize("where", ["eager", "graph"])
@pytest.mark.parametrize("kind", WRONG)
def test_it_is_refused_at_once(kind, where):
    def each(x, u, i):
        for name, run in WRONG[kind].items():
            # MAX has IndexError for some of the axes.
            errors = (ValueError, IndexError) if kind == "axis" else ValueError
            with pytest.raises(errors) as raised:
                pytest.fail(f"{name} gave {run(x, u, i)!r}")
            assert type(raised.value) in (ValueError, IndexError), name
            assert kind != "unsafe cast" or "unsafe cast" in str(raised.value), name

    if where == "eager":
        each(TensorValue(F), TensorValue(U), TensorValue(I))
        return
    types = [TensorType(a.dtype, a.shape, CPU) for a in (F, U, I)]
    with Graph("g", input_types=types) as g:
        each(*[value.tensor for value in g.inputs])
        g.output(g.inputs[0])


def test_what_is_said():
    x, u = TensorValue(F), TensorValue(U)
    with pytest.raises(
        ValueError,
        match=r"index 7 is outside axis 0 of a tensor of shape \(6, 5\), which is 6 long",
    ):
        x[7]
    with pytest.raises(ValueError, match="300.*uint8.*0.*255"):
        u * 300
    with pytest.raises(ValueError, match=r"4097.*float16.*4097.0"):
        x.cast("float16") * 4097
    with pytest.raises(ValueError, match=r"shapes \(6, 5\) and \(6, 5\) do not fit"):
        x @ x


def test_the_indices_of_a_list_lie_inside():
    x = TensorValue(F)
    for index in ([0, 6], [-7], (slice(None), [0, 5])):
        with pytest.raises(ValueError, match="is outside axis"):
            x[index]
    assert x[[0, -6]].to_numpy().tolist() == np.asarray(F)[[0, -6]].tolist()
    assert x[[True] + [False] * 5].shape == [1, 5]


def test_an_index_of_a_weight_lies_inside_too():
    w = Weight("w", "float32", (6, 5), CPU)
    w.value = F
    for index in (6, -7, (0, 5), (0, 0, 0)):
        with pytest.raises(ValueError):
            w[index]
    part = Weight("v", "float32", (2, 5), CPU)
    assert w[5].shape == (5,) and part.rank == 2


def test_what_numpy_allows_stays_allowed():
    x, a = TensorValue(F), np.asarray(F)
    for index in (slice(2, 99), slice(None, None, -1), slice(9, 12), (slice(0, 2), 3), np.array([0, -1]), Ellipsis,
                  (None, -6), np.array([True] * 6), (slice(4, None), -1)):  # fmt: skip
        np.testing.assert_array_equal(np.asarray(x[index]), a[index])
    assert x[((slice(1, 99), 5), (slice(0, 2), "two"))].shape == [5, 2]
    assert ops.gather(x, TensorValue(jnp.array([7])), axis=0).shape == [
        1,
        5,
    ]  # known only when it runs


def test_what_fits_stays_allowed():
    x, u, i = TensorValue(F), TensorValue(U), TensorValue(I)
    same = lambda y, dtype: y.dtype.name == dtype
    assert same(u * 255, "uint8") and same(0 + u, "uint8") and same(i + -(2**31), "int32")
    assert same(x * 2**24, "float32") and same(x.cast("bfloat16") * 1024, "bfloat16")
    assert (
        same(x.cast("float16") * 1e9, "float16")
        and same(u + True, "uint8")
        and same(x * np.float64(0.1), "float32")
    )
    assert ops.range(0, 256, 1, dtype="uint8", device=CPU).shape == [256]
    assert ops.range(0.5, 3, 1, dtype="float32", device=CPU).to_numpy().tolist() == [0.5, 1.5, 2.5]
    assert ops.constant([True, False], "bool", CPU).to_numpy().tolist() == [True, False]
    assert ops.constant(np.array([2**31 - 1])).dtype.name == "int32"
    assert ops.pow(i, 3).dtype.name == "int32" and (2**i).to_numpy().tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x + n,
        lambda x, n: n * x,
        lambda x, n: ops.sub(n, x),
        lambda x, n: ops.where(x > 0, x, n),
        lambda x, n: ops.max(x, n),
        lambda x, n: x @ n,
        lambda x, n: ops.matmul(n, x),
    ],
)
def test_a_numpy_array_takes_the_dtype_of_a_tensor(function):
    half = TensorValue(jnp.ones(3, jnp.bfloat16))
    for n in (np.array([0.5, 1.0, 2.0]), np.array([1, 2, 3])):
        assert function(half, n).dtype == "bfloat16"
    with pytest.raises(ValueError, match="does not hold"):
        function(half, np.array([1, 2, 257]))
    with pytest.raises(ValueError, match="unsafe cast: an array of float64"):
        function(half.cast("int32"), np.array([0.5, 1.0, 2.0]))


def test_a_large_number_that_a_float_holds():
    assert float(TensorValue(jnp.ones(())) + 2**40) == 2**40
    with pytest.raises(ValueError, match="would be rounded"):
        TensorValue(jnp.ones(())) + (2**40 + 1)


def test_operators_that_a_dtype_lacks():
    x = TensorValue(jnp.ones(2))
    with pytest.raises(ValueError, match="invert"):
        ~x
    with pytest.raises(ValueError, match="neg"):
        -(x > 0)
    with pytest.raises(ValueError, match="axis 1 is out of range"):
        x.mean(1)
    assert TensorValue(jnp.array([-7, 2])).mean().item() == -2
    quotient, rest = divmod(x * 7, 2)
    assert (quotient == 3).value.all() and (rest == 1).value.all()
    with pytest.raises(ValueError, match="each of the 1 axes"):
        x.permute([0, 1])


def test_integers_that_do_not_fit_are_refused_wherever_they_come_in(tmp_path):
    wide = np.array([2**40 + 5])
    w = Weight("w", "int64", (1,), DeviceRef.CPU())
    with pytest.raises(ValueError, match="do not fit in int32"):
        w.value = wide
    kind = TensorType("int64", (1,), DeviceRef.CPU())
    model = Model(Graph("g", lambda x: x + 1, [kind]))
    with pytest.raises(ValueError, match="do not fit in int32"):
        model(wide)
    with pytest.raises(ValueError, match="do not fit in int32"):
        Model(Graph("g", lambda x: x + w, [kind]), {"w": wide})
    save_file({"a": wide}, tmp_path / "m.safetensors")
    weights = load_weights(tmp_path / "m.safetensors")
    for read in (lambda: weights.a.allocate() + 0, lambda: jnp.asarray(weights.a.data())):
        with pytest.raises(ValueError, match="do not fit in int32"):
            read()
    w.value = wide % 100
    assert int(w.value[0]) == int(wide[0] % 100)
