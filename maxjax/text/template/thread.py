"""``run_until``: runs work in its own thread, and ends it after a time limit or the caller's Ctrl-C.

A tracer (``sys.settrace``) would disable debuggers and coverage, and Python removes a tracer that
raises; a signal reaches only the main thread. So the caller waits for the thread, and after the
time limit it posts an exception to it, again and again: code that swallows one (``except
Exception``, a callback of the garbage collector) does not swallow the next.
"""

from __future__ import annotations

import contextvars
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_GRACE = 0.1  # seconds before each posted exception, in which the work may end by itself
_POLL = 0.25  # seconds after which a waiting caller runs a line of Python, where Ctrl-C reaches it


class Stopped(BaseException):
    """Ends the work. It is not an ``Exception``, which the work itself might catch."""


def run_until(work: Callable[[], T], seconds: float, warn: Callable[[], None] = lambda: None) -> T:
    """Runs ``work()`` in a thread with the caller's context variables, and returns its result.

    Args:
        work: the function to run; an exception that it raises is raised here.
        seconds: the time limit, after which the work is stopped.
        warn: a function that is called before the work is stopped, so that it may end by itself. It
            must not raise.

    Raises:
        Stopped: the time is over. The thread has ended.
        KeyboardInterrupt: Ctrl-C was pressed while the caller waited. The thread has ended.

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
    """The work and its thread; ``open`` says whether exceptions may be posted to it."""

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
        """Runs the work. Until ``_close``, a posted exception may be raised at any line in here."""
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
        # A posted exception that is still pending is raised here. If a thread ended with one,
        # Python 3.11 would keep looking for it in all threads.
        for _ in range(100):
            pass

    # --- in the caller. It checks ``done``, since after an interrupted join Python 3.11 takes a
    # running thread for one that has ended.

    def ended(self, seconds: float) -> bool:
        """Whether the work ends within that time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self.done.is_set():
            self.done.wait(min(left, _POLL))
        return self.done.is_set()

    def stop(self) -> None:
        """Stops the work and waits until the thread has ended, even if Ctrl-C is pressed again."""
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
            del error  # frees what the frames of the work refer to
        if not self.made:
            raise Stopped
        return self.made[0]


def _raise_in(thread: threading.Thread) -> None:
    """Raises ``Stopped`` in the thread at its next line."""
    ident, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stopped)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
