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
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.experimental.compilation_cache import compilation_cache

_LOG = logging.getLogger("maxjax")

VARIABLE = "MAXJAX_COMPILE_CACHE"
OFF = {"0", "off", "false", "no"}
DEFAULT = {"", "1", "on", "true", "yes"}
# Above this size the least recently used entries are deleted. Not by JAX's own
# jax_compilation_cache_max_size: it reads the whole directory before each write (18 ms at 500
# entries, 350 ms at 10000), and one entry left half-written ends all further writes.
MAX_BYTES = 4 << 30
# Option → JAX's default, and the value that keeps everything, however small.
_THRESHOLDS = {
    "jax_persistent_cache_min_compile_time_secs": (1.0, 0.0),
    "jax_persistent_cache_min_entry_size_bytes": (0, -1),
}
# JAX warns about each entry that it cannot read (a process was killed, the disk was full) or
# write (the directory is gone), then compiles and goes on. Nobody asked for this cache, so it
# may cost a compilation but not print, and under `-W error` not stop a program.
_QUIET = (
    "ignore",
    re.compile("Error (reading|writing) persistent compilation cache entry for ", re.IGNORECASE),
    UserWarning,
    re.compile(r"jax\."),
    0,
)
# What decides which code XLA writes for a processor: x86's names, then ARM's.
_CPU_FACTS = {"vendor_id", "cpu family", "model", "flags"} | {
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
    """Lets JAX cache compiled programs on disk, unless the user has already configured that.

    Returns the directory in force afterwards, the user's or this library's, or None. Nothing
    is touched where the user set ``jax_compilation_cache_dir``, turned
    ``jax_enable_compilation_cache`` off or limited ``jax_compilation_cache_max_size``.

    The environment variable ``MAXJAX_COMPILE_CACHE`` is ``0`` for no cache, or the directory to
    use instead of ``maxjax/compile`` in the user's cache directory (``$XDG_CACHE_HOME``,
    ``~/.cache``; ``~/Library/Caches`` on macOS). In it each version of JAX and kind of processor
    has a folder of its own, of mode 0700. Up to 4 GiB are kept, counted once per process.

    Compiled code is executed, so a directory that belongs to another user, or that others may
    write, is not used: a warning on the logger ``maxjax`` says so. No cache either where the
    directory cannot be made or written, in a process that has called
    ``jax.distributed.initialize``, or with a jaxlib before 0.10.2 on AVX-512, which is noisy.
    Never raises; a call after the first costs microseconds.
    """
    global _decided, _ours
    with _lock:
        if not _decided:
            _decided = True
            _ours = _switch_on()
        enabled = _option("jax_enable_compilation_cache")
        in_force = (_option("jax_compilation_cache_dir") or None) if enabled else None
        if _ours and in_force != _ours:
            # The user decided since then; without this JAX would stay with what it has open.
            compilation_cache.reset_cache()
            _ours = None
        elif _ours and warnings.filters[:1] != [_QUIET]:
            # Again, because warnings.catch_warnings (each test of pytest) takes it away.
            action, message, category, module, _ = _QUIET
            warnings.filterwarnings(action, message.pattern, category, module.pattern)
        return in_force


def _switch_on() -> str | None:
    if _user_decided():
        return None
    wish = os.environ.get(VARIABLE, "").strip()
    if wish.lower() in OFF:
        return None
    try:
        if obstacle := _obstacle():
            _LOG.debug("compiled programs are not kept: %s", obstacle)
            return None
        base = _base(wish)
        folder = _folder(base)
        if danger := _danger(base) or _danger(folder):
            _LOG.warning("compiled programs are not kept: %s (%s=0: never)", danger, VARIABLE)
            return None
        _tidy(base)
    except (OSError, RuntimeError) as error:
        level = logging.DEBUG if wish.lower() in DEFAULT else logging.WARNING
        _LOG.log(level, "compiled programs are not kept: %s", error)
        return None
    for name, (default, everything) in _THRESHOLDS.items():
        if _option(name) == default and name.upper() not in os.environ:
            jax.config.update(name, everything)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX opens its cache once: one that the user had set and taken back would stay open.
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


def _obstacle() -> str | None:
    """The reason to leave the cache off in this process, or None."""
    if jax.distributed.is_initialized():
        # Only the first process writes entries. On a disk that it does not share, it would
        # next time skip compilations in which the others wait for it (autotuning on GPUs).
        return "this process is one of several"
    if jaxlib.version.__version_info__ < (0, 10, 2) and "avx512f" in _processor():
        return "this jaxlib prints two lines on stderr for each program it reads"
    return None


def _base(wish: str) -> Path:
    """The directory, links resolved; RuntimeError where there is no home directory."""
    if wish.lower() not in DEFAULT:
        if "://" in wish:
            raise RuntimeError(f"{wish} is not a directory; set JAX_COMPILATION_CACHE_DIR to it")
        return Path(wish).expanduser().resolve()
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        caches = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    if not caches.is_absolute():
        raise RuntimeError(f"the home directory is a relative path: {Path.home()}")
    return (caches / "maxjax" / "compile").resolve()


def _folder(base: Path) -> Path:
    """The folder in ``base`` for this JAX on this processor, made if need be."""
    kind = hashlib.sha256(_processor().encode()).hexdigest()[:8]
    versions = f"jax{jax.__version__}-jaxlib{jaxlib.version.__version__}"
    folder = base / f"{versions}-{platform.machine()}-{kind}"
    above = next(path for path in folder.parents if path.exists())
    if above != base and (owner := above.stat().st_uid) not in (0, os.geteuid()):
        # As root (sudo) in the home of a user, who could not use what root makes there.
        raise PermissionError(f"{above} belongs to uid {owner}, this process to {os.geteuid()}")
    for path in reversed((folder, *folder.parents)):
        path.mkdir(mode=0o700, exist_ok=True)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")
    return folder


def _danger(path: Path) -> str | None:
    """Who else could put code into the directory ``path``."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        return f"{path} belongs to uid {status.st_uid}, this process to uid {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write {path}; chmod go-w would do"
    return None


def _processor() -> str:
    """The kind of this machine's processor: XLA's code for another kind may crash here."""
    try:
        with open("/proc/cpuinfo") as file:
            return "".join(line for line in _first_block(file) if _name(line) in _CPU_FACTS)
    except OSError:
        pass
    try:  # macOS
        command = ["/usr/sbin/sysctl", "machdep.cpu"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return platform.node()


def _first_block(lines: Iterator[str]) -> Iterator[str]:
    # The kernel makes up the file line by line, and there may be hundreds of processors.
    for line in lines:
        if not line.strip():
            return
        yield line


def _name(line: str) -> str:
    return line.partition(":")[0].strip()


def _tidy(base: Path) -> None:
    """Deletes empty entries, and the least recently used ones beyond MAX_BYTES."""
    entries = []
    for path in base.glob("jax*-jaxlib*/*-cache"):
        try:
            status = path.lstat()
            if not status.st_size:
                # JAX does not write over an entry, however broken. Empty is what a power cut
                # or a full disk leaves; another kind of damage costs a compilation each time.
                path.unlink()
            elif stat.S_ISREG(status.st_mode):
                # Of the two the reading time is the later one where the file system keeps it.
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
