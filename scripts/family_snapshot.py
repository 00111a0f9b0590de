"""Records what every model family reads, writes and computes, and compares a later tree with the records.

    python scripts/family_snapshot.py make DIR              # with the code as it is now
    python scripts/family_snapshot.py compare DIR           # with the code as it has become
    python scripts/family_snapshot.py compare DIR --only 'llama|mixtral' --jobs 2

``make`` writes small random checkpoints under DIR: for each family those of ``tests/models/families``
(known and drawn configurations), each architecture of a multimodal model with each of its text models, base
models without a head, classifiers, encoders, embedders and rerankers, and quantised checkpoints; and beside
each what maxjax makes of it. It needs torch and transformers.

``compare`` opens the checkpoints again, by public names alone, and prints each case that differs, and in
what: names, shapes, dtypes and bytes of the loaded weights, of the files that ``save_pretrained`` and
``convert`` write, and of what GGUF files give back; settings; warnings and errors with their messages;
shardings on a mesh data=2, model=4; the layout of the cache; logits without and with a cache, states and
scores. Logits must have the same bits; it is reported, but is no failure, if they differ by at most 1e-5 of
the largest, and so is another order of weights in memory, settings or words. The exit code is 1 if
anything else differs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Each program runs once or twice, so that compiling is most of the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import maxjax  # noqa: E402

NEAR = 1e-5
LENGTHS, CHUNK, STEPS = (20, 13), 10, 3
TEXTS = ["The cat sat on the mat.", "where is the dog, and what does it want?"]
GGUF_KINDS: dict[str, dict[str, Any]] = {"f32": {"dtype": "float32"}, "q8_0": {"quantize": "q8_0"}}
MESH: dict[str, Any] = {"data": 2, "model": 4}
# What differs in order alone counts in files, and is else only mentioned.
IN_FILES, ORDERED = re.compile("saved|back|file|convert"), "(order) "
IN_PROCESS = 40  # cases that one process runs
SHOWN, MOST = 6, 24  # differences that are printed of each part, and of a case
Record = dict[str, Any]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Snapshot:
    """One checkpoint: its name ``family/case``, and a function that writes its files into a directory.

    ``is_varied``: what is recorded is what becomes of it if its settings are others, one after the other.
    """

    name: str
    write: Callable[[Path], Any]
    is_varied: bool = False


# --- what is recorded ------------------------------------------------------------------------


def digest(data: Any) -> str:
    """A checksum of bytes or of an array's values."""
    data = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
    return hashlib.sha256(data).hexdigest()[:20]


class Told(logging.Handler):
    """Collects the messages of maxjax's logger and Python's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.levelname}: {record.getMessage()}")


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """The list that messages are added to."""
    handler, log = Told(), logging.getLogger("maxjax")
    log.addHandler(handler)
    before, log.propagate = log.propagate, False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield handler.messages
        handler.messages += [f"{one.category.__name__}: {one.message}" for one in caught]
    finally:
        log.removeHandler(handler)
        log.propagate = before


def without_paths(value: Any, folders: Mapping[str, Path]) -> Any:
    """A record in which each folder's path is its name."""
    if isinstance(value, dict):
        return {key: without_paths(one, folders) for key, one in value.items()}
    if isinstance(value, list):
        return [without_paths(one, folders) for one in value]
    if isinstance(value, str):
        for name, path in folders.items():
            value = value.replace(str(path), f"<{name}>")
    return value


def safetensors_of(path: Path) -> Record:
    """The tensors of a file: dtype, shape and checksum by name; and its metadata."""
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    metadata = header.pop("__metadata__", None)
    found = {
        name: [one["dtype"], one["shape"], digest(data[size:][slice(*one["data_offsets"])])]
        for name, one in header.items()
    }
    return {"metadata": metadata, "tensors": found, "order": list(header)}


def gguf_of(path: Path) -> Record:
    """The metadata of a GGUF file, with types and in order, and its tensors; all its bytes as a checksum."""
    import gguf

    reader = gguf.GGUFReader(path)
    metadata = {
        name: [[one.name for one in field.types], plain(field.contents())]
        for name, field in reader.fields.items()
    }
    tensors = {
        one.name: [one.tensor_type.name, [int(n) for n in one.shape], digest(np.asarray(one.data))]
        for one in reader.tensors
    }
    whole = digest(path.read_bytes())
    return {"metadata": metadata, "tensors": tensors, "order": [*tensors], "bytes": whole}


