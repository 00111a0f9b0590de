"""Module as a tree: registration, names, ties, statics, placement, calls."""

import copy
import dataclasses
import functools
import gc
import pickle
import re
import types
import warnings
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import maxjax
from maxjax import nn
from maxjax.errors import UserInputError
from maxjax.graph import DeviceRef, Graph, ShardingStrategy, TensorType, Weight
from maxjax.graph.weight.running import RUNNING
from maxjax.nn import LayerList, Module
from maxjax.nn.layer import definition, recursive_named_layers

CPU = DeviceRef.CPU()


class Lin(Module):
    def __init__(self, n_in=3, n_out=2, name="weight"):
        super().__init__()
        self.weight = Weight(name, "float32", (n_out, n_in), CPU)

    def __call__(self, x):
        return x @ self.weight.T


class Pair(Module):
    def __init__(self):
        super().__init__()
        self.a = Lin()
        self.b = Lin()

    def __call__(self, x):
        return self.a(x) + self.b(x)


class Hold(Module):
    def __init__(self, **attrs):
        super().__init__()
        for name, value in attrs.items():
            setattr(self, name, value)

    def __call__(self, *args):
        return args


def fill(model, seed=0):
    rng = np.random.default_rng(seed)
    model.load_state_dict({
        n: rng.standard_normal([int(d) for d in w.shape]).astype(w.dtype.np) for n, w in model.raw_state_dict().items()
    })  # fmt: skip
    return model


# -- registration


def test_a_module_without_weights_works_without_super():
    class Bare(Module):
        def __init__(self):
            pass

        def __call__(self):
            return 1

    assert repr(Bare()) == "Bare()" and Bare().raw_state_dict() == {}


def test_replaced_and_removed_attributes_leave_the_state_dict():
    m = Pair()
    m.state_dict()
    m.a.weight = Weight("weight", "float32", (7,), CPU)
    assert m.raw_state_dict()["a.weight"].shape == [7]
    m.a.weight = None
    assert list(m.raw_state_dict()) == ["b.weight"] and m.a.weight is None
    m.b = Weight("b", "float32", (1,), CPU)
    assert list(m.raw_state_dict()) == ["b"]
    m.b = Lin()
    assert list(m.raw_state_dict()) == ["b.weight"]
    del m.b
    assert not m.raw_state_dict() and not hasattr(m, "b")


def test_del_of_a_weight_named_unlike_its_attribute():
    m = Hold(attr=Weight("other", "float32", (1,), CPU))
    del m.attr
    assert not m.raw_state_dict()


def test_two_weights_of_one_name():
    m = Hold(a=Weight("weight", "float32", (2,), CPU), b=Weight("weight", "float32", (4,), CPU))
    assert {n: list(w.shape) for n, w in m.raw_state_dict().items()} == {"weight": [2], "b": [4]}
    with pytest.raises(ValueError, match="Hold.weight"):
        m.weight = Weight("b", "float32", (1,), CPU)
    with pytest.raises(ValueError, match="Hold.a: .* has another weight named 'a'; give"):
        Hold(b=Weight("a", "float32", (2,), CPU), a=Weight("a", "float32", (2,), CPU))


def test_a_name_with_a_dot_that_is_also_a_path():
    model = Hold(x=Weight("b.weight", "float32", (2,), CPU), b=Lin())
    with pytest.raises(ValueError, match=r"Duplicate weight name 'b\.weight'.* name has a dot"):
        model.raw_state_dict()


def test_replacing_keeps_the_order():
    m = Pair()
    m.replace_module("a", Lin(9))
    m.b.weight = Weight("weight", "float32", (5, 9), CPU)
    assert list(m.raw_state_dict()) == ["a.weight", "b.weight"]
    with pytest.raises(KeyError, match="zz"):
        m.replace_module("zz", Lin())


def test_views_are_live_and_read_only():
    m = Pair()
    children, weights = m.sublayers, m.a.layer_weights
    m.c = Lin()
    m.a.bias = Weight("bias", "float32", (2,), CPU)
    assert list(children) == ["a", "b", "c"] and list(weights) == ["weight", "bias"]
    with pytest.raises(TypeError):
        children["d"] = Lin()
    with pytest.raises(AttributeError):
        m.sublayers = {}


