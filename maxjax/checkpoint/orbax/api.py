"""The only file that calls orbax: its functions, settings, errors and log messages.

Values are written uncompressed (zarr3 in OCDBT): weights hardly shrink, and compressing them takes
a copy and more time than the disk. Directories are created in the foreground, before the values are
written: with orbax's default, the background, a directory that cannot be created leaves threads that
wait forever, and the process does not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import importlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ...storage.save.staging import TEMPORARY_PREFIX

# Patterns in tensorstore's error texts, and the system errors that they stand for.
_SIGNS = (
    (r"[Dd]isk quota", errno.EDQUOT),  # tensorstore calls that RESOURCE_EXHAUSTED too
    (r"No space left|RESOURCE_EXHAUSTED", errno.ENOSPC),
    (r"File too large", errno.EFBIG),
    (r"Read-only file system", errno.EROFS),
    (r"Permission denied|PERMISSION_DENIED", errno.EACCES),
    (r"Input/output error", errno.EIO),
    (r"NOT_FOUND|does not exist", errno.ENOENT),  # what was written before
)


def orbax() -> Any:
    """The module of orbax's v1 interface, under the name it has in the installed version."""
    for name in ("orbax.checkpoint.v1", "orbax.checkpoint.experimental.v1"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "?"):
                raise
    raise ImportError("orbax-checkpoint has no v1 interface: install orbax-checkpoint>=0.12")


def context() -> Any:
    """An orbax context with the settings of a save."""
    made = orbax().Context()
    made.asynchronous.create_directories_asynchronously = False
    saving = made.array.saving
    saving.use_compression = False
    # Otherwise replicated arrays would be sliced on the devices, which copies them.
    saving.use_replica_parallel = False
    made.memory.deepcopy_host_arrays = False  # the caller decides what is copied
    return made


# Time limit for threads to end after a failure.
_PATIENCE_SECONDS = 4.0


class Writing:
    """Trees of arrays that orbax is writing to a directory.

    Once it is made, all values are copied or referenced, and orbax writes in its own threads. It
    must be made in a thread without a running event loop, and within :func:`quiet`.

    Args:
        path: path of a new directory; it appears when everything is written.
        items: name → tree of arrays.
        metadata: custom metadata of the checkpoint.
    """

    def __init__(self, path: str, items: Mapping[str, Any], metadata: Mapping[str, Any]):
        self._others = set(threading.enumerate())
        self._response: Any = None
        try:
            with context():
                self._response = orbax().save_checkpointables_async(
                    path, dict(items), custom_metadata=dict(metadata)
                )
        except BaseException:
            self.abandon()
            raise

    def wait(self) -> None:
        """Wait until all processes have written; raises an error of the writing."""
        self._response.result()

    def abandon(self) -> None:
        """After a failure: wait until orbax has stopped writing."""
        if self._response is not None:
            with contextlib.suppress(Exception):
                self._response.result()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for thread in threading.enumerate():
            if thread not in self._others and type(thread).__module__.startswith("orbax."):
                thread.join(max(0.0, deadline - time.monotonic()))


def add(path: str, arrays: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Add arrays to an unfinished checkpoint, which :func:`finish` completes."""
    with context():
        _partial().save(path, dict(arrays), custom_metadata=dict(metadata))


def finish(path: str) -> None:
    """Complete the checkpoint that :func:`add` has written to."""
    with context():
        _partial().finalize(path)


def _partial() -> Any:
    return importlib.import_module(f"{orbax().__name__}.partial")


def barrier(name: str) -> None:
    """Wait for all processes. Must be called in a thread without a running event loop."""
    if jax.process_count() > 1:
        asyncio.run(_barrier(name))


async def _barrier(name: str) -> None:
    await orbax().multihost.sync_global_processes(name, operation_id="maxjax")


def system_error(error: BaseException) -> OSError | None:
    """The OSError that caused an error of orbax or tensorstore, or None.

    Example:
        >>> system_error(ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device"))
        OSError(28, 'No space left on device')
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, OSError) and one.errno is not None:
            return one
        for sign, number in _SIGNS:
            if re.search(sign, str(one)):
                return OSError(number, os.strerror(number))
        one = one.__cause__ or one.__context__
    return None


# --- orbax's log messages


class _NotOrbax(logging.Filter):
    """Lets through absl log messages of other libraries."""

    def filter(self, record: logging.LogRecord) -> bool:
        # The record's file is absl's own, so the caller is looked up on the stack.
        frame = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if not any(f"{os.sep}{name}{os.sep}" in file for name in ("logging", "absl")):
                return f"{os.sep}orbax{os.sep}" not in file
            frame = frame.f_back
        return True


_QUIET = _NotOrbax()
_lock, _depth = threading.Lock(), 0


def _is_told_otherwise(record: logging.LogRecord) -> bool:
    """Whether asyncio logs the error of an array that a save could not write, after that of the save."""
    error = record.exc_info[1] if record.exc_info else None
    is_late = "exception was never retrieved" in record.getMessage()
    return is_late and f"{os.sep}{TEMPORARY_PREFIX}" in str(error)


@functools.cache
def _silence_late_errors() -> None:
    """Silences what follows a failed save: if an array cannot be written, orbax closes its event loop.

    The others, which tensorstore still writes, then cannot report to it, some after the save has ended.
    """
    logging.getLogger("asyncio").addFilter(lambda record: not _is_told_otherwise(record))
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        of_tensorstore = unraisable.object is None and type(unraisable.exc_value) is RuntimeError
        if not of_tensorstore or str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence orbax's log messages inside the block; exceptions say what matters."""
    global _depth
    _silence_late_errors()
    logger = logging.getLogger("absl")
    with _lock:
        _depth += 1
        if _depth == 1:
            logger.addFilter(_QUIET)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                logger.removeFilter(_QUIET)
