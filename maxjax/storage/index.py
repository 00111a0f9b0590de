"""Floor 1. What a path means: a file, a directory, an index, or a list of these.

``open_checkpoint`` is the way in for everything above: it decides by name which files make
up the checkpoint and lets the format's parser open them. There is no trying of one reader
after another; of a name that says nothing the first bytes decide. Below: all of storage.
Above: graph.weights.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..errors import (
    CheckpointFormatError,
    CheckpointMissingError,
    UserInputError,
    some,
)
from .entry import TensorEntry
from .files import Limits, open_regular, os_error
from .safetensors import open_safetensors
from .shards import open_index as open_index
from .sniff import SNIFF_BYTES, zip_kind
from .sniff import sniff as sniff
from .table import TensorTable

_LOG = logging.getLogger("maxjax")
_SAFETENSORS, _PYTORCH, _GGUF, _NPZ, _NPY = "safetensors", "pytorch", "gguf", "npz", "npy"
_ENDS = {
    ".safetensors": _SAFETENSORS,
    ".gguf": _GGUF,
    ".bin": _PYTORCH,
    ".pt": _PYTORCH,
    ".pth": _PYTORCH,
    ".ckpt": _PYTORCH,
    ".npz": _NPZ,
    ".npy": _NPY,
}
# The name's end of a file that is something else, whatever its content: the format's name.
_OTHER = {
    ".h5": "HDF5",
    ".msgpack": "flax msgpack",
    ".onnx": "ONNX",
    ".pkl": "a pickle",
    ".pickle": "a pickle",
}
# What a file whose name says nothing is, as `sniff` calls it.
_BY_CONTENT = {"GGUF": _GGUF, "pickle": _PYTORCH, "NumPy array (.npy)": _NPY}


class _Kind(NamedTuple):
    """How the files of a format are named in a directory."""

    index: str
    single: str
    end: str

    @property
    def index_end(self) -> str:
        """What any index of the format ends with."""
        return f"{self.end}.index.json"

    @property
    def part(self) -> re.Pattern[str]:
        """One of a set: stem, number, count."""
        return re.compile(rf"(.*)-(\d{{5}})-of-(\d{{5}}){re.escape(self.end)}")


# In the order in which they are looked for.
_KINDS = (
    _Kind("model.safetensors.index.json", "model.safetensors", ".safetensors"),
    _Kind("pytorch_model.bin.index.json", "pytorch_model.bin", ".bin"),
)
# What training leaves beside the weights, in the same format.
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states).*")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_LOOKED_FOR = (
    "model.safetensors or *.safetensors, pytorch_model.bin or *.bin, *.gguf, *.pt, *.pth or *.npz"
)

PathLike = str | os.PathLike[str]


def open_checkpoint(
    path: PathLike | Sequence[PathLike],
    *,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
) -> TensorTable:
    """Opens a checkpoint: reads headers and index, no data.

    ``path`` is a file (safetensors, GGUF, PyTorch, npz, npy); an index (``*.index.json``); a
    directory; or a list of any of these, in which the last of equal names wins. In a directory
    safetensors come first: an index, then ``model.safetensors``, then all ``*.safetensors`` that
    are not ``consolidated*``; then PyTorch files in the same order, without what training leaves beside
    them (``optimizer.pt``); then one GGUF file or one set of them; then one ``.npz``.

    Raises:
        CheckpointMissingError: Nothing there, or a directory without weights.
        CheckpointFormatError: Another format, or a directory in which two could be meant.
        UserInputError: An empty list.
        CheckpointError: As for the readers of the formats and ``open_index``.

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
    return _reader(_format_of(path))(path, limits=limits)


def _reader(format: str) -> Callable[..., TensorTable]:
    # Imported when a file of the format is met: most programs meet one.
    if format == _GGUF:
        from .gguf import open_gguf as reader
    elif format == _PYTORCH:
        from .pytorch import open_pytorch as reader
    elif format == _NPZ:
        from .npz import open_npz as reader
    elif format == _NPY:
        from .npy import open_npy as reader
    else:
        reader = open_safetensors
    return reader


def _format_of(path: str) -> str:
    """The format of a file: by its name, or by its first bytes where that says nothing."""
    end = os.path.splitext(path)[1].lower()
    if end in _ENDS:
        return _ENDS[end]
    if end in _OTHER and os.path.exists(path):
        raise CheckpointFormatError(
            f"{_OTHER[end]} is not a format that is read",
            path=path,
            expected=f"one of {', '.join(_ENDS)}",
            found=f"a {end} file",
            hint="Convert it to safetensors.",
        )
    file = open_regular(path)
    try:
        start = file.pread(0, min(file.size, SNIFF_BYTES))
    finally:
        file.close()
    what = sniff(start)
    if what == "zip archive":
        return _NPZ if zip_kind(start).endswith("(NumPy .npz)") else _PYTORCH
    return _BY_CONTENT.get(what or "", _SAFETENSORS)