def test_cycles_and_modules_at_two_places():
    m = Pair()
    m.a.parent = m
    m.again = m.a
    assert list(m.raw_state_dict()) == ["a.weight", "b.weight"]
    clone = jax.tree.map(lambda leaf: leaf, fill(m))
    assert clone.a.parent is clone and clone.again is clone.a


# -- ties


def tied(mark):
    m = Hold(head=Lin(), embed=Lin())
    if mark:
        m.head.set_shared_weight("weight", m.embed.weight)
    else:
        m.head.weight = m.embed.weight
    return m


@pytest.mark.parametrize("mark, owner", [(True, "embed.weight"), (False, "head.weight")])
def test_a_tie_is_one_leaf_and_one_key(mark, owner):
    m = tied(mark)
    assert list(m.raw_state_dict()) == [owner] and len(jax.tree.leaves(m)) == 1
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    m.load_state_dict({owner: value})
    for other in (
        jax.tree.map(lambda a: a + 1, m),
        jax.jit(lambda m: m)(m),
        jax.grad(lambda m: (m.head.weight * m.embed.weight).sum())(m),
    ):
        assert other.head.weight is other.embed.weight
    grad = jax.grad(lambda m: (m.head.weight * m.embed.weight).sum())(m)
    np.testing.assert_array_equal(grad.embed.weight, 2 * value)


def test_the_other_name_of_a_plain_tie_is_accepted_when_equal():
    value = np.ones((2, 3), np.float32)
    m = tied(False)
    m.load_state_dict({"head.weight": value, "embed.weight": value})
    m.load_state_dict({"embed.weight": value * 2})
    assert float(m.head.weight[0, 0]) == 2
    with pytest.raises(ValueError, match="tied"):
        m.load_state_dict({"head.weight": value, "embed.weight": value * 3})
    with pytest.raises(ValueError, match="Unexpected.*head.weight"):
        tied(True).load_state_dict({"head.weight": value, "embed.weight": value})


def test_a_shared_weight_is_a_leaf_of_the_sharer_but_not_in_its_state_dict():
    m = fill(tied(True))
    assert m.head.raw_state_dict() == {}
    assert list(m.head.layer_weights) == ["weight"]
    assert jax.jit(lambda h, x: h(x))(m.head, jnp.ones(3)).shape == (2,)


def test_owner_at_any_depth_and_under_another_name():
    m = Hold(h=Hold(), deep=Hold(e=Hold(table=Weight("embedding", "float32", (2, 3), CPU))))
    m.h.set_shared_weight("weight", m.deep.e.table)
    assert list(m.raw_state_dict()) == ["deep.e.embedding"]


# -- names


def test_names_outlive_a_childs_state_dict():
    m = fill(Pair())
    values = m.a.state_dict()
    assert list(values) == ["weight"] and m.a.weight.name == "a.weight"
    np.testing.assert_array_equal(values["weight"], m.state_dict()["a.weight"])


def test_named_modules():
    m = Hold(blk=Hold(p=Pair()), last=Lin())
    assert [name for name, _ in m.named_modules()] == [
        "",
        "blk.",
        "last.",
        "blk.p.",
        "blk.p.a.",
        "blk.p.b.",
    ]


def test_recursive_named_layers():
    m = Hold(blk=Hold(p=Lin()))
    assert [n for n, _ in recursive_named_layers(m)] == ["", "blk", "blk.p"]
    assert [n for n, _ in recursive_named_layers(m, "x")] == ["x", "x.blk", "x.blk.p"]


# -- static attributes


@dataclasses.dataclass
class Config:
    size: int = 3
    names: list = dataclasses.field(default_factory=list)


def structure(**attrs):
    return jax.tree.structure(Hold(**attrs))


