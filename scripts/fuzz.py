"""Damages good files at random and checks what reading them does.

    python scripts/fuzz.py                    # 50,000 mutations of every format
    python scripts/fuzz.py --format gguf --count 3000 --seed 7
    python scripts/fuzz.py --quick            # a few of each, to see that it runs
    python scripts/fuzz.py --refusal          # how long each bad file of the corpus takes
    python scripts/fuzz.py --hostile          # files that are written to hang, to fill memory or to crash

Files are read in a child process, so that a crash or an endless loop is reported, and a new child
reads the rest. Failures are: a signal, a read of over 5 s, memory that grows by over 300 MB and
twice the file, an exception that is not a CheckpointError or does not name the file in one line,
a file that the reference reader reads differently (safetensors, gguf, torch, numpy; they may
refuse what maxjax reads), and a wrong CRC of an archive that is accepted. If there is one, the exit
code is 1, and the command that reproduces it is printed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.storage.mutate import mutations  # noqa: E402

HANG_SECONDS = 5.0
GROWTH_BYTES = 300_000_000
# The limit of the child's address space: only an allocation by a damaged number exceeds it.
SPACE_BYTES = 3 << 30
# Time limits for the child's imports, and for a reference reader that does not end.
START_SECONDS, REFERENCE_SECONDS = 120.0, 20.0
SMALL_FILE, SMALL_SECONDS, ANY_SECONDS = 1_000_000, 0.1, 1.0
SHOWN = 5


@dataclass(frozen=True)
class Seed:
    """A good file: `data` is damaged, turned into a file by `wrap`, and written as `name`."""

    data: bytes
    name: str
    wrap: Callable[[bytes], bytes] = lambda data: data
    opened: str = ""  # the file that is opened, if it is another one
    beside: dict[str, bytes] = field(default_factory=dict)

    def put(self, directory: Path, damaged: bytes) -> Path:
        # A new inode each time: a reference reader may still have the old file mapped.
        path = directory / self.name
        path.unlink(missing_ok=True)
        path.write_bytes(self.wrap(damaged))
        return directory / (self.opened or self.name)


# --- the formats: good files, and whether maxjax and the reference reader read the same --------


def safetensors_seeds() -> list[Seed]:
    from tests.storage import corpus

    mixed = corpus.file_bytes(
        {"__metadata__": {"format": "pt", "\u00e9": "\\ \""}, "z": corpus.spec("F32", [0, 7], 0, 0),
         "\u91cd": corpus.spec("BF16", [2, 4], 16, 32), "s": corpus.spec("F32", [], 32, 36),
         "a": corpus.A, "f4": corpus.spec("F4", [2, 2], 36, 38)}, bytes(range(38)),
    )  # fmt: skip
    files = [corpus.GOOD, mixed, corpus._tensors(corpus.ALL_DTYPES), corpus._many(40)]
    return [Seed(data, "m.safetensors") for data in files]


def index_seeds() -> list[Seed]:
    from tests.storage import index_corpus as corpus
    from tests.storage.pytorch import corpus as torch_corpus

    shards = {corpus.S1: corpus.FIRST, corpus.S2: corpus.SECOND}
    name, bins = "model.safetensors.index.json", ("m-00001-of-00002.bin", "m-00002-of-00002.bin")
    index = json.dumps(corpus.mapped(), indent=1).encode()
    escaped = json.dumps({**corpus.mapped(), "\u91cd\U0001f642": [1.5, None, True, -3]}).encode()
    halves = [
        torch_corpus.zipped(torch_corpus.members(torch_corpus.dict_of(**{k: value})))
        for k, value in (("a", torch_corpus.A), ("b", torch_corpus.B))
    ]
    torch_index = json.dumps({"weight_map": dict(zip("ab", bins, strict=True))}).encode()
    return [
        Seed(index, name, beside=shards),
        Seed(escaped, name, beside=shards),
        Seed(corpus.SECOND, corpus.S2, opened=name, beside={**shards, name: index}),
        Seed(torch_index, "m.bin.index.json", beside=dict(zip(bins, halves, strict=True))),
    ]


def gguf_seeds() -> list[Seed]:
    from tests.storage.gguf import corpus as corpus
    from tests.storage.gguf.test_reader import seeds

    parts = {f"m-{k + 1:05d}-of-00002.gguf": corpus.part(k, 2, 2, "ab"[k]) for k in range(2)}
    return [Seed(data, "m.gguf") for data in seeds()] + [
        Seed(parts[name], name, beside=parts) for name in parts
    ]


def pytorch_seeds() -> list[Seed]:
    import zipfile

    from tests.storage.pytorch import corpus as corpus
    from tests.storage.pytorch import test_reader as oracle

    with tempfile.TemporaryDirectory() as directory:
        path = oracle.save(Path(directory) / "m.pt", oracle.small())
        whole = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            members = {n.removeprefix("m/"): archive.read(n) for n in archive.namelist()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in members.items():  # without the time, which differs in every run
            archive.writestr(zipfile.ZipInfo(f"m/{name}"), content, zipfile.ZIP_DEFLATED)

    def with_right_sum(pickled: bytes) -> bytes:
        return corpus.zipped(corpus.members(b"", {}, **{**members, "data.pkl": pickled}))

    return [
        Seed(whole, "m.pt"),
        Seed(corpus.LEGACY_VIEWS, "m.pt"),
        Seed(members["data.pkl"], "m.pt", with_right_sum),
        Seed(packed.getvalue(), "m.pt"),
    ]


def npz_seeds() -> list[Seed]:
    from tests.storage.numpy import corpus as corpus
    from tests.storage.numpy.test_npz import seeds

    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3), }   \n"
    body = corpus.deflate(corpus.npy())

    def packed(damaged: bytes) -> bytes:
        return corpus.pack(corpus.Item("a.npy", corpus.npy(), 8, body=damaged))

    return [
        *(Seed(data, "m.npz") for data in seeds()),
        Seed(header, "m.npy", lambda damaged: corpus.npy(header=damaged)),
        Seed(header, "m.npz", lambda damaged: corpus.one(corpus.npy(header=damaged))),
        Seed(body, "m.npz", packed),
    ]


def safetensors_agrees(path: Path, table: Any, arrays: dict[str, Any]) -> bool:
    import safetensors

    from tests.storage.test_corpus import assert_equals_library

    try:
        theirs = safetensors.deserialize(path.read_bytes())
    except Exception:
        return False
    assert {name for name, _ in theirs} == arrays.keys(), "other names"
    assert_equals_library(table, arrays, 0)
    return True


def index_agrees(path: Path, table: Any, arrays: dict[str, Any]) -> bool:
    """Compares with the tensors that the index points to, read without maxjax's reader of indices."""
    import safetensors

    from tests.storage.pytorch.test_reader import load_with_torch
    from tests.storage.test_corpus import raw_bytes

    assert {Path(file.path).parent for file in table.files} == {path.parent}, "left the directory"
    shard_of = json.loads(path.read_bytes())["weight_map"]
    assert arrays.keys() == shard_of.keys(), "other names"
    for name, shard in shard_of.items():
        if shard.endswith(".bin"):
            theirs = load_with_torch(path.parent / shard)[name].tobytes()
        else:
            theirs = dict(safetensors.deserialize((path.parent / shard).read_bytes()))[name]["data"]
        assert raw_bytes(arrays[name]) == bytes(theirs), name
    return True


