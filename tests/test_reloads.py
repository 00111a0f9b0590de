"""Models whose code is edited while a notebook runs, with IPython's own %autoreload."""

import itertools
import os
import sys
import time

import jax
import jax.numpy as jnp
import pytest

import maxjax
from maxjax import reloads
from maxjax.graph.weight.epoch import structure_changed
from maxjax.nn.layer.hooks import wrap_edited

interactiveshell = pytest.importorskip("IPython.core.interactiveshell")

NET = """
from maxjax import nn
from maxjax.graph import DeviceRef
import helping_net


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4, "float32", DeviceRef.CPU())

    def __call__(self, x):
        return x


class Block(Base):
    def __call__(self, x):
        return super().__call__(self.inner(x)) + helping_net.extra()

    def inner(self, x):
        return 2 * x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LayerList(Block() for _ in range(2)).stack()

    def __call__(self, x):
        return self.layers(x)
"""
HELPER = "def extra():\n    return 0\n\n\ndef unused():\n    return 1\n"


class Notebook:
    """A shell of IPython, and two files that are edited."""

    def __init__(self, folder):
        self.shell = interactiveshell.InteractiveShell()
        self.folder, self.times = folder, itertools.count(int(time.time()), 10)
        self.write("edited_net", NET)
        self.write("helping_net", HELPER)

    def write(self, name, text):
        path = self.folder / f"{name}.py"
        path.write_text(text)
        now = next(self.times)
        os.utime(path, (now, now))

    def run(self, code):
        done = self.shell.run_cell(code)
        done.raise_error()
        return done.result


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("_LISTENERS", "_cell", "_shell"):
        monkeypatch.setattr(reloads, name, type(getattr(reloads, name))())
    one = Notebook(tmp_path)
    reloads.watch(wrap_edited, one.shell)
    reloads.watch(structure_changed, one.shell)
    one.run("%load_ext autoreload\n%autoreload 2")
    one.run("import jax, jax.numpy as jnp, maxjax, edited_net, helping_net")
    one.run("model = maxjax.init(edited_net.Net(), jax.random.key(0)); x = jnp.ones(4)")
    yield one
    reloads.code_of.cache_clear()
    for name in ("edited_net", "helping_net"):
        sys.modules.pop(name, None)
    one.shell.history_manager.end_session()


JITTED = "float(jitted(model, x)[0]), float(model(x)[0]), traces[0]"


def test_a_model_built_before_runs_the_new_code(notebook):
    notebook.run("traces = [0]\ndef call(m, x):\n    traces[0] += 1\n    return m(x)")
    notebook.run("jitted = jax.jit(call)")
    notebook.run("program = model.compile(jax.ShapeDtypeStruct((4,), 'float32'))")
    assert notebook.run(JITTED) == (4.0, 4.0, 1)
    assert notebook.run(JITTED) == (4.0, 4.0, 1)  # another cell traces nothing
    notebook.write("edited_net", NET.replace("2 * x", "3 * x"))
    assert notebook.run(JITTED) == (9.0, 9.0, 2)
    # Changes in code that no class uses, and in comments, have no effect.
    notebook.write("helping_net", HELPER.replace("return 1", "return 2"))
    assert notebook.run(JITTED) == (9.0, 9.0, 2)
    notebook.write("helping_net", HELPER.replace("return 0", "return 10"))
    assert notebook.run(JITTED) == (49.0, 49.0, 3)
    # The __call__ itself is edited; it uses super() and names of its module.
    edited = NET.replace("2 * x", "3 * x").replace(") + helping", ") - helping")
    notebook.write("edited_net", edited)
    assert notebook.run(JITTED) == (-31.0, -31.0, 4)
    # A program that was compiled before warns once, and still runs.
    with pytest.warns(UserWarning, match="'Net' was compiled before its code was changed"):
        assert notebook.run("float(program(x)[0])") == 4.0
    assert notebook.run("float(program(x)[0])") == 4.0
    notebook.run("program = model.compile(jax.ShapeDtypeStruct((4,), 'float32'))")
    assert notebook.run("float(program(x)[0])") == -31.0


def test_an_edited_call_is_still_a_layer_s(notebook):
    """The edited call has the layer's name, and hooks see it."""
    notebook.write("edited_net", NET.replace(") + helping", ") - helping"))
    seen = []
    with maxjax.layer_hook(lambda layer, args, kwargs, out: seen.append(type(layer).__name__)):
        notebook.run("model(x)")
    assert seen == [*["Block"] * 4, "LayerStack", "Net"]  # its own and that of its base class
    call = sys.modules["edited_net"].Block.__call__
    assert call.__wrapped__.__code__.co_filename == str(notebook.folder / "edited_net.py")


def test_a_function_of_the_notebook_that_is_defined_again(notebook):
    notebook.run("import edited_net\ndef scale(): return 2.0")
    notebook.run(
        "class Own(edited_net.Base):\n    def __call__(self, x): return x * scale()\n"
        "own = maxjax.init(Own(), jax.random.key(0)); jitted = jax.jit(lambda m, x: m(x))"
    )
    assert notebook.run("float(jitted(own, x)[0])") == 2.0
    notebook.run("def scale(): return 3.0")
    assert notebook.run("float(jitted(own, x)[0])") == 3.0


def test_outside_of_a_notebook_nothing_is_looked_at(monkeypatch):
    assert reloads.code([type("Anything", (), {"__module__": "nowhere"})]) == ()
    monkeypatch.setattr(reloads, "_IPYTHON", "no_such_module")
    before = list(reloads._LISTENERS)
    reloads.watch(print)
    assert reloads._LISTENERS == before
    jax.jit(lambda x: x)(jnp.ones(1))
