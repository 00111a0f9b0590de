"""Module.compile: a program made before its weights are there, run with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import init, nn
from maxjax.graph import DeviceRef, TensorType, TensorValue

CPU = DeviceRef.CPU()
X = np.arange(8, dtype=np.float32).reshape(2, 4)
SPEC = jax.ShapeDtypeStruct((2, 4), jnp.float32)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4, "float32", CPU, has_bias=True)

    def __call__(self, h, cache):
        return jnp.tanh(self.proj(h)), cache + h


class Net(nn.Module):
    traces = 0

    def __init__(self, stacked=True):
        super().__init__()
        layers = nn.LayerList(Block() for _ in range(3))
        self.layers = layers.stack() if stacked else layers
        self.head = nn.Linear(4, 2, "float32", CPU)

    def __call__(self, x, caches):
        Net.traces += 1
        if isinstance(self.layers, nn.LayerStack):
            x, caches = self.layers.scan(x, caches)
        else:
            news = []
            for layer, cache in zip(self.layers, caches, strict=True):
                x, new = layer(x, cache)
                news.append(new)
            caches = jnp.stack(news)
        return {"logits": self.head(x), "caches": caches}


def values(seed=0):
    model = init(Net(stacked=False), jax.random.key(seed))
    return {name: np.asarray(value) for name, value in model.state_dict().items()}


CACHES = np.zeros((3, 2, 4), np.float32)
SPECS = (SPEC, jax.ShapeDtypeStruct((3, 2, 4), jnp.float32))


@pytest.mark.sampled
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", ["numpy", "uncommitted", "committed", "elsewhere", "TensorValue"])
def test_compiled_before_it_is_loaded(stacked, kind):
    model = Net(stacked)
    program = model.compile(*SPECS)
    model.load_state_dict(values())
    put = {
        "numpy": np.asarray,
        "uncommitted": jnp.asarray,
        "committed": lambda a: jax.device_put(a, jax.devices()[0]),
        "elsewhere": lambda a: jax.device_put(a, jax.devices()[3]),
        "TensorValue": lambda a: TensorValue(jnp.asarray(a)),
    }[kind]
    got, want = program(put(X), put(CACHES)), model(X, CACHES)
    assert sorted(got) == ["caches", "logits"]
    np.testing.assert_allclose(got["logits"], want["logits"], rtol=1e-6)
    np.testing.assert_allclose(got["caches"], want["caches"], rtol=1e-6)


def test_it_runs_what_was_loaded_last():
    model = Net()
    program = model.compile(*SPECS)
    Net.traces = 0
    for seed in range(2):
        model.load_state_dict(values(seed))
        got = program(X, CACHES)["logits"]
        assert Net.traces == 0
        np.testing.assert_allclose(got, model(X, CACHES)["logits"], rtol=1e-6)
        Net.traces = 0


def test_without_values():
    program = Net().compile(*SPECS)
    with pytest.raises(ValueError, match=r"weight 'layers\.0\.proj\.weight' has no value"):
        program(X, CACHES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stacked", [False, True])
def test_placed_elsewhere_afterwards(stacked):
    model = Net(stacked)
    program = model.compile(*SPECS)
    model.to(jax.devices()[2])
    model.load_state_dict(values())
    with pytest.raises(
        ValueError, match="was on cpu:0 when .* and is on cpu:2 now: compile it again"
    ):
        program(X, CACHES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("first", ["compile", "load"])
def test_placed_before(stacked, first):
    model = Net(stacked).to(jax.devices()[2])
    if first == "load":
        model.load_state_dict(values())
    program = model.compile(*SPECS)
    model.load_state_dict(values())
    got = program(X, jax.device_put(CACHES, jax.devices()[1]))
    assert got["logits"].devices() == {jax.devices()[2]}
    np.testing.assert_allclose(
        got["logits"],
        model(jax.device_put(X, jax.devices()[2]), jax.device_put(CACHES, jax.devices()[2]))[
            "logits"
        ],
        rtol=1e-6,
    )


def test_donated_inputs_are_gone():
    model = init(Net(), jax.random.key(0))
    program = model.compile(*SPECS, donate=[1])
    x, caches = jnp.asarray(X), jnp.asarray(CACHES)
    want = model(x, caches)["caches"]
    got = program(x, caches)["caches"]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert caches.is_deleted() and not x.is_deleted()


def test_donated_inputs_are_counted_from_the_end_and_are_never_weights():
    layer = init(nn.Linear(4, 4, "float32", CPU), jax.random.key(0))
    for kind in (TensorType("float32", (4, 4), CPU), jax.ShapeDtypeStruct((4, 4), jnp.float32)):
        x = jnp.ones((4, 4))
        layer.compile(kind, donate=[-1])(x)
        assert x.is_deleted() and not layer.weight.value.is_deleted()
        with pytest.raises(ValueError, match="has 1 inputs, and donate names input 1"):
            layer.compile(kind, donate=[1])


def test_a_flag_is_no_type():
    with pytest.raises(TypeError, match=r"^compile of 'Linear': .* not bool"):
        nn.Linear(4, 4, "float32", CPU).compile(SPEC, True)


def test_a_program_inside_a_transformation_is_refused_unless_its_sizes_have_names():
    layer = init(nn.Linear(4, 4, "float32", CPU), jax.random.key(0))
    for transform in (jax.jit, jax.vmap, jax.jacobian):
        with pytest.raises(TypeError, match="'Linear' is a compiled program, .* call its Module"):
            transform(layer.compile(SPEC))(X[None] if transform is jax.vmap else X)
    program = layer.compile(TensorType("float32", ("n", 4), CPU))
    found = jax.jit(lambda x: program(x)[0].value)(X)
    np.testing.assert_allclose(found, layer(X), rtol=1e-6)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((X,), "structure"),
        ((X, [CACHES]), "structure"),
        ((X[:1], CACHES), r"position 0: .*float32 \(1, 4\) does not match"),
        ((X.astype(np.int32), CACHES), "int32"),
    ],
)
def test_other_arguments(args, says):
    program = init(Net(), jax.random.key(0)).compile(*SPECS)
    with pytest.raises(ValueError, match=says):
        program(*args)


def test_specs_of_every_kind():
    model = init(nn.Linear(4, 2, "float32", CPU), jax.random.key(0))
    want = model(jnp.asarray(X))
    for spec in (SPEC, X, jnp.asarray(X)):
        np.testing.assert_allclose(model.compile(spec)(X), want, rtol=1e-6)
    (got,) = model.compile(TensorType("float32", (2, 4), CPU))(X)
    assert isinstance(got, TensorValue)
    with pytest.raises(TypeError, match="str"):
        model.compile("x")


@pytest.mark.parametrize("method", ["trace", "compile"])
def test_the_options_of_max(method):
    spec = TensorType("float32", (2, 4), CPU)
    make = getattr(nn.Linear(4, 2, "float32", CPU), method)
    make(spec, name="net", module=None, custom_extensions=(), is_device_graph=False)
    with pytest.raises(NotImplementedError, match="custom_extensions"):
        make(spec, custom_extensions=["kernels.mojopkg"])


def test_named_sizes():
    model = nn.Linear(4, 2, "float32", CPU)
    program = model.compile([TensorType("float32", ("batch", 4), CPU)][0])
    init(model, jax.random.key(0))
    for rows in (1, 5):
        x = np.ones((rows, 4), np.float32)
        np.testing.assert_allclose(program(x)[0], model(jnp.asarray(x)), rtol=1e-6)


@pytest.mark.parametrize("change", ["layer", "weight", "attribute", "added"])
def test_refuses_to_run_once_the_model_has_changed(change):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.factor = init(nn.Linear(4, 2, "float32", CPU), jax.random.key(0)), 2.0

        def __call__(self, x):
            return self.lin(x) * self.factor

    model = Scaled()
    program, fixed = model.compile(SPEC), model.compile(SPEC, weights=model.state_dict())
    before = np.asarray(program(X))
    model.lin.weight.value = model.lin.weight.value * 2  # a value is no change of structure
    np.testing.assert_allclose(program(X), 2 * before, rtol=1e-6)
    if change == "layer":
        model.lin, what = init(nn.Linear(4, 2, "float32", CPU), jax.random.key(1)), "lin.weight"
    elif change == "weight":
        model.lin.weight, what = nn.Linear(4, 2, "float32", CPU).weight, "lin.weight"
    elif change == "attribute":
        model.factor, what = 3.0, "attributes of Scaled"
    else:
        model.lin.extra, what = nn.Identity(), "layers or attributes of Identity"
    message = rf"compiled before its Scaled was changed \(.*{what}\): compile it again"
    with pytest.raises(ValueError, match=message):
        program(X)
    np.testing.assert_allclose(fixed(X), before, rtol=1e-6)  # its weights were given
