"""What a file may ask of this process: the limits, and which of them are in force.

A file says itself how much of it there is, so each count is held against a limit before it is
believed. Whoever trusts a file raises one with ``limits=``, which the public functions that open
files take, or with ``--limit`` on the command line. A model is more than one file: its
configuration, tokenizer and index are read deep below these functions, so the limits are in
force for all that is opened meanwhile instead of being handed from one function to the next.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from ..errors import CheckpointLimitError, UserInputError, closest


@dataclass(frozen=True, slots=True)
class Limits:
    """What a file may ask of this process before it is refused with CheckpointLimitError.

    Each message names the field to raise, for ``limits=`` of ``maxjax.load``, ``load_weights`` and
    the other functions that open files, or for ``--limit`` on the command line. All are whole
    numbers below 2^63.

    Raises:
        UserInputError: A field is no whole number from 0 to 2^63 - 1.

    Example:
        >>> Limits(tensors=5_000_000).json_depth  # load_weights(path, limits=Limits(...))
        64
    """

    header_bytes: int = 100_000_000
    """Length of a header, or of an archive's directory (100 MB is safetensors' own bound)."""
    json_bytes: int = 200_000_000
    """Length of an index, a configuration or a tokenizer file."""
    json_depth: int = 64
    """Arrays and objects inside one another."""
    json_values: int = 10_000_000
    """Commas and escaped characters in a JSON text: what takes time to parse."""
    json_digits: int = 4300
    """Digits of one number; the time to convert them grows with their square."""
    tensors: int = 200_000
    """Tensors in one file, or members in an archive."""
    name_bytes: int = 65_536
    """Length of a tensor's name in UTF-8."""
    tensor_bytes: int = 2**63 - 1
    """Bytes of one tensor with dimensions of size 0 left out: NumPy and XLA hold no more."""
    metadata_keys: int = 16_384
    """Keys of the metadata of a GGUF file."""
    array_items: int = 2_000_000
    """Strings in the metadata of a GGUF file; an array inside an array counts as 64."""
    array_depth: int = 4
    """Arrays inside one another in the metadata of a GGUF file."""
    alignment_bytes: int = 1 << 20
    """What a GGUF file may align its tensors to."""
    member_ratio: int = 1000
    """What a member of an archive may become, as a multiple of its bytes; 1 MiB is free."""
    npy_header_bytes: int = 65_536
    """Length of the header of a NumPy array."""
    pickle_bytes: int = 64 << 20
    """Length of the pickle of a PyTorch file, or of one value in it."""
    pickle_instructions: int = 1_000_000
    """Instructions of a pickle beside 64 for each tensor it makes."""
    pickle_items: int = 2_000_000
    """Values that a pickle holds when they are written out at each place where they stand."""
    pickle_depth: int = 100
    """Containers inside one another in a pickle."""
    storage_bytes: int = 1 << 50
    """Bytes of one storage of a PyTorch file."""
    expansion: int = 16
    """How often tensors may take the bytes of a PyTorch file's storages; 1 GiB is free."""
    shared_bytes: int = 0
    """Bytes of a file that several tensors may claim, summed over the tensors after the first."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 0 <= value <= _MOST:
                raise UserInputError(
                    f"Limits({field.name}={value!r}): a limit is a whole number from 0 to 2**63 - 1"
                )

    def error(
        self,
        problem: str,
        option: str,
        value: object,
        *,
        fixed: str | None = None,
        **where: Any,
    ) -> CheckpointLimitError:
        """The error for ``value`` above the field ``option``; ``where`` as for CheckpointError.

        ``fixed`` says why raising the field does not help, where it does not.
        """
        hint = raising(option)
        if isinstance(value, int) and value > _MOST:
            fixed = f"No value of {option} allows it: nothing beyond 2^63 - 1 can be addressed."
            if value.bit_length() > 200:
                value = f"an integer of {value.bit_length()} bits"
        return CheckpointLimitError(
            problem,
            expected=f"at most {getattr(self, option)}",
            found=value,
            hint=fixed or hint,
            **where,
        )

    @classmethod
    def parse(cls, settings: Iterable[str]) -> Limits:
        """The limits that texts like ``tensors=1000000`` change.

        Raises:
            UserInputError: A text is not of this form, or names no limit.

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
                    f"{name} is a whole number, as in {name}=1000000, not {value!r}"
                )
            found[name] = int(value)
        return cls(**found)


# Sizes and places are 64-bit numbers with a sign to NumPy, XLA and the system.
_MOST = 2**63 - 1
_IN_FORCE = ContextVar("limits", default=Limits())  # noqa: B039 (frozen)


def raising(option: str) -> str:
    """The sentence that tells how the field ``option`` is raised.

    Example:
        >>> raising("tensors")
        'If you trust the file, raise the limit: limits=maxjax.Limits(tensors=N), or --limit tensors=N.'
    """
    return (
        f"If you trust the file, raise the limit: limits=maxjax.Limits({option}=N), or "
        f"--limit {option}=N."
    )


def of_digits(count: int) -> str | None:
    """Why a number of so many digits is not read whatever ``json_digits`` is, if it is not."""
    most = sys.get_int_max_str_digits()
    if not 0 < most < count:
        return None
    return f"Raising json_digits is not enough: sys.set_int_max_str_digits has {most} as well."


def in_force(limits: Limits | None = None) -> Limits:
    """The limits themselves, or where none are given those that :func:`allowing` put in force.

    Raises:
        UserInputError: They are not Limits.

    Example:
        >>> in_force() == Limits()
        True
    """
    if limits is None:
        return _IN_FORCE.get()
    if not isinstance(limits, Limits):
        raise UserInputError(
            f"limits is a {type(limits).__name__}; it must be maxjax.Limits(...), "
            "as in limits=maxjax.Limits(tensors=5_000_000)"
        )
    return limits


@contextmanager
def allowing(limits: Limits | None) -> Iterator[Limits]:
    """Puts limits in force for all that is opened inside; None leaves those that are.

    Example:
        >>> with allowing(Limits(tensors=3)):
        ...     in_force().tensors
        3
    """
    found = in_force(limits)
    token = _IN_FORCE.set(found)
    try:
        yield found
    finally:
        _IN_FORCE.reset(token)
