"""Topologies: devices of a kind and number that this machine need not have, such as ``v5e:2x4``.

XLA's compilers for TPUs and GPUs run without the hardware. JAX makes devices of a topology, for
meshes; a program that is lowered for such a mesh compiles as for real devices, and cannot run.
"""

from __future__ import annotations

import glob
import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from ...errors import MissingCompilerError, UserInputError

_GIB = 1 << 30


class AcceleratorKind(NamedTuple):
    """A kind of device, with its manufacturer's figures.

    Attributes:
        platform: its platform in JAX.
        memory: bytes of memory of one device that a program can use.
        bandwidth: bytes per second that one device reads from its memory.
        link: bytes per second that one device sends to the others of its slice or host.
        parts: substrings of JAX's ``device_kind`` that identify such a device, in lower case.
        axes: number of axes of a topology.
        host: number of devices in one host.
    """

    platform: str
    memory: int
    bandwidth: float
    link: float
    parts: tuple[str, ...]
    axes: int
    host: int


# Bandwidth and links: Google's pages on TPU v5e, v5p and v6e; NVIDIA's data sheets of H100 SXM and H200.
# The link is what a device sends over all its links together, in one direction. Memory: of 16 and 32 GiB
# of a TPU, XLA's compiler gives programs 15.75 and 31.25. The order counts: "TPU v5 lite" is a v5e, "TPU
# v5" a v5p.
KINDS = {
    "v5e": AcceleratorKind("tpu", 63 * _GIB // 4, 819e9, 200e9, ("v5 lite", "v5e"), 2, 4),
    "v5p": AcceleratorKind("tpu", 95 * _GIB, 2765e9, 600e9, ("v5",), 3, 4),
    "v6e": AcceleratorKind("tpu", 125 * _GIB // 4, 1640e9, 448e9, ("v6 lite", "v6e"), 2, 4),
    "h200": AcceleratorKind("cuda", 141 * 10**9, 4800e9, 450e9, ("h200",), 1, 8),
    "h100": AcceleratorKind("cuda", 80 * 10**9, 3350e9, 450e9, ("h100",), 1, 8),
}
# Kinds for which no programs are compiled, and the bytes of their memory.
_MEMORY = {
    "gh200": 96 * 10**9,
    "v4": 32 * _GIB,
    "a100-sxm4-80gb": 80 * 10**9,
    "a100-sxm4-40gb": 40 * 10**9,
}
# Devices of the CPU, to try programs on: they have no memory of their own.
_CPU = AcceleratorKind("cpu", 0, 0.0, 0.0, ("cpu",), 1, 1 << 20)

# What XLA has to know about a Hopper GPU in order to compile for it.
_HOPPER = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: {cache} clock_rate_ghz: 1.98
  device_memory_size: {memory} cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {name}"
"""
_L2_CACHE = {"h200": 60 << 20, "h100": 50 << 20}


# The largest machines have some 10,000 TPUs or 100,000 GPUs; a plan compares meshes of all of them.
_MAX_DEVICES = 1_000_000


class Topology(NamedTuple):
    """A number of devices of one kind.

    Attributes:
        name: its name, such as ``"v5e:2x4"`` or ``"h200:8"``.
        kind: the kind of its devices.
        shape: number of devices along each axis.

    Example:
        >>> found = Topology.of("v5p:2x2x2")
        >>> found.kind.platform, found.shape, found.count
        ('tpu', (2, 2, 2), 8)
    """

    name: str
    kind: AcceleratorKind
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str) -> Topology:
        """The topology of a name; no compiler is needed.

        Raises:
            UserInputError: there is no such kind, it has another number of axes, or there are too many devices.
        """
        if not isinstance(name, str):
            raise TypeError(f"a topology is a str such as 'v5e:2x4', not {type(name).__name__}")
        label, colon, text = name.strip().lower().partition(":")
        kind = _CPU if label == "cpu" else KINDS.get(label)
        if kind is None:
            known = ", ".join([*KINDS, "cpu"])
            raise UserInputError(
                f"topology {name!r}: the kinds are {known}, as in v5e:2x4 or h200:8"
            )
        sizes = re.fullmatch(r"\d{1,6}(x\d{1,6})*", text if colon else "", re.ASCII)
        shape = tuple(map(int, text.split("x"))) if sizes else ()
        if len(shape) != kind.axes or 0 in shape:
            example = {1: "8", 2: "2x4", 3: "2x2x2"}[kind.axes]
            raise UserInputError(
                f"topology {name!r}: write the devices of {label} as {label}:{example}"
            )
        if math.prod(shape) > _MAX_DEVICES:
            raise UserInputError(f"topology {name!r} has more than {_MAX_DEVICES:,} devices")
        return cls(f"{label}:{text}", kind, shape)

    @property
    def count(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def memory(self) -> int | None:
        """Bytes of memory of one device; None for devices of the CPU."""
        return self.kind.memory or None

    def devices(self) -> list[Any]:
        """The devices, for a mesh.

        Raises:
            MissingCompilerError: the compiler is not installed, or does not load; the message says
                what to install.
            UserInputError: the compiler has no such topology, or the process has too few CPU devices.
        """
        if self.kind is _CPU:
            found = jax.devices("cpu")
            if len(found) < self.count:
                raise UserInputError(
                    f"{self.name}: this process has {len(found)} CPU devices: set JAX_NUM_CPU_DEVICES={self.count}"
                )
            return list(found[: self.count])
        make = self._tpus if self.kind.platform == "tpu" else self._gpus
        try:
            return list(make().devices)
        except jax.errors.JaxRuntimeError as error:
            text = " ".join(str(error).split())
            if "INVALID_ARGUMENT" in text:
                raise UserInputError(
                    f"{self.name} is no topology that the compiler knows: {text[:300]}"
                ) from error
            raise self._missing(f" It does not load: {text[:300]}") from error
        except (RuntimeError, OSError) as error:  # NotImplementedError is one of the former
            raise self._missing(f" ({' '.join(str(error).split())[:300]})") from error

    def _tpus(self) -> Any:
        library = _libtpu()
        if library is None:
            raise self._missing(
                f" TPU_LIBRARY_PATH is {os.environ['TPU_LIBRARY_PATH']}, where no file is."
                if "TPU_LIBRARY_PATH" in os.environ else ""
            )  # fmt: skip
        if not _has_tpus():  # without these variables libtpu tries to detect the machine
            for name, value in _NO_TPU.items():
                os.environ.setdefault(name, value)
            os.environ["TPU_LIBRARY_PATH"] = library
        return topologies.get_topology_desc(self.name, platform="tpu")

    def _gpus(self) -> Any:
        label = self.name.partition(":")[0]
        if not any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))):
            raise self._missing("")
        config = _HOPPER.format(
            bandwidth=self.kind.bandwidth, memory=self.kind.memory, cache=_L2_CACHE[label],
            name=label.upper(),
        )  # fmt: skip
        in_host = math.gcd(self.count, self.kind.host)
        return topologies.get_topology_desc(
            "", platform="cuda", target_config=config,
            topology=f"1x{self.count // in_host}x{in_host}",
        )  # fmt: skip

    def _missing(self, why: str) -> MissingCompilerError:
        if self.kind.platform == "tpu":
            return MissingCompilerError(
                f"{self.name} needs XLA's compiler for TPUs: pip install libtpu, or set TPU_LIBRARY_PATH "
                f"to its libtpu.so. No TPU is needed.{why}"
            )
        version = jax.__version__
        return MissingCompilerError(
            f"{self.name} needs XLA's compiler for NVIDIA GPUs: pip install --no-deps "
            f"jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} nvidia-cudnn-cu13. "
            f"No GPU is needed.{why}"
        )


_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip


def _has_tpus() -> bool:
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def _libtpu() -> str | None:
    """The path of libtpu.so; None if there is none."""
    given = os.environ.get("TPU_LIBRARY_PATH")
    if given is None:
        package = importlib.util.find_spec("libtpu")
        folders = (package and package.submodule_search_locations) or ()
        given = next((str(Path(folder) / "libtpu.so") for folder in folders), None)
    return given if given and os.path.exists(given) else None


def memory_of_kind(device: Any) -> int | None:
    """Bytes of memory of a device that does not report it, by the name of its kind; None if unknown."""
    name = str(getattr(device, "device_kind", "")).lower()
    known = {part: kind.memory for kind in KINDS.values() for part in kind.parts} | _MEMORY
    fitting = [part for part in known if part in name]
    return known[max(fitting, key=len)] if fitting else None
