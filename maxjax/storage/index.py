"""Floor 1. What a path means: a file, a directory, an index, or a list of these.

``open_checkpoint`` is the way in for everything above: it decides by name which files make
up the checkpoint and lets the format's parser open them. There is no trying of one reader
after another. Below: all of storage. Above: graph.weights.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import replace

from ..errors import (
    CheckpointFormatError,
    CheckpointMissingError,
    UserInputError,
    some,
)
from .entry import TensorEntry
from .files import Limits, os_error
from .safetensors import open_safetensors
from .shards import open_index as open_index
from .sniff import sniff as sniff
from .table import TensorTable

_LOG = logging.getLogger("maxjax")
_INDEX = "model.safetensors.index.json"
_INDEX_END = ".safetensors.index.json"
_SINGLE = "model.safetensors"
# The name's end of a file that is something else, whatever its content: the format's name.
_OTHER = {
    ".gguf": "GGUF",
    ".bin": "the PyTorch format",
    ".pt": "the PyTorch format",
    ".pth": "the PyTorch format",
    ".ckpt": "the PyTorch format",
    ".npz": "the NumPy format",
    ".npy": "the NumPy format",
    ".h5": "HDF5",
    ".msgpack": "flax msgpack",
    ".onnx": "ONNX",
}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_LOOKED_FOR = f"{_INDEX}, {_SINGLE} or *.safetensors"

PathLike = str | os.PathLike[str]


def open_checkpoint(
    path: PathLike | Sequence[PathLike],
    *,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
) -> TensorTable:
    """Opens a checkpoint: reads headers and index, no data.

    ``path`` is a safetensors file; an index (``*.index.json``); a directory, in which an
    index comes first, then ``model.safetensors``, then all ``*.safetensors`` that are not
    ``consolidated*``; or a list of any of these, in which the last of equal names wins.

    Raises:
        CheckpointMissingError: Nothing there, or a directory without weights.
        CheckpointFormatError: Another format, or a directory in which two could be meant.
        UserInputError: An empty list.
        CheckpointError: As for ``open_safetensors`` and ``open_index``.

    Example:
        >>> open_checkpoint("no/such/directory")
        Traceback (most recent call last):
        maxjax.errors.CheckpointMissingError: no/such/directory: no such file
    """
    if isinstance(path, str | os.PathLike):
        return _open_one(os.fspath(path), limits)
    if not path:
        raise UserInputError("no path was given. Name a file or a directory of weights.")
    return _merged([os.fspath(one) for one in path], limits, last_wins=True)


def _open_one(path: str, limits: Limits) -> TensorTable:
    if os.path.isdir(path):
        return _open_directory(path, limits)
    if path.endswith(".json"):
        return open_index(path, limits=limits)
    end = os.path.splitext(path)[1].lower()
    if end in _OTHER and os.path.exists(path):
        raise CheckpointFormatError(
            f"{_OTHER[end]} is not supported yet",
            path=path,
            expected="a safetensors file",
            found=f"a {end} file",
            hint="Use a safetensors version, or convert it.",
        )
    return open_safetensors(path, limits=limits)


def _merged(paths: list[str], limits: Limits, *, last_wins: bool) -> TensorTable:
    """One table of several checkpoints; equal names are refused unless the last one wins."""
    files, metadata = [], {}
    entries: dict[str, TensorEntry] = {}
    try:
        for path in paths:
            table = _open_one(path, limits)
            first = len(files)
            files.extend(table.files)
            for name, entry in table.entries.items():
                if name in entries and not last_wins:
                    raise CheckpointFormatError(
                        "two files of the directory hold a tensor of this name",
                        path=path,
                        tensor=name,
                        found=f"also in {files[entries[name].file].path}",
                        hint="Name the file you mean, or list them: the last one wins.",
                    )
                entries[name] = replace(entry, file=first + entry.file)
            metadata.update(table.metadata)
    except BaseException:
        for file in files:
            file.close()
        raise
    return TensorTable("safetensors", files, entries, metadata)


# --- directories ------------------------------------------------------------------------------


def _open_directory(directory: str, limits: Limits) -> TensorTable:
    try:
        # A hidden file is never meant: macOS leaves ._model.safetensors on foreign disks.
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except OSError as error:
        raise os_error(error, directory, "listing the directory failed") from error
    chosen = _choose(directory, names)
    others = _named(names, ".bin", ".pt", ".pth")
    if others:
        _LOG.info("%s: reading %s; not %s", directory, some(chosen, 3), some(others, 3))
    paths = [os.path.join(directory, name) for name in chosen]
    if len(paths) == 1:
        return _open_one(paths[0], limits)
    return _merged(paths, limits, last_wins=False)


def _named(names: list[str], *ends: str) -> list[str]:
    return [name for name in names if name.lower().endswith(ends)]


def _choose(directory: str, names: list[str]) -> list[str]:
    """The files of a directory that make up its checkpoint: an index, or safetensors files."""
    weights = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(_INDEX_END)]
    if not weights and not indexes:
        raise _no_weights(directory, names)
    if gguf := _named(names, ".gguf"):
        raise CheckpointFormatError(
            "the directory holds two formats",
            path=directory,
            expected="one",
            found=f"{some((indexes + weights), 3)} and {some(gguf, 3)}",
            hint="Name the file you mean.",
        )
    if _INDEX in indexes or len(indexes) == 1:
        return [_INDEX if _INDEX in indexes else indexes[0]]
    if len(indexes) > 1:
        raise _ambiguous(directory, "indexes", indexes)
    if _SINGLE in weights:
        return [_SINGLE]
    # Mistral's repositories hold the same weights a second time under that name.
    own = [name for name in weights if not name.startswith("consolidated")] or weights
    return _one_set(directory, own)


def _one_set(directory: str, names: list[str]) -> list[str]:
    """``names`` as they are, unless some are numbered parts: then one complete set of these."""
    parts: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_PART.fullmatch, names)):
        parts.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    if not parts:
        return names
    if len(parts) > 1:
        sets = [f"{stem}-*-of-{count:05d}.safetensors" for stem, count in parts]
        raise _ambiguous(directory, "sets of files", sets)
    (((stem, count), there),) = parts.items()
    absent = [number for number in range(1, count + 1) if number not in there]
    if absent:
        first = f"{stem}-{absent[0]:05d}-of-{count:05d}.safetensors"
        raise CheckpointMissingError(
            f"no such file: {len(absent)} of the {count} files of the set are missing",
            path=os.path.join(directory, first),
            hint="Fetch the missing files.",
        )
    return [name for name in names if _PART.fullmatch(name)]


def _ambiguous(directory: str, what: str, names: list[str]) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"the directory holds several {what}",
        path=directory,
        expected="one",
        found=some(names, 5),
        hint="Name the one you mean.",
    )


def _no_weights(directory: str, names: list[str]) -> CheckpointFormatError | CheckpointMissingError:
    for end, what in _OTHER.items():
        if found := _named(names, end):
            return CheckpointFormatError(
                f"{what} is not supported yet",
                path=directory,
                expected=_LOOKED_FOR,
                found=some(found, 3),
                hint="Use a safetensors version, or convert it.",
            )
    return CheckpointMissingError(
        "the directory holds no weights",
        path=directory,
        expected=_LOOKED_FOR,
        found=some(names, 5) or "an empty directory",
    )
