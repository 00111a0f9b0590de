"""Compiles a model's programs ahead of time for TPUs or GPUs that this machine does not have.

    python scripts/aot.py h200:8 --model llama8 --layers 8 --mesh model=8 --batch 8 --capacity 8192
    python scripts/aot.py v5e:2x4 --model path/to/config.json --program read --tokens 512
    python scripts/aot.py --table scripts/aot.txt
    python scripts/aot.py --check scripts/aot.txt

A topology names TPUs (`v5e:2x4`, `v5p:2x2x2`; needs the package libtpu, or TPU_LIBRARY_PATH),
NVIDIA GPUs (`h200:8`, `h100:8`; needs jax-cuda13-plugin and jax-cuda13-pjrt of jax's version, and
nvidia-cudnn-cu13), or fake devices (`cpu:8`). The compilers are the real ones; the model has no
weights, only their shapes, and its layers are as `maxjax.load` would hold them. The programs are those
of `maxjax.Engine` and `maxjax.generate`, `decode`, `read` (of one text for each group of devices that divide texts) and
`read_tokens` (of all texts), and `call`. The report has:

arguments    bytes of weights, cache and other arguments on one device
temporaries  bytes that the program needs in addition
reads        bytes that it reads from the memory of one device, in one token of `decode` or one run of
             others, and how many times what it needs that is
writes       bytes that it writes
need         bytes that it has to read: the weights and the cache on one device, and of experts and of the
             rows of embedding tables only those that tokens are expected to choose
copies       copies of weights or cache of 1 MiB or more, complete or of one layer: how many for one
             token of `decode`, or for one run of other programs; "once" is before and after all tokens
collectives  communication between devices: how often in a layer, how often outside layers, and bytes
kernels      custom calls, and code that the compiler did not make from its own loops

`--operations 12` adds the 12 operations that move most. `--packed FORMAT` makes the matrices of layers those
of a quantised checkpoint (FP8, GPTQ, AWQ, INT4, INT8, NF4, MXFP4) or of a GGUF file (Q4_K, Q8_0, …),
and the vocabulary 4,096 tokens, so that the output head does not hide the layers:

    python scripts/aot.py h200:8 --model deepseek3 --layers 3 --packed FP8 --mesh expert=8 \\
        --program decode --batch 64 --capacity 2048 --operations 12

`--table` compiles the fixed set of `scripts/aot_programs.py`, or of it the accelerators named (`v5e`, `h200`),
`--set floats` or `--set packed`, or the programs that `--only REGEX` finds, and writes a table that does not
change unless the programs do. `--check` compares with such a table and exits 1 with the lines that differ; sizes
may differ by 5 % or 1 MiB. Without the compiler of a topology the exit code is 2. Messages about
`cuInit` on stderr can be ignored.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":  # before JAX is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["MAXJAX_COMPILE_CACHE"] = "0"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for argument in sys.argv[1:]:
        if argument.startswith("cpu:"):
            os.environ["JAX_NUM_CPU_DEVICES"] = argument.removeprefix("cpu:")

import jax  # noqa: E402

import maxjax  # noqa: E402
from maxjax.dtype import DType  # noqa: E402
from maxjax.engine.batching.memory import in_groups  # noqa: E402
from maxjax.engine.plan.compiled import (  # noqa: E402
    abstract_pool,
    lowered,
    memory_of,
    placeholder_of,
)
from maxjax.engine.plan.footprint import Reading  # noqa: E402
from maxjax.engine.plan.topology import Topology  # noqa: E402
from maxjax.errors import MissingCompilerError, UserInputError  # noqa: E402
from maxjax.graph.quantization import QuantizationEncoding  # noqa: E402
from maxjax.models import build, find_family  # noqa: E402
from maxjax.models.parts.config import groups_of_config  # noqa: E402
from maxjax.nn.kv_cache.pages import PagePool  # noqa: E402
from maxjax.nn.kv_cache.recurrent import Recurrent  # noqa: E402
from scripts import hlo, packed_checkpoints, traffic  # noqa: E402
from scripts.aot_programs import MODELS, PACKED, PROGRAMS, TABLE, TOPOLOGIES, Case  # noqa: E402

MIB = 1 << 20
# The number of compilations at a time: XLA uses more than one core only for a part of each.
WORKERS = 2
# The parts of the table: models with weights as floats, and quantised ones.
SETS = ("floats", "packed")


class Report(NamedTuple):
    """What is measured of a compiled program: sizes in bytes on one device, and text for the rest."""

    arguments: int
    temporaries: int
    reads: float
    writes: float
    need: float
    copies: str
    collectives: str
    kernels: str
    seconds: float
    operations: Sequence[traffic.Moved] = ()


# --- programs ------------------------------------------------------------------------------------


def model_of(case: Case, mesh: Any) -> Any:
    """The model without values, sharded over a mesh, as ``maxjax.load`` makes it before it reads."""
    config = case.config()
    if case.packed in packed_checkpoints.FORMATS:
        model = _of_checkpoint(config, case.packed)
    else:
        family = find_family(config)
        settings: Any = family.config.from_dict(config)  # type: ignore[attr-defined]
        model = family.make(settings, (), DType.of(case.dtype), DType.float32)
        if case.packed is not None:
            _pack(model, QuantizationEncoding(case.packed))
    model = model.unstack() if case.unstack else model.stack_for(mesh)
    return placeholder_of(model, mesh)


def _of_checkpoint(config: dict[str, Any], packed: str) -> Any:
    """The model of a checkpoint in a format, of which only the header is read."""
    with tempfile.TemporaryDirectory() as place:
        packed_checkpoints.write(Path(place), config, packed)
        return build(maxjax.load_weights(place), stacked=False)


def _pack(model: Any, encoding: QuantizationEncoding) -> None:
    """Declares the matrices of a model's layers as quantised, as loading a GGUF file does."""
    definition, holders = model._mx_definition()
    for name, holder in zip(definition.names, holders, strict=True):
        dims = tuple(int(size) for size in holder.spec.dims)
        if packed_checkpoints.is_matrix(name, dims):
            holder.redeclare(DType.uint8, encoding.packed_shape(dims), encoding)


