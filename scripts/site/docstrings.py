"""Docstrings as Markdown, for mkdocstrings: roles of Sphinx, and doctests wherever they stand.

Ours are written for ``help()``: an example is under "Example:", or in the text; a name in another
place is ``:func:`name` ``. Griffe calls `Docstrings` with everything that it reads.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

from scripts.site.reference import package

ROLE = re.compile(r":(?:func|class|meth|attr|mod|data|obj|exc):`~?([^`]+)`")
_PLACES: dict[str, str] = {}


def _places() -> dict[str, str]:
    """Path of a definition, or of a public name → the anchor of its entry."""
    if not _PLACES:
        sources = package()
        for names in sources.public.values():
            _PLACES.update((name.path, name.path) for name in names)
        _PLACES.update((home, name.path) for home, name in sources.entries.items())
    return _PLACES


def markdown(text: str, places: dict[str, str]) -> str:
    """A docstring for Griffe's reader of Google's style."""
    text = re.sub(r"^(\s*)Example:\s*$", r"\1Examples:", text, flags=re.MULTILINE)
    text = ROLE.sub(lambda found: _link(found[1], places), text)
    lines: list[str] = []
    fence: str | None = None  # the indentation of the doctest that is open
    in_examples = False
    for line in [*text.split("\n"), ""]:
        indent = line[: len(line) - len(line.lstrip())]
        if line and not indent:
            in_examples = line == "Examples:"
        if fence is not None and not line.strip():
            lines.append(f"{fence}```")
            fence = None
        elif fence is None and not in_examples and line.lstrip().startswith(">>> "):
            fence = indent
            lines += ["", f"{indent}```pycon"]
        lines.append(line)
    return "\n".join(lines[:-1])


def _link(target: str, places: dict[str, str]) -> str:
    name = target.removesuffix("()")
    return f"[`{target}`][{places[name]}]" if name in places else f"`{target}`"


class Docstrings(Extension):
    """Changes the docstring of each object that Griffe has read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Griffe's hook."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value, _places())
