"""Static attributes of Modules as JAX sees them, and values that are assigned while a Module runs."""

import array
import collections
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import itertools
import logging
import operator
import pathlib
import pickle
import random
import re
import threading
import types
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.graph import DeviceRef, Dim, Weight
from maxjax.graph.dim import StaticDim
from maxjax.nn import Module
from maxjax.nn.layer import Layer


class Held(Module):
    def __init__(self):
        super().__init__()
        self.betas, self.options = [0.5, 2.0], {"b": 3.0, "a": [4.0]}
        self.mean = Weight("mean", "float32", (2,), DeviceRef.CPU())

    def __call__(self, x):
        self.mean.value = 0.5 * self.mean.value + x
        return x


def test_lists_and_dicts_of_a_module_are_pytrees():
    held = Held()
    assert jax.tree.map(lambda v: 2 * v, held.betas) == [1.0, 4.0]
    assert jax.tree.map(lambda v: 2 * v, held.options) == {"b": 6.0, "a": [8.0]}
    assert float(jax.jit(lambda options: options["b"] + options["a"][0])(held.options)) == 7
    assert float(jax.jit(lambda betas: betas[0] + betas[1])(held.betas)) == 2.5
    assert len(jax.tree.leaves(held)) == 1  # they are no leaves of the Module


def test_dicts_with_a_default_keep_it():
    held = Held()
    held.counts, held.lists = collections.Counter("aab"), collections.defaultdict(list, a=[1])
    held.sets, held.deep = (
        collections.defaultdict(set),
        collections.defaultdict(collections.Counter),
    )
    for module in (held, jax.tree.map(lambda leaf: leaf, held), pickle.loads(pickle.dumps(held))):
        assert (module.counts["a"], module.counts["z"], module.lists["z"]) == (2, 0, [])
        assert "z" not in module.counts and jax.tree.structure(module) == jax.tree.structure(held)
        with pytest.raises(TypeError, match="cannot be changed in place"):
            module.lists["z"].append(1)
        assert module.sets["z"] == frozenset() and module.deep["y"]["z"] == 0
        with pytest.raises(TypeError, match="cannot be changed in place"):
            module.deep["y"]["z"] = 1
        with pytest.raises(KeyError, match="'z'"):
            module.options["z"]


def test_a_value_that_a_running_module_loses_is_told():
    held = Held()
    held.mean.value = jnp.zeros(2)
    held(jnp.ones(2))
    np.testing.assert_array_equal(held.mean.value, [1, 1])
    with pytest.warns(UserWarning, match="weight 'mean' gets a value while its module runs"):
        jax.jit(lambda held, x: held(x))(held, jnp.ones(2))


def test_a_dim_is_a_static_attribute():
    class Sized(Module):
        def __init__(self, size):
            super().__init__()
            self.size = size

        def __call__(self, x):
            return x

    module = Sized(Dim(2))
    assert module.size == 2 and isinstance(module.size, StaticDim)
    same, other = (jax.tree.structure(Sized(Dim(size))) for size in (2, "a"))
    assert jax.tree.structure(module) == same != other


@dataclasses.dataclass(frozen=True)
class Settings:
    size: int
    source: str = dataclasses.field(default="", compare=False)


def test_a_field_that_is_not_compared():
    model = Held()
    model.settings = Settings(3, "a")
    assert model.settings == Settings(3, "b") and Settings(3, "b") == model.settings
    assert model.settings != Settings(4, "a")


@dataclasses.dataclass
class Options:
    n: float
    inner: object = None

    def read(self):
        return self.n


@dataclasses.dataclass(eq=False)
class Identity:
    n: float


@dataclasses.dataclass(frozen=True)
class Listed:
    n: list


class Scale(Module):
    def __init__(self, o):
        super().__init__()
        self.o = o

    def __call__(self, x):
        return x * read(self.o)


def path_to_number(o):
    """An object of this file and what it holds, down to the number; they nest differently."""
    path = [o]
    while not isinstance(o, (int, float)):
        if isinstance(o, (list, tuple)):
            o = o[0]
        else:
            o = o["o"] if isinstance(o, dict) else vars(o)["n"]
        path.append(o)
    return path


def read(o):
    """The number in one of the objects of this file."""
    return path_to_number(o)[-1]


def change(o, value):
    holder = path_to_number(o)[-2]
    if isinstance(holder, list):
        holder[0] = value
    else:
        holder.n = value


CHANGEABLE = [
    lambda: types.SimpleNamespace(n=2.0),
    lambda: Options(2.0),
    lambda: Options(types.SimpleNamespace(n=2.0)),
    lambda: Options([2.0]),
    lambda: Listed([2.0]),
    lambda: Identity(2.0),
    lambda: (Options(2.0),),
    lambda: [Options(2.0)],
    lambda: {"o": (1.0, Options(2.0))[1]},
]


