"""Flips single bits of checkpoints that maxjax wrote, and checks whether loading notices.

    python scripts/flip_bits.py                    # 2,000 flips: about a minute
    python scripts/flip_bits.py --count 20000 --seed 7 --kind orbax
    python scripts/flip_bits.py --blind            # with verify=False: what would go unnoticed

One model with weights of several types is written as a safetensors file, as a set of them, as
GGUF and as an orbax step. Three of four flips hit the bytes of an array, the others any other byte of
a file or header. Wanted: a flip in an array raises an error that names the tensor; any other flip
raises one of maxjax's errors, or changes no name, type or value. Prints a table; the exit code is
1 if anything else happens.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import maxjax
from maxjax.checkpoint.file_set import write_file
from maxjax.checkpoint.orbax.checkpoint import save
from maxjax.checkpoint.pretrained import model_data
from maxjax.errors import CheckpointError
from maxjax.graph import DeviceRef
from maxjax.graph.weights.writing import outgoing_data
from maxjax.storage.gguf.writer import plan_gguf
from maxjax.storage.open import open_checkpoint

DTYPES = ("float32", "bfloat16", "float16")
LAYERS, WIDTH = 9, 56


def make_model(seed: int) -> Any:
    """Linear layers of three types with random weights."""
    from maxjax import nn
    from maxjax.dtype import DType

    rng = np.random.default_rng(seed)
    kinds = [DTYPES[i % len(DTYPES)] for i in range(LAYERS)]
    layers = [nn.Linear(WIDTH, WIDTH + i, kind, DeviceRef.CPU()) for i, kind in enumerate(kinds)]
    model = nn.Sequential(layers)
    model.load_state_dict({
        f"{i}.weight": rng.standard_normal((WIDTH + i, WIDTH)).astype(DType.of(kind).np)
        for i, kind in enumerate(kinds)
    })  # fmt: skip
    return model


def write_gguf(path: Path, model: Any) -> None:
    """Writes the model's tensors and a little metadata."""
    tensors = [outgoing_data(data, name) for name, data in model_data(model).items()]
    metadata = {"general.architecture": "none", "general.name": "flips", "none.rope.base": 1e4}

    def pieces(found: Any) -> Iterator[Any]:
        return plan_gguf(metadata, found).pieces()

    path.mkdir()
    write_file(path / "model.gguf", tensors, pieces, plan_gguf(metadata, tensors).nbytes)


WRITERS: dict[str, Callable[[Path, Any], Any]] = {
    "safetensors": lambda path, model: maxjax.save_pretrained(model, path, config={}),
    "set": lambda path, model: maxjax.save_pretrained(
        model, path, max_shard_size=20_000, config={}
    ),
    "gguf": write_gguf,
    "orbax": lambda path, model: save(path, model, step=3),
}


def load(path: Path, verify: Any) -> dict[str, tuple[Any, bytes]]:
    """All tensors of a checkpoint: name → (type, shape and encoding; bytes)."""
    with open_checkpoint(path, verify=verify) as table:
        arrays = table.read_many()
        metadata = {key: repr(value) for key, value in sorted(table.metadata.items())}
        found: dict[str, tuple[Any, bytes]] = {
            name: ((str(e.dtype), e.shape, e.encoding), arrays[name].tobytes())
            for name, e in table.entries.items()
        }
    return found | {"metadata": (metadata, b"")}


@dataclass
class Place:
    """A range of bytes for flips: ``nbytes`` bytes of a file, which belong to one tensor or to none."""

    file: Path
    offset: int
    nbytes: int
    tensor: str | None


def find_places(folder: Path, tensors: dict[str, tuple[Any, bytes]]) -> list[Place]:
    """Ranges for every byte of every file: those of the arrays, which are stored unchanged, and the rest."""
    left, places = dict(tensors), []
    del left["metadata"]
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content, rest = file.read_bytes(), []
        for name, (_, data) in list(left.items()):
            if (at := content.find(data)) >= 0:
                rest.append((at, at + len(data)))
                places.append(Place(file, at, len(data), name))
                del left[name]
        place = 0
        for start, stop in [*sorted(rest), (len(content), 0)]:
            if start > place:
                places.append(Place(file, place, start - place, None))
            place = stop
    if left:
        raise SystemExit(
            f"{folder.name}: the bytes of {', '.join(left)} are in no file as they are"
        )
    return places