def plain(value: Any) -> Any:
    """A value as JSON has it; long lists as a checksum."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple, np.ndarray)):
        found = [plain(one) for one in value]
        return (
            found if len(found) <= 256 else ["long", len(found), digest(json.dumps(found).encode())]
        )
    return value


def files_of(folder: Path) -> Record:
    """The content of each file in a folder."""
    found: Record = {}
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found[name] = safetensors_of(path)
        elif path.suffix == ".json":
            value = json.loads(path.read_text())
            found[name] = {"content": value, "order": [*value] if isinstance(value, dict) else []}
        else:
            found[name] = digest(path.read_bytes())
    return found


def state_of(model: Any) -> Record:
    """The weights by the checkpoint's names, and as they lie in memory: dtype, shape, and checksum."""
    named = {
        name: [str(value.dtype), [int(n) for n in value.shape], digest(np.asarray(value))]
        for name, value in model.state_dict().items()
    }
    return {"weights": named, "order": [*named], "memory": leaves(model)}


def leaves(tree: Any) -> Record:
    """The dtype and shape of each array of a tree, by its path."""
    return {
        jax.tree_util.keystr(path): [str(one.dtype), [int(n) for n in one.shape]]
        for path, one in jax.tree_util.tree_leaves_with_path(tree)
    }


def specs_of(model: Any) -> Record:
    """The sharding of each array of a model, by its path."""
    return {
        jax.tree_util.keystr(path): str(getattr(one.sharding, "spec", one.sharding))
        for path, one in jax.tree_util.tree_leaves_with_path(model)
    }


@jax.jit
def whole(model: Any, *inputs: Any) -> Any:
    """A call without a cache."""
    return model(*inputs)


@jax.jit
def part(model: Any, ids: Any, cache: Any, lengths: Any) -> Any:
    """A call with a cache."""
    return model(ids, cache, lengths=lengths)


@jax.jit
def states(model: Any, ids: Any) -> Any:
    """The hidden states."""
    return model.states(ids)


@jax.jit
def scores(model: Any, pooled: Any) -> Any:
    """The scores of a classification head."""
    return model.scores(pooled)


def ids_of() -> np.ndarray:
    """Token ids that every vocabulary here has, and that are none of the special tokens."""
    shape = len(LENGTHS), max(LENGTHS)
    return np.random.default_rng(0).integers(7, 60, shape).astype(np.int32)


def answers_of(model: Any, *, short: bool = False) -> Arrays:
    """What a model computes: logits without a cache, in chunks, and step by step; states; scores."""
    ids = ids_of()
    if not hasattr(model, "cache"):
        mask = (np.arange(ids.shape[1])[None] < np.array(LENGTHS)[:, None]).astype(np.int32)
        output = [np.asarray(one) for one in whole(model, ids, mask) if one is not None]
        output[0] = output[0] * mask[..., None]
        found = {f"output {i}": one for i, one in enumerate(output)}
        if getattr(model, "classifier", None) is not None:
            found["scores"] = np.asarray(scores(model, output[0][:, 0]))
        return found
    if getattr(model, "lm_head", None) is None:
        found = {"states": np.asarray(states(model, ids))}
        if getattr(model, "score", None) is not None:
            found["scores"] = np.asarray(scores(model, found["states"][:, -1]))
        return found
    found = {"logits": np.asarray(whole(model, ids))}
    if short:
        return found
    lengths = np.array(LENGTHS, np.int32)
    cache = model.cache(len(ids), ids.shape[1] + STEPS).for_texts(lengths + STEPS)
    for start in range(0, ids.shape[1], CHUNK):
        counts = np.clip(lengths - start, 0, CHUNK)
        logits, cache = part(model, ids[:, start : start + CHUNK], cache, counts)
        real = np.arange(CHUNK)[None] < counts[:, None]
        found[f"chunk at {start}"] = np.where(real[..., None], np.asarray(logits), 0)
    for step in range(STEPS):
        logits, cache = part(model, ids[:, step : step + 1], cache, np.ones(len(ids), np.int32))
        found[f"step {step}"] = np.asarray(logits)
    return found


