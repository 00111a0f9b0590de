"""`maxjax.name` is the object of its home module, for every name that the facade exports."""

import ast
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import jax
import numpy as np
import pytest

import maxjax
from scripts.models_stub import stub


def exported() -> dict[str, tuple[str, str]]:
    """Name -> (module, name there) of each `from .module import name as name` in the facade."""
    tree = ast.parse(Path(maxjax.__file__).read_text())
    return {
        alias.asname: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
        if alias.asname and not alias.asname.startswith("_")
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
    with pytest.raises(AttributeError, match="no attribute 'laod': did you mean 'load'"):
        _ = maxjax.laod
    with pytest.raises(AttributeError, match="no attribute 'Linaer': did you mean 'Linear'"):
        _ = maxjax.nn.Linaer


PACKAGES = "checkpoint engine graph models.gguf nn storage storage.blocks"


@pytest.mark.parametrize("package", ["maxjax", *(f"maxjax.{name}" for name in PACKAGES.split())])
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


def test_the_models_that_type_checkers_see_are_those_of_the_registry():
    package = maxjax.models
    written = (Path(package.__file__).parent / "__init__.pyi").read_text()
    assert written == stub(), "python scripts/models_stub.py"
    files = {path.stem for path in Path(package.__file__).parent.glob("*.py")}
    lines = [line for line in ast.parse(written).body if isinstance(line, ast.ImportFrom)]
    assert all(line.level == 1 and one.name == one.asname for line in lines for one in line.names)
    names = [(line.module, one.name) for line in lines for one in line.names]
    for home, name in names:
        assert getattr(package, name) is getattr(import_module(f"maxjax.models.{home}"), name)
        assert name not in files
    assert {name for _, name in names} == set(package.__all__)


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reverse", [False, True])
def test_names_stay_what_they_are_in_whatever_order_files_are_imported(reverse):
    """A submodule with the name of a function, imported later, would replace it in the package.

    Every file is imported, without torch and transformers.
    """
    code = f"""
import importlib, pkgutil, sys
sys.modules.update(torch=None, transformers=None)
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


def tiny():
    return maxjax.init(maxjax.nn.Sequential([maxjax.nn.Linear(32, 2)]), jax.random.key(0))


MODEL = r"takes a maxjax Module, not int"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: maxjax.quantize(5), MODEL),
        (lambda: maxjax.quantize((tiny(), None)), "not tuple; pass the first item"),
        (lambda: maxjax.quantize(tiny(), "q8_0", patterns="abc"), "patterns map names to types"),
        (lambda: maxjax.quantize(tiny(), "q8_0", patterns=5), "patterns map names to types"),
        (lambda: maxjax.quantize(tiny(), "q8_0", importance=5), "importance is what"),
        (lambda: maxjax.init(5, jax.random.key(0)), MODEL),
        (lambda: maxjax.init(tiny(), 0), "key is one key of jax.random"),
        (
            lambda: maxjax.init(tiny(), jax.random.key(0), initializer=5),
            "initializer is a function",
        ),
        (lambda: maxjax.merge(1, 2), MODEL),
        (lambda: maxjax.merge(tiny(), tiny()[0]), "two halves of one model"),
        (lambda: maxjax.partition(5), MODEL),
        (lambda: maxjax.partition(tiny(), 5), "trainable is one or more name patterns"),
        (lambda: maxjax.labels(tiny(), 3), "takes a mapping from name patterns"),
        (lambda: maxjax.labels({"*": 1}, 3)(5), MODEL),
        (lambda: maxjax.save_pretrained(5, "x"), MODEL),
        (lambda: maxjax.save_pretrained(tiny(), "x", config=5), "config is the content"),
        (lambda: maxjax.lora.add(5), MODEL),
        (lambda: maxjax.lora.load("x", tiny()), "takes a maxjax Module, not str"),
        (lambda: maxjax.lora.merge(5), MODEL),
        (lambda: maxjax.lora.remove(5), MODEL),
        (lambda: maxjax.lora.save("x", 5), MODEL),
        (lambda: maxjax.make_mesh(model=1, devices=[0]), "devices are those of jax.devices"),
        (lambda: maxjax.draw_attention(np.ones((1, 2, 2)), heads=0), "heads is a list"),
        (lambda: maxjax.draw_attention(np.ones((1, 2, 2)), heads=[0.5]), "numbers of heads"),
        (lambda: maxjax.draw_attention(np.ones((1, 2, 2)), tokens=5), "tokens is a list"),
        (lambda: maxjax.export(tiny(), np.ones(32), "x", platforms=5), "platforms must be among"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["generate", "embed", "rerank", "perplexity", "calibrate"])
def test_what_is_no_model_and_what_is_no_tokenizer(name):
    more = (["x"], ["x"]) if name == "rerank" else (["x"],)
    more = ("x", *more[1:]) if name != "embed" else more
    call = lambda model, tokenizer: getattr(maxjax, name)(model, tokenizer, *more)
    model, tokenizer = maxjax.load("tiny")
    for given, says in (
        ((model, tokenizer), "tuple; pass the first item of the tuple"),
        ("tiny", "str$"),
        (maxjax.nn.Linear, r"the class Linear: make one, Linear\(…\)"),
    ):
        with pytest.raises(ValueError, match=rf"maxjax\.{name} takes a maxjax Module, not {says}"):
            call(given, tokenizer)
    for use in (call, lambda *both: maxjax.save_pretrained(both[0], "/nowhere", tokenizer=both[1])):
        with pytest.raises(TypeError, match="tokenizer is a str: it must be a tokenizer of maxjax"):
            use(model, "tiny")


def test_first_nan_takes_token_ids():
    config = maxjax.models.LlamaConfig(16, 4, 8, num_hidden_layers=1, num_attention_heads=1)
    model = maxjax.init(maxjax.models.Llama(config), jax.random.key(0))
    for ids in ("a text", 5, [1.5], [], [[1], [1, 2]], None):
        with pytest.raises(maxjax.errors.UserInputError, match="ids are token ids"):
            maxjax.first_nan(model, ids)
    assert maxjax.first_nan(model, np.array([1, 2])) is None


def test_make_mesh_takes_the_devices_of_a_mesh():
    mesh = maxjax.make_mesh(data=2, model=2)
    assert dict(maxjax.make_mesh(model=4, devices=mesh.devices).shape) == {"model": 4}
