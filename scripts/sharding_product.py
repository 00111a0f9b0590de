"""Compares sharded models with one device, over all meshes: `scripts/sharding_product.py [--whole]`.

Every model is run on every mesh over the axes data, fsdp, expert, seq and model whose size is
1 to 8, with `jax.jit` (on a quarter of them also eagerly or from NumPy arrays), and compared with
the same model on one device. Axes are Auto or Explicit, with and without `jax.set_mesh`: on each mesh
a model runs in one of these four ways, and the next model in another; with `--whole` each runs in all
four. The devices are eight fake CPU devices. Prints a line for each model; the exit code is 1 on any failure.
Takes a quarter of an hour with two processes on two cores, `--whole` an hour, `--quick` half a minute.

    .venv/bin/python scripts/sharding_product.py --quick
    .venv/bin/python scripts/sharding_product.py --only moe,bert --jobs 1
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
AXES = ("data", "fsdp", "expert", "seq", "model")
TOLERANCE = 1e-5
B, T, E = 8, 6, 32


class Case(NamedTuple):
    """A model, and its inputs.

    Attributes:
        make: function that returns a new model without values.
        inputs: function that returns NumPy arrays, each with the batch on its first axis.
    """

    make: Callable[[], Any]
    inputs: Callable[[], tuple[Any, ...]]


def block(
    heads: int = 8, kv_heads: int = 4, width: int = 4, inner: int = 64, **options: Any
) -> Any:
    """A decoder block of attention with a rope, an MLP and two norms."""
    from maxjax import nn
    from maxjax.graph import DeviceRef
    from maxjax.nn.attention import AttentionWithRope
    from maxjax.nn.rotary_embedding import RotaryEmbedding
    from maxjax.nn.transformer import TransformerBlock

    experts = options.pop("experts", 0)
    size = heads * width
    rope = RotaryEmbedding(
        dim=size, n_heads=heads, head_dim=width, theta=10000.0, max_seq_len=64, interleaved=False
    )
    attention = AttentionWithRope(
        rope=rope, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=size, **options
    )  # fmt: skip
    if experts:
        mlp: Any = moe(size=size, experts=experts, inner=inner)
    else:
        mlp = nn.MLP("float32", None, size, inner, [DeviceRef.CPU()])
    return TransformerBlock(
        attention, mlp, nn.RMSNorm(size, "float32"), nn.RMSNorm(size, "float32")
    )


def moe(size: int = E, experts: int = 6, inner: int = 16, **options: Any) -> Any:
    """Six experts, of which each token uses two, and a shared expert that all tokens use."""
    from maxjax.graph import DeviceRef
    from maxjax.nn.moe import MoE

    return MoE(
        [DeviceRef.CPU()], size, experts, 2, inner, dtype="float32",
        has_shared_experts=True, shared_experts_dim=inner, **options,
    )  # fmt: skip


def tied(vocabulary: int = 50257, size: int = 8) -> Any:
    """An embedding table, a linear layer, and the table again as the head: logits ``[B, T, V]``."""
    from maxjax import nn
    from maxjax.graph import DeviceRef

    return _Tied(vocabulary, size, nn, DeviceRef.CPU())


def _Tied(vocabulary: int, size: int, nn: Any, cpu: Any) -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(vocabulary, size, "float32", cpu)
            self.body = nn.Linear(size, size, "float32", cpu, has_bias=True)

        def __call__(self, ids: Any) -> Any:
            return self.body(self.emb(ids)) @ self.emb.weight.T

    return Tied()


def bert(layers: int = 2, stacked: bool = False, heads: int = 4) -> Any:
    """A small BERT with a pooler."""
    from maxjax.models.bert import BertConfig, BertModel

    config = BertConfig(
        104, E, 64, num_hidden_layers=layers, num_attention_heads=heads, max_position_embeddings=16
    )
    model = BertModel(config, "float32")
    if stacked:
        model.encoder.layer = model.encoder.layer.stack()
    return model


def layers(count: int = 3, stacked: bool = True, **options: Any) -> Any:
    """Decoder blocks, stacked."""
    from maxjax import nn

    found = nn.LayerList([block(**options) for _ in range(count)])
    return found.stack() if stacked else found


def floats(*shape: int) -> tuple[Any, ...]:
    """Normal numbers, the same each time."""
    import numpy as np

    return (np.random.default_rng(1).standard_normal(shape).astype(np.float32),)


def tokens(high: int) -> tuple[Any, ...]:
    """Token ids ``[B, T]``, the first and the last among them."""
    import numpy as np

    ids = np.random.default_rng(2).integers(0, high, (B, T)).astype(np.int32)
    ids[0, :2] = 0, high - 1
    return (ids,)


def bert_inputs() -> tuple[Any, ...]:
    """Token ids and a mask; every sequence has a different length."""
    import numpy as np

    (ids,) = tokens(104)
    return ids, (np.arange(T)[None, :] < 1 + np.arange(B)[:, None] % T).astype(np.int32)


CASES: dict[str, Case] = {
    "block": Case(block, lambda: floats(B, T, 32)),
    "nine-heads": Case(lambda: block(9, 3), lambda: floats(B, T, 36)),
    "three-kv-heads": Case(lambda: block(12, 3), lambda: floats(B, T, 48)),
    "stacked-qkv": Case(lambda: block(stacked_qkv=True, has_bias=True), lambda: floats(B, T, 32)),
    "moe": Case(moe, lambda: floats(B, T, E)),
    "moe-block": Case(lambda: block(experts=6), lambda: floats(B, T, 32)),
    "vocabulary": Case(tied, lambda: tokens(50257)),
    "bert": Case(bert, bert_inputs),
    "bert-stacked": Case(lambda: bert(stacked=True), bert_inputs),
    "layer-stack": Case(layers, lambda: floats(B, T, 32)),
}  # fmt: skip


def fill(model: Any, seed: int = 0) -> Any:
    """The model with normal values, scaled so that every layer changes the result."""
    import numpy as np

    rng = np.random.default_rng(seed)
    values = {}
    for name, weight in model.raw_state_dict().items():
        shape = [int(size) for size in weight.shape]
        scale = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.5
        values[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    model.load_state_dict(values)
    return model


def call(model: Any, *inputs: Any) -> Any:
    """``model(*inputs)``, as one function, so that `jax.jit` finds its compiled programs again."""
    return model(*inputs)


# --- meshes --------------------------------------------------------------------------------


def meshes(limit: int = 8) -> list[dict[str, int]]:
    """Axis sizes of all meshes of 1 to ``limit`` devices, without axes of size 1."""
    found = []
    for sizes in itertools.product(range(1, limit + 1), repeat=len(AXES)):
        if math.prod(sizes) <= limit:
            named = {axis: n for axis, n in zip(AXES, sizes, strict=True) if n > 1}
            found.append(named or {"data": 1})
    return sorted(found, key=lambda sizes: (math.prod(sizes.values()), len(sizes)))


def mesh_of(sizes: dict[str, int], explicit: bool) -> Any:
    """The mesh of these sizes."""
    import jax

    import maxjax

    kind = jax.sharding.AxisType
    return maxjax.make_mesh(**sizes, axis_types=kind.Explicit if explicit else kind.Auto)


def inside(mesh: Any, is_set: bool) -> contextlib.AbstractContextManager[Any]:
    """`jax.set_mesh` if ``is_set``, otherwise a context that does nothing."""
    import jax

    return jax.set_mesh(mesh) if is_set else contextlib.nullcontext()


def batched(mesh: Any, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays with their first axis sharded over ``data`` and ``fsdp``, if it divides evenly."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    axes = tuple(name for name in ("data", "fsdp") if mesh.shape.get(name, 1) > 1)
    if not axes or arrays[0].shape[0] % math.prod(mesh.shape[name] for name in axes):
        axes = ()
    spec = PartitionSpec(axes) if axes else PartitionSpec()
    return tuple(jax.device_put(a, NamedSharding(mesh, spec)) for a in arrays)


# --- what was compiled -----------------------------------------------------------------------

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "f16": 2, "bf16": 2, "s8": 1, "u8": 1, "pred": 1, "f64": 8}
_OP = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One operation between devices: its kind, and the shape and bytes of each result."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int


def collectives(text: str) -> list[Collective]:
    """The collectives in the text of an optimised program, each counted once, also in a loop."""
    found = []
    for line in text.splitlines():
        match = _OP.search(line)
        if match is None:
            continue
        arrays = _ARRAY.findall(re.sub(r"\{[^}]*\}", "", match[1]))
        if match[3] and match[2] == "all-gather":
            arrays = arrays[len(arrays) // 2 :]  # operands, then results
        shapes = tuple(tuple(map(int, filter(None, dims.split(",")))) for _, dims in arrays)
        nbytes = sum(
            _BYTES[kind] * math.prod(shape) for (kind, _), shape in zip(arrays, shapes, strict=True)
        )
        found.append(Collective(match[2], shapes, nbytes))
    return found


def compiled(function: Callable[..., Any], *arguments: Any) -> list[Collective]:
    """The collectives of a function that is compiled for these arguments."""
    import jax

    return collectives(jax.jit(function).lower(*arguments).compile().as_text())


def worst(ours: Any, theirs: Any) -> float:
    """The largest difference of two pytrees, relative to the largest value; NaN if there is a NaN."""
    import jax
    import numpy as np

    errors = []
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, (a.shape, b.shape)
        errors.append(np.abs(a - b).max() / max(1.0, np.abs(b).max()) if a.size else 0.0)
    return float(np.max(errors))


# --- the product -----------------------------------------------------------------------------


class Tally:
    """The results of one model."""

    def __init__(self) -> None:
        self.runs, self.error, self.failures = 0, 0.0, list[str]()

    def add(self, where: str, run: Callable[[], float]) -> None:
        """Runs a comparison and counts it, or adds it to the failures."""
        self.runs += 1
        try:
            error = run()
        except Exception as problem:  # the others are run in any case
            first = (str(problem).splitlines() or [""])[0][:200]
            self.failures.append(f"{where}: {type(problem).__name__}: {first}")
            return
        if not error <= TOLERANCE:
            self.failures.append(f"{where}: differs by {error:.1e}")
        self.error = max(self.error, error)


def product(quick: bool, whole: bool, first: int) -> Iterator[tuple[dict[str, int], bool, bool]]:
    """(axis sizes, whether the axes are Explicit, whether the mesh is set), for each run.

    Args:
        quick: whether to yield only a sample of three.
        whole: whether to yield all four ways on each mesh, instead of one of them in turn.
        first: index of the way for the first mesh.
    """
    if quick:
        yield {"model": 4}, False, False
        yield {"fsdp": 2, "model": 2}, True, True
        yield {"data": 2, "expert": 2, "model": 2}, True, False
        return
    ways = list(itertools.product((False, True), repeat=2))
    for i, sizes in enumerate(meshes()):
        for way, (explicit, is_set) in enumerate(ways):
            if whole or way == (first + i) % len(ways):
                yield sizes, explicit, is_set


def runs(
    model: Any, mesh: Any, arrays: tuple[Any, ...], number: int
) -> dict[str, Callable[[], Any]]:
    """The ways to run a model on a mesh; the slow ones on a quarter of the meshes each."""
    import jax

    given = batched(mesh, arrays)
    found: dict[str, Callable[[], Any]] = {"jit": lambda: jax.jit(call)(model, *given)}
    if number % 8 in (0, 5):
        found["eager"] = lambda: call(model, *given)
    if number % 8 in (2, 7):
        found["NumPy"] = lambda: jax.jit(call)(model, *arrays)
    return found


def run_case(name: str, quick: bool, whole: bool, deadline: float) -> Tally:
    """Runs one model on all meshes."""
    import jax

    case, tally = CASES[name], Tally()
    arrays = case.inputs()
    reference = jax.device_get(jax.jit(call)(fill(case.make()), *map(jax.numpy.asarray, arrays)))
    model = fill(case.make())
    for i, (sizes, explicit, is_set) in enumerate(product(quick, whole, list(CASES).index(name))):
        if time.monotonic() > deadline:
            tally.failures.append("no time left for the rest")
            break
        mesh = mesh_of(sizes, explicit)
        where = f"{sizes} {'Explicit' if explicit else 'Auto'}{' set' if is_set else ''}"
        with inside(mesh, is_set):
            try:
                model.to(mesh)
            except Exception as problem:
                tally.failures.append(f"{where}: to(): {type(problem).__name__}: {problem}")
                continue
            for how, run in runs(model, mesh, arrays, i).items():
                tally.add(f"{where} {how}", lambda run=run: worst(run(), reference))
        # Not after every mesh: programs of eager operations are used again on the next one.
        if i % 16 == 15:
            jax.clear_caches()
    return tally


def in_processes(names: Sequence[str], options: argparse.Namespace) -> int:
    """Runs each model in a new process, several at a time."""

    def run(name: str) -> int:
        arguments = [
            "--only",
            name,
            "--minutes",
            str(options.minutes),
            "--shown",
            str(options.shown),
        ]
        arguments += [option for option in ("--quick", "--whole") if getattr(options, option[2:])]
        done = subprocess.run(
            [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True
        )
        print(done.stdout, end="", flush=True)
        return done.returncode

    with ThreadPoolExecutor(options.jobs) as pool:
        failed = sum(map(bool, pool.map(run, names)))
    print(f"{failed} of {len(names)} models failed" if failed else "all right")
    return 1 if failed else 0


def main() -> int:
    """Runs the models that the options choose."""
    # Many sizes are chosen so that meshes do not divide them.
    warnings.filterwarnings("ignore", "to.mesh. replicates", UserWarning)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a sample of half a minute")
    parser.add_argument("--whole", action="store_true", help="four ways on each mesh; an hour")
    parser.add_argument("--only", default="", help=f"of {', '.join(CASES)}")
    parser.add_argument("--minutes", type=float, default=60.0, help="give up after so many")
    parser.add_argument("--shown", type=int, default=5, help="failures shown for each model")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CASES)
    if options.jobs > 1 and len(names) > 1:
        return in_processes(names, options)
    sys.path.insert(0, str(ROOT))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["MAXJAX_COMPILE_CACHE"] = "0"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    failed, deadline = 0, time.monotonic() + 60 * options.minutes
    for name in names:
        start = time.monotonic()
        tally = run_case(name, options.quick, options.whole, deadline)
        failed += len(tally.failures)
        seconds = time.monotonic() - start
        print(f"{name:15} {tally.runs:5} runs  {len(tally.failures):4} failed  "
              f"worst error {tally.error:.1e}  {seconds:6.1f} s", flush=True)  # fmt: skip
        for failure in tally.failures[: options.shown]:
            print(f"    {failure}")
        if len(tally.failures) > options.shown:
            print(f"    and {len(tally.failures) - options.shown} more")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
