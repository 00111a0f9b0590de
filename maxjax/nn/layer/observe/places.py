"""The places of a model, which are pairs of a Module's name and a site, and patterns that match them.

A pattern is the name of a Module, in which ``*`` matches anything within one part of the name and ``**`` any
number of parts, and optionally a site after a colon: ``layers.*.self_attn:weights``.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ....errors import UserInputError, closest, some
from ..walk import Walk
from .frames import OUTPUT, label_of

Place = tuple[str, str]

_NAMES: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


def names_of(model: Any) -> tuple[str, ...]:
    """The full names of a Module ("") and of all Modules below it, with each layer of a stack separately."""
    definition = model._mx_definition()[0]
    found = _NAMES.get(definition)
    if found is None:
        names = dict.fromkeys(prefix.rstrip(".") for prefix in Walk(model).prefixes)
        found = _NAMES[definition] = tuple(sorted(names, key=natural))
    return found


def natural(name: str) -> list[tuple[int, str]]:
    """A key for sorting names in natural order: ``layers.2`` before ``layers.10``.

    Example:
        >>> sorted(["layers.10", "layers.2"], key=natural)
        ['layers.2', 'layers.10']
    """
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def split(pattern: Any) -> Place:
    """The name and the site of a pattern; without a colon, the site is that of the output.

    Raises:
        UserInputError: ``pattern`` is not a str.
    """
    if not isinstance(pattern, str):
        raise UserInputError(f"a pattern is a str such as 'layers.*.mlp', not {pattern!r:.60}")
    name, colon, site = pattern.partition(":")
    return name, site if colon else OUTPUT


def has_wildcard(name: str) -> bool:
    """Whether a pattern may match several names."""
    return any(character in name for character in "*?[")


def match(name: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches as a whole; if there are none, those of which it matches the end.

    Example:
        >>> match("layers.*", ["layers.0", "layers.0.mlp"])
        ['layers.0']
        >>> match("layers.1", ["model.layers.1", "model.layers.11"])
        ['model.layers.1']
    """
    names = list(names)
    try:
        whole, end = re.compile(_regex(name)), re.compile(rf"(?:.+\.)?{_regex(name)}")
    except re.error:  # a range such as [9-1]
        return []
    found = [one for one in names if whole.fullmatch(one)]
    return found if found or not name else [one for one in names if end.fullmatch(one)]


def _regex(name: str) -> str:
    parts = name.split(".")
    text = ""
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if part == "**":
            text += r"[^.]+(?:\.[^.]+)*" if last else r"(?:[^.]+\.)*"
        else:
            text += _part(part) + ("" if last else r"\.")
    return text


def _part(part: str) -> str:
    pieces = re.split(r"(\*+|\?|\[[^\]]*\])", part)
    known = {"?": "[^.]"}
    return "".join(
        "[^.]*" if set(piece) == {"*"}
        else "[^." + piece[2:] if piece.startswith("[!")
        else known.get(piece, piece) if piece[:1] in ("?", "[") and piece[-1:] in ("?", "]")
        else re.escape(piece)
        for piece in pieces
        if piece
    )  # fmt: skip


def places(model: Any, pattern: Any, what: str) -> tuple[Place, ...]:
    """The places of a model that a pattern matches.

    Args:
        what: name of the function that was called, for messages.

    Raises:
        UserInputError: the pattern matches no Module (the message suggests the nearest name), or its site is invalid.
    """
    name, site = split(pattern)
    names = names_of(model)
    found = match(name, names)
    if not found:
        raise UserInputError(
            f"{what}: no module of {type(model).__name__} is named '{name}'{nearest(name, names)}"
        )
    if not site.isidentifier():
        raise UserInputError(
            f"{what}: '{pattern}' has no site after the colon: it is output, input, inputs, or a name "
            "that the module gives to a value, such as weights"
        )
    return tuple((one, site) for one in found)


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint for the message about a name that is not among ``names``."""
    starred = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", one) for one in names if one))
    candidates = [*starred, *(one for one in names if one)]
    # The ends of names, because the caller may omit the beginning.
    ends = {end: one for one in candidates for end in _ends(one)}
    like = closest(name, candidates) or ends.get(closest(name, ends) or "")
    if like is None:
        return f"; there are {some(starred, 12)}" if starred else "; it has no modules in it"
    return f" (did you mean '{like}'?); there are {some(starred, 6)}"


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(1, len(parts))]


def unseen(
    wanted: Iterable[Place], passed: Iterable[Place], seen: set[Place], what: str, *, strict: bool
) -> UserInputError | None:
    """The error if none of a pattern's places was captured or patched; otherwise None.

    Args:
        wanted: places of one pattern.
        passed: all places that were captured or patched.
        seen: all places that values have passed in the run.
        strict: whether a Module that did not run is an error; a site that a Module does not have always is.
    """
    wanted = list(wanted)
    if set(wanted) & set(passed):
        return None
    name, site = wanted[0]
    ran = {one for one, _ in seen}
    missing = [place for place in wanted if place[0] in ran]
    if missing:
        name, site = missing[0]
        known = sorted({s for n, s in seen if n == name} | {"output", "input", "inputs"})
        like = closest(site, known)
        hint = f" (did you mean '{like}'?)" if like else ""
        others = sorted({n for n, s in seen if s == site}, key=natural)
        more = f"; {some([label_of(n, site) for n in others], 3)} would be one" if others else ""
        return UserInputError(
            f"{what}: '{name}' has no '{site}'{hint}: it has {', '.join(known)}{more}"
        )
    if not strict:
        return None
    return UserInputError(
        f"{what}: '{label_of(name, site)}' did not run: the function does not call this module, or it "
        "does so in a function compiled for another model object"
    )
