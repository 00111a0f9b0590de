"""Hooks: binding, order, replacement, and that compiled programs without them are left alone."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.graph import DeviceRef, Weight
from maxjax.nn import Identity, Layer, LayerList, Module
from maxjax.nn.hooks import print_hook as hooks
from maxjax.nn.layer import (
    add_layer_hook,
    add_layer_prehook,
    clear_hooks,
    layer_hook,
    layer_prehook,
)


class Add(Module):
    def __init__(self):
        super().__init__()
        self.w = Weight("w", "float32", (), DeviceRef.CPU())

    def __call__(self, x, y=2, *rest, z=3, **more):
        return x + self.w


def loaded():
    m = Add()
    m.load_state_dict({"w": np.float32(1) + np.zeros((), np.float32)})
    return m


def test_arguments_are_bound_by_the_signature():
    seen = []
    add_layer_hook(lambda layer, args, kwargs, outputs: seen.append((args, kwargs)))
    m = loaded()
    m(1.0)
    m(x=1.0, y=5)
    m(1.0, y=5, z=4)
    m(1.0, 2, 7, q=8)
    assert seen == [((1.0,), {}), ((1.0, 5), {}), ((1.0, 5), {"z": 4}), ((1.0, 2, 7), {"q": 8})]
    with pytest.raises(TypeError):
        m()
    named = type("Named", (Module,), {"__call__": lambda this, self: self})()
    assert named(self=3) == 3 and seen[-1] == ((3,), {})


@pytest.mark.parametrize("value", [0, False, "", ()])
def test_anything_but_none_replaces_the_outputs(value):
    seen = []
    add_layer_hook(lambda *a: None)
    add_layer_hook(lambda *a: value)
    add_layer_hook(lambda layer, args, kwargs, outputs: seen.append(outputs))
    assert loaded()(1.0) == value and seen == [value]


def test_a_hook_added_inside_a_hook_runs_in_the_same_call():
    seen = []

    def first(*args):
        seen.append("first")
        add_layer_hook(lambda *a: seen.append("second"))

    add_layer_hook(first)
    loaded()(1.0)
    assert seen == ["first", "second"]


def test_a_hook_that_removes_itself_or_a_later_one_leaves_the_others():
    seen, mine = [], contextlib.ExitStack()

    def once(*args):
        seen.append("once")
        mine.close()

    mine.enter_context(layer_hook(once))
    add_layer_hook(lambda *a: seen.append("next"))
    mine.enter_context(layer_hook(lambda *a: seen.append("later")))
    loaded()(1.0)
    loaded()(1.0)
    assert seen == ["once", "next", "next"]


def test_a_hook_added_during_a_call_runs_for_the_layers_that_are_running():
    seen = []

    class Adds(Module):
        def __call__(self, x):
            add_layer_hook(lambda layer, *rest: seen.append(type(layer).__name__))
            return x

    class Outer(Module):
        def __init__(self):
            super().__init__()
            self.adds = Adds()

        def __call__(self, x):
            return self.adds(x)

    Outer()(1)
    assert seen == ["Adds", "Outer"]


def test_hooks_fire_in_all_threads_and_for_lists_and_layers():
    seen = []
    add_layer_hook(lambda layer, *rest: seen.append(type(layer).__name__))
    thread = threading.Thread(target=lambda: loaded()(1.0))
    thread.start()
    thread.join()

    class Old(Layer):
        def __call__(self, x):
            return x

    LayerList([loaded(), Old()])(1.0)
    assert seen == ["Add", "Add", "Old", "LayerList"]
    assert Layer()(1) is None


def test_instance_attributes_named_call_do_nothing():
    m = loaded()
    m.__dict__["__call__"] = lambda x: 99
    assert m(1.0) == 2


def test_what_is_no_function_is_a_type_error_as_in_max():
    add_layer_hook(3)
    with pytest.raises(TypeError, match="a hook is a function, not int"):
        Identity()(1)
    with pytest.raises(TypeError, match="a hook is a function"), layer_prehook(3):
        pass
    clear_hooks()


def test_jit_retraces_under_hooks_and_uses_the_old_program_again():
    m, traces, seen = loaded(), [], []

    @jax.jit
    def f(m, x):
        traces.append(1)
        return m(x)

    x = jnp.float32(1)
    f(m, x)
    hook = lambda layer, args, kwargs, outputs: seen.append(outputs) or outputs * 10
    add_layer_hook(hook)
    assert f(m, x) == 20 and len(traces) == 2 and isinstance(seen[0], jax.core.Tracer)
    f(m, x)
    assert len(traces) == 2
    clear_hooks()
    assert f(m, x) == 2 and len(traces) == 2
    add_layer_hook(hook)
    assert f(m, x) == 20 and len(traces) == 2


def test_print_hook(capsys):
    m = LayerList([loaded(), loaded()])
    add_layer_hook(lambda *a: None)
    hook = hooks.PrintHook(filter=lambda name: name != "model")
    hook.name_layers(m)
    m(jnp.float32(1))
    m(jnp.float32(1))
    hook.step()
    m[0](jnp.float32(1))
    hook.remove()
    m(jnp.float32(1))
    hook.summarize()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["Printed 8 tensors for step 0.", "Printed 2 tensors for step 1."]
    lines = lines[:-4]
    assert lines[:2] == ["model.0-input_0 = 1.0", "model.0-output = 2.0"]
    assert "model.1(2)-output = 3.0" in lines and len(lines) == 8
    from maxjax.nn.layer.hooks import _HOOKS

    assert len(_HOOKS) == 1  # remove() takes away its own only


def test_print_hook_with_one_name(capsys):
    m = LayerList([loaded(), loaded()])
    hook = hooks.PrintHook(filter="model.1")
    hook.name_layers(m)
    m(jnp.float32(1))
    hook.remove()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["model.1-input_0 = 2.0", "model.1-output = 3.0"]


def test_print_hook_names_layers_without_a_name_by_class(capsys):
    hook, (a, b) = hooks.PrintHook(filter=[]), (loaded(), loaded())
    for layer in (a, b, a):
        layer(jnp.float32(1))
    kind = type(a).__name__
    names = [line.partition("-")[0] for line in capsys.readouterr().out.splitlines()[::2]]
    assert names == [kind, f"{kind}2", f"{kind}(2)"]
    with pytest.raises(TypeError, match="a Layer or Module, not a dict"):
        hook.name_layers({})
    hook.remove()


def test_prehooks_replace_arguments_before_hooks_see_them():
    seen = []
    add_layer_hook(lambda layer, args, kwargs, outputs: seen.append((args, outputs)))
    add_layer_prehook(lambda layer, args, kwargs: seen.append((args, kwargs)))
    add_layer_prehook(lambda layer, args, kwargs: ((args[0] * 10,), {"z": 4}))
    add_layer_prehook(lambda layer, args, kwargs: seen.append((args, kwargs)))
    m = loaded()
    assert m(x=2.0, z=5) == 21
    assert seen == [((2.0,), {"z": 5}), ((20.0,), {"z": 4}), ((20.0,), 21)]
    with layer_prehook(lambda layer, args, kwargs: ((1.0,), {})):
        assert m(2.0) == 2  # the last one to be added runs last
    clear_hooks()
    assert m(2.0) == 3


@pytest.mark.parametrize("bad", [3, (1,), ((1.0,), None), (1.0, {})])
def test_a_prehook_returns_none_or_arguments(bad):
    with layer_prehook(lambda layer, args, kwargs: bad):
        with pytest.raises(TypeError, match=r"None or \(args, kwargs\)"):
            loaded()(1.0)


def test_prehooks_retrace_and_reach_layers_without_weights():
    class Plain(Layer):
        def __call__(self, x):
            return x + 1

    traced = []

    @jax.jit
    def run(m, x):
        traced.append(1)
        return m(x)

    m = loaded()
    run(m, 1.0)
    with layer_prehook(lambda layer, args, kwargs: ((args[0] * 10,), kwargs)):
        assert run(m, 1.0) == 11 and Plain()(1.0) == 11
    assert run(m, 1.0) == 2 and Plain()(1.0) == 2 and len(traced) == 2