def gguf_agrees(path: Path, table: Any, arrays: dict[str, Any]) -> bool:
    from gguf import GGUFReader

    from tests.storage.gguf import test_reader as oracle

    assert arrays.keys() == table.entries.keys(), "other names"
    for name, array in arrays.items():
        assert array.tobytes() == table.read(name).tobytes(), f"{name}: two readings differ"
    if len(table.files) == 1:
        return oracle.equals_reader_where_it_reads(path, table)
    for number, file in enumerate(table.files):
        try:
            GGUFReader(file.path)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError):
            return False
        oracle.assert_equals_reader(Path(file.path), table, number)
    return True


def pytorch_agrees(path: Path, table: Any, arrays: dict[str, Any]) -> bool:
    import zipfile

    from tests.storage.pytorch import test_reader as oracle

    is_zip = path.read_bytes()[:2] == b"PK"
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if (info.filename.endswith("data.pkl") or "/data/" in info.filename) and info.CRC:
                    archive.read(info)  # raises BadZipFile for a wrong sum
        if oracle.has_folders(path):
            return False
    try:
        theirs = oracle.load_with_torch(path)
    except Exception:
        return False
    oracle.assert_equal(arrays, theirs)
    return True


def npz_agrees(path: Path, table: Any, arrays: dict[str, Any]) -> bool:
    import numpy as np

    from tests.storage.numpy import test_npz as oracle

    content = path.read_bytes()
    try:
        is_npy = path.suffix == ".npy"
        theirs = {path.stem: np.load(path)} if is_npy else oracle.by_numpy(content)
    except Exception:
        assert path.suffix == ".npy" or oracle.crcs_hold(content), "wrong CRC"
        return False
    assert path.suffix == ".npy" or oracle.crcs_hold(content), "wrong CRC"
    oracle.assert_same(arrays, theirs)
    return True


