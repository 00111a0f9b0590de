"""Imports files of Modular MAX with ``max`` changed to ``maxjax``, in memory: for the scripts that run them.

MAX is neither a part nor a requirement of maxjax, and has a licence of its own: this module reads the files of
an installation and keeps none of their lines. ``maxjax.graph``, ``nn``, ``dtype``, ``driver`` and ``engine`` are
those of this repository. Modules of MAX outside those five (its server) are read from the installation too; those
that need MAX's native libraries are replaced by modules that refuse every name.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

BELOW = "pipelines/architectures"
HOW = (
    "This script reads the files of Modular MAX, which is not part of maxjax. Install it into an environment of its "
    "own (python -m venv ENV; ENV/bin/pip install max==26.7.0) and give its path: --max ENV/lib/python3.X/site-packages"
)
NATIVE = ("_core", "_core_types", "_mlir", "_kv_core", "mlir")
# Where modules of MAX are found whose names maxjax gives to others.
THEIRS = "maxjax._max"
OWN = Path(__file__).resolve().parent.parent / "maxjax"


def installation(given: str | None) -> Path | None:
    """The directory that contains ``max``; None if it is not installed."""
    if given is not None:
        place = Path(given)
        return place if (place / "max" / BELOW).is_dir() else None
    spec = importlib.util.find_spec("max")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))).parent if places else None


class _Renamed(ast.NodeTransformer):
    """Renames ``max`` to ``maxjax`` in imports."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if not node.level and (node.module or "").split(".")[0] == "max":
            if node.module == "max.tree" or (node.module == "max" and node.names[0].name == "tree"):
                node.module = f"{THEIRS}{(node.module or '')[3:]}"
                return node
            node.module = "maxjax" + (node.module or "")[3:]
            if node.module in ("maxjax._core.driver", "maxjax._core.engine"):
                node.module = node.module.replace(
                    "._core", ""
                )  # where MAX binds drivers and sessions
        return node

    def visit_Import(self, node: ast.Import) -> list[ast.AST]:
        whole = False
        for alias in node.names:
            if alias.name.split(".")[0] == "max":
                alias.name = "maxjax" + alias.name[3:]
                whole |= alias.asname is None
        found: list[ast.AST] = [node]
        if whole:  # `import max.nn` binds max
            found += ast.parse("max = maxjax").body
        return [ast.copy_location(one, node) for one in found]


class MaxFiles(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``maxjax.pipelines…``, which maxjax does not have, in an installation of MAX, renamed in memory.

    The five packages that maxjax re-implements are never taken from there. The ``__init__`` of a package
    is not run when a file in it is imported. When a name of it is used, only the line that imports that name
    runs: otherwise each file would import MAX's server.
    """

    package = "maxjax"

    def __init__(self, root: Path):
        self.root = root
        self.refused: list[str] = []  # modules of MAX's server that could not be imported

    def owns(self, part: str) -> bool:
        """Whether the package itself has a module of that name."""
        own = OWN / part
        return own.is_dir() or own.with_suffix(".py").is_file()

    def renamed(self, tree: ast.Module) -> ast.Module:
        """A file's syntax tree with its imports changed."""
        return _Renamed().visit(tree)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        parts = fullname.split(".")
        if parts[0] != self.package or len(parts) < 2 or self.owns(parts[1]):
            return None
        if parts[1] in NATIVE:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        place = self.root.joinpath(*parts[2 if parts[1] == "_max" else 1 :])
        if (place / "__init__.py").is_file() or place.is_dir():
            spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            spec.submodule_search_locations = [str(place)]
            spec.origin = str(place / "__init__.py")
            return spec
        if place.with_suffix(".py").is_file():
            return importlib.machinery.ModuleSpec(
                fullname, self, origin=str(place.with_suffix(".py"))
            )
        return None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        if spec.origin is None:
            module.__dict__["__getattr__"] = _refusing(module.__name__)
            return
        module.__file__ = spec.origin
        if not Path(spec.origin).is_file():
            return
        tree = self.renamed(ast.parse(Path(spec.origin).read_bytes()))
        if spec.submodule_search_locations is not None:
            self._read_later(module, tree)
            return
        try:
            _run(tree, module)
        except Exception:
            if module.__name__.startswith(f"{self.package}.pipelines.architectures."):
                raise
            # A part of MAX's server that cannot even be imported without its native libraries.
            self.refused.append(module.__name__)
            module.__dict__["__getattr__"] = _refusing(module.__name__)

    def _read_later(self, module: ModuleType, tree: ast.Module) -> None:
        """Makes an ``__init__`` that imports each name when it is first used."""
        lines = {
            alias.asname or alias.name: (node, alias)
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            node, alias = lines.get(name, (None, None))
            if node is None or alias is None:
                if self.find_spec(f"{module.__name__}.{name}") is not None:
                    return importlib.import_module(f"{module.__name__}.{name}")
                del module.__dict__["__getattr__"]
                try:
                    _run(tree, module)
                except Exception:
                    self.refused.append(module.__name__)
                    module.__dict__["__getattr__"] = _refusing(module.__name__)
                return getattr(module, name)
            if node.module is None and node.level == 1:
                return importlib.import_module(f"{module.__name__}.{alias.name}")
            one = ast.ImportFrom(node.module, [alias], node.level)
            _run(ast.Module([ast.copy_location(one, node)], []), module)
            return module.__dict__[name]

        module.__dict__["__getattr__"] = find


def _run(tree: ast.Module, module: ModuleType) -> None:
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    exec(code, module.__dict__)


def _refusing(module: str) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that refuses every name."""
    from maxjax.absent import refused

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refused(
            f"{module}.{name}".removeprefix("maxjax."), "it needs MAX's native libraries"
        )

    return find
