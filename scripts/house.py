"""Figures of the package's layout: `python scripts/house.py [FOLDER]`. Fails if one exceeds its limit.

Counted are files in the longest chain of imports, files that only a sibling imports, class names that are
defined twice, private members of Weight that other files use, attributes assigned from another file, lines of
code, lines of `models/` and `nn/` that run in one call of a language model with a cache, and functions that the
call of a layer enters before a kernel.
Facades (an `__init__` that re-exports names) and imports under `TYPE_CHECKING` do not count. An import through
a facade counts as an import of the file that defines the name.
"""

from __future__ import annotations

import ast
import inspect
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.house import House, private_uses, slots  # noqa: E402

# Files that may have a single importer: a family, a command, a format, or a path that MAX has. `MAX_NAMES`
# has the paths that MAX's model files import.
KINDS = """
models/ cli/ storage/blocks/
storage/numpy/npy.py storage/orbax/zarr.py storage/orbax/store.py storage/pytorch/legacy.py
lora/peft.py text/tokenizer/sentencepiece.py text/tokenizer/tekken.py
graph/dim.py nn/norm/
""".split()
MAX_NAMES = ROOT / "tests" / "max_names.txt"


def direct(house: House) -> dict[str, set[str]]:
    """File -> the files that it imports directly, not through a facade."""
    graph: dict[str, set[str]] = {}
    for file, edges in house.edges.items():
        if file.endswith("__init__.py"):
            continue
        graph[file] = set()
        for one, _ in edges:
            stem = "/".join(one.module.split(".")[1:])
            names = [f"{stem}/{one.name}.py".lstrip("/"), f"{stem}.py"]
            found = next((name for name in names if name in house.trees), "")
            if found and found != file and one.when != "types":
                graph[file].add(found)
    return graph


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """The longest path through the imports; files that import each other are a CycleError, which names them."""
    length: dict[str, int] = {}
    for file in TopologicalSorter(graph).static_order():
        length[file] = 1 + max((length[other] for other in graph[file]), default=0)
    chain = [max(graph, key=length.__getitem__)]
    while graph[chain[-1]]:
        chain.append(max(graph[chain[-1]], key=length.__getitem__))
    return chain


def lonely(house: House) -> list[tuple[str, str]]:
    """(file, importer) for each file whose only importer is in the same folder.

    An import through a facade counts as an import of the file that defines the name.
    """
    importers = defaultdict(set)
    for file, edges in house.edges.items():
        for one, other in edges:
            if other and other != file and one.when != "types" and not is_facade(house, file):
                importers[other].add(file)
    paths = {line.partition(":")[0] for line in MAX_NAMES.read_text().splitlines()}
    return sorted(
        (file, next(iter(found)))
        for file, found in importers.items()
        if len(found) == 1
        and Path(file).parent == Path(next(iter(found))).parent
        and not file.startswith(tuple(KINDS))
        and file.removesuffix(".py").replace("/", ".") not in paths
    )


def is_facade(house: House, file: str) -> bool:
    """Whether a file only re-exports names: an ``__init__``, or a file at a path of MAX."""
    return file.endswith("__init__.py") or all(
        isinstance(node, ast.ImportFrom | ast.Expr) for node in house.trees[file].body
    )


def classes_twice(house: House) -> list[str]:
    """Names of classes that are defined at the top of more than one file."""
    count = Counter(
        node.name
        for tree in house.trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, number in count.items() if number > 1)


def code_lines(path: Path) -> int:
    """The number of lines with code, without blank lines, comment lines and docstrings."""
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING):
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


