"""What a Module may hold besides Weights and Modules: lists, parts, constants; and what it refuses."""

import collections
import copy
import functools
import pickle
import types
import weakref
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxjax import checkpoint, init, load_weights
from maxjax.graph import DeviceRef, ShardingStrategy, TensorValue, Weight
from maxjax.nn import LayerList, Linear, Module
from maxjax.nn.layer import layer_hook, layer_name, recursive_named_layers
from tests.oracles.recorded import torch

CPU = DeviceRef.CPU()
X = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)


def linear(n=3, m=3):
    return Linear(n, m, "float32", CPU)


def split(n=3, m=4, devices=2, strategy=ShardingStrategy.rowwise):
    layer = Linear(n, m, "float32", CPU, has_bias=True)
    layer.sharding_strategy = strategy(devices)
    return layer


class Hold(Module):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x):
        return x


def filled(model):
    return init(model, jax.random.key(0))


# -- lists of Modules


class Net(Module):
    """As MAX's model files are written."""

    def __init__(self, depth=3):
        super().__init__()
        self.xs = []
        for _ in range(depth):
            self.xs.append(linear())

    def __call__(self, x):
        for layer in self.xs:
            x = layer(x)
        return x


def test_a_list_is_tracked_from_the_first_append_on():
    net, same = Net(), Hold(xs=LayerList([linear(), linear(), linear()]))
    assert list(net.raw_state_dict()) == list(same.raw_state_dict())
    assert list(net.raw_state_dict()) == ["xs.0.weight", "xs.1.weight", "xs.2.weight"]
    filled(net)
    values = net.state_dict()
    y = jax.jit(lambda m, x: m(x))(net, X)
    w = [np.asarray(v) for v in values.values()]
    np.testing.assert_allclose(y, X @ w[0].T @ w[1].T @ w[2].T, rtol=1e-5)
    grads = jax.grad(lambda m: m(X).sum())(net)
    assert all(np.any(g) for g in grads.state_dict().values())
    assert {name for name, _ in net.named_modules()} == {"", "xs.", "xs.0.", "xs.1.", "xs.2."}
    found = [name for name, _ in recursive_named_layers(net, "m")]
    assert found == ["m", "m.xs", "m.xs.0", "m.xs.1", "m.xs.2"]
    for clone in (
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        jax.tree.map(lambda a: a, net),
    ):
        assert jax.tree.structure(clone) == jax.tree.structure(net)
        clone.xs.append(linear())
        assert len(clone.raw_state_dict()) == 4 and len(net.raw_state_dict()) == 3


def test_lists_in_lists_tuples_and_none():
    one, two, three = linear(), linear(), linear()
    held = Hold(xs=[[one, None], (two,)], ys=(three,), empty=[], plain=[1, [2]], nothing=())
    assert list(held.raw_state_dict()) == ["ys.0.weight", "xs.0.0.weight", "xs.1.0.weight"]
    assert held.xs[0][1] is None and held.plain == [1, [2]] and held.nothing == ()
    assert held.empty == [] and not held.empty and held.ys == (three,)
    with pytest.raises(TypeError, match="tuple of Modules cannot be changed"):
        held.ys.append(linear())
    with pytest.raises(TypeError, match="tuple of Modules cannot be changed"):
        jax.tree.map(lambda a: a, held).ys.append(linear())
    empties = Hold(xs=[[] for _ in range(2)])
    empties.xs[1].append(one)
    assert list(empties.raw_state_dict()) == ["xs.1.0.weight"]


def test_a_tracked_list_does_what_lists_do():
    one, two, three = linear(), linear(), linear()
    xs = Hold(xs=[one, two]).xs
    assert xs == [one, two] and xs != [two, one] and xs != (one, two) and len({xs, xs}) == 1
    assert xs + [three] == [one, two, three] and [three] + xs == [three, one, two]
    assert (
        xs[:1] == [one]
        and xs[-1] is two
        and two in xs
        and xs.index(two) == 1
        and xs.count(one) == 1
    )
    assert list(reversed(xs)) == [two, one] and isinstance(xs, collections.abc.Sequence)
    xs += [three]
    xs.reverse()
    assert xs == [three, two, one]
    xs.remove(two)
    assert list(xs.raw_state_dict()) == ["0.weight", "1.weight"]
    xs.clear()
    assert xs == []
    with pytest.raises(ValueError, match="not in this LayerList"):
        xs.index(one)


@pytest.mark.parametrize(
    "mix", [[linear(), 3], ["a", linear()], [[linear()], [2]], (linear(), "b")]
)
def test_modules_and_data_do_not_mix(mix):
    with pytest.raises(TypeError, match="holds Modules or plain data, not both"):
        Hold(xs=mix)