FORMATS: dict[str, tuple[Callable[[], list[Seed]], Callable[[Path, Any, Any], bool]]] = {
    "safetensors": (safetensors_seeds, safetensors_agrees),
    "index": (index_seeds, index_agrees),
    "gguf": (gguf_seeds, gguf_agrees),
    "pytorch": (pytorch_seeds, pytorch_agrees),
    "npz": (npz_seeds, npz_agrees),
}


def damaged_files(format: str, count: int, seed: int) -> Iterator[tuple[Seed, bytes]]:
    """`count` damaged files, divided evenly between the good files; reproducible from `seed`."""
    good = FORMATS[format][0]()
    for place, each in enumerate(good):
        share = count * (place + 1) // len(good) - count * place // len(good)
        for damaged in mutations(each.data, share, 1000 * seed + place):
            yield each, damaged


# --- the child: reads one file after another, and reports before and after each -----------------


def read_checkpoint(path: Path) -> tuple[Any, dict[str, Any]]:
    """The reader under test: the table, still open, and all its arrays."""
    from maxjax.storage import open_checkpoint

    table = open_checkpoint(path)
    return table, table.read_many()


def resident(key: str) -> int:
    """Resident memory in bytes: VmRSS now, or VmHWM, the peak since `forget_peak`."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:  # not Linux: the peak of the process is used for both
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024)
    return int(text.split(f"{key}:")[1].split()[0]) * 1024


def forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def child(format: str, count: int, seed: int, first: int, reader: str, pipe: int) -> None:
    """Reads the damaged files from number `first` on; one line of JSON for each step."""
    agrees, read = FORMATS[format][1], read_checkpoint
    if reader:
        module, _, name = reader.partition(":")
        read = getattr(importlib.import_module(module), name)
    files = damaged_files(format, count, seed)
    warnings.simplefilter("ignore")
    logging.disable()
    with tempfile.TemporaryDirectory() as directory, os.fdopen(pipe, "wb", 0) as out:
        root, current = Path(directory).resolve(), None
        for number, (good, damaged) in enumerate(islice(files, first, None), first):
            if good is not current:
                current = good
                warm_up(good, root, read, agrees)
            path = good.put(root, damaged)
            one(
                number,
                path,
                read,
                agrees,
                lambda *step: out.write(json.dumps(step).encode() + b"\n"),
            )
        out.write(b'["end"]\n')


def warm_up(good: Seed, root: Path, read: Callable, agrees: Callable) -> None:
    """Reads the undamaged file, which must succeed; its imports then do not count as growth."""
    for name, content in good.beside.items():
        (root / name).write_bytes(content)
    path = good.put(root, good.data)
    if read is read_checkpoint:
        table, arrays = read(path)
        assert agrees(path, table, arrays), (
            f"{good.name}: the reference does not read the good file"
        )
        table.close()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPACE_BYTES, hard))


def one(number: int, path: Path, read: Callable, agrees: Callable, tell: Callable) -> None:
    """Reads one file, and compares it with what the reference reader reads if both accept it."""
    from maxjax.errors import CheckpointError

    forget_peak()
    before, problem, table = resident("VmRSS"), "", None
    tell("begin", number)
    start, begin = time.perf_counter(), time.process_time()
    try:
        table, arrays = read(path)
        outcome = "accepted"
    except CheckpointError as error:
        outcome = "refused"
        if "\n" in str(error) or str(path.parent) not in str(error):
            problem = f"a message that does not name the file in one line: {error}"
    except Exception as error:
        outcome, problem = "unclean", f"{type(error).__name__}: {error}"
    # Processor time: on a busy machine the time that passes may be long for any file.
    work, seconds = time.process_time() - begin, time.perf_counter() - start
    grown = resident("VmHWM") - before
    nbytes = sum(each.stat().st_size for each in path.parent.iterdir())
    tell("read", number, outcome, work, seconds, grown, nbytes, problem)
    if table is None:
        return
    try:
        tell("compared", number, agrees(path, table, arrays), "")
    except Exception as error:
        tell("compared", number, False, f"{type(error).__name__}: {error}"[:300])
    table.close()


# --- the parent ---------------------------------------------------------------------------------


@dataclass
class Result:
    """The results of the mutations of one format."""

    format: str
    counts: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    grown: int = 0
    violations: list[tuple[int, str]] = field(default_factory=list)

    def add(self, kind: str, number: int, what: str) -> None:
        """One more violation of this kind."""
        self.counts[kind] += 1
        self.violations.append((number, f"{kind}: {what}"))


@dataclass
class Fuzz:
    """One run over a format. `reader` ("module:function") replaces the reader, to test this script."""

    format: str
    count: int
    seed: int = 0
    reader: str = ""
    hang_seconds: float = HANG_SECONDS
    growth_bytes: int = GROWTH_BYTES

    def run(self) -> Result:
        """Reads all files; after a file that ended its child, a new child continues."""
        self.result, first = Result(self.format), 0
        while first < self.count:
            first = self._watch_child(first)
        return self.result

    def _watch_child(self, first: int) -> int:
        """Runs a child from number `first` on; returns the number after the last that it read."""
        ours, theirs = os.pipe()
        flags = [f"--{key}={value}" for key, value in (
            ("format", self.format), ("count", self.count), ("seed", self.seed),
            ("reader", self.reader), ("child", first), ("pipe", theirs))]  # fmt: skip
        process = subprocess.Popen([sys.executable, __file__, *flags], pass_fds=[theirs])
        os.close(theirs)
        try:
            return self._listen(process, ours)
        finally:
            process.kill()
            process.wait()
            os.close(ours)

    def _listen(self, process: subprocess.Popen, pipe: int) -> int:
        step, rest = ["start"], b""
        while True:
            patience = {"begin": self.hang_seconds, "start": START_SECONDS}
            ready, _, _ = select.select([pipe], [], [], patience.get(step[0], REFERENCE_SECONDS))
            data = os.read(pipe, 1 << 16) if ready else b""
            if not data:
                return self._lost(process, step, "" if ready else "hang")
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                step = json.loads(line)
                if step[0] == "end":
                    return self.count
                self._note(*step)

    def _lost(self, process: subprocess.Popen, step: list, kind: str) -> int:
        """Records the file at which the child ended or hung; returns the number after it."""
        if kind == "hang":
            process.kill()
        code = process.wait()
        if step[0] == "start":
            raise RuntimeError(
                f"the child for {self.format} ended with {code} before it read a file"
            )
        how = "no end" if kind else signal.Signals(-code).name if code < 0 else f"exit {code}"
        if step[0] == "begin":
            self.result.counts["mutations"] += 1
            self.result.add(kind or "crash", step[1], how)
        else:
            self.result.counts["reference failed"] += 1
        return step[1] + 1

    def _note(self, kind: str, number: int, *more: Any) -> None:
        result = self.result
        if kind == "read":
            outcome, work, seconds, grown, nbytes, problem = more
            result.counts["mutations"] += 1
            result.counts[outcome] += outcome != "unclean"
            result.slowest, result.grown = max(result.slowest, work), max(result.grown, grown)
            if problem:
                result.add("unclean", number, problem)
            if seconds > self.hang_seconds:
                result.add("hang", number, f"{seconds:.1f} s")
            if grown > self.growth_bytes + 2 * nbytes:
                result.add("growth", number, f"{grown / 1e6:.0f} MB")
        elif kind == "compared":
            compared, problem = more
            result.counts["compared"] += compared
            if problem:
                result.add("disagreement", number, problem)


KINDS = ("crash", "hang", "growth", "unclean", "disagreement")


def print_row(result: Result, seconds: float) -> None:
    counts = result.counts
    numbers = [counts[key] for key in ("mutations", "refused", "accepted", "compared")]
    bad = [counts[key] for key in KINDS]
    cells = [result.format, *numbers, f"{result.slowest * 1e3:.0f} ms",
             f"{result.grown / 1e6:.0f} MB", *bad]  # fmt: skip
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    reference = counts["reference failed"]
    note = f", the reference ended {reference} times" if reference else ""
    print(f"{result.format}: {seconds:.0f} s{note}", file=sys.stderr)


def show(result: Result, options: argparse.Namespace) -> None:
    """Prints the first violations, with the files that caused them."""
    wanted = dict(result.violations[:SHOWN])
    files = enumerate(damaged_files(result.format, options.count, options.seed))
    for number, (good, damaged) in files if wanted else ():
        if number not in wanted:
            continue
        directory = Path(tempfile.mkdtemp(prefix=f"fuzz-{result.format}-{number}-"))
        for name, content in good.beside.items():
            (directory / name).write_bytes(content)
        print(f"{wanted.pop(number)[:400]}\n    {good.put(directory, damaged)}")
        if not wanted:
            return


# --- how long a refusal takes -------------------------------------------------------------------


def refusals(format: str) -> list[tuple[float, str, int]]:
    """(seconds, case, bytes) of every refused case of a format's corpus; the least time of three."""
    from tests.storage import corpus, index_corpus
    from tests.storage.gguf import corpus as gguf_corpus
    from tests.storage.numpy import corpus as npz_corpus
    from tests.storage.pytorch import corpus as pytorch_corpus

    cases = {
        "safetensors": corpus.SAFETENSORS,
        "index": index_corpus.INDEX,
        "gguf": gguf_corpus.GGUF,
        "pytorch": pytorch_corpus.PYTORCH,
        "npz": npz_corpus.NPZ,
    }[format]
    found = []
    for case in cases:
        if case.error is None or case.name == "is_directory":
            continue
        with tempfile.TemporaryDirectory() as directory:
            path = case.build(Path(directory))
            inside = [each for each in Path(directory).rglob("*") if each.is_file()]
            nbytes = sum(each.stat().st_size for each in inside if not each.is_symlink())
            found.append((min(refusal_seconds(path) for _ in range(3)), case.name, nbytes))
    return found