class Traced(NamedTuple):
    """A program that is not compiled yet.

    Attributes:
        lowered: ``jax.stages.Lowered``.
        layers: number of the model's layers.
        mixture: its mixture of experts, or None.
        need: bytes that a step has to read on one device.
        seen: by the name of a group of layers, the share of the cache that a token attends to.
    """

    lowered: Any
    layers: int
    mixture: traffic.Mixture | None
    need: float
    seen: dict[str, float]


def trace(case: Case, topology: str) -> Traced:
    """The lowered program of a case."""
    mesh = maxjax.make_mesh(devices=Topology.of(topology).devices(), **case.mesh)
    model = model_of(case, mesh)
    program = lowered(
        case.program, model, mesh,
        batch=case.batch, capacity=case.capacity, tokens=case.tokens, cache_dtype=case.cache_dtype,
    )  # fmt: skip
    weights = _leaves(model)
    slots, groups = in_groups(model, case.batch)
    rows = {"decode": slots, "read": groups * case.tokens, "read_tokens": case.tokens}
    tokens = rows.get(case.program, case.batch * case.tokens)
    mixture = mixture_of(model.config, weights, tokens)
    held = [held_of(name, leaf, model.config, tokens) for name, leaf in weights.items()]
    seen: dict[str, float] = {}
    if case.program != "call":
        pool = abstract_pool(model, case.batch, case.capacity, case.cache_dtype)
        held, seen = held + cache_of(case, model, pool), windows_of(case, model, pool)
    need = traffic.needed(held, mixture)
    return Traced(program, model.config.num_hidden_layers, mixture, need, seen)


def windows_of(case: Case, model: Any, pool: PagePool) -> dict[str, float]:
    """By the name of a group of layers, the share of its pages that a token attends to: less than 1 with a window."""
    slots, _ = in_groups(model, case.batch)

    def share(name: str, kind: Any) -> float:
        window, state = getattr(kind, "window", None), pool.states[name]
        if window is None or isinstance(state, Recurrent):
            return 1
        return min(1, window * slots / (state.keys.shape[1] * pool.page_size))

    groups = groups_of_config(model.config)
    return {name: share(name, group.kind) for name, group in groups.items()}


