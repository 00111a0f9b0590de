"""Errors of the command line in one line, texts that are given to it, and its handling of SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
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


@contextmanager
def stoppable() -> Iterator[None]:
    """In this context SIGTERM ends a command like Ctrl-C, so that partial files are removed.

    Python ignores exceptions in some places, such as the callbacks of JAX in the garbage collector,
    and would ignore that of a signal there. Then a timer raises it again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored: list[BaseException] = []

    def stop(*_: Any) -> None:
        raise SystemExit(143)

    def again(_: int, frame: Any) -> None:
        if frame is not None and frame.f_code is ignore.__code__:  # there it would be ignored too
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
            return
        raise ignored[-1].with_traceback(None)

    def ignore(found: Any) -> None:
        if isinstance(found.exc_value, SystemExit | KeyboardInterrupt):
            ignored.append(found.exc_value)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        else:
            hook(found)

    hook, sys.unraisablehook = sys.unraisablehook, ignore
    numbers = {signal.SIGTERM: stop, signal.SIGALRM: again}
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
