"""How the command line shows an error in one line, decodes its input, and handles SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import (
    CheckpointError,
    MissingCompilerError,
    PeerFailedError,
    PeerLostError,
    ProgramMismatchError,
    UnsupportedModelError,
    UserInputError,
    printable,
)

# Errors that are not defects of maxjax: their message is enough.
EXPECTED = (
    CheckpointError, UserInputError, UnsupportedModelError, OSError, MemoryError,
    FloatingPointError, MissingCompilerError, PeerFailedError, PeerLostError, ProgramMismatchError,
)  # fmt: skip

# A call, which stays as it is, or an argument with or without a value, as in overwrite=True.
_ARGUMENT = re.compile(r"[\w.]+\([^()]*\)|(?<![^\s(])([a-z_]+)=('[^']*'|[\w-]*)(?![^\s.,;:)])")
OptionFor = Callable[[str, str], str | None]


def as_options(text: str, option_for: OptionFor) -> str:
    """Replace the arguments of Python functions that a text names by a command's options.

    Args:
        text: a message or a note.
        option_for: returns the option for the name and value of an argument, or None.

    Example:
        >>> option = {"overwrite": "--overwrite"}
        >>> as_options("a.gguf exists: pass overwrite=True", lambda name, value: option.get(name))
        'a.gguf exists: pass --overwrite'
    """

    def option(found: re.Match[str]) -> str:
        return (found[1] and option_for(found[1], found[2].strip("'"))) or found[0]

    return _ARGUMENT.sub(option, text)


def explain(error: Exception, option_for: OptionFor | None = None) -> str:
    """Return the message of an error in one line.

    Args:
        error: what a command raised.
        option_for: as of ``as_options``; None leaves the names of arguments.

    Example:
        >>> explain(UserInputError("no such option"))
        'no such option'
        >>> explain(FileNotFoundError(2, "No such file or directory", "a.txt"))
        'a.txt: No such file or directory'
        >>> explain(KeyError("x"))
        "unexpected KeyError: 'x' (--debug shows where)"
    """
    message = " ".join(str(error).split()) or type(error).__name__
    if option_for is not None and isinstance(error, EXPECTED):
        message = as_options(message, option_for)
    if isinstance(error, OSError) and error.filename and message.startswith("[Errno"):
        message = f"{os.fsdecode(error.filename)}: {error.strerror}"
    message = printable(message)
    if isinstance(error, EXPECTED):
        return message
    return f"unexpected {type(error).__name__}: {message} (--debug shows where)"


def warn(text: str) -> None:
    """Writes a warning to stderr, in one line."""
    print(f"maxjax: warning: {printable(text)}", file=sys.stderr)


def decoded(data: bytes, name: str) -> str:
    """The text of a file or of stdin, which must be UTF-8.

    Raises:
        UserInputError: the data is not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserInputError(f"{name} is not valid UTF-8, at byte {error.start}") from None


# Seconds until a swallowed exception is raised again.
_AGAIN = 0.02
# The file of the functions that import modules.
_IMPORTS = "<frozen importlib._bootstrap>"


class _Interrupt:
    """A handler of Ctrl-C that raises KeyboardInterrupt, later where Python would ignore it."""

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

    Python ignores exceptions raised in some places, such as JAX's callbacks in the garbage collector
    and ``sys.unraisablehook`` itself, and an extension module that is being imported (NumPy's) makes
    an ImportError of them. An exception that a signal raises there would be lost, so a timer raises
    it again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored: list[BaseException] = []

    def is_lost(frame: Any) -> bool:
        while frame is not None:
            if frame.f_code is ignore.__code__ or frame.f_code.co_filename == _IMPORTS:
                return True
            frame = frame.f_back
        return False

    def later(error: BaseException) -> None:
        ignored.append(error)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)

    def raised(error: BaseException, frame: Any) -> None:
        if is_lost(frame):
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