def long_headers() -> Iterator[tuple[str, bytes]]:
    """Wrong safetensors headers of the greatest length that is allowed."""

    def tensors(count: int) -> bytes:
        one = '"t{0}":{{"dtype":"F32","shape":[1],"data_offsets":[{1},{2}]}}'
        entries = (one.format(i, 4 * i, 4 * i + 4) for i in range(count))
        return ("{" + ",".join(entries) + "}").encode()

    yield "a million tensors", tensors(1_000_000)
    yield "200,000 tensors without their data", tensors(199_999)
    yield "numbers", b'{"a":[' + b"1," * 44_000_000 + b"1]}"
    yield "a string", b'{"__metadata__":{"a":"' + b"x" * 90_000_000 + b'"},"b":1}'
    escaped = rb"\ud83d\ude00" * 7_000_000
    yield "escaped characters", b'{"__metadata__":{"a":"' + escaped + b'"},"b":1}'


def long_refusals() -> list[tuple[float, str, int]]:
    """(seconds, header, bytes) of each long header; the least time of three."""
    found = []
    for name, header in long_headers():
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "m.safetensors"
            path.write_bytes(len(header).to_bytes(8, "little") + header)
            found.append((min(refusal_seconds(path) for _ in range(3)), name, len(header)))
    return found