def cache_of(case: Case, model: Any, pool: PagePool) -> list[traffic.Held]:
    """What a call has to read of the cache: of the texts that it is for, what a token attends to."""
    slots, groups = in_groups(model, case.batch)
    share = groups / slots if case.program == "read" else 1
    return [
        traffic.Held(f"{name}.{n}", round(local_bytes(a) * share * seen))
        for name, seen in windows_of(case, model, pool).items()
        for n, a in _leaves(pool.states[name]).items()
    ]


def _leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their names."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


def local_bytes(array: Any) -> int:
    """The bytes of an array on one device."""
    shape = array.sharding.shard_shape(array.shape)
    return -(-math.prod(shape) * DType.of(array.dtype).size_in_bits // 8)


def held_of(name: str, array: Any, config: Any, tokens: int) -> traffic.Held:
    """A weight; if it is an embedding table, with the size of the rows of so many tokens."""
    share = Reading.of(config).share(name, tokens, config.tie_word_embeddings)
    is_table = share < 1 and not traffic.is_expert(name)
    size = local_bytes(array)
    rows = math.prod(array.shape[1:]) * array.dtype.itemsize * tokens
    return traffic.Held(name, size, rows if is_table else 0)


def mixture_of(config: Any, weights: dict[str, Any], tokens: int) -> traffic.Mixture | None:
    """The mixture of experts of a model, as far as it decides how many of its experts are read."""
    reading = Reading.of(config)
    if not reading.experts or not reading.chosen:
        return None
    # A small tensor of the experts may be whole on each device.
    local = min(
        (array.sharding.shard_shape(array.shape)[traffic.stack_axes(name) - 1]
         for name, array in weights.items() if ".experts.*." in name),
        default=reading.experts,
    )  # fmt: skip
    return traffic.Mixture(reading.experts, local, reading.chosen, tokens, reading.hidden_size)


def compiled(case: Case, topology: str, traced: Traced, save: Path | None) -> Report | str:
    """The report of a lowered program, or why the compiler refuses it, for example for lack of memory."""
    start = time.perf_counter()
    try:
        executable = traced.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return re.sub(r" See https?://.*", "", " ".join(str(error).split()))[:300]
    seconds = time.perf_counter() - start
    text = text_of(traced.lowered, executable)
    memory = memory_of(case.program, executable)
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w=.,\-]+", "_", f"{topology}_{case}")
        (save / f"{name}.hlo").write_text(text)
    parsed = hlo.parse(text)
    moved = traffic.moved(parsed, case.program == "decode", traced.mixture, traced.seen)
    return Report(
        memory.arguments, memory.temporaries, *traffic.totals(moved), traced.need,
        copies_of(parsed, case.program), collectives_of(parsed, traced.layers, case.program),
        kernels_of(parsed), seconds, moved,
    )  # fmt: skip


def text_of(lowered: Any, executable: Any) -> str:
    """The text of a compiled program.

    A libtpu may have operations that this jaxlib cannot print; then the program is compiled again, and libtpu
    prints it.
    """
    try:
        return executable.as_text()
    except jax.errors.JaxRuntimeError:
        with tempfile.TemporaryDirectory() as place:
            lowered.compile({"xla_dump_to": place, "xla_dump_hlo_as_text": True})
            found = list(Path(place).glob("*.after_codegen.txt"))
            if not found:
                raise
            return max(found, key=lambda path: path.stat().st_size).read_text()


def reports(
    cases: Sequence[tuple[str, Case]], save: Path | None, jobs: int = WORKERS
) -> Iterator[tuple[str, Case, Report | str]]:
    """The reports of pairs of a topology and a case, in their order.

    Programs are traced one after the other, and compiled in parallel to that.
    """
    with ThreadPoolExecutor(jobs) as pool:
        waiting = []
        for topology, case in cases:
            waiting.append(pool.submit(compiled, case, topology, trace(case, topology), save))
        for (topology, case), report in zip(cases, waiting, strict=True):
            yield topology, case, report.result()


# --- the report ----------------------------------------------------------------------------------


