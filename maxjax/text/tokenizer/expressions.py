"""Lets through the regular expressions of tokenizers whose search time is bounded.

The ``tokenizers`` package runs them with Oniguruma, which tries one way through an expression after another: their
number may be exponential in the length of a text. Published expressions are known by their exact text. Any other one is
first run by ``trial.py``, in a process of limited CPU time and memory, on texts that are made to be slow for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from ...errors import CheckpointLimitError, shown
from ...models.gguf.tokenizer.splits import SPLITTINGS
from . import trial

# Published expressions have up to two thousand characters, mostly lists of letters.
_LONGEST = 16_384
_MOST = 16
# For all expressions of a tokenizer together.
_SECONDS, _MEMORY = 0.6, 256 << 20
_PUBLISHED = frozenset(
    [
        *(pattern for kind in SPLITTINGS.values() for pattern in kind.patterns),
        # Spaces, as transformers' converters and SentencePiece's normalisers write them.
        " {2,}", r"\s+", r"\s{2,}|[\n\r\t]", r"[\n\r\t]", r"\n", r"\A +| +\z", r"\A▁", r"^▁+$", r" +▁", "[ ▁]+\\z",
        "\\A +|[ ▁]+\\z",
        # CLIP, and GPT-2's without its last alternative.
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        # Groups of three digits, from the right.
        r"(?=(\d{3})+(?!\d))", r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    ]
)  # fmt: skip
# Expressions that were tried, with the reason why they are refused, or "".
_TRIED: dict[str, str] = {}


def check_expressions(found: Iterable[tuple[str, str]], **where: Any) -> None:
    """Raises an error for an expression that is not published, and for which a text takes too long.

    An invalid expression passes: the package that compiles it reports the error.

    Args:
        found: pairs of the key that has an expression and its text.
        where: path and hint, as for CheckpointError.

    Raises:
        CheckpointLimitError: an expression is refused; the message names it and the limit.

    Example:
        >>> check_expressions([("pre_tokenizer", r"\\p{L}+|\\p{N}{1,3}")])
        >>> check_expressions([("pre_tokenizer", "(a+)+$")])
        Traceback (most recent call last):
        ...
        maxjax.errors.CheckpointLimitError: 'pre_tokenizer' has an expression that is refused: '(a+)+$': a text of ...
    """
    keys = {pattern: key for key, pattern in found if pattern not in _PUBLISHED}
    for pattern, key in keys.items():
        if len(pattern) > _LONGEST:
            raise CheckpointLimitError(
                f"'{key}' has an expression that is too long",
                expected=f"at most {_LONGEST} characters", found=len(pattern), **where,
            )  # fmt: skip
    unknown = [pattern for pattern in keys if pattern not in _TRIED]
    if len(unknown) > _MOST:
        raise CheckpointLimitError(
            f"'{keys[unknown[0]]}' and others have too many expressions that are not published ones",
            expected=f"at most {_MOST}", found=len(unknown), **where,
        )  # fmt: skip
    if unknown:
        _TRIED.update(_tried(unknown))
    for pattern, key in keys.items():
        if reason := _TRIED.get(pattern):
            raise CheckpointLimitError(
                f"'{key}' has an expression that is refused: {shown(pattern, 60)}: {reason}",
                expected=f"at most {trial.SECONDS} s for each text of up to {trial.VERY_LONG} characters",
                **where,
            )  # fmt: skip


def _tried(patterns: list[str]) -> dict[str, str]:
    """The reason why each is refused, or "". After one that is refused the others are not tried."""
    from tokenizers import tokenizers

    limits = [str(_SECONDS), str(_MEMORY)]
    command = [sys.executable, "-I", "-S", trial.__file__, str(tokenizers.__file__), *limits]
    try:
        run = subprocess.run(
            command, input=json.dumps(patterns), encoding="ascii", check=False,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        return {patterns[0]: f"it is not a published one and cannot be tried out: {error}"}
    lines = run.stdout.splitlines()
    number, reason = json.loads(lines[-1]) if lines else (0, "")
    found = dict.fromkeys(patterns[:number], "")
    if number < len(patterns):
        most = f"{_SECONDS} s of CPU time and {_MEMORY >> 20} MiB of memory"
        found[patterns[number]] = reason or f"to try it out takes more than {most}"
    return found


def matches_something(pattern: str) -> bool:
    """Whether every match has at least one character; False if that is not known.

    Example:
        >>> matches_something(" {2,}"), matches_something("a*"), matches_something("a|b?")
        (True, False, False)
    """
    if len(pattern) > _LONGEST:
        return False
    parser = trial.ExpressionParser(pattern)
    try:
        return parser.parsed().matches_something and parser.at >= len(pattern)
    except trial.UnsupportedExpression:
        return False
