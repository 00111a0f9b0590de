"""Checks the regular expressions of tokenizers for exponential search time.

They are run by Oniguruma, which tries every way to divide a text among the loops of an expression: for nested loops
their number may be exponential in the length of the text. To find the loops no full parser is needed: groups,
classes, escapes and quantifiers are enough.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointLimitError, UserInputError

# Published expressions have up to two thousand characters, mostly lists of letters.
_LONGEST = 16_384
# Loops in a row in one alternative; published expressions have two.
_MAX_LOOPS = 4
# A range of repetitions with a larger upper bound counts as a loop without a bound.
_HIGH = 64
_QUANTIFIER = re.compile(r"([*+?]|\{(\d*)(,?)(\d*)\})[+?]?")
# An escape with an argument, or any single character after the backslash.
_ESCAPE = re.compile(
    r"\\(?:[pPkgx]\{[^}]*\}|[kg]<[^>]*>|x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|.)", re.S
)
# A group, a comment, or options; no other group of Oniguruma's is in any published file.
_OPEN = re.compile(
    r"\((\?(?:<?[=!]|#(?:\\.|[^\\)])*\)|<\w+>|'\w+'|>|~|[a-zA-Z-]*:|[a-zA-Z-]*\)))?", re.S
)
_FREE_SPACING = re.compile(r"\?[a-wyzA-Z]*x[a-zA-Z-]*[:)]")
_UNKNOWN = re.compile(r"\?[^<#]|\*[a-zA-Z]")
_ANCHORS = frozenset(("\\b", "\\B", "\\A", "\\z", "\\Z", "\\G", "\\K"))


@dataclass
class _Part:
    """Properties of an atom, an alternative or a group.

    Attributes:
        least: whether every match has at least one character.
        fixed: whether it has a part that is not repeated, which always matches something.
        loops: the number of unbounded loops in a row.
        risky: whether repeating it is refused: it has loops, and nothing fixed between two rounds.
    """

    least: bool = False
    fixed: bool = False
    loops: int = 0
    risky: bool = False

    def then(self, other: _Part) -> None:
        self.least |= other.least
        self.fixed |= other.fixed
        self.loops += other.loops
        self.risky = self.loops > 0 and not self.fixed

    def otherwise(self, other: _Part) -> None:
        self.least &= other.least
        self.fixed &= other.fixed
        self.loops = max(self.loops, other.loops)
        self.risky |= other.risky


def check_pattern(pattern: str) -> None:
    """Raises an error for an expression whose time may grow faster than a power of the text length.

    An invalid expression passes: the package that compiles it reports the error.

    Raises:
        UserInputError: the expression is refused; the message says why.

    Example:
        >>> check_pattern(r"[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}(?=(\\d{3})+(?!\\d))")
        >>> check_pattern("(a+)+$")
        Traceback (most recent call last):
        ...
        maxjax.errors.UserInputError: a loop inside a loop: '(a+)+$'
    """
    if len(pattern) > _LONGEST:
        raise UserInputError(f"it has {len(pattern)} characters; the limit is {_LONGEST}")
    _read(pattern)


def refuse_slow(pattern: str, key: str, **where: Any) -> None:
    """:func:`check_pattern` of an expression from a checkpoint's file.

    Args:
        key: what has the expression, for the message.
        where: path and hint, as for CheckpointError.

    Raises:
        CheckpointLimitError: the expression is refused.
    """
    try:
        check_pattern(pattern)
    except UserInputError as error:
        message = f"{key} has a regular expression that is refused: {error}"
        raise CheckpointLimitError(message, **where) from None


def matches_something(pattern: str) -> bool:
    """Whether every match has at least one character; False if that is not known.

    Example:
        >>> matches_something(" {2,}"), matches_something("a*"), matches_something("a|b?")
        (True, False, False)
    """
    try:
        return _read(pattern).least
    except UserInputError:
        return False


def _read(pattern: str) -> _Part:
    """Parses the whole expression as one part."""
    # For each open group: its kind, its finished alternatives, and the present one.
    open_groups: list[tuple[str, _Part | None, _Part]] = []
    kind, done, current = "", None, _Part()
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "|":
            done, current = _joined(done, current), _Part()
            at += 1
            continue
        if letter == "(":
            match = _OPEN.match(pattern, at)
            assert match is not None  # a parenthesis alone matches
            mark, at = match[1] or "", match.end()
            if _FREE_SPACING.fullmatch(mark) or not mark and _UNKNOWN.match(pattern, at):
                what = f"a group that begins with '({mark or pattern[at : at + 2]}'"
                raise UserInputError(f"{what}: {_short(pattern)}")
            if not mark.endswith(")"):  # not a comment, nor options of what follows
                open_groups.append((kind, done, current))
                kind, done, current = mark, None, _Part()
            continue
        if letter == ")":
            if not open_groups:
                return _Part()  # not a valid expression
            atom = _joined(done, current)
            if kind in ("?=", "?!", "?<=", "?<!"):
                atom = _Part()
            elif kind == "?>":
                atom.loops, atom.risky = min(atom.loops, 1), False  # is never backtracked into
            kind, done, current = open_groups.pop()
            at += 1
        elif letter == "[":
            at, atom = _after_class(pattern, at), _Part(True, True)
        elif letter == "\\":
            match = _ESCAPE.match(pattern, at)
            text = match[0] if match else "\\"
            if text.startswith("\\g"):
                raise UserInputError(f"an expression that calls itself: {_short(pattern)}")
            at += len(text)
            atom = _Part() if text in _ANCHORS or text.startswith("\\k") else _Part(True, True)
            if text[1:].isdigit():  # a backreference, whose group may have matched nothing
                atom = _Part()
        else:
            at += 1
            atom = _Part() if letter in "^$" else _Part(True, True)
        at = _repeated(pattern, at, atom)
        current.then(atom)
        if current.loops > _MAX_LOOPS:
            raise UserInputError(f"more than {_MAX_LOOPS} loops in a row: {_short(pattern)}")
    return _joined(done, current)


def _joined(done: _Part | None, current: _Part) -> _Part:
    if done is not None:
        current.otherwise(done)
    return current


def _repeated(pattern: str, at: int, atom: _Part) -> int:
    """Applies the quantifiers at ``at`` to an atom, in place, and returns where they end."""
    while match := _QUANTIFIER.match(pattern, at):
        text, low, comma, high = match[1], match[2], match[3], match[4]
        if text == "{,}" or text == "{}":  # literal characters
            return at
        least = 1 if text == "+" else int(low[:9] or 0) if low else 0
        most = int(high[:9]) if high else least if low and not comma else None
        most = 1 if text == "?" else most
        if most is None or most > _HIGH and most != least:
            if atom.risky:
                raise UserInputError(f"a loop inside a loop: {_short(pattern)}")
            atom.loops = max(atom.loops, 1)
            atom.fixed = False
        elif most != least:
            atom.fixed = False
        atom.least &= least > 0
        atom.risky = atom.loops > 0 and not atom.fixed
        at = match.end()
    return at


def _after_class(pattern: str, at: int) -> int:
    """The position after a character class, which may contain nested classes."""
    depth = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif letter == "[":
            depth += 1
            at += 1 if pattern.startswith("^", at + 1) else 0
            at += 1 if pattern.startswith("]", at + 1) else 0  # a literal at this position
        elif letter == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return at


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:59] + "…")
