"""Shared by kill_saves.py and fault_saves.py: saves in a separate process, which are killed or get faults.

Run as a program, this file is that process: it imports everything once, then forks itself for each
trial that it reads from its standard input. ``fault_shim.c`` is loaded into it, so that a system
call can be made to fail, or to kill the process. All values of the k-th model that is saved are k, and
its configuration and tokenizer contain k, so a checkpoint shows which save it is from, and whether all
of it is from one save.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

KINDS = ("file", "set", "turns", "gguf", "orbax")
LARGE, SMALL = 16 << 20, 200_000  # bytes of a model
TENSORS = 8
KILL, FAIL, SHORT = 1, 2, 3  # as in fault_shim.c
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EDQUOT", "EROFS")}
START_SECONDS, ANSWER_SECONDS, EXIT_SECONDS = 120.0, 60.0, 5.0
# What a save imports: once here, and not in each process. Orbax starts threads, which no fork has.
USED = (
    "checkpoint.pretrained", "engine.generate", "graph.ops", "graph.weights.writing", "models.family",
    "models.gguf", "nn.linear", "nn.quantized", "storage.gguf.writer", "text.template", "text.tokenizer",
)  # fmt: skip
CONFIG = {"architectures": ["Of no family"], "tensors": TENSORS}


# --- the process that saves -------------------------------------------------------------------


def make_model(k: int, nbytes: int) -> Any:
    """A model all of whose values are k."""
    from maxjax import nn
    from maxjax.graph import DeviceRef

    size = nbytes // TENSORS // 4
    layers = [nn.Linear(size, 1, "float32", DeviceRef.CPU()) for _ in range(TENSORS)]
    model = nn.Sequential(layers)
    model.load_state_dict(
        {f"{i}.weight": np.full((1, size), k, np.float32) for i in range(TENSORS)}
    )
    return model


class Said:
    """A stand-in for the k-th model's tokenizer: files that contain k; every other k has one file more."""

    def __init__(self, k: int):
        self.k = k

    def files(self) -> dict[str, str]:
        found = {"tokenizer.json": json.dumps({"save": self.k})}
        return found | ({"chat_template.jinja": f"save {self.k}"} if self.k % 2 else {})


def description(k: int) -> dict[str, str]:
    """The files that describe the k-th model: name → content."""
    config = json.dumps({"dtype": "float32", **CONFIG, "save": k}, indent=2) + "\n"
    return {"config.json": config, **Said(k).files()}


def save(kind: str, path: str, k: int, model: Any, nbytes: int) -> None:
    """Saves the k-th model to a directory, as a user would."""
    import maxjax.checkpoint

    if kind == "orbax":
        maxjax.checkpoint.save(path, model, step=k, keep=2)
        return
    if kind == "gguf":
        save_gguf(path, k, model)
        return
    parts = kind == "set" or (kind == "turns" and k % 2)
    limit = nbytes // 3 if parts else "5GB"
    config, tokenizer = {**CONFIG, "save": k}, cast(Any, Said(k))
    maxjax.save_pretrained(model, path, tokenizer=tokenizer, max_shard_size=limit, config=config)


def save_gguf(path: str, k: int, model: Any) -> None:
    """Saves the model as one GGUF file, as ``maxjax convert`` does."""
    from maxjax.checkpoint.file_set import write_file
    from maxjax.checkpoint.pretrained import model_data
    from maxjax.graph.weights.writing import outgoing_data
    from maxjax.storage.gguf.writer import plan_gguf

    tensors = [outgoing_data(data, name) for name, data in model_data(model).items()]
    metadata = {"general.architecture": "none", "general.name": f"save {k}"}
    nbytes = plan_gguf(metadata, tensors).nbytes
    os.makedirs(path, exist_ok=True)
    file = os.path.join(path, "model.gguf")
    write_file(file, tensors, lambda found: plan_gguf(metadata, found).pieces(), nbytes)


def say(**message: Any) -> None:
    """Sends a message to the driving process, in one write, so that a kill cannot leave half of it."""
    os.write(1, json.dumps(message).encode() + b"\n")