MODELS = {  # model -> the most lines that one call may run, and settings of its configuration
    "Llama": (900, {"intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "DeepseekV3": (
        1300,
        {
            "intermediate_size": 32,
            "moe_intermediate_size": 16,
            "num_attention_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "Mamba2": (1300, {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}),
}


def executed_lines(root: Path, name: str, settings: Mapping[str, int]) -> Counter[str]:
    """File -> how many of its lines run while ``model(ids, cache)`` is traced, without ``nn/layer``.

    Lines of modules and classes, which run when a file is imported, do not count.
    """
    import jax
    import jax.numpy as jnp

    from maxjax import models

    def made(width: int) -> tuple:
        config = {"vocab_size": 64, "hidden_size": width, "num_hidden_layers": 2, **settings}
        model = getattr(models, name)(getattr(models, f"{name}Config")(**config))
        return model, jnp.zeros((1, 4), int), model.cache(1, 8)

    def call(arguments: tuple) -> None:
        jax.eval_shape(lambda model, ids, cache: model(ids, cache), *arguments)

    seen: set[tuple[str, int]] = set()
    places = tuple(f"{root / package}/" for package in ("models", "nn"))

    def local(frame, event, _):
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def entered(frame, event, _):
        code = frame.f_code
        in_function = code.co_flags & inspect.CO_OPTIMIZED
        file = code.co_filename
        if in_function and file.startswith(places) and "/nn/layer/" not in file:
            return local
        return None

    call(made(32))  # imports what the second call, of other shapes, needs
    arguments = made(64)
    sys.settrace(entered)
    try:
        call(arguments)
    finally:
        sys.settrace(None)
    return Counter(file.removeprefix(f"{root}/") for file, _ in seen)


# Layer -> the most functions of the package that its call enters before one of `kernels/`, and how it is made.
WALKS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "Linear": (8, lambda nn: nn.Linear(32, 32, has_bias=True)),
    "Linear in blocks": (16, lambda nn: _in_blocks(nn.Linear(32, 32))),
    "Linear with LoRA": (16, lambda nn: _adapted(nn.Linear(32, 32))),
    "Linear on a mesh": (16, lambda nn: _on_mesh(nn.Linear(32, 32))),
    "Embedding": (16, lambda nn: nn.Embedding(32, 32)),
    "RMSNorm": (30, lambda nn: nn.RMSNorm(32)),
    "MultiHeadAttention": (16, lambda nn: nn.MultiHeadAttention(32, 4)),
}


def _in_blocks(layer: Any) -> Any:
    import jax

    import maxjax
    from maxjax import nn

    layer = maxjax.init(layer, jax.random.key(0))
    return maxjax.quantize(nn.LayerList([layer]), "q8_0").model[0]


def _adapted(layer: Any) -> Any:
    import jax

    import maxjax
    from maxjax import lora, nn

    one = nn.LayerList([maxjax.init(layer, jax.random.key(0))])
    return lora.add(one, "0", rank=2, key=jax.random.key(1))[0]


def _on_mesh(layer: Any) -> Any:
    import maxjax

    return layer.to(maxjax.make_mesh(model=1))


def walk(root: Path, call: Callable[[], Any]) -> list[str]:
    """The functions of the package that a call enters, in order; its second call counts."""
    found: list[str] = []

    def enter(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{root}/"):
            found.append(f"{code.co_filename.removeprefix(f'{root}/')}:{code.co_qualname}")

    call()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def walks(root: Path) -> Iterator[tuple[float, float | None, str, str]]:
    """How many functions the call of each layer enters before a kernel."""
    import jax
    import jax.numpy as jnp

    import maxjax
    from maxjax import nn

    for name, (limit, make) in WALKS.items():
        layer = make(nn)
        if any(w.is_lazy for w in layer.raw_state_dict().values()):
            layer = maxjax.init(layer, jax.random.key(0))
        x = jnp.zeros((1, 3), int) if name == "Embedding" else jnp.ones((1, 3, 32))
        found = walk(root, lambda layer=layer, x=x: layer(x))
        kernel = next((i for i, one in enumerate(found) if one.startswith("kernels/")), len(found))
        yield (
            kernel,
            limit,
            f"functions that {name} enters before a kernel",
            ", ".join(found[:kernel]),
        )


def figures(root: Path) -> Iterator[tuple[float, float | None, str, str]]:
    """For each figure of the package at `root`: value, limit, meaning, and the files or names counted."""
    house = House(root)
    chain = longest_chain(direct(house))
    yield len(chain), None, "files in the longest chain of imports", " > ".join(chain)
    alone = [file for file, _ in lonely(house)]
    yield len(alone), None, "files that one sibling alone imports", ", ".join(alone)
    twice = classes_twice(house)
    yield len(twice), 4, "names of classes that stand twice", ", ".join(twice)
    uses = private_uses(house, "graph/weight/")
    yield len(uses), 0, "uses of private members of Weight elsewhere", ", ".join(uses)
    found = slots(house)
    yield len(found), 0, "attributes assigned from another file", ", ".join(found)
    if root == ROOT / "maxjax":  # the package that this process imports
        for name, (limit, settings) in MODELS.items():
            files = executed_lines(root, name, settings)
            by_file = ", ".join(f"{file} {count}" for file, count in files.most_common())
            yield files.total(), limit, f"lines that {name}'s model(ids, cache) runs", by_file
        yield from walks(root)
    lines = sum(code_lines(root / file) for file in house.files)
    yield lines, None, f"lines of code in {len(house.files)} files", ""


def main(root: Path) -> int:
    """Prints the figures of the package at `root`."""
    failed = False
    for count, limit, what, names in figures(root):
        failed |= limit is not None and count > limit
        at_most = "" if limit is None else f" (at most {limit})"
        print(f"{count:6.0f}  {what}{at_most}{': ' * bool(names)}{names}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "maxjax").resolve()))
