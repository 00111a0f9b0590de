"""docs/ten-tasks.md: its table counts the lines of code it shows, and the code of other libraries runs.

`python -m scripts.pages` runs that of maxjax.
"""

import re
from pathlib import Path

import jax
import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "ten-tasks.md"
# The most lines that each task may take with maxjax.
LIMITS = {
    "Load a model and generate": 2,
    "All activations and attention weights of a layer": 3,
    "Patch an activation": 3,
    "Train, merge and save LoRA": 12,
    "On eight devices": 4,
    "From an orbax checkpoint to another mesh": 3,
    "Quantise and compare": 3,
    "Train a module of your own": 14,
    "Use a model inside equinox": 3,
    "Take a torch state dict": 2,
}


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """A reader's program runs under JAX's defaults."""


def blocks():
    """(task, library, code) of each block of the page; for the package's own blocks the library is "maxjax"."""
    for section in PAGE.read_text().split("\n## ")[1:]:
        title, text = section.split("\n", 1)
        for kind, code in re.findall(
            r"^```((?:py|sh) [^\n]*|python)\n(.*?)^```", text, re.S | re.M
        ):
            yield title, "maxjax" if kind == "python" else kind.split(" ", 1)[1], code


def lines(library):
    """Task → number of lines of code that count."""
    found = dict.fromkeys(LIMITS, 0)
    for title, name, code in blocks():
        if name == library and "# not counted" not in code:
            counted = [s for s in code.splitlines() if s.strip() and not s.startswith("import ")]
            found[title] += len(counted)
    return found


def test_the_table_counts_the_lines():
    header, _, *rows = re.findall(r"^\|(.*)\|$", PAGE.read_text(), re.M)
    libraries = [cell.strip() for cell in header.split("|")][1:]
    table = {}
    for row in rows:
        task, *cells = (cell.strip() for cell in row.split("|"))
        title, anchor = re.fullmatch(r"\[(.*)\]\(#(.*)\)", task).groups()
        assert anchor == re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-")
        table[title] = dict(zip(libraries, cells, strict=True))
    assert list(table) == list(LIMITS)
    for library in libraries:
        for title, count in lines(library).items():
            assert table[title][library] == (str(count) if count else "–"), (library, title)
    for title, limit in LIMITS.items():
        assert 0 < lines("maxjax")[title] <= limit, title


@pytest.mark.extra
@pytest.mark.parametrize("library", ["flax nnx", "equinox"])
def test_the_code_of_others_runs(library, tmp_path):
    """The modules in flax nnx and equinox run, so that the lines counted are those of working code."""
    import equinox
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint
    from flax import nnx

    names = {
        "jax": jax, "jnp": jnp, "optax": optax, "eqx": equinox, "nnx": nnx, "orbax": orbax, "run": tmp_path,
        "cross_entropy": optax.softmax_cross_entropy_with_integer_labels, "P": jax.P,
        "data": [(jnp.ones((8, 4)), jnp.zeros(8, int))] * 3, "mesh": jax.make_mesh((8,), ("data",)),
    }  # fmt: skip
    mine = {title: code for title, name, code in blocks() if name == library}
    # The module comes first, because the other tasks load its checkpoint.
    for title in sorted(mine, key=lambda title: title != "Train a module of your own"):
        exec(compile(mine[title], str(PAGE), "exec"), names)
    assert jax.tree.leaves(names["model"])
    if library == "flax nnx":
        assert names["other"].up.kernel[...].sharding.mesh.shape == {"data": 8}


@pytest.mark.oracle
def test_the_code_of_transformers_runs():
    """The blocks run that need neither several processes nor another library."""
    import torch
    import transformers

    names = {
        "pipeline": transformers.pipeline, "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "path": str(PAGE.parent.parent / "maxjax" / "tiny"), "torch": torch,
        "data": [(torch.ones((8, 4)), torch.zeros(8, dtype=int))] * 3,
        "theirs": torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)),
    }  # fmt: skip
    names["tokenizer"] = transformers.AutoTokenizer.from_pretrained(names["path"])
    left_out = "Train, merge and save LoRA", "On eight devices", "Quantise and compare"
    left_out += ("Take a torch state dict",)  # names of its own
    for title, library, code in blocks():
        if library == "transformers" and title not in left_out:
            exec(compile(code, str(PAGE), "exec"), names)
    assert names["weights"].shape[:2] == (1, 8) and names["found"]["mlp"].shape[-1] == 256
    assert names["without"].shape[1] > names["ids"].shape[1]
