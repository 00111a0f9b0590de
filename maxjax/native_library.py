"""The shared library of CPU kernels: where it is, and how it is compiled.

A wheel contains the library. An installation from source does not: it is compiled at first use, against the
headers of the installed jaxlib, and kept in the user's cache. Only the level (instruction set) of this processor is
compiled then, and a portable one. ``maxjax kernels build`` does this in advance.

``storage`` uses the library for checksums and encoders, ``kernels`` for arithmetic. It does not depend on Python.
hatchling runs this file too, outside of the package, to compile the library of a wheel; therefore the file imports
the package only inside functions.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Environment variable: "off" disables compiled code, the name of a level selects its kernels.
VARIABLE = "MAXJAX_KERNELS"
# Environment variable: path of a library to use instead of any other.
FILE_VARIABLE = "MAXJAX_KERNELS_LIBRARY"

_DARWIN = sys.platform == "darwin"
_SUFFIX = "dylib" if _DARWIN else "so"
SOURCES = Path(__file__).parent / "kernels" / "cpu"
# The library of a wheel.
PACKAGED = SOURCES / f"libmaxjax_kernels.{_SUFFIX}"

# Name of an instruction set in /proc/cpuinfo → flag of the compiler.
_FLAGS = {
    "avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c", "avx_vnni": "-mavxvnni",
    "avx512f": "-mavx512f", "avx512bw": "-mavx512bw", "avx512dq": "-mavx512dq", "avx512vl": "-mavx512vl",
    "avx512_vnni": "-mavx512vnni", "avx512_bf16": "-mavx512bf16",
    "amx_tile": "-mamx-tile", "amx_int8": "-mamx-int8", "amx_bf16": "-mamx-bf16",
    "sse4_1": "-msse4.1", "pclmulqdq": "-mpclmul", "vpclmulqdq": "-mvpclmulqdq",
    "asimddp": "-march=armv8.2-a+dotprod",
}  # fmt: skip
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c")
_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
_CLMUL = ("sse4_1", "pclmulqdq")
# The source files for all processors.
_ALWAYS = ("xla_handlers.cc", "level_portable.cc", "crc.cc", "encode.cc")
# For each architecture the source files with a level, in groups, the best first: the instruction sets that each
# needs. When the library is loaded, it uses the best level that it has and the processor supports.
_LEVELS: dict[str, list[dict[str, Sequence[str]]]] = {
    "x86_64": [
        {
            "level_amx.cc": (*_BF16, "amx_tile", "amx_int8", "amx_bf16"),
            "level_avx512bf16.cc": _BF16,
            "level_avx512vnni.cc": (*_AVX512, "avx512_vnni"),
            "level_avx512.cc": _AVX512,
            "level_avxvnni.cc": (*_AVX2, "avx_vnni"),
            "level_avx2.cc": _AVX2,
        },
        {"level_encode_avx512.cc": _AVX512, "level_encode_avx2.cc": _AVX2},
        {"level_crc_wide.cc": (*_AVX512, *_CLMUL, "vpclmulqdq")},
        {"level_crc_clmul.cc": _CLMUL},
    ],
    "aarch64": [
        {"level_neondot.cc": ("asimddp",), "level_neon.cc": ()},
        {"level_crc_arm.cc": ()},
    ],
}
_SAME = {"amd64": "x86_64", "arm64": "aarch64"}
# zig selects instruction sets by -mcpu.
_ZIG = {"-march=armv8.2-a+dotprod": "-mcpu=generic+dotprod"}

# Levels must not share inline functions (hidden visibility, no exceptions): the linker would keep
# one copy of each, which may use instructions that the processor does not have.
_ALL_FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden".split()
_LEVEL_FLAGS = ["-fno-exceptions", "-fno-rtti"]
# The encoders of blocks give the same bytes on every processor, so no operations may be fused.
_EXACT = ["-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
_SHARED = "-dynamiclib -undefined dynamic_lookup".split() if _DARWIN else ["-shared"]


# --- finding it -----------------------------------------------------------------------------


def find() -> Path | None:
    """Return the path of the library; None if it is not compiled yet.

    It is the file that ``MAXJAX_KERNELS_LIBRARY`` names, the one in the package, or the one in the user's cache.
    """
    if given := os.environ.get(FILE_VARIABLE):
        return Path(given)
    if PACKAGED.exists():
        return PACKAGED
    try:
        path = cached_path()
        from .cache_folder import unsafe_reason

        return path if path.exists() and not unsafe_reason(path.parent) else None
    except (OSError, RuntimeError, ValueError):  # no compiler, no home directory
        return None


def find_or_build() -> tuple[Path | None, str]:
    """Return the path of the library, which is compiled if necessary; or None, and the reason.

    Compiling takes about half a minute and is done once for an installation and kind of processor. Other processes
    wait for the one that compiles. A failure is remembered too.
    """
    found = find()
    if found is not None:
        return found, ""
    try:
        return build_cached(), ""
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a CXX with one quote
        return None, str(error)


def function(
    name: str, level: str, result: Any, arguments: Sequence[Any], *, compile: bool
) -> tuple[Callable[..., int], str] | None:
    """Return a function of the library, and the level it runs at; None without the library.

    Args:
        name, level: names of the function, and of the one that tells the level.
        result, arguments: types of ``ctypes``.
        compile: whether to compile the library if it is not yet.
    """
    if os.environ.get(VARIABLE) == "off":
        return None
    path = find_or_build()[0] if compile else find()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))  # its functions release the GIL
        found, told = getattr(library, name), getattr(library, level)
    except (OSError, AttributeError):
        return None
    found.restype, found.argtypes, told.restype = result, list(arguments), ctypes.c_char_p
    return found, told().decode()


def cached_path() -> Path:
    """Return the path of the library for this processor in the user's cache, whether it exists or not.

    Raises:
        FileNotFoundError: there is no compiler, and none has compiled the library before.
    """
    from .cache_folder import cache_folder

    folder = cache_folder("kernels") / _digest(_sources_and_headers())
    machine, features = platform.machine().lower(), processor_features()
    name = hashlib.sha256("|".join([machine, *sorted(features or [])]).encode()).hexdigest()[:8]
    try:
        cxx = compiler()
    except FileNotFoundError:
        # The compiler may have been removed since, as in the last stage of a container image.
        if there := sorted(folder.glob(f"{name}-*.{_SUFFIX}")):
            return there[0]
        raise
    return folder / f"{name}-{_digest(_identity(cxx))}.{_SUFFIX}"


def build_cached(every_level: bool = False) -> Path:
    """Compile the library into the user's cache, unless it is there, and return its path.

    Args:
        every_level: whether to compile the levels of all processors of this architecture.

    Raises:
        FileNotFoundError: there is no compiler.
        RuntimeError: the compiler fails, or failed before; the message quotes it.
        OSError: the cache cannot be written to.
    """
    from .cache_folder import make_private, unsafe_reason
    from .progress import task

    path = cached_path()
    make_private(path.parent)
    if reason := unsafe_reason(path.parent):
        raise PermissionError(reason)
    failure = path.with_suffix(".failed")
    with open(path.parent / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and not every_level:
            return path
        if failure.exists() and not every_level:
            raise RuntimeError(f"they did not compile: {failure.read_text()}; delete {failure}")
        with task("compiling CPU kernels for this processor, once"):
            try:
                return build(path, features=None if every_level else processor_features())
            except RuntimeError as error:
                failure.write_text(str(error))
                raise


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:12]


def _sources_and_headers() -> Iterable[bytes]:
    """What the library is made of: the sources, this file, and jaxlib, whose headers are compiled too."""
    for path in [*sorted(SOURCES.glob("*.cc")), *sorted(SOURCES.glob("*.h")), Path(__file__)]:
        yield path.read_bytes()
    yield version("jaxlib").encode()


def _identity(cxx: Sequence[str]) -> Iterable[bytes]:
    """What distinguishes a compiler from another one, without running it."""
    path = Path(shutil.which(cxx[0]) or cxx[0]).resolve()
    status = path.stat()
    yield shlex.join([str(path), *cxx[1:]]).encode()
    yield f"{status.st_size} {status.st_mtime_ns}".encode()


@cache
def processor_features() -> frozenset[str] | None:
    """Return the instruction sets of this processor as Linux names them; None if they are not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        # Every ARM processor of Apple's has dot products.
        return frozenset({"asimddp"}) if _DARWIN and platform.machine() == "arm64" else None
    words = {line.partition(":")[0].strip(): line.partition(":")[2].split() for line in lines}
    found = {*words.get("flags", []), *words.get("Features", [])} & set(_FLAGS)
    if "amx_tile" in found:
        # A process asks Linux before it uses the tiles: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA).
        arch_prctl, request, tile_data = 158, 0x1023, 18
        if ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) != 0:
            found -= {"amx_tile"}
    return frozenset(found)