def hear() -> dict[str, Any]:
    """The next message of the driving process; read byte by byte, as later lines may be for another fork."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(0)
        line += byte
    return json.loads(line)


def shim() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.shim_names.restype = ctypes.c_char_p
    return library


def save_again_and_again(job: dict[str, Any]) -> None:
    """Makes saves k, k + 1, … until something ends it; after an interrupt one more when told to."""
    k, kind, path, nbytes = job["k"], job["kind"], job["path"], job["nbytes"]
    make_model(k, nbytes)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        say(started=k)  # an interrupt may come before this returns
        while True:
            model = make_model(k, nbytes)
            save(kind, path, k, model, nbytes)
            say(saved=k)
            k += 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    say(interrupted=k)
    hear()
    save(kind, path, k + 1, make_model(k + 1, nbytes), nbytes)
    say(saved=k + 1)


def save_with_fault(job: dict[str, Any]) -> None:
    """Makes save k with a fault, reports how it ended, and makes save k + 1 when told to."""
    k, kind, path, nbytes = job["k"], job["kind"], job["path"], job["nbytes"]
    model, library = make_model(k, nbytes), shim()
    fault = (job["n"], job["action"], job["errno"], job["forever"])
    library.shim_arm(os.path.realpath(job["below"]).encode(), *fault)
    found: dict[str, Any] = {"saved": k}
    try:
        save(kind, path, k, model, nbytes)
    except Exception as error:
        found = {"error": type(error).__name__, "errno": getattr(error, "errno", None)}
        found["message"] = str(error)
    library.shim_disarm()
    names = library.shim_names().decode(errors="replace").splitlines()
    say(**found, faults=library.shim_faults(), names=names)
    if hear().get("save"):
        save(kind, path, k + 1, make_model(k + 1, nbytes), nbytes)
        say(saved=k + 1)
    say(leaving=time.time())


def serve(
    jobs: Mapping[str, Callable[[dict[str, Any]], None]], modules: Sequence[str] = USED
) -> None:
    """Forks a process for every job, and reports how it ended after the process's own messages.

    Args:
        jobs: name → function that does a job.
        modules: modules of maxjax that are imported once, for all jobs.
    """
    import maxjax

    for name in modules:
        importlib.import_module(f"maxjax.{name}")
    # Otherwise the end of each process would copy every page that it shares with this one.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say(ready=maxjax.__version__)
    while True:
        job = hear()
        pid = os.fork()
        if not pid:
            say(pid=os.getpid())
            jobs[job["job"]](job)
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        say(ended=os.waitstatus_to_exitcode(status))


# --- the process that drives ------------------------------------------------------------------


class Problem(Exception):
    """Raised when a checkpoint or a process is not as it must be."""


class Server:
    """The process above, with the shim in it; a context manager.

    Args:
        program: module that calls :func:`serve`.
    """

    def __init__(self, program: str = "scripts.save_trials") -> None:
        self.folder = tempfile.mkdtemp(prefix="maxjax-shim-")
        library = os.path.join(self.folder, "shim.so")
        source = str(ROOT / "scripts" / "fault_shim.c")
        flags = ["-O1", "-Wall", "-shared", "-fPIC"]
        subprocess.run([_compiler(), *flags, "-o", library, source, "-ldl"], check=True)
        self.stderr = open(os.path.join(self.folder, "stderr"), "w+b")
        environment = {**os.environ, "LD_PRELOAD": library, "JAX_PLATFORMS": "cpu"}
        environment["MAXJAX_COMPILE_CACHE"] = "0"
        self.process = subprocess.Popen(
            [sys.executable, "-m", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.stderr, env=environment, cwd=ROOT, bufsize=0,
        )  # fmt: skip
        self.buffer, self.pid = b"", 0
        self.hear(START_SECONDS)

    def hear(self, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """The next message of the process.

        Raises:
            Problem: no message comes in time.
        """
        end = time.monotonic() + seconds
        assert self.process.stdout is not None
        while b"\n" not in self.buffer:
            if not select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))[0]:
                raise Problem(f"nothing was heard for {seconds:.0f} s")
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise Problem(f"the process that forks has ended: {self.said()}")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def start(self, **job: Any) -> None:
        """Forks a process for a job."""
        self.send(**job)
        self.pid = self.hear()["pid"]

    def send(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def end(self, seconds: float = ANSWER_SECONDS) -> list[dict[str, Any]]:
        """The messages of the forked process until its end, and how it ended."""
        heard = []
        end = time.monotonic() + seconds
        try:
            while not heard or "ended" not in heard[-1]:
                heard.append(self.hear(max(0.0, end - time.monotonic())))
        except Problem as problem:
            self.abandon()
            raise Problem(f"it has not ended: {problem}") from None
        self.pid = 0
        return heard

    def abandon(self) -> None:
        """Ends the forked process, if there is one."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            while "ended" not in self.hear():
                pass
        self.pid = 0

    def said(self) -> str:
        """The text that was printed to the standard error since the last call."""
        text = Path(self.stderr.name).read_text(errors="replace")
        os.truncate(self.stderr.name, 0)
        self.stderr.seek(0)
        return text

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.stderr):
            if stream is not None:
                stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _compiler() -> str:
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if found is None:
        raise SystemExit("no C compiler: set CC")
    return found


