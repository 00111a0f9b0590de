"""The library of CPU kernels: what is compiled, where it is kept, and what is said where it cannot be."""

import contextlib
import ctypes
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import jax.ffi
import pytest

from maxjax import native_library as build
from maxjax.cli import application
from maxjax.kernels import native

ROOT = Path(__file__).resolve().parent.parent
NEON_CHECK = ROOT / "scripts" / "neon_check.py"


@pytest.fixture
def commands(monkeypatch):
    """Runs none of the compiler's commands, but makes the files they are to make; lists them."""
    ran = []

    def run(command):
        ran.append(command)
        Path(command[-1]).write_text("compiled")

    monkeypatch.setattr(build, "_run", run)
    monkeypatch.setattr(build, "compiler", lambda: ["cxx"])
    return ran


def _compiler(folder, text):
    """A compiler that is a shell script."""
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# --- what is run

X86 = {
    "portable",
    "avx2",
    "avxvnni",
    "avx512",
    "avx512vnni",
    "avx512bf16",
    "amx",
    "crc_clmul",
    "crc_wide",
}
X86 |= {"encode_avx2", "encode_avx512"}


@pytest.mark.parametrize(
    "machine, levels",
    [
        ("x86_64", X86),
        ("AMD64", X86),
        ("aarch64", {"portable", "neon", "neondot", "crc_arm"}),
        ("arm64", {"portable", "neon", "neondot", "crc_arm"}),
        ("riscv64", {"portable"}),
    ],
)
def test_every_processor_has_its_levels(machine, levels, commands, tmp_path):
    assert build.build(tmp_path / "library.so", machine=machine) == tmp_path / "library.so"
    *compiles, link = commands
    sources = {Path(next(a for a in c if a.endswith(".cc"))).name for c in compiles}
    plain = {"xla_handlers.cc", "crc.cc", "encode.cc"}
    assert sources == plain | {*(f"level_{level}.cc" for level in levels)}
    assert set(link) >= {c[-1] for c in compiles}
    assert [path.name for path in tmp_path.iterdir()] == ["library.so"]


def test_only_a_level_may_use_more_than_every_processor_has(commands, tmp_path):
    build.build(tmp_path / "library.so", machine="x86_64")
    for command in commands:
        beyond = [flag for flag in command if flag.startswith("-m")]
        sources = [part for part in command if part.endswith(".cc")]
        beyond_all = ("level_avx", "level_amx", "level_crc", "level_encode")
        assert bool(beyond) == any(part in s for s in sources for part in beyond_all)


@pytest.mark.parametrize(
    ("features", "levels"),
    [
        ("avx2 fma f16c sse4_1 pclmulqdq", {"avx2", "encode_avx2", "crc_clmul"}),
        ("avx2 fma f16c avx_vnni", {"avxvnni", "encode_avx2"}),
        ("avx512f avx512bw avx512dq avx512vl avx2 fma f16c", {"avx512", "encode_avx512"}),
        ("sse4_1", set()),
    ],
)
def test_only_the_best_levels_of_a_processor_are_compiled_at_first_use(features, levels):
    files = build.sources("x86_64", frozenset(features.split()))
    assert {name for name in files if name.startswith("level")} == {
        f"level_{level}.cc" for level in levels | {"portable"}
    }
    has = {flag for flags in files.values() for flag in flags if flag.startswith("-DMAXJAX_HAS_")}
    assert has == {f"-DMAXJAX_HAS_LEVEL_{level.upper()}" for level in levels}


def test_this_processor_has_the_level_that_is_compiled_for_it():
    if build.processor_features() is None:
        pytest.skip("the instruction sets of this processor are not known")
    wanted = [
        name for name in build.sources(features=build.processor_features()) if "level" in name
    ]
    if native.library() is None:
        pytest.skip("there is no C++ compiler")
    assert f"level_{native.levels()[0]}.cc" in wanted


def test_flags_of_the_caller_reach_compiler_and_linker(commands, tmp_path):
    build.build(tmp_path / "library.so", extra=["-fsanitize=address"])
    for command in commands:
        assert command[0] == "cxx" and "-fsanitize=address" in command


def test_every_source_is_compiled_somewhere():
    compiled = {name for machine in ("x86_64", "aarch64") for name in build.sources(machine)}
    included = {path.name for path in build.SOURCES.glob("*_handler.cc")} | {"handlers.cc"}
    assert compiled | included == {path.name for path in build.SOURCES.glob("*.cc")}
    text = (build.SOURCES / "xla_handlers.cc").read_text()
    assert included == {*re.findall('#include "(.*)"', text)}


