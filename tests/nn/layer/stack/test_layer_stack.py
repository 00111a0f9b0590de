"""LayerStack: exact both ways, the names of the list, layers that work alone, refusals, hooks."""

import copy
import gc
import pickle
import re
import threading
import weakref
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import init, merge, partition
from maxjax.graph import DeviceRef, Weight
from maxjax.nn import Layer, LayerList, LayerStack, MissingLayer, Module, Sequential
from maxjax.nn.hooks.print_hook import PrintHook
from maxjax.nn.layer import add_layer_hook, clear_hooks, layer_name, recursive_named_layers

CPU = DeviceRef.CPU()
X = jnp.arange(4, dtype=jnp.float32) / 4
RUN = jax.jit(lambda m, x: m(x))
GRAD = jax.jit(jax.grad(lambda m: m(X).sum()))


class Lin(Module):
    traces = 0

    def __init__(self, d=4, dtype="float32", **attrs):
        super().__init__()
        self.weight = Weight("weight", dtype, (d, d), CPU)
        for name, value in attrs.items():
            setattr(self, name, value)

    def __call__(self, h):
        type(self).traces += 1
        return h + jnp.tanh(h @ self.weight.T)


class Block(Module):
    def __init__(self, **attrs):
        super().__init__()
        self.attn = Lin()
        self.bias = Weight("bias", "float32", (4,), CPU)
        for name, value in attrs.items():
            setattr(self, name, value)

    def __call__(self, h):
        return self.attn(h) + self.bias


class Shares(Block):
    """Also uses a weight, and perhaps a module, that it shares with others."""

    def __call__(self, h):
        h = super().__call__(h) * self.scale
        return self.norm(h) if hasattr(self, "norm") else h


class Model(Module):
    def __init__(self, layers, **others):
        super().__init__()
        self.layers = layers
        for name, other in others.items():
            setattr(self, name, other)

    def __call__(self, h):
        h = self.layers(h)
        return self.head(h) if hasattr(self, "head") else h


def values(model, seed=0):
    """Random values by name, the same for every model that has the name."""
    found = {}
    for name, weight in model.raw_state_dict().items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        shape = [int(d) for d in weight.shape]
        found[name] = (rng.standard_normal(shape) / 2).astype(weight.dtype.np)
    return found


def fill(model, seed=0):
    model.load_state_dict(values(model, seed))
    return model


def rebuilt(model):
    return jax.tree.map(lambda leaf: leaf, model)


def linears(n, **attrs):
    return LayerList(Lin(**attrs) for _ in range(n))


def scale():
    return Weight("scale", "float32", (4,), CPU)


# -- models, with their layers stacked or not


def head_of(layers, i, mark, before=False):
    head = Lin()
    others = {"head": head} if before else {}
    model = Model(layers, **others)
    if mark:
        head.set_shared_weight("weight", layers[i].attn.weight)
    else:
        head.weight = layers[i].attn.weight
    model.head = head
    return model


def front_with_head():
    """The layer in front uses the head's weight."""
    model = Model(mixed("LBBB"), head=Lin())
    model.layers[0].set_shared_weight("weight", model.head.weight)
    return model


def front_with_layer(mark):
    """The layer in front uses a weight of the pattern."""
    layers = mixed("LBBB")
    if mark:
        layers[0].set_shared_weight("weight", layers[2].attn.weight)
    else:
        layers[0].weight = layers[2].attn.weight
    return Model(layers)


def sharing_a_weight(mark):
    model = Model(LayerList(Shares() for _ in range(3)), embed=Module.__new__(Block))
    model.embed.scale = scale()
    for layer in model.layers:
        if mark:
            layer.set_shared_weight("scale", model.embed.scale)
        else:
            layer.scale = model.embed.scale
    return model


def sharing_a_module():
    norm = Lin()
    model = Model(LayerList(Shares(norm=norm) for _ in range(3)), last=norm)
    shared = scale()
    for layer in model.layers:
        layer.scale = shared
    return model


class Tower(Model):
    _omit_module_attr_name = True


def omitting():
    """Two stacks, one in a module that leaves out its own name."""
    return Model(linears(3), tower=Tower(None, blocks=LayerList(Block() for _ in range(2))))


def mixed(kinds, **attrs):
    return LayerList({"L": Lin, "B": Block, "S": Sequential}[kind]() for kind in kinds)


