"""The exception classes of maxjax, and the format of their messages.

A message is one line: the file, the tensor in single quotes, the byte offset, what is wrong with
the expected and found values, and what to do about it.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar


def printable(text: str, keep: str = "") -> str:
    """``text`` with every character escaped that is not printable, except those in ``keep``.

    What a file says (names, metadata, messages of templates) passes through here before it reaches a
    terminal, an error or a log: control characters and escape sequences move the cursor, marks of
    direction reorder a line, and lone surrogates cannot be printed.

    Example:
        >>> printable("a\\tb\\x1b[2J\\u202e")
        'a\\\\tb\\\\x1b[2J\\\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


class _PrintableRecords(logging.Filter):
    """Makes the messages of a logger printable; their line breaks stay."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if (safe := printable(text, keep="\n")) != text:
            record.msg, record.args = safe, ()
        return True


# All of maxjax logs here.
logging.getLogger("maxjax").addFilter(_PrintableRecords())


class _PrintableError(Exception):
    """An exception whose text is printable, whatever was put into it; its line breaks stay."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class CheckpointError(Exception):
    """A checkpoint cannot be read or written, is invalid, or does not match the model.

    Args:
        problem: description of the problem, without a full stop.
        path: path of the file.
        tensor: name of the tensor (or archive member).
        offset: byte offset in the file.
        expected, found: the two sides of a comparison; either may be absent.
        hint: one sentence that says what to do; by default the ``advice`` of the class.

    All of them are also attributes of the exception.

    Example:
        >>> e = CheckpointFormatError(
        ...     "unknown dtype", path="m.safetensors", tensor="w", expected="a safetensors dtype",
        ...     found="F128", hint="Convert the file.")
        >>> print(e)
        m.safetensors: tensor 'w': unknown dtype (expected a safetensors dtype, found F128). Convert the file.
    """

    advice: ClassVar[str] = ""

    def __init__(
        self,
        problem: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        expected: Any = None,
        found: Any = None,
        hint: str | None = None,
    ):
        self.problem = problem
        self.path = None if path is None else os.fsdecode(path)
        self.tensor = tensor
        self.offset = offset
        self.expected = expected
        self.found = found
        self.hint = self._advice() if hint is None else hint
        self.message = self._compose()
        super().__init__(self.message)

    def _advice(self) -> str:
        """The hint by default."""
        return self.advice

    def _compose(self) -> str:
        parts = []
        if self.path is not None:
            parts.append(_one_line(self.path))
        if self.tensor is not None:
            parts.append(f"tensor '{_one_line(self.tensor)}'")
        if self.offset is not None:
            parts.append(f"at byte {self.offset}")
        detail = []
        if self.expected is not None:
            detail.append(f"expected {_one_line(self.expected)}")
        if self.found is not None:
            detail.append(f"found {_one_line(self.found)}")
        text = _one_line(self.problem, 4000) + (f" ({', '.join(detail)})" if detail else "")
        message = ": ".join([*parts, text])
        return f"{message}. {self.hint}" if self.hint else message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self):
        errno = getattr(self, "errno", None)
        return (_rebuild, (type(self), self.__dict__.copy(), errno))


def _rebuild(
    cls: type[CheckpointError], state: dict[str, Any], errno: int | None
) -> CheckpointError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    error.args = (state["message"],)
    if isinstance(error, OSError):
        error.errno = errno
    return error


def _one_line(value: Any, limit: int = 300) -> str:
    """``value`` as text without control characters, cut after ``limit`` characters."""
    text = str(value)
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text)} characters)"
    return printable(text)


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """A file, shard, split part or host directory does not exist."""

    advice = "Check the path."

    def _advice(self) -> str:
        if self.path is not None and self.path.startswith("~"):
            return "Check the path: ~ is not expanded, pass os.path.expanduser(path)."
        return self.advice


class CheckpointAccessError(CheckpointError, PermissionError):
    """The file exists, but permission to read or write it is denied."""


class CheckpointTruncatedError(CheckpointError, ValueError):
    """The file is shorter than its own header declares."""


class CheckpointFormatError(CheckpointError, ValueError):
    """The file's structure is invalid, or its format is not the one that its name says."""

    advice = "Download the file again, or convert the model again."


class CheckpointCorruptError(CheckpointError):
    """A checksum does not match the bytes."""

    advice = "The file is corrupt: download or copy it again."


class CheckpointUnsafeError(CheckpointError):
    """The file would run code when it is loaded, or refers to a path outside its directory."""

    advice = "Get the model from a source that you trust, as safetensors if possible."


