"""Build script of the CPU kernels: one shared library that does not depend on Python.

``pip install`` runs this as a hook of hatchling; without a C++ compiler maxjax is installed without
the library. XLA's headers are in ``include/``. To build by hand:
``python maxjax/kernels/cpu/build.py [--sanitize address,undefined] [--output PATH]``.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HEADERS = HERE / "include"
LIBRARY = HERE / f"libmaxjax_cpu.{'dylib' if sys.platform == 'darwin' else 'so'}"

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
_AMX = ["-mamx-tile", "-mamx-int8", "-mamx-bf16"]
_CLMUL = ["-msse4.1", "-mpclmul"]
# The encoders of blocks give the same bytes on every processor, so no operations may be fused.
_EXACT = ["-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
# The source files for all architectures, each with its compiler flags.
_EVERYWHERE: dict[str, list[str]] = {
    "handlers.cc": [], "packed_handler.cc": [], "delta_handler.cc": [], "ssd_handler.cc": [],
    "cache_handler.cc": [], "level_portable.cc": [], "crc.cc": [], "encode.cc": _EXACT,
}  # fmt: skip
# The source files for each architecture, each with its compiler flags for instruction sets. The
# level is chosen when the library is loaded, so one library serves all processors.
SOURCES: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        **_EVERYWHERE,
        "level_avx2.cc": _AVX2,
        "level_avxvnni.cc": [*_AVX2, "-mavxvnni"],
        "level_avx512.cc": _AVX512,
        "level_avx512vnni.cc": [*_AVX512, "-mavx512vnni"],
        "level_avx512bf16.cc": [*_AVX512, "-mavx512vnni", "-mavx512bf16"],
        "level_amx.cc": [*_AVX512, "-mavx512vnni", "-mavx512bf16", *_AMX],
        "level_crc_clmul.cc": _CLMUL,
        "level_crc_wide.cc": [*_AVX512, *_CLMUL, "-mvpclmulqdq"],
        "level_encode_avx2.cc": [*_AVX2, *_EXACT],
        "level_encode_avx512.cc": [*_AVX512, *_EXACT],
    },
    "aarch64": {
        **_EVERYWHERE,
        "level_neon.cc": [],
        "level_neondot.cc": ["-march=armv8.2-a+dotprod"],
        "level_crc_arm.cc": [],
    },
}
# zig selects instruction sets by -mcpu.
_ZIG = {"-march=armv8.2-a+dotprod": "-mcpu=generic+dotprod"}
_SAME = {"amd64": "x86_64", "arm64": "aarch64"}

# Levels must not share inline functions (hidden visibility, no exceptions): the linker would keep
# one copy of each, which may use instructions that the processor does not have.
_FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden".split()
_LEVEL_FLAGS = ["-fno-exceptions", "-fno-rtti"]
_DARWIN = sys.platform == "darwin"
_SHARED = "-dynamiclib -undefined dynamic_lookup".split() if _DARWIN else ["-shared"]


def compiler() -> list[str]:
    """The C++ compiler: ``$CXX``, or the first of c++, g++ and clang++ that is installed.

    Raises:
        FileNotFoundError: there is no compiler.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise FileNotFoundError(f"no C++ compiler{f' (CXX={shlex.join(wanted)})' if wanted else ''}")


def build(
    output: Path = LIBRARY,
    cxx: list[str] | None = None,
    machine: str | None = None,
    extra: list[str] | None = None,
) -> Path:
    """Compile and link the library, and move it to ``output`` when it is complete.

    A process that has loaded the old library keeps using that one.

    Args:
        output: path of the library.
        cxx: the compiler and its first arguments; None: :func:`compiler`.
        machine: the architecture, for example "aarch64"; None: that of this machine.
        extra: further flags for the compiler and the linker.

    Raises:
        FileNotFoundError: there is no compiler.
        subprocess.CalledProcessError: the compiler failed; ``stderr`` has its messages.
    """
    cxx, extra = cxx or compiler(), list(extra or [])
    machine = (machine or platform.machine()).lower()
    sources = SOURCES.get(_SAME.get(machine, machine), _EVERYWHERE)
    # Linked in the same folder, so that the move is atomic.
    linked = output.with_name(f"{os.getpid()}.{output.name}")
    with tempfile.TemporaryDirectory() as folder:
        objects = {name: Path(folder) / f"{name}.o" for name in sources}
        run = lambda name: compile_one(name, objects[name], cxx, [*sources[name], *extra])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, sources))
        try:
            _run([*cxx, *_SHARED, *extra, *map(str, objects.values()), "-o", str(linked)])
            os.replace(linked, output)
        finally:
            linked.unlink(missing_ok=True)
    return output