CASES = {
    "list": (lambda: LayerList(Block() for _ in range(3)), {}),
    "one layer": (lambda: Model(LayerList([Block()])), {}),
    "in a model": (lambda: Model(LayerList(Block() for _ in range(3)), head=Lin()), {}),
    "pattern": (lambda: Model(mixed("LLBLLBLLBL"), head=Lin()), {}),
    "pattern given": (lambda: Model(linears(7)), {"period": 3}),
    "layers in front": (lambda: Model(mixed("BBLLLL")), {"first": 2}),
    "front and rest": (lambda: mixed("BLLBLLBL"), {"first": 2, "period": 3}),
    "bfloat16": (lambda: linears(3, dtype="bfloat16"), {}),
    "head shares": (lambda: head_of(LayerList(Block() for _ in range(3)), 1, True), {}),
    "head tied": (lambda: head_of(LayerList(Block() for _ in range(3)), 1, False), {}),
    "head tied to 0": (lambda: head_of(LayerList(Block() for _ in range(3)), 0, False), {}),
    "head in front tied": (
        lambda: head_of(LayerList(Block() for _ in range(3)), 2, False, True),
        {},
    ),
    "front shares the head": (front_with_head, {"first": 1}),
    "front shares a layer": (lambda: front_with_layer(True), {"first": 1}),
    "front tied to a layer": (lambda: front_with_layer(False), {"first": 1}),
    "all share a weight": (lambda: sharing_a_weight(False), {}),
    "all share another's": (lambda: sharing_a_weight(True), {}),
    "all share a module": (sharing_a_module, {}),
    "omitted names": (omitting, {}),
}


def stacked(model, **how):
    """The model with every LayerList as a LayerStack."""
    if isinstance(model, LayerList):
        return model.stack(**how)
    for name, child in list(model.sublayers.items()):
        if isinstance(child, (LayerList, Tower)):
            setattr(model, name, stacked(child, **how))
    return model


def unstacked(model):
    """The model with every LayerStack as a LayerList."""
    if isinstance(model, LayerStack):
        return model.unstack()
    for name, child in list(model.sublayers.items()):
        if isinstance(child, (LayerStack, Tower)):
            setattr(model, name, unstacked(child))
    return model


def twins(case):
    make, how = CASES[case]
    return fill(make()), fill(stacked(make(), **how))


def state(model):
    return {name: np.asarray(value) for name, value in model.state_dict().items()}


def assert_same(a, b):
    """The same names everywhere, and the same bits."""
    assert list(a.raw_state_dict()) == list(b.raw_state_dict())
    ours, theirs = state(a), state(b)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        assert ours[name].tobytes() == theirs[name].tobytes(), name
    known = {LayerStack: LayerList}
    for names in (lambda m: m.named_modules(), recursive_named_layers):
        kinds = [[(n, known.get(type(m), type(m))) for n, m in names(model)] for model in (a, b)]
        assert kinds[0] == kinds[1]
    named = [[w.name for w in m.raw_state_dict().values()] for m in (a, b)]
    assert named[0] == named[1]


every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_names_and_values_are_those_of_the_list(case):
    plain, stack = twins(case)
    assert_same(plain, stack)
    assert any("*" in str(path) or ":" in str(path) for path, _ in jax.tree.leaves_with_path(stack))


@pytest.mark.sampled
@every_case
@pytest.mark.parametrize(
    "how",
    [rebuilt, jax.jit(lambda m: m), copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["tree.map", "jit", "deepcopy", "pickle"],
)
def test_also_when_it_is_rebuilt(case, how):
    plain, stack = twins(case)
    other = how(stack)
    assert_same(how(plain), other)
    assert jax.tree.structure(other) == jax.tree.structure(stack)
    fill(other, 1)
    assert_same(fill(plain, 1), other)
    assert_same(fill(plain), stack)


@every_case
def test_unstacking_is_exact(case):
    plain, stack = twins(case)
    stack = unstacked(stack)
    assert jax.tree.structure(stack) == jax.tree.structure(plain)
    assert_same(plain, stack)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(stack), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@every_case
def test_the_same_result(case):
    plain, stack = twins(case)
    x = X.astype(jnp.bfloat16) if case == "bfloat16" else X
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if case == "bfloat16" else {"rtol": 1e-5, "atol": 1e-6}
    want = np.asarray(plain(x), np.float32)
    for got in (stack(x), RUN(stack, x), rebuilt(stack)(x)):
        assert got.dtype == x.dtype
        np.testing.assert_allclose(np.asarray(got).astype(np.float32), want, **tolerance)


@every_case
def test_the_lazy_one_has_the_same_treedef(case):
    make, how = CASES[case]
    lazy, (_, loaded) = stacked(make(), **how), twins(case)
    assert jax.tree.structure(lazy) == jax.tree.structure(loaded)
    kinds = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(lazy)]
    assert kinds == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(loaded)]
    assert all(weight.value is None for weight in lazy.raw_state_dict().values())


class Towers(Module):
    """Two lists, tied layer by layer."""

    def __init__(self, mark, names):
        super().__init__()
        made = {"a": linears(3), "b": linears(3)}
        for one, other in zip(made["b"], made["a"], strict=True):
            if mark:
                one.set_shared_weight("weight", other.weight)
            else:
                one.weight = other.weight
        for name in names:
            setattr(self, name, made[name])

    def __call__(self, h):
        return self.b(self.a(h))


