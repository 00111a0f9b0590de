"""The library of CPU kernels: whether it is there, which level runs, and what is said without it."""

import functools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.cli import environment
from maxjax.kernels import decode_attention, matmul, native

LEVELS = native.levels()
KERNELS = set("amx avx512bf16 avx512vnni avx512 avxvnni avx2 neondot neon portable".split())

# What a user's program does: products, an attention, and what it runs on, in one document.
PROGRAM = """
import contextlib, sys
import numpy as np, jax
from maxjax.cli import application as cli
from maxjax.kernels import decode_attention, matmul, native
for best in native.levels()[:1]:
    if sys.platform == "linux":
        assert str(native.find()) in open("/proc/self/maps").read()
    before = native.status()
    with native.level(best):
        assert native.status() == best
    assert native.status() == before
x, w = np.arange(12, dtype="f").reshape(3, 4), np.arange(20, dtype="f").reshape(5, 4)
for run in (matmul, jax.jit(matmul), jax.vmap(matmul, (0, None))):
    np.testing.assert_array_equal(run(x, w), x @ w.T)
q = np.ones((1, 2, 4), "f")
y, _, _ = decode_attention(q, q, 2 * q, *np.zeros((2, 1, 2, 3, 4), "f"), np.zeros(1, "i"))
np.testing.assert_array_equal(y, 2 * q)
sys.exit(cli.main(["env", "--json"]))
"""


def run_with(**variables):
    """A process of its own: its document, and the lines that it logged."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=os.environ | variables
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.splitlines()


SETTINGS = {
    "off": ("jnp (the CPU kernels are off (MAXJAX_KERNELS=off))", "are off"),
    "portable": ("portable", None),
    "nonsense": (
        f"jnp (MAXJAX_KERNELS=nonsense is not available: this machine has {', '.join(LEVELS)}, and 'off')",
        "MAXJAX_KERNELS=nonsense",
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_level_and_another_file_by_the_environment(setting, tmp_path, monkeypatch):
    """The level is also what a level in the program returns to."""
    built, other = native.find(), tmp_path / "other.so"
    shutil.copy(built, other)
    monkeypatch.setenv("MAXJAX_KERNELS_LIBRARY", str(other))
    assert native.find() == other
    status, logged = SETTINGS[setting]
    document, lines = run_with(MAXJAX_KERNELS=setting)
    assert document["kernels"] == {"CPU": status}
    assert document["variables"]["MAXJAX_KERNELS"] == setting
    assert len(lines) == (logged is not None)
    assert all(logged in line and "jnp forms" in line for line in lines)


# --- without it ---------------------------------------------------------------------------------


@pytest.fixture
def other_library(monkeypatch):
    """As if this process had not looked for the library yet, which is in another place."""

    def look_in(path):
        for name in ("_open", "library"):
            fresh = functools.cache(getattr(native, name).__wrapped__)
            monkeypatch.setattr(native, name, fresh)
        monkeypatch.setenv("MAXJAX_KERNELS_LIBRARY", str(path))

    return look_in


def right(tokens, depth):
    """Whether a new program is right, and whether it calls the kernel."""
    x = np.arange(tokens * depth, dtype=np.float32).reshape(tokens, depth) % 7
    w = np.arange(3 * depth, dtype=np.float32).reshape(3, depth) % 5
    program = jax.jit(lambda x, w: matmul(x, w)).lower(x, w).compile()
    np.testing.assert_array_equal(program(x, w), x @ w.T)
    return "maxjax_matmul" in program.as_text()


def _absent(path):
    pass


def _text(path):
    path.write_text("no library")


def _another(path):
    """A library of something else."""
    shutil.copy(np.random.mtrand.__file__, path)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_absent, "the CPU kernels do not load .*library.so"),
        (_text, "the CPU kernels do not load .*delete .*library.so"),
        (_another, "the CPU kernels do not load .*maxjax_levels.*delete .*library.so"),
    ],
)
def test_no_library(make, says, other_library, tmp_path, caplog):
    """The jnp forms are as right, and one line says so, however many programs there are."""
    make(tmp_path / "library.so")
    other_library(tmp_path / "library.so")
    with caplog.at_level(logging.WARNING, "maxjax"):
        assert not any(right(tokens, 11) for tokens in (1, 2, 3))
        q = np.ones((1, 2, 4), np.float32)
        y, *_ = decode_attention(q, q, q, *np.zeros((2, 1, 2, 3, 4), np.float32), np.zeros(1, int))
        np.testing.assert_array_equal(y, q)
    assert len(caplog.messages) == 1
    assert re.search(says, caplog.messages[0])
    assert native.levels() == [] and native.status().startswith("jnp (the CPU kernels")
    assert environment.environment()["kernels"] == {"CPU": native.status()}
    with pytest.raises(ValueError, match="CPU.*'portable'"):
        with native.level("portable"):
            pass


# --- levels -------------------------------------------------------------------------------------


def test_levels_are_best_first():
    assert LEVELS and set(LEVELS) <= KERNELS and LEVELS[-1] == "portable"
    assert len(set(LEVELS)) == len(LEVELS)
    assert native.status() == (os.environ.get("MAXJAX_KERNELS") or LEVELS[0])
    assert right(2, 13)


@pytest.mark.parametrize("name", ["nonsense", "", "off", "AVX2", "avx2 ", "portablé"])
def test_a_level_that_is_not_there(name):
    """The error names those that are, and nothing changes."""
    before = native.status()
    with pytest.raises(ValueError, match=", ".join(LEVELS)), native.level(name):
        pytest.fail("it is there")
    assert native.status() == before


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_ends_with_its_block(level):
    before = native.status()
    with native.level(level):
        assert native.status() == level
    assert native.status() == before
    with pytest.raises(KeyError), native.level(level):
        raise KeyError
    assert native.status() == before


def test_a_level_in_a_level():
    with native.level("portable"):
        with native.level(LEVELS[0]):
            assert native.status() == LEVELS[0]
        assert native.status() == "portable"


def test_a_level_of_all_threads():
    found = []
    with native.level("portable"):
        thread = threading.Thread(target=lambda: found.append(native.status()))
        thread.start()
        thread.join()
    assert found == ["portable"]


def test_compiled_programs_follow_the_level():
    """What is compiled under one level runs the kernels of the level that is in use when it runs."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, 1000)).astype(np.float32) for n in (2, 70))

    def compiled():
        return jax.jit(lambda x, w: matmul(x, w)).lower(x, w).compile()

    programs, results = {}, {}
    for level in LEVELS:
        with native.level(level):
            programs[level] = compiled()
            results[level] = np.asarray(programs[level](x, w))
    for level in LEVELS:
        with native.level(level):
            for program in programs.values():
                np.testing.assert_array_equal(program(x, w), results[level])
    if len(LEVELS) > 1:  # sums in another order
        assert (results[LEVELS[0]] != results["portable"]).any()


def test_a_level_inside_of_a_program_being_traced():
    """It is no part of the program: nothing of it stays."""

    @jax.jit
    def run(x):
        with native.level("portable"):
            return matmul(x, jnp.ones((2, 3)))

    np.testing.assert_array_equal(run(jnp.ones((1, 3))), [[3, 3]])
    assert native.status() == (os.environ.get("MAXJAX_KERNELS") or LEVELS[0])