def test_the_compiler_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("CXX", "env LANG=C c++")
    assert build.compiler() == ["env", "LANG=C", "c++"]
    monkeypatch.setattr(build.shutil, "which", lambda name: name == "g++")
    monkeypatch.setenv("CXX", " ")
    assert build.compiler() == ["g++"]


# --- where it is kept, and why there is none


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """A cache without a library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(build.FILE_VARIABLE, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "PACKAGED", tmp_path / "none")
    return tmp_path / "cache" / "maxjax" / "kernels"


@pytest.fixture
def without_compilers(own_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


def test_it_is_compiled_once_and_kept(own_cache, commands, monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: [sys.executable])
    assert build.find() is None
    path, why = build.find_or_build()
    assert path is not None and path.is_relative_to(own_cache) and not why
    assert path.read_text() == "compiled" and build.find() == path
    commands.clear()
    assert build.find_or_build() == (path, "") and not commands


@pytest.mark.parametrize("change", ["source", "jaxlib", "compiler", "processor"])
def test_a_change_of_what_it_is_made_of_compiles_it_again(change, own_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", sys.executable)
    before = build.cached_path()
    if change == "source":
        shutil.copytree(build.SOURCES, tmp_path / "sources")
        monkeypatch.setattr(build, "SOURCES", tmp_path / "sources")
        assert build.cached_path() == before
        (tmp_path / "sources" / "level.h").write_text("other")
    elif change == "jaxlib":
        monkeypatch.setattr(build, "version", lambda _: "1000.0.0")
    elif change == "compiler":
        monkeypatch.setenv("CXX", f"{sys.executable} -x")
    else:
        monkeypatch.setattr(build, "processor_features", lambda: frozenset({"avx2"}))
    assert build.cached_path() != before


def test_the_package_and_the_variable_come_first(own_cache, commands, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "compiler", lambda: [sys.executable])
    build.find_or_build()
    packaged = tmp_path / "packaged.so"
    packaged.write_text("")
    monkeypatch.setattr(build, "PACKAGED", packaged)
    assert build.find() == packaged
    monkeypatch.setenv(build.FILE_VARIABLE, "other.so")
    assert build.find() == Path("other.so")


def test_a_library_stays_when_the_compiler_goes(own_cache, commands, monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: [sys.executable])
    path, _ = build.find_or_build()

    def gone():
        raise FileNotFoundError("no C++ compiler")

    monkeypatch.setattr(build, "compiler", gone)
    assert build.find() == path


def test_a_folder_that_others_may_write_to_is_not_used(own_cache, commands, monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: [sys.executable])
    path, _ = build.find_or_build()
    assert path is not None
    path.parent.chmod(0o777)
    assert build.find() is None
    assert "others may write" in build.find_or_build()[1]


def test_a_library_in_a_folder_of_ones_own_choice(own_cache, commands, capsys, tmp_path):
    command = ["kernels", "build", "--output", str(tmp_path / "mine.so")]
    assert application.main(command) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mine.so'}\n"
    assert (tmp_path / "mine.so").read_text() == "compiled" and not own_cache.exists()


def test_without_a_compiler(without_compilers):
    assert build.find_or_build() == (None, "no C++ compiler")


@pytest.mark.parametrize("command", ["/nonexistent", "/nonexistent -O3", "nonexistent"])
def test_without_the_compiler_that_is_asked_for(command, own_cache, monkeypatch):
    monkeypatch.setenv("CXX", command)
    assert build.find_or_build() == (None, f"no C++ compiler (CXX={command})")


def test_with_half_a_command(own_cache, monkeypatch):
    monkeypatch.setenv("CXX", "c++ '-O3")
    assert "quot" in build.find_or_build()[1]


def test_a_compiler_that_fails_is_quoted_and_asked_once(own_cache, monkeypatch, tmp_path):
    cxx = _compiler(
        tmp_path, rf"echo >> {tmp_path}/runs; printf 'there is no f\374r\n' >&2; exit 3"
    )
    monkeypatch.setenv("CXX", cxx)  # in Latin-1
    path, why = build.find_or_build()
    assert path is None and why.startswith(cxx) and why.endswith("there is no f\ufffdr")
    runs = (tmp_path / "runs").read_text()
    path, why = build.find_or_build()
    assert path is None and "there is no f\ufffdr" in why and "delete" in why
    assert (tmp_path / "runs").read_text() == runs


def test_a_compiler_that_is_no_program(own_cache, monkeypatch, tmp_path):
    path = tmp_path / "cxx"
    path.write_bytes(b"\0")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    assert "Exec format" in build.find_or_build()[1]


def test_a_linker_that_fails_leaves_no_library(own_cache, monkeypatch, tmp_path):
    failing = 'for last; do :; done; echo > "$last"; case "$*" in *" -c "*) ;; *) exit 1; esac'
    monkeypatch.setenv("CXX", _compiler(tmp_path, failing))
    assert build.find_or_build()[0] is None
    assert {path.suffix for path in own_cache.rglob("*") if path.is_file()} == {"", ".failed"}


def test_a_folder_that_is_not_there(commands, tmp_path):
    with pytest.raises(OSError, match="none/"):
        build.build(tmp_path / "none" / "library.so")


def test_a_cache_that_cannot_be_made(own_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", sys.executable)
    (tmp_path / "cache").write_text("")
    path, why = build.find_or_build()
    assert path is None and "cache" in why


def test_the_command_line_says_why(without_compilers, tmp_path, capsys):
    assert application.main(["kernels", "build"]) == 1
    assert "no C++ compiler" in capsys.readouterr().err


# --- with a compiler


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A library and the folder with its objects."""
    try:
        build.compiler()
    except FileNotFoundError:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        kept = contextlib.nullcontext(str(folder))
        patch.setattr(build.tempfile, "TemporaryDirectory", lambda: kept)
        return build.build(folder / build.PACKAGED.name), folder


