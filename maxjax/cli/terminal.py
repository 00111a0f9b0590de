"""Errors of the command line in one line, texts that are given to it, and its handling of SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import (
    CheckpointError,
    MissingCompilerError,
    UnsupportedModelError,
    UserInputError,
)

# Errors that are not defects of maxjax: their message is enough.
EXPECTED = (
    CheckpointError, UserInputError, UnsupportedModelError, OSError, MemoryError,
    FloatingPointError, MissingCompilerError,
)  # fmt: skip


def explain(error: Exception) -> str:
    """The error in one line.

    Example:
        >>> explain(UserInputError("no such option"))
        'no such option'
        >>> explain(FileNotFoundError(2, "No such file or directory", "a.txt"))
        'a.txt: No such file or directory'
        >>> explain(KeyError("x"))
        "unexpected KeyError: 'x' (--debug shows where)"
    """
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename and message.startswith("[Errno"):
        message = f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, EXPECTED):
        return message
    return f"unexpected {type(error).__name__}: {message} (--debug shows where)"


def decoded(data: bytes, name: str) -> str:
    """The text of a file or of stdin, which must be UTF-8.

    Raises:
        UserInputError: it is not.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserInputError(f"{name} is not valid UTF-8, at byte {error.start}") from None


# Seconds until a swallowed exception is raised again.
_AGAIN = 0.02


class _Interrupt:
    """A handler of Ctrl-C that interrupts as Python's own does, but not where that would be ignored."""

    def __init__(self, raised: Callable[[BaseException, Any], None]):
        self._raised = raised

    def __call__(self, _: int, frame: Any) -> None:
        self._raised(KeyboardInterrupt(), frame)


def interrupts(handler: Any) -> bool:
    """Whether a handler of Ctrl-C raises ``KeyboardInterrupt``: Python's own, or that of ``stoppable``."""
    return handler is signal.default_int_handler or isinstance(handler, _Interrupt)


@contextmanager
def stoppable() -> Iterator[None]:
    """In this context SIGTERM ends a command like Ctrl-C, so that partial files are removed.

    Python ignores exceptions in some places, such as the callbacks of JAX in the garbage collector
    and the hook that it tells of them, and would ignore that of a signal there. Then a timer raises
    it again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored: list[BaseException] = []

    def is_in_hook(frame: Any) -> bool:
        while frame is not None and frame.f_code is not ignore.__code__:
            frame = frame.f_back
        return frame is not None

    def later(error: BaseException) -> None:
        ignored.append(error)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)

    def raised(error: BaseException, frame: Any) -> None:
        if is_in_hook(frame):
            later(error)
        else:
            raise error

    def stop(_: int, frame: Any) -> None:
        raised(SystemExit(143), frame)

    def again(_: int, frame: Any) -> None:
        raised(ignored[-1].with_traceback(None), frame)

    def ignore(found: Any) -> None:
        if isinstance(found.exc_value, SystemExit | KeyboardInterrupt):
            later(found.exc_value)
        else:
            hook(found)

    hook, sys.unraisablehook = sys.unraisablehook, ignore
    numbers: dict[int, Any] = {signal.SIGTERM: stop, signal.SIGALRM: again}
    if interrupts(signal.getsignal(signal.SIGINT)):
        numbers[signal.SIGINT] = _Interrupt(raised)
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    try:
        yield
    finally:
        waits = signal.setitimer(signal.ITIMER_REAL, 0)[0] > 0
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook
    if waits:
        raise ignored[-1]
