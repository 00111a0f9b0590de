"""Saving one step as a transaction: written to a temporary directory, flushed, then renamed.

Orbax writes into the temporary directory of a :class:`Staging`; then the checksums are written,
every file is flushed, the rename commits the step, and only then older steps are deleted. So there
is a complete checkpoint, old or new, at every moment. With several processes each writes what it
holds; the first one does the rest.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

from ... import distributed
from ...errors import CheckpointError, PeerLostError
from ...lockstep import wait_alive
from ...rendering.rendered import Rendered
from ...rendering.row import Row, short
from ...storage.digests import DIRECTORY, NAME, Record, to_bytes
from ...storage.orbax.maxjax_metadata import custom_metadata
from ...storage.save.durable import flush_folder, save_failed
from ...storage.save.staging import Staging
from .api import Writing, barrier, quiet, system_error
from .arrays import is_on_host
from .steps import NewStep, steps_in
from .sums import ArraySums
from .tree import Item

MODEL = "model"
Keep = Callable[[list[int]], Sequence[int]]


class Response(Rendered):
    """A save that runs in the background.

    Example:
        >>> response = Response("/checkpoints")
        >>> response.done()
        False
    """

    def __init__(self, root: str):
        self.root = root
        self._future: Future[Path] = Future()
        self._begun = threading.Event()
        self._cancelled = False
        self._thread: threading.Thread | None = None

    def _mx_title(self, row: Row) -> str:
        if not self.done():
            return f"Response({self.root!r}, saving)"
        if self._future.cancelled() or (error := self._future.exception(0)) is not None:
            reason = "cancelled" if self._future.cancelled() else short(error, 120)
            return f"Response({self.root!r}, failed: {reason})"
        return f"Response({str(self._future.result(0))!r}, saved)"

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the step is durable, and return its path.

        Raises:
            CheckpointSaveError, CheckpointAccessError, PeerLostError: the save failed.
            TimeoutError: the save has not ended after ``timeout`` seconds.
        """
        if timeout is None:
            wait_alive(self._ended, "saving")
        found = self._future.result(timeout)
        if self._thread is not None:
            self._thread.join()
        return found

    def _wait_over(self) -> None:
        """Wait until the save has ended; an interrupt cancels it first, and is then raised."""
        try:
            wait_alive(self._ended, "saving")
        except PeerLostError:
            raise
        except BaseException:
            self._cancelled = True
            self._future.exception()
            raise

    def _ended(self, seconds: float | None) -> bool:
        """Waits until the save has ended, at most so long; returns whether it has."""
        return bool(wait([self._future], seconds).done)


def start(
    root: str,
    step: int | None,
    items: Mapping[str, Item],
    keep: Keep,
    beside: Mapping[str, bytes] | None = None,
) -> Response:
    """Start a save; return when the values may be changed or deleted.

    Args:
        root: directory of the steps.
        step: number of this one; None for the next.
        items: trees to save, by name.
        keep: function from the numbers of all steps to those that are kept.
        beside: other files of the step: name → content.

    Raises:
        CheckpointError: an error of :class:`NewStep`, or the save failed at its start.
    """
    before = _running.get(os.path.realpath(root))
    if before is not None:
        before._wait_over()
    target = NewStep(root, step, sum(item.nbytes for item in items.values()))
    target.beside = dict(beside or {})
    response = Response(root)
    arguments = (response, target, dict(items), keep)
    # Not a daemon thread: a program waits for its checkpoint before it exits.
    thread = threading.Thread(target=_run, args=arguments, name="maxjax-save")
    response._thread = thread
    _running[os.path.realpath(root)] = response
    _at_exit()
    try:
        thread.start()
    except BaseException:
        _running.pop(os.path.realpath(root), None)
        target.close()
        raise
    try:
        wait_alive(response._begun.wait, "saving")
    except PeerLostError:
        raise
    except BaseException:
        response._cancelled = True
        response._future.exception()
        raise
    if response.done() and response._future.exception() is not None:
        response.result()
    return response


# The save of this process that is running in each directory.
_running: dict[str, Response] = {}