def is_data(name: str) -> bool:
    """Whether an argument of a program is a weight or a part of the cache, by its name.

    Example:
        >>> is_data("model.lm_head.weight"), is_data("memory.pool.states.full.keys"), is_data("last")
        (True, True, False)
    """
    return name.startswith(("model.", "memory.pool."))


def copies_of(program: hlo.Program, kind: str) -> str:
    """The copies of weights and cache, the largest first."""
    groups: Counter[tuple[int, str, str, str]] = Counter()
    for one in hlo.copies(program, is_data, MIB):
        name = re.sub(r"\.\d+\b", ".*", one.what)
        once = "once, " if kind == "decode" and not one.loops else ""
        groups[-one.bytes, name, one.dtype, once] += one.times
    parts = [
        f"{times} x {-size / MIB:.1f} MiB ({once}{dtype} {name})"
        for (size, name, dtype, once), times in sorted(groups.items())
    ]
    return "; ".join([f"{sum(groups.values())}", *parts]) if parts else "0"


def collectives_of(program: hlo.Program, layers: int, kind: str) -> str:
    """The collectives: of each kind ``times // layers`` in a layer, and the remainder outside layers."""
    groups: Counter[tuple[str, str, int, bool]] = Counter()
    for one in hlo.collectives(program):
        once = kind == "decode" and not one.loops
        groups[one.what, one.dtype, one.bytes, once] += one.times
    parts = []
    for (what, dtype, size, once), times in sorted(groups.items()):
        a_layer, beside = divmod(times, layers)
        text = f"{what} {dtype} {_size(size)}"
        parts += [f"{a_layer} a layer x {text}"] if a_layer else []
        parts += [f"{beside}{' once' if once else ''} x {text}"] if beside else []
    return "; ".join(parts) or "none"


