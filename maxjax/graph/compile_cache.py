"""The on-disk cache of compiled programs, which saves the next process from compiling them.

This is JAX's persistent compilation cache, switched on unless the user configured one, and never at
import.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import stat
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.experimental.compilation_cache import compilation_cache

from ..cache_folder import cache_folder, make_private, unsafe_reason

_LOG = logging.getLogger("maxjax")

VARIABLE = "MAXJAX_COMPILE_CACHE"
OFF = {"0", "off", "false", "no"}
DEFAULT = {"", "1", "on", "true", "yes"}
# Above this size the least recently used entries are deleted. Not by JAX's own
# jax_compilation_cache_max_size: it reads the whole directory before each write (18 ms at 500
# entries, 350 ms at 10000), and one entry left half-written ends all further writes.
MAX_BYTES = 4 << 30
SECONDS_BETWEEN_CHECKS = 3600
# Option → JAX's default, and the value that keeps everything, however small.
_THRESHOLDS = {
    "jax_persistent_cache_min_compile_time_secs": (1.0, 0.0),
    "jax_persistent_cache_min_entry_size_bytes": (0, -1),
}
# JAX warns about each entry that it cannot read (a process was killed, the disk was full) or write (the
# directory is gone), then compiles. As the user did not ask for this cache, it must not print
# warnings, nor stop a program under `-W error`.
_QUIET = (
    "ignore",
    re.compile("Error (reading|writing) persistent compilation cache entry for ", re.IGNORECASE),
    UserWarning,
    re.compile(r"jax\."),
    0,
)
# The fields of /proc/cpuinfo that determine which code XLA generates: those of x86, then those of ARM.
_CPU_FIELDS = {"vendor_id", "cpu family", "model", "flags"} | {
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
    "Features",
}

_lock = threading.Lock()
_decided = False
_ours: str | None = None


def enable() -> str | None:
    """Enables JAX's cache of compiled programs on disk, unless the user has configured it.

    Returns the directory of the cache, the user's or maxjax's, or None. Nothing is changed if the user
    has set ``jax_compilation_cache_dir`` or ``jax_compilation_cache_max_size``, or disabled
    ``jax_enable_compilation_cache``.

    The environment variable ``MAXJAX_COMPILE_CACHE`` is ``0`` for no cache, or the directory to
    use instead of ``maxjax/compile`` in the user's cache directory (``$XDG_CACHE_HOME``,
    ``~/.cache``; ``~/Library/Caches`` on macOS). It has a folder of mode 0700 for each version of JAX and
    kind of processor. At most 4 GiB are kept, checked when a process starts, once an hour.

    Compiled code is executed. Therefore a directory that belongs to another user, or that others may
    write to, is not used; the logger ``maxjax`` warns about it. There is also no cache if the directory
    cannot be created or written to, in a process that has called ``jax.distributed.initialize``, and
    with a jaxlib before 0.10.2 on AVX-512, which prints messages. This function never raises an
    error; calls after the first take microseconds.
    """
    global _decided, _ours
    with _lock:
        if not _decided:
            _decided = True
            _ours = _switch_on()
        enabled = _option("jax_enable_compilation_cache")
        in_force = (_option("jax_compilation_cache_dir") or None) if enabled else None
        if _ours and in_force != _ours:
            # The user has configured it since; without this, JAX would keep using the open cache.
            compilation_cache.reset_cache()
            _ours = None
        elif _ours and warnings.filters[:1] != [_QUIET]:
            # Again, because warnings.catch_warnings (as in each test of pytest) removes the filter.
            action, message, category, module, _ = _QUIET
            warnings.filterwarnings(action, message.pattern, category, module.pattern)
        return in_force


def _switch_on() -> str | None:
    if _user_decided():
        return None
    setting = os.environ.get(VARIABLE, "").strip()
    if setting.lower() in OFF:
        return None
    try:
        if reason := _reason_against():
            _LOG.debug("compiled programs are not cached: %s", reason)
            return None
        base = _base(setting)
        folder = _folder(base)
        if reason := unsafe_reason(base) or unsafe_reason(folder):
            _LOG.warning("compiled programs are not cached: %s (%s=0: never)", reason, VARIABLE)
            return None
        _delete_excess(base)
    except (OSError, RuntimeError) as error:
        level = logging.DEBUG if setting.lower() in DEFAULT else logging.WARNING
        _LOG.log(level, "compiled programs are not cached: %s", error)
        return None
    for name, (default, everything) in _THRESHOLDS.items():
        if _option(name) == default and name.upper() not in os.environ:
            jax.config.update(name, everything)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX opens its cache once: one that the user had set and unset again would stay open.
    compilation_cache.reset_cache()
    return str(folder)


def _user_decided() -> bool:
    return (
        _option("jax_compilation_cache_dir") is not None
        or not _option("jax_enable_compilation_cache")
        or _option("jax_compilation_cache_max_size") != -1
    )


def _option(name: str) -> Any:
    return getattr(jax.config, name)


def _reason_against() -> str | None:
    """The reason to leave the cache off in this process, or None."""
    if jax.distributed.is_initialized():
        # Only the first process writes entries. If its disk is not shared, it would later skip
        # compilations in which the other processes wait for it (autotuning on GPUs).
        return "this process is one of several"
    if jaxlib.version.__version_info__ < (0, 10, 2) and "avx512f" in _processor():
        return "this jaxlib prints two lines on stderr for each program it reads"
    return None


def _base(setting: str) -> Path:
    """The directory with links resolved; RuntimeError if there is no home directory."""
    if setting.lower() not in DEFAULT:
        if "://" in setting:
            raise RuntimeError(f"{setting} is not a directory; set JAX_COMPILATION_CACHE_DIR to it")
        return Path(setting).expanduser().resolve()
    return cache_folder("compile")


def _folder(base: Path) -> Path:
    """The folder in ``base`` for this version of JAX and this processor, created if necessary."""
    kind = hashlib.sha256(_processor().encode()).hexdigest()[:8]
    versions = f"jax{jax.__version__}-jaxlib{jaxlib.version.__version__}"
    folder = base / f"{versions}-{platform.machine()}-{kind}"
    make_private(folder)
    return folder


def _processor() -> str:
    """The kind of this machine's processor: XLA's code for another kind may crash here."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = _first_block(file)
            return "".join(x for x in lines if x.partition(":")[0].strip() in _CPU_FIELDS)
    except OSError:
        pass
    try:  # macOS
        command = ["/usr/sbin/sysctl", "machdep.cpu"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return platform.node()


def _first_block(lines: Iterator[str]) -> Iterator[str]:
    # The kernel generates the file line by line, and there may be hundreds of processors.
    for line in lines:
        if not line.strip():
            return
        yield line


def _delete_excess(base: Path) -> None:
    """Deletes empty entries, and the least recently used ones until at most MAX_BYTES are left.

    Not again within SECONDS_BETWEEN_CHECKS, as all entries are looked at: 0.4 s if there are 50,000.
    """
    mark, entries = base / "checked", []
    with suppress(FileNotFoundError):
        if abs(time.time() - mark.stat().st_mtime) < SECONDS_BETWEEN_CHECKS:
            return
    mark.touch()
    for path in base.glob("jax*-jaxlib*/*-cache"):
        try:
            status = path.lstat()
            if not status.st_size:
                # JAX never overwrites an entry, even a corrupt one. A power failure or a full disk
                # leaves empty ones; other corruption costs a compilation each time.
                path.unlink()
            elif stat.S_ISREG(status.st_mode):
                # Time of the last read or write; not all file systems record reads.
                entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
        except OSError:
            continue  # another process was faster
    excess = sum(size for _, size, _ in entries) - MAX_BYTES
    for _, size, path in sorted(entries):
        if excess <= 0:
            break
        try:
            path.unlink()
        except OSError:
            continue
        excess -= size
