"""`maxjax.name` is the object of its home module, for every name that the facade exports."""

import ast
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

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


PACKAGES = "checkpoint engine graph models.gguf nn storage storage.blocks"


@pytest.mark.parametrize("package", [f"maxjax.{name}" for name in PACKAGES.split()])
def test_lazy_packages_are_what_type_checkers_see(package):
    module = import_module(package)
    tree = ast.parse(Path(module.__file__).read_text())
    checked = next(n for n in tree.body if isinstance(n, ast.If))
    files = {path.stem for path in Path(module.__file__).parent.glob("*.py")}
    names = [
        (node.module, alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert names
    for home, name in names:
        if home:
            assert getattr(module, name) is getattr(import_module(f"{package}.{home}"), name), name
            assert name not in files, "import it at once: its file would take its place"
        else:
            assert getattr(module, name) is import_module(f"{package}.{name}"), name
        assert name in dir(module)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    (table,) = (n.args[1] for n in calls if getattr(n.func, "id", "") == "_attributes")
    listed = {name for text in table.values for name in ast.literal_eval(text).split()}
    assert listed == {name for _, name in names}
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nosuch'"):
        _ = module.nosuch


@pytest.mark.slow
def test_who_uses_one_layer_does_not_wait_for_all():
    code = "import sys; from maxjax.nn import Linear; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for part in ("nn.conv", "nn.attention", "nn.moe", "models", "storage.pytorch", "storage.npz"):
        assert f"'maxjax.{part}'" not in done.stdout, part


def test_importing_it_imports_neither_jax_nor_anything_heavy():
    code = "import sys, maxjax, maxjax.storage; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for heavy in ("jax", "tokenizers", "orbax", "flax", "torch"):
        assert f"'{heavy}'" not in done.stdout


@pytest.mark.default("True")
@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_names_stay_what_they_are_in_whatever_order_files_are_imported(reverse):
    """A submodule with the name of a function, imported later, would replace it in the package."""
    code = f"""
import importlib, pkgutil
import maxjax
names = sorted(m.name for m in pkgutil.walk_packages(maxjax.__path__, "maxjax."))
before = {{name: getattr(maxjax, name) for name in maxjax.__all__}}
packages = [name for name in names if importlib.util.find_spec(name).submodule_search_locations]
shown = {{package: getattr(importlib.import_module(package), "__all__", None) for package in packages}}
kept = {{(p, n): getattr(importlib.import_module(p), n) for p, all_ in shown.items() for n in all_ or ()}}
for name in sorted(names, reverse={reverse}):
    if name != "maxjax.__main__":
        importlib.import_module(name)
assert all(getattr(maxjax, name) is value for name, value in before.items())
wrong = [key for key, value in kept.items() if getattr(importlib.import_module(key[0]), key[1]) is not value]
assert not wrong, wrong
print(len(names), len(kept))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files, kept = map(int, done.stdout.split())
    assert files > 250 and kept > 100
