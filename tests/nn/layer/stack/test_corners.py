"""LayerStack in its corners: each test was once a defect."""

import functools
import gc
import sys
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxjax import init, load_weights, merge, partition
from maxjax.engine import InferenceSession
from maxjax.graph import Graph, TensorType, TensorValue, Weight
from maxjax.graph.weights import WeightData
from maxjax.kernels import StackSlice
from maxjax.nn import LayerList, LayerStack, Module, Sequential
from maxjax.nn.layer import add_layer_hook, clear_hooks, layer_name
from tests.nn.layer.stack.test_layer_stack import (
    CPU,
    RUN,
    Block,
    Lin,
    Model,
    Tower,
    X,
    assert_same,
    fill,
    linears,
    rebuilt,
    scale,
    state,
)

KIND, SPEC = TensorType("float32", (4,), CPU), jax.ShapeDtypeStruct((4,), jnp.float32)
ONES = np.ones((4, 4), np.float32)


# 1
def test_placing_one_model_leaves_equal_models_alone():
    one, other = fill(linears(3).stack()), fill(linears(3).stack())
    before = rebuilt(other)
    one.to(jax.devices()[3])
    for model in (before, rebuilt(other)):
        assert model[0].weight.spec.sharding is None
        Model(None)  # any change of structure
        assert jax.tree.structure(model) == jax.tree.structure(other)


# 2
@pytest.mark.parametrize("i", [0, 2])
def test_a_module_outside_that_is_a_layer_when_rebuilt(i):
    layers = linears(3)
    model = fill(Model(layers.stack(), last=layers[i]) if i else first_is(layers))
    other = rebuilt(model)
    assert_same(model, other)
    assert other.layers[1] is not other.layers[0]
    held = other.last if i else other.first
    assert held is other.layers[i]


def first_is(layers):
    model = Model.__new__(Model)
    model.first, model.layers = layers[0], layers.stack()
    return model


def test_a_part_of_a_layer_outside_when_rebuilt():
    layers = LayerList(Block() for _ in range(3))
    model = Model.__new__(Model)
    model.part, model.layers = layers[0].attn, layers.stack()
    fill(model)
    assert_same(model, rebuilt(model))


# 3
def test_a_stack_in_which_everything_is_shared_has_the_names_of_the_list():
    class Bare(Lin):
        def __init__(self, w):
            Module.__init__(self)
            self.weight = w

    def make(stack):
        w = Weight("weight", "float32", (4, 4), CPU)
        layers = LayerList(Bare(w) for _ in range(3))
        return Model(layers.stack() if stack else layers)

    plain, model = fill(make(False)), make(True)
    assert list(model.raw_state_dict()) == list(plain.raw_state_dict())  # ['layers.*.weight']
    assert_same(plain, rebuilt(fill(model)))


def test_layers_without_weights_stay_apart_when_rebuilt():
    class Double(Module):
        def __call__(self, h):
            return 2 * h

    model = rebuilt(Model(LayerList(Double() for _ in range(3)).stack()))
    assert [n for n, _ in model.named_modules()] == [
        "",
        "layers.",
        "layers.0.",
        "layers.1.",
        "layers.2.",
    ]


# 4
def test_unstacked_layers_of_a_rebuilt_stack_are_their_own():
    layers = rebuilt(linears(3, flag=1).stack()).unstack()
    layers[1].flag = 7
    assert [int(jax.jit(lambda m: m.flag)(layer)) for layer in layers] == [1, 7, 1]
    layers[1].extra = scale()
    layers[2].set_shared_weight("extra", scale())
    assert list(layers.raw_state_dict()) == ["0.weight", "1.weight", "1.scale", "2.weight"]


# 5
@pytest.mark.parametrize("how", ["graph", "scan"])
def test_no_tracer_stays_in_a_layer(how):
    stack = fill(linears(3).stack())
    if how == "graph":
        Graph("g", stack[1], [KIND])
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jax.lax.scan(lambda h, _: (stack[1](h), None), X, None, length=2)
    RUN(stack[1], X)