def refusal_seconds(path: Path) -> float:
    from maxjax.errors import CheckpointError

    start = time.perf_counter()
    try:
        read_checkpoint(path)
    except CheckpointError:
        return time.perf_counter() - start
    raise SystemExit(f"{path}: is read, and should be refused")


def print_refusals(formats: list[str]) -> int:
    print("| format | refused files | slowest under 1 MB | slowest of all |\n|---|---|---|---|")
    worst = 0
    for format in formats:
        found = refusals(format)
        small = max(one for one in found if one[2] < SMALL_FILE)
        slowest = max(found)
        worst |= small[0] > SMALL_SECONDS or slowest[0] > ANY_SECONDS
        told = (
            f"{t * 1e3:.1f} ms ({name}, {nbytes} bytes)" for t, name, nbytes in (small, slowest)
        )
        print(f"| {format} | {len(found)} | {' | '.join(told)} |", flush=True)
    for seconds, name, nbytes in long_refusals():
        print(f"a header of {nbytes} bytes, {name}: {seconds:.2f} s")
        worst |= seconds > ANY_SECONDS
    return int(worst)


# --- files that are hostile -----------------------------------------------------------------------

# What opening a hostile file may take: so much, and in addition some for each byte of it. The largest published
# vocabulary (XLM-V) has 901,629 tokens in 15 MB; `tokenizers` alone takes most of a second and 200 MB for them.
HOSTILE_SECONDS, HOSTILE_BYTES = 1.0, 200_000_000
_SECONDS_OF_A_BYTE, _BYTES_OF_A_BYTE = 1e-7, 20
# Seconds after which a child that opens a file is ended from outside, and its address space beyond what it has.
_ENDED_SECONDS, _HOSTILE_SPACE = 20.0, 3 << 30


