"""The cache of compiled programs as processes see it: each in its own, on a home of its own.

Nothing here switches the cache on in the process of the tests.
"""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import jaxlib.version
import pytest

from maxjax.graph import compile_cache

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import importlib, json, logging, os, sys, threading, warnings
import numpy as np
import jax
import jax.numpy as jnp
from maxjax.graph import compile_cache

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))

def options():
    return {name: getattr(jax.config, name) for name in dir(jax.config) if "_cache" in name}

def results(count=4):
    x = np.arange(12, dtype="f").reshape(3, 4)
    return [float(jax.jit(lambda x: jnp.sin(x @ x.T + n).sum())(x)) for n in range(count)]
"""
# Compiles before: JAX finds out only once, at its first compilation, whether it has a cache.
KEPT = f"""{PRELUDE}
plain = results()
folder = compile_cache.enable()
jax.clear_caches()
kept = results()
found = {{"folder": folder, "again": compile_cache.enable(), "same": plain == kept,
    "hits": events.count("cache_hits"), "misses": events.count("cache_misses")}}
"""
PROGRAM = f"{KEPT}print(json.dumps(found))"
# Then some entries are damaged, and the cache is switched on again as in a new process.
DAMAGED = f"""{KEPT}
from pathlib import Path

entries = sorted(Path(folder).glob("*-cache"))
for number, path in enumerate(entries):
    content = path.read_bytes()
    if number % 4 == 0:
        path.write_bytes(b"garbage" * 100)
    elif number % 4 == 1:
        path.write_bytes(content[: len(content) // 2])
    elif number % 4 == 2:
        path.write_bytes(b"")
    else:
        path.unlink()
        path.mkdir()
os.utime(Path(folder).parent / "checked", (1e9, 1e9))
warnings.filters.remove(compile_cache._QUIET)
jax.config.update("jax_compilation_cache_dir", None)
importlib.reload(compile_cache).enable()
jax.clear_caches()
events.clear()
anew = {{"entries": len(entries), "same": results() == plain,
    "hits": events.count("cache_hits"), "empty": sum(not path.stat().st_size for path in entries)}}
print(json.dumps([found, anew]))
"""


def clean(tmp_path, **variables):
    """An environment with a home of its own and no setting of JAX's or this library's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    kept = {name: value for name, value in kept.items() if not name.startswith(("JAX_", "MAXJAX_"))}
    return kept | {"HOME": str(tmp_path / "home"), "JAX_PLATFORMS": "cpu"} | variables


def start(code, environment, *arguments):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """What the process printed, as JSON; it must have succeeded without a word on stderr."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err == ""
    return json.loads(out)


def run(code, environment, *arguments):
    return finish(start(code, environment, *arguments))


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


# --- keeping programs ---------------------------------------------------------------------


def test_the_second_process_compiles_nothing_but_what_is_damaged(tmp_path, home):
    first = run(PROGRAM, clean(tmp_path))
    assert first["hits"] == 0 < first["misses"]
    assert first["again"] == first["folder"]
    folder = Path(first["folder"])
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    assert folder.parent == home.resolve() / caches / "maxjax" / "compile"
    for path in (folder, *folder.parents):
        if path == home.resolve():
            break
        assert stat.S_IMODE(path.stat().st_mode) == 0o700

    second, anew = run(DAMAGED, clean(tmp_path))
    assert second["folder"] == first["folder"]
    assert (second["hits"], second["misses"]) == (first["misses"], 0)
    assert first["same"] and second["same"]
    # Damaged entries are compiled anew, and the empty one is written anew.
    assert anew["entries"] == first["misses"] >= 4
    assert anew["hits"] == 0 == anew["empty"] and anew["same"]


@pytest.mark.extra
def test_processes_at_once(tmp_path, home):
    environment = clean(tmp_path, MAXJAX_COMPILE_CACHE=str(tmp_path / "place"))
    found = [finish(one) for one in [start(PROGRAM, environment) for _ in range(2)]]
    assert found[0]["folder"] == found[1]["folder"]
    assert Path(found[0]["folder"]).parent == (tmp_path / "place").resolve()
    after = run(PROGRAM, environment)
    assert after["hits"] > 0 == after["misses"]
    assert all(one["same"] for one in [*found, after])
    assert not any(home.iterdir())


# --- who decides --------------------------------------------------------------------------


# What importing everything changes; then what enable() returns and changes where the user chose something.
CHOICES = f"""{PRELUDE.replace("from maxjax.graph import compile_cache", "")}
import pkgutil
defaults = options()
import maxjax
for module in pkgutil.walk_packages(maxjax.__path__, "maxjax."):
    if module.name != "maxjax.__main__":
        importlib.import_module(module.name)
from maxjax.graph import compile_cache
imported = [options() == defaults, compile_cache._QUIET in warnings.filters]

def enable(environment, config):
    "What enable() returns, and what it changed; and what is in the user's directories afterwards."
    chosen = defaults | config
    for name, value in chosen.items():
        jax.config.update(name, value)
    os.environ.update(environment)
    folder = importlib.reload(compile_cache).enable()
    for name in environment:
        del os.environ[name]
    changed = {{name: value for name, value in options().items() if value != chosen[name]}}
    return [folder, changed, sorted(os.listdir() + os.listdir(os.environ["HOME"]))]

os.chdir(sys.argv[1])
print(json.dumps([imported, sorted(os.listdir(os.environ["HOME"])),
    [enable(*choice) for choice in json.loads(sys.argv[2])]]))
"""
TIME, SIZE = compile_cache._THRESHOLDS


def test_an_import_switches_nothing_on_and_the_user_decides(tmp_path, home):
    own, place = str(tmp_path / "own"), str(tmp_path / "place")
    variable = {compile_cache.VARIABLE: place}
    untouched = [
        ({}, {"jax_compilation_cache_dir": own}),
        ({}, {"jax_compilation_cache_dir": own, "jax_enable_compilation_cache": False}),
        ({}, {"jax_enable_compilation_cache": False}),
        ({}, {"jax_compilation_cache_dir": ""}),
        ({}, {"jax_compilation_cache_max_size": 1000}),
        *(({compile_cache.VARIABLE: word}, {}) for word in ("0", "off", "No", "FALSE")),
        ({compile_cache.VARIABLE: "0"}, {"jax_compilation_cache_dir": own}),
    ]
    ours = [
        (variable, {}),
        (variable, {TIME: 5.0, SIZE: 10}),
        (variable | {TIME.upper(): "1.0"}, {}),
        *(({compile_cache.VARIABLE: word}, {}) for word in ("1", "", "On")),
    ]
    code, given = CHOICES, json.dumps([*untouched, *ours])
    imported, inside, found = run(code, clean(tmp_path), str(tmp_path), given)
    assert imported == [True, False] and not inside
    folders = [["home"]] * len(untouched)
    expected = zip([own, *[None] * 8, own], [{}] * len(untouched), folders, strict=True)
    assert found[: len(untouched)] == [list(one) for one in expected]

    found = found[len(untouched) :]
    folder = found[0][0]
    assert Path(folder).parent == Path(place).resolve()
    directory = {"jax_compilation_cache_dir": folder}
    assert [changed for _, changed, _ in found[:3]] == [
        directory | {TIME: 0.0, SIZE: -1},
        directory,
        directory | {SIZE: -1},
    ]
    assert all(Path(folder).is_relative_to(home.resolve()) for folder, *_ in found[3:])


def test_jax_variables_decide(tmp_path, home):
    own = tmp_path / "own"
    code = f"{PRELUDE}print(json.dumps([compile_cache.enable(), compile_cache.enable()]))"
    found = run(code, clean(tmp_path, JAX_COMPILATION_CACHE_DIR=str(own)))
    assert found == [str(own)] * 2
    assert not any(home.iterdir())


def test_a_later_choice_and_later_filters(tmp_path, home):
    code = f"""{PRELUDE}
found = []
threads = [threading.Thread(target=lambda: found.append(compile_cache.enable())) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
ours = compile_cache.enable()
quiet = [filter for filter in warnings.filters if filter == compile_cache._QUIET]
with warnings.catch_warnings():
    warnings.simplefilter("error")
    compile_cache.enable()
    text = "Error reading persistent compilation cache entry for 'f': error: x"
    where = {{"filename": "compiler.py", "lineno": 1}}
    warnings.warn_explicit(text, UserWarning, module="jax._src.compiler", **where)
    try:
        warnings.warn_explicit(text, UserWarning, module="program", **where)
    except UserWarning:
        quiet.append("others are heard")
results(1)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
theirs = compile_cache.enable()
jax.clear_caches()
results(1)
print(json.dumps([found == [ours] * 8, len(quiet), theirs, len(os.listdir(ours)) > 0]))
"""
    own = tmp_path / "own"
    assert run(code, clean(tmp_path), str(own)) == [True, 2, str(own), True]
    assert any(own.iterdir())


# --- where it may be ----------------------------------------------------------------------

REFUSED = f"""{PRELUDE}
import pwd
before, lines = options(), []
handler = logging.Handler()
handler.emit = lambda record: lines.append([record.levelname, record.getMessage()])
logging.getLogger("maxjax").addHandler(handler)
logging.getLogger("maxjax").setLevel(logging.DEBUG)

def enable(environment):
    saved = dict(os.environ)
    os.environ.update(environment)
    if not os.environ["HOME"]:
        del os.environ["HOME"]
        pwd.getpwuid = {{}}.__getitem__  # a user without an entry
    jax.distributed.is_initialized = lambda: "RANK" in environment
    fresh = importlib.reload(compile_cache)
    found = [fresh.enable(), fresh.enable()]
    os.environ.clear()
    os.environ.update(saved)
    return [found == [None, None] and options() == before, lines.pop(), len(lines)]

print(json.dumps([enable(environment) for environment in json.loads(sys.argv[1])]))
"""


def test_directories_that_are_not_used(tmp_path):
    def place(name, mode=0o700):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name).chmod(mode)
        return {compile_cache.VARIABLE: str(tmp_path / name)}

    (tmp_path / "file").write_text("in the way")
    cases = [
        (place("shared", 0o777), "WARNING", "others may write"),
        (place("group", 0o770), "WARNING", "others may write"),
        ({"XDG_CACHE_HOME": str(tmp_path)}, "WARNING", "others may write"),
        ({compile_cache.VARIABLE: str(tmp_path / "file")}, "WARNING", "File exists"),
        ({compile_cache.VARIABLE: "gs://bucket/x"}, "WARNING", "JAX_COMPILATION_CACHE_DIR"),
        ({"XDG_CACHE_HOME": str(tmp_path / "file")}, "DEBUG", "File exists"),
        ({"HOME": "/dev/null"}, "DEBUG", "File exists"),
        ({"HOME": "relative"}, "DEBUG", "relative"),
        ({"RANK": "1"}, "DEBUG", "one of several"),
    ]
    place("maxjax/compile", 0o777)
    if os.geteuid() == 0:
        cases.append((place("foreign"), "WARNING", "belongs to uid 12345"))
        os.chown(tmp_path / "foreign", 12345, -1)
        cases.append(({"HOME": str(tmp_path / "foreign")}, "DEBUG", "belongs to uid 12345"))
    else:
        cases.append((place("locked", 0o500), "WARNING", "Permission denied"))
    cases.append(({"HOME": ""}, "DEBUG", "home directory"))

    environments = json.dumps([environment for environment, _, _ in cases])
    found = run(REFUSED, clean(tmp_path, HOME="/dev/null"), environments)
    for (environment, level, text), (untouched, line, others) in zip(cases, found, strict=True):
        assert untouched, environment
        assert line[0] == level and text in line[1], (environment, line)
        assert not others, "said once, in one line"


def test_the_default_place(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    home = tmp_path.resolve()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert compile_cache._base("") == home / "Library" / "Caches" / "maxjax" / "compile"
    monkeypatch.setattr(sys, "platform", "linux")
    assert compile_cache._base("1") == home / ".cache" / "maxjax" / "compile"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # by its specification: as if not set
    assert compile_cache._base("on") == home / ".cache" / "maxjax" / "compile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert compile_cache._base("") == home / "xdg" / "maxjax" / "compile"
    assert compile_cache._base("~/mine") == home / "mine"
    assert compile_cache._base("mine") == Path.cwd() / "mine"


def test_a_folder_for_each_processor(monkeypatch, tmp_path):
    here = compile_cache._folder(tmp_path)
    assert here == compile_cache._folder(tmp_path)
    monkeypatch.setattr(compile_cache, "_processor", lambda: "another")
    assert compile_cache._folder(tmp_path) != here


def test_the_processor(monkeypatch):
    assert compile_cache._processor() == compile_cache._processor() != ""

    def absent(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", absent)
    done = subprocess.CompletedProcess([], 0, "machdep.cpu.brand_string: Apple M1\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert "Apple M1" in compile_cache._processor()
    monkeypatch.setattr(subprocess, "run", absent)
    assert compile_cache._processor() != ""


def test_a_jaxlib_that_prints(monkeypatch):
    assert compile_cache._reason_against() is None
    monkeypatch.setattr(jaxlib.version, "__version_info__", (0, 10, 1))
    monkeypatch.setattr(compile_cache, "_processor", lambda: "flags: avx2 avx512f")
    assert "stderr" in str(compile_cache._reason_against())
    monkeypatch.setattr(compile_cache, "_processor", lambda: "flags: avx2")
    assert compile_cache._reason_against() is None


def test_the_longest_unused_go_first(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 250)
    folders = [tmp_path / "jax1-jaxlib1-x86_64-0", tmp_path / "jax2-jaxlib2-x86_64-0"]
    for age in range(4):
        path = folders[age % 2] / f"jit_f-{age}-cache"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    (folders[0] / "notes").write_bytes(bytes(1000))
    (tmp_path / "others-cache").write_bytes(bytes(1000))
    compile_cache._delete_excess(tmp_path)
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["checked", "jit_f-0-cache", "jit_f-1-cache", "notes", "others-cache"]


def test_entries_are_counted_once_an_hour(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 0)
    entry = tmp_path / "jax1-jaxlib1-x86_64-0" / "jit_f-0-cache"
    entry.parent.mkdir()
    compile_cache._delete_excess(tmp_path)
    entry.write_bytes(b"1")
    compile_cache._delete_excess(tmp_path)
    assert entry.exists()
    before = time.time() - compile_cache.SECONDS_BETWEEN_CHECKS - 1
    os.utime(tmp_path / "checked", (before, before))
    compile_cache._delete_excess(tmp_path)
    assert not entry.exists()
    entry.write_bytes(b"1")
    os.utime(tmp_path / "checked", (4e9, 4e9))  # by a clock that was wrong
    compile_cache._delete_excess(tmp_path)
    assert not entry.exists()