def _size(nbytes: int) -> str:
    for unit, size in (("MiB", MIB), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def kernels_of(program: hlo.Program) -> str:
    """The names of kernels, each with the number of places in the program that call it."""
    found = sorted(hlo.kernels(program).items())
    return "; ".join(f"{count} x {name}" for name, count in found) or "none"


def operations_of(found: Sequence[traffic.Moved], most: int) -> list[str]:
    """The operations that read and write most, those of all layers together."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for one in found:
        source = re.sub(r"\d+", "*", one.source)[-70:]
        shape = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", one.type)[:50]
        sums = groups.setdefault((one.kind, source, shape), [0.0, 0.0])
        sums[0] += one.reads
        sums[1] += one.writes
    largest = sorted(groups.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        f"reads {reads / MIB:10.2f}, writes {writes / MIB:10.2f} MiB: {kind} {shape} {source}"
        for (kind, source, shape), (reads, writes) in largest
    ]


def lines_of(topology: str, case: Case, report: Report | str) -> Iterator[tuple[str, str]]:
    """The lines of a case in a table, as (what is measured, what was found)."""
    name = f"{topology} {case}"
    if isinstance(report, str):
        yield f"{name} | failed", report
        return
    yield f"{name} | arguments", f"{report.arguments / MIB:.2f} MiB"
    yield f"{name} | temporaries", f"{report.temporaries / MIB:.2f} MiB"
    for field in ("reads", "writes"):
        size = getattr(report, field)
        yield f"{name} | {field}", f"{size / MIB:.2f} MiB, {size / report.need:.2f} x need"
    yield f"{name} | need", f"{report.need / MIB:.2f} MiB"
    for field in ("copies", "collectives", "kernels"):
        yield f"{name} | {field}", getattr(report, field)


def differing(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """The lines in which two tables differ, for the programs in ``found``.

    Sizes of arguments and temporaries, and of what is read, written and needed, may differ by 5 % or 1 MiB.

    Example:
        >>> differing({"a | temporaries": "9.00 MiB", "a | copies": "0"},
        ...           {"a | temporaries": "9.90 MiB", "a | copies": "2"})
        ['a | copies | expected 0', 'a | copies | found    2']
    """
    lines = []
    programs = set(map(_program, found))
    names = [name for name in expected if _program(name) in programs]
    for name in [*names, *(name for name in found if name not in expected)]:
        old, new = expected.get(name), found.get(name)
        if old is not None and new is not None and (old == new or _close(name, old, new)):
            continue
        lines += [f"{name} | expected {'no such line' if old is None else old}"]
        lines += [f"{name} | found    {'no such line' if new is None else new}"]
    return lines


def _program(name: str) -> str:
    """The program that a line of a table is about."""
    return name.rpartition(" | ")[0]


def _close(name: str, old: str, new: str) -> bool:
    if name.rpartition(" | ")[2] not in ("arguments", "temporaries", "reads", "writes", "need"):
        return False
    before, after = float(old.split()[0]), float(new.split()[0])
    return math.isclose(before, after, rel_tol=0.05, abs_tol=1.0)


def fixed_set(kinds: Sequence[str] = (), sets: Sequence[str] = SETS) -> list[tuple[str, Case]]:
    """The cases of the table, each with its topology.

    Args:
        kinds: kinds of accelerators, such as ``v5e``; all if there are none.
        sets: some of ``SETS``.
    """
    found = []
    if "floats" in sets:
        found += [
            (next(name for size, name in sizes.items() if size >= case.devices), case)
            for sizes in TOPOLOGIES.values()
            for case in TABLE
        ]
    if "packed" in sets:
        found += PACKED
    return [pair for pair in found if not kinds or pair[0].partition(":")[0] in kinds]


def table(
    cases: Sequence[tuple[str, Case]], save: Path | None, jobs: int = WORKERS
) -> Iterator[dict[str, str]]:
    """The lines of each case's table; prints the time that each took to compile to stderr."""
    total = 0.0
    for topology, case, report in reports(cases, save, jobs):
        refused = isinstance(report, str)
        total += 0.0 if refused else report.seconds
        seconds = "refused" if refused else f"{report.seconds:6.1f} s"
        print(f"{topology} {case} {seconds}", file=sys.stderr, flush=True)
        yield dict(lines_of(topology, case, report))
    print(f"compiled in {total:.0f} s, {jobs} at a time", file=sys.stderr, flush=True)


def written(found: dict[str, str]) -> str:
    """A table as text, with the command that writes it."""
    lines = [
        "# Bytes that programs hold and move, copies, collectives and kernels, compiled without the hardware.",
        f"# Made by: scripts/accelerators.sh --table scripts/aot.txt   (jax {jax.__version__})",
        "# Compared by: .ci/full accelerators packed. CONTRIBUTING.md says more.",
    ]
    title = ""
    for name, value in found.items():
        program, _, what = name.rpartition(" | ")
        lines += [] if program == title else ["", program]
        lines.append(f"  {what:<12} {value.replace('; ', _INDENT)}")
        title = program
    return "\n".join(lines) + "\n"


def merged(before: dict[str, str], found: dict[str, str]) -> dict[str, str]:
    """A table with the programs of two, in the order of the fixed set and without those that are not in it.

    Of a program that both have, the lines are those in ``found``.
    """
    programs = set(map(_program, found))
    both = {name: value for name, value in before.items() if _program(name) not in programs} | found
    order = {f"{topology} {case}": i for i, (topology, case) in enumerate(fixed_set())}
    kept = [name for name in both if _program(name) in order]
    return {name: both[name] for name in sorted(kept, key=lambda name: order[_program(name)])}


_INDENT = "\n" + " " * 15


def read_table(text: str) -> dict[str, str]:
    """The inverse of :func:`written`: a table from its text.

    Example:
        >>> read_table(written({"v5e:2x4 decode | copies": "0"}))
        {'v5e:2x4 decode | copies': '0'}
    """
    found, title = {}, ""
    for line in text.replace(_INDENT, "; ").splitlines():
        if line.startswith("  "):
            what, _, value = line.strip().partition(" ")
            found[f"{title} | {what}"] = value.strip()
        elif not line.startswith("#"):
            title = line
    return found


# --- command line --------------------------------------------------------------------------------


def mesh_sizes(text: str) -> dict[str, int]:
    """The axes of a mesh: ``"data=2,model=4"``."""
    try:
        return {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh such as data=2,model=4") from None


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        description="Compile a model's programs for accelerators that are not there."
    )
    made.add_argument("topology", nargs="*",
                      help="v5e:2x4, v5p:2x2x2, h200:8, cpu:8; with --table or --check: v5e, v5p, h200")  # fmt: skip
    made.add_argument("--model", default="llama8", help=f"{', '.join(MODELS)}, or a config.json")
    made.add_argument("--layers", type=int, help="how many layers; the config's by default")
    made.add_argument("--mesh", type=mesh_sizes, default={"model": 1}, help="as data=2,model=4")
    made.add_argument("--batch", type=int, default=8, help="number of sequences")
    made.add_argument("--capacity", type=int, default=8192, help="slots of the cache")
    made.add_argument(
        "--tokens", type=int, default=512, help="tokens of a text that is read, or of a call"
    )
    made.add_argument("--dtype", default="bfloat16", help="dtype of weights and cache")
    made.add_argument("--cache-dtype", help="dtype of the cache, such as int8")
    made.add_argument("--program", choices=PROGRAMS, action="append", help="by default all")
    made.add_argument(
        "--packed", metavar="FORMAT", help="of the matrices of layers, such as FP8, Q4_K"
    )
    made.add_argument("--operations", type=int, default=0, metavar="N",
                      help="print the N operations that move most bytes")  # fmt: skip
    made.add_argument("--unstack", action="store_true", help="give each layer its own weights")
    made.add_argument("--save", type=Path, help="directory for the texts of the programs")
    made.add_argument("--jobs", type=int, default=WORKERS, help="number of compilations at a time")
    made.add_argument("--set", dest="sets", choices=SETS, action="append",
                      help="part of the fixed set; by default both")  # fmt: skip
    made.add_argument("--only", metavar="REGEX", default="",
                      help="programs of the fixed set whose name it finds, such as 'llama70.* FP8'")  # fmt: skip
    both = made.add_mutually_exclusive_group()
    both.add_argument("--table", type=Path, metavar="FILE",
                      help="write the table of the fixed set; other lines of it are kept")  # fmt: skip
    both.add_argument("--check", type=Path, metavar="FILE", help="compare the fixed set with FILE")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a table differs or a program does not compile, 2 without a compiler."""
    options = parser().parse_args(arguments)
    names = options.topology
    try:
        if options.table or options.check:
            return _fixed(names, options)
        if not names:
            parser().error("name a topology, such as v5e:2x4 or h200:8, or give --table")
        return _single(names, options)
    except (MissingCompilerError, UserInputError, OSError) as error:
        print(f"aot.py: {error}", file=sys.stderr)
        return 2


def _fixed(kinds: Sequence[str], options: argparse.Namespace) -> int:
    path, sets = options.check or options.table, options.sets or SETS
    before = read_table(path.read_text()) if options.check or path.exists() else {}
    cases = [
        pair for pair in fixed_set(kinds, sets) if re.search(options.only, " ".join(map(str, pair)))
    ]
    if not cases:
        raise UserInputError(
            f"no program of the fixed set is for {' '.join([*kinds, options.only])}"
        )
    for topology in dict(cases):  # a missing compiler is reported before the others start
        Topology.of(topology).devices()
    found: dict[str, str] = {}
    for lines in table(cases, options.save, options.jobs):
        found |= lines
        if options.table:  # after each program, so that those of a long run are kept
            options.table.write_text(written(merged(before, found)))
    if options.check:
        lines = differing(before, found)
        print("\n".join(lines) if lines else f"{len(found)} lines as in {options.check}")
        return int(bool(lines))
    return int(any(name.endswith("| failed") for name in found))


def _single(topologies: Sequence[str], options: argparse.Namespace) -> int:
    cases = [
        (topology, Case(
            program, options.model, options.layers, options.mesh, options.batch, options.capacity,
            options.tokens, options.dtype, options.cache_dtype, options.unstack,
            options.packed,
        ))
        for topology in topologies
        for program in options.program or PROGRAMS
    ]  # fmt: skip
    failed = False
    for topology, case, report in reports(cases, options.save):
        print(f"{topology} {case}")
        for name, value in lines_of(topology, case, report):
            print(f"  {name.rsplit(' | ', 1)[1]:12s} {value.replace('; ', _INDENT)}")
        if isinstance(report, str):
            failed = True
        else:
            for line in operations_of(report.operations, options.operations):
                print(f"  {line}")
            print(f"  {'compiled in':12s} {report.seconds:.1f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