class Recorder:
    """Runs one piece of code after the other, and keeps what each finds: results, messages, errors."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.folders, self.record, self.arrays = folders, {}, {}

    def run(self, name: str, code: Callable[[], Any]) -> Any:
        """The result of ``code``, or None if it raises an error, which is recorded."""
        found, record = None, {}
        with told() as messages:
            try:
                found = code()
            except Exception as error:
                record["error"] = [type(error).__name__, str(error)]
                if os.environ.get("SNAPSHOT_TRACEBACK"):
                    traceback.print_exc()
        record["messages"] = messages
        self.record[name] = record
        return found

    def keep(self, name: str, code: Callable[[], Any]) -> None:
        """Records the result of ``code``, which is JSON."""
        found = self.run(name, code)
        if found is not None:
            self.record[name] |= found

    def compute(self, name: str, code: Callable[[], Arrays]) -> None:
        """Records the arrays that ``code`` computes."""
        for key, array in (self.run(name, code) or {}).items():
            self.arrays[f"{name}/{key}"] = array


def source_of(case: Path) -> Path:
    """The checkpoint of a case: a directory, or the GGUF file in it."""
    source = case / "hf"
    return source / "model.gguf" if (source / "model.gguf").exists() else source


def observe(case: Path, work: Path, *, is_new: bool) -> tuple[Record, Arrays]:
    """What maxjax makes of the checkpoint of a case.

    Args:
        case: its directory, with the checkpoint ``hf``, and GGUF files that are read.
        work: an empty directory.
        is_new: whether the GGUF files are still to be written into the case.
    """
    source = source_of(case)
    seen = Recorder({"case": case, "work": work})
    model, tokenizer = seen.run("load", lambda: maxjax.load(source)) or (None, None)
    if model is not None:
        seen.keep("state", lambda: state_of(model))
        seen.keep(
            "settings", lambda: {"config": model.hf_config, "max_length": int(model.max_length)}
        )
        seen.compute("answers", lambda: answers_of(model))
        seen.keep("saved", lambda: saved(model, work / "saved"))
        seen.keep("written settings", lambda: written(model, work / "written"))
        if tokenizer is not None:
            seen.compute("embedded", lambda: {"texts": maxjax.embed(model, tokenizer, TEXTS)})
            seen.compute("reranked", lambda: {"texts": maxjax.rerank(model, tokenizer, "a", TEXTS)})
        if hasattr(model, "cache"):
            seen.keep("cache", lambda: {"tree": leaves(model.cache(2, 40))})
            seen.keep("narrow cache", lambda: {"tree": leaves(model.cache(3, 5, "bfloat16"))})
            seen.keep("separate", lambda: {"memory": leaves(model.unstack())})
        seen.keep("sharded", lambda: sharded(source))
        seen.keep(
            "plan",
            lambda: {"lines": str(maxjax.plan(source, MESH, batch=4, length=32)).split("\n")},
        )
        seen.keep("bfloat16", lambda: {"memory": leaves(maxjax.load(source, dtype="bfloat16")[0])})
    for kind, options in GGUF_KINDS.items():
        path, kept = work / f"{kind}.gguf", case / f"{kind}.gguf"
        seen.run(f"convert {kind}", functools.partial(maxjax.convert, source, path, **options))
        if path.exists():
            seen.keep(f"file {kind}", functools.partial(gguf_of, path))
            if is_new:
                shutil.copy(path, kept)
        if kept.exists():
            observe_gguf(seen, kept, work)
    record = without_paths(seen.record, seen.folders)
    return json.loads(json.dumps(record)), seen.arrays


def observe_gguf(seen: Recorder, path: Path, work: Path) -> None:
    """The same of a GGUF file that maxjax wrote when the case was made."""
    kind = path.stem
    model, _ = seen.run(f"load {kind}", lambda: maxjax.load(path)) or (None, None)
    if model is not None:
        seen.keep(f"state {kind}", lambda: state_of(model))
        seen.keep(f"settings {kind}", lambda: {"config": model.hf_config})
        seen.compute(f"answers {kind}", lambda: answers_of(model, short=True))
        seen.keep(f"written settings {kind}", lambda: written(model, work / f"written {kind}"))
    if kind == "f32":
        seen.run("back", lambda: maxjax.convert(path, work / "back"))
        if (work / "back").exists():
            seen.keep("back", lambda: files_of(work / "back"))


def saved(model: Any, folder: Path) -> Record:
    """The files that ``save_pretrained`` writes."""
    maxjax.save_pretrained(model, folder)
    return files_of(folder)


def written(model: Any, folder: Path) -> Record:
    """The ``config.json`` that is made of a model's settings, without that of its file."""
    before, model.hf_config = model.hf_config, None
    try:
        maxjax.save_pretrained(model, folder)
    finally:
        model.hf_config = before
    return files_of(folder)["config.json"]


