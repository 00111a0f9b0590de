"""Builds the CPU kernels: one shared library that knows nothing of Python.

``pip install`` runs this as a hook of hatchling, with jaxlib in the build environment for
its headers; without a C++ compiler the installation goes on without the library. By hand:
``python maxjax/kernels/cpu/build.py [--sanitize address,undefined] [--output PATH]``.
"""

from __future__ import annotations

import argparse
import importlib.util
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
LIBRARY = HERE / f"libmaxjax_cpu.{'dylib' if sys.platform == 'darwin' else 'so'}"

_AVX2: list[str] = "-mavx2 -mfma -mf16c".split()
_AVX512: list[str] = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c".split()
# For each architecture the files and what each of them may use of the processor. What is
# used is chosen when the library is loaded, so that one library serves all.
SOURCES: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "handlers.cc": [],
        "level_portable.cc": [],
        "level_avx2.cc": _AVX2,
        "level_avx512.cc": _AVX512,
        "level_avx512bf16.cc": [*_AVX512, "-mavx512bf16"],
    },
    "aarch64": {"handlers.cc": [], "level_portable.cc": [], "level_neon.cc": []},
}
_OTHER = {"handlers.cc": [], "level_portable.cc": []}
_SAME = {"amd64": "x86_64", "arm64": "aarch64"}

# No exceptions and no sharing of inline functions between levels: the linker may keep any
# copy of those, also one for a processor that is not there.
_FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden".split()
_LEVEL_FLAGS = ["-fno-exceptions", "-fno-rtti"]


def compiler() -> list[str] | None:
    """The C++ compiler: ``$CXX``, or the first there is; None without one."""
    if os.environ.get("CXX"):
        command = shlex.split(os.environ["CXX"])
        return command if shutil.which(command[0]) else None
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    return None


def include_dir() -> Path:
    """XLA's headers, which jaxlib brings along.

    Raises:
        FileNotFoundError: There is no jaxlib.
    """
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("jaxlib, whose headers are needed to build the CPU kernels")
    return Path(spec.submodule_search_locations[0]) / "include"


def build(
    output: Path = LIBRARY,
    cxx: list[str] | None = None,
    machine: str | None = None,
    extra: list[str] | None = None,
) -> Path:
    """Compiles and links the library, and puts it in its place when it is whole.

    Args:
        output: Where it goes.
        cxx: The compiler and its first arguments.
        machine: The architecture, if it is not that of this machine.
        extra: More flags, for the compiler and the linker.

    Raises:
        FileNotFoundError: There is no compiler, or no jaxlib.
        subprocess.CalledProcessError: It fails; its ``stderr`` has what the compiler says.
    """
    cxx, extra = cxx or compiler(), list(extra or [])
    if cxx is None:
        raise FileNotFoundError("a C++ compiler")
    machine = (machine or platform.machine()).lower()
    sources = SOURCES.get(_SAME.get(machine, machine), _OTHER)
    headers = include_dir()
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        objects = {name: Path(folder) / f"{name}.o" for name in sources}

        def compile_one(name: str) -> None:
            flags = _FLAGS + (_LEVEL_FLAGS if name.startswith("level") else []) + sources[name]
            _run([*cxx, *flags, *extra, f"-isystem{headers}", "-c", str(HERE / name), "-o",
                  str(objects[name])])  # fmt: skip

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, sources))
        shared = (
            ["-dynamiclib", "-undefined", "dynamic_lookup"]
            if sys.platform == "darwin"
            else ["-shared"]
        )
        linked = Path(folder) / "linked"
        _run([*cxx, *shared, *extra, *map(str, objects.values()), "-o", str(linked)])
        os.replace(linked, output)
    return output


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def try_build(output: Path) -> str | None:
    """Builds it; why there is none otherwise. ``MAXJAX_BUILD_KERNELS=0`` leaves it out."""
    if os.environ.get("MAXJAX_BUILD_KERNELS") == "0":
        return "MAXJAX_BUILD_KERNELS=0"
    try:
        build(output)
    except FileNotFoundError as error:
        return f"there is not {error}"
    except subprocess.CalledProcessError as error:
        return f"{shlex.join(error.cmd)} says: {error.stderr.strip()[-2000:]}"
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
            if version == "editable":
                LIBRARY.unlink(missing_ok=True)
            why = try_build(output)
            if why is not None:
                self.app.display_warning(f"maxjax is installed without its CPU kernels: {why}")
                return
            if self.folder is not None:
                place = LIBRARY.relative_to(HERE.parent.parent.parent)
                build_data["force_include"][str(output)] = str(place)
            tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{tag}"

        def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
            if folder := getattr(self, "folder", None):
                shutil.rmtree(folder, ignore_errors=True)

    return KernelsHook


def get_build_hook() -> Any:
    """What hatchling asks for."""
    return _hook()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build the CPU kernels of maxjax.")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="where the library goes")
    parser.add_argument("--sanitize", help="what to check at run time: address,undefined")
    options = parser.parse_args()
    extra = []
    if options.sanitize:
        extra = [f"-fsanitize={options.sanitize}", "-fno-sanitize-recover=all", "-g"]
    try:
        print(build(options.output, extra=extra))
    except FileNotFoundError as error:
        print(f"there is not {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(shlex.join(error.cmd), error.stderr, sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
