"""The facade: every name is there, and nothing is imported before it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import maxjax


def typed_names():
    tree = ast.parse(Path(maxjax.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname: None if node.module is None else node.module
        for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }  # fmt: skip


def test_the_lists_for_people_and_for_type_checkers_agree():
    assert typed_names() == maxjax._HOMES


@pytest.mark.parametrize("name", maxjax.__all__)
def test_every_name_is_there(name):
    assert getattr(maxjax, name) is getattr(maxjax, name) and name in dir(maxjax)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        maxjax.nonsense
    assert not hasattr(maxjax, "__path_of_nothing__")


def test_importing_it_imports_neither_jax_nor_anything_heavy():
    code = "import sys, maxjax, maxjax.storage; print([m for m in ('jax', 'tokenizers', 'orbax', 'flax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