class CheckpointLimitError(CheckpointError):
    """A count, depth, ratio or size exceeds a limit that protects this process."""

    advice = "This limit is fixed: use another file."


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint and the model (or mesh) do not match: names, shapes or dtypes differ."""

    advice = "Check that the weights and the configuration belong to the same model."


class CheckpointChangedError(CheckpointError):
    """The file changed between being opened and being read to the end.

    Attributes:
        replaced: whether another checkpoint has replaced it; open it again to read the new one.
    """

    advice = "Open the checkpoint again."
    replaced = False


class CheckpointIncompleteError(CheckpointError):
    """The checkpoint was never written completely."""

    advice = "Save it again, or open an earlier step."


class CheckpointSaveError(CheckpointError, OSError):
    """Writing failed; the previous checkpoint is intact. ``errno`` is kept."""


class CheckpointBusyError(CheckpointError):
    """Another process is writing to the same path."""


class OutOfMemoryError(_PrintableError, MemoryError):
    """The requested arrays do not fit into the memory of a device or the host."""


class PeerLostError(_PrintableError, RuntimeError):
    """Another process of a multi-host run has ended or does not answer."""


class PeerFailedError(_PrintableError, RuntimeError):
    """Another process raised an error in a call that several processes make together."""


class ProgramMismatchError(RuntimeError):
    """The processes of a multi-host run were about to run different programs."""


class MissingCompilerError(ImportError):
    """The compiler for the requested kind of device is not installed, or does not load."""


class UnsupportedModelError(_PrintableError, NotImplementedError):
    """maxjax does not support the architecture that a configuration names."""


class UserInputError(_PrintableError, ValueError):
    """An argument of the caller (text, a path, an option) cannot be used."""


class UnknownArgumentError(UserInputError, TypeError):
    """A function was called with an unknown argument; the message suggests the right name."""


class releasing:
    """A context that releases the variables of the functions below it when memory runs out.

    An error keeps the frames of all functions that it came through, with their variables; a notebook
    keeps the last error. So arrays that were already there would take the memory that the next
    cell needs. Here the variables of these functions are deleted, up to the one that has this context.

    Example:
        >>> import weakref
        >>> class Large: ...
        >>> def load():
        ...     large = Large()
        ...     made.append(weakref.ref(large))
        ...     raise OutOfMemoryError("there is no more")
        >>> made, kept = [], None
        >>> try:
        ...     with releasing():
        ...         load()
        ... except OutOfMemoryError as error:
        ...     kept = error
        >>> made[0]() is None
        True
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if error is None or not _is_out_of_memory(error):
            return
        import gc
        import traceback

        seen: set[int] = set()
        one: BaseException | None = error
        while one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
        gc.collect()


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def integer_text(value: int) -> str:
    """An integer in decimal, or the number of its bits if it is very long.

    Example:
        >>> integer_text(12), integer_text(1 << 300)
        ('12', 'an integer of 301 bits')
    """
    bits = value.bit_length()
    return str(value) if bits <= 200 else f"an integer of {bits} bits"


def shown(value: Any, limit: int = 80) -> str:
    """A value as short text for a message: a text in quotes, a number, True, False or None; of others the type.

    Example:
        >>> shown("a" * 9, 5), shown(0.5), shown([1, 2])
        ("'aaaaa'…", '0.5', 'list')
    """
    if isinstance(value, str | bytes):
        # Cut before repr: a text of a file can be megabytes long.
        return repr(value[:limit]) + "…" * (len(value) > limit)
    if type(value) is int:
        return integer_text(value)
    return str(value) if isinstance(value, int | float | None) else type(value).__name__


def checked_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """An argument as an int; it may be Python's or NumPy's, or an array of JAX with one integer.

    Raises:
        UserInputError: ``value`` is not an integer from ``least`` to ``most``.

    Example:
        >>> checked_integer("batch_size", 0)
        Traceback (most recent call last):
        maxjax.errors.UserInputError: batch_size is 0: it must be an integer of at least 1
    """
    # A bool, of Python or NumPy, is an index in Python, but step=True is a mistake.
    is_integer = hasattr(value, "__index__") and type(value).__name__ != "bool"
    try:
        number = operator.index(value) if is_integer else least - 1
    except TypeError:  # an array of floats or of several numbers
        number = least - 1
    if number < least or (most is not None and number > most):
        what = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UserInputError(f"{name} is {shown(value)}: it must be an integer {what}")
    return number


def one_of(name: str, value: Any, choices: Iterable[Any]) -> Any:
    """An argument, which must be one of the choices.

    Raises:
        UserInputError: it is none of them.

    Example:
        >>> one_of("bias", "some", ["none", "all"])
        Traceback (most recent call last):
        maxjax.errors.UserInputError: bias must be one of 'none', 'all', not 'some'
    """
    if value not in (listed := list(choices)):
        raise UserInputError(
            f"{name} must be one of {', '.join(map(repr, listed))}, not {shown(value)}"
        )
    return value


def closest(name: str, names: Iterable[str]) -> str | None:
    """The only one of ``names`` that begins with ``name``, or the most similar, or None if none is close.

    Example:
        >>> closest("layers.0.wieght", ["layers.0.weight", "norm"])
        'layers.0.weight'
        >>> closest("gen", ["generate", "env"])
        'generate'
    """
    import difflib

    names = list(names)
    begun = [one for one in names if one.startswith(name)] if len(name) > 1 else []
    found = begun if len(begun) == 1 else difflib.get_close_matches(name, names, n=1)
    return found[0] if found else None


def first_line(error: BaseException, limit: int = 300) -> str:
    """The first line of an error's text; "" if it has none.

    Example:
        >>> first_line(ValueError("no such file\\nat 0x7f"))
        'no such file'
    """
    return next(iter(str(error).strip().splitlines()), "")[:limit]


def some(items: Sequence[Any], limit: int = 10, text: Callable[[Any], str] = str) -> str:
    """``items`` as texts, joined by commas: the first ``limit``, then the number of the others.

    Example:
        >>> some(["a", "b", "c"], limit=2)
        'a, b and 1 more'
    """
    first = ", ".join(map(text, items[:limit]))
    more = len(items) - limit
    return f"{first} and {more} more" if more > 0 else first


def differs(name: str, problem: str) -> str:
    """The message for a value whose shape or dtype is not that of the weight ``name``.

    Args:
        problem: what differs, and how.

    Example:
        >>> differs("norm", "dtype (expected=float32, actual=int8)")
        "Value provided to weight 'norm' had different dtype (expected=float32, actual=int8)"
    """
    return f"Value provided to weight '{name}' had different {problem}"
