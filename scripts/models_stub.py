"""Writes maxjax/models/__init__.pyi: the names of the package for type checkers.

It has the imports of ``__init__.py`` and the classes of the registry's models.

Usage::

    python scripts/models_stub.py
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maxjax.models.registry import classes

FOLDER = Path(__file__).resolve().parent.parent / "maxjax" / "models"


def stub() -> str:
    """Return the text of the stub.

    Example:
        >>> "from .llama import Llama as Llama" in stub()
        True
    """
    tree = ast.parse((FOLDER / "__init__.py").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    lines = [ast.unparse(node) for node in checked.body]
    for file, names in classes().items():
        lines += [f"from .{file} import {name} as {name}" for name in names.split()]
    wrapped = map(_wrapped, sorted(lines, key=_order))
    return "# Written by scripts/models_stub.py.\n" + "\n".join(wrapped) + "\n"


def _wrapped(line: str) -> str:
    """An import as ruff formats it: in three lines if it has more than 100 characters."""
    start, _, name = line.partition(" import ")
    return line if len(line) <= 100 else f"{start} import (\n    {name},\n)"


def _order(line: str) -> tuple[str, bool, list[str | int]]:
    """The place of an import as ruff sorts them: by file, names in capitals, then the others (Qwen3 before Qwen35)."""
    _, file, _, name, *_ = line.split()
    parts = re.split(r"(\d+)", name)
    return file, not name.isupper(), [int(part) if part.isdigit() else part for part in parts]


if __name__ == "__main__":
    (FOLDER / "__init__.pyi").write_text(stub())
