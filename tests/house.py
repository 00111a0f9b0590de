"""The imports of the package as data: which file imports which, directly or through a facade."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One name that a file imports.

    Attributes:
        line: line of the import.
        module, name: the module and the name in it; ``name`` is "" for ``import module``.
        when: "load" if it runs when the file is imported, "call" inside functions, "types" under
            ``TYPE_CHECKING``.
    """

    line: int
    module: str
    name: str
    when: str


@cache
def parsed(text: str) -> ast.Module:
    """The tree of a file's text, parsed once; all of its many objects stay, so that none is looked for to be freed."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


@cache
def imports(tree: ast.AST, package: str) -> list[Import]:
    """Each import in a file of ``package``, those inside functions as well."""
    found: list[Import] = []
    _imports(tree, package, "load", found)
    return found


def _imports(node: ast.AST, package: str, when: str, found: list[Import]) -> None:
    if isinstance(node, ast.Import):
        found += [Import(node.lineno, alias.name, "", when) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*parents, module] if module else parents)
        found += [Import(node.lineno, module, alias.name, when) for alias in node.names]
    elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"}:
        if node.args and isinstance(node.args[0], ast.Constant):
            found.append(Import(node.lineno, str(node.args[0].value), "", when))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and when == "load":
        when = "call"
    typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for field, value in ast.iter_fields(node):
        inner = "types" if typing and field == "body" else when
        for child in value if isinstance(value, list) else [value]:
            # Names and constants, which most nodes are, contain no imports.
            if isinstance(child, ast.AST) and not isinstance(child, ast.Name | ast.Constant):
                _imports(child, package, inner, found)


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


class House:
    """The files of one package, and their imports of one another.

    Attributes:
        root: directory of the package.
        files: paths below it, with "/".
        edges: file → [(import, imported file)]; the imported file is "" if it is not found. A name that
            an ``__init__`` only re-exports counts as imported from the file that defines it.
    """

    def __init__(self, root: Path):
        self.root = root
        self.trees = {
            path.relative_to(root).as_posix(): parsed(path.read_text())
            for path in sorted(root.rglob("*.py"))
        }
        self.files = list(self.trees)
        self._imports = {file: list(self._own(file)) for file in self.files}
        self._facades = {
            file: {one.name: one for one in self._imports[file]}
            for file in self.files
            if file.endswith("__init__.py")
        }
        self.edges = {
            file: [(one, self.target(one.module, one.name)) for one in found]
            for file, found in self._imports.items()
        }

    def _own(self, file: str) -> Iterator[Import]:
        package = ".".join([self.root.name, *Path(file).parts[:-1]])
        for one in imports(self.trees[file], package):
            if one.module.split(".")[0] == self.root.name:
                yield one

    def target(self, module: str, name: str) -> str:
        """The file that ``from module import name`` reaches, "" if there is none."""
        inner = "/".join(module.split(".")[1:])
        for stem in ([f"{inner}/{name}".strip("/")] if name else []) + [inner]:
            for file in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")):
                if file in self.trees:
                    passed = self._facade(file).get(name) if stem == inner else None
                    return self.target(passed.module, name) if passed else file
        return ""

    def _facade(self, file: str) -> dict[str, Import]:
        return self._facades.get(file, {})

    def cycle(self) -> list[str]:
        """One import cycle as a list of files that ends where it began, or an empty list."""
        finished: set[str] = set()

        def visit(file: str, path: list[str]) -> list[str]:
            if file in path:
                return [*path[path.index(file) :], file]
            if file in finished or not file:
                return []
            for one, target in self.edges[file]:
                if target != file and not self._passes(file, one):
                    if found := visit(target, [*path, file]):
                        return found
            finished.add(file)
            return []

        return next((found for file in self.files if (found := visit(file, []))), [])

    def _passes(self, file: str, one: Import) -> bool:
        return file.endswith("__init__.py") and one.when == "types"


def private_uses(house: House, folder: str) -> list[str]:
    """Uses of private members of a folder's classes by files outside it, as "file:line name".

    A file's uses of its own members (``self._x``) and of its own classes do not count, even if the name
    is the same.
    """
    private = set[str]()
    for file, tree in house.trees.items():
        if file.startswith(folder):
            private |= _members(tree)
            private |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found = []
    for file, tree in house.trees.items():
        if not file.startswith(folder):
            counted = {name for name in private - _members(tree) if _is_private(name)}
            found += [
                f"{file}:{node.lineno} {node.attr}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and node.attr in counted
                and getattr(node.value, "id", "") not in ("self", "cls")
            ]
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def _members(tree: ast.Module) -> set[str]:
    """Names of methods and attributes of the classes in a file."""
    found = set[str]()
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(cls):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
        for node in cls.body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def slots(house: House) -> list[str]:
    """Assignments to attributes of imported modules or classes when a file is imported."""
    found = []
    for file, tree in house.trees.items():
        names = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.level
            for alias in node.names
        }
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") in names:
                    found.append(f"{file}:{node.lineno} {ast.unparse(target)}")
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                call = node.value.func
                if isinstance(call, ast.Attribute) and getattr(call.value, "id", "") in names:
                    found.append(f"{file}:{node.lineno} {ast.unparse(call)}")
    return found