@pytest.mark.parametrize(
    "one, other",
    [
        ({"n": 1}, {"n": True}), ({"n": 1}, {"n": 1.0}), ({"n": 0.0}, {"n": -0.0}), ({"l": [1, 2]}, {"l": (1, 2)}),
        ({"l": [1, 2]}, {"l": [1, 3]}), ({"d": {"a": 1}}, {"d": {"a": 2}}), ({"c": Config(3)}, {"c": Config(4)}),
        ({"c": Config(names=["a"])}, {"c": Config(names=["b"])}), ({"f": jnp.sin}, {"f": jnp.cos}),
        ({"s": types.SimpleNamespace(a=1)}, {"s": types.SimpleNamespace(a=2)}),
        ({"p": functools.partial(max, 1)}, {"p": functools.partial(max, 2)}), ({"s": {1}}, {"s": {2}}),
    ],
)  # fmt: skip
def test_statics_are_compared_by_content_and_type(one, other):
    again = one if any(callable(v) for v in one.values()) else copy.deepcopy(one)
    assert structure(**one) == structure(**again)
    assert structure(**one) != structure(**other)


def test_nan_equals_itself():
    assert structure(x=float("nan")) == structure(x=float("nan"))


def test_lists_and_dicts_are_frozen_copies():
    sizes = [1, 2]
    m = Hold(sizes=sizes, options={"a": [1]})
    sizes.append(3)
    assert m.sizes == [1, 2] and isinstance(m.sizes, list) and dict(m.options) == {"a": [1]}
    for change in (lambda: m.sizes.append(3), lambda: m.options.update(b=1)):
        with pytest.raises(TypeError, match="assign a new one"):
            change()
    m.config = Config(3, ["a"])
    m.config = dataclasses.replace(m.config, size=5)
    assert m.config.size == 5
    for clone in (copy.deepcopy(m), copy.copy(m)):
        assert clone.config == m.config and jax.tree.structure(clone) == jax.tree.structure(m)