def _at_exit() -> None:
    """Wait for saves at exit before Python forbids new threads, which orbax needs to the end."""
    global _registered
    if not _registered:
        _registered = True
        # This must run before concurrent.futures closes its pools, which happens first at exit.
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            import concurrent.futures.thread  # noqa: F401 (registers its own hook before ours)

            register(_wait_all)


_registered = False


def _wait_all() -> None:
    for response in list(_running.values()):
        with contextlib.suppress(BaseException):
            response._future.exception()


def _run(response: Response, target: NewStep, items: dict[str, Item], keep: Keep) -> None:
    """The function that the thread of a save runs."""
    try:
        try:
            with quiet(), distributed.watch("saving"):
                path = _save(response, target, items, keep)
        finally:
            target.close()
            _running.pop(os.path.realpath(response.root), None)
    except BaseException as error:
        response._future.set_exception(translated(error, target))
    else:
        response._future.set_result(path)
    finally:
        response._begun.set()


def _save(response: Response, target: NewStep, items: dict[str, Item], keep: Keep) -> Path:
    metadata = custom_metadata(items)
    nested = {name: item.nested for name, item in items.items() if item.nested}
    writing = Writing(target.written, nested, metadata)
    try:
        sums = ArraySums(
            items
        )  # references the values it needs, which callers may delete from now on
        arrays = [array for item in items.values() for array in item.arrays.values()]
        if all(map(is_on_host, arrays)):
            response._begun.set()
        del arrays, nested
        items.clear()
        sums.compute()
        sums.share(target.folder)
        response._begun.set()
        writing.wait()
    except BaseException:
        writing.abandon()
        raise
    _finish(response, target, sums, keep)
    if not os.path.isdir(target.path):
        raise save_failed("process 0 could not rename the step into place", target.root)
    return target.path


def _finish(response: Response, target: NewStep, sums: ArraySums, keep: Keep) -> None:
    """Commit the step in the first process when all have written; the others wait for it."""
    name = os.path.basename(target.folder)
    barrier(f"maxjax-written-{name}")
    try:
        if response._cancelled:
            raise KeyboardInterrupt
        if target.staging is not None:
            commit(target, target.staging, sums.all(target.folder), keep)
    finally:
        target.close()
        barrier(f"maxjax-renamed-{name}")


def commit(target: NewStep, staging: Staging, sums: Mapping[str, int], keep: Keep) -> None:
    """Flush what was written and rename it into place; then delete the steps that are not kept."""
    name = str(target.number)
    for file, content in target.beside.items():
        staging.write(f"{name}/{file}", [content])
    staging.write(f"{name}/{NAME}", [to_bytes({DIRECTORY: [Record(0, dict(sums))]})])
    with staging.saving("flushing the files", needed=target.needed):
        flush_tree(target.written)
    steps = steps_in(target.root)
    kept = {*keep([*steps, target.number]), target.number}
    deleted = [str(number) for number in steps if number not in kept]
    staging.commit([name], remove=deleted)


def flush_tree(folder: str) -> None:
    """Flush all files and directories below a directory to the disk."""
    for where, _, files in os.walk(folder, topdown=False):
        for file in files:
            fd = os.open(os.path.join(where, file), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        flush_folder(where)


def translated(error: BaseException, target: NewStep) -> BaseException:
    """An error of orbax as an error of maxjax."""
    ours = (CheckpointError, PeerLostError, KeyboardInterrupt, SystemExit, MemoryError)
    if isinstance(error, ours):
        return error
    system = system_error(error)
    try:
        if system is None:
            text = next(iter(str(error).splitlines()), "")[:300]
            problem = f"orbax could not save the step ({type(error).__name__}: {text})"
            hint = getattr(target.staging, "_kept", "") or None
            raise save_failed(problem, target.root, None, hint) from error
        if target.staging is None:
            raise save_failed(f"writing failed: {system.strerror}", target.root, system.errno)
        with target.staging.saving("writing the arrays failed", needed=target.needed):
            raise system
    except CheckpointError as found:
        if found.__cause__ is None or found.__cause__ is system and system is not error:
            found.__cause__ = error
        return found