def sharded(source: Path) -> Record:
    """The shardings of weights and cache on a mesh."""
    model, _ = maxjax.load(source, mesh=maxjax.make_mesh(**MESH))
    found: Record = {"weights": specs_of(model)}
    if hasattr(model, "cache"):
        found["cache"] = specs_of(model.cache(4, 16))
    return found


# --- variations of settings ------------------------------------------------------------------

VALUES: dict[str, Any] = {"null": None, "text": "x", "minus one": -1}


def variations(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A configuration with one key left out, set to another value, or unknown, and what is changed."""
    yield "more: unknown_setting", {**config, "unknown_setting": 3}
    if "architectures" in config:
        yield "unknown architecture", {**config, "architectures": ["UnknownForCausalLM"]}
    for key, value in config.items():
        yield f"no {key}", {other: one for other, one in config.items() if other != key}
        for name, instead in VALUES.items():
            yield f"{key}: {name}", {**config, key: instead}
        if isinstance(value, bool):
            yield f"{key}: opposite", {**config, key: not value}
        elif isinstance(value, int):
            yield f"{key}: one more", {**config, key: value + 1}
            yield f"{key}: huge", {**config, key: 2**33}
        elif isinstance(value, float):
            yield f"{key}: half", {**config, key: value / 2}
        elif isinstance(value, dict):
            for what, inner in variations(value):
                yield f"{key}: {what}", {**config, key: inner}
        elif isinstance(value, list) and value:
            yield f"{key}: shorter", {**config, key: value[:-1]}


def varied(source: Path, work: Path) -> Record:
    """What becomes of a checkpoint whose settings are others: the settings that are read, or the error."""
    found: Record = {}
    folders = {"case": source.parent, "work": work}
    config = json.loads((source / "config.json").read_text())
    for what, other in [("unchanged", config), *variations(config)]:
        seen = Recorder(folders)
        options = {"config": other, "tokenizer": False}
        model, _ = seen.run("load", functools.partial(maxjax.load, source, **options)) or (
            None,
            None,
        )
        if model is not None:
            seen.record["memory"] = digest(json.dumps(leaves(model)).encode())
            seen.keep("written", functools.partial(written, model, work / "written"))
            shutil.rmtree(work / "written", ignore_errors=True)
        found[what] = without_paths(seen.record, folders)
    # Of the settings written, what differs from those that the unchanged configuration gives.
    base = found["unchanged"].get("written", {}).get("content", {})
    for record in list(found.values())[1:]:
        if "content" in record.get("written", {}):
            record["written"]["content"] = [*differences(base, record["written"]["content"])]
            del record["written"]["order"]
    return json.loads(json.dumps(found))


# --- make and compare ------------------------------------------------------------------------


def record_case(case: Path, *, is_new: bool) -> tuple[Record, Arrays]:
    """The record of a case's checkpoint."""
    memory = Path("/dev/shm")  # there a flush takes no time
    with tempfile.TemporaryDirectory(dir=memory if memory.exists() else None) as folder:
        if (case / "varied").exists():
            return varied(source_of(case), Path(folder)), {}
        return observe(case, Path(folder), is_new=is_new)


def make_case(snapshot: Snapshot, folder: Path) -> str:
    """Writes a checkpoint and its record; returns what went wrong, or an empty text."""
    case = folder / snapshot.name
    if (case / "record.json").exists():
        return ""
    shutil.rmtree(case, ignore_errors=True)
    (case / "hf").mkdir(parents=True)
    try:
        snapshot.write(case / "hf")
    except Exception as error:
        shutil.rmtree(case)
        return f"{type(error).__name__}: {error}"
    if snapshot.is_varied:
        (case / "varied").touch()
    record, arrays = record_case(case, is_new=True)
    np.savez_compressed(case / "arrays.npz", **arrays)  # type: ignore[arg-type]
    (case / "record.json").write_text(json.dumps(record, indent=1))
    return ""


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """What differs between two values of JSON, one line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{place} / {key}" if place else key
            if key not in new:
                yield f"{inner}: gone (was {short(old[key])[:200]})"
            elif key not in old:
                yield f"{inner}: new ({short(new[key])[:200]})"
            else:
                yield from differences(old[key], new[key], inner)
    elif old != new:
        before, after = apart(short(old), short(new))
        order = ORDERED if words(old) == words(new) and not IN_FILES.match(place) else ""
        yield f"{order}{place}: {before} → {after}"


def words(value: Any) -> list[str]:
    """The words of a value of JSON, sorted."""
    return sorted(re.findall(r"[^\s,|;.\"\[\]]+", json.dumps(value, ensure_ascii=False)))


def short(value: Any) -> str:
    """A value as text of one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def apart(one: str, other: str) -> tuple[str, str]:
    """Two texts, shortened to the place where they begin to differ."""
    at = max(len(os.path.commonprefix([one, other])) - 40, 0)
    cut = lambda text: (
        ("…" if at else "") + text[at : at + 160] + ("…" if len(text) > at + 160 else "")
    )
    return cut(one), cut(other)


def comparable(record: Record) -> Record:
    """A record where the layout in memory of varied settings is that of the unchanged ones, or another."""
    base = record.get("unchanged", {}).get("memory")
    if base is None:
        return record
    same = lambda one: {**one, "memory": "as unchanged" if one["memory"] == base else "another"}
    return {what: same(one) if "memory" in one else one for what, one in record.items()}


def compare_case(case: Path) -> tuple[list[str], list[str]]:
    """(What differs and must not, logits that differ in their last bits)."""
    old = json.loads((case / "record.json").read_text())
    new, arrays = record_case(case, is_new=False)
    wrong = [*differences(comparable(old), comparable(new))]
    near: list[str] = []
    with np.load(case / "arrays.npz") as kept:
        before = dict(kept)
    for name in [*before, *(name for name in arrays if name not in before)]:
        if name not in arrays or name not in before:
            wrong.append(f"{name}: {'gone' if name in before else 'new'}")
            continue
        one, other = before[name], arrays[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            wrong.append(f"{name}: {one.dtype} {one.shape} → {other.dtype} {other.shape}")
        elif one.tobytes() != other.tobytes():
            largest = float(np.abs(one).max())
            apart = float(np.abs(one.astype(np.float64) - other).max()) / (largest or 1.0)
            line = f"{name}: differs by {apart:.1e} of the largest"
            (near if apart <= NEAR else wrong).append(line)
    return wrong, near


def names_in(folder: Path) -> list[str]:
    """The cases that were recorded, in the order in which they were."""
    found = sorted(folder.rglob("record.json"), key=lambda path: path.stat().st_mtime)
    return [str(path.parent.relative_to(folder)) for path in found]


def chunks(names: list[str], jobs: int) -> list[list[str]]:
    """Names for one process each: first the first case of every family, then the second ones, and so on."""
    counts: Counter[str] = Counter()
    ranks = {}
    for name in names:
        family = name.split("/")[0]
        ranks[name] = counts[family]
        counts[family] += 1
    ordered = sorted(names, key=lambda name: ranks[name])
    size = min(IN_PROCESS, -(-len(names) // jobs))
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


def run_parts(command: str, folder: Path, names: list[str], jobs: int) -> Iterator[dict[str, Any]]:
    """The results of the cases, computed by other processes."""
    found: Queue[dict[str, Any]] = Queue()

    def run(part: list[str]) -> None:
        line = [sys.executable, __file__, command, str(folder), "--part"]
        with subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n".join(part))
            process.stdin.close()
            left = list(part)
            for text in process.stdout:
                if text.startswith("{"):
                    result = json.loads(text)
                    left.remove(result["name"])
                    found.put(result)
        for name in left:  # the process ended before
            found.put({"name": name, "wrong": [f"the process ended with {process.returncode}"]})

    with ThreadPoolExecutor(jobs) as pool:
        parts = [pool.submit(run, part) for part in chunks(names, jobs)]
        for _ in names:
            yield found.get()
        for one in parts:
            one.result()


def run_part(command: str, folder: Path) -> None:
    """Runs the cases named on standard input, and prints a line of JSON for each."""
    jax.config.update("jax_num_cpu_devices", 8)
    names = sys.stdin.read().splitlines()
    known: dict[str, Snapshot] = {}
    if command == "make":
        from scripts.family_checkpoints import snapshots

        known = {one.name: one for one in snapshots()}
    for name in names:
        start = time.perf_counter()
        result: dict[str, Any] = {"name": name, "wrong": [], "near": []}
        try:
            if command == "make":
                result["wrong"] = [what] if (what := make_case(known[name], folder)) else []
            else:
                result["wrong"], result["near"] = compare_case(folder / name)
        except Exception as error:
            result["wrong"] = [f"{type(error).__name__}: {error}", traceback.format_exc(limit=-3)]
        result["seconds"] = time.perf_counter() - start
        print(json.dumps(result), flush=True)
        jax.clear_caches()


def shown(lines: list[str]) -> Iterator[str]:
    """The first lines of each part of a record, and how many more there are."""
    parts: dict[str, list[str]] = {}
    for line in lines:
        parts.setdefault(re.split(" / |/|: ", line)[0], []).append(line)
    for of_part in parts.values():
        yield from of_part[:SHOWN]
        if len(of_part) > SHOWN:
            yield f"… and {len(of_part) - SHOWN} more in '{of_part[0].split(' / ')[0]}'"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("command", choices=("make", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    parser.add_argument(
        "--ignore", default="", help="a regular expression for differences that do not count"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument(
        "--strict", action="store_true", help="orders in memory and texts count as well"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases alone")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.part:
        run_part(options.command, folder)
        return 0
    start = time.perf_counter()
    if options.command == "make":
        from scripts.family_checkpoints import snapshots

        names = [one.name for one in snapshots()]
        names = [name for name in names if not (folder / name / "record.json").exists()]
    else:
        names = names_in(folder)
    names = [name for name in names if re.search(options.only, name)]
    if options.list:
        print("\n".join(names))
        return 0
    if not names:
        print("no such case")
        return 1
    different = close = 0
    for result in run_parts(options.command, folder, names, options.jobs):
        wrong, near = result["wrong"], result.get("near", [])
        if options.ignore:
            wrong = [line for line in wrong if not re.search(options.ignore, line)]
        ordered = [line for line in wrong if line.startswith(ORDERED)]
        if not options.strict:
            wrong = [line for line in wrong if not line.startswith(ORDERED)]
        different, close = different + bool(wrong), close + bool(near and not wrong)
        state = "DIFFERS" if wrong else "near" if near else "identical"
        if options.command == "make":
            state = "not made" if wrong else "made"
        print(f"{result['name']}: {state} ({result.get('seconds', 0):.1f} s)", flush=True)
        lines = [*shown([*wrong, *near])]
        for line in lines[:MOST]:
            print(f"    {line}")
        if len(lines) > MOST:
            print(f"    … and {len(lines) - MOST} more lines")
        if ordered and not options.strict:
            places = dict.fromkeys(line.removeprefix(ORDERED).split(": ")[0] for line in ordered)
            print(f"    in another order: {', '.join([*places][:SHOWN])}, {len(places)} in all")
    print(
        f"{len(names)} cases: {len(names) - different - close} as they should be, {close} with other last "
        f"bits of logits, {different} others; {time.perf_counter() - start:.0f} s"
    )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
