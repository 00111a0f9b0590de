"""The shared library of ``kernels/cpu``: finding it, registering it with XLA, choosing a level.

The library does not use Python: XLA calls the FFI targets that :func:`library` registers. It
contains the same kernels compiled for several instruction sets (levels) and uses the best one
that the processor supports.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax

# VARIABLE names the environment variable whose value is "off" (use the jnp forms) or a level.
from ..native_library import VARIABLE, find, find_or_build

_LOG = logging.getLogger("maxjax")

TARGETS = (
    "maxjax_matmul", "maxjax_packed_matmul", "maxjax_decode_attention", "maxjax_heads", "maxjax_delta",
    "maxjax_ssd", "maxjax_write_tokens", "maxjax_read_slots", "maxjax_read_pages",
)  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, registered with XLA; None, with one warning, if it is unusable or switched off.

    At first use in an installation from source, this compiles the library.
    """
    found, why = _open()
    if found is None:
        _LOG.warning("maxjax: %s; the jnp forms are used instead, which are slower on a CPU", why)
    return found


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "off":
        return None, f"the CPU kernels are off ({VARIABLE}=off)"
    path, why = find_or_build()
    if path is None:
        return None, f"the CPU kernels cannot be compiled ({why})"
    try:
        found = ctypes.CDLL(str(path))
        _declare(found)
        for name in TARGETS:
            target = jax.ffi.pycapsule(getattr(found, name))
            jax.ffi.register_ffi_target(name, target, platform="cpu")
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        return (
            None,
            f"the CPU kernels do not load ({reason}): delete {path}, or install maxjax again",
        )
    if wanted and not found.maxjax_use_level(wanted.encode()):
        there = found.maxjax_levels().decode().replace(",", ", ")
        return None, f"{VARIABLE}={wanted} is not available: this machine has {there}, and 'off'"
    return found, ""


def _declare(found: ctypes.CDLL) -> None:
    found.maxjax_levels.restype = found.maxjax_level.restype = ctypes.c_char_p
    found.maxjax_use_level.argtypes = [ctypes.c_char_p]
    found.maxjax_use_level.restype = ctypes.c_bool


def levels() -> list[str]:
    """Return the instruction sets that were compiled and that this processor supports, the best first.

    Example:
        >>> known = "amx avx512bf16 avx512vnni avx512 avxvnni avx2 neondot neon portable".split()
        >>> set(levels()) <= set(known)
        True
    """
    found, _ = _open()
    return [] if found is None else found.maxjax_levels().decode().split(",")


def status(*, compile: bool = True) -> str:
    """Return the level that matmuls use on a CPU, or why the jnp forms are used instead.

    Args:
        compile: whether the library is compiled if it is not there yet; otherwise "compiled at first use".
    """
    if not compile and os.environ.get(VARIABLE) != "off" and find() is None:
        return "compiled at first use (maxjax kernels build: now)"
    found, why = _open()
    return f"jnp ({why})" if found is None else found.maxjax_level().decode()


@contextmanager
def level(name: str) -> Iterator[None]:
    """Use the kernels of one level, in all threads and in programs that are compiled already.

    Raises:
        ValueError: the level is not one of :func:`levels`, or the library is missing.
    """
    found = library()
    before = None if found is None else found.maxjax_level()
    if found is None or not found.maxjax_use_level(name.encode()):
        raise ValueError(
            f"this machine has no CPU kernels of level {name!r}; it has {', '.join(levels()) or 'none'}"
        )
    try:
        yield
    finally:
        found.maxjax_use_level(before)