@pytest.mark.parametrize(
    "value, hint",
    [
        (np.ones(1 << 18), "Weight"), (jnp.ones(3), "Weight"), ({"a": Lin()}, "list"), ([Lin(), 3], "not both"),
        ((Weight("w", "float32", (1,), CPU),), "Weight"), ([jnp.ones(2)], "array"),
        (Config(names=[Lin()]), "LayerList"),
        (Lin().__call__, "method"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused_with_the_right_line(value, hint):
    with pytest.raises(TypeError, match=rf"Hold\.x.*{hint}"):
        Hold(x=value)


def test_a_static_change_retraces_and_a_value_does_not():
    m = fill(Lin())
    m.scale = 1.0
    f = jax.jit(lambda m, x: m(x) * m.scale)
    x = jnp.ones(3)
    first = f(m, x)
    m.weight.value = m.weight.value * 2
    np.testing.assert_allclose(f(m, x), 2 * first, rtol=1e-6)
    assert f._cache_size() == 1
    m.scale = 2.0
    np.testing.assert_allclose(f(m, x), 4 * first, rtol=1e-6)
    assert f._cache_size() == 2
    m.scale = 1.0
    f(m, x)
    assert f._cache_size() == 2


def test_writing_while_running_warns_once():
    class Counter(Module):
        def __init__(self):
            super().__init__()
            self.n = 0

        def __call__(self):
            self.n = self.n + 1

    m = Counter()
    with pytest.warns(UserWarning, match=r"Counter\.n"):
        m()
    m()
    assert m.n == 2


# -- classes


def test_a_module_without_a_call_holds_weights_only():
    class NoCall(Module):
        def __init__(self):
            super().__init__()
            self.lin = Lin()

    class Forward(NoCall):
        def forward(self, x):
            return self.lin(x)

    assert list(NoCall().raw_state_dict()) == ["lin.weight"]
    with pytest.raises(NotImplementedError, match=r"NoCall cannot be called.*define def __call__"):
        NoCall()(1)
    with pytest.raises(NotImplementedError, match=r"Forward cannot be called.*rename forward"):
        Forward()(1)


def test_an_unknown_keyword_is_refused_with_the_name_here():
    with pytest.raises(TypeError, match=r"Linear\(\) got .* 'use_bias': did you mean has_bias=\?"):
        nn.Linear(2, 3, use_bias=True)
    with pytest.raises(TypeError, match=r"'in_features': did you mean in_dim=\?"):
        nn.Linear(in_features=2, out_dim=3)
    with pytest.raises(TypeError, match=r"Lin\(\) got .* 'size'"):
        Lin(size=3)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("half", 'dtype="float16"'), ("eval", "no mode"), ("parameters", "jax.tree.leaves"), ("cuda", "model.to"),
        ("generate", r"maxjax.generate\(model, tokenizer, prompt\)"), ("forward", r"model\(…\)"),
    ],
)  # fmt: skip
def test_methods_of_other_libraries_say_what_to_write(name, says):
    model = Hold(a=Lin())
    with pytest.raises(AttributeError, match=f"'Hold' object has no attribute '{name}': .*{says}"):
        getattr(model, name)
    assert not hasattr(model, name) and getattr(model, name, 3) == 3
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'$"):
        _ = model.nosuch


def test_an_error_in_a_property_is_its_own():
    class Failing(Module):
        @property
        def eval(self):
            return self.nosuch

    with pytest.raises(AttributeError, match="'nosuch'"):
        _ = Failing().eval


def test_a_weight_cannot_be_changed_in_place():
    model = fill(Lin())
    with pytest.raises(
        TypeError, match=r"weight 'weight' cannot be .* weight\.value\.at\[0\]\.set"
    ):
        model.weight[0] = 1


def test_a_donated_model_says_so():
    model = fill(Lin())
    step = jax.jit(lambda m: jax.tree.map(lambda a: a + 1, m), donate_argnums=0)
    new, x = step(model), jnp.ones((1, 3))
    for use in (
        lambda: model(x),
        lambda: maxjax.replace(model, {}),
        lambda: maxjax.partition(model, "*"),
    ):
        with pytest.raises(
            UserInputError, match=r"arrays of this Lin are deleted.*model = step\(model"
        ):
            use()
    assert new(x).shape == (1, 2)


def test_a_gradient_of_placeholders_says_so():
    layers = maxjax.init(nn.Sequential([nn.Linear(4, 8, "float32", CPU)]), jax.random.key(0))
    model = maxjax.lora.add(layers, rank=2)
    with pytest.raises(
        UserInputError, match=r"0\.lora_A\.weight.* no value|no value: 0\.lora_A\.weight"
    ):
        jax.grad(lambda m: m(jnp.ones((1, 4))).sum())(model)


def test_generic_and_properties():
    from typing import Generic, TypeVar

    T = TypeVar("T")

    class G(Module, Generic[T]):
        def __init__(self):
            super().__init__()
            self._gain = 1.0

        @property
        def gain(self):
            return self._gain

        @gain.setter
        def gain(self, value):
            self._gain = value

        def __call__(self, x):
            return x * self.gain

    m = G[int]()
    m.gain = 3.0
    assert m(2) == 6 and m._gain == 3.0


def test_frozen_dataclasses():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Scaled(Module):
        lin: Module
        gain: float = 2.0

        @functools.cached_property
        def weight(self):
            return self.lin.weight.value

        def __call__(self, x):
            return self.lin(x) * self.gain + self.weight.sum()

    m = Scaled(fill(Lin()))
    want = m(np.ones(3, np.float32))
    again = jax.tree.map(lambda w: 2 * w, m)
    assert list(m.raw_state_dict()) == ["lin.weight"] and again.gain == 2.0
    np.testing.assert_allclose(again(np.ones(3, np.float32)), 2 * want)


# -- pytree


def test_key_paths_are_full_names():
    m = Hold(blk=Hold(p=Pair()), last=Lin())
    paths = [
        jax.tree_util.keystr(p, simple=True) for p, _ in jax.tree_util.tree_flatten_with_path(m)[0]
    ]
    assert paths == list(m.raw_state_dict()) == ["last.weight", "blk.p.a.weight", "blk.p.b.weight"]


def test_lazy_equals_loaded_and_layer_0_equals_layer_1():
    lazy, loaded = LayerList([Pair(), Pair()]), fill(LayerList([Pair(), Pair()]))
    assert jax.tree.structure(lazy) == jax.tree.structure(loaded)
    assert (
        jax.tree.structure(loaded[0]) == jax.tree.structure(loaded[1]) == jax.tree.structure(Pair())
    )
    assert jax.tree.structure(Lin(4)) != jax.tree.structure(Lin(5))


def test_compiled_from_placeholders_runs_the_loaded_weights():
    m = Pair()
    x = jnp.ones((4, 3))
    program = jax.jit(lambda m, x: m(x)).lower(m, x).compile()
    fill(m)
    np.testing.assert_allclose(program(m, x), m(x), rtol=1e-5)
    assert jax.eval_shape(lambda m, x: m(x), Pair(), x).shape == (4, 2)


def test_transformations():
    m, x = fill(Pair()), jnp.arange(12, dtype=jnp.float32).reshape(4, 3)
    want = np.asarray(m(x))
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(m, x), want, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(lambda m, x: m(x), (None, 0))(m, x), want, rtol=1e-5)
    stacked = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), m)
    np.testing.assert_allclose(jax.vmap(lambda m: m(x))(stacked)[1], 2 * want, rtol=1e-5)
    grads = jax.grad(lambda m: m(x).sum())(m)
    assert isinstance(grads, Pair) and grads.a.weight.name == "a.weight"
    np.testing.assert_allclose(grads.a.weight, np.tile(np.asarray(x).sum(0), (2, 1)), rtol=1e-5)
    sgd = jax.tree.map(lambda w, g: w - 0.1 * g, m, grads)
    assert jax.tree.structure(sgd) == jax.tree.structure(m)
    hvp = jax.jvp(jax.grad(lambda m: (m(x) ** 2).sum()), (m,), (grads,))[1]
    assert isinstance(hvp, Pair)