@pytest.mark.parametrize("mark", [True, False])
@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize("which", ["a", "b"])
def test_one_of_two_tied_lists(mark, names, which):
    plain, model = fill(Towers(mark, names)), Towers(mark, names)
    setattr(model, which, getattr(model, which).stack())
    fill(model)
    grads = [GRAD(m).raw_state_dict() for m in (plain, model)]
    for one in (model, rebuilt(model)):
        assert_same(plain, one)
        assert len(jax.tree.leaves(one)) == 1
        np.testing.assert_allclose(one(X), plain(X), rtol=1e-5, atol=1e-6)
    for name, weight in grads[0].items():
        np.testing.assert_allclose(grads[1][name].value, weight.value, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="layer 0 belongs to another LayerStack"):
        getattr(model, "ab".replace(which, "")).stack()


def test_an_unstacked_lazy_model_is_lazy_again():
    layers = linears(3).stack().unstack()
    assert type(layers) is LayerList
    assert jax.tree.structure(layers) == jax.tree.structure(linears(3))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(layers))


def test_unstacked_layers_are_their_own_again():
    stack = fill(linears(3).stack())
    layers = stack.unstack()
    layers[1].flag = 7
    layers[2].weight = Weight("weight", "float32", (2, 2), CPU)
    layers.append(Lin())
    assert list(layers.raw_state_dict()) == [f"{i}.weight" for i in range(4)]
    assert layers[2].weight.shape == [2, 2] and layers[0].weight.shape == [4, 4]
    assert jax.tree.structure(layers[0]) != jax.tree.structure(layers[1])


def test_stacked_again_in_another_way():
    stack = fill(linears(6).stack())
    want = state(stack)
    other = stack.unstack().stack(period=2)
    assert repr(other).startswith("LayerStack(6 layers: 3 times 2, ")
    for name, value in state(other).items():
        np.testing.assert_array_equal(value, want[name])
    assert other.stack(period=2) is other and other.stack() is other
    with pytest.raises(ValueError, match="unstack"):
        other.stack(period=3)


# -- what is equal


@pytest.mark.parametrize(
    "kinds, how, shown, parts",
    [
        ("LLLL", {}, "4 layers", ["*"]),
        ("LBLB", {}, "4 layers: 2 times 2", ["0:4:2", "1:4:2"]),
        (
            "LLLLLB" * 4 + "LL",
            {},
            "26 layers: 4 times 6 and 2 more",
            [*(f"{i}:24:6" for i in range(6)), "24", "25"],
        ),
        ("BBLLLL", {"first": 2}, "6 layers: 4 times 1 after 2", ["0", "1", "2:6"]),
        ("LBLBL", {"period": 2}, "5 layers: 2 times 2 and 1 more", ["0:4:2", "1:4:2", "4"]),
        ("LLLLL", {"period": 2}, "5 layers: 2 times 2 and 1 more", ["0:4:2", "1:4:2", "4"]),
        ("LLL", {"period": 3}, "3 layers: 1 times 3", ["0:3:3", "1:3:3", "2:3:3"]),
        ("L", {}, "1 layers", ["*"]),
        ("BL", {"first": 1}, "2 layers: 1 times 1 after 1", ["0", "1:2"]),
    ],
)
def test_patterns(kinds, how, shown, parts):
    stack, plain = fill(mixed(kinds).stack(**how)), fill(mixed(kinds))
    assert repr(stack).startswith(f"LayerStack({shown}, ") and len(stack) == len(kinds)
    found = []
    for path, leaf in jax.tree.leaves_with_path(stack):
        part = jax.tree_util.keystr(path, simple=True).split(".")[0]
        found.append(part)
        own = leaf.shape if part.isdigit() else leaf.shape[1:]
        assert own in [(4, 4), (4,)]
        assert part.isdigit() or leaf.shape[0] == len(kinds[slice_of(part)])
    assert sorted(set(found)) == sorted(parts)
    np.testing.assert_allclose(stack(X), plain(X), rtol=1e-5, atol=1e-6)


def slice_of(part):
    return slice(None) if part == "*" else slice(*map(int, part.split(":")))


def test_a_rest_that_does_not_follow_the_pattern():
    with pytest.raises(ValueError, match="layers 4 and 6 differ: the layer itself is a Block"):
        mixed("BLBLBLL").stack(first=1, period=2)
    with pytest.raises(ValueError, match="no pattern of them repeats"):
        mixed("BLLLL").stack()


def with_weights(**shapes):
    layer = Lin()
    for name, shape in shapes.items():
        setattr(layer, name, Weight(name, "float32", shape, CPU))
    return layer


class Other(Lin):
    pass


def inner(**attrs):
    return Model(None, mlp=Lin(**attrs))


def tied_inside():
    layer = Model(None, a=Lin(), b=Lin())
    layer.b.weight = layer.a.weight
    return layer


def placed():
    return Lin().to(jax.devices()[1])


