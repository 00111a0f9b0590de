"""Loading a stack: as its layers would be loaded, into one array, whole or not at all."""

import gc
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from maxjax import load_weights
from maxjax.driver import Buffer
from maxjax.errors import CheckpointError
from maxjax.graph import Weight
from maxjax.graph.weights import WeightData
from maxjax.graph.weights import device_reads as pieces
from maxjax.nn import LayerList, Module
from maxjax.nn.layer.load import stacks as stack_values
from tests.nn.layer.stack.test_layer_stack import (
    CASES,
    CPU,
    RUN,
    Block,
    Lin,
    Model,
    X,
    assert_same,
    fill,
    linears,
    rebuilt,
    stacked,
    state,
    values,
)


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """Both ways of making the stacked array."""
    if request.param == "device":
        monkeypatch.setattr(stack_values, "is_host", lambda sharding: False)
    return request.param


def models(case):
    make, how = CASES[case]
    return make(), stacked(make(), **how)


def outcome(model, given, **options):
    """What a load gives: its result, or the kind and text of its error; and the state afterwards."""
    try:
        result = model.load_state_dict(given, **options)
    except ValueError as error:
        result = type(error), str(error)
    held = {
        name: None if weight.value is None else np.asarray(weight.value).tobytes()
        for name, weight in model.raw_state_dict().items()
    }
    return result, held


# -- from dicts


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_loads_what_the_list_loads(case, where):
    plain, stack = models(case)
    for model in (stack, rebuilt(stack)):
        fill(model)
        fill(plain)
        assert_same(plain, model)


@pytest.mark.parametrize(
    "make",
    [lambda a: a, jnp.asarray, Buffer.from_numpy, lambda a: WeightData.from_numpy(a, "x"),
     np.asfortranarray],
    ids=["numpy", "jax", "Buffer", "WeightData", "fortran"],
)  # fmt: skip
def test_kinds_of_values(make, where):
    stack = LayerList(Block() for _ in range(3)).stack()
    given = values(stack)
    assert stack.load_state_dict({name: make(value) for name, value in given.items()}) == ((), ())
    for name, value in state(stack).items():
        assert value.tobytes() == given[name].tobytes()


def test_numpy_memory_is_copied(where):
    stack = linears(3).stack()
    given = values(stack)
    want = {name: value.copy() for name, value in given.items()}
    stack.load_state_dict(given)
    for value in given.values():
        value[:] = 0
    for name, value in state(stack).items():
        np.testing.assert_array_equal(value, want[name])


def without(name):
    return lambda given: {k: v for k, v in given.items() if k != name}


def instead(name, value):
    return lambda given: {**given, name: value}


BAD = {
    "missing": without("layers.1.attn.weight"),
    "all missing": lambda given: {},
    "unexpected": instead("layers.7.bias", np.ones(4, np.float32)),
    "the leaf's name": instead("layers.*.bias", np.ones((3, 4), np.float32)),
    "misspelt": lambda given: instead("layers.2.biass", given["layers.2.bias"])(
        without("layers.2.bias")(given)
    ),
    "shape": instead("layers.1.bias", np.ones(5, np.float32)),
    "stacked shape": instead("layers.1.attn.weight", np.ones((3, 4, 4), np.float32)),
    "two shapes": lambda given: instead("layers.2.bias", np.ones(3, np.float32))(
        instead("layers.0.attn.weight", np.ones((4, 5), np.float32))(given)
    ),
    "dtype": instead("layers.0.bias", np.ones(4, ml_dtypes.bfloat16)),
    "integers": instead("layers.0.bias", np.ones(4, np.int32)),
    "no array": instead("layers.0.bias", "x"),
    "unaligned": instead("layers.2.bias", np.frombuffer(b"\0" * 17, np.uint8)[1:].view(np.float32)),
    "None": instead("layers.1.bias", None),
}


