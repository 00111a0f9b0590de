"""What only files written for Modular MAX import is told apart: nothing else of maxjax imports it, or needs it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import House

ROOT = Path(__file__).resolve().parent.parent

# Packages and modules for files of MAX, below `maxjax`.
MAX_ONLY = """
engine/api engine/session
graph/buffer_utils graph/dtype_promotion graph/type
nn/attention/attention_with_rope nn/attention/mask_config nn/attention/multi_latent_attention
nn/attention/multi_latent_attention_fp8 nn/attention/multihead_attention
nn/comm nn/data_parallelism nn/float8_scale_stacking nn/hyper_connection nn/kernels
nn/kv_cache/cache_params nn/kv_cache/data_parallelism_utils nn/kv_cache/input_types nn/kv_cache/metrics
nn/kv_cache/paged nn/layer/layer
nn/moe/expert_parallel nn/moe/sigmoid_router nn/moe/stacked_moe
nn/norm/group_norm nn/norm/layer_norm nn/norm/rms_norm
nn/parallel nn/quant_config nn/quant_ops nn/sampling nn/sequential nn/state_space nn/transformer
""".split()
# MAX's graph language: TensorValues, their operations, and Graphs of them.
GRAPH_LANGUAGE = """
graph/buffer graph/graph graph/ops graph/program graph/rebinding graph/reroll graph/subgraph graph/value
""".split()
# They import it on first use: a Module's trace, compile and build_subgraph; the type of a compiled model that load
# returns; clamp, whose dtypes are MAX's. `graph/arguments` is a part of it.
USES_GRAPHS = ["nn/layer/module.py", "engine/load.py", "nn/clamp.py", "graph/arguments.py"]
# Layers that only models of users have: maxjax does not import them either.
FOR_USERS = """
nn/attention/multi_head_attention nn/clamp nn/conv nn/conv_transpose nn/dropout nn/hooks nn/identity
nn/norm/batch_norm nn/recurrent
""".split()
OPENING, SENTENCE = "Written for files of Modular MAX: ", "maxjax itself does not import it"


def is_below(file: str, names: list[str]) -> bool:
    """Whether a file is one of the modules, or in one of the packages."""
    return any(file == f"{name}.py" or file.startswith(f"{name}/") for name in names)


def crossings(house: House, names: list[str]) -> list[str]:
    """Each import of one of the modules, or of a file in one of the packages, by any other file.

    Imports inside functions count. What an ``__init__`` imports for type checkers only, and gives on first use,
    does not.
    """
    return [
        f"{file}:{one.line}: imports {target}"
        for file, edges in house.edges.items()
        if not is_below(file, names)
        for one, target in edges
        if is_below(target, names) and not (file.endswith("__init__.py") and one.when == "types")
    ]


def unused(house: House, names: list[str]) -> list[str]:
    """The files of layers and graphs that neither the facade ``maxjax`` nor any file but those of ``names`` imports.

    What the ``__init__`` of another package imports does not count.
    """
    used = {
        target
        for file, edges in house.edges.items()
        if file == "__init__.py" or not (file.endswith("__init__.py") or is_below(file, names))
        for one, target in edges
        if target != file and (one.when != "types" or file == "__init__.py")
    }
    return [
        file
        for file in house.files
        if file.startswith(("nn/", "graph/"))
        and not file.endswith("__init__.py")
        and file not in used
    ]


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT / "maxjax")


def test_nothing_of_maxjax_imports_what_is_for_files_of_max(house):
    assert not (found := crossings(house, MAX_ONLY)), "\n" + "\n".join(found)


def test_the_core_imports_the_graph_language_only_where_a_user_asks_for_graphs(house):
    found = crossings(house, MAX_ONLY + GRAPH_LANGUAGE)
    found = [one for one in found if one.partition(":")[0] not in USES_GRAPHS]
    assert not found, "\n" + "\n".join(found)


def test_what_is_for_files_of_max_says_so(house):
    docs = {file: ast.get_docstring(tree) or "" for file, tree in house.trees.items()}
    says = {file for file, text in docs.items() if text.startswith(OPENING)}
    assert all(SENTENCE in docs[file].split("\n\n")[1] for file in says)
    homes = {f"{name}.py" if f"{name}.py" in docs else f"{name}/__init__.py" for name in MAX_ONLY}
    assert homes <= says and not [file for file in says if not is_below(file, MAX_ONLY)]


def test_what_maxjax_does_not_use_is_for_files_of_max_or_for_models_of_users(house):
    known = MAX_ONLY + FOR_USERS
    found = [file for file in unused(house, known) if not file.startswith("graph/ops/")]
    missing = [file for file in found if not is_below(file, known)]
    assert not missing, f"say in the docstring, and here, whom they are for: {missing}"
    assert not [name for name in FOR_USERS if not any(is_below(file, [name]) for file in found)]


FILES = {
    "nn/linear.py": "",
    "nn/conv.py": "from .linear import Linear",
    "nn/kernels/__init__.py": "from .rows import norm as norm",
    "nn/kernels/rows.py": "from ..linear import Linear",
}


def _house(tmp_path: Path, files: dict[str, str]) -> House:
    for name, text in files.items():
        path = tmp_path / "maxjax" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(tmp_path / "maxjax")


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("models/llama.py", "def f():\n    from ..nn.kernels import norm", "models/llama.py:2: imports nn/kernels/r"),
        ("nn/layer.py", "from .kernels.rows import norm", "nn/layer.py:1: imports nn/kernels/rows.py"),
        ("nn/__init__.py", "from .kernels import norm", "nn/__init__.py:1: imports nn/kernels/rows.py"),
        ("nn/conv.py", "if TYPE_CHECKING:\n    from . import kernels", "nn/conv.py:2: imports nn/kernels/__init__"),
        ("nn/__init__.py", "if TYPE_CHECKING:\n    from .kernels import norm as norm", None),
        ("nn/kernels/grids.py", "from .rows import norm", None),
    ],
)  # fmt: skip
def test_an_import_of_what_is_for_files_of_max_is_reported(tmp_path, file, text, says):
    found = crossings(_house(tmp_path, {**FILES, file: text}), ["nn/kernels"])
    assert len(found) == (says is not None) and all(one.startswith(says) for one in found), found


def test_a_file_that_only_files_for_max_import_is_reported(tmp_path):
    house = _house(tmp_path, FILES)
    assert unused(house, ["nn/kernels"]) == ["nn/conv.py", "nn/kernels/rows.py"]
    assert unused(house, ["nn/conv", "nn/kernels"]) == [
        "nn/conv.py",
        "nn/kernels/rows.py",
        "nn/linear.py",
    ]


# A fresh process that cannot import them: what it prints is checked below.
PROGRAM = """
import sys

