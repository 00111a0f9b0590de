"""The reference: every public name, where it is defined, and its page.

A public name is what the ``__init__`` of a package passes on under its own name (``from .load import
load as load``), or what a module of `MODULES` defines, without an underscore in front. Both are read
from the sources, as the facades are lazy and nothing here may need JAX. A name that several packages
pass on has its entry in the module that defines it if that is public, otherwise in the first of them;
the others point there.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Modules that users import names from and that are not packages: those that `maxjax` names, those of
# MAX's paths, and what a family of one's own is written with.
MODULES = """
    maxjax.dtype maxjax.distributed maxjax.errors maxjax.interop.trees
    maxjax.models.config maxjax.models.pooling maxjax.models.llama
    maxjax.models.parts maxjax.models.parts.cache maxjax.models.parts.recurrent
    maxjax.models.family maxjax.models.fused_experts maxjax.models.names maxjax.nn.stacked_linear
""".split()

# Pages in the order of the navigation; what is not here follows by name.
ORDER = """
    maxjax maxjax.graph maxjax.nn maxjax.models maxjax.checkpoint maxjax.lora maxjax.engine
    maxjax.kernels maxjax.distributed maxjax.dtype maxjax.errors
""".split()


@dataclass(frozen=True)
class Name:
    """A public name.

    Attributes:
        module: the module that users import it from.
        name: the name.
        home: the path of the definition.
        kind: "class", "function", "module" or "value".
        docstring: that of the definition; "" for none.
    """

    module: str
    name: str
    home: str
    kind: str
    docstring: str

    @property
    def path(self) -> str:
        """What a user writes."""
        return f"{self.module}.{self.name}"


@dataclass
class Sources:
    """The modules of a package, read and not imported."""

    root: Path = ROOT
    package: str = "maxjax"
    trees: dict[str, ast.Module] = field(default_factory=dict)
    _imports: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted((self.root / self.package).rglob("*.py")):
            parts = list(path.relative_to(self.root).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.trees[name] = ast.parse(path.read_text())

    def is_package(self, module: str) -> bool:
        """Whether a module is a folder with an ``__init__``."""
        return (self.root / module.replace(".", "/") / "__init__.py").exists()

    def imports(self, module: str) -> dict[str, tuple[str, str]]:
        """Name → (module it comes from, its name there), of all relative imports of a module."""
        if module not in self._imports:
            found = self._imports[module] = {}
            for node in ast.walk(self.trees[module]):
                if isinstance(node, ast.ImportFrom) and node.level:
                    parts = module.split(".")
                    parts = parts[: len(parts) - node.level + self.is_package(module)]
                    source = ".".join([*parts, *(node.module.split(".") if node.module else [])])
                    found |= {one.asname or one.name: (source, one.name) for one in node.names}
        return self._imports[module]

    def passed_on(self, module: str) -> list[str]:
        """The names that a package's ``__init__`` imports under their own names."""
        return sorted(
            {
                alias.name
                for node in ast.walk(self.trees[module])
                if isinstance(node, ast.ImportFrom) and node.level
                for alias in node.names
                if alias.asname == alias.name and not alias.name.startswith("_")
            }
        )

    def defined(self, module: str) -> dict[str, ast.stmt]:
        """What a module defines at its top: classes, functions and assigned names."""
        found: dict[str, ast.stmt] = {}
        for node in self.trees[module].body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign):
                found |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = node
        return found

    def find(self, module: str, name: str) -> Name:
        """A name and its definition, which may be some imports away.

        Raises:
            LookupError: nothing of that name is defined or imported.
        """
        source, there = module, name
        while there not in self.defined(source):
            step = self.imports(source).get(there, (source, there))
            if step == (source, there):
                if (found := f"{source}.{there}") not in self.trees:
                    raise LookupError(f"{module}.{name}: {source} defines no {there}")
                said = ast.get_docstring(self.trees[found]) or ""
                return Name(module, name, found, "module", said)
            source, there = step
        node = self.defined(source)[there]
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            said = _docstring_of_overloads(self.trees[source], there)
        else:
            kind, said = "value", _docstring_below(self.trees[source], node)
        return Name(module, name, f"{source}.{there}", kind, said)

    @cached_property
    def public(self) -> dict[str, list[Name]]:
        """Module → its public names; modules in the order of the navigation."""
        packages = [module for module in self.trees if self.is_package(module)]
        found = {module: self.passed_on(module) for module in packages}
        for module in MODULES:
            found[module] = sorted(
                name
                for name, node in self.defined(module).items()
                if not name.startswith("_") and isinstance(node, ast.ClassDef | ast.FunctionDef)
            )
        order = [*ORDER, *sorted(module for module in found if module not in ORDER)]
        return {
            module: [self.find(module, name) for name in found[module]]
            for module in order
            if found.get(module)
        }

    @cached_property
    def entries(self) -> dict[str, Name]:
        """Path of a definition → the name that has its entry: that of its own module if it is public."""
        first: dict[str, Name] = {}
        for names in self.public.values():
            for name in names:
                if name.kind != "module" and (name.path == name.home or name.home not in first):
                    first[name.home] = name
        return first