def hostile_child(pipe: int) -> None:
    """Opens the cases whose numbers come on stdin: an empty line before each, a line of JSON after it."""
    from maxjax import errors
    from scripts.hostile_files import act, cases, require_printable, warm_up_action

    named = (errors.CheckpointError, errors.UserInputError, errors.UnsupportedModelError)
    warnings.simplefilter("ignore")
    logging.disable()
    listed, warm = cases(), set()
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + _HOSTILE_SPACE, hard))
    spent = lambda: sum(sum(resource.getrusage(who)[:2]) for who in (0, resource.RUSAGE_CHILDREN))
    with os.fdopen(pipe, "wb", 0) as out:
        out.write(b"\n")
        for number in map(int, sys.stdin):
            case = listed[number]
            if case.action not in warm:  # imports and compilations are not counted
                warm.add(case.action)
                warm_up_action(case.action, listed)
            with tempfile.TemporaryDirectory() as directory:
                path = case.build(Path(directory).resolve())
                on_disk = [
                    f.stat().st_blocks * 512 for f in Path(directory).rglob("*") if f.is_file()
                ]
                gc.collect()
                forget_peak()
                out.write(b"\n")
                before, begin = resident("VmRSS"), spent()
                said, problem = "accepted", ""
                try:
                    act(case.action, path)
                except named as error:
                    said = f"{type(error).__name__}: {error}"
                    try:
                        require_printable(said)
                    except ValueError as found:
                        problem = str(found)
                    said = said.replace(directory, "…")
                except BaseException as error:
                    said = problem = f"{type(error).__name__}: {error}"
                seconds, grown = spent() - begin, resident("VmHWM") - before
            if seconds > HOSTILE_SECONDS + sum(on_disk) * _SECONDS_OF_A_BYTE:
                problem = problem or "too long"
            if grown > HOSTILE_BYTES + sum(on_disk) * _BYTES_OF_A_BYTE:
                problem = problem or "too large"
            row = seconds, grown, said[:240], problem[:240]
            out.write(json.dumps(row).encode() + b"\n")