@pytest.mark.parametrize("problem", BAD)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("filled", [True, False])
def test_what_does_not_fit_is_told_as_of_a_list(problem, strict, filled):
    seen = []
    for model in models("in a model"):
        if filled:
            fill(model, 7)
        given = BAD[problem](values(model))
        seen.append(outcome(model, given, strict=strict))
        assert "*" not in str(seen[-1][0]) or problem == "the leaf's name"
    assert seen[0] == seen[1]


@pytest.mark.parametrize("case", ["head tied", "head in front tied", "all share a weight"])
def test_other_names_of_tied_weights(case):
    plain, stack = models(case)
    names = list(values(plain))
    others = [name for name, _ in every_name(plain) if name not in names]
    assert others
    for other in others:
        for wrong in (False, True):
            seen = []
            for model in models(case):
                given = values(model)
                same = next(v for k, v in given.items() if k == owner(model, other))
                given[other] = same + wrong
                seen.append(outcome(model, given))
            assert seen[0] == seen[1]
            assert isinstance(seen[0][0][0], type) == wrong


def every_name(model):
    return [
        (prefix + local, weight)
        for prefix, module in model.named_modules()
        for local, weight in module.layer_weights.items()
    ]


def owner(model, name):
    weight = dict(every_name(model))[name]
    return next(n for n, w in model.raw_state_dict().items() if w is weight)


@pytest.mark.parametrize("given", [["layers.1.bias"], ["layers.0.bias", "layers.2.bias"], []])
@pytest.mark.parametrize("filled", [True, False])
def test_some_layers(given, filled, where):
    seen = []
    for model in models("in a model"):
        if filled:
            fill(model, 7)
        some = {name: value for name, value in values(model).items() if name in given}
        seen.append(outcome(model, some, strict=False))
    assert seen[0] == seen[1]
    if filled:
        x, y = (RUN(model, X) for model in models("in a model") if fill(model, 7))
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_layer_by_layer(where):
    plain, stack = models("list")
    for name, value in values(stack).items():
        stack.load_state_dict({name: value}, strict=False)
    assert isinstance(jax.tree.leaves(stack)[0], jax.Array)
    assert_same(fill(plain), stack)


def test_a_layer_of_its_own(where):
    stack = fill(linears(4).stack())
    before = state(stack)
    stack[3].load_state_dict({"weight": np.full((4, 4), 2, np.float32)})
    after = state(stack)
    assert (after.pop("3.weight") == 2).all()
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[name])


def test_a_list_that_holds_the_layers_of_a_stack():
    layers = linears(3)
    stack = layers.stack()
    fill(layers)
    assert_same(layers, stack)
    assert isinstance(jax.tree.leaves(stack)[0], jax.Array)


# -- types