def _merged(paths: list[str], limits: Limits, *, last_wins: bool) -> TensorTable:
    """One table of several checkpoints; equal names are refused unless the last one wins."""
    files, metadata, formats = [], {}, set()
    entries: dict[str, TensorEntry] = {}
    try:
        for path in paths:
            table = _open_one(path, limits)
            first = len(files)
            formats.add(table.format)
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
    return TensorTable(" and ".join(sorted(formats)), files, entries, metadata)


# --- directories ------------------------------------------------------------------------------


def _open_directory(directory: str, limits: Limits) -> TensorTable:
    try:
        # A hidden file is never meant: macOS leaves ._model.safetensors on foreign disks.
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except OSError as error:
        raise os_error(error, directory, "listing the directory failed") from error
    chosen = _choose(directory, names)
    rest = [name for name in names if _is_weights(name) and not _is_part_of(name, chosen)]
    if rest:
        _LOG.info("%s: reading %s; not %s", directory, some(chosen, 3), some(rest, 3))
    paths = [os.path.join(directory, name) for name in chosen]
    if len(paths) == 1:
        return _open_one(paths[0], limits)
    return _merged(paths, limits, last_wins=False)


def _is_weights(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _ENDS and not _NOT_WEIGHTS.match(name)


def _is_part_of(name: str, chosen: list[str]) -> bool:
    """Whether a file is read with the chosen ones: one of them, or one that an index may name."""
    index = any(one.endswith(f"{os.path.splitext(name)[1]}.index.json") for one in chosen)
    split = any(_SPLIT.fullmatch(one) for one in chosen) and name.endswith(".gguf")
    return name in chosen or index or split


def _choose(directory: str, names: list[str]) -> list[str]:
    """The files of a directory that make up its checkpoint."""
    gguf = [name for name in names if name.endswith(".gguf")]
    for kind in _KINDS:
        found = _choose_kind(directory, kind, names)
        if found and kind.end == ".safetensors" and gguf:
            raise CheckpointFormatError(
                "the directory holds two formats",
                path=directory,
                expected="one",
                found=f"{some(found, 3)} and {some(gguf, 3)}",
                hint="Name the file you mean.",
            )
        if found:
            return found
    if gguf:
        return _one_gguf(directory, gguf)
    for ends in ((".pt", ".pth", ".ckpt"), (".npz",)):
        found = [name for name in names if name.endswith(ends) and _is_weights(name)]
        own = [name for name in found if not name.startswith("consolidated")] or found
        if len(own) > 1:
            raise _ambiguous(directory, "files of weights", own)
        if own:
            return own
    raise _no_weights(directory, names)


def _choose_kind(directory: str, kind: _Kind, names: list[str]) -> list[str]:
    """An index, the single file, or all files of a format; nothing where there are none."""
    weights = [name for name in names if name.endswith(kind.end) and _is_weights(name)]
    indexes = [name for name in names if name.endswith(kind.index_end)]
    if kind.index in indexes or len(indexes) == 1:
        return [kind.index if kind.index in indexes else indexes[0]]
    if len(indexes) > 1:
        raise _ambiguous(directory, "indexes", indexes)
    if kind.single in weights:
        return [kind.single]
    # Mistral's repositories hold the same weights a second time under that name.
    own = [name for name in weights if not name.startswith("consolidated")] or weights
    return _one_set(directory, kind, own)


def _one_set(directory: str, kind: _Kind, names: list[str]) -> list[str]:
    """``names`` as they are, unless some are numbered parts: then one complete set of these."""
    parts: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(kind.part.fullmatch, names)):
        parts.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    if not parts:
        return names
    if len(parts) > 1:
        sets = [f"{stem}-*-of-{count:05d}{kind.end}" for stem, count in parts]
        raise _ambiguous(directory, "sets of files", sets)
    (((stem, count), there),) = parts.items()
    absent = [number for number in range(1, count + 1) if number not in there]
    if absent:
        first = f"{stem}-{absent[0]:05d}-of-{count:05d}{kind.end}"
        raise CheckpointMissingError(
            f"no such file: {len(absent)} of the {count} files of the set are missing",
            path=os.path.join(directory, first),
            hint="Fetch the missing files.",
        )
    return [name for name in names if kind.part.fullmatch(name)]


def _one_gguf(directory: str, names: list[str]) -> list[str]:
    """The only GGUF file of a directory, or the first of its only split set."""
    sets = {(m[1], m[3]) if (m := _SPLIT.fullmatch(name)) else (name, "") for name in names}
    # A projector of images lies beside the model it belongs to.
    models = {one for one in sets if not one[0].startswith("mmproj")} or sets
    if len(models) > 1:
        raise _ambiguous(directory, "GGUF files", names)
    stem, count = next(iter(models))
    return [f"{stem}-00001-of-{count}.gguf" if count else stem]


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
        if found := [name for name in names if name.lower().endswith(end)]:
            return CheckpointFormatError(
                f"{what} is not a format that is read",
                path=directory,
                expected=_LOOKED_FOR,
                found=some(found, 3),
                hint="Convert it to safetensors.",
            )
    return CheckpointMissingError(
        "the directory holds no weights",
        path=directory,
        expected=_LOOKED_FOR,
        found=some(names, 5) or "an empty directory",
    )