def test_scan_over_a_stacked_module():
    blocks = [fill(Lin(3, 3), seed) for seed in range(4)]
    stack = jax.tree.map(lambda *a: jnp.stack(a), *blocks)
    x = jnp.ones(3)
    got = jax.lax.scan(lambda h, block: (block(h), None), x, stack)[0]
    for block in blocks:
        x = block(x)
    np.testing.assert_allclose(got, x, rtol=1e-5)


def test_leaves_are_not_looked_at():
    m = fill(Pair())
    marks = jax.tree.map(lambda _: object(), m)
    assert len(jax.tree.leaves(marks)) == 2
    none = jax.tree.map(lambda _: None, m)
    assert jax.tree.leaves(none) == [] and none.a.weight.value is None
    shapes = jax.eval_shape(lambda m: m, m)
    assert shapes.a.weight.value is None and shapes.a.weight.shape == [2, 3]


def test_copies_and_pickles():
    m = fill(tied(False))
    m.config, m.rows, m.act, m.most = Config(3), slice(1, 3), fill, functools.partial(max, 1)
    for clone in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert clone.head.weight is clone.embed.weight and clone.head.weight is not m.head.weight
        assert jax.tree.structure(clone) == jax.tree.structure(m)
    m.function, m.other = jnp.tanh, types.MappingProxyType({})  # copies of them are unequal
    clone = copy.deepcopy(m)
    assert clone.function is jnp.tanh and jax.tree.structure(clone) == jax.tree.structure(m)
    shallow = copy.copy(m)
    shallow.extra = Lin()
    assert "extra" not in m.sublayers and shallow.head is m.head


@pytest.mark.parametrize("stacked", [False, True])
def test_a_placed_model_without_values_is_copied(stacked):
    model = Hold(a=Lin(), xs=LayerList([Lin(), Lin()]))
    model.xs = model.xs.stack() if stacked else model.xs
    clone = copy.deepcopy(model.to(CPU))
    assert clone.a.weight.sharding == model.a.weight.sharding is not None
    fill(clone)
    assert model.a.weight.value is None and clone.xs[1].weight.value is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.a.weight, "value", np.ones((2, 3), np.float32)),
        lambda m: m.to(CPU),
        lambda m: setattr(m, "a", copy.deepcopy(m.a)),
        lambda m: setattr(m, "xs", m.xs.stack()),
        lambda m: m.xs.stack()[1].weight.__setattr__("value", np.ones((2, 3), np.float32)),
        lambda m: setattr(m, "xs", m.xs.stack().unstack()),
    ],
    ids=["value", "to", "deepcopy", "stack", "value in stack", "unstack"],
)
def test_a_change_inside_a_graph_or_jit_leaves_arrays(change):
    kind = TensorType("float32", (3,), CPU)
    for run in (lambda f: Graph("g", lambda x: f() or x, [kind]), lambda f: jax.jit(f)()):
        model = fill(Hold(a=Lin(), xs=LayerList([Lin(), Lin()])))
        run(lambda model=model: change(model) and None)
        for weight in model.raw_state_dict().values():
            assert weight.value.shape == (2, 3) and not isinstance(weight.value, jax.core.Tracer)