def test_appending_another_kind_names_the_line():
    held = Hold(xs=[linear()], sizes=[1], empty=[])
    with pytest.raises(TypeError, match=r"module\.sizes = \[1, 2\]"):
        held.xs.append(3)
    with pytest.raises(TypeError, match=r"module\.layers = \[layer\]"):
        held.sizes.append(linear())


def test_an_empty_list_can_become_one_of_data():
    held = Hold(xs=[])
    held.xs.append(3)
    held.xs += [5, 3]
    assert held.xs == [3, 5, 3] and list(held.xs) == [3, 5, 3] and str(held.xs) == "[3, 5, 3]"
    assert 5 in held.xs and 4 not in held.xs and held.xs.index(5) == 1 and held.xs.count(3) == 2
    again = jax.tree.map(lambda x: x, held)
    assert again.xs == [3, 5, 3] and not jax.tree.leaves(held)
    other = Hold(xs=[])
    other.xs.extend([3, 5])
    assert jax.tree.structure(other) != jax.tree.structure(held)
    other.xs.append(3)
    assert jax.tree.structure(other) == jax.tree.structure(held)
    with pytest.raises(TypeError, match="holds layers, not int"):
        held.xs.append(linear())
    held.xs.clear()
    held.xs.append(linear())
    assert list(held.raw_state_dict()) == ["xs.0.weight"]
    with pytest.raises(TypeError, match="holds layers, not int"):
        LayerList([3])


def test_a_list_changed_behind_the_module_is_told():
    blocks, inner = [linear()], []
    held = Hold(blocks=blocks, nested=[inner])
    outer = Hold(child=held)
    assert len(jax.tree.leaves(outer)) == 1
    blocks.append(linear())
    for look in (
        lambda: jax.tree.leaves(outer),
        lambda: outer(X),
        outer.raw_state_dict,
        lambda: held(X),
    ):
        with pytest.raises(TypeError, match=r"Hold\.blocks was changed.*append to module\.blocks"):
            look()
    blocks.pop()
    assert len(jax.tree.leaves(outer)) == 1
    held.blocks.append(linear())  # the way that is tracked
    assert len(jax.tree.leaves(outer)) == 2
    inner.append(linear())
    with pytest.raises(TypeError, match=r"Hold\.nested\[0\]"):
        jax.tree.leaves(outer)
    held.nested = [inner]
    assert len(jax.tree.leaves(outer)) == 3
    late: list[Any] = []
    held.nested.append(late)
    late.append(linear())
    with pytest.raises(TypeError, match="assigned to a LayerList was changed.*append to the item"):
        jax.tree.leaves(outer)


def test_a_list_of_equal_layers_that_is_changed_is_told():
    class Equal(Module):
        def __eq__(self, other):
            return True

        __hash__ = object.__hash__

        def __call__(self, x):
            return x

    blocks = [Equal()]
    held = Hold(blocks=blocks)
    jax.tree.leaves(held)
    blocks[0] = Equal()
    with pytest.raises(TypeError, match=r"Hold\.blocks was changed"):
        jax.tree.leaves(held)


def test_replaced_layers_are_freed_though_their_list_was_assigned():
    held = Hold(xs=[linear(), linear()])
    jax.tree.leaves(held)
    gone = weakref.ref(held.xs[0])
    held.xs[0] = linear()
    jax.tree.leaves(held)
    assert gone() is None


def test_a_list_of_modules_stacks():
    class Deep(Module):
        def __init__(self):
            super().__init__()
            self.layers = [linear() for _ in range(4)]
            self.layers = self.layers.stack()

        def __call__(self, x):
            return self.layers.scan(x)

    model = filled(Deep())
    assert (
        list(model.raw_state_dict())[-1] == "layers.3.weight" and len(jax.tree.leaves(model)) == 1
    )


# -- parts of layers


class Reachable(Module):
    """The layer and its parts, as most of MAX's multi-device layers hold them."""

    def __init__(self):
        super().__init__()
        self.layer = split()
        self.xs = self.layer.shard([CPU, CPU])

    def __call__(self, x):
        return jnp.concatenate([part(x) for part in self.xs], -1)


class Alone(Module):
    def __init__(self):
        super().__init__()
        self.xs = split().shard([CPU, CPU])

    __call__ = Reachable.__call__


