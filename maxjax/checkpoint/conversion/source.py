"""The source of a conversion: an open checkpoint of any format, and the files beside it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...engine.generate.defaults import FILE
from ...errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    UnsupportedModelError,
)
from ...graph.weights import FileWeights, GGUFWeights, WeightData, load_weights
from ...models import find_family
from ...models.config import ModelConfig, read_config
from ...models.family import Family
from ...models.family import tensors as model_tensors
from ...models.gguf import config_of
from ...models.gguf.sampling import sampling_config
from ...models.gguf.tokenizer.read import HF_JSON, end_ids
from ...models.names import unwrapped
from ...models.pooling import gguf_pooling
from ...models.quantized import with_blocks
from ...models.ties import is_tied, says_tied, with_tie
from ...storage.digests import MAX_SIDECARS
from ...storage.files import OpenFile, is_there
from ...storage.safetensors.reader import ENCODINGS
from ...storage.save.beside import Files, files_of, open_sidecar
from ...storage.sidecars import sidecar_kind
from ...text.tokenizer.tokenizer import gguf_tokenizer
from ..file_set import json_bytes
from ..pretrained import METADATA, deep_name, sentence_files

_LOG = logging.getLogger("maxjax")
# For a model that maxjax can only convert: the names that most families use.
_ANY = Family("any", (), ModelConfig, lambda *_: None)  # type: ignore[arg-type,return-value]


@dataclass
class Opened:
    """A checkpoint that is to be converted.

    Attributes:
        path: path of the checkpoint.
        weights: the open checkpoint.
        tensors: tensors by name; empty for GGUF until :func:`as_hugging_face` fills it.
        config: content of ``config.json``, or None.
        beside: files beside the weights that are copied, open, by name.
        folder: the files beside the weights, for those that are read.
        made: files that the conversion makes itself: name → content.
        metadata: metadata of the safetensors files to write.
        as_given: whether tensors keep the order of the source.
    """

    path: Path
    weights: FileWeights
    tensors: dict[str, WeightData]
    config: dict[str, Any] | None
    beside: dict[str, OpenFile]
    folder: Files = field(default_factory=lambda: files_of("."))
    made: dict[str, bytes] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=lambda: dict(METADATA))
    as_given: bool = False


@contextmanager
def opened(source: str | os.PathLike[str], *, is_single: bool) -> Iterator[Opened]:
    """Opens the source; ``is_single`` says that only the tensors are wanted, and no file beside them."""
    with load_weights(source) as weights:
        yield _opened(source, weights, is_single)


def _opened(source: str | os.PathLike[str], weights: FileWeights, is_single: bool) -> Opened:
    table = weights._family.open_table()
    # For a directory of orbax steps, the newest step.
    path = Path(weights._beside.directory if table.format == "orbax" else os.fsdecode(source))
    table.verify = True  # or a damaged value would get a new, matching checksum
    if isinstance(weights, GGUFWeights):
        return Opened(path, weights, {}, None, {})
    found = {name: weights[name].data() for name in table.entries}
    with weights._beside.files(copied=not is_single) as folder:
        file = folder / "config.json"
        config = read_config(file, folder) if is_there(file) else None
        if config is not None:
            config = _with_true_tie(config, found, path)
        # A single file may have any neighbours; with a config.json they are those of a model. They stay
        # open, as they may be replaced while a large checkpoint is converted.
        is_model = path.is_dir() or config is not None
        beside = _beside(folder) if is_model and not is_single else {}
        beside.pop("config.json", None)
    opened = Opened(path, weights, found, config, beside, folder)
    if table.format == "safetensors":
        kept = {k: v for k, v in table.metadata.items() if k != ENCODINGS}
        opened.metadata, opened.as_given = kept, True
    return opened


def _with_true_tie(
    config: dict[str, Any], found: Mapping[str, WeightData], path: Path
) -> dict[str, Any]:
    """The configuration, untied if output head and embedding table have different values."""
    family, named = None, found
    with contextlib.suppress(UnsupportedModelError, CheckpointFormatError):
        family = find_family(config)
        named = family.read(unwrapped(found))
    if not says_tied(family, config):
        return config
    tied = is_tied(family or _ANY, named, True, path=path)
    return config if tied else with_tie(config, False)


def _beside(folder: Files) -> dict[str, OpenFile]:
    """The files that belong to the model, open, by their names in the new checkpoint.

    Raises:
        CheckpointUnsafeError: one is a link out of the directory.
        CheckpointLimitError: one is too large, or there are too many.
        CheckpointError: one cannot be read.
    """
    found: dict[str, OpenFile] = {}
    for name in folder.names():
        kind = sidecar_kind(name)
        if kind == "adapter":  # its weights are not converted
            continue
        try:
            found[deep_name(name)] = open_sidecar(folder / name)
        except CheckpointError as error:
            if kind != "document":
                raise
            _LOG.warning("%s; the new checkpoint has no %s", error, name)
    if len(found) > MAX_SIDECARS:
        raise CheckpointLimitError(
            "there are too many files beside the weights", path=folder,
            expected=f"at most {MAX_SIDECARS}", found=len(found),
        )  # fmt: skip
    return found


def as_hugging_face(found: Opened) -> None:
    """Give an open GGUF checkpoint the names and files of Hugging Face."""
    weights = found.weights
    assert isinstance(weights, GGUFWeights)
    found.config = config_of(weights)
    found.tensors = find_family(found.config).names.write(model_tensors(weights))
    found.config = with_blocks(found.config, found.tensors)
    chosen = sampling_config(weights.metadata, path=weights._path)
    ends = list(end_ids(weights.metadata, path=weights._path))
    if chosen or len(ends) > 1:
        chosen |= {"eos_token_id": ends} if ends else {}
        found.made[FILE] = json_bytes(chosen)
    pooling = gguf_pooling(weights.metadata, path=weights._path)
    if pooling is not None:
        size: Any = find_family(found.config).config.from_dict(found.config)
        found.made |= sentence_files(pooling, size.hidden_size)
    try:
        tokenizer = gguf_tokenizer(weights.metadata, path=weights._path)
    except UnsupportedModelError as error:
        _LOG.warning("%s; the new checkpoint has no tokenizer", error)
        return
    if tokenizer is not None:
        files = tokenizer.files()
        if HF_JSON in weights.metadata:  # the original file, with the settings maxjax ignores
            files["tokenizer.json"] = weights.metadata[HF_JSON]
        found.made.update((n, text.encode("utf-8", "surrogateescape")) for n, text in files.items())
