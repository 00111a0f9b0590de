"""What the names in a directory say: which files make up its checkpoint.

Only names are looked at, nothing is opened. The order is that of transformers, so that a
directory is the same model to both: ``model.safetensors``, its index, then other safetensors
files, then the same of PyTorch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ..errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointIncompleteError,
    CheckpointMissingError,
    some,
)
from .formats import FORMATS, GGUF, SUFFIXES, UNREADABLE, Format

UNFINISHED = (".incomplete", ".part", ".tmp", ".crdownload", ".aria2")
"""What downloads that are under way, or were broken off, put behind a file's name."""

# What training leaves beside the weights, in the same formats.
_TRAINING = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states)([^a-z].*)?",
    re.IGNORECASE | re.DOTALL,
)
# Weights that go with a model: adapters, the projector of images, llama.cpp's statistics.
_COMPANION = re.compile(
    r"(.*_)?adapters?(_model)?[.-].*|pytorch_lora_weights\..*|.*(mmproj|imatrix).*\.gguf",
    re.IGNORECASE | re.DOTALL,
)
# The same weights in another type, beside the plain ones: unet.fp16.safetensors.
_VARIANT = re.compile(r"(.+)\.(b?f|fp|int)\d+|(.+)\.(non_)?ema")
# Mistral's and Meta's own files: the same weights once more, by other names.
_SECOND = "consolidated"
GGUF_PART = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.gguf", re.DOTALL)
"""A file of a GGUF set: stem, number, count."""

# The formats in whose sets the files are named as Hugging Face does; those are looked for first.
_SETS = [format for format in FORMATS if format.stem]
_ENDS = [format.suffixes[0] for format in _SETS]
_ENDS += [end for format in FORMATS for end in format.single]


def choose(directory: str, names: Sequence[str]) -> list[str]:
    """The files, of those in ``directory`` that are called ``names``, that make up its checkpoint.

    One file (weights, an index, the first of a GGUF set), or several that are read together.
    Empty when there are none: :func:`nothing` says why.

    Raises:
        CheckpointFormatError: Two files, indexes, sets or formats could be meant.
        CheckpointMissingError: Files of a numbered set are not there.

    Example:
        >>> choose("d", ["config.json", "model.safetensors", "optimizer.pt", "pytorch_model.bin"])
        ['model.safetensors']
        >>> choose("d", ["a.safetensors", "b.safetensors"])
        ['a.safetensors', 'b.safetensors']
    """
    models = [name for name in names if not _is_beside(name)]
    first = [name for name in models if not name.startswith(_SECOND)]
    return _choose(directory, first) or _choose(directory, models)