class ByHand(Module):
    """A layer whose ``shard`` somebody wrote, as MAX's are."""

    def __init__(self, n=3, m=4):
        super().__init__()
        self.weight = Weight("weight", "float32", (m, n), CPU)
        self.weight.sharding_strategy = ShardingStrategy.rowwise(2)

    def __call__(self, x):
        return x @ self.weight.T

    def shard(self, devices):
        parts = []
        for shard in self.weight.shard(devices):
            part = ByHand()
            part.weight = shard
            parts.append(part)
        return parts


class ByHandAlone(Module):
    def __init__(self):
        super().__init__()
        self.xs = ByHand().shard([CPU, CPU])

    __call__ = Reachable.__call__


class OfItself(ByHand):
    """Holds the parts of itself."""

    def __init__(self):
        super().__init__()
        self.xs = self.shard([CPU, CPU])

    __call__ = Reachable.__call__


class WeightParts(Module):
    def __init__(self):
        super().__init__()
        self.ws = ByHand().weight.shard([CPU, CPU])

    def __call__(self, x):
        return jnp.concatenate([x @ w.T for w in self.ws], -1)


class OneByOne(Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = split().shard([CPU, CPU])

    def __call__(self, x):
        return jnp.concatenate([self.one(x), self.two(x)], -1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "make, keys",
    [
        (Reachable, ["layer.weight", "layer.bias"]), (Alone, ["xs.weight", "xs.bias"]),
        (ByHandAlone, ["xs.weight"]), (OfItself, ["weight"]), (WeightParts, ["weight"]),
        (OneByOne, ["one.weight", "one.bias"]),
    ],
)  # fmt: skip
def test_parts_are_views(make, keys, tmp_path):
    model = make()
    assert list(model.raw_state_dict()) == keys and len(jax.tree.leaves(model)) == len(keys)
    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    b = np.arange(4, dtype=np.float32)
    values = dict(zip(keys, [w, b], strict=False))
    model.load_state_dict(values)
    want = X @ w.T + (b[None] if len(keys) == 2 else 0)
    rebuilt = jax.tree.map(lambda a: a, model)
    again = jax.tree.map(lambda a: a, rebuilt)
    for m in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), rebuilt, again):
        assert jax.tree.structure(m) == jax.tree.structure(model)
        assert list(m.raw_state_dict()) == keys
        np.testing.assert_allclose(m(X), want)
        np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(m, X), want)
    np.testing.assert_allclose(jax.tree.map(lambda a: 2 * a, model)(X), 2 * want)
    grads = jax.grad(lambda m: m(X).sum())(model)
    np.testing.assert_allclose(grads.state_dict()[keys[0]], np.tile(X.sum(0), (4, 1)))
    model.load_state_dict({name: 3 * value for name, value in values.items()})
    np.testing.assert_allclose(model(X), 3 * want)
    checkpoint.save(tmp_path / "run", model, step=1)
    fresh = make()
    checkpoint.restore(tmp_path / "run", fresh)
    np.testing.assert_allclose(fresh(X), 3 * want)
    assert sorted(name for name, _ in load_weights(tmp_path / "run").items()) == sorted(keys)
    assert list(init(make(), jax.random.key(0)).state_dict()) == keys


def test_parts_have_no_names_for_hooks():
    class Outer(Hold):
        def __call__(self, x):
            return self.inner.layer(x) - self.inner(x)

    model = filled(Outer(inner=Reachable()))
    seen: list[Any] = []
    with layer_hook(lambda layer, args, kwargs, outputs: seen.append(layer_name(layer))):
        model(X)
    assert seen == ["inner.layer", None, None, "inner", None]
    assert [name for name, _ in model.named_modules()] == ["", "inner.", "inner.layer."]


def test_two_attributes_of_parts_and_parts_of_several_layers():
    layer = split()
    held = Hold(a=layer.shard([CPU, CPU]), b=layer.shard([CPU, CPU]), c=split().shard([CPU, CPU]))
    assert list(held.raw_state_dict()) == ["a.weight", "a.bias", "c.weight", "c.bias"]
    held.layer = layer
    assert list(held.raw_state_dict()) == ["layer.weight", "layer.bias", "c.weight", "c.bias"]
    firsts = Hold(xs=[split().shard([CPU, CPU])[0] for _ in range(2)])
    assert list(firsts.raw_state_dict()) == ["xs.0.weight", "xs.0.bias", "xs.1.weight", "xs.1.bias"]
    lists = Hold(xs=[split().shard([CPU, CPU]), split().shard([CPU, CPU])])
    assert list(lists.raw_state_dict()) == list(firsts.raw_state_dict())
    byhand = Hold(xs=[ByHand().shard([CPU, CPU])[0], ByHand().shard([CPU, CPU])[0]])
    assert list(byhand.raw_state_dict()) == ["xs.0.weight", "xs.1.weight"]
    grown = Hold(xs=[])
    for part in layer.shard([CPU, CPU]):
        grown.xs.append(part)
    assert list(grown.raw_state_dict()) == ["xs.weight", "xs.bias"]


