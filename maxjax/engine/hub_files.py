"""Floor 6. Of all the files of a repository on the hub: those that a model is loaded from.

Only their names are looked at. Below: storage.directory, which chooses among the files of a
directory, so that the same weights are read from the hub as from a copy of all of it. Above: hub.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from ..errors import CheckpointFormatError, CheckpointMissingError, some
from ..storage.directory import choose, nothing
from .tokenizer_vocab import VOCABULARIES

BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "modules.json",
    "sentence_*_config.json",
    "[0-9]_*.json",
    "[0-9]_*/*.json",
    "maxjax_digests.json",
)
"""Patterns of the small files that are read with the weights, those of sentence-transformers too."""

_INDEX = re.compile(r"(.*)\.(safetensors|bin)\.index(\.[\w-]+)?\.json", re.DOTALL)
_GGUF_PART = re.compile(r"(.*-)\d{5,}(-of-\d{5,}\.gguf)", re.DOTALL)
# Where sentence-transformers puts the model itself, if not beside modules.json.
_FOLDER = re.compile(r"[0-9]_\w+")


def needed(repo: str, names: Sequence[str], file: str | None = None) -> list[str]:
    """The files to fetch: small ones, and the weights in one format.

    Args:
        repo: The repository, for messages.
        names: All its files, with "/" between folders.
        file: The one with the weights, where it has been named.

    Raises:
        CheckpointMissingError: ``file`` is not among them, or none has weights.
        CheckpointFormatError: The weights are in a format that is not read, or in several GGUF
            files of which one has to be named.

    Example:
        >>> needed("org/name", [
        ...     "README.md", "config.json", "model.safetensors", "onnx/model.onnx",
        ...     "original/consolidated.00.pth", "pytorch_model.bin", "tf_model.h5"])
        ['config.json', 'model.safetensors']
    """
    if file is not None:
        if file not in names:
            there = some([n for n in names if n.endswith(".gguf")], 5) or "no GGUF file"
            raise CheckpointMissingError(
                f"the repository has no file {file!r}", path=repo, found=there
            )
        weights = _parts(file, names)
    else:
        weights = _weights(repo, names)
    # Some megabytes: only where the tokenizer is read out of them, or refused by what they are.
    has_one = "tokenizer.json" in names or any(name.endswith(".gguf") for name in weights)
    patterns = BESIDE if has_one else (*BESIDE, *VOCABULARIES)
    small = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return sorted({*small, *weights})


def place(repo: str, wanted: Sequence[str], there: Sequence[str]) -> str:
    """What to open in a folder with the files ``there``: "" for all of it, or a file.

    A directory with weights in two formats is no model; here it is known which are meant.

    Example:
        >>> place("o/n", ["model.safetensors"], ["model.safetensors"])
        ''
        >>> place("o/n", ["config.json", "m.gguf"], ["config.json", "m.gguf", "other.gguf"])
        'm.gguf'
    """
    first = _weights(repo, wanted)
    gguf = [name for name in there if name.endswith(".gguf")]
    index = [name for name in first if name.endswith(".json")]
    single = gguf and "/" not in first[0] and (first[0].endswith(".gguf") or len(first) == 1)
    return first[0] if single else index[0] if gguf and index else ""


def _weights(repo: str, names: Sequence[str]) -> list[str]:
    top = [name for name in names if "/" not in name]
    gguf = [name for name in names if name.endswith(".gguf")]
    found = choose(repo, [name for name in top if name not in gguf])
    if not found:
        found = _in_folder(repo, names) or _one_gguf(repo, gguf)
    if not found:
        raise nothing(repo, top, [])
    return sorted({part for name in found for part in _parts(name, names)})


def _in_folder(repo: str, names: Sequence[str]) -> list[str]:
    """The weights of the model that a ``modules.json`` has in a folder of its own."""
    folders = sorted({name.split("/")[0] for name in names if name.count("/") == 1})
    for folder in folders if "modules.json" in names else []:
        if _FOLDER.fullmatch(folder):
            start = f"{folder}/"
            inside = [name.removeprefix(start) for name in names if name.startswith(start)]
            if found := choose(f"{repo}/{folder}", inside):
                return [start + name for name in found]
    return []


def _one_gguf(repo: str, names: Sequence[str]) -> list[str]:
    """The only GGUF file, or the first of the only set."""
    top = [name for name in names if "/" not in name]
    try:
        found = choose(repo, top)
    except CheckpointFormatError:
        found = []
    if names and not found:
        raise CheckpointFormatError(
            "the repository has several GGUF files" if top else "its GGUF files are in folders",
            path=repo, expected="one by name", found=some(names, 5),
            hint=f"Add its name: {repo}/{names[0]}.",
        )  # fmt: skip
    return found


def _parts(file: str, names: Sequence[str]) -> list[str]:
    """A file with weights and what is read with it: the files of an index, or of a set."""
    if match := _INDEX.fullmatch(file):
        stem, end = match[1], match[2]
        part = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{end}", re.DOTALL)
        parts = [name for name in names if part.fullmatch(name)]
        folder = file.rpartition("/")[0]
        others = [n for n in names if n.endswith(f".{end}") and n.rpartition("/")[0] == folder]
        return [file, *(parts or others)]
    if match := _GGUF_PART.fullmatch(file):
        return [n for n in names if n.startswith(match[1]) and n.endswith(match[2])]
    return [file]