def unread(names: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """The files of weights in a directory that are left out when ``chosen`` are read.

    Example:
        >>> unread(["model.safetensors", "optimizer.pt", "pytorch_model.bin"], ["model.safetensors"])
        ['pytorch_model.bin']
    """

    def is_read(name: str) -> bool:
        # What an index names, and the parts of a set, are read with it.
        index = any(is_index(one, os.path.splitext(name)[1]) for one in chosen)
        split = name.endswith(".gguf") and any(map(GGUF_PART.fullmatch, chosen))
        return name in chosen or index or split

    return [name for name in names if is_weights(name) and not is_read(name)]


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, of a model or of what goes with one."""
    return _end(name) in SUFFIXES and not _TRAINING.fullmatch(name)


def _is_beside(name: str) -> bool:
    """Whether a file lies beside a model and is never one by itself."""
    return bool(_TRAINING.fullmatch(name) or _COMPANION.fullmatch(name))


def nothing(directory: str, names: Sequence[str], below: Sequence[str]) -> CheckpointError:
    """The error for a directory of which nothing can be chosen, by what is there instead.

    ``names`` are those of its directories too, each with a "/" behind it, and ``below`` are
    those directories that do hold weights.
    """
    unfinished = [name for name in names if _is_unfinished(name)]
    unreadable = [name for name in names if _end(name) in UNREADABLE and not _is_beside(name)]
    beside = [name for name in names if _end(name) in SUFFIXES and _is_beside(name)]
    cls, problem = CheckpointMissingError, "the directory holds no weights of a model"
    found, hint = names, None
    if unfinished:
        cls, problem = CheckpointIncompleteError, "the download of the weights is not complete"
        found, hint = unfinished, "Fetch them again."
    elif below:
        hint = f"Name one of its directories: {some(below, 5)}."
    elif unreadable:
        cls, problem = (
            CheckpointFormatError,
            f"{UNREADABLE[_end(unreadable[0])]} is not a format that is read",
        )
        found, hint = unreadable, "Convert it to safetensors."
    elif beside:
        found, hint = beside, "Name the model's directory, or one of these files by itself."
    shown = some(found, 5) or "an empty directory"
    expected = f"*{', *'.join(_ENDS[:-1])} or *{_ENDS[-1]}"
    return cls(problem, path=directory, expected=expected, found=shown, hint=hint)


def _end(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_unfinished(name: str) -> bool:
    stem, end = os.path.splitext(name)
    return end in UNFINISHED and _end(stem) in SUFFIXES


def is_index(name: str, end: str) -> bool:
    """Whether it is an index of files with that end; the name may have a variant in it."""
    return re.search(rf"{re.escape(end)}\.index(\.[\w-]+)?\.json\Z", name) is not None


def _choose(directory: str, names: list[str]) -> list[str]:
    gguf = [name for name in names if name.endswith(GGUF.suffixes)]
    for format in _SETS:
        found = _choose_set(directory, format.stem, format.suffixes[0], names)
        if found and gguf:
            raise CheckpointFormatError(
                "the directory holds two formats",
                path=directory,
                expected="one",
                found=f"{some(found, 3)} and {some(gguf, 3)}",
                hint="Name the file you mean.",
            )
        if found:
            return found
    for format in FORMATS:
        if found := _choose_single(directory, format, names):
            return found
    return []


def _choose_single(directory: str, format: Format, names: list[str]) -> list[str]:
    """The only file of a format, or the first that is there of its only GGUF set."""
    sets: dict[tuple[str, str], str] = {}
    for name in names:
        if name.endswith(format.single):
            match = GGUF_PART.fullmatch(name)
            sets.setdefault((match[1], match[3]) if match else (name, ""), name)
    if len(sets) > 1:
        what = "GGUF files" if format is GGUF else "files of weights"
        raise _ambiguous(directory, what, list(sets.values()))
    return list(sets.values())


def _choose_set(directory: str, stem: str, end: str, names: list[str]) -> list[str]:
    """The single file, an index, or all files of a format; nothing where there are none."""
    for name in (stem + end, f"{stem}{end}.index.json"):
        if name in names:
            return [name]
    indexes = [name for name in names if is_index(name, end)]
    # A variant stands beside the plain one: model.safetensors.index.fp16.json.
    indexes = [name for name in indexes if name.endswith(".index.json")] or indexes
    if len(indexes) > 1:
        raise _ambiguous(directory, "indexes", indexes)
    return indexes or _one_set(directory, stem, end, _plain(end, names))


def _plain(end: str, names: list[str]) -> list[str]:
    """The files of a format, without the variants of one that is there."""
    stems = [name.removesuffix(end) for name in names if name.endswith(end)]
    variants = {stem: _VARIANT.fullmatch(stem) for stem in stems}
    return [
        stem + end
        for stem, match in variants.items()
        if match is None or (match[1] or match[3]) not in variants
    ]


def _one_set(directory: str, stem: str, end: str, names: list[str]) -> list[str]:
    """``names`` as they are, unless some are numbered parts: then one complete set of these."""
    part = re.compile(rf"(.*)-(\d{{1,5}})-of-(\d{{1,5}}){re.escape(end)}", re.DOTALL | re.ASCII)
    sets: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        if (match := part.fullmatch(name)) and int(match[3]):
            parts = sets.setdefault((match[1], match[3]), {})
            if int(match[2]) in parts:  # 1 and 00001
                raise _ambiguous(directory, "files of one number", [parts[int(match[2])], name])
            parts[int(match[2])] = name
    sets = {key: parts for key, parts in sets.items() if key[0] == stem} or sets
    if len(sets) > 1:
        shown = [f"{one}-*-of-{count}{end}" for one, count in sets]
        raise _ambiguous(directory, "sets of files", shown)
    for (one, count), parts in sets.items():
        return _whole(directory, (one, count, end), parts)
    return names


def _whole(directory: str, key: tuple[str, str, str], parts: dict[int, str]) -> list[str]:
    """The files of a set (stem, count, end) in their order; refuses a set with gaps."""
    stem, count, end = key
    first = 0 if 0 in parts else 1  # most count from one
    numbers = range(first, first + int(count))
    absent = [number for number in numbers if number not in parts]
    if absent:
        name = f"{stem}-{str(absent[0]).zfill(len(count))}-of-{count}{end}"
        path = os.path.join(directory, name)
        raise CheckpointMissingError(
            f"no such file: {len(absent)} of the {len(numbers)} files of the set are missing",
            path=path,
            hint=fetch_hint(path),
        )
    return [parts[number] for number in numbers]


def fetch_hint(path: str) -> str:
    """What to do about a file that is not there.

    Example:
        >>> fetch_hint("model-00002-of-00002.safetensors")
        'Fetch the missing file.'
    """
    if any(os.path.exists(path + end) for end in UNFINISHED):
        return "Its download is not complete: fetch it again."
    return "Fetch the missing file."


def _ambiguous(directory: str, what: str, names: list[str]) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"the directory holds several {what}",
        path=directory,
        expected="one",
        found=some(names, 5),
        hint="Name the one you mean.",
    )