def test_a_module_that_holds_parts_is_no_part_itself():
    class Wrapped(Module):
        def __init__(self):
            super().__init__()
            self.blocks = [Alone(), Alone()]

        def __call__(self, x):
            return self.blocks[1](x)

    model = Wrapped()
    names = ["blocks.0.xs.weight", "blocks.0.xs.bias", "blocks.1.xs.weight", "blocks.1.xs.bias"]
    assert list(model.raw_state_dict()) == names
    assert "blocks.1." in dict(model.named_modules())


def test_a_part_that_was_given_a_weight_is_not_lost():
    parts = split().shard([CPU, CPU])
    parts[0].extra = Weight("extra", "float32", (2,), CPU)
    keys = list(Hold(xs=parts).raw_state_dict())
    assert "xs.0.extra" in keys


def test_parts_inside_of_stacked_layers():
    class Block(Module):
        def __init__(self):
            super().__init__()
            self.layer = split(4, 4)
            self.xs = self.layer.shard([CPU, CPU])
            self.w = Weight(
                "w", "float32", (4, 4), CPU, sharding_strategy=ShardingStrategy.rowwise(2)
            )
            self.part = self.w.shard([CPU, CPU])[1]

        def __call__(self, x):
            return jnp.concatenate([part(x) for part in self.xs], -1) + jnp.sum(self.part)

    class Deep(Module):
        def __init__(self, stacked):
            super().__init__()
            self.layers = [Block() for _ in range(3)]
            if stacked:
                self.layers = self.layers.stack()

        def __call__(self, x):
            return self.layers(x)

    flat, deep = Deep(False), Deep(True)
    assert list(flat.raw_state_dict()) == list(deep.raw_state_dict())
    assert len(jax.tree.leaves(deep)) == 3
    filled(flat)
    deep.load_state_dict(flat.state_dict())
    x = jnp.ones((2, 4))
    for model in (deep, jax.tree.map(lambda a: a, deep)):
        np.testing.assert_allclose(model(x), flat(x), rtol=1e-5)
        np.testing.assert_allclose(model.layers[2](x), flat.layers[2](x), rtol=1e-5)
    deep.layers = deep.layers.unstack()
    np.testing.assert_allclose(deep(x), flat(x), rtol=1e-5)


# -- constants


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(3, np.int8),
        np.zeros((0, 2), np.float16), np.array([1, 2], jnp.bfloat16), np.zeros(2, [("a", "i4"), ("b", "f4")]),
        np.array(["a", "bc"]), np.arange(8)[::2],
    ],
)  # fmt: skip
def test_a_numpy_array_is_a_constant(array):
    held = Hold(table=array)
    assert held.table.dtype == array.dtype and not held.table.flags.writeable
    np.testing.assert_array_equal(held.table, array)
    assert not held.state_dict() and not jax.tree.leaves(held)
    same, clone = Hold(table=array.copy()), pickle.loads(pickle.dumps(held))
    for other in (same, clone, copy.deepcopy(held), jax.tree.map(lambda a: a, held)):
        assert jax.tree.structure(other) == jax.tree.structure(held)
        assert not other.table.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        held.table[...] = array


