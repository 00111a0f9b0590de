"""Limits on the memory and time that a file may make this process spend.

A file states its own counts and lengths, so each is compared with a limit before it is trusted.
If you trust a file, raise a limit with ``limits=``, which the public functions that open files
take, or with ``--limit`` on the command line. A model is more than one file: its configuration,
tokenizer and index are read deep inside these functions. Therefore the limits are a context
variable, which applies to all files opened in the context, and not an argument of every function.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from ..errors import CheckpointLimitError, UserInputError, closest, integer_text


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on what a file may contain; exceeding one raises a CheckpointLimitError.

    The error names the field to raise, with ``limits=`` of ``maxjax.load``, ``load_weights`` and
    the other functions that open files, or with ``--limit`` on the command line. All fields are
    integers from 0 to 2^63 - 1.

    Raises:
        UserInputError: a field is not an integer from 0 to 2^63 - 1.

    Example:
        >>> Limits(tensors=5_000_000).json_depth  # load_weights(path, limits=Limits(...))
        64
    """

    header_bytes: int = 100_000_000
    """Bytes of a header, or of an archive's directory (100 MB is safetensors' own bound)."""
    json_bytes: int = 64 << 20
    """Bytes of an index or a tokenizer file; as text in memory, twice as many bytes."""
    config_bytes: int = 8 << 20
    """Bytes of a configuration, such as config.json or tokenizer_config.json."""
    json_depth: int = 64
    """Nesting depth of arrays and objects in a JSON text."""
    json_values: int = 2_000_000
    """Commas and escaped characters in a JSON text, or twice its keys, which determine the time to parse it."""
    json_digits: int = 4300
    """Digits of one number in a JSON text; conversion time grows with their square."""
    tensors: int = 200_000
    """Tensors in one file, or members in an archive."""
    name_bytes: int = 65_536
    """Bytes of a tensor's name in UTF-8."""
    tensor_bytes: int = 2**63 - 1
    """Bytes of one tensor, ignoring dimensions of size 0; NumPy and XLA hold no more."""
    metadata_keys: int = 16_384
    """Metadata keys of a GGUF file."""
    array_items: int = 2_000_000
    """Strings in the metadata of a GGUF file; an array inside an array counts as 64."""
    array_depth: int = 4
    """Nesting depth of arrays in the metadata of a GGUF file."""
    alignment_bytes: int = 1 << 20
    """Alignment of the tensors in a GGUF file, in bytes."""
    member_ratio: int = 1000
    """Compression ratio of an archive member; 1 MiB of output is always allowed."""
    npy_header_bytes: int = 65_536
    """Bytes of the header of a NumPy array."""
    pickle_bytes: int = 64 << 20
    """Bytes of the pickle of a PyTorch file, or of one value in it."""
    pickle_instructions: int = 1_000_000
    """Instructions of a pickle, in addition to 64 for each tensor that it creates."""
    pickle_items: int = 2_000_000
    """Values in a pickle, counted once for every place that refers to them."""
    pickle_depth: int = 100
    """Nesting depth of containers in a pickle."""
    storage_bytes: int = 1 << 50
    """Bytes of one storage of a PyTorch file."""
    expansion: int = 16
    """Total bytes of tensors as a multiple of a PyTorch file's storages; 1 GiB is always allowed."""
    image_pixels: int = 1 << 27
    """Pixels of a picture, width × height, also after it was resized; in memory a pixel takes four bytes."""
    shared_bytes: int = 0
    """Bytes of a file that tensors may share, summed over all tensors after the first."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 0 <= value <= _MAX:
                raise UserInputError(
                    f"Limits({field.name}={value!r}): a limit must be an integer from 0 to 2**63 - 1"
                )

    def check(self, option: str, value: int, problem: str, **where: Any) -> None:
        """Raises the error of :meth:`error` if ``value`` is above the limit ``option``."""
        if value > getattr(self, option):
            raise self.error(problem, option, value, **where)

    def error(
        self,
        problem: str,
        option: str,
        value: object,
        *,
        fixed: str | None = None,
        **where: Any,
    ) -> CheckpointLimitError:
        """The error for a ``value`` above the limit ``option``; ``where`` as for CheckpointError.

        ``fixed`` replaces the hint if raising the limit does not help.
        """
        if isinstance(value, int) and value > _MAX:
            fixed = f"No value of {option} allows it: nothing beyond 2^63 - 1 can be addressed."
            value = integer_text(value)
        return CheckpointLimitError(
            problem,
            expected=f"at most {getattr(self, option)}",
            found=value,
            hint=fixed or raising(option),
            **where,
        )

    @classmethod
    def parse(cls, settings: Iterable[str]) -> Limits:
        """Limits changed by settings such as ``tensors=1000000``.

        Raises:
            UserInputError: a setting is malformed or names no limit.

        Example:
            >>> Limits.parse(["tensors=1000000"]).tensors
            1000000
        """
        known = [field.name for field in fields(cls)]
        found: dict[str, int] = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in known:
                like = closest(name, known)
                hint = f"did you mean {like}?" if like else f"there are {', '.join(known)}"
                raise UserInputError(f"no limit is called {name!r}: {hint}")
            if not (value.isascii() and value.isdecimal() and len(value) < 20):
                raise UserInputError(
                    f"{name} must be an integer, as in {name}=1000000, not {value!r}"
                )
            found[name] = int(value)
        return cls(**found)


# Sizes and offsets are signed 64-bit integers to NumPy, XLA and the operating system.
_MAX = 2**63 - 1
_CURRENT = ContextVar("limits", default=Limits())  # noqa: B039 (frozen)


def raising(option: str) -> str:
    """The sentence that tells the user how to raise the limit ``option``.

    Example:
        >>> raising("tensors")
        'If you trust the file, raise the limit: limits=maxjax.Limits(tensors=N), or --limit tensors=N.'
    """
    return (
        f"If you trust the file, raise the limit: limits=maxjax.Limits({option}=N), or "
        f"--limit {option}=N."
    )


def is_long(name: str, limits: Limits) -> bool:
    """Whether the name of a tensor is over the limit."""
    # UTF-8 takes at most four bytes per character.
    return 4 * len(name) > limits.name_bytes and len(name.encode()) > limits.name_bytes


def check_name(name: str, limits: Limits, **where: Any) -> None:
    """Refuses the name of a tensor that is over the limit; ``where`` as for CheckpointError.

    Raises:
        CheckpointLimitError: the name has too many bytes.
    """
    if is_long(name, limits):
        length = len(name.encode())
        raise limits.error("the tensor's name is too long", "name_bytes", length, **where)


def digits_hint(count: int) -> str | None:
    """The hint if Python itself refuses to convert a number of ``count`` digits, or None."""
    limit = sys.get_int_max_str_digits()
    if not 0 < limit < count:
        return None
    return f"Raise json_digits and Python's own limit of {limit}, with sys.set_int_max_str_digits."


def in_force(limits: Limits | None = None) -> Limits:
    """``limits`` itself, or if it is None, the limits that :func:`allowing` put in force.

    Raises:
        UserInputError: ``limits`` is not a Limits.

    Example:
        >>> in_force() == Limits()
        True
    """
    if limits is None:
        return _CURRENT.get()
    if not isinstance(limits, Limits):
        raise UserInputError(
            f"limits is a {type(limits).__name__}; it must be maxjax.Limits(...), "
            "as in limits=maxjax.Limits(tensors=5_000_000)"
        )
    return limits


@contextmanager
def allowing(limits: Limits | None) -> Iterator[Limits]:
    """Context in which ``limits`` apply to everything that is opened; None keeps the current ones.

    Example:
        >>> with allowing(Limits(tensors=3)):
        ...     in_force().tensors
        3
    """
    found = in_force(limits)
    token = _CURRENT.set(found)
    try:
        yield found
    finally:
        _CURRENT.reset(token)