REFUSED = {names!r}

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in REFUSED):
            raise ImportError(name + " is only for files of MAX")

sys.meta_path.insert(0, Refusing())
import jax
import jax.numpy as jnp
import numpy as np
import maxjax
from maxjax import lora
from maxjax.models import Llama, LlamaConfig

tokenizer = maxjax.load_tokenizer({tiny!r})
config = LlamaConfig(vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
built = maxjax.init(Llama(config), jax.random.key(0))
maxjax.save_pretrained(built, "base")
model, _ = maxjax.load("base", dtype="float32", tokenizer=False)
ids = jnp.array([[1, 2, 3]])
np.testing.assert_array_equal(model(ids), built(ids))
found = maxjax.generate(model, tokenizer, [1, 2, 3], max_new_tokens=3, eos_ids=())
print(len(found.tokens))
adapted = lora.add(model, rank=2, key=jax.random.key(1))
lora.save("adapter", adapted)
adapted = lora.load(model, "adapter")
maxjax.save_pretrained(lora.merge(adapted), "merged")
again, _ = maxjax.load("merged", dtype="float32", tokenizer=False)
np.testing.assert_array_equal(again(ids), model(ids))
print([name for name in sys.modules if any(name == one or name.startswith(one + ".") for one in REFUSED)])
for name in REFUSED:
    try:
        __import__(name)
    except ImportError as error:
        assert "only for files of MAX" in str(error), error
    else:
        print(name)
"""


def test_without_them_a_model_is_built_loaded_run_adapted_and_saved(tmp_path):
    names = [f"maxjax.{name.replace('/', '.')}" for name in MAX_ONLY + GRAPH_LANGUAGE]
    code = PROGRAM.format(names=names, tiny=str(ROOT / "maxjax" / "tiny"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "[]"]
