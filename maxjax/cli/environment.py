"""``maxjax env``: versions, devices and caches of this installation, and its problems.

JAX silently runs on the CPU if it cannot use an accelerator; :func:`cpu_fallback` detects that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..columns import columns
from .terminal import warn

PACKAGES = (
    "maxjax jax jaxlib numpy ml_dtypes flax orbax-checkpoint safetensors tokenizers huggingface_hub"
).split()
# The plugin packages through which JAX uses an accelerator; listed if they are installed.
PLUGINS = "jax-cuda12-plugin jax-cuda13-plugin jax-rocm7-plugin libtpu".split()
VARIABLES = (
    "JAX_PLATFORMS JAX_ENABLE_X64 JAX_COMPILATION_CACHE_DIR MAXJAX_COMPILE_CACHE MAXJAX_KERNELS XLA_FLAGS "
    "CUDA_VISIBLE_DEVICES "
    "XLA_PYTHON_CLIENT_PREALLOCATE XLA_PYTHON_CLIENT_MEM_FRACTION HF_HOME HF_HUB_CACHE "
    "HF_HUB_OFFLINE"
).split()


def environment() -> dict[str, Any]:
    """Describes the installation: versions, devices, caches, kernels, variables and problems.

    It starts JAX's backend. Sizes are in bytes. ``problems`` is a list of sentences.

    Example:
        >>> sorted(environment())
        ['caches', 'devices', 'kernels', 'problems', 'variables', 'versions']
    """
    devices, problems = _devices()
    fallback = cpu_fallback(devices) if devices else None
    return {
        "versions": versions(),
        "devices": devices,
        "caches": _caches(),
        "kernels": _kernels(devices),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "problems": problems + ([fallback] if fallback else []),
    }


def versions() -> dict[str, str | None]:
    """The versions of packages (None if not installed), of Python and of the operating system."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found |= {name: _version(name) for name in PACKAGES}
    found |= {name: version for name in PLUGINS if (version := _version(name))}
    found["system"] = f"{platform.system()} {platform.machine()}"
    return found


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[list[dict[str, Any]], list[str]]:
    """The devices that JAX uses, and the reasons if there are none."""
    import jax

    from ..driver import memory_stats

    try:
        devices = jax.devices()
    except RuntimeError as error:  # JAX_PLATFORMS asks for a backend that does not start
        return [], [f"JAX has no device: {' '.join(str(error).split())}"]
    return [
        {
            "id": device.id,
            "platform": device.platform,
            "kind": device.device_kind,
            "memory": memory_stats(device).get("bytes_limit"),
        }
        for device in devices
    ], []


def _kernels(devices: list[dict[str, Any]]) -> dict[str, str]:
    """Which kernels run on the CPU, and on an accelerator if there is one."""
    from ..kernels import native
    from ..kernels.gpu import triton

    found = {"CPU": native.status(compile=False)}
    platforms = {device["platform"] for device in devices}
    if platforms & {"gpu", "cuda", "rocm"}:
        found["GPU, attention"] = triton.status()
    if "tpu" in platforms:
        found["TPU"] = "jnp"
    return found


def _caches() -> dict[str, str | None]:
    """The directories of downloaded models and compiled programs; None if they are not kept."""
    import jax
    from huggingface_hub import constants

    compiled = getattr(jax.config, "jax_compilation_cache_dir", None)
    return {
        "models (huggingface_hub)": str(constants.HF_HUB_CACHE),
        "compiled programs (jax)": None if compiled is None else str(compiled),
    }


def accelerator_signs(dev: Path = Path("/dev")) -> list[str]:
    """The signs that this machine has, or was set up for, a GPU or TPU."""
    signs = _nvidia_smi()
    signs += [str(path) for path in sorted(dev.glob("nvidia[0-9]*"))]
    plugins = [name for name in PLUGINS if _version(name)]
    signs += [f"the package {name}" for name in plugins]
    if "libtpu" in plugins:  # other accelerators use the same device names
        signs += [str(path) for path in sorted(dev.glob("accel[0-9]*"))]
    return signs


def _nvidia_smi() -> list[str]:
    """The GPUs that ``nvidia-smi -L`` lists, as "nvidia-smi (NVIDIA H100)"."""
    if shutil.which("nvidia-smi") is None:
        return []
    import subprocess

    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]
    names = {line.partition(": ")[2].partition(" (")[0] for line in lines}
    return [f"nvidia-smi ({name})" for name in sorted(names)] if done.returncode == 0 else []


def cpu_fallback(devices: list[dict[str, Any]]) -> str | None:
    """A sentence that says that JAX fell back to the CPU, and what to do; None if it did not."""
    if any(device["platform"] != "cpu" for device in devices):
        return None
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip() == "cpu":
        return None  # the user chose the CPU
    signs = accelerator_signs()
    if not signs:
        return None
    if any(_version(name) for name in PLUGINS):
        advice = "its plugin is installed but did not start: JAX_PLATFORMS=cuda (or tpu) shows why"
    else:
        advice = 'pip install "maxjax[cuda]" (or "maxjax[tpu]"), or set JAX_PLATFORMS=cpu'
    seen = ", ".join(signs)
    return f"JAX runs on the CPU although there seems to be an accelerator ({seen}): {advice}"


def env_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def env(options: argparse.Namespace) -> Iterable[str]:
    """Shows versions, devices and caches; warns when JAX silently runs on the CPU."""
    from ..graph import compile_cache
    from .environment import environment

    compile_cache.enable()
    found = environment()
    for problem in found["problems"]:
        warn(problem)
    return [json.dumps(found, indent=1)] if options.json else _env_lines(found)


def _env_lines(found: dict[str, Any]) -> Iterator[str]:
    yield from _section(
        "versions", [[k, v or "not installed"] for k, v in found["versions"].items()]
    )
    rows = [
        [f"{d['platform']}:{d['id']}", d["kind"], f"{d['memory']:,} bytes" if d["memory"] else ""]
        for d in found["devices"]
    ]
    yield from _section("devices", rows or [["none"]])
    yield from _section("caches", [[k, v or "none"] for k, v in found["caches"].items()])
    yield from _section("kernels", [[k, v] for k, v in found["kernels"].items()])
    if found["variables"]:
        yield from _section("variables", [[k, v] for k, v in found["variables"].items()])


def _section(title: str, rows: list[list[str]]) -> Iterator[str]:
    yield title
    yield from (f"  {line}" for line in columns(rows, right=set()))
