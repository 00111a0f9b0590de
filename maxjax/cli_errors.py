"""Floor 7. What the command line says of an error: one line.

Below: errors. Above: cli, and cli_chat, which goes on after one.
"""

from __future__ import annotations

from .errors import CheckpointError, UnsupportedModelError, UserInputError

# What a user can meet without a defect in maxjax: the message alone says enough.
EXPECTED = (
    CheckpointError, UserInputError, UnsupportedModelError, OSError, MemoryError,
    FloatingPointError,
)  # fmt: skip


def explain(error: Exception) -> str:
    """The error in one line.

    Example:
        >>> explain(UserInputError("no such option"))
        'no such option'
        >>> explain(KeyError("x"))
        "unexpected KeyError: 'x' (--debug shows where)"
    """
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, EXPECTED):
        return message
    return f"unexpected {type(error).__name__}: {message} (--debug shows where)"