@pytest.mark.parametrize(
    "one, other, says",
    [
        (Lin, Other, "the layer itself is a Lin in one and a Other in the other"),
        (inner, lambda: Model(None, mlp=Other()), "'mlp' is a Lin in one and a Other"),
        (Lin, lambda: Lin(3), r"'weight' is .*float32 \[4, 4\] .* and .*float32 \[3, 3\] "),
        (Lin, lambda: Lin(dtype="bfloat16"), r"'weight' is .*float32 .* and .*bfloat16 \["),
        (Lin, placed, "'weight' is .* and .*SingleDeviceSharding"),
        (Lin, lambda: with_weights(bias=(4,)), "only one of them has the weight 'bias'"),
        (lambda: Lin(window=3), lambda: Lin(window=4), "'window' is 3 in one and 4 in the other"),
        (Lin, lambda: Lin(window=4), "'window' is None in one and 4 in the other"),
        (lambda: Lin(sizes=[1]), lambda: Lin(sizes=[2]), r"'sizes' is \[1\] in one and \[2\]"),
        (lambda: inner(eps=0.0), lambda: inner(eps=-0.0), r"'mlp\.eps' is 0\.0 in one and -0\.0"),
        (lambda: Model(None, a=Lin(), b=Lin()), tied_inside, r"only one .* the weight 'b\.weight'"),
    ],
)
def test_layers_that_differ_say_in_what(one, other, says):
    with pytest.raises(ValueError, match=f"layers 0 and 1 differ: .*{says}"):
        LayerList([one(), other()]).stack()
    with pytest.raises(ValueError, match="layers 3 and 4 differ, and no pattern of them repeats"):
        LayerList([*(one() for _ in range(4)), other()]).stack()


def test_what_differs_is_an_argument_not_an_attribute():
    with pytest.raises(ValueError, match="argument of scan, not an attribute"):
        LayerList(Lin(index=i) for i in range(3)).stack()


def test_layers_tied_to_each_other_do_not_stack():
    layers = linears(4)
    layers[3].weight = layers[1].weight
    with pytest.raises(ValueError, match=r"'1\.weight' and '3\.weight' are one tied weight"):
        layers.stack()
    same = Lin()
    with pytest.raises(ValueError, match=r"'0\.weight' and '2\.weight' are one tied weight"):
        LayerList([same, Lin(), same]).stack()


def test_ties_that_are_marked_in_one_layer_only_differ():
    layers, head = linears(2), Lin()
    layers[0].weight = head.weight
    layers[1].set_shared_weight("weight", head.weight)
    with pytest.raises(ValueError, match="layers 0 and 1 differ: their weights are tied"):
        layers.stack()


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: LayerList(), ValueError, "0 layers cannot be stacked"),
        (lambda: LayerList([Lin(), None]), TypeError, "layer 1 is a NoneType"),
        (lambda: LayerList([Layer()]), TypeError, "layer 0 is a Layer"),
        (lambda: LayerList([linears(2).stack()]), NotImplementedError, "stacks within stacks"),
        (
            lambda: LayerList([Model(linears(2).stack())]),
            NotImplementedError,
            "stacks within stacks",
        ),
        (lambda: LayerList([linears(2).stack()[0]]), ValueError, "layer 0 belongs to another"),
    ],
)
def test_what_cannot_be_stacked(make, error, says):
    with pytest.raises(error, match=says):
        make().stack()


@pytest.mark.parametrize("how", [{"first": 3}, {"first": -1}, {"period": 0}, {"period": 4}])
def test_numbers_that_do_not_go_with_three_layers(how):
    layers = linears(3)
    with pytest.raises(ValueError, match=r"first=|period="):
        layers.stack(**how)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: LayerList([*linears(3), Lin(flag=1)]),
        lambda: LayerList([*linears(3), Lin(3)]),
        lambda: LayerList([*linears(3), linears(2).stack()[1]]),
        lambda: LayerList([*(tied := linears(3)), tied[1]]),
    ],
    ids=["attribute", "shape", "another stack", "tied"],
)
def test_a_refused_stack_changes_nothing(layers):
    layers = layers()
    own = list(layers)[:3]
    for layer in own:
        fill(layer)
    before, treedef = [layer.weight.value for layer in own], jax.tree.structure(layers)
    with pytest.raises(ValueError):
        layers.stack()
    assert all(layer.weight.value is value for layer, value in zip(own, before, strict=True))
    assert jax.tree.structure(layers) == treedef
    own[0].flag = 2
    layers.append(Lin())
    assert own[0].flag == 2 and len(layers) == 5


def test_treedefs_of_different_stacks_differ():
    kinds = [
        linears(4),
        linears(4).stack(),
        linears(4).stack(period=2),
        linears(4).stack(first=1),
        linears(5).stack(),
        linears(4, flag=1).stack(),
        linears(4, dtype="bfloat16").stack(),
    ]
    assert len({jax.tree.structure(model) for model in kinds}) == len(kinds)
    assert jax.tree.structure(linears(4).stack()) == jax.tree.structure(LayerStack(linears(4)))


# -- as a list that cannot be changed