@dataclass
class Row:
    """The results of the flips of one kind of checkpoint."""

    kind: str
    where: str
    flips: int = 0
    named: int = 0
    refused: int = 0
    nothing: int = 0
    bad: int = 0
    classes: Counter[str] = field(default_factory=Counter)


def flip(place: Place, rng: random.Random) -> tuple[int, int]:
    """Flips a bit; returns the offset of its byte in the file and the number of the bit."""
    at, bit = place.offset + rng.randrange(place.nbytes), rng.randrange(8)
    with open(place.file, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    return at, bit


def judge(folder: Path, place: Place, good: Any, row: Row, verify: Any) -> str | None:
    """Loads a checkpoint with a flip; counts the result in ``row``, and returns what is wrong, if anything."""
    row.flips += 1
    try:
        found = load(folder, verify)
    except CheckpointError as error:
        row.classes[type(error).__name__] += 1
        row.named += place.tensor is not None and error.tensor == place.tensor
        row.refused += 1
        if place.tensor is not None and error.tensor != place.tensor:
            return f"the message does not name '{place.tensor}': {error}"
        return None
    except Exception as error:  # what this script looks for: there must be none
        return f"{type(error).__name__}: {error}"
    if found == good:
        row.nothing += 1
        return f"nothing was said of '{place.tensor}'" if place.tensor else None
    names = [name for name in {**found, **good} if found.get(name) != good.get(name)]
    return f"silently different: {', '.join(sorted(names))}"


def run(kind: str, count: int, seed: int, verify: Any, base: Path) -> Iterator[Row]:
    """Makes the flips of one kind of checkpoint, and prints what is wrong."""
    rng, folder = random.Random(f"{kind} {seed}"), base / kind
    WRITERS[kind](folder, make_model(seed))
    good = load(folder, True)
    places = find_places(folder, good)
    arrays = Row(kind, "array"), [place for place in places if place.tensor is not None]
    others = Row(kind, "other"), [place for place in places if place.tensor is None]
    for number in range(count):
        row, several = others if number % 4 == 3 else arrays
        # Each file is equally likely, whatever its size: the small ones matter as much.
        (place,) = rng.choices(several, [one.nbytes if one.tensor else 1 for one in several])
        before = place.file.read_bytes()
        at, bit = flip(place, rng)
        problem = judge(folder, place, good, row, verify)
        place.file.write_bytes(before)
        if problem:
            row.bad += 1
            where = place.file.relative_to(folder)
            print(f"{kind}: bit {bit} of byte {at} of {where}: {problem}", file=sys.stderr)
    assert load(folder, True) == good
    yield from (arrays[0], others[0])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Flip bits of checkpoints that maxjax wrote.")
    parser.add_argument("--count", type=int, default=2000, help="flips in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=WRITERS, action="append", help="only this kind")
    parser.add_argument("--blind", action="store_true", help="with verify=False")
    options = parser.parse_args()
    kinds = options.kind or list(WRITERS)
    verify = False if options.blind else "auto"
    columns = "{:12} {:6} {:>6} {:>6} {:>8} {:>8} {:>4}  {}"
    titles = ("kind", "where", "flips", "error", "named", "nothing", "bad", "classes")
    print(columns.format(*titles))
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            count = options.count // len(kinds)
            for row in run(kind, count, options.seed, verify, Path(folder)):
                classes = ", ".join(f"{name} {n}" for name, n in row.classes.most_common())
                numbers = row.flips, row.refused, row.named, row.nothing, row.bad
                print(columns.format(row.kind, row.where, *numbers, classes), flush=True)
                bad += row.bad
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
