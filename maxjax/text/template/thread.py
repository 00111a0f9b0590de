"""Work in a thread of its own that ends when its time is over, or with the caller's Ctrl-C.

A tracer (``sys.settrace``) would switch debuggers and coverage off, and Python removes one that
raises; a signal reaches the main thread alone. So the work has a thread, the caller waits for it,
and when it has waited enough it posts an exception to that thread, again and again, since what
swallows one (``except Exception``, a callback of the garbage collector) does not swallow the next.
"""

from __future__ import annotations

import contextvars
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_GRACE = 0.1  # seconds before each post, in which the work may end by itself
_LOOKED = 0.25  # seconds after which a caller that waits runs a line, where exceptions reach it


class Stopped(BaseException):
    """Ends the work. No ``Exception``: those of the work itself may be caught on the way."""


def run_until(work: Callable[[], T], seconds: float, warn: Callable[[], None] = lambda: None) -> T:
    """What ``work()`` returns, run in a thread with the caller's context variables.

    Args:
        work: What it raises is raised here.
        seconds: After so long it is stopped.
        warn: Called before it is, so that it may stop by itself. It must not raise.

    Raises:
        Stopped: The time is over. The thread has ended.
        KeyboardInterrupt: Ctrl-C while the caller waited. The thread has ended then, too.

    Example:
        >>> run_until(lambda: 6 * 7, seconds=1)
        42
    """
    job = _Work(work, warn)
    try:
        job.thread.start()
        if not job.ended(seconds):
            job.stop()
    except BaseException:
        job.stop()
        raise
    return job.result()


class _Work(Generic[T]):
    """The work, its thread, and whether exceptions may be posted to it."""

    def __init__(self, work: Callable[[], T], warn: Callable[[], None]) -> None:
        self.work, self.warn = work, warn
        self.lock, self.open = threading.Lock(), True
        self.begun, self.cancelled, self.done = False, False, threading.Event()
        self.made: list[T] = []
        self.error: BaseException | None = None
        self.context = contextvars.copy_context()
        self.thread = threading.Thread(target=self._run, name="maxjax template", daemon=True)

    # --- in the thread

    def _run(self) -> None:
        """What is posted may be raised at any call or turn of a loop in here, until it is closed."""
        try:
            try:
                self._try()
            except Stopped:
                pass
            while self.open:
                try:
                    self._close()
                except Stopped:
                    pass
        finally:
            self.done.set()

    def _try(self) -> None:
        try:
            with self.lock:
                self.begun = not self.cancelled
            if self.begun:
                self.made.append(self.context.run(self.work))
        except BaseException as error:
            self.error = error

    def _close(self) -> None:
        with self.lock:
            self.open = False  # nothing is posted from here on
        # What was posted and has not been raised is raised here: one that a thread took with it
        # Python 3.11 would go on looking for, in all threads.
        for _ in range(100):
            pass

    # --- in the caller. It asks ``done``: for Python 3.11 a thread whose join was interrupted has ended.

    def ended(self, seconds: float) -> bool:
        """Whether the work ends within that time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self.done.is_set():
            self.done.wait(min(left, _LOOKED))
        return self.done.is_set()

    def stop(self) -> None:
        """Returns when the thread has ended, and no sooner for another Ctrl-C."""
        self.warn()
        with self.lock:
            self.cancelled = True
        interrupt: BaseException | None = None
        while self.begun:
            try:
                if self.ended(_GRACE):
                    break
                with self.lock:
                    if self.open and not self.done.is_set():
                        _raise_in(self.thread)
            except BaseException as error:
                interrupt = error
        if self.begun:
            self.thread.join()
        if interrupt is not None:
            raise interrupt

    def result(self) -> T:
        self.thread.join()
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # with it goes what the work's frames hold
        if not self.made:
            raise Stopped
        return self.made[0]


def _raise_in(thread: threading.Thread) -> None:
    """At its next line."""
    ident, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stopped)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