# 6
def test_one_tensor_on_disk_for_several_layers(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"w": ONES}, path)
    stack, data = linears(3).stack(), load_weights(path).w.data()
    stack.load_state_dict({f"{i}.weight": data for i in range(3)})
    assert all((value == 1).all() for value in state(stack).values())


# 7
@pytest.mark.parametrize("stacked", [False, True])
def test_a_model_is_freed_without_the_garbage_collector(stacked):
    layers = linears(3)
    model = fill(Model(layers.stack() if stacked else layers))
    gc.collect()
    gc.disable()
    try:
        new = jax.jit(lambda m: jax.tree.map(lambda a: a + 1, m))(model)
        old = weakref.ref(jax.tree.leaves(new)[0])
        del new
        assert old() is None
    finally:
        gc.enable()


# 8
def test_init_of_a_stack_tied_to_what_comes_first():
    def make(stack):
        layers = LayerList(Block() for _ in range(3))
        model = Model(layers.stack() if stack else layers, head=Lin())
        model.head.weight = model.layers[1].attn.weight
        return init(model, jax.random.key(0))

    assert_same(make(False), make(True))


# 9
@pytest.mark.parametrize("stacked", [False, True])
def test_a_weight_as_a_keyword_argument_in_a_program(stacked):
    class Uses(Lin):
        def __call__(self, h, table):
            return h + table

    class Net(Model):
        def __call__(self, h):
            if isinstance(self.layers, LayerStack):
                return self.layers.scan(h, table=self.table)
            for layer in self.layers:
                h = layer(h, table=self.table)
            return h

    layers = LayerList(Uses() for _ in range(3))
    model = fill(
        Net(layers.stack() if stacked else layers, table=Weight("table", "float32", (4,), CPU))
    )
    program = model.compile(SPEC)
    model.table.value = jnp.zeros(4)
    np.testing.assert_allclose(program(X), model(X))  # the old table is baked in


@pytest.mark.parametrize("kind", ["weight", "module"])
def test_compiled_before_loaded_with_a_keyword_argument(kind):
    class Uses(Lin):
        def __call__(self, h, what):
            return what(h) if isinstance(what, Module) else h + what

    class Net(Model):
        def __call__(self, h):
            return self.layers.scan(h, what=self.what)

    what = Weight("what", "float32", (4,), CPU) if kind == "weight" else Lin()
    model = Net(LayerList(Uses() for _ in range(3)).stack(), what=what)
    program = model.compile(SPEC)
    fill(model)
    np.testing.assert_allclose(program(X), model(X), rtol=1e-5, atol=1e-6)