@pytest.mark.parametrize(
    "change",
    [lambda xs: xs.append(Lin()), lambda xs: xs.pop(), lambda xs: setattr(xs, "0", Lin())],
)
def test_a_list_in_a_layer_cannot_be_changed(change):
    stack = LayerList(Block(xs=[Lin(), Lin()]) for _ in range(3)).stack()
    names = list(stack.raw_state_dict())
    for i in (0, 2):
        with pytest.raises(TypeError, match="one of a LayerStack.*unstack"):
            change(stack[i].xs)
    assert list(stack.raw_state_dict()) == names
    layers = stack.unstack()
    change(layers[2].xs)


@pytest.mark.parametrize("make", [lambda: linears(4).stack(), lambda: rebuilt(linears(4).stack())])
def test_it_reads_like_a_list(make):
    stack = make()
    assert isinstance(stack, LayerList) and len(stack) == 4 and len(list(stack)) == 4
    assert stack[-1] is stack[3] and stack[1:3] == [stack[1], stack[2]] == stack.layers[1:3]
    assert stack[2] in stack and Lin() not in stack and stack[1] is getattr(stack, "1")
    assert stack[1].weight is stack[1].weight and stack[1].weight is not stack[2].weight
    assert list(stack.sublayers) == ["0", "1", "2", "3"] and stack.sublayers["2"] is stack[2]
    with pytest.raises(IndexError, match="there is no layer 4: there are 4"):
        stack[4]
    with pytest.raises(AttributeError, match="'LayerStack' object has no attribute '4'"):
        getattr(stack, "4")
    assert not hasattr(stack, "weight")


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.append(Lin()),
        lambda s: s.insert(0, Lin()),
        lambda s: s.extend([Lin()]),
        lambda s: s.pop(),
        lambda s: s.__setitem__(0, Lin()),
        lambda s: s.__delitem__(0),
        lambda s: setattr(s, "0", Lin()),
        lambda s: setattr(s, "norm", Lin()),
        lambda s: setattr(s, "scale", scale()),
        lambda s: s.set_shared_weight("scale", scale()),
        lambda s: setattr(s[1], "flag", 3),
        lambda s: setattr(s[0].attn, "flag", 3),
        lambda s: setattr(s[1], "attn", Lin()),
        lambda s: setattr(s[1], "bias", None),
        lambda s: setattr(s[1].attn, "weight", s[0].attn.weight),
        lambda s: s[1].set_shared_weight("bias", scale()),
        lambda s: s[1].replace_module("attn", Lin()),
        lambda s: delattr(s[1], "attn"),
        lambda s: delattr(s[0], "bias"),
    ],
)
@pytest.mark.parametrize("make", [lambda s: s, rebuilt], ids=["made", "rebuilt"])
def test_it_cannot_be_changed(change, make):
    stack = make(fill(LayerList(Block() for _ in range(3)).stack()))
    before, treedef = state(stack), jax.tree.structure(stack)
    with pytest.raises(TypeError, match=r"unstack\(\)"):
        change(stack)
    assert jax.tree.structure(stack) == treedef
    for name, value in state(stack).items():
        np.testing.assert_array_equal(value, before[name])


def test_what_all_layers_share_can_be_changed():
    _, model = twins("all share a module")
    treedef = jax.tree.structure(model)
    model.last.flag = 1
    assert model.layers[2].norm.flag == 1 and jax.tree.structure(model) != treedef


def test_a_plain_attribute_of_the_stack_is_part_of_its_treedef():
    stack = linears(2).stack()
    treedef = jax.tree.structure(stack)
    stack.note = "x"
    assert jax.tree.structure(stack) != treedef and rebuilt(stack).note == "x"


def test_missing_layers_stack():
    with pytest.raises(RuntimeError, match="layer 7 is missing"):
        LayerList(MissingLayer(7) for _ in range(2)).stack()(X)


# -- its layers alone