def hostile(
    chosen: Callable[[str], bool], every: int = 1
) -> Iterator[tuple[str, float, int, str, str]]:
    """(name, seconds of CPU, bytes, what was said, what is wrong) of each case, in as few children as survive."""
    from scripts.hostile_files import cases

    names = [case.name for case in cases()]
    todo = [i for i, name in enumerate(names) if chosen(name)][::every]
    while todo:
        ours, theirs = os.pipe()
        command = [sys.executable, __file__, "--hostile", f"--pipe={theirs}"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[theirs], text=True
        ) as process:
            os.close(theirs)
            assert process.stdin is not None
            with FileIO(ours) as lines:  # unbuffered: select does not see what a buffer holds
                if not lines.readline():
                    raise RuntimeError("the child ended before it opened a file")
                while todo:
                    number = todo.pop(0)
                    process.stdin.write(f"{number}\n")
                    process.stdin.flush()
                    # What it does before it opens the file, as imports, is not counted.
                    how = ""
                    try:
                        line = _line(lines, START_SECONDS) and _line(lines, _ENDED_SECONDS)
                    except TimeoutError:
                        process.kill()
                        line, how = b"", "no end"
                    if not line:
                        code = process.wait()
                        how = how or (signal.Signals(-code).name if code < 0 else f"exit {code}")
                        yield names[number], _ENDED_SECONDS, 0, how, how
                        break
                    seconds, grown, said, problem = json.loads(line)
                    yield names[number], seconds, grown, said, problem
            process.stdin.close()


def _line(lines: FileIO, seconds: float) -> bytes:
    """The next line of a child, empty if it has ended; TimeoutError if it writes none in time."""
    if not select.select([lines], [], [], seconds)[0]:
        raise TimeoutError
    return lines.readline()


def print_hostile(only: str, every: int, verbose: bool) -> int:
    count = wrong = 0
    for name, seconds, grown, said, problem in hostile(lambda name: only in name, every):
        count, wrong = count + 1, wrong + bool(problem)
        if problem or verbose:
            print(
                f"{seconds:6.2f} s {grown / 1e6:5.0f} MB  {name}: {problem or 'held'}: {said}",
                flush=True,
            )
    print(f"{count} hostile files, {wrong} with something wrong")
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=50_000, help="mutations of each format")
    parser.add_argument("--format", choices=["all", *FORMATS], default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="200 mutations of each format")
    parser.add_argument("--refusal", action="store_true", help="time the refusal of bad files")
    parser.add_argument("--hostile", action="store_true", help="open hostile files, and measure it")
    parser.add_argument("--only", default="", help="the hostile files with this in their name")
    parser.add_argument("--every", type=int, default=1, help="of these a sample: every n-th")
    parser.add_argument("--verbose", action="store_true", help="a line about each hostile file")
    for hidden in ("--reader", "--child", "--pipe"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        numbers = options.count, options.seed, int(options.child)
        child(options.format, *numbers, options.reader, int(options.pipe))
        return 0
    if options.hostile and options.pipe:
        hostile_child(int(options.pipe))
        return 0
    if options.hostile:
        return print_hostile(options.only, options.every, options.verbose)
    formats = list(FORMATS) if options.format == "all" else [options.format]
    if options.refusal:
        return print_refusals(formats)
    options.count = min(options.count, 200) if options.quick else options.count
    print("| format | mutations | refused | accepted | compared | slowest (CPU) | memory | "
          + " | ".join(KINDS) + " |\n|" + "---|" * (7 + len(KINDS)))  # fmt: skip
    bad = False
    for format in formats:
        start = time.monotonic()
        result = Fuzz(format, options.count, options.seed, options.reader).run()
        print_row(result, time.monotonic() - start)
        show(result, options)
        bad |= bool(result.violations)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
