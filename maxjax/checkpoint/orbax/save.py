"""Saving one step as a transaction: written to a temporary directory, flushed, then renamed.

Orbax writes into the temporary directory of a :class:`Staging`; then the checksums are written,
every file is flushed, the rename commits the step, and only then older steps are deleted. So there
is a complete checkpoint, old or new, at every moment. With several processes each writes what it
holds; the first one does the rest. All of them compute the checksums of arrays, from their parts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ... import distributed
from ...errors import CheckpointError, PeerLostError, first_line
from ...lockstep import wait_alive
from ...rendering.rendered import Rendered
from ...rendering.row import Row, short
from ...storage.boxes import Box, extents
from ...storage.checksums import crc32_of_boxes
from ...storage.crc32 import combine, crc32
from ...storage.digests import DIRECTORY, NAME, Record, to_bytes
from ...storage.orbax.maxjax_metadata import custom_metadata
from ...storage.orbax.reader import check_written
from ...storage.save.durable import flush_folder, save_failed
from ...storage.save.staging import Staging
from .api import Writing, barrier, quiet, system_error
from .arrays import held_parts, is_on_host, owners
from .steps import NewStep, steps_in
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
            self._cancel()
            raise

    def _cancel(self) -> None:
        """Cancel the save if it is not committed yet, and wait until it has ended."""
        self._cancelled = True
        self._future.exception()

    def _ended(self, seconds: float | None) -> bool:
        """Waits until the save has ended, at most so long; returns whether it has."""
        return bool(wait([self._future], seconds).done)


def start(
    root: str,
    step: int | None,
    items: Mapping[str, Item],
    keep: Keep,
    beside: dict[str, bytes],
    *,
    wait: bool,
) -> Response:
    """Start a save; return when the values may be changed or deleted.

    An interrupt before it returns cancels the save, and is raised when the save has ended.

    Args:
        root: directory of the steps.
        step: number of this one; None for the next.
        items: trees to save, by name.
        keep: function from the numbers of all steps to those that are kept.
        beside: other files of the step: name → content.
        wait: return only when the save has ended.

    Raises:
        CheckpointError: an error of :class:`NewStep`, or the save failed at its start.
    """
    place = os.path.realpath(root)
    if (before := _running.get(place)) is not None:
        before._wait_over()
    target = NewStep(root, step, sum(item.nbytes for item in items.values()), beside)
    response = Response(root)
    arguments = (response, target, dict(items), keep)
    # Not a daemon thread: a program waits for its checkpoint before it exits.
    thread = threading.Thread(target=_run, args=arguments, name="maxjax-save")
    response._thread = thread
    _running[place] = response
    _at_exit()
    try:
        thread.start()
        wait_alive(response._ended if wait else response._begun.wait, "saving")
    except PeerLostError:
        raise
    except BaseException:
        if thread.ident is None:  # it could not be started
            _running.pop(place, None)
            target.close()
        else:
            response._cancel()
        raise
    if response.done() and response._future.exception() is not None:
        response.result()
    return response


# The save of this process that is running in each directory; a forked process has none.
_running: dict[str, Response] = {}
os.register_at_fork(after_in_child=_running.clear)


@functools.cache
def _at_exit() -> None:
    """Wait for saves at exit before Python forbids new threads, which orbax needs to the end."""
    # This must run before concurrent.futures closes its pools, which happens first at exit.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        import concurrent.futures.thread  # noqa: F401 (registers its own hook before ours)

        register(_wait_all)


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
        # It references the values that it needs; callers may delete theirs from now on.
        sums = ArraySums(items)
        arrays = [array for item in items.values() for array in item.arrays.values()]
        if all(map(is_on_host, arrays)):
            response._begun.set()
        trees = list(nested)
        del arrays, nested
        items.clear()
        sums.compute()
        sums.share(target.folder)
        response._begun.set()
        writing.wait()
    except BaseException:
        writing.abandon()
        raise
    _finish(response, target, sums, trees, keep)
    if target.staging is None and not os.path.isdir(target.path):
        raise save_failed("process 0 could not rename the step into place", target.root)
    return target.path


def _finish(
    response: Response, target: NewStep, sums: ArraySums, trees: Sequence[str], keep: Keep
) -> None:
    """Commit the step in the first process when all have written; the others wait for it."""
    name = os.path.basename(target.folder)
    barrier(f"maxjax-written-{name}")
    try:
        if response._cancelled:
            raise KeyboardInterrupt
        if target.staging is not None:
            commit(target, target.staging, sums.all(target.folder), trees, keep)
    finally:
        target.close()
        barrier(f"maxjax-renamed-{name}")


def commit(
    target: NewStep, staging: Staging, sums: Mapping[str, int], trees: Sequence[str], keep: Keep
) -> None:
    """Flush what was written and rename it into place; then delete the steps that are not kept.

    If the directory was deleted meanwhile, tensorstore has made it again for the files that were still
    to come, so that writing them raised no error: therefore it is checked that all files are there.
    """
    name = str(target.number)
    for file, content in target.beside.items():
        staging.write(f"{name}/{file}", [content])
    staging.write(f"{name}/{NAME}", [to_bytes({DIRECTORY: [Record(0, dict(sums))]})])
    with staging.saving("flushing the files", needed=target.needed):
        flush_tree(target.written)
    try:
        check_written(target.written, trees)
    except CheckpointError as error:
        raise staging.deleted(f"a part of the step ({error.path}: {error.problem})") from error
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
            problem = f"orbax could not save the step ({type(error).__name__}: {first_line(error)})"
            hint = None if target.staging is None else target.staging.kept or None
            raise save_failed(problem, target.root, None, hint) from error
        if target.staging is None:
            raise save_failed(f"writing failed: {system.strerror}", target.root, system.errno)
        with target.staging.saving("writing the arrays failed", needed=target.needed):
            raise system
    except CheckpointError as found:
        if found.__cause__ is None or found.__cause__ is system and system is not error:
            found.__cause__ = error
        return found


class ArraySums:
    """The checksums of arrays.

    Each process counts the parts of others as zeros. The XOR of their CRC-32s is that of the complete
    array; for an even number of processes, the CRC-32 of zeros has to be added.
    """

    def __init__(self, items: Mapping[str, Item]):
        self._sums: dict[str, int] = {}
        self._shapes: dict[str, int] = {}
        self._parts: dict[str, tuple[tuple[int, ...], list[tuple[Box, Any]], list[Box], Any]] = {}
        for title, item in items.items():
            for name, array in item.arrays.items():
                self._take(f"{title}/{name}", array)

    def _take(self, name: str, array: Any) -> None:
        mine, others = held_parts(array), []
        if not mine and not (isinstance(array, jax.Array) and jax.process_index() == 0):
            return
        if isinstance(array, jax.Array):
            have = {box for box, _ in mine}
            others = [box for box in owners(array) if box not in have]
        dtype = np.dtype(array.dtype)
        if is_on_host(array):
            mine = [(box, np.asarray(part)) for box, part in mine]
        self._shapes[name] = math.prod(array.shape) * dtype.itemsize
        self._parts[name] = (tuple(array.shape), mine, others, dtype)

    def compute(self) -> None:
        """Compute the checksums; arrays on accelerators are copied to the host one by one."""
        for name in list(self._parts):
            shape, mine, others, dtype = self._parts.pop(name)
            parts = [(box, np.asarray(part)) for box, part in mine]
            parts += [(box, np.zeros(extents(box), dtype)) for box in others]
            self._sums[name] = crc32_of_boxes(shape, parts)

    def share(self, folder: str) -> None:
        """Write this process's checksums to a file for the first process, unless this is the first."""
        if jax.process_index() > 0:
            path = os.path.join(folder, f"sums-{jax.process_index()}")
            with open(path, "x") as file:
                json.dump([self._sums, self._shapes], file)

    def all(self, folder: str) -> dict[str, int]:
        """The checksums of complete arrays, after all processes have called :meth:`share`."""
        found, counts, lengths = dict(self._sums), dict.fromkeys(self._sums, 1), dict(self._shapes)
        for process in range(1, jax.process_count()):
            with open(os.path.join(folder, f"sums-{process}")) as file:
                sums, shapes = json.load(file)
            lengths.update(shapes)
            for name, crc in sums.items():
                found[name] = found.get(name, 0) ^ crc
                counts[name] = counts.get(name, 0) + 1
        for name, count in counts.items():
            if count % 2 == 0:
                found[name] ^= zeros_sum(lengths[name])
        return found


def zeros_sum(nbytes: int) -> int:
    """The CRC-32 of so many zero bytes.

    Example:
        >>> zeros_sum(3_000_001) == crc32(bytes(3_000_001))
        True
    """
    if nbytes <= 1 << 16:
        return crc32(bytes(nbytes))
    half = zeros_sum(nbytes // 2)
    both = combine(half, half, nbytes // 2)
    return combine(both, crc32(b"\0"), 1) if nbytes % 2 else both