# 11
@pytest.mark.parametrize("lazy", [False, True])
def test_many_threads_assign_different_layers(lazy):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            stack = linears(8).stack()
            if not lazy:
                fill(stack)

            def assign(i, stack=stack):
                stack[i].weight.value = jnp.full((4, 4), float(i))

            threads = [threading.Thread(target=assign, args=(i,)) for i in range(8)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            assert [float(layer.weight.value[0, 0]) for layer in stack] == list(range(8))
    finally:
        sys.setswitchinterval(interval)


# 12
@pytest.mark.parametrize("case", ["devices", "symbolic"])
def test_values_that_do_not_go_together_are_not_lost(case):
    class Sized(Lin):
        def __init__(self):
            Module.__init__(self)
            self.weight = Weight("weight", "float32", ("n", 4), CPU)

    stack = (linears(2) if case == "devices" else LayerList([Sized(), Sized()])).stack()
    one, other = (
        (jax.device_put(ONES, jax.devices()[i]) for i in (1, 2))
        if case == "devices"
        else (jnp.ones((2, 4)), jnp.ones((3, 4)))
    )
    stack[0].weight.value = one
    with pytest.raises(ValueError):
        stack[1].weight.value = other
    assert stack[0].weight.value is one


# 13
def test_a_stack_refused_by_jax_changes_nothing():
    class Two(Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Weight("a", "float32", (4,), CPU), Weight("b", "float32", (4,), CPU)

        def __call__(self, h):
            return h

    layers = fill(LayerList([Two(), Two()]))
    for i in range(2):
        layers[i].b.value = jax.device_put(np.ones(4, np.float32), jax.devices()[i + 1])
    before = state(layers)
    with pytest.raises(ValueError):
        layers.stack()
    assert all(w.home is None for w in layers.raw_state_dict().values())
    assert all((value == before[name]).all() for name, value in state(layers).items())


# 14
def test_symbolic_weights_load():
    class Sized(Lin):
        def __init__(self):
            Module.__init__(self)
            self.weight = Weight("weight", "float32", ("n", 4), CPU)

    for layers in (LayerList([Sized(), Sized()]), LayerList([Sized(), Sized()]).stack()):
        layers.load_state_dict({f"{i}.weight": ONES for i in range(2)})


# 15
def packed():
    class Packed(Lin):
        def __init__(self):
            Module.__init__(self)
            self.weight = Weight("weight", "uint8", (4, 4), CPU)

    return LayerList([Packed(), Packed()])


def test_packed_weights_of_another_shape():
    for layers in (packed(), packed().stack()):
        layers.load_state_dict(
            {f"{i}.weight": WeightData.from_numpy(np.ones((2, 8), np.uint8), "x") for i in range(2)}
        )
        assert rebuilt(layers)[0].weight.spec.dims == layers[0].weight.spec.dims
        layers[0].weight.value = layers[1].weight.value = None
        assert jax.tree.leaves(layers)[0].shape[-2:] == (2, 8)


def test_packed_weights_of_different_shapes_change_nothing():
    stack = packed().stack()
    data = {
        f"{i}.weight": WeightData.from_numpy(np.ones((2, 8 + i), np.uint8), "x") for i in range(2)
    }
    stack.load_state_dict({f"{i}.weight": np.ones((4, 4), np.uint8) for i in range(2)})
    with pytest.raises(ValueError, match="weight"):
        stack.load_state_dict(data)
    assert all(w.value is not None for w in stack.raw_state_dict().values())


# 16
def test_alignment_is_recorded():
    trees = []
    for layers in (linears(2), linears(2).stack()):
        before = jax.tree.structure(layers)
        layers.load_state_dict({f"{i}.weight": ONES for i in range(2)}, weight_alignment=1)
        assert jax.tree.structure(layers) != before and rebuilt(layers)[0].weight.align == 1
        trees.append(jax.tree.structure(rebuilt(layers).unstack() if trees else layers))
    assert trees[0] == trees[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda w: setattr(w, "align", 64),
        lambda w: setattr(w, "name", "z"),
        lambda w: setattr(w, "sharding_strategy", object()),
        lambda w: setattr(w, "quantization_encoding", "Q4_0"),
    ],
)
def test_what_one_weight_of_a_stack_was_declared_as_stays(change):
    stack = linears(2).stack()
    with pytest.raises(ValueError, match="LayerStack"):
        change(stack[0].weight)


# 17
def test_a_placement_by_axes_is_one_of_the_layers_axes():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    stack = fill(linears(4).stack()).to(NamedSharding(mesh, P("x", None)))
    assert stack[0].weight.value.sharding.shard_shape((4, 4)) == (2, 4)
    fill(linears(3).stack()).to(NamedSharding(mesh, P("x", None)))


# 18
def test_outputs_that_are_tensor_values_in_a_pattern():
    class Gives(Lin):
        def __call__(self, h):
            return h * 2, h

    class Other(Gives):
        pass

    stack = fill(LayerList([Gives(), Other(), Gives(), Other()]).stack())
    assert stack.scan(TensorValue(X))[1].shape == [4, 4]


def test_outputs_that_are_numbers_in_a_pattern():
    class Gives(Lin):
        def __call__(self, h):
            return h, 1.0

    class Other(Gives):
        pass

    stack = fill(LayerList([Gives(), Other(), Gives(), Other(), Gives()]).stack())
    assert stack.scan(X)[1].shape == (5,)


# 19
def test_what_is_left_of_an_unstacked_stack_still_scans():
    class Gives(Lin):
        def __call__(self, h):
            return h, h

    stack = fill(LayerList(Gives() for _ in range(3)).stack())
    stack.unstack()
    assert stack.scan(X)[1].shape == (3, 4)
    stack.stack()


# 20
def test_true_and_one_are_different_unrolls():
    stack = fill(linears(3).stack())
    text = lambda unroll: str(jax.make_jaxpr(lambda s: s.scan(X, unroll=unroll))(stack))
    assert text(1) != text(True)


def test_the_sign_of_a_zero_is_part_of_a_constant():
    class Divides(Lin):
        def __call__(self, h, by):
            return h / by

    stack = fill(LayerList([Divides()]).stack())
    assert float(stack.scan(X, by=0.0)[1]) == np.inf and float(stack.scan(X, by=-0.0)[1]) == -np.inf


# 21
def test_a_list_with_more_than_layers_does_not_lose_it():
    class Blocks(LayerList):
        def __init__(self, layers):
            super().__init__(layers)
            self.norm = Lin()

        def __call__(self, h):
            return self.norm(super().__call__(h))

    blocks = Blocks(linears(2))
    try:
        names = list(blocks.stack().raw_state_dict())
    except (TypeError, ValueError):
        return
    assert names == ["0.weight", "1.weight", "norm.weight"]


def test_a_sequential_is_one_again():
    layers = Sequential(linears(2))
    treedef = jax.tree.structure(layers)
    assert jax.tree.structure(layers.stack().unstack()) == treedef


# 22
@pytest.mark.parametrize("stacked", [False, True])
def test_a_program_of_one_layer_needs_that_layer_only(stacked):
    layers = linears(3).stack() if stacked else linears(3)
    layers[1].load_state_dict({"weight": ONES})
    program = layers[1].compile(SPEC)
    np.testing.assert_allclose(program(X), layers[1](X), rtol=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_session_of_one_layer(stacked):
    layers = linears(3).stack() if stacked else linears(3)
    InferenceSession().load(Graph("g", layers[1], [KIND]), weights_registry={"weight": ONES})


# 23
def test_a_program_after_unstacking():
    model = fill(Model(linears(3).stack()))
    program = model.compile(SPEC)
    want = program(X)
    model.layers = model.layers.unstack()
    np.testing.assert_allclose(program(X), want)


# 24
def test_a_registry_of_some_layers_of_a_lazy_model_says_which_is_missing():
    seen = []
    for layers in (linears(3), linears(3).stack()):
        with pytest.raises(ValueError) as error:
            InferenceSession().load(
                Graph("g", Model(layers), [KIND]), weights_registry={"layers.0.weight": ONES}
            )
        seen.append(str(error.value))
    assert seen[1].startswith("Weight 'layers.1.weight' is not in the weights registry")


# 25
def test_no_star_in_messages():
    model = fill(Model(linears(3).stack()))
    with pytest.raises(ValueError) as error:
        merge(model, model)
    assert "*" not in str(error.value)


def test_no_star_in_a_duplicate():
    with pytest.raises(ValueError) as error:
        Model(linears(2).stack(), tower=Tower(linears(2).stack())).raw_state_dict()
    assert "*" not in str(error.value)


def test_one_layer_of_a_stack_is_not_trained_alone():
    model = fill(Model(linears(3).stack()))
    for chosen in ("layers.*.weight", ["layers.0.weight", "layers.1.weight", "layers.2.weight"]):
        assert jax.tree.leaves(partition(model, chosen)[0])
    with pytest.raises(ValueError, match=r"layers\.0\.weight.*unstack"):
        partition(model, "layers.1.weight")


def test_scan_alone_names_the_weight():
    with pytest.raises(ValueError, match=r"weight '0\.weight' has no value"):
        linears(3).stack().scan(X)


def test_scan_alone_names_the_layers_for_hooks():
    stack, seen = fill(linears(3).stack()), []
    add_layer_hook(lambda layer, *a: seen.append(layer_name(layer)))
    stack.scan(X)
    assert seen[:3] == ["0", "1", "2"]


def test_scan_alone_warns_of_captured_weights():
    class Fresh(Lin):
        pass

    stack = fill(LayerList(Fresh() for _ in range(3)).stack())
    from maxjax.nn.layer import call_stack as running

    running._WARNED.clear()
    with pytest.warns(UserWarning, match="constants of"):
        jax.jit(lambda x: stack.scan(x))(X)


def test_a_hook_sees_the_stack_once():
    class More(Lin):
        def __call__(self, h, by=1):
            return h * by

    for layers in (LayerList([More(), More()]), LayerList([More(), More()]).stack()):
        seen = []
        add_layer_hook(lambda layer, *a, seen=seen: seen.append(layer))
        fill(layers)(X, by=2)
        clear_hooks()
        assert sum(layer is layers for layer in seen) == 1


def test_what_a_layer_keeps_for_itself_is_not_copied_to_the_others():
    class Sums(Lin):
        @functools.cached_property
        def total(self):
            return float(self.weight.value.sum())

    plain, stack = (
        rebuilt(fill(m))
        for m in (LayerList(Sums() for _ in range(3)), LayerList(Sums() for _ in range(3)).stack())
    )
    np.testing.assert_allclose(
        [stack[i].total for i in range(3)], [plain[i].total for i in range(3)], rtol=1e-6
    )


# 27
def test_a_stack_slice_is_no_endless_sequence():
    rows = []
    for row in StackSlice(jnp.ones((3, 2, 2)), 1):
        rows.append(row)
        assert len(rows) <= 2


@pytest.mark.parametrize("use", [bool, float, int, len, lambda s: divmod(s, 2), round])
def test_a_stack_slice_converts_as_an_array(use):
    s, plain = StackSlice(jnp.zeros((3,)), 1), jnp.zeros(())
    if use is len:
        s, plain = StackSlice(jnp.zeros((3, 2)), 1), jnp.zeros(2)
    assert use(s) == use(plain)


def test_a_numpy_copy_can_be_written_to():
    np.array(StackSlice(jnp.zeros((3, 2)), 1))[0] = 1


# 28
def test_values_on_another_device_stay_there():
    value = jax.device_put(ONES, jax.devices()[3])
    for layers in (linears(2), linears(2).stack()):
        layers.load_state_dict({f"{i}.weight": value for i in range(2)})
        assert layers[1].weight.value.devices() == {jax.devices()[3]}


def test_loaded_inside_a_graph():
    for layers in (linears(2), linears(2).stack()):
        with Graph("g", input_types=[KIND]) as g:
            layers.load_state_dict({f"{i}.weight": ONES for i in range(2)})
            g.output(layers(g.inputs[0]))


# 29
def test_a_slice_of_per_layer_values():
    values = fill(linears(4).stack()).per_layer([X] * 4)
    assert len(values[1:3]) == 2


def test_an_odd_digit_is_no_layer():
    assert not hasattr(linears(2).stack(), "\u00b2")


def test_replace_module_says_why():
    with pytest.raises(TypeError, match="unstack"):
        linears(2).stack().replace_module("0", Lin())


def test_stacked_with_first_it_is_itself():
    stack = linears(4).stack(first=1)
    assert stack.stack() is stack


@pytest.mark.parametrize("name", ["save_only_these_names", "__class__"])
def test_what_is_no_policy(name):
    stack = fill(linears(2).stack())
    with pytest.raises(ValueError, match="is not a policy"):
        stack.scan(X, remat=name)


def test_a_wrong_policy_with_hooks():
    stack = fill(linears(2).stack())
    add_layer_hook(lambda *a: None)
    with pytest.raises(ValueError, match="is not a policy"):
        stack.scan(X, remat="dots")
    clear_hooks()


def test_other_numbers_of_outputs_with_hooks():
    class Loud(Lin):
        def __call__(self, h):
            return h, h

    stack = fill(LayerList([Lin(), Loud()] * 2).stack())
    add_layer_hook(lambda *a: None)
    with pytest.raises(TypeError, match="different numbers"):
        stack.scan(X)


def test_a_weight_as_a_carry_gives_an_array():
    w = Weight("w", "float32", (4,), CPU)
    w.value = X
    assert not isinstance(fill(linears(2).stack())(w), Weight)
