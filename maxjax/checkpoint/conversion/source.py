"""What convert reads: a checkpoint of any format, open, and what lies beside it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointFormatError, UnsupportedModelError
from ...graph.weights import GGUFWeights, WeightData, Weights, load_weights
from ...models import find_family
from ...models.config import ModelConfig, read_object
from ...models.family import Family
from ...models.family import tensors as model_tensors
from ...models.gguf import config_of
from ...models.gguf.tokenizer.read import HF_JSON
from ...models.pooling import gguf_pooling, pooling_files
from ...models.ties import is_tied, says_tied, with_tie
from ...storage.files import file_range, open_regular
from ...storage.safetensors.reader import ENCODINGS
from ...storage.save.beside import settled
from ...text.tokenizer.tokenizer import gguf_tokenizer
from ..file_set import json_bytes
from ..pretrained import METADATA

_LOG = logging.getLogger("maxjax")
# What lies beside weights and belongs to the model; code is no part of it.
_BESIDE = (".json", ".txt", ".model", ".jinja", ".md")
_NOT_BESIDE = (".index.json", "maxjax_digests.json", "commit_success.txt")
_FOLDERS = ("_Pooling", "_Normalize", "_Dense")
_IN_FOLDERS = (".json", ".safetensors", ".bin")
_MOST_BESIDE = 100
# Of a model that is only converted: the names that most have.
_ANY = Family("any", (), ModelConfig, lambda *_: None)  # type: ignore[arg-type,return-value]


@dataclass
class Opened:
    """A checkpoint that is to be converted.

    Attributes:
        folder: Where what lies beside it is read.
    """

    path: Path
    weights: Weights
    tensors: dict[str, WeightData]
    config: dict[str, Any] | None
    beside: dict[str, Path]
    folder: Path = Path()
    made: dict[str, bytes] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=lambda: dict(METADATA))
    as_given: bool = False


@contextmanager
def opened(source: str | os.PathLike[str]) -> Iterator[Opened]:
    with ExitStack() as stack:
        yield settled(lambda: _opened(source, stack))


def _opened(source: str | os.PathLike[str], stack: ExitStack) -> Opened:
    weights = stack.enter_context(load_weights(source))
    table = weights._family.open_table()
    # Of steps the newest.
    path = Path(weights._beside.directory if table.format == "orbax" else os.fsdecode(source))
    table.verify = True  # or a broken value would get a new checksum that agrees with it
    if isinstance(weights, GGUFWeights):
        return Opened(path, weights, {}, None, {})
    found = {name: weights[name].data() for name in table.entries}
    # Copied: a large checkpoint takes its time, and what describes it may be replaced meanwhile.
    folder = stack.enter_context(weights._beside.files(copied=True))
    file = folder / "config.json"
    config = read_object(file) if file.is_file() else None
    if config is not None:
        config = _settled(config, found, path)
    # Beside a single file may lie anything; with a configuration it is a model's directory.
    beside = _beside(folder) if path.is_dir() or config is not None else {}
    opened = Opened(path, weights, found, config, beside, folder)
    if table.format == "safetensors":
        kept = {k: v for k, v in table.metadata.items() if k != ENCODINGS}
        opened.metadata, opened.as_given = kept, True
    return opened


def _settled(config: dict[str, Any], found: Mapping[str, WeightData], path: Path) -> dict[str, Any]:
    """The configuration; where it ties a head that has other values than the table, it unties it."""
    family, named = None, found
    with contextlib.suppress(UnsupportedModelError, CheckpointFormatError):
        family = find_family(config)
        named = family.adapt(found)
    if not says_tied(family, config):
        return config
    tied = is_tied(family or _ANY, named, True, path=path)
    return config if tied else with_tie(config, False)


def _beside(folder: Path) -> dict[str, Path]:
    """The files that belong to the model, by name; of directories only those of embeddings."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or len(found) >= _MOST_BESIDE:
            continue
        if path.is_dir() and path.name.endswith(_FOLDERS):
            inside = sorted(p for p in path.iterdir() if p.name.endswith(_IN_FOLDERS))
            found.update({f"{path.name}/{p.name}": p for p in inside if p.is_file()})
        elif path.name.endswith(_BESIDE) and not path.name.endswith(_NOT_BESIDE) and path.is_file():
            found[_deep_name(path)] = path
    return found


def _deep_name(path: Path) -> str:
    """What ``flat_name`` undoes: a module's file in a step of orbax."""
    return f"{path.stem}/config.json" if path.stem.endswith(_FOLDERS) else path.name


def content(path: Path) -> Iterator[memoryview]:
    """The bytes of a file that goes along, in pieces."""
    file = open_regular(path)
    try:
        yield from file_range(file, 0, file.size)
    finally:
        file.close()


def as_hugging_face(found: Opened) -> None:
    """Gives what was opened as a GGUF file the names and files of Hugging Face."""
    weights = found.weights
    assert isinstance(weights, GGUFWeights)
    found.tensors, found.config = model_tensors(weights), config_of(weights)
    pooling = gguf_pooling(weights.metadata, path=weights._path)
    if pooling is not None:
        files = pooling_files(pooling)
        found.made.update((name, json_bytes(content)) for name, content in files.items())
    try:
        tokenizer = gguf_tokenizer(weights.metadata, path=weights._path)
    except UnsupportedModelError as error:
        _LOG.warning("%s; the new checkpoint has no tokenizer", error)
        return
    if tokenizer is not None:
        files = tokenizer.files()
        if HF_JSON in weights.metadata:  # the file itself, with all that only others heed
            files["tokenizer.json"] = weights.metadata[HF_JSON]
        found.made.update((n, text.encode("utf-8", "surrogateescape")) for n, text in files.items())