def compile_one(name: str, output: Path, cxx: list[str], extra: list[str]) -> None:
    """Compile one file of :data:`SOURCES` with ``extra`` flags; raises as :func:`build` does."""
    if {"zig", "ziglang"} & {Path(word).name for word in cxx}:
        extra = [_ZIG.get(flag, flag) for flag in extra]
    flags = _FLAGS + (_LEVEL_FLAGS if name.startswith("level") else []) + extra
    # The headers' messages contain their paths; this keeps the build folder out of the library.
    flags += [f"-ffile-prefix-map={HEADERS}=include", f"-isystem{HEADERS}"]
    _run([*cxx, *flags, "-c", str(HERE / name), "-o", str(output)])


def _run(command: list[str]) -> None:
    # Compiler messages are in the user's language, and not always in the locale's encoding.
    subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")


def try_build(output: Path, machine: str | None = None) -> str | None:
    """Replace ``output`` by a newly built library; ``machine`` is as for :func:`build`.

    With ``MAXJAX_BUILD_KERNELS=0`` the library is not built.

    Returns:
        The reason why there is no library, or None if it was built.
    """
    try:
        output.unlink(missing_ok=True)  # no library is better than one of older sources
        if os.environ.get("MAXJAX_BUILD_KERNELS") == "0":
            return "MAXJAX_BUILD_KERNELS=0"
        build(output, machine=machine)
    except subprocess.CalledProcessError as error:
        return f"{shlex.join(error.cmd)} says: {error.stderr.strip()[-2000:]}"
    except (OSError, ValueError) as error:  # ValueError: a CXX with one quote
        return str(error)
    return None


def _hook() -> Any:
    from hatchling.builders.hooks.plugin import interface  # pyright: ignore[reportMissingImports]

    class KernelsHook(interface.BuildHookInterface):
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel":
                return
            # An editable installation uses the library beside its sources.
            self.folder = None if version == "editable" else tempfile.mkdtemp()
            output = LIBRARY if self.folder is None else Path(self.folder) / LIBRARY.name
            # scripts/build_wheels.py compiles for other machines.
            other = os.environ.get("MAXJAX_WHEEL_PLATFORM")
            target = other or sysconfig.get_platform()
            why = try_build(output, other and other.removeprefix("linux_"))
            if why is not None and other:
                raise RuntimeError(f"the kernels for {other} were not built: {why}")
            if why is not None:
                self.app.display_warning(f"maxjax is installed without its CPU kernels: {why}")
                return
            if self.folder is not None:
                place = LIBRARY.relative_to(HERE.parent.parent.parent)
                build_data["force_include"][str(output)] = str(place)
            tag = target.replace("-", "_").replace(".", "_")
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{tag}"

        def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
            if folder := getattr(self, "folder", None):
                shutil.rmtree(folder, ignore_errors=True)

    return KernelsHook


def get_build_hook() -> Any:
    """The build hook; hatchling calls this function by name."""
    return _hook()


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description="Build the CPU kernels of maxjax.")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="where the library goes")
    parser.add_argument("--sanitize", help="what to check at run time: address,undefined")
    options = parser.parse_args()
    extra = []
    if options.sanitize:
        extra = [f"-fsanitize={options.sanitize}", "-fno-sanitize-recover=all", "-g"]
    try:
        print(build(options.output, extra=extra))
    except subprocess.CalledProcessError as error:
        print(shlex.join(error.cmd), error.stderr, sep="\n", file=sys.stderr)
        return 1
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
