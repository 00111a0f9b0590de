"""Reads checkpoints again and again while another process replaces them.

    python scripts/reader_writer.py                        # 200 reads of each kind
    python scripts/reader_writer.py --count 10000 --kind set

One process saves model A, model B, model A, … to the same path, without a pause; every value, the
configuration, the tokenizer or the metadata identify the model. This process opens the checkpoint,
reads all of it with its checksums compared, and the files that describe it. Wanted: all of it is A or
all of it is B, and it is never reported as damaged. Prints a table; exits with 1 on a failure.

A read whose error says "open it again" is counted and repeated: a step of orbax was deleted while
it was being read, or weights were replaced between opening them and reading their
configuration.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.save_trials import CONFIG, Said, _said, description, make_model, save_gguf

KINDS = ("file", "set", "alone", "gguf", "orbax")
NBYTES = 20_000


@dataclass
class Row:
    """The results of the reads of one kind of checkpoint."""

    kind: str
    reads: int = 0
    which: Counter[int] = field(default_factory=Counter)
    again: int = 0
    damaged: int = 0
    mixed: int = 0
    seconds: float = 0.0
    problems: Counter[str] = field(default_factory=Counter)


def place(kind: str, folder: str) -> str:
    """The path that is opened for a kind of checkpoint."""
    names = {"alone": "weights.safetensors", "gguf": "model.gguf"}
    return os.path.join(folder, kind, *([names[kind]] if kind in names else []))


def write(kind: str, folder: str) -> None:
    """Saves models 1, 2, 1, 2, … until it is ended."""
    from maxjax import checkpoint, save_pretrained

    models = {k: make_model(k, NBYTES) for k in (1, 2)}
    directory = os.path.join(folder, kind)
    sources = {k: os.path.join(folder, f"source {k}") for k in (1, 2)}
    for k, source in sources.items():
        if kind == "alone":
            save_pretrained(models[k], source, config={**CONFIG, "save": k})
    os.makedirs(directory, exist_ok=True)
    k = 1
    while True:
        if kind == "orbax":
            checkpoint.save(directory, models[k], keep=1)
        elif kind == "gguf":
            save_gguf(directory, k, models[k])
        elif kind == "alone":
            checkpoint.convert(sources[k], place(kind, folder), overwrite=True)
        else:
            size = NBYTES // 3 if kind == "set" else "5GB"
            config, tokenizer = {**CONFIG, "save": k}, Said(k)
            save_pretrained(
                models[k], directory, tokenizer=tokenizer, max_shard_size=size, config=config
            )  # type: ignore[arg-type]
        if k == 2:
            print("both", flush=True)
        k = 3 - k


def read(row: Row, path: str) -> None:
    """Reads the checkpoint once, as a user would do it."""
    import maxjax
    from maxjax.errors import CheckpointChangedError, CheckpointCorruptError, CheckpointError

    said: dict[str, str] = {}
    while True:
        try:
            with maxjax.load_weights(path, verify=True) as weights:
                named = weights._family.open_table().metadata.get("general.name")
                if row.kind in ("file", "set"):
                    with weights._beside.files() as folder:
                        said = _said(folder)
                arrays = [np.asarray(one.data().data) for _, one in weights.items()]
            break
        except CheckpointChangedError as error:
            if not error.replaced:
                row.problems[f"{type(error).__name__}: {error}"[:300]] += 1
                return
            row.again += 1
        except CheckpointError as error:
            row.damaged += isinstance(error, CheckpointCorruptError)
            row.problems[f"{type(error).__name__}: {error}"[:300]] += 1
            return
        finally:
            row.reads += 1
    values = {float(value) for array in arrays for value in np.unique(array)}
    k = int(min(values))
    right = {"gguf": named == f"save {k}", "file": said == description(k)}
    right["set"] = right["file"]
    if len(values) != 1 or not right.get(row.kind, True):
        row.mixed += 1
        row.problems[f"mixed: {sorted(values)}, {named}, {said}"[:300]] += 1
    row.which[k] += 1


SECONDS = 60.0  # how long the writer is waited for


def campaign(kind: str, count: int) -> Row:
    """Reads one kind ``count`` times while its writer runs, and then until both models have been read."""
    row = Row(kind)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--write", folder, "--kind", kind]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MAXJAX_COMPILE_CACHE": "0"}
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        try:
            assert writer.stdout is not None and writer.stdout.readline() == b"both\n"
            start, path = time.monotonic(), place(kind, folder)
            while (
                row.which.total() + row.problems.total() < count
                or len(row.which) < 2
                and not row.problems
                and time.monotonic() - start < SECONDS
            ):
                read(row, path)
            row.seconds = time.monotonic() - start
            if writer.poll() is not None:
                row.problems["the writer has ended"] += 1
        finally:
            writer.kill()
            writer.communicate()
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--count", type=int, default=200, help="reads of each kind")
    parser.add_argument("--write", metavar="FOLDER", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.write:
        write(given.kind[0], given.write)
    rows = []
    print(
        "| kind | reads | A / B | told to open again | called damaged | mixed | other | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for kind in given.kind or KINDS:
        rows.append(row := campaign(kind, given.count))
        other = row.problems.total() - row.damaged - row.mixed
        both = f"{row.which[1]} / {row.which[2]}"
        cells = [kind, row.reads, both, row.again, row.damaged, row.mixed, other]
        print("| " + " | ".join(map(str, [*cells, f"{row.seconds:.0f}"])) + " |", flush=True)
    for row in rows:
        for problem, times in row.problems.items():
            print(f"{row.kind}: {times} x {problem}")
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
