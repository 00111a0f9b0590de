"""init, partition, merge."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import init, merge, partition
from maxjax.graph import DeviceRef, Weight
from maxjax.graph.weights.writing import weight_data
from maxjax.nn import (
    Conv1D,
    ConvTranspose1d,
    Embedding,
    LayerList,
    LayerStack,
    Linear,
    Module,
    RMSNorm,
)

CPU = DeviceRef.CPU()
init_file = importlib.import_module("maxjax.nn.init")  # maxjax.nn.init is the function


class Net(Module):
    def __init__(self, extra=False):
        super().__init__()
        self.w = Weight("w", "float32", (64, 256), CPU)
        self.scale = Weight("scale", "bfloat16", (64,), CPU)
        self.bias = Weight("bias", "float32", (64,), CPU)
        if extra:
            self.more = Weight("more", "float32", (3, 3), CPU)

    def __call__(self, x):
        return (x @ self.w.T) * self.scale.astype("float32")[None] + self.bias[None]


def test_init_fills_what_is_lazy():
    m = Net()
    m.bias.value = jnp.full(64, 7.0)
    assert init(m, jax.random.key(0)) is m
    assert (
        abs(float(m.w.value.std()) - 1 / 16) < 0.005
        and (m.scale == 1).all()
        and (m.bias == 7).all()
    )
    assert m.scale.value.dtype == jnp.bfloat16


def test_a_weight_without_elements():
    m = Net()
    m.none = Weight("none", "float32", (0, 3), CPU)
    assert init(m, jax.random.key(0)).none.value.shape == (0, 3)


def test_values_depend_on_key_and_name_alone():
    a, b, c = (
        init(Net(extra), jax.random.key(seed))
        for extra, seed in ((False, 0), (True, 0), (False, 1))
    )
    np.testing.assert_array_equal(a.w.value, b.w.value)
    assert (a.w.value != c.w.value).any()


def test_born_where_it_is_placed():
    device = jax.devices()[2]
    assert init(Net().to(device), jax.random.key(0)).w.value.devices() == {device}


def test_own_initializers():
    class Own(Net):
        def initializer(self, name):
            return jax.nn.initializers.constant(3.0) if name == "w" else None

    assert (init(Own(), jax.random.key(0)).w == 3).all()
    m = init(
        Own(),
        jax.random.key(0),
        initializer=lambda name: jax.nn.initializers.constant(5.0) if name == "bias" else None,
    )
    assert (m.bias == 5).all() and (m.w == 3).all()


class Deep(Module):
    """Two layers with a norm each, of the same sizes."""

    def __init__(self):
        super().__init__()
        self.layers = LayerList([Linear(32, 32, "float32", CPU), Linear(32, 32, "float32", CPU)])
        self.norms = LayerList([RMSNorm(32, "float32"), RMSNorm(32, "float32")])

    def __call__(self, x):
        return x


def _traced(run):
    """How often a function that ``run`` is given was called, as by each tracing of a program with it."""
    calls = []

    def normal(key, shape, dtype):
        calls.append(shape)
        return jax.random.normal(key, shape, dtype)

    run(normal)
    return len(calls)


def test_equal_weights_share_a_program():
    assert (
        _traced(lambda normal: init(Deep(), jax.random.key(0), initializer=lambda _: normal)) == 2
    )

    def twice(normal):
        for seed in range(2):
            init(Deep(), jax.random.key(seed), initializer=lambda _: normal)

    # A function of the user may read what changes between two calls.
    assert _traced(twice) == 4


def test_programs_are_kept_for_the_next_call():
    def scaled(name):
        return jax.nn.initializers.normal(0.03) if name.startswith("layers") else None

    first = [init(Deep(), jax.random.key(0)), init(Deep(), jax.random.key(0), initializer=scaled)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "normal", None)  # nothing is traced
        again = [
            init(Deep(), jax.random.key(0)),
            init(Deep(), jax.random.key(0), initializer=scaled),
        ]
    for one, other in zip(first, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert (first[0].layers[0].weight.value != first[1].layers[0].weight.value).any()


@pytest.fixture
def options(monkeypatch):
    """Sets XLA's options for programs that are compiled quickly, and forgets those that are compiled."""

    def set_options(of):
        init_file._kept.cache_clear()
        monkeypatch.setattr(init_file, "_QUICK", of)

    yield set_options
    init_file._kept.cache_clear()


@pytest.mark.parametrize(("generator", "dtype"), [("threefry2x32", "float32"), ("rbg", "bfloat16")])
def test_a_program_that_is_compiled_quickly_draws_the_same_bits(options, generator, dtype):
    """Whatever the layer, alone and in a stack, on one device and on several."""
    key, mesh = jax.random.key(0, impl=generator), jax.make_mesh((2, 2), ("data", "model"))
    kinds = (
        lambda: LayerStack([Linear(24, 40, dtype, CPU, has_bias=True) for _ in range(3)]),
        lambda: LayerList([Embedding(50, 16, dtype, CPU), RMSNorm(16, dtype)]),
        lambda: Conv1D(4, 3, 8, dtype, has_bias=True),
        lambda: ConvTranspose1d(4, 8, 3, dtype),
        lambda: Linear(24, 40, dtype, CPU).to(mesh),
        lambda: LayerStack([Linear(24, 40, dtype, CPU) for _ in range(2)]).to(mesh),
    )
    quick = init_file._QUICK
    found = []
    for of in (quick, init_file._UNOPTIMISED):
        options(of)
        found.append([init(kind(), key).state_dict() for kind in kinds])
    for one, other in zip(*found, strict=True):
        assert list(one) == list(other)
        for name, value in one.items():
            assert np.asarray(value).tobytes() == np.asarray(other[name]).tobytes(), name