def test_symbolic_weights_flatten_once_loaded():
    m = Hold(w=Weight("w", "float32", ("n", 3), CPU))
    m.load_state_dict({"w": np.ones((7, 3), np.float32)})
    assert jax.tree.leaves(m)[0].shape == (7, 3) and [str(d) for d in m.w.shape] == ["n", "3"]


def test_old_values_are_let_go():
    m = fill(Pair())
    m(jnp.ones(3)), m.a(jnp.ones(3))
    kept = weakref.ref(m.a.weight.value)
    m.a.weight.value = jnp.zeros((2, 3))
    gc.collect()
    assert kept() is None


# -- placement


def test_to_places_values_and_placeholders():
    device = jax.devices()[3]
    m = Pair()
    m.a.load_state_dict({"weight": np.ones((2, 3), np.float32)})
    assert m.to(device) is m
    assert m.a.weight.value.devices() == {device}
    lowered = jax.jit(lambda m, x: m(x)).lower(m, jax.ShapeDtypeStruct((3,), jnp.float32))
    m.load_state_dict(
        {"a.weight": np.ones((2, 3), np.float32), "b.weight": np.ones((2, 3), np.float32)}
    )
    assert m.b.weight.value.devices() == {device}
    assert lowered.compile()(m, jax.device_put(jnp.ones(3), device)).devices() == {device}
    zeros = Pair().to(DeviceRef.CPU(1)).state_dict()["a.weight"]
    assert zeros.devices() == {jax.devices()[1]}


def test_to_nowhere():
    with pytest.raises(ValueError, match="sharding_strategy"):
        Pair().to(CPU, CPU)
    with pytest.raises(TypeError, match="str"):
        Pair().to("cpu")
    with pytest.raises(ValueError):
        Pair().to()


# -- running


def test_captured_weights_warn_once_with_the_right_line():
    class Own(Lin):
        pass

    m, x = fill(Own()), jnp.ones(3)
    with pytest.warns(UserWarning, match=r"jax.jit\(lambda m, x: m\(x\)\)") as found:
        jax.jit(lambda x: m(x))(x)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda x: m(x) + 1)(x)

    class Fine(Lin):
        pass

    n = fill(Fine())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.vmap(lambda x: n(x))(jnp.ones((2, 3)))
        jax.grad(lambda x: n(x).sum())(x)
        jax.jit(lambda n, x: n(x))(n, x)