def test_constants_are_copies_and_compared_by_content():
    source = np.ones(3, np.float32)
    held, other = Hold(table=source), Hold(table=np.array([1, 1, 2], np.float32))
    source[0] = 5
    np.testing.assert_array_equal(held.table, [1, 1, 1])
    trees = {jax.tree.structure(m) for m in (
        held, other, Hold(table=np.ones(3)), Hold(table=np.ones((3, 1), np.float32)), Hold(table=[np.ones(3)]),
        Hold(table=np.float32(0.0)), Hold(table=np.float32(-0.0)), Hold(table=np.float32("nan")),
    )}  # fmt: skip
    assert len(trees) == 8
    assert jax.tree.structure(Hold(t=np.float32("nan"))) == jax.tree.structure(
        Hold(t=np.float32("nan"))
    )

    class Scaled(Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = np.asarray(scale, np.float32)

        def __call__(self, x):
            return x * self.scale[None]

    f = jax.jit(lambda m, x: m(x))
    np.testing.assert_allclose(f(Scaled([1, 2, 3]), X), X * np.array([[1.0, 2, 3]], np.float32))
    f(Scaled([1, 2, 3]), X)
    assert f._cache_size() == 1


@pytest.mark.parametrize(
    "array, why",
    [
        (np.ones((1 << 17) + 1), "1,048,584 bytes.*at most 1,048,576"), (np.array([object()]), "Python objects"),
        (np.ma.masked_array([1.0], [True]), "MaskedArray"), (jnp.ones(2), "is an array"),
        (jax.random.key(0), "is an array"), ([np.ones((1 << 17) + 1)], "at most"),
    ],
)  # fmt: skip
def test_other_arrays_are_refused(array, why):
    with pytest.raises(TypeError, match=rf"Hold\.x.*{why}.*Weight\("):
        Hold(x=array)


@pytest.mark.parametrize(
    "value", [np.ones((2, 2), np.float32), jnp.ones((2, 2)), TensorValue(jnp.ones(2))]
)
def test_an_array_does_not_take_the_place_of_a_weight(value):
    """As a constant it would be missing from leaves, state dicts and saves."""
    layer = Linear(2, 2, "float32", CPU)
    with pytest.raises(
        TypeError, match=r"Linear\.weight is a Weight: Linear\.weight\.value = array"
    ):
        layer.weight = value
    assert list(layer.raw_state_dict()) == ["weight"]


# -- what a Module would not see


@flax.struct.dataclass
class Flax:
    x: Any


class Pair(NamedTuple):
    a: Any
    b: Any


class Plain:
    def __init__(self, x):
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


def closure(x):
    return lambda y: y * x


ARRAY = jnp.ones(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), lambda: nnx.Rngs(0), lambda: nnx.Param(ARRAY),
        lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)).__call__, lambda: [nnx.Linear(2, 2, rngs=nnx.Rngs(0))],
        lambda: eqx.nn.Linear(2, 2, key=jax.random.key(0)), lambda: Flax(ARRAY), lambda: Flax(np.ones(2)),
        lambda: {"a": ARRAY}, lambda: {"a": {"b": [ARRAY]}}, lambda: optax.adam(1e-3).init({"a": ARRAY}),
        lambda: Pair(1, ARRAY), lambda: Pair(1, linear()), lambda: Plain(ARRAY), lambda: Plain([Plain(ARRAY)]),
        lambda: Plain(linear()), lambda: Slotted(ARRAY), lambda: closure(ARRAY), lambda: closure(linear()),
        lambda: jax.jit(closure(ARRAY)), lambda: functools.partial(closure(ARRAY)),
        lambda: collections.deque([linear()]),
        lambda: collections.UserDict(a=ARRAY), lambda: types.MappingProxyType({"a": linear()}),
        lambda: {linear()}, lambda: {"a": linear()}, lambda: [{"a": linear()}], lambda: Plain(ARRAY).__init__,
        lambda: types.SimpleNamespace(a=linear()), lambda: collections.OrderedDict(a=linear()),
    ],
)  # fmt: skip
def test_what_holds_arrays_unseen_is_refused(make):
    with pytest.raises(TypeError, match=r"Hold\.x"):
        Hold(x=make())


def test_the_refusal_helps():
    with pytest.raises(TypeError, match=r"would not see.*interop\.nnx"):
        Hold(x=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"module\.xs = list\(d\.values\(\)\)"):
        Hold(x={"a": linear()})


def test_what_a_class_holds_is_refused():
    for name, value in (("layer", linear()), ("w", Weight("w", "float32", (1,), CPU))):
        with pytest.raises(TypeError, match=rf"Shared\.{name} .*self\.{name} = "):
            type("Shared", (Hold,), {name: value})
    with pytest.raises(TypeError, match="Slots has __slots__"):
        type("Slots", (Hold,), {"__slots__": ("x",)})


@pytest.mark.oracle
def test_torch_modules_and_tensors_are_refused():
    for value in (torch.nn.Linear(2, 2), torch.ones(2)):
        with pytest.raises(TypeError, match="would not see"):
            Hold(x=value)


def test_what_holds_nothing_is_kept():
    values = {
        "a": jax.nn.silu, "b": jnp.tanh, "c": functools.partial(jax.nn.gelu, approximate=True), "d": closure(3),
        "e": types.MappingProxyType({"a": 1}), "f": optax.adam(1e-3), "g": jax.make_mesh((1,), ("a",)), "h": Flax(3),
        "i": np.dtype("f4"), "j": jax.sharding.PartitionSpec("a"), "k": jax.devices()[0], "m": DeviceRef.CPU(),
        "l": eqx.nn.Lambda(jnp.tanh), "n": jax.jit(closure(2)), "o": nnx.relu,
    }  # fmt: skip
    held = Hold(**values)
    assert not jax.tree.leaves(held) and all(name in vars(held) for name in values)