def _docstring_of_overloads(tree: ast.Module, name: str) -> str:
    nodes = [n for n in tree.body if getattr(n, "name", None) == name]
    return next((said for n in nodes if (said := ast.get_docstring(n))), "")  # type: ignore[arg-type]


def _docstring_below(tree: ast.Module, node: ast.stmt) -> str:
    """The string that stands below an assignment, as type checkers read it."""
    place = tree.body.index(node) + 1
    below = tree.body[place] if place < len(tree.body) else None
    if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
        return str(below.value.value)
    return ""


@cache
def package() -> Sources:
    """The sources of maxjax."""
    return Sources()


def page_name(module: str) -> str:
    """The file of a module's page."""
    return f"reference/{module}.md"


def page(sources: Sources, module: str) -> str:
    """The Markdown of a module's page, for mkdocstrings."""
    said = (ast.get_docstring(sources.trees[module]) or "").split("\n\n")[0].replace("\n", " ")
    said = said.replace("``", "`")
    lines = [f"# {module}", "", said, ""]
    for name in sources.public[module]:
        entry = sources.entries.get(name.home)
        if name.kind == "module":
            to = name.home if name.home in sources.public else ""
            to = f"[`{to}`]({to}.md)" if to else f"`{name.home}`"
            said = f"The module {to}. {_first_sentence(name.docstring)}"
        elif entry is not None and entry.path != name.path:
            to = f"{entry.module}.md#{entry.path}"
            said = f"The same as [`{entry.path}`]({to}). {_first_sentence(name.docstring)}"
        else:
            # mkdocstrings writes the heading, with the anchor of the definition; ours is above it.
            lines += [f"[](){{#{name.path}}}", ""] if name.path != name.home else []
            lines += [f"::: {name.home}", "    options:"]
            lines += [f"      heading: {name.name}", f"      toc_label: {name.name}", ""]
            continue
        lines += [f"## `{name.name}` {{ #{name.path} data-toc-label='{name.name}' }}", "", said, ""]
    return "\n".join(lines)


def _first_sentence(docstring: str) -> str:
    first = docstring.split("\n\n")[0].replace("\n", " ").replace("``", "`").strip()
    return first.split(". ")[0].rstrip(".") + "." if first else ""


def index(sources: Sources) -> str:
    """The first page of the reference: modules with the names that they have."""
    lines = [
        "# Reference",
        "",
        "Every public name, from its docstring. Their examples are run by the tests.",
        "",
    ]
    for module, names in sources.public.items():
        lines += [f"## [{module}]({module}.md) {{ #{module} }}", ""]
        lines += [", ".join(f"[`{n.name}`]({module}.md#{n.path})" for n in names), ""]
    return "\n".join(lines)