@pytest.mark.parametrize("make", CHANGEABLE)
def test_a_compiled_function_sees_a_changed_field(make):
    run = jax.jit(lambda m, x: m(x))
    model = Scale(make())
    held = Held()
    held.child, held.other = model, Scale(make())
    outer = jax.jit(lambda m, x: m.child(x) + m.other(x))
    copies = [
        jax.tree.map(lambda leaf: leaf, model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    assert float(run(model, 1.0)) == 2 and float(outer(held, 1.0)) == 4
    change(model.o, 9.0)
    assert float(model(1.0)) == float(run(model, 1.0)) == 9 and float(outer(held, 1.0)) == 11
    for one in copies:
        assert float(one(1.0)) == float(run(one, 1.0)) == 2
        assert jax.tree.structure(one) != jax.tree.structure(model)
    change(model.o, 2.0)
    assert float(run(model, 1.0)) == 2 and jax.tree.structure(copies[0]) == jax.tree.structure(
        model
    )
    # What a compiled function returns does not follow the model that was its argument.
    returned = jax.jit(lambda m: m)(model)
    change(returned.o, 5.0)
    assert float(run(returned, 1.0)) == 5 and float(run(model, 1.0)) == 2


def test_the_object_itself_is_held():
    model = Scale(o := Options(2.0))
    assert model.o is o and type(model.o) is Options
    model.o = other = Options(2.0)
    other.n = 3.0
    assert float(jax.jit(lambda m, x: m(x))(model, 1.0)) == 3
    o.extra = 1  # an attribute that is no field counts as well
    model.o, before = o, jax.tree.structure(model)
    o.extra = 2
    assert jax.tree.structure(model) != before


def test_a_program_of_a_module_with_a_changed_field_is_compiled_again():
    model = Scale(Options(2.0))
    program = model.compile(jax.ShapeDtypeStruct((), jnp.float32))
    assert float(program(jnp.float32(1))) == 2
    model.o.n = 9.0
    with pytest.raises(ValueError, match="compiled before its Scale was changed"):
        program(jnp.float32(1))


def test_an_array_that_a_field_gets_is_refused():
    model = Scale(Options(2.0))
    model.o.inner = jnp.ones(2)
    with pytest.raises(TypeError, match=r"Scale\.o\.inner is an array"):
        jax.tree.leaves(model)


class Plain:
    def __init__(self):
        self.n = 2.0

    def method(self):
        return self.n


class Unhashable(Plain):
    def __eq__(self, other):
        return True


class Called(Plain):
    def __call__(self, x):
        return x


class Slotted:
    __slots__ = ("n",)


class Old(Layer):
    """A Layer that is not a Module."""


def generate():
    yield 1


REFUSED = [
    Plain, Unhashable, Called, Slotted, Old, object, lambda: [Plain()], lambda: Plain().method,
    lambda: Options(1.0, Plain()), lambda: functools.partial(max, Plain()), lambda: {Plain(): 1}, generate,
    lambda: iter([1]), itertools.count, lambda: map(abs, [1]), collections.deque, collections.UserDict, bytearray,
    lambda: array.array("i", [1]), lambda: memoryview(bytearray(1)), lambda: ctypes.c_int(1), io.StringIO,
    threading.Lock, threading.local, random.Random, np.random.default_rng, lambda: np.random.default_rng().normal,
    lambda: random.Random().random, lambda: np.poly1d([1]), lambda: ValueError("x"), lambda: operator.itemgetter(1),
    lambda: contextvars.ContextVar("x"), lambda: np.finfo("f4"),
]  # fmt: skip


@pytest.mark.parametrize("make", REFUSED)
def test_an_object_that_compares_by_identity_is_refused(make):
    with pytest.raises(TypeError, match=r"Scale\.o\S* is a \w+, which can change.*dataclass"):
        Scale(make())


@pytest.mark.parametrize(
    "make, kinds",
    [
        (lambda: functools.partial(max, [1]), "partial of a list"), (lambda: {Identity(1.0)}, "set of a Identity"),
        (lambda: [].append, "builtin_function_or_method of a list"), (lambda: Options(2.0).read, "method of a Options"),
        (lambda: {}.get, "builtin_function_or_method of a dict"),
    ],
)  # fmt: skip
def test_functions_and_sets_hold_constants_only(make, kinds):
    with pytest.raises(TypeError, match=rf"Scale\.o is a {kinds}, which can change"):
        Scale(make())


def test_an_object_that_contains_itself_is_refused():
    loop = types.SimpleNamespace()
    loop.loop = loop
    with pytest.raises(TypeError, match=r"Scale\.o is a SimpleNamespace that contains itself"):
        Scale(loop)


class Kind(enum.Enum):
    A = 1


class Equal:
    """Compares by its content, and hashes: it says that it does not change."""

    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return isinstance(other, Equal) and self.n == other.n

    def __hash__(self):
        return hash(self.n)


class Items(NamedTuple):
    n: object


def twin(x):
    return x


# Each is held, and is the same constant whenever it is made.
CONSTANTS = [
    lambda: None, lambda: ..., lambda: 2, lambda: 2.5, lambda: 2j, lambda: "a", lambda: b"a", lambda: Kind.A,
    lambda: np.float32(2), lambda: np.dtype("int8"), lambda: DType.float32, lambda: jnp.bfloat16, lambda: Plain,
    lambda: Plain.method, lambda: twin, lambda: len, lambda: str.join, lambda: "{}".format, lambda: (2).__add__,
    lambda: np, lambda: np.add, lambda: jnp.add, lambda: jax.nn.relu, lambda: jax.nn.gelu,
    lambda: functools.partial(jax.nn.gelu, approximate=True), lambda: Settings(3), lambda: Listed((1,)),
    lambda: DeviceRef.CPU(), lambda: jax.devices()[0], lambda: jax.make_mesh((1,), ("x",)),
    lambda: jax.sharding.PartitionSpec("x"), lambda: jax.ShapeDtypeStruct((2,), "float32"),
    lambda: jax.tree.structure([1]), lambda: logging.getLogger("x"), lambda: re.compile("x"),
    lambda: pathlib.Path("x"), lambda: decimal.Decimal(2), lambda: datetime.date(2026, 1, 2), lambda: Equal(2),
    lambda: (1, "a"), lambda: Items(2), lambda: range(3), lambda: slice(1, 2), lambda: frozenset({1, 2}),
    lambda: Dim("a"), lambda: int | str, lambda: list[int],
]  # fmt: skip


@pytest.mark.parametrize("make", CONSTANTS, ids=lambda make: type(make()).__name__)
def test_constants_are_held(make):
    value = make()
    model = Scale(value)
    assert model.o is value
    assert jax.tree.structure(jax.tree.map(lambda leaf: leaf, model)) == jax.tree.structure(model)
    assert jax.tree.structure(Scale(make())) == jax.tree.structure(model)
    assert not model._mx_cache.watches


@pytest.mark.parametrize(
    "make",
    [
        lambda n: [n], lambda n: {"a": n}, lambda n: collections.OrderedDict(a=n), lambda n: ([n],),
        lambda n: Items([n]), lambda n: {n}, lambda n: types.MappingProxyType({"a": n}), lambda n: np.full(2, n),
        lambda n: collections.Counter({"a": n}),
    ],
)  # fmt: skip
def test_containers_are_frozen_copies_that_compare_by_content(make):
    value = make(2)
    model = Scale(value)
    assert model.o is not value and type(model.o) is not list and not model._mx_cache
    same, other = (jax.tree.structure(Scale(make(n))) for n in (2, 3))
    assert jax.tree.structure(model) == same != other
    assert not model._mx_cache.watches


@pytest.mark.parametrize(
    "make", [jax.jit, jax.vmap, functools.lru_cache, jax.custom_jvp, np.vectorize]
)
def test_a_function_made_of_another_one_is_a_constant(make):
    function = make(twin)
    assert Scale(function).o is function
    assert jax.tree.structure(Scale(function)) == jax.tree.structure(Scale(function))
    assert jax.tree.structure(Scale(function)) != jax.tree.structure(Scale(make(abs)))


def test_all_fields_of_a_large_configuration_are_compared():
    def make(changed=None):
        return types.SimpleNamespace(**{f"n{i}": -i if i == changed else i + 1 for i in range(20)})

    models = [Scale(make(i)) for i in (None, *range(20))]
    assert len({jax.tree.structure(model) for model in models}) == 21
    for i in range(20):
        setattr(models[0].o, f"n{i}", -i)
        assert jax.tree.structure(models[0]) == jax.tree.structure(models[i + 1])
        setattr(models[0].o, f"n{i}", i + 1)


def test_a_module_with_a_changeable_object_is_freed_at_once():
    model = Scale(Options(2.0))
    jax.tree.leaves(model)
    gone = weakref.ref(model)
    del model
    assert gone() is None


def test_a_property_in_place_of_a_field_is_not_read():
    @dataclasses.dataclass
    class Config:
        size: int
        theta: float = 1.0

    class Other(Config):
        @property
        def theta(self):
            raise ValueError("not supported here")

        @theta.setter
        def theta(self, value):
            pass

    held = Scale(Other(3))
    assert jax.tree.structure(held) == jax.tree.structure(Scale(Other(3)))
    assert jax.tree.structure(held) != jax.tree.structure(Scale(Other(4)))
