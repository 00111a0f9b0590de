"""The one place that calls orbax: its interface, its settings, its errors, its noise.

Values are written as they lie in memory (zarr3 in OCDBT, without compression): weights hardly
shrink, and compressing them takes a copy and more time than the disk. Directories are made
before anything else: made in the background, as is orbax's default, a directory that cannot be
made leaves threads waiting that keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
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

# What tensorstore calls the errors of the system, in its texts.
_SIGNS = (
    (r"[Dd]isk quota", errno.EDQUOT),  # tensorstore calls that RESOURCE_EXHAUSTED too
    (r"No space left|RESOURCE_EXHAUSTED", errno.ENOSPC),
    (r"File too large", errno.EFBIG),
    (r"Read-only file system", errno.EROFS),
    (r"Permission denied|PERMISSION_DENIED", errno.EACCES),
    (r"Input/output error", errno.EIO),
)


def orbax() -> Any:
    """The module of orbax's second interface, wherever this version has it."""
    for name in ("orbax.checkpoint.v1", "orbax.checkpoint.experimental.v1"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "?"):
                raise
    raise ImportError("orbax-checkpoint has no v1 interface: install orbax-checkpoint>=0.12")


def context() -> Any:
    """The settings of a save."""
    made = orbax().Context()
    made.asynchronous.create_directories_asynchronously = False
    saving = made.array.saving
    saving.use_compression = False
    # Parts of what all devices hold alike would be cut out on the devices, as copies.
    saving.use_replica_parallel = False
    made.memory.deepcopy_host_arrays = False  # our caller decides what is copied
    return made


# So long threads may take to end after a failure.
_PATIENCE_SECONDS = 4.0


class Writing:
    """Trees on their way to a directory.

    When it is made, all values have been copied or are held, and orbax writes in threads of its
    own. To be made where no event loop runs, within :func:`quiet`.

    Args:
        path: A directory that is not there yet; it appears when all is written.
        items: Name → tree of arrays.
        metadata: Kept with them.
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
        """Returns when it is written, by all processes; raises what went wrong."""
        self._response.result()

    def abandon(self) -> None:
        """After a failure: waits until nothing is being written any more."""
        if self._response is not None:
            with contextlib.suppress(Exception):
                self._response.result()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for thread in threading.enumerate():
            if thread not in self._others and type(thread).__module__.startswith("orbax."):
                thread.join(max(0.0, deadline - time.monotonic()))


def add(path: str, arrays: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Adds arrays to a checkpoint that :func:`finish` will put into its place."""
    with context():
        _partial().save(path, dict(arrays), custom_metadata=dict(metadata))


def finish(path: str) -> None:
    """Makes a checkpoint of what was added."""
    with context():
        _partial().finalize(path)


def _partial() -> Any:
    return importlib.import_module(f"{orbax().__name__}.partial")


def barrier(name: str) -> None:
    """Waits until all processes are here. To be called where no event loop runs."""
    if jax.process_count() > 1:
        asyncio.run(_barrier(name))


async def _barrier(name: str) -> None:
    await orbax().multihost.sync_global_processes(name, operation_id="maxjax")


def system_error(error: BaseException) -> OSError | None:
    """What the system reported, where an error of orbax or of tensorstore comes from that.

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


# --- what orbax says on its way


class _NotOrbax(logging.Filter):
    """Lets through what others log by absl."""

    def filter(self, record: logging.LogRecord) -> bool:
        # The record names absl itself as the place, so the caller is looked up.
        frame = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if not any(f"{os.sep}{name}{os.sep}" in file for name in ("logging", "absl")):
                return f"{os.sep}orbax{os.sep}" not in file
            frame = frame.f_back
        return True


_QUIET = _NotOrbax()
_lock, _depth = threading.Lock(), 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, orbax logs nothing: what matters of it is in the exceptions."""
    global _depth
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
