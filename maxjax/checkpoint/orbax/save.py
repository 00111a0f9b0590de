"""One save: a step written beside the others, made durable, renamed into its place.

Orbax writes into the temporary directory of a :class:`Staging`; the checksums and a flush of
every file follow, then the rename that makes the step count, and only then older steps go. So
there is the old checkpoint or the new one, at every moment. Of several processes each writes
what it holds; the first one does all that is done once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from ... import distributed
from ...errors import CheckpointError, PeerLostError
from ...storage.digests import DIRECTORY, NAME, Record, to_bytes
from ...storage.orbax.maxjax_metadata import custom_metadata
from ...storage.save.durable import flush_folder, save_failed
from ...storage.save.staging import Staging
from .api import Writing, barrier, quiet, system_error
from .arrays import is_on_host
from .steps import Step, steps_in
from .sums import ArraySums
from .tree import Item

MODEL = "model"
Keep = Callable[[list[int]], Sequence[int]]


class Response:
    """A save that goes on in the background.

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

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """The directory of the step, once it is durable.

        Raises:
            CheckpointSaveError, CheckpointAccessError, PeerLostError: It could not be saved.
            TimeoutError: It is not over after ``timeout`` seconds.
        """
        found = self._future.result(timeout)
        if self._thread is not None:
            self._thread.join()
        return found

    def _wait_over(self) -> None:
        """Returns when nothing of it runs any more; an interrupt makes it give up, then goes on."""
        try:
            self._future.exception()
        except BaseException:
            self._cancelled = True
            self._future.exception()
            raise


def start(
    root: str,
    step: int | None,
    items: Mapping[str, Item],
    keep: Keep,
    beside: Mapping[str, bytes] | None = None,
) -> Response:
    """Begins a save; returns when the values may change or go.

    Args:
        root: The directory of the steps.
        step: The number of this one; None for the next.
        items: What is saved.
        keep: Which steps are kept.
        beside: Other files of the step: name → content.

    Raises:
        CheckpointError: As for :class:`Step`, or nothing could be begun.
    """
    before = _running.get(os.path.realpath(root))
    if before is not None:
        before._wait_over()
    place = Step(root, step, sum(item.nbytes for item in items.values()))
    place.beside = dict(beside or {})
    response = Response(root)
    arguments = (response, place, dict(items), keep)
    # No daemon: a program that ends waits for its checkpoint.
    thread = threading.Thread(target=_run, args=arguments, name="maxjax-save")
    response._thread = thread
    _running[os.path.realpath(root)] = response
    _at_exit()
    try:
        thread.start()
    except BaseException:
        _running.pop(os.path.realpath(root), None)
        place.close()
        raise
    try:
        response._begun.wait()
    except BaseException:
        response._cancelled = True
        response._future.exception()
        raise
    if response.done() and response._future.exception() is not None:
        response.result()
    return response


# Of each directory the save that goes on there in this process.
_running: dict[str, Response] = {}


def _at_exit() -> None:
    """Lets saves end before Python forbids new threads, which orbax needs to the last."""
    global _registered
    if not _registered:
        _registered = True
        # Before the pools of concurrent.futures, which are closed first of all at the end.
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            import concurrent.futures.thread  # noqa: F401 (registers itself before us)

            register(_wait_all)


_registered = False


def _wait_all() -> None:
    for response in list(_running.values()):
        with contextlib.suppress(BaseException):
            response._future.exception()


def _run(response: Response, place: Step, items: dict[str, Item], keep: Keep) -> None:
    """The thread of a save."""
    try:
        try:
            with quiet(), distributed.watch("saving"):
                path = _save(response, place, items, keep)
        finally:
            place.close()
            _running.pop(os.path.realpath(response.root), None)
    except BaseException as error:
        response._future.set_exception(translated(error, place))
    else:
        response._future.set_result(path)
    finally:
        response._begun.set()


def _save(response: Response, place: Step, items: dict[str, Item], keep: Keep) -> Path:
    metadata = custom_metadata(items)
    nested = {name: item.nested for name, item in items.items() if item.nested}
    writing = Writing(place.written, nested, metadata)
    try:
        sums = ArraySums(items)  # holds what it needs of values that may go from now on
        arrays = [array for item in items.values() for array in item.arrays.values()]
        if all(map(is_on_host, arrays)):
            response._begun.set()
        del arrays, nested
        items.clear()
        sums.compute()
        sums.share(place.folder)
        response._begun.set()
        writing.wait()
    except BaseException:
        writing.abandon()
        raise
    _finish(response, place, sums, keep)
    if not os.path.isdir(place.path):
        raise save_failed("process 0 could not put the step into its place", place.root)
    return place.path


def _finish(response: Response, place: Step, sums: ArraySums, keep: Keep) -> None:
    """What the first process does when all is written; the others wait for it."""
    name = os.path.basename(place.folder)
    barrier(f"maxjax-written-{name}")
    try:
        if response._cancelled:
            raise KeyboardInterrupt
        if place.staging is not None:
            commit(place, place.staging, sums.all(place.folder), keep)
    finally:
        place.close()
        barrier(f"maxjax-renamed-{name}")


def commit(place: Step, staging: Staging, sums: Mapping[str, int], keep: Keep) -> None:
    """Makes what was written durable and gives it its place; then the steps that are not kept go."""
    name = str(place.number)
    for file, content in place.beside.items():
        staging.write(f"{name}/{file}", [content])
    staging.write(f"{name}/{NAME}", [to_bytes({DIRECTORY: [Record(0, dict(sums))]})])
    with staging.saving("flushing the files", needed=place.needed):
        flush_tree(place.written)
    there = steps_in(place.root)
    kept = {*keep([*there, place.number]), place.number}
    gone = [str(number) for number in there if number not in kept]
    staging.commit([name], remove=gone)


def flush_tree(folder: str) -> None:
    """Makes all files and directories below a directory durable."""
    for where, _, files in os.walk(folder, topdown=False):
        for file in files:
            fd = os.open(os.path.join(where, file), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        flush_folder(where)


def translated(error: BaseException, place: Step) -> BaseException:
    """An error of orbax as one of ours."""
    ours = (CheckpointError, PeerLostError, KeyboardInterrupt, SystemExit, MemoryError)
    if isinstance(error, ours):
        return error
    system = system_error(error)
    try:
        if system is None:
            text = next(iter(str(error).splitlines()), "")[:300]
            problem = f"orbax could not save it ({type(error).__name__}: {text})"
            hint = getattr(place.staging, "_kept", "") or None
            raise save_failed(problem, place.root, None, hint) from error
        if place.staging is None:
            raise save_failed(f"writing failed: {system.strerror}", place.root, system.errno)
        with place.staging.saving("writing the arrays failed", needed=place.needed):
            raise system
    except CheckpointError as found:
        if found.__cause__ is None or found.__cause__ is system and system is not error:
            found.__cause__ = error
        return found