# --- compiling it ---------------------------------------------------------------------------


def compiler() -> list[str]:
    """Return the C++ compiler: ``$CXX``, or the first of c++, g++ and clang++ that is installed.

    Raises:
        FileNotFoundError: there is no compiler.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise FileNotFoundError(f"no C++ compiler{f' (CXX={shlex.join(wanted)})' if wanted else ''}")


def sources(
    machine: str | None = None, features: frozenset[str] | None = None
) -> dict[str, list[str]]:
    """Return the files to compile, each with its flags.

    Args:
        machine: the architecture, for example "aarch64"; None: that of this machine.
        features: instruction sets, of which the best level is compiled; None compiles all levels.
    """
    machine = (machine or platform.machine()).lower()
    chosen: dict[str, Sequence[str]] = dict.fromkeys(_ALWAYS, ())
    for group in _LEVELS.get(_SAME.get(machine, machine), []):
        fitting = {
            name: needed
            for name, needed in group.items()
            if features is None or features.issuperset(needed)
        }
        chosen |= fitting if features is None else dict(list(fitting.items())[:1])
    defined = [
        f"-DMAXJAX_HAS_{name.removesuffix('.cc').upper()}" for name in chosen if name not in _ALWAYS
    ]
    flags = {}
    for name, needed in chosen.items():
        flags[name] = [*_ALL_FLAGS, *defined, *(_FLAGS[feature] for feature in needed)]
        if name.startswith("level"):
            flags[name] += _LEVEL_FLAGS
        if "encode" in name:
            flags[name] += _EXACT
    if features is not None:
        # Only a processor that has none of the levels would run it.
        flags["level_portable.cc"].append("-O1")
    return flags


def build(
    output: Path,
    *,
    machine: str | None = None,
    features: frozenset[str] | None = None,
    extra: Sequence[str] = (),
) -> Path:
    """Compile and link the library, and move it to ``output`` when it is complete.

    A process that has loaded the old library keeps using that one.

    Args:
        output: path of the library.
        machine: the architecture, for example "aarch64"; None: that of this machine.
        features: instruction sets, of which the best level is compiled; None compiles all levels.
        extra: further flags for the compiler and the linker.

    Raises:
        FileNotFoundError: there is no compiler.
        RuntimeError: the compiler failed; the message quotes it.
    """
    cxx, extra = compiler(), list(extra)
    # Linked in the same folder, so that the move is atomic.
    linked = output.with_name(f"{os.getpid()}.{output.name}")
    with tempfile.TemporaryDirectory() as folder:
        files = sources(machine, features)
        objects = {name: Path(folder) / f"{name}.o" for name in files}
        run = lambda name: compile_one(name, objects[name], cxx, [*files[name], *extra])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # What takes longest comes first.
            list(pool.map(run, sorted(files, key=_is_short)))
        try:
            _run([*cxx, *_SHARED, *extra, *map(str, objects.values()), "-o", str(linked)])
            os.replace(linked, output)
        finally:
            linked.unlink(missing_ok=True)
    return output


def _is_short(name: str) -> bool:
    return not name.startswith("level") or "crc" in name or "encode" in name


def compile_one(name: str, output: Path, cxx: Sequence[str], flags: Sequence[str]) -> None:
    """Compile one of the :func:`sources`; raises as :func:`build` does."""
    if {"zig", "ziglang"} & {Path(word).name for word in cxx}:
        flags = [_ZIG.get(flag, flag) for flag in flags]
    headers = _headers()
    # The headers' messages contain their paths; this keeps the folder out of the library.
    named = [f"-ffile-prefix-map={headers}=include", f"-isystem{headers}"]
    _run([*cxx, *flags, *named, "-c", str(SOURCES / name), "-o", str(output)])


def _headers() -> str:
    import jax.ffi

    # Compilers follow links, such as that of a virtual environment.
    return os.path.realpath(jax.ffi.include_dir())


def _run(command: list[str]) -> None:
    # Compiler messages are in the user's language, and not always in the locale's encoding.
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} says: {done.stderr.strip()[-2000:]}")


# --- as a program, and as a hook of hatchling -----------------------------------------------


def get_build_hook() -> Any:
    """Return the build hook; hatchling calls this function by name.

    It puts the library into a wheel if ``MAXJAX_WHEEL_PLATFORM`` names one, such as "linux_x86_64", as
    scripts/build_wheels.py does. Other wheels are pure Python.
    """
    from hatchling.builders.hooks.plugin import interface  # pyright: ignore[reportMissingImports]

    class KernelsHook(interface.BuildHookInterface):
        folder = None

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            target = os.environ.get("MAXJAX_WHEEL_PLATFORM")
            if self.target_name != "wheel" or not target:
                return
            self.folder = tempfile.mkdtemp()
            output = Path(self.folder) / PACKAGED.name
            try:
                build(output, machine=target.removeprefix("linux_"))
            except RuntimeError as error:
                raise RuntimeError(f"the kernels for {target} were not built: {error}") from error
            place = PACKAGED.relative_to(SOURCES.parent.parent.parent)
            build_data["force_include"][str(output)] = str(place)
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{target}"

        def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)

    return KernelsHook


def main() -> int:
    """Compile the library for tests: ``python -m maxjax.native_library --output PATH``."""
    global SOURCES
    parser = argparse.ArgumentParser(description="Compile all levels of the CPU kernels of maxjax.")
    parser.add_argument("--output", type=Path, required=True, help="where the library goes")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="folder of the C++ files")
    parser.add_argument("--sanitize", help="what to check at run time: address,undefined")
    options = parser.parse_args()
    SOURCES, extra = options.sources, []
    if options.sanitize:
        extra = [f"-fsanitize={options.sanitize}", "-fno-sanitize-recover=all", "-g"]
    try:
        print(build(options.output, extra=extra))
    except (OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
