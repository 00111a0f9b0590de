"""Choosing the files that make up the checkpoint in a directory, by their names alone.

No file is opened. The order is that of transformers, so that both read the same model:
``model.safetensors``, its index, then other safetensors files, then the same for PyTorch.
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
"""Suffixes of unfinished or interrupted downloads."""

# Training state beside the weights, in the same formats.
_TRAINING = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states)([^a-z].*)?",
    re.IGNORECASE | re.DOTALL,
)
# Weights that accompany a model: adapters, image projectors, llama.cpp's importance matrices.
_COMPANION = re.compile(
    r"(.*_)?adapters?(_model)?[.-].*|pytorch_lora_weights\..*|.*(mmproj|imatrix).*\.gguf",
    re.IGNORECASE | re.DOTALL,
)
# The same weights in another dtype, beside the plain ones: unet.fp16.safetensors.
_VARIANT = re.compile(r"(.+)\.(b?f|fp|int)\d+|(.+)\.(non_)?ema")
# Mistral's and Meta's own files: the same weights under other names.
_ALTERNATIVE = "consolidated"
GGUF_PART = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.gguf", re.DOTALL)
"""A file of a GGUF set: stem, number, count."""

# The formats whose sets follow Hugging Face's naming; they are searched first.
_SETS = [format for format in FORMATS if format.stem]
_SUFFIXES = [format.suffixes[0] for format in _SETS]
_SUFFIXES += [end for format in FORMATS for end in format.single]


def choose(directory: str, names: Sequence[str]) -> list[str]:
    """Chooses from ``names``, the files of ``directory``, those that make up its checkpoint.

    The result is one file (weights, an index, the first of a GGUF set), or several that are read
    together. It is empty if there are none; :func:`no_weights` then makes the error.

    Raises:
        CheckpointFormatError: several files, indexes, sets or formats could be meant.
        CheckpointMissingError: files of a numbered set are missing.

    Example:
        >>> choose("d", ["config.json", "model.safetensors", "optimizer.pt", "pytorch_model.bin"])
        ['model.safetensors']
        >>> choose("d", ["a.safetensors", "b.safetensors"])
        ['a.safetensors', 'b.safetensors']
    """
    models = [name for name in names if not _is_companion(name)]
    first = [name for name in models if not name.startswith(_ALTERNATIVE)]
    return _choose(directory, first) or _choose(directory, models)


def unread(names: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """The weight files in a directory that are not read when ``chosen`` are.

    Example:
        >>> unread(["model.safetensors", "optimizer.pt", "pytorch_model.bin"], ["model.safetensors"])
        ['pytorch_model.bin']
    """

    def is_read(name: str) -> bool:
        # The files of an index and the parts of a set are read with it.
        index = any(is_index(one, os.path.splitext(name)[1]) for one in chosen)
        split = name.endswith(".gguf") and any(map(GGUF_PART.fullmatch, chosen))
        return name in chosen or index or split

    return [name for name in names if is_weights(name) and not is_read(name)]


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, of a model or of its companions (adapters)."""
    return _end(name) in SUFFIXES and not _TRAINING.fullmatch(name)


def _is_companion(name: str) -> bool:
    """Whether a file accompanies a model and is never a model by itself."""
    return bool(_TRAINING.fullmatch(name) or _COMPANION.fullmatch(name))


def no_weights(directory: str, names: Sequence[str], below: Sequence[str]) -> CheckpointError:
    """The error for a directory without a checkpoint; it depends on what the directory holds.

    ``names`` are its files and its subdirectories, the latter with a trailing "/". ``below`` are the
    subdirectories that hold weights.
    """
    unfinished = [name for name in names if _is_unfinished(name)]
    unreadable = [name for name in names if _end(name) in UNREADABLE and not _is_companion(name)]
    companions = [name for name in names if _end(name) in SUFFIXES and _is_companion(name)]
    cls, problem = CheckpointMissingError, "the directory holds no weights of a model"
    found, hint = names, None
    if unfinished:
        cls, problem = CheckpointIncompleteError, "the download of the weights is not complete"
        found, hint = unfinished, "Download them again."
    elif below:
        hint = f"Name one of its directories: {some(below, 5)}."
    elif unreadable:
        cls, problem = (
            CheckpointFormatError,
            f"{UNREADABLE[_end(unreadable[0])]} is not a supported format",
        )
        found, hint = unreadable, "Convert it to safetensors."
    elif companions:
        found, hint = companions, "Name the model's directory, or one of these files by itself."
    shown = some(found, 5) or "an empty directory"
    expected = f"*{', *'.join(_SUFFIXES[:-1])} or *{_SUFFIXES[-1]}"
    return cls(problem, path=directory, expected=expected, found=shown, hint=hint)


def _end(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_unfinished(name: str) -> bool:
    stem, end = os.path.splitext(name)
    return end in UNFINISHED and _end(stem) in SUFFIXES


def is_index(name: str, end: str) -> bool:
    """Whether ``name`` is an index of files with suffix ``end``; a variant may be part of the name."""
    return re.search(rf"{re.escape(end)}\.index(\.[\w-]+)?\.json\Z", name) is not None


def _choose(directory: str, names: list[str]) -> list[str]:
    gguf = [name for name in names if name.endswith(GGUF.suffixes)]
    for format in _SETS:
        found = _choose_set(directory, format.stem, format.suffixes[0], names)
        if found and gguf and "config.json" not in names:
            raise CheckpointFormatError(
                "the directory holds weights in two formats",
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
    """The only file of a format, or the first existing file of its only GGUF set."""
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
    """The single file, the index, or all files of a format; empty if there are none."""
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
    """The files of a format, without variants of a file that is present."""
    stems = [name.removesuffix(end) for name in names if name.endswith(end)]
    variants = {stem: _VARIANT.fullmatch(stem) for stem in stems}
    return [
        stem + end
        for stem, match in variants.items()
        if match is None or (match[1] or match[3]) not in variants
    ]


def _one_set(directory: str, stem: str, end: str, names: list[str]) -> list[str]:
    """``names`` unchanged, or if some are numbered parts, the one complete set of these."""
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
        return _complete_set(directory, (one, count, end), parts)
    return names


def _complete_set(directory: str, key: tuple[str, str, str], parts: dict[int, str]) -> list[str]:
    """The files of the set ``key`` (stem, count, end) in order; refuses a set with gaps."""
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
    """The hint for a missing file.

    Example:
        >>> fetch_hint("model-00002-of-00002.safetensors")
        'Download the missing file.'
    """
    if any(os.path.exists(path + end) for end in UNFINISHED):
        return "Its download is not complete: download it again."
    return "Download the missing file."


def _ambiguous(directory: str, what: str, names: list[str]) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"the directory holds several {what}",
        path=directory,
        expected="one",
        found=some(names, 5),
        hint="Name the one you mean.",
    )