def test_an_option_that_xla_does_not_have_is_left_out(options):
    wanted = init(Deep(), jax.random.key(0))
    options({**init_file._QUICK, "xla_cpu_such_an_option_is_not_there": True})
    jax.tree.map(np.testing.assert_array_equal, init(Deep(), jax.random.key(0)), wanted)
    options({"xla_cpu_parallel_codegen_split_count": "many"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="many"):
        init(Deep(), jax.random.key(0))


@pytest.mark.parametrize("is_given", [True, False])
def test_init_inside_another_transformation(is_given):
    """The values of a stack and of a single layer are those outside, up to how XLA rounds them."""
    key = jax.random.key(0)

    def make(k=key):
        layers = LayerStack([Linear(4, 4, "float32", CPU) for _ in range(2)])
        return init(layers, k), init(Linear(8, 8, "float32", CPU), k)

    wanted, given = make(), [key] if is_given else []
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, jax.jit(make)(*given), wanted)
    shapes = jax.eval_shape(make, *given)
    assert [leaf.shape for leaf in jax.tree.leaves(shapes)] == [(2, 4, 4), (8, 8)]
    several = jax.vmap(make)(jax.random.split(key, 3))
    jax.tree.map(
        close, jax.tree.map(lambda leaf: leaf[1], several), make(jax.random.split(key, 3)[1])
    )


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_layers_of_a_stack_have_the_values_that_they_have_alone(generator):
    key = jax.random.key(0, impl=generator)
    stack = init(LayerStack([Linear(4, 3, "float32", CPU) for _ in range(3)]), key)
    alone = init(LayerList([Linear(4, 3, "float32", CPU) for _ in range(3)]), key)
    jax.tree.map(np.testing.assert_array_equal, stack.unstack(), alone)


def test_zeros_of_either_sign_are_two_initializers():
    def zeros(name):
        return jax.nn.initializers.constant(-0.0 if name.startswith("layers.1") else 0.0)

    model = init(Deep(), jax.random.key(0), initializer=zeros)
    signs = [bool(jnp.signbit(layer.weight.value).any()) for layer in model.layers]
    assert signs == [False, True]


def test_after_an_error_no_weight_has_a_value():
    model = Net()
    with pytest.raises(ValueError, match="no"):
        init(model, jax.random.key(0), initializer=lambda name: _refuse if name == "bias" else None)
    assert model.w.is_lazy and model.scale.is_lazy


def _refuse(key, shape, dtype):
    raise ValueError("no")


def test_what_cannot_be_initialised():
    class Bad(Module):
        def __init__(self, dtype, shape):
            super().__init__()
            self.w = Weight("w", dtype, shape, CPU)

        def __call__(self):
            return None

    with pytest.raises(TypeError, match="'w'.*int32"):
        init(Bad("int32", (3,)), jax.random.key(0))
    with pytest.raises(ValueError, match="symbolic"):
        init(Bad("float32", ("n",)), jax.random.key(0))


def test_partition_and_merge():
    m, x = init(Net(), jax.random.key(0)), jnp.ones((2, 256))
    ours, rest = partition(m, ["w", "bi*"])
    assert len(jax.tree.leaves(ours)) == 2 and len(jax.tree.leaves(rest)) == 1
    assert ours.w.value is m.w.value
    grads = jax.jit(jax.grad(lambda o, r: merge(o, r)(x).sum()))(ours, rest)
    assert grads.scale.value is None and grads.w.shape == [64, 256]
    np.testing.assert_array_equal(merge(rest, ours)(x), m(x))
    assert len(jax.tree.leaves(partition(m, lambda name, v: v.dtype == jnp.bfloat16)[0])) == 1
    with pytest.raises(ValueError, match="'w'"):
        merge(ours, ours)


@pytest.mark.parametrize("stacked", [False, True])
def test_errors_for_a_half_name_the_other_half(stacked):
    class Layers(Module):
        def __init__(self):
            super().__init__()
            layers = [Linear(4, 4, has_bias=True), Linear(4, 4, has_bias=True)]
            self.layers = LayerStack(layers) if stacked else LayerList(layers)

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    ours, rest = partition(init(Layers(), jax.random.key(0)), "*.bias")
    gradient = jax.grad(lambda ours: merge(ours, rest)(jnp.ones(4)).sum())(ours)
    message = r"'layers\.0\.{}' has no value here: it is in the other half .* maxjax\.merge\("
    for half, name in ((ours, "weight"), (gradient, "weight"), (rest, "bias")):
        for fill in (True, False):
            with pytest.raises(ValueError, match=message.format(name)):
                half.state_dict(auto_initialize=fill)
        with pytest.raises(ValueError, match=message.format(name)):
            half(jnp.ones(4))
    with pytest.raises(ValueError, match=message.format("weight")):
        weight_data("layers.0.weight", ours.layers[0].weight)


def test_integers_are_not_trained():
    class Table(Net):
        def __init__(self):
            super().__init__()
            self.ids = Weight("ids", "int32", (4,), CPU)

    m = Table()
    m.ids.value = jnp.arange(4)
    ours, rest = partition(init(m, jax.random.key(0)))
    assert ours.ids.value is None and rest.ids.value is not None and rest.w.value is None