@pytest.mark.parametrize("declared", ["float32", "bfloat16"])
@pytest.mark.parametrize("given", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("cast", [True, False])
def test_casts(declared, given, cast, where):
    seen = []
    for layers in (linears(3, dtype=declared), linears(3, dtype=declared).stack()):
        arrays = {name: value.astype(given) for name, value in values(layers).items()}
        seen.append(outcome(layers, arrays, cast=cast))
        if not isinstance(seen[-1][0][0], type):
            assert layers[1].weight.value.dtype == jnp.dtype(declared)
    assert seen[0] == seen[1]


class Ints(Lin):
    def __init__(self, dtype="int64"):
        Module.__init__(self)
        self.table = Weight("table", dtype, (3,), CPU)

    def __call__(self, h):
        return h


@pytest.mark.parametrize("largest", [7, 2**40])
def test_integers_that_fit_or_not(largest, where):
    seen = []
    for layers in (LayerList([Ints(), Ints()]), LayerList([Ints(), Ints()]).stack()):
        given = {f"{i}.table": np.array([0, i, largest * i]) for i in range(2)}
        seen.append(outcome(layers, given))
    assert seen[0] == seen[1]
    assert ("1.table" in str(seen[0][0])) == (largest > 7)


def test_weights_of_size_zero(where):
    class Empty(Lin):
        def __init__(self):
            Module.__init__(self)
            self.weight = Weight("weight", "float32", (0, 4), CPU)

        def __call__(self, h):
            return h + (h @ self.weight.T).sum()

    stack = LayerList([Empty(), Empty()]).stack()
    stack.load_state_dict({f"{i}.weight": np.zeros((0, 4), np.float32) for i in range(2)})
    assert jax.tree.leaves(stack)[0].shape == (2, 0, 4)
    np.testing.assert_array_equal(stack(X), X)


def test_scalars(where):
    class Scalar(Lin):
        def __init__(self):
            Module.__init__(self)
            self.gain = Weight("gain", "float32", (), CPU)

        def __call__(self, h):
            return h * self.gain

    stack = LayerList(Scalar() for _ in range(3)).stack()
    stack.load_state_dict({f"{i}.gain": np.full((), i + 1, np.float32) for i in range(3)})
    assert jax.tree.leaves(stack)[0].shape == (3,)
    np.testing.assert_allclose(stack(X), 6 * X)


# -- from files


@pytest.fixture
def file(tmp_path):
    def write(arrays, name="model.safetensors"):
        path = tmp_path / name
        safetensors.numpy.save_file(arrays, path)
        return path

    return write


@pytest.mark.parametrize("case", ["in a model", "pattern", "layers in front", "bfloat16"])
def test_from_a_file(case, file, where):
    plain, stack = models(case)
    path = file(values(plain))
    for model in (stack, rebuilt(stack)):
        assert model.load_state_dict(load_weights(path)) == ((), ())
        assert_same(fill(plain), model)


def test_from_several_files(file, where):
    stack = linears(5).stack()
    given = values(stack)
    paths = [file({name: value}, f"{name}.safetensors") for name, value in given.items()]
    stack.load_state_dict(load_weights(paths))
    for name, value in state(stack).items():
        assert value.tobytes() == given[name].tobytes()


@pytest.mark.parametrize("given", [ml_dtypes.bfloat16, np.float16])
def test_from_a_file_of_another_type(given, file, where):
    plain, stack = models("in a model")
    path = file({name: value.astype(given) for name, value in values(plain).items()})
    seen = [outcome(model, load_weights(path)) for model in (plain, stack)]
    assert seen[0] == seen[1] and "cast=True" in seen[0][0][1]
    seen = [outcome(model, load_weights(path), cast=True) for model in (plain, stack)]
    assert seen[0] == seen[1] and seen[0][0] == ((), ())


def test_some_of_one_type_and_some_of_another(file, where):
    stack = linears(4).stack()
    given = values(stack)
    path = file({
        name: value.astype(ml_dtypes.bfloat16) if i % 2 else value
        for i, (name, value) in enumerate(given.items())
    })  # fmt: skip
    stack.load_state_dict(load_weights(path), cast=True)
    for i, (name, value) in enumerate(state(stack).items()):
        want = given[name].astype(ml_dtypes.bfloat16).astype(np.float32) if i % 2 else given[name]
        np.testing.assert_array_equal(value, want)


def test_some_on_disk_and_some_in_memory(file, where):
    stack = linears(4).stack()
    given = values(stack)
    on_disk = {name: given[name] for name in ("0.weight", "3.weight")}
    data = dict(load_weights(file(on_disk)).items())
    data = {name: cursor.data() for name, cursor in data.items()}
    stack.load_state_dict({**given, **data})
    for name, value in state(stack).items():
        assert value.tobytes() == given[name].tobytes()


def test_shapes_of_one_element(file, where):
    """() and (1,) hold the same, and a state dict gives back what was loaded."""

    class One(Lin):
        def __init__(self):
            Module.__init__(self)
            self.gain = Weight("gain", "float32", (1,), CPU)

        def __call__(self, h):
            return h * self.gain

    path = file({f"{i}.gain": np.full((), i + 1, np.float32) for i in range(3)})
    seen = []
    for layers in (LayerList(One() for _ in range(3)), LayerList(One() for _ in range(3)).stack()):
        layers.load_state_dict(load_weights(path))
        assert layers[1].gain.value.shape == (1,)
        seen.append({name: value.shape for name, value in layers.state_dict().items()})
        np.testing.assert_allclose(layers(X), 6 * X)
    assert seen[0] == seen[1] == {f"{i}.gain": () for i in range(3)}


@pytest.mark.parametrize("filled", [True, False])
def test_a_cut_file_changes_nothing(filled, file, where):
    stack = linears(4).stack()
    path = file(values(stack))
    if filled:
        fill(stack, 3)
    weights = load_weights(path)
    path.write_bytes(path.read_bytes()[:-16])
    held = jax.tree.leaves(stack)[0]
    with pytest.raises(CheckpointError):
        stack.load_state_dict(weights)
    assert jax.tree.leaves(stack)[0] is held
    assert all((weight.value is not None) == filled for weight in stack.raw_state_dict().values())


def test_a_file_that_does_not_fit_names_itself(file):
    seen = []
    for model in models("in a model"):
        given = without("layers.1.bias")(values(model))
        seen.append(outcome(model, load_weights(file(given))))
    assert seen[0] == seen[1] and "model.safetensors" in seen[0][0][1]
    assert "layers.1.bias" in seen[0][0][1]


def test_without_memory_for_all_layers(monkeypatch):
    def none(nbytes):
        raise MemoryError

    stack = fill(linears(3).stack())
    held = jax.tree.leaves(stack)[0]
    monkeypatch.setattr(pieces, "aligned_empty", none)
    with pytest.raises(MemoryError, match=r"no 192 bytes for the weights '0\.weight' of 3 layers"):
        fill(stack, 1)
    assert jax.tree.leaves(stack)[0] is held


def test_allocated_from_a_checkpoint(file):
    """Weights that read their data when they are first used."""

    class Own(Module):
        def __init__(self, weights):
            super().__init__()
            weight = weights.weight.allocate("float32", (4, 4))
            weight.name = "weight"
            self.weight = weight

        def __call__(self, h):
            return h + jnp.tanh(h @ self.weight.T)

    given = values(linears(3))
    weights = load_weights(file(given))
    want = fill(linears(3))(X)
    for run in (lambda m: m(X), lambda m: jax.eval_shape(lambda: m(X)) and m(X)):
        stack = LayerList(Own(weights[i]) for i in range(3)).stack()
        assert all(weight.value is None for weight in stack.raw_state_dict().values())
        np.testing.assert_allclose(run(stack), want, rtol=1e-5, atol=1e-6)
        assert isinstance(jax.tree.leaves(stack)[0], jax.Array)
    stack = LayerList(Own(weights[i]) for i in range(3)).stack()
    for name, value in state(stack).items():
        np.testing.assert_array_equal(value, given[name])


# -- where it is put


@pytest.mark.parametrize("disk", [True, False])
def test_on_the_device_it_was_placed_on(disk, file, where):
    device = jax.devices()[3]
    model = Model(linears(3).stack(), head=Lin()).to(device)
    given = values(model)
    model.load_state_dict(load_weights(file(given)) if disk else given)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(model))
    assert all(leaf.committed for leaf in jax.tree.leaves(model))
    for name, value in state(model).items():
        assert value.tobytes() == given[name].tobytes()


def test_on_the_devices_of_the_values_before(file, where):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
    model = fill(Model(linears(3).stack(), head=Lin()))
    moved = jax.device_put(model, rows)
    given = values(model)
    moved.load_state_dict(load_weights(file(given)))
    assert [leaf.sharding for leaf in jax.tree.leaves(moved)] == [rows, rows]
    for name, value in state(moved).items():
        assert value.tobytes() == given[name].tobytes()


def test_what_is_placed_nowhere_stays_free(where):
    stack = fill(linears(3).stack())
    assert not jax.tree.leaves(stack)[0].committed


def test_the_array_from_before_is_let_go(file, where):
    stack = linears(3).stack()
    weights = load_weights(file(values(stack)))
    stack.load_state_dict(weights)
    old = weakref.ref(jax.tree.leaves(stack)[0])
    stack.load_state_dict(weights)
    gc.collect()
    assert old() is None
