"""The places of a model, which are pairs of a Module's name and a site, and patterns that match them.

A pattern is the name of a Module, in which ``*`` matches anything within one part of the name and ``**`` any
number of parts, and optionally a site after a colon: ``layers.*.self_attn:weights``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ....errors import UserInputError, closest, some
from ....graph.weight.running import names_below

Place = tuple[str, str]
OUTPUT, INPUT, INPUTS = SITES = ("output", "input", "inputs")

_TOKEN = re.compile(
    r"(?P<parts>(?<![^.])\*\*\.)|(?P<rest>(?<![^.])\*\*$)|(?P<any>\*+)|(?P<one>\?)"
    r"|(?P<none_of>\[![^\].]*\])|(?P<one_of>\[[^\].]*\])|(?P<text>.)",
    re.DOTALL,
)
_REGEX = {
    "parts": lambda token: r"(?:[^.]+\.)*",
    "rest": lambda token: r"[^.]+(?:\.[^.]+)*",
    "any": lambda token: "[^.]*",
    "one": lambda token: "[^.]",
    "none_of": lambda token: f"[^.{token[2:]}",
    "one_of": lambda token: token,
    "text": re.escape,
}


def label_of(name: str, site: str) -> str:
    """Return the label of a place: the name of the Module for its output, otherwise the name and the site."""
    return name if site == OUTPUT else f"{name}:{site}"


def of_first_layer(name: str) -> str:
    """Return a name with an index instead of the part that represents several layers of a stack (``Span.pattern``).

    Example:
        >>> of_first_layer("layers.*.mlp"), of_first_layer("layers.2:8:3")
        ('layers.0.mlp', 'layers.2')
    """
    return re.sub(r"(?<![^.])(?:\*|(\d+):[\d:]+)(?![^.])", lambda part: part[1] or "0", name)


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key for sorting names in natural order: ``layers.2`` before ``layers.10``.

    Example:
        >>> sorted(["layers.10", "layers.2"], key=natural)
        ['layers.2', 'layers.10']
    """
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def split(pattern: Any) -> Place:
    """Split a pattern into a name and a site; without a colon, the site is that of the output.

    Raises:
        UserInputError: ``pattern`` is not a str.
    """
    if not isinstance(pattern, str):
        raise UserInputError(f"a pattern is a str such as 'layers.*.mlp', not {pattern!r:.60}")
    name, colon, site = pattern.partition(":")
    return name, site if colon else OUTPUT


def has_wildcard(name: str) -> bool:
    """Return whether a pattern may match several names."""
    return any(character in name for character in "*?[")


def match(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches as a whole; if there are none, those of which it matches the end.

    Example:
        >>> match("layers.*", ["layers.0", "layers.0.mlp"])
        ['layers.0']
        >>> match("layers.1", ["model.layers.1", "model.layers.11"])
        ['model.layers.1']
    """
    names = list(names)
    regex = _TOKEN.sub(lambda token: _REGEX[str(token.lastgroup)](token[0]), name)
    try:
        whole, end = re.compile(regex), re.compile(rf"(?:.+\.)?{regex}")
    except re.error:  # a range such as [9-1]
        return []
    found = [one for one in names if whole.fullmatch(one)]
    return found if found or not name else [one for one in names if end.fullmatch(one)]


def places(model: Any, pattern: Any, caller: str) -> tuple[Place, ...]:
    """Return the places of a model that a pattern matches, in natural order.

    Args:
        caller: name of the function that was called, for messages.

    Raises:
        UserInputError: the pattern matches no Module (the message suggests the nearest name), or its site is invalid.
    """
    name, site = split(pattern)
    prefixes = names_below(model).prefixes.values()
    names = sorted({prefix.rstrip(".") for prefix in prefixes}, key=natural)
    found = match(name, names)
    if not found:
        raise UserInputError(
            f"{caller}: no module of {type(model).__name__} is named '{name}'{_nearest(name, names)}"
        )
    if not site.isidentifier():
        raise UserInputError(
            f"{caller}: '{pattern}' has no site after the colon: it is output, input, inputs, or a name "
            "that the module gives to a value, such as weights"
        )
    return tuple((one, site) for one in found)


def _nearest(name: str, names: Sequence[str]) -> str:
    """Return a hint for the message about a name that is not among ``names``."""
    starred = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", one) for one in names if one))
    if not starred:
        return "; it has no modules in it"
    # The ends of names too, because the caller may omit the beginning.
    full = {one: one for one in (*starred, *filter(None, names))}
    ends = {one[dot.end() :]: one for one in full for dot in re.finditer(r"\.", one)}
    like = full.get(closest(name, full) or "") or ends.get(closest(name, ends) or "")
    if like is None:
        return f"; there are {some(starred, 12)}"
    return f" (did you mean '{like}'?); there are {some(starred, 6)}"