@pytest.mark.parametrize("is_new", [False, pytest.param(True, marks=pytest.mark.extra)])
def test_the_library_is_what_is_loaded(is_new, request):
    """The one that is installed; to compile it again takes as long as all other tests of kernels."""
    path = request.getfixturevalue("built")[0] if is_new else build.find_or_build()[0]
    if path is None:
        pytest.skip("there is no C++ compiler")
    library = ctypes.CDLL(str(path))
    for name in ("maxjax_levels", "maxjax_level", "maxjax_use_level", *native.TARGETS):
        assert hasattr(library, name)
    library.maxjax_levels.restype = ctypes.c_char_p
    assert library.maxjax_levels().decode().split(",")[-1] == "portable"


def test_the_library_does_not_say_where_it_was_made():
    path, _ = build.find_or_build()
    if path is None:
        pytest.skip("there is no C++ compiler")
    data = path.read_bytes()
    for folder in (jax.ffi.include_dir(), build.SOURCES, Path.home()):
        assert str(folder).encode() not in data


@pytest.mark.extra
@pytest.mark.skipif(shutil.which("nm") is None or sys.platform == "darwin", reason="needs nm")
def test_levels_share_no_functions(built):
    """The linker keeps one copy of what several have: it might be one for another processor."""
    objects = sorted(built[1].glob("level_*.o"))
    assert objects
    for path in objects:
        lines = subprocess.check_output(["nm", path], text=True).splitlines()
        symbols = [line.split()[-2:] for line in lines]
        shared = [name for kind, name in symbols if kind in "WwVvu" and "DW.ref" not in name]
        assert not shared, path.name


# --- for ARM


def test_zig_is_told_the_instruction_set_in_its_own_words(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(build, "_run", commands.append)
    flags = build.sources("aarch64")["level_neondot.cc"]
    for cxx in (["zig", "c++"], ["python", "-m", "ziglang", "c++"], ["g++"]):
        build.compile_one("level_neondot.cc", tmp_path / "level.o", cxx, flags)
    found = [[word for word in command if word.startswith("-m")] for command in commands]
    mcpu, march = "-mcpu=generic+dotprod", "-march=armv8.2-a+dotprod"
    assert found == [[mcpu], ["-m", mcpu], [march]]


def test_a_wheel_for_another_machine_has_kernels_or_is_not_made(monkeypatch):
    interface = types.SimpleNamespace(BuildHookInterface=object)
    plugin = types.SimpleNamespace(interface=interface)
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin", plugin)
    hook = build.get_build_hook()()
    hook.target_name = "wheel"
    monkeypatch.setenv("MAXJAX_WHEEL_PLATFORM", "linux_aarch64")
    monkeypatch.setattr(build, "build", Mock(side_effect=RuntimeError("a mistake")))
    with pytest.raises(RuntimeError, match="linux_aarch64 were not built: a mistake"):
        hook.initialize("standard", {})


ZIG = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]


@pytest.mark.extra
def test_clang_takes_the_handlers_for_arm(tmp_path):
    flags = ["-Wall", "-Wextra", "-Werror"]
    build.compile_one("xla_handlers.cc", tmp_path / "handlers.o", ZIG, flags)
    assert (tmp_path / "handlers.o").read_bytes()[18] == 183  # EM_AARCH64


@pytest.mark.extra
@pytest.mark.parametrize("level", ["neon", "portable"])
def test_levels_for_arm_in_an_emulator(level):
    command = [sys.executable, str(NEON_CHECK), "--level", level]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