def can_run(kind: str) -> bool:
    """Whether saves of this kind can run here."""
    import maxjax.checkpoint

    return kind != "orbax" or hasattr(maxjax.checkpoint, "save")


def which_save(kind: str, path: str) -> int:
    """The number of the save that all of a checkpoint is from; 0 if there is no checkpoint.

    Raises:
        Problem: it cannot be read, is from several saves, or differs from its checksums.
    """
    import maxjax
    from maxjax.errors import CheckpointError

    if not os.path.isdir(path) or not any(not name.startswith(".") for name in os.listdir(path)):
        return 0
    place = _newest_step(path) if kind == "orbax" else path
    if place is None:
        return 0
    try:
        with maxjax.load_weights(place, verify=True) as weights:
            arrays = {name: np.asarray(one.data().data) for name, one in weights.items()}
            table = weights._family.open_table()
            if kind != "orbax":
                _check_digests(table)
            named = table.metadata.get("general.name")
            with weights._beside.files() as folder:
                said = _said(folder)
    except CheckpointError as error:
        raise Problem(f"{type(error).__name__}: {error}") from error
    values = {float(value) for array in arrays.values() for value in np.unique(array)}
    if len(arrays) != TENSORS or len(values) != 1:
        raise Problem(f"mixed: {len(arrays)} tensors, values {sorted(values)[:5]}")
    found = int(values.pop())
    if kind == "orbax" and place != os.path.join(path, str(found)):
        raise Problem(f"{place} is of save {found}")
    if kind == "gguf" and named != f"save {found}":
        raise Problem(f"mixed: values of save {found}, metadata of {named}")
    if kind not in ("orbax", "gguf") and said != description(found):
        raise Problem(f"mixed: values of save {found}, described by {said}")
    return found


def _said(folder: Path) -> dict[str, str]:
    """The files in a folder that describe the model: name → content."""
    names = ("config.json", "tokenizer.json", "chat_template.jinja")
    return {name: (folder / name).read_text() for name in names if (folder / name).exists()}


def settled(kind: str, path: str, k: int) -> str | None:
    """What is wrong, after save k, for programs that look only at the names of files; None: nothing."""
    if kind in ("orbax", "gguf") or _said(Path(path)) == description(k):
        return None
    return f"after save {k} the files are {_said(Path(path))}"


def _newest_step(path: str) -> str | None:
    steps = [int(name) for name in os.listdir(path) if name.isdecimal()]
    return os.path.join(path, str(max(steps))) if steps else None


def _check_digests(table: Any) -> None:
    """Raises a Problem unless each file has a record of checksums that agrees with it, by zlib's CRC."""
    for number, file in enumerate(table.files):
        folder, name = os.path.split(file.path)
        records = json.loads(Path(folder, "maxjax_digests.json").read_bytes())["files"].get(
            name, []
        )
        sums = {
            entry.name: f"{zlib.crc32(file.pread(entry.offset, entry.nbytes)):08x}"
            for entry in table.entries.values()
            if entry.file == number
        }
        if not any(_agrees(record, file, sums) for record in records):
            raise Problem(f"{name}: no record of checksums agrees with it")


def _agrees(record: dict[str, Any], file: Any, sums: dict[str, str]) -> bool:
    length, crc = record.get("header", (0, "00000000"))
    header = f"{zlib.crc32(file.pread(0, length)):08x}"
    return (record["size"], record["tensors"], crc) == (file.size, sums, header)


def temporaries(path: str) -> list[str]:
    """The names of temporary files, of a save that is running or was ended."""
    names = os.listdir(path) if os.path.isdir(path) else []
    return [name for name in names if name.startswith(".") or "tmp" in name]


def strays(path: str) -> list[str]:
    """The names of files that do not belong to the checkpoint."""
    kept = {*description(1), "maxjax_digests.json", "model.safetensors", "model.gguf"}
    index = Path(path, "model.safetensors.index.json")
    if index.exists():
        kept |= {index.name, *json.loads(index.read_bytes())["weight_map"].values()}
    names = set(os.listdir(path)) if os.path.isdir(path) else set()
    return sorted(name for name in names - kept if not name.isdecimal())


def report(rows: Sequence[Any], table: str, how: str, file: str | None) -> int:
    """Prints a campaign's table and its problems, and writes the rows as JSON; returns 1 if there are problems.

    Args:
        how: the attribute of a row that describes the trial.
        file: path of the JSON file; None: it is not written.
    """
    print(table)
    problems = (f"{row.kind}, {getattr(row, how)}: {p}" for row in rows for p in row.problems)
    for problem, times in Counter(problems).items():
        print(f"{times} x {problem}")
    if file:
        Path(file).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    serve({"again": save_again_and_again, "fault": save_with_fault})
