"""`maxjax.name` is the object of its home module, for every name that the facade exports."""

import ast
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import maxjax


def exported() -> dict[str, tuple[str, str]]:
    """Name -> (module, name there) of each `from .module import name as name` in the facade."""
    tree = ast.parse(Path(maxjax.__file__).read_text())
    return {
        alias.asname: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
        if alias.asname
    }


def test_each_name_is_that_of_its_home():
    assert len(exported()) > 15
    for name, (module, inner) in exported().items():
        if module:
            assert getattr(maxjax, name) is getattr(import_module(f"maxjax.{module}"), inner), name
        else:
            assert getattr(maxjax, name) is import_module(f"maxjax.{inner}"), name


def test_nothing_else_is_public():
    for name in exported():
        assert name in dir(maxjax)
    public = {name for name in dir(maxjax) if not name.startswith("_")} - {"TYPE_CHECKING"}
    values = {name: getattr(maxjax, name) for name in public}
    found = {name for name, value in values.items() if not isinstance(value, types.ModuleType)}
    assert found <= set(exported())


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(maxjax, "nosuch")


def test_the_lists_for_type_checkers_and_for_the_interpreter_agree():
    found = {name: module or None for name, (module, _) in exported().items()}
    assert found == maxjax._HOMES


def test_importing_it_imports_neither_jax_nor_anything_heavy():
    code = "import sys, maxjax, maxjax.storage; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for heavy in ("jax", "tokenizers", "orbax", "flax", "torch"):
        assert f"'{heavy}'" not in done.stdout