@pytest.mark.parametrize("case", ["list", "front and rest", "head tied"])
@pytest.mark.parametrize("make", [lambda s: s, rebuilt], ids=["made", "rebuilt"])
def test_each_layer_works_alone(case, make):
    plain, stack = twins(case)
    stack = make(stack)
    ours, theirs = (getattr(m, "layers", m) for m in (plain, stack))
    ours, theirs = (list(layers) for layers in (ours, theirs))
    for one, other in zip(ours, theirs, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        np.testing.assert_allclose(other(X), one(X), rtol=1e-6)
        np.testing.assert_allclose(RUN(other, X), one(X), rtol=1e-5, atol=1e-6)
        for name, value in state(one).items():
            np.testing.assert_array_equal(value, state(other)[name])
        grads = [GRAD(layer) for layer in (one, other)]
        for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_one_program_for_all_layers():
    class Counted(Lin):
        traces = 0

    stack, alone = fill(LayerList(Counted() for _ in range(4)).stack()), fill(Counted())
    run = jax.jit(lambda m, x: m(x))
    for layer in (*stack, alone, rebuilt(stack)[2]):
        run(layer, X)
    assert Counted.traces == 1 and run._cache_size() == 1


@pytest.mark.parametrize("make", [lambda s: s, rebuilt], ids=["made", "rebuilt"])
def test_values_of_one_layer_are_assigned(make):
    stack = make(fill(linears(3).stack()))
    before = state(stack)
    stack[1].weight.value = np.full((4, 4), 2, np.float32)
    after = state(stack)
    assert (after["1.weight"] == 2).all() and (jax.tree.leaves(stack)[0][1] == 2).all()
    for name in ("0.weight", "2.weight"):
        np.testing.assert_array_equal(after[name], before[name])
    plain = linears(3)
    plain.load_state_dict(after)
    np.testing.assert_allclose(stack(X), plain(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "value", [np.ones((4, 3), np.float32), np.ones((3, 4, 4), np.float32), 3.0, "x"]
)
def test_values_that_do_not_fit_one_layer(value):
    messages = []
    for layers in (fill(linears(3)), fill(linears(3).stack())):
        before = state(layers)
        with pytest.raises((TypeError, ValueError), match=r"1\.weight") as error:
            layers[1].weight.value = value
        messages.append(str(error.value))
        for name, array in state(layers).items():
            np.testing.assert_array_equal(array, before[name])
    assert messages[0] == messages[1]


def test_a_layer_cannot_have_another_type():
    stack = fill(linears(2).stack())
    before = state(stack)
    for value in (jax.ShapeDtypeStruct((4, 4), jnp.bfloat16), jnp.ones((4, 4), jnp.bfloat16)):
        with pytest.raises(ValueError, match=r"'0\.weight' belongs to a LayerStack.*unstack\(\)"):
            stack[0].weight.value = value
    with pytest.raises(ValueError, match="placement"):
        stack[0].to(jax.devices()[1])
    for name, value in state(stack).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("made", ["filled", "lazy"])
def test_values_of_some_layers(made):
    stack = linears(3).stack()
    if made == "filled":
        fill(stack)[1].weight.value = None
    else:
        stack[0].weight.value, stack[2].weight.value = jnp.ones((4, 4)), jnp.ones((4, 4))
    assert [layer.weight.value is None for layer in stack] == [False, True, False]
    assert isinstance(jax.tree.leaves(stack)[0], jax.ShapeDtypeStruct)
    np.testing.assert_allclose(RUN(stack[2], X), stack[2](X), rtol=1e-6)
    for run in (stack, Model(stack)):
        with pytest.raises(ValueError, match=r"weight '(layers\.)?1\.weight' has no value"):
            run(X)
    with pytest.raises(ValueError, match=r"'1\.weight' was not initialized"):
        stack.state_dict(auto_initialize=False)
    held = stack[2].weight.value
    stack[1].weight.value = jnp.zeros((4, 4))
    np.testing.assert_array_equal(stack[2].weight.value, held)
    assert jax.tree.leaves(stack)[0].shape == (3, 4, 4) and stack(X).shape == (4,)


def test_emptied_layer_by_layer():
    stack = fill(linears(2).stack())
    for layer in stack:
        layer.weight.value = None
    assert jax.tree.leaves(stack) == jax.tree.leaves(linears(2).stack())
    assert (stack.state_dict()["1.weight"] == 0).all()


def test_the_state_dict_of_one_layer():
    stack = fill(LayerList(Block() for _ in range(4)).stack())
    before = state(stack)
    assert list(stack[3].state_dict()) == ["bias", "attn.weight"]
    new = {"bias": np.full(4, 3, np.float32), "attn.weight": np.full((4, 4), 5, np.float32)}
    assert stack[3].load_state_dict(new) == ((), ())
    stack[1].attn.load_state_dict({"weight": new["attn.weight"]})
    changed = {"3.bias": 3, "3.attn.weight": 5, "1.attn.weight": 5}
    for name, value in state(stack).items():
        if name in changed:
            assert (value == changed.pop(name)).all()
        else:
            np.testing.assert_array_equal(value, before[name])
    assert not changed


# -- trees of it


def test_grads_and_updates_are_modules_with_the_same_names():
    plain, stack = twins("in a model")
    grads = jax.jit(jax.grad(lambda m: jnp.sum(jnp.square(m(X)))))
    ours, theirs = grads(plain), grads(stack)
    assert type(theirs.layers) is LayerStack and theirs.layers[1].attn.weight.value.shape == (4, 4)
    for name, weight in ours.raw_state_dict().items():
        np.testing.assert_allclose(
            theirs.raw_state_dict()[name].value, weight.value, rtol=1e-4, atol=1e-6
        )
    update = lambda m, g: jax.tree.map(lambda a, b: a - 0.1 * b, m, g)
    for name, value in state(update(plain, ours)).items():
        np.testing.assert_allclose(state(update(stack, theirs))[name], value, rtol=1e-5, atol=1e-6)


def test_leaves_are_named_by_what_stands_for_all_layers():
    names = [
        jax.tree_util.keystr(path, simple=True)
        for path, _ in jax.tree.leaves_with_path(Model(mixed("BLBLB").stack(), head=Lin()))
    ]
    assert names == [
        "head.weight", "layers.0:4:2.bias", "layers.1:4:2.weight", "layers.4.bias",
        "layers.0:4:2.attn.weight", "layers.4.attn.weight",
    ]  # fmt: skip


def test_partition_and_merge():
    _, stack = twins("in a model")
    ours, theirs = partition(stack, "layers.*.attn.weight")
    assert [leaf.shape for leaf in jax.tree.leaves(ours)] == [(3, 4, 4)]
    assert ours.layers[1].attn.weight.value is not None and ours.layers[1].bias.value is None
    assert theirs.layers[1].attn.weight.value is None
    assert_same(merge(ours, theirs), stack)
    grads = jax.jit(jax.grad(lambda m: merge(m, theirs)(X).sum()))(ours)
    want = jax.jit(jax.grad(lambda m: m(X).sum()))(stack)
    for i in range(3):
        np.testing.assert_allclose(
            grads.layers[i].attn.weight.value, want.layers[i].attn.weight.value, rtol=1e-6
        )


def test_anything_may_be_its_leaf():
    stack = fill(linears(3).stack())
    shapes = jax.tree.map(lambda leaf: leaf.shape, stack)
    assert shapes[1].weight.value == (3, 4, 4)
    numpy = jax.tree.map(np.asarray, stack)
    np.testing.assert_array_equal(numpy[1].weight.value, stack[1].weight.value)
    np.testing.assert_allclose(numpy(X), stack(X), rtol=1e-6)
    assert jax.tree.map(lambda leaf: None, stack)[2].weight.value is None
    assert jax.tree.map(lambda leaf: "x", stack)[2].weight.value == "x"


def test_shapes_of_a_lazy_stack():
    lazy = Model(linears(3).stack(), head=Lin())
    assert jax.eval_shape(lambda m, x: m(x), lazy, X).shape == (4,)
    compiled = RUN.lower(lazy, X).compile()
    loaded = fill(lazy)
    np.testing.assert_allclose(compiled(loaded, X), loaded(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["head shares", "layers in front"])
def test_init_gives_the_very_values_of_the_unstacked_model(case):
    make, how = CASES[case]
    plain, stack = make(), stacked(make(), **how)
    assert_same(init(plain, jax.random.key(3)), init(stack, jax.random.key(3)))


@pytest.mark.parametrize("given", [[1, 3], [0, 1, 2]])
def test_init_of_some_layers(given):
    value = jnp.full((4, 4), 7.0)
    models = linears(4), linears(4).stack()
    for model in models:
        for i in given:
            model[i].weight.value = value
        init(model, jax.random.key(1))
    assert_same(*models)
    assert (models[1][given[0]].weight.value == 7).all()


def test_initializers_are_asked_by_true_names():
    asked = []

    def initializer(name):
        asked.append(name)
        return jax.nn.initializers.constant(float(name[0])) if name[0] in "12" else None

    models = linears(4), linears(4).stack()
    for model in models:
        init(model, jax.random.key(0), initializer=initializer)
    assert asked == [f"{i}.weight" for i in range(4)] * 2
    assert_same(*models)
    assert (models[1][2].weight.value == 2).all()


def test_copies():
    stack = fill(Model(linears(3).stack()))
    deep, shallow = copy.deepcopy(stack), copy.copy(stack)
    stack.layers[1].weight.value = jnp.zeros((4, 4))
    assert (shallow.layers[1].weight.value == 0).all()
    assert (deep.layers[1].weight.value != 0).any()
    deep.layers[2].weight.value = jnp.zeros((4, 4))
    assert (stack.layers[2].weight.value != 0).any()


def test_copies_of_some_values():
    stack = linears(3).stack()
    stack[1].weight.value = jnp.ones((4, 4))
    for other in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert [layer.weight.value is None for layer in other] == [True, False, True]
        fill(other)
        assert stack[0].weight.value is None


@pytest.mark.parametrize("change", ["load", "assign", "empty"])
def test_old_values_are_let_go(change):
    stack = fill(linears(3).stack())
    stack(X), RUN(stack, X), RUN(stack[1], X), stack[2](X)
    old = [weakref.ref(jax.tree.leaves(stack)[0]), weakref.ref(jax.tree.leaves(stack[1])[0])]
    if change == "load":
        fill(stack, 1)
    elif change == "assign":
        stack[0].weight.value = jnp.ones((4, 4))
    else:
        stack[0].weight.value = None
    gc.collect()
    assert [ref() for ref in old] == [None, None]


def test_layers_made_in_many_threads_are_the_same():
    for _ in range(5):
        stack, found = rebuilt(fill(LayerList(Block() for _ in range(6)).stack())), []
        barrier = threading.Barrier(6)

        def look(stack=stack, found=found, barrier=barrier):
            barrier.wait()
            found.append(([id(m) for m in stack], [id(m.attn.weight) for m in stack]))

        threads = [threading.Thread(target=look) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 6 and all(one == found[0] for one in found)


# -- placement


@pytest.mark.parametrize("order", ["lazy", "loaded", "before stacking"])
def test_on_another_device(order):
    device = jax.devices()[3]
    if order == "before stacking":
        model = Model(linears(3).to(device).stack(), head=Lin().to(device))
    else:
        model = Model(linears(3).stack(), head=Lin())
    if order == "loaded":
        fill(model)
    model.to(device)
    if order != "loaded":
        assert jax.tree.leaves(model)[1].sharding.device_set == {device}
        fill(model)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(model))
    assert model.layers[1].weight.value.devices() == {device}
    got = model(jax.device_put(X, device))
    assert got.devices() == {device}
    np.testing.assert_allclose(got, fill(Model(linears(3), head=Lin()))(X), rtol=1e-5, atol=1e-6)
    model.layers[2].weight.value = np.zeros((4, 4), np.float32)
    assert jax.tree.leaves(model)[1].devices() == {device}
    layers = model.layers.unstack()
    assert layers[1].weight.value.devices() == {device}
    twin = linears(3).to(device)
    assert jax.tree.structure(layers) == jax.tree.structure(twin)


def test_init_is_born_where_it_is_placed():
    device = jax.devices()[2]
    stack = init(linears(3).stack().to(device), jax.random.key(0))
    assert jax.tree.leaves(stack)[0].devices() == {device}


# -- hooks


@pytest.mark.parametrize("kinds, how", [("LLLL", {}), ("LBLBL", {}), ("BLLL", {"first": 1})])
@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_see_every_layer(kinds, how, compiled):
    seen = {}
    for model in (fill(Model(mixed(kinds))), fill(Model(mixed(kinds).stack(**how)))):
        model(X)
        calls = seen[type(model.layers)] = []

        def hook(layer, args, kwargs, outputs, calls=calls):
            shown = None if isinstance(outputs, jax.core.Tracer) else outputs.tolist()
            calls.append((layer_name(layer), type(layer), shown))

        add_layer_hook(hook)
        RUN(model, X) if compiled else model(X)
        clear_hooks()
    listed, stack = seen[LayerList], seen[LayerStack]
    assert [name for name, kind, _ in stack if kind is Lin or kind is Block][0].startswith(
        "layers.0"
    )
    assert [name for name, _, _ in stack] == [name for name, _, _ in listed]
    assert [shown is None for *_, shown in stack] == [compiled] * len(stack)
    if not compiled:
        for (*_, one), (*_, other) in zip(listed, stack, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_hook_may_replace_what_a_layer_gives():
    def hook(layer, args, kwargs, outputs):
        return args[0] if layer_name(layer) == "layers.1" else None

    for run in (lambda m: m(X), lambda m: RUN(m, X)):
        results = []
        for layers in (linears(3), linears(3).stack()):
            model = fill(Model(layers))
            add_layer_hook(hook)
            results.append(run(model))
            clear_hooks()
        np.testing.assert_allclose(*results, rtol=1e-6)


def test_print_hook(capsys):
    printed = []
    for layers in (linears(3), linears(3).stack()):
        model = fill(Model(layers))
        hook = PrintHook(filter=lambda name: re.fullmatch(r"model\.layers\.\d", name))
        hook.name_layers(model)
        model(X)
        hook.remove()
        printed.append(capsys.readouterr().out)
    names = re.findall(r"^(\S+) =", printed[1], re.MULTILINE)
    assert names == [f"model.layers.{i}-{end}" for i in range(3) for end in ("input_0", "output")]
    assert re.findall(r"^(\S+) =", printed[0], re.MULTILINE) == names


def test_a_body_is_traced_no_more_than_needed():
    class Counted(Lin):
        traces = 0

    stack, other = (fill(LayerList(Counted() for _ in range(5)).stack(), i) for i in range(2))
    model, loss = Model(stack), lambda m: m(X).sum()
    run = jax.jit(lambda m, x: m(x))

    def traces(work):
        Counted.traces = 0
        work()
        return Counted.traces

    assert traces(lambda: stack(X)) == 1
    stack[2].weight.value = jnp.zeros((4, 4))
    same = (lambda: stack(X), lambda: other(X), lambda: run(stack, X), lambda: rebuilt(stack)(X),
            lambda: model(X), lambda: run(model, X), lambda: jax.vmap(stack)(X[None]))  # fmt: skip
    assert [traces(work) for work in same] == [0] * len(same)
    assert traces(lambda: jax.grad(loss)(stack)) == 1
    again = (lambda: jax.grad(loss)(model), lambda: jax.jit(jax.grad(loss))(stack),
             lambda: jax.grad(jax.jit(loss))(stack), lambda: jax.grad(loss)(other))  # fmt: skip
    assert [traces(work) for work in again] == [0] * len(again)
    add_layer_hook(lambda *a: None)
    assert traces(lambda: stack(X)) == 5 and traces(lambda: run(stack, X)) == 5
    clear_hooks()
    assert [traces(work) for work in (*same, *again)] == [0] * (len(same) + len(again))
    assert str(jax.make_jaxpr(lambda m: m(X))(stack)).count("scan[") == 1
