"""kernels/cpu/build.py: what it compiles, and what it says where it cannot."""

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jaxlib
import pytest

from maxjax.kernels import native
from maxjax.kernels.cpu import build

ROOT = Path(__file__).resolve().parent.parent.parent
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
    plain = {
        "handlers.cc",
        "packed_handler.cc",
        "delta_handler.cc",
        "ssd_handler.cc",
        "cache_handler.cc",
        "crc.cc",
        "encode.cc",
    }
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


def test_flags_of_the_caller_reach_compiler_and_linker(commands, tmp_path):
    build.build(tmp_path / "library.so", cxx=["other", "-x"], extra=["-fsanitize=address"])
    for command in commands:
        assert command[:2] == ["other", "-x"] and "-fsanitize=address" in command


def test_every_source_is_compiled_somewhere():
    compiled = {name for sources in build.SOURCES.values() for name in sources}
    assert compiled == {path.name for path in build.HERE.glob("*.cc")}


def test_the_compiler_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("CXX", "env LANG=C c++")
    assert build.compiler() == ["env", "LANG=C", "c++"]
    monkeypatch.setattr(build.shutil, "which", lambda name: name == "g++")
    monkeypatch.setenv("CXX", " ")
    assert build.compiler() == ["g++"]


def _api(headers):
    text = (headers / "xla" / "ffi" / "api" / "c_api.h").read_text()
    return [
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR")
    ]


def test_the_installed_jaxlib_understands_our_headers():
    """A runtime takes libraries of its major version and of its own or an earlier minor version."""
    ours, theirs = _api(build.HEADERS), _api(Path(jaxlib.__file__).parent / "include")
    assert ours[0] == theirs[0] and ours[1] <= theirs[1]


# --- why there is none


@pytest.fixture
def without_compilers(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_without_a_compiler(without_compilers, tmp_path):
    assert build.try_build(tmp_path / "library.so") == "no C++ compiler"


@pytest.mark.parametrize("command", ["/nonexistent", "/nonexistent -O3", "nonexistent"])
def test_without_the_compiler_that_is_asked_for(command, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", command)
    assert build.try_build(tmp_path / "library.so") == f"no C++ compiler (CXX={command})"


def test_with_half_a_command(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "c++ '-O3")
    assert "quot" in str(build.try_build(tmp_path / "library.so"))


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    cxx = _compiler(tmp_path, r"printf 'there is no f\374r\n' >&2; exit 3")  # in Latin-1
    monkeypatch.setenv("CXX", cxx)
    why = build.try_build(tmp_path / "library.so")
    assert why is not None and why.startswith(cxx) and why.endswith("there is no f\ufffdr")


def test_a_compiler_that_is_no_program(monkeypatch, tmp_path):
    path = tmp_path / "cxx"
    path.write_bytes(b"\0")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    assert "Exec format" in str(build.try_build(tmp_path / "library.so"))


def test_a_linker_that_fails_leaves_nothing(monkeypatch, tmp_path):
    failing = 'for last; do :; done; echo > "$last"; case "$*" in *" -c "*) ;; *) exit 1; esac'
    monkeypatch.setenv("CXX", _compiler(tmp_path, failing))
    (tmp_path / "library.so").write_text("of other sources")
    assert build.try_build(tmp_path / "library.so")
    assert [path.name for path in tmp_path.iterdir()] == ["cxx"]


def test_a_folder_that_is_not_there(commands, tmp_path):
    assert "none/" in str(build.try_build(tmp_path / "none" / "library.so"))


def test_it_can_be_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv("MAXJAX_BUILD_KERNELS", "0")
    (tmp_path / "library.so").write_text("of other sources")
    assert build.try_build(tmp_path / "library.so") == "MAXJAX_BUILD_KERNELS=0"
    assert not list(tmp_path.iterdir())


def test_the_command_line_says_why(without_compilers):
    command = [sys.executable, build.__file__, "--output", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no C++ compiler\n")


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
        return build.build(folder / build.LIBRARY.name), folder


@pytest.mark.slow
@pytest.mark.parametrize("is_new", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_the_library_is_what_is_loaded(is_new, request):
    """The one that is installed; to compile it again takes as long as all other tests of kernels."""
    path = request.getfixturevalue("built")[0] if is_new else build.LIBRARY
    if not path.exists():
        pytest.skip("there is no compiled library")
    library = ctypes.CDLL(str(path))
    for name in ("maxjax_levels", "maxjax_level", "maxjax_use_level", *native.TARGETS):
        assert hasattr(library, name)
    library.maxjax_levels.restype = ctypes.c_char_p
    assert library.maxjax_levels().decode().split(",")[-1] == "portable"


@pytest.mark.slow
def test_the_library_does_not_say_where_it_was_made():
    if not build.LIBRARY.exists():
        pytest.skip("there is no compiled library")
    data = build.LIBRARY.read_bytes()
    for folder in (build.HEADERS, build.HERE, Path.home()):
        assert str(folder).encode() not in data


@pytest.mark.slow
@pytest.mark.campaign
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
    flags = build.SOURCES["aarch64"]["level_neondot.cc"]
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
    monkeypatch.setattr(build, "try_build", lambda *_: "no compiler")
    with pytest.raises(RuntimeError, match="linux_aarch64 were not built: no compiler"):
        hook.initialize("standard", {})


ZIG = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]


@pytest.mark.campaign
@pytest.mark.slow
def test_clang_takes_the_handlers_for_arm(tmp_path):
    flags = ["-Wall", "-Wextra", "-Werror"]
    build.compile_one("handlers.cc", tmp_path / "handlers.o", ZIG, flags)
    assert (tmp_path / "handlers.o").read_bytes()[18] == 183  # EM_AARCH64


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("level", ["neon", "portable"])
def test_levels_for_arm_in_an_emulator(level):
    command = [sys.executable, str(NEON_CHECK), "--level", level]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