@pytest.mark.parametrize(
    ("call", "is_kept"),
    [
        (lambda f, x: jax.checkpoint(f)(x), True),
        (lambda f, x: jax.lax.cond(True, f, f, x), True),
        (lambda f, x: jax.lax.switch(0, [f, f], x), True),
        (lambda f, x: jax.checkpoint(lambda x: f(x))(x), False),
        (lambda f, x: jax.lax.map(f, x[None])[0], False),
        (lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0], False),
        (lambda f, x: jax.vmap(f)(x[None])[0], False),
        (lambda f, x: jax.vjp(f, x)[0], False),
    ],
)
def test_a_layer_given_to_jax_as_a_function_warns_if_its_program_is_kept(call, is_kept):
    class Own(Lin):
        def __init__(self):
            super().__init__(3, 3)

    class Net(Module):
        def __init__(self):
            super().__init__()
            self.layer = Own()

        def __call__(self, x):
            return call(self.layer, x)

    net, x = fill(Net()), jnp.ones(3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        net(x)
    assert [(w.filename, "given to JAX" in str(w.message)) for w in found] == [
        (__file__, True)
    ] * is_kept
    net.load_state_dict({"layer.weight": jnp.full((3, 3), 2.0)})
    assert is_kept or net(x).tolist() == [6, 6, 6]  # what the warning is about
    assert jax.jit(lambda net, x: net(x))(net, x).tolist() == [6, 6, 6]


def test_named_scopes_use_full_names():

    class Net(Module):
        def __init__(self):
            super().__init__()
            self.blk = Pair()

        def __call__(self, x):
            return self.blk(x)

    text = jax.jit(lambda m, x: m(x)).lower(fill(Net()), jnp.ones(3)).as_text(debug_info=True)
    assert "blk/a/" in text and "blk/b/" in text


def test_errors_name_weights_from_the_outermost_module():
    with pytest.raises(ValueError, match="'blk.a.weight' has no value"):

        class Net(Module):
            def __init__(self):
                super().__init__()
                self.blk = Pair()

            def __call__(self, x):
                return self.blk(x)

        Net()(jnp.ones(3))
    assert not RUNNING.modules


def test_weights_that_a_mesh_does_not_divide_are_named_in_one_warning():
    class Table(Module):
        def __init__(self):
            super().__init__()
            self.table = Weight("table", "float32", (33, 16), CPU)
            self.other = Weight("other", "float32", (33, 7), CPU)
            self.even = Weight("even", "float32", (32, 8), CPU)
            self.bias = Weight("bias", "float32", (33,), CPU)
            for weight in self.layer_weights.values():
                weight.sharding_strategy = ShardingStrategy.rowwise(8)

        def __call__(self, ids):
            return self.table[ids].sum() + self.even[ids].sum()

    model, mesh = fill(Table()), maxjax.make_mesh(model=8)
    expected = model(jnp.arange(4))
    with pytest.warns(UserWarning) as found:
        model.to(mesh)
    (warning,) = found
    assert str(warning.message) == (
        "to(mesh) replicates 2 weights over model=8, as sizes do not divide: 2.96 KiB on each device: "
        "table [33, 16] (2.06 KiB: the 33 values of axis 0 do not divide by model=8), "
        "other [33, 7] (924 bytes: the 33 values of axis 0 do not divide by model=8). "
        "Remedy: a mesh whose axes divide these sizes splits them, as do rules for other axes: "
        "to(mesh, rules={'table': PartitionSpec(None, 'model')})"
    )
    assert warning.filename == __file__
    rules = {"table": PartitionSpec(None, "model")}
    with pytest.warns(UserWarning, match="replicates 1 weight over model=8, .* 924 bytes on each"):
        split = fill(Table()).to(mesh, rules=rules)
    assert split.table.sharding.spec == PartitionSpec(None, "model")
    np.testing.assert_allclose(split(jnp.arange(4)), expected, rtol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(Table()).to(maxjax.make_mesh(model=1))
        fill(Table()).to(mesh, sharding_strategy=ShardingStrategy.replicate(8))


def test_the_warning_of_a_loaded_model_is_at_the_line_that_loads_it(tmp_path):
    config = maxjax.models.LlamaConfig(65, 36, 64, 2, num_attention_heads=9, num_key_value_heads=3)
    maxjax.save_pretrained(maxjax.init(maxjax.models.Llama(config), jax.random.key(0)), tmp_path)
    with pytest.warns(UserWarning, match=r"the 9 heads do not divide by model=8") as found:
        maxjax.load(tmp_path, tokenizer=False, mesh=maxjax.make_mesh(model=8))
    (warning,) = found
    assert warning.filename == __file__ and " more. Remedy: " in str(warning.message)


def test_max_walks_of_modules_and_weights():
    """As MAX's weight adapter of FLUX uses them."""

    class Plain(LayerList):
        @property
        def _omit_module_attr_name(self):
            return True

    m = Hold(a=Lin(), xs=LayerList([Lin()]), ys=Plain([Lin()]))
    m.b = Hold()
    m.b.set_shared_weight("weight", m.a.weight)
    walked = list(m._iter_named_modules())
    assert [(path, prefix) for path, prefix, _ in walked][:4] == [
        ("", ""), ("a", "a."), ("xs", "xs."), ("ys", "")
    ]  # fmt: skip
    assert {path: module for path, _, module in walked}["xs.0"] is m.xs[0]
    found = {name: (weight, module) for name, weight, module in m._iter_named_weights()}
    assert list(found) == list(m.raw_state_dict())
    assert found["a.weight"] == (m.a.weight, m.a) and found["xs.0.weight"][1] is m.xs[0]


def test_the_docstring_of_definition_names_tests_that_exist():
    root = Path(__file__).parents[3]
    paragraphs = re.split(r"(tests/\S+\.py): ", definition.__doc__)[1:]
    named = list(zip(paragraphs[::2], paragraphs[1::2], strict=True))
    assert len(named) == 4
    for path, text in named:
        for name in re.findall(r"test_\w+", text):
            assert f"def {name}(" in (root / path).read_text()
